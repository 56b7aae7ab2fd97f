"""Float buffers that training changes: replicas average them with the parameters, or they would drift apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from monarch_titan.training.replica import digest, host_copy, local


class FloatBuffers:
    """The float buffers of a model that a checkpoint holds, such as the router biases of a mixture of experts.

    Each outer step sets them to their mean over the replicas that contribute. Tables that can be computed anew, which
    no checkpoint holds, are the same everywhere as it is.

    Args:
        model_parts: the modules whose buffers they are.
    """

    def __init__(self, model_parts: Iterable[torch.nn.Module]) -> None:
        self._buffers: list[torch.Tensor] = []
        for model in model_parts:
            kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
            self._buffers += [
                local(buffer) for buffer in model.buffers() if id(buffer) in kept and buffer.is_floating_point()
            ]
        self.size = sum(buffer.numel() for buffer in self._buffers)
        """Float32 elements in an all-reduce."""
        self._common = [host_copy(buffer) for buffer in self._buffers]

    def write(self, part: torch.Tensor) -> None:
        """Put the values into ``part``, float32 (size,)."""
        for view, buffer in self._views(part):
            view.copy_(buffer)

    def read(self, part: torch.Tensor, weight: torch.Tensor) -> None:
        """Take the mean out of the sum over replicas of their parts; those who did not contribute have left zeros."""
        if not self._buffers or weight.item() == 0:
            return
        for view, buffer in self._views(part):
            buffer.copy_(view / weight)
        self._common = [host_copy(buffer) for buffer in self._buffers]

    def digest(self) -> str:
        """Hash of the values after the last outer step, empty where there are none."""
        return digest(self._common) if self._common else ""

    def state_dict(self) -> list[torch.Tensor]:
        """The values after the last outer step, in the host's memory."""
        return self._common

    def load_state_dict(self, common: list[torch.Tensor]) -> None:
        """Take a peer's; the buffers themselves come with its model."""
        self._common = [tensor.clone() for tensor in common]

    def _views(self, part: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        parts = part.split([buffer.numel() for buffer in self._buffers])
        for view, buffer in zip(parts, self._buffers, strict=True):
            yield view.view(buffer.shape), buffer
