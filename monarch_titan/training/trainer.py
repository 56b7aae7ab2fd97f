"""MonarchTrainer: TorchTitan's Trainer as one rank of a replica.

Nothing of the core trainer is copied. Its components are rebound while it builds itself, and the loop is followed
through the methods that it calls.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from monarch_titan import upstream
from monarch_titan.config.sections import Base, FaultTolerance, Monarch
from monarch_titan.control.events import OuterStep, OuterStepCommitted, ReplicaState, Step, TrainerFinished
from monarch_titan.training import cpu, healing
from monarch_titan.training.gradients import CommittedOptimizers, GradientSync
from monarch_titan.training.outer import Outcome, OuterSync
from monarch_titan.training.quorum import PeersFinished, ReplicaManager
from monarch_titan.training.replica import ReplicaContext, digest


class MonarchTrainer(Trainer):
    """One rank's training loop, in quorum with the same rank of the other replicas.

    Without a context (``RANK`` set by torchrun, nobody else) it trains one replica plainly.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        torchtitan: Base = field(default_factory=Base)
        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        monarch: Monarch = field(default_factory=Monarch)

        launcher: ClassVar[Callable[[Any], Any] | None] = None
        """What ``build()`` gives in a process that is not a trainer; set by ``monarch_titan.run``."""

        def build(self, **kwargs: Any) -> Any:
            """A trainer in a trainer's process, the run in any other: TorchTitan's main calls train() on either."""
            launcher = type(self).launcher
            if launcher is not None and not kwargs and "RANK" not in os.environ:
                return launcher(self)
            cpu.adapt(self)
            return Trainer.Config.build(self, **kwargs)

    config: Config

    def __init__(self, config: Config, *, context: ReplicaContext | None = None) -> None:
        self.context = context
        self.manager: ReplicaManager | None = None
        self.sync: OuterSync | GradientSync | None = None
        self._joined = self._stepped = False
        self._micro_batches = 0
        super().__init__(config)
        if context is not None and context.rank == self._reporting_rank():
            self.metrics_processor.logger = StepReporter(
                self.metrics_processor.logger, context, config.metrics.log_freq, self.parallel_dims.world_size
            )

    def _reporting_rank(self) -> int:
        """The first rank that knows the loss: pipeline stages before the last do not."""
        if not self.parallel_dims.pp_enabled:
            return 0
        world = self.parallel_dims.world_size
        return world // self.parallel_dims.pp * (self.parallel_dims.pp - 1)

    def init_distributed(self) -> ParallelDims:
        """Form the replica's own process group, then the manager that joins its peers."""
        dims = super().init_distributed()
        config = self.config
        if self.context is not None and config.fault_tolerance.enable:
            self.manager = ReplicaManager(config.fault_tolerance, config.monarch, self.context)
        config.model_spec.parallelize_fn = self._rebound(config.model_spec.parallelize_fn)
        return dims

    def _rebound(self, parallelize: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
        """TorchTitan calls this after applying the user's overrides and before it builds the dataloader."""

        def parallelize_and_rebind(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
            model = parallelize(model, **kwargs)
            if upstream.accelerator() is None:
                cpu.use_sum_reductions(model)
            if self.context is not None:
                shard_by_replica(self.config, self.context.replica)
            return model

        return parallelize_and_rebind

    # The loop ------------------------------------------------------------------------------------------------------

    def should_continue_training(self) -> bool:
        """TorchTitan's condition; its first call, after a checkpoint was loaded, joins the peers."""
        if not self._joined:
            self._joined = True
            try:
                self._join()
            except PeersFinished:
                return False
        return super().should_continue_training()

    def _join(self) -> None:
        if self.manager is None:
            return
        healing.register(self.manager, self)
        if self.config.fault_tolerance.semi_sync_method == "none":
            self.sync = GradientSync(self.manager, self.model_parts)
            self.optimizers = CommittedOptimizers(self.optimizers, self.sync)
        else:
            self.sync = OuterSync(self.manager, self.model_parts, self.config.fault_tolerance)
        if self.context.data is not None:
            self.dataloader.load_state_dict(self.context.data)
        if self.manager.needs_state and isinstance(self.sync, OuterSync):
            # Join the peers' next outer step at once, rather than train a window that healing throws away.
            self._report(self.sync.join())

    def post_dataloading_process(self, input_dict: Any, labels: torch.Tensor) -> Any:
        """TorchTitan's, without compiling the code that builds attention masks where a kernel does not need them."""
        if upstream.accelerator() is not None:
            return super().post_dataloading_process(input_dict, labels)
        with torch.compiler.set_stance("force_eager"):  # 3 s of CPU in every process, for a mask made in 1 ms
            return super().post_dataloading_process(input_dict, labels)

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        """One micro-batch; after the last one of a step the gradients are averaged (``none`` only)."""
        loss = super().forward_backward_step(**kwargs)
        self._micro_batches += 1
        if isinstance(self.sync, GradientSync) and self._micro_batches == self.gradient_accumulation_steps:
            self.sync.average()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        """One inner step, and the outer step when it completes a window."""
        self._micro_batches = 0
        if self.sync is not None:
            self.sync.begin_step()
        super().train_step(data_iterator)
        if not self._stepped:
            self._stepped = True
            # TorchTitan does this after the step that follows the loaded one, a number that healing changes.
            timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        if self.sync is not None and (outcome := self.sync.end_step()) is not None:
            self._report(outcome)

    def train(self) -> None:
        """Train all steps, then wait for the peers: whoever lags behind can only heal from those who stay."""
        super().train()
        if self.context is None:
            return
        self._report_finished()
        while (attended := self.context.commands.get()) is not None:
            if self.manager is not None and self.manager.attend():
                self._report_finished()
            attended.set_result(None)

    def close(self) -> None:
        super().close()
        if getattr(self, "manager", None) is not None:
            self.manager.shutdown(wait=False)

    # Reports -------------------------------------------------------------------------------------------------------

    def _ids(self) -> dict[str, int]:
        return {"replica": self.context.replica, "attempt": self.context.attempt, "rank": self.context.rank}

    def _report(self, outcome: Outcome) -> None:
        context, manager = self.context, self.manager
        outer_step = manager.current_step()
        if outcome.committed:
            state = self.dataloader.state_dict()
            context.report(OuterStepCommitted(**self._ids(), outer_step=outer_step, data=state))
        if outcome.committed and self.config.monarch.check_replicas == "outer_step":
            context.report(self._state())
        if context.rank == 0:
            context.report(
                OuterStep(
                    replica=context.replica,
                    outer_step=outer_step,
                    step=self.step,
                    participants=outcome.participants,
                    committed=outcome.committed,
                    contributed=outcome.contributed,
                    seconds=round(outcome.seconds, 4),
                    bytes=outcome.bytes * self.parallel_dims.world_size,
                    error=None if outcome.committed else manager.why_not(),
                )
            )

    def _state(self) -> ReplicaState:
        return ReplicaState(
            replica=self.context.replica,
            rank=self.context.rank,
            outer_step=self.manager.current_step(),
            step=self.step,
            healed=self.manager.healed,
            global_parameters=self.sync.digest(),
            outer_optimizer=self.sync.optimizer_digest(),
            optimizer=digest(healing.optimizer_tensors(self)),
            lr=float(self.optimizers.optimizers[0].param_groups[0]["lr"]),
        )

    def _report_finished(self) -> None:
        outer_step = self.manager.current_step() if self.manager is not None else 0
        state = self.sync.digest() if self.sync is not None else ""
        self.context.report(TrainerFinished(**self._ids(), step=self.step, outer_step=outer_step, state=state))


def shard_by_replica(config: MonarchTrainer.Config, replica: int) -> None:
    """Make ``config.dataloader`` build the shard of one replica's rank out of ``num_replicas`` times as many.

    The dataloader's configuration keeps its type, so that whatever looks for it by type still finds it.
    """
    base, num_replicas = type(config.dataloader), config.monarch.num_replicas

    class Sharded(base):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def build(self, *, dp_world_size: int, dp_rank: int, **kwargs: Any) -> Any:
            return base.build(
                self, dp_world_size=dp_world_size * num_replicas, dp_rank=dp_world_size * replica + dp_rank, **kwargs
            )

    config.dataloader = copy.copy(config.dataloader)
    config.dataloader.__class__ = Sharded


class StepReporter(BaseLogger):
    """Passes TorchTitan's metrics on to its own logger and the step's figures to the controller."""

    def __init__(self, logger: BaseLogger, context: ReplicaContext, log_freq: int, world_size: int) -> None:
        self._logger, self._context = logger, context
        self._log_freq, self._world_size = log_freq, world_size

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Called by TorchTitan every ``metrics.log_freq`` steps, with the loss averaged over the replica's ranks."""
        self._logger.log(metrics, step)
        seconds = metrics["time_metrics/end_to_end(s)"] * self._log_freq
        self._context.report(
            Step(
                replica=self._context.replica,
                step=step,
                loss=float(metrics["loss_metrics/global_avg_loss"]),
                tokens=round(metrics["throughput(tps)"] * seconds * self._world_size),
                seconds=round(seconds, 4),
            )
        )

    def close(self) -> None:
        self._logger.close()
