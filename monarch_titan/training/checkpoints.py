"""Checkpoints of a replica from which a killed run goes on bit for bit.

TorchTitan's CheckpointManager writes them, with all of its options. Ours is what it does not know: the global
parameters and the outer optimizer, the manager's count of outer steps, random number generators, and when: at the
first inner step at or after a multiple of ``checkpoint.interval`` at which the replica commits with its peers. All
replicas save there, so that the same step of every replica's folder makes up the whole run.

What of it is whole, and which step the run goes on from, is for ``control.checkpoints`` to say.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import DATALOADER, CheckpointManager

from monarch_titan import upstream
from monarch_titan.control.checkpoints import Seal, read_seal, seal_path, step_folder
from monarch_titan.control.events import OuterStepCommitted

if TYPE_CHECKING:
    from monarch_titan.training.replica import ReplicaContext
    from monarch_titan.training.trainer import MonarchTrainer

# The key of what is ours among TorchTitan's "train_state", "optimizer", "lr_scheduler" and "dataloader".
REPLICA = "replica"


def of_replica(config: Any) -> Any:
    """The configuration of TorchTitan's CheckpointManager as that of a replica's; any other as it is."""
    if type(config) is not CheckpointManager.Config:
        return config
    config = copy.copy(config)
    config.__class__ = ReplicaCheckpoints.Config
    return config


class ReplicaCheckpoints(CheckpointManager):
    """Saves with the peers and seals what it saved; loads what the controller chose."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """TorchTitan's options."""

    trainer: MonarchTrainer
    """Set by the trainer, which has a context, once it is built."""
    _random: bytes | None = None

    def join(self) -> None:
        """Load what only a member of the quorum has, after TorchTitan's own; have it saved from now on."""
        if not self.enable:
            return
        part = _Part(self.trainer)
        if self._context.load_step:
            self._load_from(step_folder(Path(self.folder), self._context.load_step), part)
        self.states[REPLICA] = part

    def _load_from(self, folder: Path, part: _Part) -> None:
        trainer, context = self.trainer, self._context
        reads_on = DATALOADER not in self.exclude_from_loading
        if self._heals:
            # Its peers have all but its place in the data, which it may have had no time to report.
            if reads_on and context.data is None:
                dcp.load({DATALOADER: trainer.dataloader}, checkpoint_id=str(folder))
            return
        seal = read_seal(folder, 0)
        part.expect(seal)
        with torch.no_grad():
            dcp.load({REPLICA: part}, checkpoint_id=str(folder))
        self._random = part.random
        if trainer.membership is not None and reads_on:
            # A replica that dies before its next outer step goes on from here.
            position = trainer.dataloader.state_dict()
            context.report(OuterStepCommitted(**context.ids(), outer_step=seal.outer_step, data=position))

    @property
    def _context(self) -> ReplicaContext:
        assert self.trainer.context is not None
        return self.trainer.context

    @property
    def _heals(self) -> bool:
        """Whether a peer's state will replace our own."""
        return self.trainer.manager is not None and self.trainer.manager.needs_state

    def undrawn(self, data: Iterable[Any]) -> Iterable[Any]:
        """``data``, whose iterator sets the random number generators to those of the checkpoint once it is made."""
        return _Undrawn(data, self._restore_random)

    def _restore_random(self) -> None:
        if self._random is not None:
            set_random_state(self._random)
            self._random = None

    def _find_load_step(self, folder: str = "") -> int:
        """None: without a step that the controller chose, training begins anew, whatever lies in the folder."""
        return -1

    def _load(self, step: int = -1) -> bool:
        return not self._heals and super()._load(self._context.load_step or -1)

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        membership = self.trainer.membership
        first = curr_step == 1 and self.enable_first_step_checkpoint
        if membership is None or last_step or first:
            return super()._should_save(curr_step, last_step)
        passed = curr_step // self.interval > (curr_step - membership.sync.interval) // self.interval
        return self.enable and not self.load_only and membership.committed and passed

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        folder = step_folder(Path(self.folder), curr_step)
        seal_path(folder, dist.get_rank()).unlink(missing_ok=True)
        seal = self._sealing(folder)
        super()._save(curr_step, last_step)
        if last_step and self.last_save_model_only:
            return True  # nothing that training can go on from
        if self.save_future is None:
            seal()
        else:
            self.save_future.add_done_callback(lambda saved: saved.exception() or seal())
        return True

    def _sealing(self, folder: Path) -> Callable[[], None]:
        """What seals this rank's files once they are written; says what was true when they were saved."""
        membership, replicas = self.trainer.membership, self.trainer.config.monarch.num_replicas
        rank, ranks = dist.get_rank(), dist.get_world_size()
        outer_step = membership.manager.current_step() if membership is not None else 0
        state = membership.sync.digest() if membership is not None else ""

        def seal() -> None:
            names = sorted(path.name for path in folder.glob(f"__{rank}_*")) + [".metadata"] * (rank == 0)
            Seal.of(
                *(folder, names), rank=rank, ranks=ranks, replicas=replicas, outer_step=outer_step, state=state
            ).write(folder)

        return seal


class _Part:
    """What a replica's checkpoint holds besides TorchTitan's, as DCP takes it."""

    def __init__(self, trainer: MonarchTrainer) -> None:
        self._trainer = trainer
        self._same_ranks = True
        self.random: bytes | None = None
        """Of this rank, as loaded."""

    def expect(self, seal: Seal) -> None:
        """Have ``state_dict`` give what that checkpoint has."""
        # Random number generators are a rank's own: other ranks begin with fresh ones.
        self._same_ranks = seal.ranks == dist.get_world_size()
        if self._trainer.membership is not None:
            self._trainer.membership.sync.expect(seal.outer_step)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._same_ranks:
            state["random"] = {f"rank_{dist.get_rank()}": random_state()}
        if (membership := self._trainer.membership) is not None:
            state |= {"manager": membership.manager.state_dict(), "sync": membership.sync.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._same_ranks:
            self.random = state["random"][f"rank_{dist.get_rank()}"]
        self._same_ranks = True  # for what is saved from now on
        if (membership := self._trainer.membership) is not None:
            membership.manager.load_state_dict(state["manager"])
            membership.sync.load_state_dict(state["sync"])


@dataclass(frozen=True, slots=True)
class _Undrawn:
    data: Iterable[Any]
    restore: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.data)
        self.restore()
        return iterator


def random_state() -> bytes:
    """The state of every random number generator of this process."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}
    if (accelerator := upstream.accelerator()) is not None:
        state["device"] = torch.get_device_module(accelerator).get_rng_state()
    return pickle.dumps(state)


def set_random_state(saved: bytes) -> None:
    """Have all of them go on from there."""
    state = pickle.loads(saved)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    if (accelerator := upstream.accelerator()) is not None and "device" in state:
        torch.get_device_module(accelerator).set_rng_state(state["device"])
