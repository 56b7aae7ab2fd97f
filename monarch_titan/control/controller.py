"""Runs every replica to its end, relaunches the ones that fail, and compares them before it calls the run a success."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from monarch_titan.control.events import (
    Event,
    LighthouseFailed,
    OuterStep,
    OuterStepCommitted,
    ReplicaFailed,
    ReplicaFinished,
    ReplicaLost,
    ReplicaState,
    Report,
    Step,
    TrainerFinished,
)
from monarch_titan.control.finish import Finish
from monarch_titan.control.ledger import DataLedger
from monarch_titan.control.member import Changes, Failure, Launch, Member, Replica
from monarch_titan.control.recovery import Action, RecoveryPolicy

__all__ = ["Controller", "Failure", "Launch", "LighthouseServer", "Replica", "RunFailed"]

# A replica that is told of a new lighthouse answers at once or is failing.
ANNOUNCE_SECONDS = 5.0


class RunFailed(RuntimeError):
    """The run cannot go on or did not end well; the message says why."""


class LighthouseServer(Protocol):
    """A started lighthouse."""

    async def run(self) -> str:
        """Wait until it is gone; the cause."""

    async def stop(self) -> None:
        """End its process."""


class Controller:
    """Supervises replicas and the lighthouse.

    Args:
        launch: starts a replica's processes.
        start_lighthouse: starts the quorum server, at the same address whatever the attempt.
        log: takes every event, in order.
        restart_alone: whether a replica may be relaunched with no peer to heal from (it has a checkpoint).
        without_state: replicas that have no part of the checkpoint from which the others go on.
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
        without_state: Collection[int] = (),
    ) -> None:
        self._launch, self._start_lighthouse = launch, start_lighthouse
        self._min_replicas, self._policy, self._log, self._restart_alone = min_replicas, policy, log, restart_alone
        self._members = [Member(replica_id, ranks_per_replica) for replica_id in range(num_replicas)]
        for replica in without_state:
            self._members[replica].has_state = False
        self._changes = Changes()
        self._end = Finish(self._members, self._changes)
        self._ledger = DataLedger(ranks_per_replica)
        self._states: dict[tuple[int, int], tuple[int, str, str]] = {}
        self._lighthouse_attempt = 0
        self._released = False
        self._fatal: str | None = None

    async def run(self) -> None:
        """Return once every replica has finished and all agree. Raises RunFailed when that cannot be reached."""
        lighthouse = await self._new_lighthouse()
        ends = {asyncio.create_task(task) for task in (self._finish(), *map(self._supervise, self._members))}
        endless = {
            asyncio.create_task(task)
            for task in (self._fail(), self._keep_lighthouse(lighthouse), *map(self._end.attend, self._members))
        }
        try:
            while ends:
                done, _ = await asyncio.wait(ends | endless, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                ends -= done
        finally:
            await _cancel(*ends, *endless)

    def receive(self, message: Event | Report) -> None:
        """Take what a trainer reports. Reports of an attempt that is over are dropped."""
        if isinstance(message, Report):
            self._receive_report(message)
            return
        match message:
            case Step():
                self._members[message.replica].step = message.step
            case OuterStep(committed=True, contributed=True):
                # The outer step that follows healing takes no training: whoever fails in every window of its own
                # would never be given up.
                self._members[message.replica].failures = 0
            case ReplicaState():
                self._compare(message)
        self._log(message)

    def _receive_report(self, report: Report) -> None:
        member = self._members[report.replica]
        if isinstance(report, OuterStepCommitted):
            # Also of an attempt that has just failed: the global parameters have seen these samples.
            self._ledger.record(report.replica, report.attempt, report.rank, report.outer_step, report.data)
        if report.attempt != member.attempt:
            return
        member.take(report)
        if isinstance(report, TrainerFinished) and member.held and len(member.outer_steps) == 1:
            self._log(ReplicaFinished(replica=report.replica, step=report.step, outer_step=report.outer_step))
        self._changes.notify()

    def _fail_with(self, reason: str) -> None:
        self._fatal = self._fatal or reason
        self._changes.notify()

    async def _fail(self) -> None:
        await self._changes.until(lambda: self._fatal is not None)
        raise RunFailed(self._fatal)

    # Replicas ------------------------------------------------------------------------------------------------------

    async def _supervise(self, member: Member) -> None:
        """Run one replica to its end, relaunching it as the policy allows."""
        action: Action | None = Action.START
        while action is not None and action is not Action.GIVE_UP:
            await asyncio.sleep(self._policy.delay(member.failures))
            action = await self._attempt(member, action)

    async def _attempt(self, member: Member, action: Action) -> Action | None:
        """One life of a replica, from its launch until nothing is left of it; what to do next, None when it is done."""
        launch = Launch(
            replica=member.replica_id,
            attempt=member.attempt,
            action=action,
            # A checkpoint knows the position that belongs to it.
            positions=self._ledger.positions(member.replica_id) if self._heals() else {},
            lighthouse_attempt=self._lighthouse_attempt,
        )
        replica = None
        try:
            try:
                replica = member.replica = await self._launch(launch)
                if launch.lighthouse_attempt != self._lighthouse_attempt:
                    await self._announce_lighthouse([replica])
                failure = await replica.run()
            except Exception as error:
                failure = Failure(cause=_in_a_line(error))
            if self._released:
                return None
            assert failure is not None, "a replica stays until it is released"
            return self._failed(member, failure)
        finally:
            member.replica = None
            if replica is not None:
                await _to_its_end(replica.stop())

    def _heals(self) -> bool:
        """Whether a replica that is launched now can take the state of a peer."""
        return any(member.has_state for member in self._members)

    def _failed(self, member: Member, failure: Failure) -> Action:
        """Account for a failure and decide what follows: the run may end with it."""
        attempt, cause = member.attempt, failure.cause or "its process died"
        member.failures += 1
        member.end_attempt()
        alone = not self._heals() and not self._restart_alone
        action = Action.GIVE_UP if alone else self._policy.next(member.failures)
        self._log(
            ReplicaFailed(
                replica=member.replica_id,
                attempt=attempt,
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
        if alone:
            peers = "no other replica is" if len(self._members) > 1 else "there is no other replica"
            self._fail_with(f"{where} failed and {peers} left to heal from: {cause}")
        elif left < self._min_replicas:
            self._fail_with(
                f"{left} of {len(self._members)} replicas left, monarch.min_replicas is {self._min_replicas}; "
                f"the last failure: {where}: {cause}"
            )
        self._changes.notify()
        return action

    # Their agreement -----------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Let all replicas leave once they have finished and agree."""
        if (difference := await self._end.reached()) is not None:
            raise RunFailed(difference)
        self._released = True
        await self._end.release()

    def _compare(self, state: ReplicaState) -> None:
        """Fail the run when two replicas have committed different global parameters in the same outer step."""
        found = (state.replica, state.global_parameters, state.outer_optimizer)
        first = self._states.setdefault((state.outer_step, state.rank), found)
        # One that restarts from its checkpoint takes outer steps again, on other data.
        if first[0] != state.replica and first[1:] != found[1:]:
            self._fail_with(
                f"replicas {first[0]} and {state.replica} differ after outer step {state.outer_step}, "
                f"on rank {state.rank}"
            )
        # Two outer steps are enough to compare; a month of them would fill the memory.
        self._states = {key: value for key, value in self._states.items() if key[0] > state.outer_step - 2}

    # The lighthouse ------------------------------------------------------------------------------------------------

    async def _new_lighthouse(self) -> LighthouseServer:
        try:
            return await self._start_lighthouse(self._lighthouse_attempt)
        except Exception as error:
            raise RunFailed(f"the lighthouse cannot be started: {_in_a_line(error)}") from error

    async def _keep_lighthouse(self, lighthouse: LighthouseServer) -> None:
        """Restart the quorum server whenever it is gone."""
        while True:
            try:
                cause = await lighthouse.run()
                self._lighthouse_attempt += 1
                self._log(LighthouseFailed(cause=cause))
            finally:
                await _to_its_end(lighthouse.stop())
            # One that is being launched learns it afterwards.
            await self._announce_lighthouse([member.replica for member in self._members if member.replica is not None])
            lighthouse = await self._new_lighthouse()

    async def _announce_lighthouse(self, replicas: Sequence[Replica]) -> None:
        """Tell replicas of the newest attempt. One that cannot be told is failing, and its supervision sees why."""
        calls = [replica.announce_lighthouse(self._lighthouse_attempt) for replica in replicas]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                await asyncio.gather(*calls, return_exceptions=True)


def _in_a_line(error: Exception) -> str:
    """What an exception says, its traceback and the rest of its message left out."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await _to_its_end(asyncio.gather(*tasks, return_exceptions=True))


async def _to_its_end(work: Awaitable[object]) -> None:
    """Await what must not be cut short: a cancellation is raised when it has ended."""
    future, cancelled = asyncio.ensure_future(work), None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        future.result()
    finally:
        if cancelled is not None:
            raise cancelled
