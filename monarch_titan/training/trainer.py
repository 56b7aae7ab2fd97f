"""MonarchTrainer: TorchTitan's Trainer as one rank of a replica.

Nothing of the core trainer is copied. Its components are rebound while it builds itself, and the loop is followed
through the methods that it calls.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from monarch_titan import upstream
from monarch_titan.config.converters import convert_model
from monarch_titan.config.sections import Base, FaultTolerance, Monarch
from monarch_titan.control.events import Step, TrainerFinished
from monarch_titan.training import cpu
from monarch_titan.training.checkpoints import ReplicaCheckpoints, of_replica
from monarch_titan.training.membership import Membership
from monarch_titan.training.quorum import PeersFinished, ReplicaManager
from monarch_titan.training.replica import ReplicaContext


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
            launcher = MonarchTrainer.Config.launcher
            if launcher is not None and not kwargs and "RANK" not in os.environ:
                return launcher(self)
            cpu.adapt(self)
            convert_model(self)
            return Trainer.Config.build(self, **kwargs)

    config: Config

    def __init__(self, config: Config, *, context: ReplicaContext | None = None) -> None:
        self.context = context
        self.manager: ReplicaManager | None = None
        self.membership: Membership | None = None
        self._joined = self._stepped = False
        self._micro_batches = 0
        super().__init__(config)
        if isinstance(self.checkpointer, ReplicaCheckpoints):
            self.checkpointer.trainer = self
        if self.parallel_dims.pp_enabled:
            upstream.take_microbatches(self.pp_schedule)
        if context is not None and self._reports_steps(context.rank):
            self.metrics_processor.logger = StepReporter(
                self.metrics_processor.logger, context, config.metrics.log_freq, self.parallel_dims.world_size
            )

    def _reports_steps(self, rank: int) -> bool:
        """True on the first rank that knows the loss, which of a pipeline are those with its last stage."""
        dims = self.parallel_dims
        return rank % (dims.world_size // dims.pp) == 0 and (not dims.pp_enabled or self.pp_has_last_stage)

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
            if self.context is not None and not self._sharded:
                shard_by_replica(self.config, self.context.replica)
                self.config.checkpoint = of_replica(self.config.checkpoint)
                self._sharded = True
            return model

        self._sharded = False
        return parallelize_and_rebind

    # The loop ------------------------------------------------------------------------------------------------------

    def should_continue_training(self) -> bool:
        """TorchTitan's condition; its first call comes after a checkpoint was loaded and joins the peers."""
        if not self._joined:
            self._joined = True
            if self.manager is not None and self.context is not None:
                self.membership = Membership(self, self.manager, self.context)
            if isinstance(self.checkpointer, ReplicaCheckpoints):
                self.checkpointer.join()
            if self.membership is not None:
                try:
                    self.membership.catch_up()
                except PeersFinished:
                    return False
        return super().should_continue_training()

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """TorchTitan's, which draws a random number for the data's workers that a resumed run must not miss."""
        if isinstance(self.checkpointer, ReplicaCheckpoints):
            data_iterable = self.checkpointer.undrawn(data_iterable)
        return super().batch_generator(data_iterable)

    def post_dataloading_process(self, input_dict: Any, labels: torch.Tensor) -> Any:
        """TorchTitan's, without compiling the code that builds attention masks where a kernel does not need them."""
        if upstream.accelerator() is not None:
            return super().post_dataloading_process(input_dict, labels)
        with torch.compiler.set_stance("force_eager"):  # 3 s of CPU in every process, for a mask made in 1 ms
            return super().post_dataloading_process(input_dict, labels)

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        """One micro-batch."""
        loss = super().forward_backward_step(**kwargs)
        self._micro_batches += 1
        if self.membership is not None and self._micro_batches == self.gradient_accumulation_steps:
            self.membership.end_backward()
        return loss

    def train_step(self, data_iterator: Any) -> None:
        """One inner step, and the outer step when it completes a window."""
        self._micro_batches = 0
        if self.membership is not None:
            self.membership.begin_step()
        super().train_step(data_iterator)
        if not self._stepped:
            self._stepped = True
            # TorchTitan does this after the step that follows the loaded one, a number that healing changes.
            timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=timeout, parallel_dims=self.parallel_dims)
        if self.membership is not None:
            self.membership.end_step()

    def train(self) -> None:
        """Train all steps, then wait for the peers: whoever lags behind can only heal from those who stay."""
        super().train()
        if self.context is None:
            return
        self._report_finished(self.context)
        while (attended := self.context.commands.get()) is not None:
            try:
                if self.manager is not None and self.manager.attend():
                    self._report_finished(self.context)
            finally:
                attended.set_result(None)

    def _report_finished(self, context: ReplicaContext) -> None:
        outer_step, state = 0, ""
        if self.membership is not None:
            outer_step, state = self.membership.manager.current_step(), self.membership.sync.digest()
        context.report(TrainerFinished(**context.ids(), step=self.step, outer_step=outer_step, state=state))

    def close(self) -> None:
        super().close()
        if self.manager is not None:
            self.manager.shutdown(wait=False)


@functools.cache
def monarch_trainer(trainer: type[Trainer]) -> type[MonarchTrainer]:
    """MonarchTrainer over a trainer of TorchTitan's, such as Flux's, that is derived from the core one."""
    if issubclass(MonarchTrainer, trainer):
        return MonarchTrainer
    if issubclass(trainer, MonarchTrainer):
        return trainer

    @dataclass(kw_only=True, slots=True)
    class Config(trainer.Config):  # type: ignore[misc, name-defined]
        torchtitan: Base = field(default_factory=Base)
        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        monarch: Monarch = field(default_factory=Monarch)

        build = MonarchTrainer.Config.build

    return type(f"Monarch{trainer.__name__}", (MonarchTrainer, trainer), {"Config": Config})


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
