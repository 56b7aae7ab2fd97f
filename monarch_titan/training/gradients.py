"""``semi_sync_method = "none"``: replicas average the gradients of every step, as data parallelism does.

The quorum comes before the forward pass, one all-reduce of all gradients in a flat float32 buffer after the backward
pass, and the optimizer steps only when all ranks of the replica agree that the average arrived.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from monarch_titan.training.outer import Outcome
from monarch_titan.training.replica import digest, local

if TYPE_CHECKING:
    from torchft import Manager
    from torchtitan.components.optimizer import OptimizersContainer


class CommittedOptimizers:
    """TorchTitan's optimizers, stepping only when the step commits."""

    def __init__(self, optimizers: OptimizersContainer, sync: GradientSync) -> None:
        self._optimizers, self._sync = optimizers, sync

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._sync.commit():
            self._optimizers.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizers, name)


class GradientSync:
    """Averages gradients over the replicas in quorum at every step."""

    interval = 1
    """Inner steps between two that commit with the peers."""

    def __init__(self, manager: Manager, model_parts: list[torch.nn.Module]) -> None:
        self._manager, self._model_parts = manager, model_parts
        self._outcome: Outcome | None = None
        self._begin, self._bytes = 0.0, 0

    def begin_step(self) -> None:
        """Form the step's quorum; a replica that is behind heals here."""
        self._manager.start_quorum()
        self._outcome = None

    def average(self) -> None:
        """Replace each gradient by its mean over the replicas in quorum. Call after the last backward pass."""
        self._begin = time.monotonic()
        gradients = [
            local(parameter.grad)
            for model in self._model_parts
            for parameter in model.parameters()
            if parameter.grad is not None
        ]
        if not gradients:
            self._bytes = 0
            return
        buffer = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
        self._bytes = buffer.numel() * buffer.element_size()
        self._manager.allreduce(buffer, reduce_op=ReduceOp.AVG).wait()
        for gradient, mean in zip(gradients, buffer.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view(gradient.shape))

    def commit(self) -> bool:
        """Whether the optimizer may step."""
        committed = self._manager.should_commit()
        self._outcome = Outcome(
            committed=committed,
            contributed=True,
            participants=self._manager.num_participants(),
            bytes=self._bytes,
            seconds=time.monotonic() - self._begin,
        )
        return committed

    def end_step(self) -> Outcome | None:
        """The outcome of the step that has just ended."""
        return self._outcome

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
