"""When to relaunch a failed replica, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    START = "start"
    RESPAWN = "respawn"
    REALLOCATE = "reallocate"
    GIVE_UP = "give up"


@dataclass(kw_only=True, slots=True)
class RecoveryPolicy:
    """Respawn in place first, ask for new hosts every ``respawns`` failures, then give up.

    Failures are counted in a row: an outer step that the replica commits sets the count back to 0, so that a
    month-long run is not ended by the sum of its small accidents.
    """

    respawns: int = 4
    """Failures in a row that a replica may have on one allocation."""

    max_failures: int = 16
    """Failures in a row after which a replica is given up."""

    backoff_seconds: float = 1.0
    """Wait before the second relaunch in a row; doubles with each further one. The first one is immediate."""

    max_backoff_seconds: float = 60.0
    """The longest wait before a relaunch."""

    commit_retries: int = 3
    """Outer steps in a row that may fail to commit before the trainer stops with the cause."""

    hang_seconds: float = 10.0
    """A rank that gives no sign of life for this long has hung, unless its steps take long."""

    hang_steps: float = 10.0
    """A step that takes this many times as long as the longest of the last 100 has hung, and so has a rank that gives
    no sign of life for that long; ``hang_seconds`` where that is more."""

    pause_seconds: float = 600.0
    """Longest time for what has no usual length: starting until the end of the second step, saving, validating."""

    def next(self, failures: int) -> Action:
        """The action after this many failures in a row (1 or more)."""
        if failures >= self.max_failures:
            return Action.GIVE_UP
        return Action.REALLOCATE if failures % self.respawns == 0 else Action.RESPAWN

    def delay(self, failures: int) -> float:
        """Seconds to wait before the relaunch that follows this many failures in a row."""
        if failures <= 1:
            return 0.0
        doublings = min(failures - 2, 100)  # a float has no more than 1023
        return min(self.max_backoff_seconds, self.backoff_seconds * 2.0**doublings)
