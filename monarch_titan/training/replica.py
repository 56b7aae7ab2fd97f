"""What a trainer knows of the replica it belongs to; given by the TrainerActor, absent in plain torchrun."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch_titan.control.events import Event, Report


@dataclass(kw_only=True, slots=True)
class ReplicaContext:
    """The trainer's place in the run and its line to the controller."""

    replica: int
    attempt: int
    """0 at first; a later attempt must take its state from a peer before it trains."""
    rank: int
    lighthouse: str
    """URL of TorchFT's quorum server."""
    lighthouse_attempt: int
    hostname: str
    """Name under which peers reach this host."""
    report: Callable[[Event | Report], None]
    load_step: int | None = None
    """Step of the checkpoint to go on from, if any."""
    lacks_part: bool = False
    """Whether its peers go on from a checkpoint of which it has no part."""
    data: Any = None
    """Dataloader state of the last outer step that this replica committed, if any."""
    commands: queue.SimpleQueue[Future[None] | None] = field(default_factory=queue.SimpleQueue)
    """While held at the end: a future means attend one more quorum and then set it, None means leave."""

    def ids(self) -> dict[str, int]:
        """What every Report names."""
        return {"replica": self.replica, "attempt": self.attempt, "rank": self.rank}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself; detached, sharing memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """``shard`` as this rank's part of a DTensor laid out as ``tensor``, which checkpoints can divide anew; shares
    memory. The shard itself where ``tensor`` is none."""
    if not isinstance(tensor, DTensor):
        return shard
    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard in the host's memory, always a copy: TorchFT serves it while training goes on, and moves what
    is on an accelerator there anyway, so that a copy on the device would only take memory twice."""
    return local(tensor).to("cpu", copy=True)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 (first 16 hex digits) over the bytes of the tensors' local shards, to compare replicas bit for bit."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(local(tensor).contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]
