"""Positions in the data from which a relaunched replica can go on."""

from __future__ import annotations

from typing import Any

# The peers that a replica heals from say how many batches of its shard their state has seen: as many as at one of its
# last outer steps, the very last excluded if it alone had committed that.
KEPT = 3


class DataLedger:
    """Keeps, for each rank of each replica, where its dataloader stood after some count of batches.

    That is a fact about its shard, whichever attempt of the replica it comes from and whatever became of that one.
    """

    def __init__(self) -> None:
        # Replica -> rank -> batches drawn -> position.
        self._positions: dict[int, dict[int, dict[int, Any]]] = {}

    def record(self, replica: int, rank: int, batches: int, position: Any) -> None:
        """Note where a rank's dataloader stands."""
        positions = self._positions.setdefault(replica, {}).setdefault(rank, {})
        positions.pop(batches, None)
        positions[batches] = position
        for oldest in list(positions)[:-KEPT]:
            del positions[oldest]

    def positions(self, replica: int) -> dict[int, dict[int, Any]]:
        """Rank -> batches drawn -> position."""
        return {rank: dict(positions) for rank, positions in self._positions.get(replica, {}).items()}
