"""Runs every replica to its end, relaunches the ones that fail, and compares them before it calls the run a success."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from monarch_titan.control.agreement import Agreement
from monarch_titan.control.events import (
    Event,
    LighthouseFailed,
    OuterStep,
    OuterStepCommitted,
    ReplicaFailed,
    ReplicaFinished,
    ReplicaLost,
    ReplicasDiffer,
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

# A replica that is told something answers at once or is failing.
TELL_SECONDS = 5.0


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
        self._ledger = DataLedger()
        self._states, self._lineages = Agreement(), Agreement()
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
        self._log(message)
        if isinstance(message, ReplicaState):
            state = f"{message.global_parameters} {message.outer_optimizer}"
            self._compare(self._states, message.replica, message.rank, message.outer_step, state)

    def _receive_report(self, report: Report) -> None:
        member = self._members[report.replica]
        if isinstance(report, OuterStepCommitted):
            # Also of an attempt that has just failed.
            self._ledger.record(report.replica, report.rank, report.batches, report.data)
        if report.attempt != member.attempt:
            return
        member.take(report)
        if isinstance(report, OuterStepCommitted):
            self._compare(self._lineages, report.replica, report.rank, report.outer_step, report.lineage)
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
            positions=self._ledger.positions(member.replica_id),
            lighthouse_attempt=self._lighthouse_attempt,
        )
        replica = None
        try:
            try:
                replica = member.replica = await self._launch(launch)
                if launch.lighthouse_attempt != self._lighthouse_attempt:
                    await self._announce_lighthouse([replica])
                failure = await self._end_of(member, replica)
            except Exception as error:
                failure = Failure(cause=_in_a_line(error))
            if self._released:
                return None
            assert failure is not None, "a replica stays until it is released"
            return self._failed(member, failure)
        finally:
            member.replica = None
            if replica is not None:
                await _to_its_end(asyncio.gather(replica.stop(), self._tell_peers(member, launch.attempt)))

    async def _end_of(self, member: Member, replica: Replica) -> Failure | None:
        """Wait until a replica ends or has to: None when it was released, or what went wrong."""
        run = asyncio.ensure_future(replica.run())
        condemned = asyncio.create_task(self._changes.until(lambda: member.condemned is not None))
        try:
            await asyncio.wait([run, condemned], return_when=asyncio.FIRST_COMPLETED)
            return run.result() if run.done() else member.condemned
        finally:
            await _cancel(run, condemned)

    async def _tell_peers(self, member: Member, attempt: int) -> None:
        """Have nobody wait for an attempt that is over."""
        peers = [peer.replica for peer in self._members if peer is not member and peer.replica is not None]
        if not self._released:
            await _tell(peer.peer_gone(member.replica_id, attempt) for peer in peers)

    def _heals(self) -> bool:
        """Whether a replica that is launched now can take the state of a peer."""
        return any(member.has_state for member in self._members)

    def _failed(self, member: Member, failure: Failure) -> Action:
        """Account for a failure and decide what follows: the run may end with it."""
        attempt, cause = member.attempt, failure.cause or "its process died"
        member.failures += 1
        member.end_attempt()
        self._forget_states(member)
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

    def _forget_states(self, member: Member) -> None:
        for agreement in (self._states, self._lineages):
            agreement.forget(member.replica_id)

    def _compare(self, agreement: Agreement, replica: int, rank: int, outer_step: int, state: str) -> None:
        """Have replicas heal whose state is not that of most others; where there are no most, fail the run."""
        voters = {member.replica_id for member in self._members if member.has_state and member.condemned is None}
        if replica not in voters:
            return  # last words of an attempt that is over
        difference = agreement.take(replica, rank, outer_step, state, voters)
        if difference is None:
            return
        self._log(
            ReplicasDiffer(
                outer_step=difference.outer_step,
                rank=difference.rank,
                right=list(difference.right),
                wrong=list(difference.wrong),
            )
        )
        after = f"after outer step {difference.outer_step}"
        if not difference.right:
            first, *_, last = difference.wrong
            self._fail_with(f"replicas {first} and {last} differ {after}, on rank {difference.rank}")
        for wrong in difference.wrong if difference.right else ():
            others = ", ".join(map(str, difference.right))
            cause = f"its state {after} is not that of the other replicas ({others})"
            self._members[wrong].condemned = Failure(cause=cause, rank=difference.rank)
            self._forget_states(self._members[wrong])
        self._changes.notify()

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
        """Tell replicas of the newest attempt."""
        await _tell(replica.announce_lighthouse(self._lighthouse_attempt) for replica in replicas)


async def _tell(calls: Iterable[Awaitable[None]]) -> None:
    """Await calls to replicas. One that cannot be told is failing, and its supervision sees why."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TELL_SECONDS):
            await asyncio.gather(*calls, return_exceptions=True)


def _in_a_line(error: Exception) -> str:
    """What an exception says, its traceback and the rest of its message left out."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
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
