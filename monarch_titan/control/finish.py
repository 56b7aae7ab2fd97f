"""The end of a run: replicas that have trained all steps stay for the late ones, are compared, and leave together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from monarch_titan.control.member import Changes, Member

# A quorum that held replicas attend includes the one that asks, which then says so. It formed without it if it does
# not: attend another.
ATTEND_AGAIN_SECONDS = 2.0

# Longest wait for quorums that bring replicas to the same outer step. Taking a peer's state can be most of it.
ALIGN_SECONDS = 600.0


class Finish:
    """Holds replicas at the end, has them help the late ones, and says when all may leave."""

    def __init__(self, members: Sequence[Member], changes: Changes) -> None:
        self._members, self._changes = members, changes
        self._align = False

    async def attend(self, member: Member) -> None:
        """While a replica is held, have it take part in the quorums that others need; never returns."""
        while True:
            await self._changes.until(lambda: member.held and self._quorum_wanted())
            assert member.replica is not None
            member.attending = True
            with contextlib.suppress(Exception):  # it is failing, and its supervision sees why
                await member.replica.attend()
            member.attending = False
            self._changes.notify()
            await self._changes.until(lambda: not self._quorum_wanted(), within=ATTEND_AGAIN_SECONDS)

    def _quorum_wanted(self) -> bool:
        return self._align or any(m.asking and not m.held for m in self._members)

    async def reached(self) -> str | None:
        """Wait until all are held or lost and none is in a quorum; None if they agree, or how they differ."""
        await self._meet()
        finals: dict[int, set[tuple[int, str]]] = {}
        for member in self._members:
            for rank, report in member.finished.items():
                finals.setdefault(rank, set()).add((report.outer_step, report.state))
        different = [rank for rank, states in finals.items() if len(states) > 1]
        return f"the replicas' global parameters differ at the end, on rank {min(different)}" if different else None

    async def _meet(self) -> None:
        """Wait until all are at one outer step and in no quorum, or until helping each other there takes too long."""
        in_time = True
        while in_time:
            await self._changes.until(self._all_held)
            if await self._changes.until(self._settled, within=ATTEND_AGAIN_SECONDS):
                return
            # The last outer step committed on some only, and a quorum heals the others. Or some wait in one that is
            # over for their peers: it takes all to get them out.
            self._align = True
            self._changes.notify()
            # One that dies in it may need long to come back, and then asks for its quorums itself.
            in_time = await self._changes.until(lambda: self._settled() or not self._all_held(), within=ALIGN_SECONDS)
            self._align = False

    async def release(self) -> None:
        """Let all leave."""
        held = [member.replica for member in self._members if member.replica is not None]
        await asyncio.gather(*(replica.release() for replica in held), return_exceptions=True)

    def _all_held(self) -> bool:
        return all(member.lost or member.held for member in self._members)

    def _settled(self) -> bool:
        outer_steps = set().union(*(member.outer_steps for member in self._members))
        return self._all_held() and len(outer_steps) == 1 and not any(member.attending for member in self._members)
