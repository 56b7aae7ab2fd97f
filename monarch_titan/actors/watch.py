"""Waits: for the end of a process of this host, also one that is not a child, and for Monarch's calls as tasks."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Generator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def watched(pid: int) -> Generator[asyncio.Event]:
    """An event that is set when the process ends, or at once when there is none of this id.

    Monarch's own supervision asks processes whether they live: it takes longer to notice a death, and must take even
    longer not to mistake a busy process for a dead one.
    """
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        ended.set()
        yield ended
        return

    def end() -> None:
        loop.remove_reader(descriptor)
        ended.set()

    loop.add_reader(descriptor, end)
    try:
        yield ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def awaited(call: Awaitable[T]) -> T:
    """A coroutine, as asyncio's tasks want it, of a call that Monarch gives as another kind of awaitable."""
    return await call
