"""How far each replica has come in its data: positions that belong to committed outer steps."""

from __future__ import annotations

from typing import Any


class DataLedger:
    """Keeps, for each replica, the data positions of the newest outer step that all its ranks have reported.

    A respawned replica goes on from there: after the last sample that the global parameters have seen from its shard.
    What an attempt had reported when it failed still counts if all its ranks did, and is never mixed with what the
    next attempt reports.
    """

    def __init__(self, ranks_per_replica: int) -> None:
        self._ranks = ranks_per_replica
        # Replica -> (attempt, outer step) -> rank -> position; of those that all ranks reported, the newest two.
        self._reported: dict[int, dict[tuple[int, int], dict[int, Any]]] = {}

    def record(self, replica: int, attempt: int, rank: int, outer_step: int, position: Any) -> None:
        """Note one rank's position at an outer step that its replica has committed."""
        reported = self._reported.setdefault(replica, {})
        reported.setdefault((attempt, outer_step), {})[rank] = position
        kept: list[tuple[int, int]] = []
        for key in self._complete(replica):
            # A later attempt that takes an outer step again has healed from peers who never saw the first one.
            kept = [*(earlier for earlier in kept if earlier[1] < key[1]), key][-2:]
        newest = max(kept, default=(0, 0))
        self._reported[replica] = {key: ranks for key, ranks in reported.items() if key in kept or key > newest}

    def positions(self, replica: int, outer_step: int) -> dict[int, Any]:
        """Rank -> position to go on from with a peer's state of ``outer_step``; empty where the shard begins.

        An outer step that the replica alone had committed when it died is in no global parameters any more.
        """
        complete = self._complete(replica)
        if not complete or outer_step == 0:
            return {}
        seen = [key for key in complete if key[1] <= outer_step]
        return dict(self._reported[replica][seen[-1] if seen else complete[0]])

    def _complete(self, replica: int) -> list[tuple[int, int]]:
        """The outer steps that all ranks have reported, oldest first."""
        return sorted(key for key, ranks in self._reported.get(replica, {}).items() if len(ranks) == self._ranks)
