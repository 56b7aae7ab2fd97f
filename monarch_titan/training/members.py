"""Who is in the present quorum, and who of them is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


def member_name(replica: int, attempt: int) -> str:
    """What a replica's attempt is called in quorums. TorchFT reads the replica out of the digits at its end."""
    return f"attempt_{attempt}_replica_{replica}"


class Members:
    """The replicas of the present quorum, and word of those that are gone. All methods are for any thread.

    Each attempt of a replica has a name, so that late word of a dead one cannot break a quorum with its successor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: frozenset[str] = frozenset()
        self._gone: set[str] = set()
        self._watchers: list[Callable[[], None]] = []

    def enter(self, members: Iterable[str]) -> None:
        """A new quorum has formed."""
        with self._lock:
            self._members, self._watchers = frozenset(members), []

    def gone(self, member: str) -> None:
        """A replica's attempt is over."""
        with self._lock:
            self._gone.add(member)
            watchers = self._watchers if member in self._members else []
        for watcher in list(watchers):
            watcher()

    @property
    def lost(self) -> bool:
        """Whether a member of the present quorum is gone."""
        with self._lock:
            return not self._gone.isdisjoint(self._members)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` when a member of the present quorum is gone; at once if one is."""
        with self._lock:
            self._watchers.append(watcher)
        if self.lost:
            watcher()
