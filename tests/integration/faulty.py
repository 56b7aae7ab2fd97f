"""Configurations with a dataloader that misbehaves or keeps a record, for tests of what replicas do about it."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from monarch_titan.config_registry import llama3_debug_diloco
from monarch_titan.training.data import LocalTextDataLoader
from monarch_titan.training.groups import LosableGloo
from monarch_titan.training.outer import Fragment
from monarch_titan.training.trainer import MonarchTrainer


class FaultyDataLoader(LocalTextDataLoader):
    """Raises once at a batch of one shard; writes which batch each shard reads next to ``record``."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTextDataLoader.Config):
        fail_shard: int = -1
        """The shard that raises; a shard is a rank of a replica, counted over all replicas."""
        fail_batch: int = 0
        """Batches before it raises."""
        how: str = "raise"
        """What happens there: ``raise``, ``exit``, ``hang`` (with the interpreter's lock held), ``corrupt`` (the next
        outer step's result is wrong) or a signal's name."""
        in_allreduce: bool = False
        """Fail at the beginning of the outer all-reduce of this number, not of the batch."""
        always: bool = False
        """Raise on every attempt, not only on the first."""
        record: str = ""
        """Folder for one file a shard."""

    def __init__(self, config: Config, **runtime: Any) -> None:
        super().__init__(config, **runtime)
        self._config = config
        self._folder = Path(config.record)
        self._fails = self.dp_rank == config.fail_shard
        if self._fails and config.in_allreduce:
            LosableGloo.allreduce = self._failing(LosableGloo.allreduce)  # type: ignore[method-assign]

    def _failing(self, allreduce: Callable[..., Any]) -> Callable[..., Any]:
        calls = itertools.count()

        def fail_or_reduce(*args: Any) -> Any:
            if next(calls) == self._config.fail_batch:
                self._fail()
            return allreduce(*args)

        return fail_or_reduce

    def _fail(self) -> None:
        failed, how = self._folder / "failed", self._config.how
        if failed.exists() and not self._config.always:
            return
        failed.write_text(str(time.time()))
        if how == "raise":
            raise ValueError("this batch cannot be read")
        if how == "exit":
            os._exit(0)
        if how == "hang":
            ctypes.PyDLL(None).sleep(1000)
        if how == "corrupt":
            _corrupt_next_outer_step()
            return
        os.kill(os.getpid(), signal.Signals[how])

    def __iter__(self) -> Iterator[Any]:
        record = self._folder / f"shard_{self.dp_rank}"
        for batch, sample in enumerate(super().__iter__()):
            if self._fails and not self._config.in_allreduce and batch == self._config.fail_batch:
                self._fail()
            with record.open("a") as file:
                print("".join(f"{token:03x}" for token in sample[1].flatten().tolist()), file=file)
            yield sample


def _corrupt_next_outer_step() -> None:
    """Flip what a broken memory may flip: one value of the global parameters."""
    step = Fragment.step

    def step_wrongly(self: Fragment, buffer: torch.Tensor) -> None:
        Fragment.step = step  # type: ignore[method-assign]
        step(self, buffer)
        self.globals[0].view(-1)[0] += 1.0

    Fragment.step = step_wrongly  # type: ignore[method-assign]


def llama3_faulty() -> MonarchTrainer.Config:
    """The debug model on a FaultyDataLoader."""
    config = llama3_debug_diloco()
    config.torchtitan.module, config.torchtitan.config = "tests.integration.faulty", "llama3_faulty"
    config.dataloader = FaultyDataLoader.Config()
    return config
