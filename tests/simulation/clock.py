"""Time that passes when nobody has anything to do."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualTime(asyncio.SelectorEventLoop):
    """An event loop whose clock begins at 0 and jumps to whatever is due next."""

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._seconds

    def jump(self, seconds: float) -> None:
        self._seconds += seconds


class _Jump(selectors.SelectSelector):
    """Waits by moving the clock; there is nothing outside of the loop to wait for."""

    def __init__(self, loop: VirtualTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits, and nothing is due"
        self._loop.jump(timeout)
        return []


def now() -> float:
    """Virtual seconds since the loop was made."""
    return asyncio.get_running_loop().time()
