"""Notices that a rank has hung: frozen, or in a step that does not end."""

from __future__ import annotations

import asyncio
from typing import Any

from monarch_titan.actors.watch import awaited

# How often each rank is asked for a sign of life.
SIGN_SECONDS = 1.0


async def hung_rank(trainers: Any, ranks: list[int], pause_seconds: float) -> tuple[int | None, str]:
    """Wait until a rank has hung.

    Args:
        trainers: the mesh of TrainerActors.
        pause_seconds: limit for the first sign of life.

    Returns:
        Which rank, None if all answer and only a step does not end, and the cause to tell the user.
    """
    stuck: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    silences = [asyncio.create_task(_silence(trainers.slice(gpus=rank), pause_seconds, stuck)) for rank in ranks]
    found = asyncio.create_task(stuck.get())
    try:
        await asyncio.wait([found, *silences], return_when=asyncio.FIRST_COMPLETED)
        if found.done():
            # It may be stuck in a collective with a rank that froze within that step, and was asked a little later.
            patience = found.result()[1] + 2 * SIGN_SECONDS
            await asyncio.wait(silences, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for rank, silence in zip(ranks, silences, strict=True):
            if silence.done():
                return rank, silence.result()
        return None, found.result()[0]
    finally:
        for task in (found, *silences):
            task.cancel()


async def _silence(trainer: Any, limit: float, stuck: asyncio.Queue[tuple[str, float]]) -> str:
    """Wait until a rank gives no sign of life; tells ``stuck`` of one whose step does not end."""
    while True:
        await asyncio.sleep(SIGN_SECONDS)
        try:
            sign = await asyncio.wait_for(awaited(trainer.sign.call_one()), limit)
        except TimeoutError:
            return f"it hung: no sign of life for {limit:.0f} s"
        except Exception:
            return await asyncio.Future()
        if sign is None:
            continue
        limit = sign.limit
        if sign.seconds > limit and not sign.waiting:
            longest = sign.longest or 0.0
            usual = f"; the longest recent one took {longest:.1f} s" if longest else ""
            await stuck.put((f"it hung: {sign.seconds:.0f} s in a step{usual}", longest))
