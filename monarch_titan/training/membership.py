"""A trainer's part in a run with peers: the quorum, the synchronisation, and what the controller is told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_titan.control.events import OuterStep, OuterStepCommitted, ReplicaState
from monarch_titan.training import healing
from monarch_titan.training.batches import Batches, SeenBatches
from monarch_titan.training.gradients import GradientSync
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
        drawn: batches of its shard that come before where the dataloader stands.
    """

    def __init__(self, trainer: MonarchTrainer, manager: ReplicaManager, context: ReplicaContext, drawn: int) -> None:
        self.trainer, self.manager, self.context = trainer, manager, context
        self.committed = False
        """Whether the inner step that has just ended was the last of a window, and its outer step committed."""
        healing.register(manager, trainer)
        config = trainer.config
        self.seen = SeenBatches(config.monarch.num_replicas, context.replica)
        manager.register_state_dict_fn("batches", self.seen.load_state_dict, self.seen.state_dict)
        self.batches = Batches(trainer.dataloader, drawn, context.positions)
        self.batches.through(lambda: trainer.batch_generator(trainer.dataloader))
        parts, batches, seen = trainer.model_parts, self.batches, self.seen
        self.sync: OuterSync | GradientSync
        if config.fault_tolerance.semi_sync_method == "none":
            self.sync = GradientSync(manager, parts, batches, seen, self.report)
        else:
            self.sync = OuterSync(manager, parts, config.fault_tolerance, batches, seen, self.report)

    def catch_up(self) -> None:
        """Join the peers' next outer step at once, rather than train a window that healing throws away.

        Raises PeersFinished when there is nothing left to train. Gradients averaged every step need no such step: the
        quorum before the first one heals.
        """
        if self.manager.needs_state and isinstance(self.sync, OuterSync):
            self.sync.join()
            self.trainer.checkpointer.save(self.trainer.step)  # as its peers do at this step

    def begin_step(self) -> None:
        self.committed = False
        self.sync.begin_step()

    def end_backward(self) -> None:
        """After the last backward pass of a step. Raises Overtaken when the step is to be taken anew."""
        if isinstance(self.sync, GradientSync):
            self.sync.average()

    def end_step(self) -> None:
        self.sync.end_step()

    def report(self, outcome: Outcome) -> None:
        """Tell the controller how an outer step ended, and where the data stands when it committed."""
        context, outer_step = self.context, self.manager.current_step()
        self.committed, first_batch = outcome.committed, self.batches.began
        if outcome.committed:
            self.report_position(outer_step)
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
                    first_batch=first_batch,
                    seen_batches=list(self.seen.counts),
                )
            )

    def report_position(self, outer_step: int) -> None:
        """Have the controller know where the data stands, for a later life of this replica."""
        data = self.batches.mark()
        ids = self.context.ids()
        drawn, lineage = self.batches.drawn, self.seen.lineage
        self.context.report(OuterStepCommitted(**ids, outer_step=outer_step, batches=drawn, data=data, lineage=lineage))

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
