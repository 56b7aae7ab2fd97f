"""A dataloader whose samples say whose they are."""

from __future__ import annotations

from collections.abc import Iterator

Sample = tuple[int, int, int]
"""Replica, rank and place in the shard."""


class Shard:
    """One rank's endless data, from a place on."""

    def __init__(self, replica: int, rank: int, place: int) -> None:
        self.replica, self.rank, self._place = replica, rank, place
        self.drawn = 0
        """Samples, those included that are only passed over."""

    def __iter__(self) -> Iterator[Sample]:
        while True:
            self._place += 1
            self.drawn += 1
            yield self.replica, self.rank, self._place - 1

    def state_dict(self) -> dict[str, int]:
        return {"replica": self.replica, "rank": self.rank, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert (state["replica"], state["rank"]) == (self.replica, self.rank), f"{state} of another shard"
        self._place = state["place"]
