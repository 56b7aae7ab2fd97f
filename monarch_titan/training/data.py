"""The dataset ``local_text``: packed samples from text files on this machine, for training and validation.

Documents are tokenized and laid end to end, and the line is cut every ``seq_len`` tokens. Each position learns the
token after it *in its own document*, so a document of n tokens gives n - 1 positions::

    documents    [B a b c E] [B d E]         B begins a document and E ends it
    input         B a b c     B d            cut into samples of seq_len = 4:  B a b c | B d ...
    labels        a b c E     d E
    positions     0 1 2 3     0 1

Positions count from the start of the document or of the sample, whichever is later, so they stay below ``seq_len``,
the length of TorchTitan's RoPE cache, and attention masks find every document by its 0.

Between two samples nothing is left over: a cursor of epoch, document and token says it all. That is the whole state,
a few integers whatever the data, and resuming tokenizes one document again.

Shards. The document in place i of an epoch's order belongs to shard ``i % dp_world_size``, so that shards are disjoint
and each document is tokenized by one rank only. Fewer documents than shards (one big file, say) would leave shards
without data, so then every shard tokenizes all documents and takes sample ``k`` if ``k % dp_world_size`` is its rank.
Worker processes split their rank's shard the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from monarch_titan.config.errors import ConfigError
from monarch_titan.training.text_files import Corpus

Sample: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]


def _pack(pieces: list[torch.Tensor]) -> Sample:
    """One sample from parts of documents, each with one token more than it has positions."""
    return {
        "input": torch.cat([piece[:-1] for piece in pieces]),
        "positions": torch.cat([torch.arange(len(piece) - 1) for piece in pieces]),
    }, torch.cat([piece[1:] for piece in pieces])


class LocalTextDataset(IterableDataset):
    """Samples ``({"input", "positions"}, labels)``, each an int64 tensor of shape ``[seq_len]``.

    A document is tokenized whole, so it has to fit in memory: 16 bytes a token.

    Args:
        corpus: the documents.
        tokenizer: is asked to mark the beginning and the end of documents.
        seq_len: tokens a sample.
        shard: which part of the data this is, 0 to ``num_shards - 1``.
        num_shards: parts in all.
        infinite: start the next epoch after the last document. Otherwise an iteration is one epoch, and leaves out
            the tokens at its end that do not fill a sample.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        *,
        seq_len: int,
        shard: int = 0,
        num_shards: int = 1,
        infinite: bool = False,
    ) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._shard = shard
        self._num_shards = num_shards
        self._infinite = infinite

        # The cursor: the next sample starts at this token of the document in this place of this epoch.
        self._epoch = 0
        self._document = 0
        self._token = 0
        # Samples packed so far, those of other shards included where all shards read all documents.
        self._samples = 0
        self._resumed = False

    def state_dict(self) -> dict[str, int]:
        """Where the next sample starts."""
        return {
            "epoch": self._epoch,
            "document": self._document,
            "token": self._token,
            "samples": self._samples,
            "documents": len(self._corpus),
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue with the sample that would have come next.

        Raises:
            ConfigError: a ValueError, when the data is not that of the checkpoint.
        """
        if state_dict["documents"] != len(self._corpus):
            raise ConfigError(
                f"dataloader.dataset_path must hold the {state_dict['documents']} documents of the checkpoint, got "
                f"{len(self._corpus)} (to change data, set checkpoint.exclude_from_loading to ['dataloader'])."
            )
        self._epoch = state_dict["epoch"]
        self._document = state_dict["document"]
        self._token = state_dict["token"]
        self._samples = state_dict["samples"]
        self._resumed = True

    def __iter__(self) -> Iterator[Sample]:
        # A second iteration is the next epoch. But the state of a worker that had already finished when the checkpoint
        # was taken means that it is to stay finished until the others are.
        if self._document == len(self._corpus) and not self._resumed:
            self._start_epoch(self._epoch + 1)
        self._resumed = False
        return self._own_samples()

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._document, self._token = epoch, 0, 0

    def _own_samples(self) -> Iterator[Sample]:
        """The samples of this shard and, in a worker process, of this worker."""
        shard, num_shards = self._shard, self._num_shards
        if (worker := get_worker_info()) is not None:
            # Keeps a rank's documents the same whatever the number of workers.
            shard, num_shards = shard + num_shards * worker.id, num_shards * worker.num_workers
        if len(self._corpus) >= num_shards:
            yield from self._pack_documents(shard, num_shards)
            return
        for sample in self._pack_documents(0, 1):
            if (self._samples - 1) % num_shards == shard:
                yield sample

    def _pack_documents(self, shard: int, num_shards: int) -> Iterator[Sample]:
        """Samples of the documents of a shard, with the cursor behind each sample when it is handed out."""
        pieces: list[torch.Tensor] = []
        missing = self._seq_len
        while True:
            empty = self._document == self._token == 0
            for document, text in self._corpus.read(
                epoch=self._epoch, start=self._document, shard=shard, num_shards=num_shards
            ):
                if document != self._document:
                    self._document, self._token = document, 0
                tokens = torch.tensor(self._tokenizer.encode(text, add_bos=True, add_eos=True), dtype=torch.long)
                while (left := len(tokens) - 1 - self._token) > 0:
                    empty = False
                    take = min(left, missing)
                    pieces.append(tokens[self._token : self._token + take + 1])
                    self._token += take
                    missing -= take
                    if not missing:
                        self._samples += 1
                        yield _pack(pieces)
                        pieces, missing = [], self._seq_len
            if not self._infinite:
                self._document, self._token = len(self._corpus), 0
                return
            if empty:
                raise ConfigError(
                    "dataloader.dataset_path must hold documents of two tokens or more, got none in shard "
                    f"{shard} of {num_shards}."
                )
            self._start_epoch(self._epoch + 1)
            if self._epoch == 1 and self._shard == 0:
                logger.info("All of the dataset local_text has been read; it is read again in random order.")


class LocalTextDataLoader(ParallelAwareDataloader):
    """Batches of packed text from files on this machine; TorchTitan's trainer and validator build it.

    Yields ``({"input", "positions"}, labels)``, each an int64 tensor of shape ``[local_batch_size, seq_len]``.

    Raises:
        ConfigError: a ValueError, when ``dataset_path`` cannot be read.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        dataset: str = "local_text"
        """Always ``local_text``: documents from files. ``dataset_path`` is a ``.txt``, ``.md`` or ``.py`` file (one
        document), a ``.jsonl`` file (a document a line, in the field "text"), a ``.parquet`` file (a document a row,
        in the column "text") or a folder with such files. Without it, documents are the sources of Python's standard
        library."""

        infinite: bool = True
        """Whether to start again, in another order, when all documents have been read."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **kwargs,
    ) -> None:
        if config.dataset != "local_text":
            raise ConfigError(f"dataloader.dataset must be 'local_text' for local files, got {config.dataset!r}.")
        corpus = Corpus(config.dataset_path)
        if dp_rank == 0 and len(corpus) < dp_world_size * max(1, config.num_workers):
            logger.warning(
                f"dataloader.dataset_path holds {len(corpus)} documents for {dp_world_size} ranks with "
                f"{config.num_workers} workers: each tokenizes all of them and takes its share of the samples."
            )
        dataset = LocalTextDataset(
            corpus,
            tokenizer,
            seq_len=seq_len,
            shard=dp_rank,
            num_shards=dp_world_size,
            infinite=config.infinite,
        )
        super().__init__(
            dataset,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            snapshot_every_n_steps=snapshot_every_n_steps,
        )
