"""How far each replica has come in its data: positions that belong to committed outer steps."""

from __future__ import annotations

from typing import Any


class DataLedger:
    """Keeps, for each replica, the data positions of the newest outer step that all its ranks have reported.

    A respawned replica goes on from there: after the last sample that the global parameters have seen from its shard.
    """

    def __init__(self, ranks_per_replica: int) -> None:
        self._ranks = ranks_per_replica
        self._reported: dict[int, dict[int, dict[int, Any]]] = {}
        self._complete: dict[int, dict[int, Any]] = {}

    def record(self, replica: int, rank: int, outer_step: int, position: Any) -> None:
        """Note one rank's position at an outer step that its replica has committed."""
        steps = self._reported.setdefault(replica, {})
        steps.setdefault(outer_step, {})[rank] = position
        if len(steps[outer_step]) == self._ranks:
            self._complete[replica] = steps[outer_step]
            self._reported[replica] = {step: ranks for step, ranks in steps.items() if step > outer_step}

    def positions(self, replica: int) -> dict[int, Any]:
        """Rank -> position to go on from; empty before the replica's first outer step."""
        return dict(self._complete.get(replica, {}))

    def forget_incomplete(self, replica: int) -> None:
        """Drop what a failed attempt had reported for an outer step that not all its ranks committed."""
        self._reported.pop(replica, None)
