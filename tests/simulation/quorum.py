"""What replicas do together: the quorums that a lighthouse forms, and the outer steps that they take in them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.clock import now

if TYPE_CHECKING:
    from tests.simulation.replica import SimulatedReplica
    from tests.simulation.world import World

HEARTBEAT = 1.0
JOIN = 60.0
"""TorchFT's heartbeat_timeout_ms and join_timeout_ms, in seconds."""

REDUCE, BROKEN, TIMEOUT = 0.1, 0.1, 30.0
"""Seconds of an all-reduce, of one in which somebody dies, and of one for which somebody never comes."""

PATIENCE = 600.0
"""monarch.quorum_timeout_seconds."""

LIGHTHOUSE_STARTS, LIGHTHOUSE_STOPS, FIRST_HEARTBEATS = 0.5, 0.1, 0.5


@dataclass(frozen=True)
class Window:
    """Samples ``first`` to ``end - 1`` of a replica's shard."""

    replica: int
    first: int
    end: int


@dataclass(frozen=True)
class State:
    """Global parameters, as the windows that made them."""

    outer_step: int = 0
    windows: tuple[Window, ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    """(replica, samples of its shard that are in here), as SeenBatches has it."""

    def seen(self, replica: int) -> int:
        """Samples of a replica's shard that are in here."""
        return dict(self.counts).get(replica, 0)

    @property
    def digest(self) -> str:
        return f"{hash(self):x}"


class Quorum:
    """Replicas that take an outer step together, or heal."""

    def __init__(self, members: list[SimulatedReplica], world: World) -> None:
        self.members, self._world = members, world
        self.newest = max((m.state.outer_step for m in members if m.state is not None), default=-1)
        self.sources = [m for m in members if m.state is not None and m.state.outer_step == self.newest]
        self._base = self.sources[0].state if self.sources else State()
        self._given: dict[SimulatedReplica, tuple[Window | None, int]] = {}
        self._winners: list[SimulatedReplica] = []
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._breaking = False

        self.torn_apart = len({member.state for member in self.sources}) > 1
        """Whether members hold different states of the same outer step, which nothing would ever join again."""

    def is_behind(self, member: SimulatedReplica) -> bool:
        return bool(self.sources) and (member.state is None or member.state.outer_step < self.newest)

    def source_for(self, member: SimulatedReplica) -> SimulatedReplica:
        return self.sources[self.members.index(member) % len(self.sources)]

    async def reduce(self, member: SimulatedReplica, window: Window | None) -> State | None:
        """Take an outer step, giving a window to it or nothing; the new state, None when this member has not got it."""
        self._given[member] = window, member.sample
        if any(peer.dead or peer.held for peer in self.members):
            self.lose_member()
        elif self._complete:
            if self._world.breaks():
                self._break_in(BROKEN)
            else:
                asyncio.get_running_loop().call_later(REDUCE, self._succeed)
        await asyncio.shield(self._ended)
        if member not in self._winners:
            return None
        given = [window for window, _ in self._given.values() if window is not None]
        counts = dict(self._base.counts)
        for peer, (_, drawn) in self._given.items():
            counts[peer.launch.replica] = max(counts.get(peer.launch.replica, 0), drawn)
        windows = (*self._base.windows, *sorted(given, key=lambda window: window.replica))
        return State(self.newest + 1, windows, tuple(sorted(counts.items())))

    @property
    def _complete(self) -> bool:
        return len(self._given) == len(self.members)

    def _succeed(self) -> None:
        if not self._breaking:
            self._winners = list(self.members)
            self._end()

    def lose_member(self) -> None:
        """Somebody whom the others count on is dead, or held and does not come."""
        self._break_in(BROKEN if any(member.dead for member in self.members) else TIMEOUT)

    def _break_in(self, seconds: float) -> None:
        if self._breaking or self._ended.done():
            return
        self._breaking = True
        alive = [member for member in self.members if not member.dead]
        self._winners = alive[: self._world.schedule.torn] if self._complete else []
        asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        if self._ended.done():
            return
        self._ended.set_result(None)
        self._winners = [member for member in self._winners if not member.dead]


class SimulatedLighthouse:
    """A quorum server, until it dies."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.stopped = False
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def dead(self) -> bool:
        return self.stopped or self._died.done()

    def die(self) -> None:
        if not self.dead:
            self._died.set_result("killed")

    async def run(self) -> str:
        return await self._died

    async def stop(self) -> None:
        await asyncio.sleep(LIGHTHOUSE_STOPS)
        self.stopped = True


class Quorums:
    """Forms quorums as TorchFT's lighthouse does, out of who asks and whose heart beats."""

    def __init__(self, world: World) -> None:
        self._world, self._min_replicas = world, world.schedule.min_replicas
        self._asking: dict[SimulatedReplica, tuple[float, asyncio.Future[Quorum]]] = {}
        self._beating: list[SimulatedReplica] = []
        self._previous: list[SimulatedReplica] | None = None
        self.lighthouse: SimulatedLighthouse | None = None
        self.formed: list[Quorum] = []

    async def start(self, attempt: int) -> SimulatedLighthouse:
        await asyncio.sleep(LIGHTHOUSE_STARTS)
        self.lighthouse, self._previous = SimulatedLighthouse(attempt), None
        self._look_in(FIRST_HEARTBEATS)
        return self.lighthouse

    def beat(self, replica: SimulatedReplica) -> None:
        """From now on this replica is known to live."""
        self._beating.append(replica)

    async def ask(self, replica: SimulatedReplica) -> Quorum:
        """The next quorum with this replica. Raises TimeoutError when there is none."""
        formed: asyncio.Future[Quorum] = asyncio.get_running_loop().create_future()
        self._asking[replica] = now(), formed
        self._look_in(0.0)
        self._look_in(JOIN)
        async with asyncio.timeout(PATIENCE):
            return await formed

    def lose(self, replica: SimulatedReplica) -> None:
        """A replica has died, which the lighthouse finds out by its silence."""
        self._look_in(HEARTBEAT)

    def look(self) -> None:
        """Form a quorum if one is due."""
        if self.lighthouse is None or self.lighthouse.dead:
            return
        self._beating = [r for r in self._beating if r.died_at is None or now() < r.died_at + HEARTBEAT]
        self._asking = {r: asked for r, asked in self._asking.items() if r in self._beating}
        ready = [r for r in self._asking if r.lighthouse_attempt == self.lighthouse.attempt]
        if len(ready) < self._min_replicas:
            return
        if self._previous is None or not set(self._previous) <= set(ready):
            waited = now() - min(self._asking[replica][0] for replica in ready)
            if 2 * len(ready) <= len(self._beating) or (len(ready) < len(self._beating) and waited < JOIN):
                return
        ready.sort(key=lambda replica: replica.launch.replica)
        self._previous, quorum = ready, Quorum(ready, self._world)
        outside = [replica for replica in self._beating if replica not in ready and not replica.dead]
        if any(replica.state is not None and replica.state.outer_step > quorum.newest for replica in outside):
            self._world.forks.add(quorum.newest + 1)
        self.formed.append(quorum)
        for replica in ready:
            _, formed = self._asking.pop(replica)
            if not formed.done():
                formed.set_result(quorum)

    def _look_in(self, seconds: float) -> None:
        # A little later than the limit, lest rounding has it come a little earlier.
        asyncio.get_running_loop().call_later(seconds + 1e-3, self.look)
