"""Runs every replica to its end, relaunches the ones that fail, and compares them before it calls the run a success."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from monarch_titan.control.events import (
    Event,
    LighthouseFailed,
    OuterStep,
    OuterStepCommitted,
    QuorumFormed,
    QuorumRequested,
    ReplicaFailed,
    ReplicaFinished,
    ReplicaLost,
    ReplicaState,
    Report,
    Step,
    TrainerFinished,
)
from monarch_titan.control.ledger import DataLedger
from monarch_titan.control.recovery import Action, RecoveryPolicy

# Held replicas attend quorums until the late one has its own. Between two of them, to leave it time to ask.
ATTEND_AGAIN_SECONDS = 0.3

# A replica that is told of a new lighthouse answers at once or is failing.
ANNOUNCE_SECONDS = 5.0


class RunFailed(RuntimeError):
    """The run cannot go on or did not end well; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a replica stopped before its end."""

    cause: str | None
    """None: a process died, and how is not known."""
    rank: int | None = None
    log: str = ""
    """Path of the log to read, relative to the dump folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a replica is launched with."""

    replica: int
    attempt: int
    action: Action
    positions: dict[int, Any]
    """Rank -> data position to go on from."""
    lighthouse_attempt: int


class Replica(Protocol):
    """A launched replica, as the controller drives it."""

    async def run(self) -> Failure | None:
        """Train; None when all ranks have left after ``release()``."""

    async def attend(self) -> None:
        """Have a replica that waits at the end take part in one more quorum."""

    async def announce_lighthouse(self, attempt: int) -> None:
        """Tell all ranks that the lighthouse will be restarted."""

    async def release(self) -> None:
        """Let a replica that waits at the end leave."""

    async def stop(self) -> None:
        """End all processes of the replica, whatever state they are in."""


class LighthouseServer(Protocol):
    """A started lighthouse."""

    async def run(self) -> str:
        """Wait until it is gone; the cause."""

    async def stop(self) -> None:
        """End its process."""


@dataclass(slots=True)
class _Member:
    """A replica's place in the run, over all its attempts."""

    replica_id: int
    replica: Replica | None = None
    attempt: int = 0
    failures: int = 0
    step: int = 0
    has_state: bool = True
    """Whether a peer can heal from it: true from the start and again once it has healed."""
    lost: bool = False
    asking: set[int] = field(default_factory=set)
    """Ranks that wait for a quorum."""
    finished: dict[int, TrainerFinished] = field(default_factory=dict)
    """Ranks that have trained all steps and are held."""


