"""Which batches the global parameters have seen: nothing is read twice, nothing is left out.

A replica can fail at any moment, also after its peers have added its window to the global parameters and before it
could tell anybody. So the truth travels with the parameters: each replica puts the number of batches that it has
drawn into the all-reduce of every outer step, at the end of the buffer, where they are added to zeros. Whoever commits
knows how far each shard is in what it commits, gives that on with its state, and a healed replica continues its own
shard at exactly that batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# A float32 holds integers up to 2 ** 24 exactly; two of them hold a count.
BASE = 1 << 20

# Positions to remember: at the last outer step, at the one before, and where this life of the replica began.
MARKS = 3


class SeenBatches:
    """How many batches of each replica's shard the global parameters have seen, of this rank's part of it.

    Args:
        replicas: ``monarch.num_replicas``.
        replica: our own.
    """

    def __init__(self, replicas: int, replica: int) -> None:
        self.counts = [0] * replicas
        self.lineage = ""
        """Tells apart states that came about by different outer steps: who took part in each, and how far they were."""
        self._replica = replica
        self.size = 2 * replicas
        """Float32 elements in a buffer."""

    @property
    def own(self) -> int:
        return self.counts[self._replica]

    def write(self, tail: torch.Tensor, drawn: int) -> None:
        """Put what this rank has drawn so far into ``tail``, float32 zeros (size,)."""
        tail[2 * self._replica], tail[2 * self._replica + 1] = divmod(drawn, BASE)

    def read(self, tail: torch.Tensor) -> None:
        """Take what all members have drawn out of the sum of their tails, when the outer step has committed."""
        high, low = tail.view(-1, 2).round().to(torch.int64).T.tolist()
        found = [a * BASE + b for a, b in zip(high, low, strict=True)]
        # Replicas that were not in the quorum have left zeros.
        self.counts = [max(pair) for pair in zip(self.counts, found, strict=True)]
        self.lineage = hashlib.sha256(f"{self.lineage} {found}".encode()).hexdigest()[:16]

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "lineage": self.lineage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.lineage = list(state["counts"]), state["lineage"]


class Batches:
    """This rank's batches, counted over all of the replica's lives, from any count that no mark is needed before.

    Args:
        dataloader: TorchTitan's, where ``count`` batches of the shard have been drawn.
        marks: count -> state of the dataloader there, of earlier lives.

    ``drawn`` is how many batches were drawn so far, ``began`` how many when the present window began.
    """

    def __init__(self, dataloader: Any, count: int = 0, marks: dict[int, Any] | None = None) -> None:
        self._dataloader = dataloader
        self.drawn = self.began = count
        self._marks = dict(marks or {})
        self._iterator: Iterator[Any] | None = None
        self._make: Callable[[], Iterator[Any]] = lambda: iter(dataloader)
        self.mark()

    def through(self, make: Callable[[], Iterator[Any]]) -> None:
        """Draw through an iterator over the dataloader, made anew after each jump."""
        self._make = make

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._make()
        batch = next(self._iterator)
        self.drawn += 1
        return batch

    def mark(self) -> Any:
        """Remember where we are, the beginning of a window; the dataloader's state."""
        self.began = self.drawn
        self._marks.pop(self.drawn, None)
        state = self._marks[self.drawn] = self._dataloader.state_dict()
        for oldest in list(self._marks)[:-MARKS]:
            del self._marks[oldest]
        return state

    def go_to(self, count: int) -> None:
        """Continue after the first ``count`` batches of the shard. Raises RuntimeError when all marks are later."""
        if count == self.drawn:
            return
        self._marks = {mark: state for mark, state in self._marks.items() if mark <= count}
        if not self._marks:
            raise RuntimeError(f"no position in the data is known at or before batch {count}.")
        self.drawn = max(self._marks)
        self._dataloader.load_state_dict(self._marks[self.drawn])
        self._iterator = None
        while self.drawn < count:
            next(self)
        self.began = count
