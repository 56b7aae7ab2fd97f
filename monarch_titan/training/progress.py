"""Whether a rank still gets on: what its training thread is doing, since when, and how long that may take."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from monarch_titan.control.recovery import RecoveryPolicy

# Steps that the longest one is looked for in: validation or a cold cache may have made an older one longer.
RECENT = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """A rank's sign of life."""

    seconds: float
    """Since its training thread began what it is doing."""
    limit: float
    """Seconds after which that has hung, or after which a rank that gives no sign has."""
    waiting: bool
    """Whether it waits for peers, whose fault it is when that takes long."""
    longest: float | None
    """Seconds of its longest recent step, if it has ended one after the first."""


class Progress:
    """Written by the training thread, read by another.

    A step may take ``hang_steps`` times as long as the longest recent one, but ``hang_seconds`` at least. Until a
    second step has ended, and between steps, where checkpoints are written, it is ``pause_seconds``. The first step
    is no measure of others: allocators, kernels and connections are made in it.
    """

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._recent: deque[float] = deque(maxlen=RECENT)
        # In one tuple, so that no reader sees half of a change: since when, in a step, waiting for peers.
        self._doing = (time.monotonic(), False, False)
        self._waited = 0.0
        self._warm = False

    @contextlib.contextmanager
    def step(self) -> Generator[None]:
        """An inner step, waits for peers included. One that does not end properly is not measured."""
        self._waited = 0.0
        begin = self._begin(in_step=True)
        yield
        ended = self._begin()
        if self._warm:
            self._recent.append(ended - begin - self._waited)
        self._warm = True

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """A wait for peers, in a step or not."""
        _, in_step, _ = self._doing
        begin = self._begin(in_step=in_step, waiting=True)
        try:
            yield
        finally:
            self._waited += self._begin(in_step=in_step) - begin

    def _begin(self, *, in_step: bool = False, waiting: bool = False) -> float:
        now = time.monotonic()
        self._doing = (now, in_step, waiting)
        return now

    def sign(self) -> Sign:
        """What is true now."""
        since, in_step, waiting = self._doing
        longest = max(self._recent, default=None)
        limit = self._policy.pause_seconds
        if longest is not None and (in_step or waiting):
            limit = min(limit, max(self._policy.hang_seconds, self._policy.hang_steps * longest))
        return Sign(seconds=time.monotonic() - since, limit=limit, waiting=waiting, longest=longest)
