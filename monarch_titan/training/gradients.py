"""``semi_sync_method = "none"``: replicas average the gradients of every step, as data parallelism does.

The quorum comes before the forward pass, and one all-reduce of all gradients in a flat float32 buffer, with weights and
counts of batches at its end, after the backward pass. When a peer is lost in it, those who live average the same
gradients again. One whose peers have committed without it takes their state, which has its gradients if they arrived,
and trains the step that they are at.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from monarch_titan.training.outer import Outcome
from monarch_titan.training.replica import digest, local

if TYPE_CHECKING:
    from monarch_titan.training.batches import Batches, SeenBatches
    from monarch_titan.training.quorum import ReplicaManager


class Overtaken(Exception):
    """The peers have committed this step, and their state is now ours: train the next one."""


class GradientSync:
    """Averages gradients over the replicas in quorum at every step.

    Args:
        manager: TorchFT's manager, with synchronous quorum.
        model_parts: the modules whose gradients are averaged.
        batches: where this rank is in its data.
        seen: how far the parameters are in everybody's.
        report: told how an attempt ended.
    """

    interval = 1
    """Inner steps between two that commit with the peers."""

    def __init__(
        self,
        manager: ReplicaManager,
        model_parts: list[torch.nn.Module],
        batches: Batches,
        seen: SeenBatches,
        report: Callable[[Outcome], None],
    ) -> None:
        self._manager, self._model_parts = manager, model_parts
        self._batches, self._seen, self._report = batches, seen, report
        self._in_quorum = False
        self._outcome: Outcome | None = None

    def begin_step(self) -> None:
        """Be in the step's quorum; a replica that is behind heals here."""
        if not self._in_quorum:
            with self._manager.waiting():
                self._join()
        self._in_quorum = False

    def _join(self) -> None:
        self._manager.start_quorum()
        if self._manager.healed:
            self._batches.go_to(self._seen.own)

    def average(self) -> None:
        """Replace each gradient by its mean over the replicas in quorum, and commit. Call after the last backward pass.

        Raises Overtaken when a peer's state has replaced ours meanwhile, FloatingPointError when ours are not finite.
        """
        gradients = [
            local(parameter.grad)
            for model in self._model_parts
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        if gradients and not torch.stack([gradient.isfinite().all() for gradient in gradients]).all():
            raise FloatingPointError("gradients are not finite in this step")
        with self._manager.waiting():
            while not self._attempt(gradients):
                self._join()
                if self._manager.healed:
                    self._in_quorum = True
                    raise Overtaken

    def _attempt(self, gradients: list[torch.Tensor]) -> bool:
        begin = time.monotonic()
        device = gradients[0].device if gradients else torch.device("cpu")
        tail = torch.zeros(1 + self._seen.size, dtype=torch.float32, device=device)
        tail[0] = 1.0
        self._seen.write(tail[1:], self._batches.drawn)
        buffer = torch.cat([*(gradient.reshape(-1).float() for gradient in gradients), tail])
        self._manager.allreduce(buffer, reduce_op=ReduceOp.SUM).wait()
        committed = self._manager.should_commit()
        if committed:
            *sums, tail = buffer.split([*(gradient.numel() for gradient in gradients), tail.numel()])
            self._seen.read(tail[1:])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_((total / tail[0]).view(gradient.shape))
        outcome = Outcome(
            committed=committed,
            contributed=True,
            participants=self._manager.num_participants(),
            bytes=buffer.numel() * buffer.element_size(),
            seconds=time.monotonic() - begin,
        )
        if committed:
            self._outcome = outcome
        else:
            self._report(outcome)
        return committed

    def end_step(self) -> None:
        """Say how the step ended, now that the optimizer has taken it."""
        if self._outcome is not None:
            self._report(self._outcome)
        self._outcome = None

    def state_dict(self) -> dict[str, Any]:
        """Nothing that is not in the model."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, see ``state_dict``."""

    def expect(self, outer_step: int) -> None:
        """Nothing, see ``state_dict``."""

    def digest(self) -> str:
        """Hash of the parameters, which are the global ones here."""
        return digest(parameter for model in self._model_parts for parameter in model.parameters())

    def optimizer_digest(self) -> str:
        """Empty: there is no outer optimizer."""
        return ""
