"""Configurations with a dataloader that misbehaves or keeps a record, for tests of what replicas do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_titan.config_registry import llama3_debug_diloco
from monarch_titan.training.data import LocalTextDataLoader
from monarch_titan.training.trainer import MonarchTrainer


class FaultyDataLoader(LocalTextDataLoader):
    """Raises once at a batch of one shard; writes which batch each shard reads next to ``record``."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTextDataLoader.Config):
        fail_shard: int = -1
        """The shard that raises; a shard is a rank of a replica, counted over all replicas."""
        fail_batch: int = 0
        """Batches before it raises."""
        always: bool = False
        """Raise on every attempt, not only on the first."""
        record: str = ""
        """Folder for one file a shard."""

    def __init__(self, config: Config, **runtime: Any) -> None:
        super().__init__(config, **runtime)
        self._config = config

    def __iter__(self) -> Iterator[Any]:
        folder = Path(self._config.record)
        record, raised = folder / f"shard_{self.dp_rank}", folder / "raised"
        for batch, sample in enumerate(super().__iter__()):
            due = self.dp_rank == self._config.fail_shard and batch == self._config.fail_batch
            if due and (self._config.always or not raised.exists()):
                raised.touch()
                raise ValueError("this batch cannot be read")
            with record.open("a") as file:
                print("".join(f"{token:03x}" for token in sample[1].flatten().tolist()), file=file)
            yield sample


def llama3_faulty() -> MonarchTrainer.Config:
    """The debug model on a FaultyDataLoader."""
    config = llama3_debug_diloco()
    config.torchtitan.module, config.torchtitan.config = "tests.integration.faulty", "llama3_faulty"
    config.dataloader = FaultyDataLoader.Config()
    return config