class Controller:
    """Supervises replicas and the lighthouse.

    Args:
        launch: starts a replica's processes.
        start_lighthouse: starts the quorum server, at the same address whatever the attempt.
        log: takes every event, in order.
        restart_alone: whether a replica may be relaunched with no peer to heal from (it has a checkpoint).
    """

    def __init__(
        self,
        launch: Callable[[Launch], Awaitable[Replica]],
        start_lighthouse: Callable[[int], Awaitable[LighthouseServer]],
        *,
        num_replicas: int,
        min_replicas: int,
        ranks_per_replica: int,
        policy: RecoveryPolicy,
        log: Callable[[Event], None],
        restart_alone: bool = False,
    ) -> None:
        self._launch, self._start_lighthouse = launch, start_lighthouse
        self._min_replicas, self._ranks = min_replicas, ranks_per_replica
        self._policy, self._log, self._restart_alone = policy, log, restart_alone
        self._members = [_Member(replica_id) for replica_id in range(num_replicas)]
        self._ledger = DataLedger(ranks_per_replica)
        self._states: dict[tuple[int, int], tuple[int, str, str]] = {}
        self._lighthouse_attempt = 0
        self._changed = asyncio.Event()
        self._released = False
        self._fatal: str | None = None

    async def run(self) -> None:
        """Return once every replica has finished and all agree. Raises RunFailed when that cannot be reached."""
        lighthouse = await self._start_lighthouse(0)
        tasks = [asyncio.create_task(self._supervise(member)) for member in self._members]
        helpers = [
            asyncio.create_task(self._keep_lighthouse(lighthouse)),
            asyncio.create_task(self._attend()),
            asyncio.create_task(self._finish()),
        ]
        fatal = asyncio.create_task(self._until(lambda: self._fatal is not None))
        try:
            done, _ = await asyncio.wait([fatal, *helpers, asyncio.gather(*tasks)], return_when=asyncio.FIRST_COMPLETED)
            if self._fatal is not None:
                raise RunFailed(self._fatal)
            for task in done:
                task.result()
            await asyncio.gather(*tasks)
        finally:
            await _cancel(fatal, *helpers, *tasks)

    def receive(self, message: Event | Report) -> None:
        """Take what a trainer reports. Reports of an attempt that is over are dropped."""
        if isinstance(message, Report):
            member = self._members[message.replica]
            if message.attempt == member.attempt:
                self._receive_report(member, message)
            return
        match message:
            case Step():
                self._members[message.replica].step = message.step
            case OuterStep(committed=True, contributed=True):
                self._members[message.replica].failures = 0
            case ReplicaState():
                self._compare(message)
        self._log(message)

    def _receive_report(self, member: _Member, report: Report) -> None:
        match report:
            case QuorumRequested():
                member.asking.add(report.rank)
            case QuorumFormed():
                member.asking.discard(report.rank)
                member.has_state = True
            case OuterStepCommitted():
                self._ledger.record(report.replica, report.rank, report.outer_step, report.data)
            case TrainerFinished():
                member.finished[report.rank] = report
                if self._is_held(member):
                    first = member.finished[0]
                    self._log(ReplicaFinished(replica=report.replica, step=first.step, outer_step=first.outer_step))
        self._changed.set()

    def _is_held(self, member: _Member) -> bool:
        return len(member.finished) == self._ranks

    # Replicas ------------------------------------------------------------------------------------------------------

    async def _supervise(self, member: _Member) -> None:
        """Run one replica to its end, relaunching it as the policy allows."""
        action: Action | None = await self._attempt(member, Action.START)
        while action is not None and action is not Action.GIVE_UP:
            await asyncio.sleep(self._policy.delay(member.failures))
            member.attempt += 1
            action = await self._attempt(member, action)

    async def _attempt(self, member: _Member, action: Action) -> Action | None:
        """One life of a replica, from its launch until nothing is left of it; what to do next, None when it is done."""
        launch = Launch(
            replica=member.replica_id,
            attempt=member.attempt,
            action=action,
            positions=self._ledger.positions(member.replica_id),
            lighthouse_attempt=self._lighthouse_attempt,
        )
        replica, failure = None, None
        try:
            try:
                replica = member.replica = await self._launch(launch)
                if launch.lighthouse_attempt != self._lighthouse_attempt:
                    await replica.announce_lighthouse(self._lighthouse_attempt)
                failure = await replica.run()
            except Exception as error:
                failure = Failure(cause=f"{type(error).__name__}: {error}".splitlines()[0])
            if failure is None or self._released:
                return None
            return self._failed(member, failure)
        finally:
            member.replica = None
            if replica is not None:
                await replica.stop()

    def _failed(self, member: _Member, failure: Failure) -> Action:
        """Account for a failure and decide what follows: the run may end with it."""
        member.failures += 1
        action = self._policy.next(member.failures)
        cause = failure.cause or "its process died"
        member.asking.clear()
        member.finished.clear()
        member.has_state = False
        self._ledger.forget_incomplete(member.replica_id)
        alone = not any(peer.has_state for peer in self._members)
        if alone and not self._restart_alone:
            action = Action.GIVE_UP
        self._log(
            ReplicaFailed(
                replica=member.replica_id,
                attempt=member.attempt,
                rank=failure.rank,
                step=member.step,
                cause=cause,
                log=failure.log,
                action=action.value,
            )
        )
        where = f"replica {member.replica_id}" + ("" if failure.rank is None else f" rank {failure.rank}")
        if action is Action.GIVE_UP:
            member.lost = True
            self._log(ReplicaLost(replica=member.replica_id, failures=member.failures, cause=cause))
        left = sum(not peer.lost for peer in self._members)
        if alone and not self._restart_alone:
            peers = "no other replica is" if len(self._members) > 1 else "there is no other replica"
            self._fatal = f"{where} failed and {peers} left to heal from: {cause}"
        elif left < self._min_replicas:
            self._fatal = (
                f"{left} of {len(self._members)} replicas left, monarch.min_replicas is {self._min_replicas}; "
                f"the last failure: {where}: {cause}"
            )
        self._changed.set()
        return action

    # The end of the run --------------------------------------------------------------------------------------------

    async def _attend(self) -> None:
        """While a replica asks for a quorum, have those that are held at the end take part, so that it can heal."""

        def wanted() -> bool:
            return bool(self._held()) and any(m.asking and not self._is_held(m) for m in self._members)

        while True:
            await self._until(wanted)
            await self._all_attend()
            await asyncio.sleep(ATTEND_AGAIN_SECONDS)

    def _held(self) -> list[Replica]:
        return [m.replica for m in self._members if m.replica is not None and self._is_held(m)]

    async def _all_attend(self) -> None:
        # One that fails meanwhile is relaunched by its own supervision.
        await asyncio.gather(*(replica.attend() for replica in self._held()), return_exceptions=True)

    async def _finish(self) -> None:
        """Once all are held or lost: align, compare, release."""

        def all_held() -> bool:
            return all(m.lost or (self._is_held(m) and m.replica is not None) for m in self._members)

        await self._until(all_held)
        if len({m.finished[0].outer_step for m in self._members if not m.lost}) > 1:
            # The last outer step committed on some replicas only: one more quorum heals the others.
            await self._all_attend()
            await self._until(all_held)
        finals: dict[int, set[tuple[int, str]]] = {}
        for member in self._members:
            for rank, report in member.finished.items():
                finals.setdefault(rank, set()).add((report.outer_step, report.state))
        if different := [rank for rank, states in finals.items() if len(states) > 1]:
            self._fatal = f"the replicas' global parameters differ at the end, on rank {different[0]}"
            self._changed.set()
            return
        self._released = True
        await asyncio.gather(*(replica.release() for replica in self._held()), return_exceptions=True)

    def _compare(self, state: ReplicaState) -> None:
        """Fail the run when two replicas have committed different global parameters in the same outer step."""
        found = (state.replica, state.global_parameters, state.outer_optimizer)
        first = self._states.setdefault((state.outer_step, state.rank), found)
        if first[1:] != found[1:]:
            self._fatal = (
                f"replicas {first[0]} and {state.replica} differ after outer step {state.outer_step}, "
                f"on rank {state.rank}"
            )
            self._changed.set()
        # Two outer steps are enough to compare; a month of them would fill the memory.
        self._states = {key: value for key, value in self._states.items() if key[0] > state.outer_step - 2}

    # The lighthouse ------------------------------------------------------------------------------------------------

    async def _keep_lighthouse(self, lighthouse: LighthouseServer) -> None:
        """Restart the quorum server whenever it is gone."""
        try:
            while True:
                cause = await lighthouse.run()
                await lighthouse.stop()
                self._lighthouse_attempt += 1
                self._log(LighthouseFailed(cause=cause))
                replicas = [member.replica for member in self._members if member.replica is not None]
                announcements = [replica.announce_lighthouse(self._lighthouse_attempt) for replica in replicas]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANNOUNCE_SECONDS):
                        await asyncio.gather(*announcements, return_exceptions=True)
                lighthouse = await self._start_lighthouse(self._lighthouse_attempt)
        finally:
            await lighthouse.stop()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
            if condition():
                return
            self._changed.clear()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
