"""A trainer's part in a run with peers: the quorum, the synchronisation, and what the controller is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_titan.control.events import OuterStep, OuterStepCommitted, ReplicaState
from monarch_titan.training import healing
from monarch_titan.training.gradients import CommittedOptimizers, GradientSync
from monarch_titan.training.outer import Outcome, OuterSync
from monarch_titan.training.quorum import ReplicaManager
from monarch_titan.training.replica import ReplicaContext, digest

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer


class Membership:
    """Joins a built trainer to its peers.

    Args:
        trainer: knows its model, optimizers and dataloader, and has loaded its checkpoint if there is one.
        manager: made before the model, so that peers see the replica come.
        context: the replica's place in the run.
    """

    def __init__(self, trainer: MonarchTrainer, manager: ReplicaManager, context: ReplicaContext) -> None:
        self.trainer, self.manager, self.context = trainer, manager, context
        self.committed = False
        """Whether the inner step that has just ended was the last of a window, and its outer step committed."""
        healing.register(manager, trainer)
        self.sync: OuterSync | GradientSync
        if trainer.config.fault_tolerance.semi_sync_method == "none":
            self.sync = GradientSync(manager, trainer.model_parts)
            trainer.optimizers = CommittedOptimizers(trainer.optimizers, self.sync)
        else:
            self.sync = OuterSync(manager, trainer.model_parts, trainer.config.fault_tolerance)
        if context.data is not None:
            trainer.dataloader.load_state_dict(context.data)

    def catch_up(self) -> None:
        """Join the peers' next outer step at once, rather than train a window that healing throws away.

        Raises PeersFinished when there is nothing left to train. Gradients averaged every step need no such step: the
        quorum before the first one heals.
        """
        if self.manager.needs_state and isinstance(self.sync, OuterSync):
            self.report(self.sync.join())
            self.trainer.checkpointer.save(self.trainer.step)  # as its peers do at this step

    def begin_step(self) -> None:
        self.committed = False
        self.sync.begin_step()

    def end_backward(self) -> None:
        """After the last backward pass of a step."""
        if isinstance(self.sync, GradientSync):
            self.sync.average()

    def end_step(self) -> None:
        if (outcome := self.sync.end_step()) is not None:
            self.report(outcome)

    def report(self, outcome: Outcome) -> None:
        """Tell the controller how an outer step ended, and where the data stands when it committed."""
        context, outer_step = self.context, self.manager.current_step()
        self.committed = outcome.committed
        if outcome.committed:
            position = self.trainer.dataloader.state_dict()
            context.report(OuterStepCommitted(**context.ids(), outer_step=outer_step, data=position))
            if self.trainer.config.monarch.check_replicas == "outer_step":
                context.report(self.state())
        if context.rank == 0:
            context.report(
                OuterStep(
                    replica=context.replica,
                    outer_step=outer_step,
                    step=self.trainer.step,
                    participants=outcome.participants,
                    committed=outcome.committed,
                    contributed=outcome.contributed,
                    seconds=round(outcome.seconds, 4),
                    bytes=outcome.bytes * self.trainer.parallel_dims.world_size,
                    error=None if outcome.committed else self.manager.why_not(),
                )
            )

    def state(self) -> ReplicaState:
        """Hashes of what must be equal between replicas, and of what a healed replica must have taken from a peer."""
        return ReplicaState(
            replica=self.context.replica,
            rank=self.context.rank,
            outer_step=self.manager.current_step(),
            step=self.trainer.step,
            healed=self.manager.healed,
            global_parameters=self.sync.digest(),
            outer_optimizer=self.sync.optimizer_digest(),
            optimizer=digest(healing.optimizer_tensors(self.trainer)),
            lr=float(self.trainer.optimizers.optimizers[0].param_groups[0]["lr"]),
        )
