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
        # Replica -> (attempt, outer step) -> rank -> position; of those that all ranks reported, only the newest.
        self._reported: dict[int, dict[tuple[int, int], dict[int, Any]]] = {}

    def record(self, replica: int, attempt: int, rank: int, outer_step: int, position: Any) -> None:
        """Note one rank's position at an outer step that its replica has committed."""
        reported = self._reported.setdefault(replica, {})
        reported.setdefault((attempt, outer_step), {})[rank] = position
        newest = max((key for key, ranks in reported.items() if len(ranks) == self._ranks), default=(0, 0))
        self._reported[replica] = {key: ranks for key, ranks in reported.items() if key >= newest}

    def positions(self, replica: int) -> dict[int, Any]:
        """Rank -> position to go on from; empty before the replica's first outer step."""
        complete = [ranks for ranks in self._reported.get(replica, {}).values() if len(ranks) == self._ranks]
        return dict(complete[0]) if complete else {}
