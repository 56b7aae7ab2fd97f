"""The controller's decisions, in milliseconds: replicas do what the test says, and nothing else is there."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from monarch_titan.control import controller, finish
from monarch_titan.control.controller import Controller, Failure, Launch, RunFailed
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
from monarch_titan.control.member import Changes
from monarch_titan.control.recovery import Action, RecoveryPolicy

START, RESPAWN, REALLOCATE = Action.START, Action.RESPAWN, Action.REALLOCATE


class FakeReplica:
    """A replica that lives until the test ends it, and reports what the test has it report."""

    def __init__(self, run: Run, launch: Launch) -> None:
        self._run, self.launch = run, launch
        self._ended: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self.attended = 0
        self.waits = False
        self.quorum = ready()
        """A replica that attends is back when this is set."""
        self.finished_ranks: set[int] = set()
        self.runs = self.released = self.stopped = False
        self.may_stop = ready()
        self.lighthouse_attempt = launch.lighthouse_attempt
        self.gone: list[tuple[int, int]] = []
        """Attempts of peers that it was told of."""

    @property
    def held(self) -> bool:
        return self.finished_ranks == set(self._run.all_ranks)

    # What the controller calls

    async def run(self) -> Failure | None:
        self.runs = True
        return await self._ended

    async def attend(self) -> None:
        self.attended += 1
        self.waits = True
        await self.quorum.wait()
        self.waits = False

    async def announce_lighthouse(self, attempt: int) -> None:
        self.lighthouse_attempt = attempt

    async def peer_gone(self, replica: int, attempt: int) -> None:
        self.gone.append((replica, attempt))

    async def release(self) -> None:
        self.released = True
        self._ended.set_result(None)

    async def stop(self) -> None:
        await self.may_stop.wait()
        self.stopped = True

    # What the test has it do

    def fail(self, cause: str | None = "it broke", rank: int | None = None) -> None:
        self._ended.set_result(Failure(cause=cause, rank=rank, log="a.log"))

    def crash(self, error: Exception) -> None:
        self._ended.set_exception(error)

    def ask(self, rank: int = 0) -> None:
        self.report(QuorumRequested, rank)

    def form(self, rank: int = 0, has_state: bool = False) -> None:
        """Come out of a quorum."""
        self.report(QuorumFormed, rank, has_state=has_state)

    def commit(
        self, outer_step: int, *, contributed: bool = True, ranks: tuple[int, ...] | None = None, lineage: str = "same"
    ) -> None:
        """Commit an outer step on these ranks, or on all; a rank's position is told by attempt, outer step and rank."""
        for rank in self._run.all_ranks if ranks is None else ranks:
            position = f"{self.launch.attempt}.{outer_step}.{rank}"
            where = {"outer_step": outer_step, "batches": 20 * outer_step, "data": position, "lineage": lineage}
            self.report(OuterStepCommitted, rank, **where)
        self.tell_outer_step(outer_step, committed=True, contributed=contributed)

    def tell_outer_step(self, outer_step: int, *, committed: bool, contributed: bool) -> None:
        self._run.controller.receive(
            OuterStep(
                replica=self.launch.replica,
                outer_step=outer_step,
                step=20 * outer_step,
                participants=3,
                committed=committed,
                contributed=contributed,
                seconds=0.1,
                bytes=8,
            )
        )

    def finish(self, outer_step: int = 3, state: str = "same", ranks: tuple[int, ...] | None = None) -> None:
        """Have trained all steps, on these ranks or on all."""
        for rank in self._run.all_ranks if ranks is None else ranks:
            self.finished_ranks.add(rank)
            self.report(TrainerFinished, rank, step=60, outer_step=outer_step, state=state)

    def report(self, kind: type[Report], rank: int, **values: Any) -> None:
        ids = {"replica": self.launch.replica, "attempt": self.launch.attempt, "rank": rank}
        self._run.controller.receive(kind(**ids, **values))


class FakeLighthouse:
    """A lighthouse that lives until the test ends it."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stopped = False
        self.may_stop = ready()

    async def run(self) -> str:
        return await self.died

    async def stop(self) -> None:
        await self.may_stop.wait()
        self.stopped = True


class Run:
    """A controller, what it started and what it logged."""

    def __init__(self, num_replicas: int, min_replicas: int, ranks: int, **options: Any) -> None:
        self.all_ranks = range(ranks)
        self.replicas: list[FakeReplica] = []
        self.lighthouses: list[FakeLighthouse] = []
        self.log: list[Event] = []
        self.reason: str | None = None
        """Why the run failed, if it did."""
        self.before_launch: Callable[[Launch], Awaitable[None]] = nothing
        self.before_lighthouse: Callable[[int], Awaitable[None]] = nothing
        self.controller = Controller(
            self._launch,
            self._start_lighthouse,
            num_replicas=num_replicas,
            min_replicas=min_replicas,
            ranks_per_replica=ranks,
            log=self.log.append,
            **{"policy": policy(), **options},
        )

    async def _launch(self, launch: Launch) -> FakeReplica:
        await self.before_launch(launch)
        self.replicas.append(replica := FakeReplica(self, launch))
        return replica

    async def _start_lighthouse(self, attempt: int) -> FakeLighthouse:
        await self.before_lighthouse(attempt)
        self.lighthouses.append(lighthouse := FakeLighthouse(attempt))
        return lighthouse

    def __getitem__(self, replica_id: int) -> FakeReplica:
        """The newest attempt of a replica."""
        return [replica for replica in self.replicas if replica.launch.replica == replica_id][-1]

    def actions(self, replica_id: int) -> list[Action]:
        return [replica.launch.action for replica in self.replicas if replica.launch.replica == replica_id]

    def events(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.log if isinstance(event, kind)]

    async def follow(self, scenario: Callable[[Run], Awaitable[None]], setup: Callable[[Run], None]) -> None:
        """Run the scenario, then have all that still train finish; whatever the end, nothing may be left."""
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        setup(self)
        self.task = asyncio.create_task(self.controller.run())
        await settle()
        await scenario(self)
        await settle()
        async with asyncio.timeout(5):
            await self._end()
        error = self._error()
        gc.collect()  # has asyncio complain of exceptions that nobody took
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert complaints == []
        assert all(each.stopped for each in [*self.replicas, *self.lighthouses])
        if isinstance(error, RunFailed):
            self.reason = str(error)
        elif error is not None:
            raise error

    def _error(self) -> BaseException | None:
        """How the run ended. What it had in its hands is let go of."""
        task = self.__dict__.pop("task")
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        return error and error.with_traceback(None)

    async def _end(self) -> None:
        while not self.task.done():
            for replica_id in sorted({replica.launch.replica for replica in self.replicas}):
                if not (self[replica_id].held or self[replica_id].stopped):
                    self[replica_id].finish()
            await asyncio.wait([self.task], timeout=0.002)


def train(
    scenario: Callable[[Run], Awaitable[None]],
    *,
    setup: Callable[[Run], None] = lambda _: None,
    num_replicas: int = 3,
    min_replicas: int = 2,
    ranks: int = 1,
    **options: Any,
) -> Run:
    """The run after all of it is over: the scenario, then the end of all replicas that it left training."""

    async def follow() -> Run:
        run = Run(num_replicas, min_replicas, ranks, **options)
        await run.follow(scenario, setup)
        return run

    return asyncio.run(follow())


def policy(**options: Any) -> RecoveryPolicy:
    return RecoveryPolicy(**{"backoff_seconds": 0, **options})


async def settle() -> None:
    """Return when everything has happened that follows from what the test did."""
    for _ in range(30):
        await asyncio.sleep(0)


async def nothing(_: object) -> None:
    """What happens before a launch, unless the test says otherwise."""


def ready() -> asyncio.Event:
    """An event that has happened; a test clears it to have something wait."""
    event = asyncio.Event()
    event.set()
    return event


async def fail(run: Run, replica_id: int, times: int = 1) -> None:
    """Have a replica fail in so many attempts."""
    for _ in range(times):
        run[replica_id].fail()
        await settle()


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Garbage is collected in every test: leave out what was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def impatient(monkeypatch):
    """Waits that are there for a slow world are short. Without it, nothing in these tests happens by time alone."""
    monkeypatch.setattr(finish, "ATTEND_AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(controller, "TELL_SECONDS", 0.01)


# Failures and what follows -------------------------------------------------------------------------------------------


def test_failed_replica_is_respawned_then_reallocated():
    run = train(lambda run: fail(run, 1, times=3), policy=policy(respawns=2))
    assert run.actions(1) == [START, RESPAWN, REALLOCATE, RESPAWN]
    assert [event.action for event in run.events(ReplicaFailed)] == ["respawn", "reallocate", "respawn"]
    assert run.reason is None


def test_replica_that_had_no_part_of_the_checkpoint_is_no_peer_to_heal_from():
    assert "no other replica is left to heal from" in train(lambda run: fail(run, 1), without_state=[0, 2]).reason
    assert train(lambda run: fail(run, 0), without_state=[0, 2]).reason is None


def test_attempts_are_counted():
    run = train(lambda run: fail(run, 1, times=2))
    assert [replica.launch.attempt for replica in run.replicas if replica.launch.replica == 1] == [0, 1, 2]
    assert [event.attempt for event in run.events(ReplicaFailed)] == [0, 1]


def test_replica_is_given_up_and_the_others_finish():
    run = train(lambda run: fail(run, 1, times=3), policy=policy(max_failures=3))
    assert len(run.actions(1)) == 3
    assert [(event.replica, event.failures, event.cause) for event in run.events(ReplicaLost)] == [(1, 3, "it broke")]
    assert run.reason is None


def test_run_fails_when_too_few_replicas_are_left():
    async def scenario(run):
        await fail(run, 1)
        run[2].fail("out of memory", rank=5)

    run = train(scenario, policy=policy(max_failures=1))
    assert run.reason == (
        "1 of 3 replicas left, monarch.min_replicas is 2; the last failure: replica 2 rank 5: out of memory"
    )


def test_every_replica_counts_where_all_are_needed():
    run = train(lambda run: fail(run, 1), min_replicas=3, policy=policy(max_failures=1))
    assert run.reason.startswith("2 of 3 replicas left, monarch.min_replicas is 3;")


def test_replica_that_can_come_back_does_not_end_a_run_that_needs_all():
    run = train(lambda run: fail(run, 1), min_replicas=3)
    assert run.actions(1) == [START, RESPAWN]
    assert run.reason is None


def test_outer_step_of_its_own_sets_the_failures_in_a_row_back():
    async def scenario(run):
        for outer_step in range(5):
            run[1].commit(outer_step)
            await fail(run, 1)

    run = train(scenario, policy=policy(respawns=2, max_failures=3))
    assert run.actions(1) == [START, *[RESPAWN] * 5]


def test_outer_step_after_healing_does_not_set_them_back():
    async def scenario(run):
        for outer_step in range(3):
            run[1].commit(outer_step, contributed=False)
            await fail(run, 1)

    run = train(scenario, policy=policy(max_failures=3))
    assert len(run.actions(1)) == 3
    assert [event.replica for event in run.events(ReplicaLost)] == [1]


def test_outer_step_that_does_not_commit_does_not_set_them_back():
    async def scenario(run):
        for outer_step in range(3):
            run[1].tell_outer_step(outer_step, committed=False, contributed=True)
            await fail(run, 1)

    assert len(train(scenario, policy=policy(max_failures=3)).actions(1)) == 3


def test_relaunch_waits_as_long_as_the_policy_says():
    asked = []

    class Recorded(RecoveryPolicy):
        def delay(self, failures: int) -> float:
            asked.append(failures)
            return 0.0

    train(lambda run: fail(run, 1, times=3), policy=Recorded())
    assert asked == [0, 0, 0, 1, 2, 3]


def test_failure_names_replica_rank_step_cause_and_log():
    async def scenario(run):
        run.controller.receive(Step(replica=1, step=7, loss=2.0, tokens=10, seconds=1.0))
        run[1].fail("killed by SIGKILL", rank=1)
        await settle()

    (failed,) = train(scenario).events(ReplicaFailed)
    assert dataclasses.replace(failed, time=0.0) == ReplicaFailed(
        time=0.0, replica=1, attempt=0, rank=1, step=7, cause="killed by SIGKILL", log="a.log", action="respawn"
    )


def test_unknown_cause_is_said_to_be_a_dead_process():
    async def scenario(run):
        run[1].fail(None)
        await settle()

    assert [event.cause for event in train(scenario).events(ReplicaFailed)] == ["its process died"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("\n  no such host\n  at line 3"), "ValueError: no such host"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_exception_of_a_replica_is_a_failure_told_in_one_line(error, cause):
    async def scenario(run):
        run[1].crash(error)
        await settle()

    run = train(scenario)
    assert [event.cause for event in run.events(ReplicaFailed)] == [cause]
    assert run.actions(1) == [START, RESPAWN]


def test_launch_that_raises_is_a_failure():
    async def refuse_once(launch):
        if (launch.replica, launch.attempt) == (1, 0):
            raise OSError("no host")

    def setup(run):
        run.before_launch = refuse_once

    run = train(nothing, setup=setup)
    assert [(event.replica, event.cause) for event in run.events(ReplicaFailed)] == [(1, "OSError: no host")]
    assert run.actions(1) == [RESPAWN]
    assert run.reason is None


def test_failure_is_told_before_what_is_left_of_the_replica_is_stopped():
    async def scenario(run):
        dying = run[1]
        dying.may_stop.clear()
        await fail(run, 1)
        assert len(run.events(ReplicaFailed)) == 1
        assert run[1] is dying, "nothing is launched next to what is left"
        dying.may_stop.set()
        await settle()
        assert run[1] is not dying

    train(scenario)


def test_replica_that_leaves_unasked_is_an_error_rather_than_a_wait_for_ever():
    async def scenario(run):
        run[0].finish()
        await run[0].release()

    with pytest.raises(AssertionError, match="until it is released"):
        train(scenario)


# Whom to heal from ---------------------------------------------------------------------------------------------------


def test_run_whose_replicas_all_fail_ends_at_once_with_the_cause():
    async def scenario(run):
        for replica_id in range(3):
            run[replica_id].fail("ValueError: bad data", rank=0)
            await settle()

    run = train(scenario)
    assert run.reason == "replica 2 rank 0 failed and no other replica is left to heal from: ValueError: bad data"
    assert [event.action for event in run.events(ReplicaFailed)] == ["respawn", "respawn", "give up"]


def test_quorum_of_replicas_that_need_a_state_gives_them_none():
    async def scenario(run):
        for replica_id in range(2):
            await fail(run, replica_id)
            run[replica_id].ask()
            run[replica_id].form()
        run[2].fail()

    assert "no other replica is left to heal from" in train(scenario).reason


def test_replica_that_has_caught_up_can_heal_the_others():
    async def scenario(run):
        await fail(run, 0)
        run[0].commit(1, contributed=False)
        await fail(run, 1)
        await fail(run, 2)

    run = train(scenario)
    assert run.actions(2) == [START, RESPAWN]
    assert run.reason is None


@pytest.mark.parametrize("ranks_that_healed", [1, 2])
def test_replica_that_has_healed_on_all_ranks_can_heal_the_others(ranks_that_healed):
    async def scenario(run):
        await fail(run, 0)
        for rank in range(ranks_that_healed):
            run[0].form(rank, has_state=True)
        await fail(run, 1)

    run = train(scenario, num_replicas=2, min_replicas=2, ranks=2)
    healed = "replica 1 failed and no other replica is left to heal from: it broke" if ranks_that_healed < 2 else None
    assert run.reason == healed


def test_replica_that_took_the_final_state_can_heal_the_others():
    async def scenario(run):
        await fail(run, 0)
        run[0].finish()
        await fail(run, 1)
        await fail(run, 2)

    assert train(scenario).reason is None


def test_only_replica_is_not_relaunched_without_a_checkpoint():
    run = train(lambda run: fail(run, 0), num_replicas=1, min_replicas=1)
    assert run.actions(0) == [START]
    assert run.reason == "replica 0 failed and there is no other replica left to heal from: it broke"


def test_only_replica_restarts_from_its_checkpoint():
    run = train(lambda run: fail(run, 0, times=2), num_replicas=1, min_replicas=1, restart_alone=True)
    assert run.actions(0) == [START, RESPAWN, RESPAWN]
    assert run.reason is None


def test_only_replica_is_given_up_after_max_failures():
    options = {"num_replicas": 1, "min_replicas": 1, "restart_alone": True, "policy": policy(max_failures=2)}
    run = train(lambda run: fail(run, 0, times=2), **options)
    assert run.reason.startswith("0 of 1 replicas left")


# Data positions ------------------------------------------------------------------------------------------------------


def test_respawn_knows_where_its_dataloaders_were_at_its_last_outer_steps():
    async def scenario(run):
        run[1].commit(1)
        run[1].commit(2, ranks=(1,))
        await fail(run, 1)

    assert train(scenario, ranks=2)[1].launch.positions == {0: {20: "0.1.0"}, 1: {20: "0.1.1", 40: "0.2.1"}}


def test_respawn_before_the_first_outer_step_begins_anew():
    async def scenario(run):
        run[0].commit(1)
        await fail(run, 1)

    assert train(scenario)[1].launch.positions == {}


def test_commit_reported_while_the_replica_is_being_stopped_counts():
    async def scenario(run):
        dying = run[1]
        dying.may_stop.clear()
        await fail(run, 1)
        dying.commit(1)
        dying.may_stop.set()
        await settle()

    assert train(scenario)[1].launch.positions == {0: {20: "0.1.0"}}


# Peers that need not wait ---------------------------------------------------------------------------------------------


def test_peers_are_told_at_once_of_an_attempt_that_is_over():
    async def scenario(run):
        dying = run[1]
        dying.may_stop.clear()
        await fail(run, 1)
        assert [run[replica].gone for replica in (0, 2)] == [[(1, 0)]] * 2, "while it is still being stopped"
        dying.may_stop.set()
        await settle()
        await fail(run, 1)
        assert [run[replica].gone for replica in (0, 2)] == [[(1, 0), (1, 1)]] * 2
        assert run[1].gone == []

    train(scenario)


@pytest.mark.parametrize("answer", ["never", "error"])
def test_peer_that_cannot_be_told_holds_up_nothing(monkeypatch, answer):
    async def scenario(run):
        async def mute(replica, attempt):
            if answer == "error":
                raise RuntimeError("it is failing")
            await asyncio.Event().wait()

        monkeypatch.setattr(controller, "TELL_SECONDS", 0.01)
        run[0].peer_gone = mute
        await fail(run, 1)
        await asyncio.sleep(0.05)
        assert run.actions(1) == [START, RESPAWN]

    assert train(scenario).reason is None


def test_nobody_is_told_of_replicas_that_leave_at_the_end():
    assert all(replica.gone == [] for replica in train(lambda run: settle()).replicas)


# Reports of an attempt that is over ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relaunched", [False, True], ids=["while it is stopped", "after the relaunch"])
def test_attempt_that_is_over_is_not_held(relaunched):
    async def scenario(run):
        old = run[1]
        if not relaunched:
            old.may_stop.clear()
        await fail(run, 1)
        old.finish(ranks=(0,))
        old.may_stop.set()
        await settle()
        run[1].finish(ranks=(1,))
        run[0].finish()
        run[2].finish()
        await settle()
        assert not run[0].released
        assert len(run.events(ReplicaFinished)) == 2

    assert train(scenario, ranks=2).reason is None


def test_attempt_that_is_over_asks_for_nothing():
    async def scenario(run):
        old = run[1]
        old.may_stop.clear()
        run[0].finish()
        await fail(run, 1)
        old.ask()
        await settle()
        assert run[0].attended == 0
        old.may_stop.set()

    train(scenario)


def test_attempt_that_is_over_has_no_state_to_give():
    async def scenario(run):
        for replica_id in range(2):
            old = run[replica_id]
            await fail(run, replica_id)
            old.commit(1)
        run[2].fail()

    assert "no other replica is left to heal from" in train(scenario).reason


# The end of the run --------------------------------------------------------------------------------------------------


def test_replicas_are_held_until_all_have_finished():
    async def scenario(run):
        run[0].finish()
        run[1].finish()
        await settle()
        assert not any(replica.released for replica in run.replicas)
        run[2].finish()
        await settle()
        assert all(replica.released for replica in run.replicas)

    assert train(scenario).reason is None


def test_replica_has_finished_when_all_its_ranks_have():
    async def scenario(run):
        run[0].finish(ranks=(0,))
        run[1].finish()
        run[2].finish()
        await settle()
        assert not run[1].released
        assert [event.replica for event in run.events(ReplicaFinished)] == [1, 2]
        run[0].finish(ranks=(1,))

    run = train(scenario, ranks=2)
    assert [(event.replica, event.step, event.outer_step) for event in run.events(ReplicaFinished)] == [
        (1, 60, 3),
        (2, 60, 3),
        (0, 60, 3),
    ]


def test_lost_replica_is_not_waited_for():
    async def scenario(run):
        run[0].finish()
        run[1].finish()
        await fail(run, 2)
        assert run[0].released and run[1].released

    run = train(scenario, policy=policy(max_failures=1))
    assert run.reason is None


def test_nobody_attends_while_nobody_asks():
    async def scenario(run):
        run[0].finish()
        run[1].ask()
        run[1].form()
        await settle()

    assert [replica.attended for replica in train(scenario).replicas] == [0, 0, 0]


def test_held_replicas_attend_the_quorum_that_another_asks_for():
    async def scenario(run):
        run[0].finish()
        run[1].finish()
        run[2].ask()
        await settle()
        run[2].form()
        await settle()

    assert [replica.attended for replica in train(scenario).replicas] == [1, 1, 0]


def test_replica_that_failed_while_it_asked_is_attended_when_it_asks_again():
    hosts = asyncio.Event()

    async def wait_for_hosts(_):
        await hosts.wait()

    async def scenario(run):
        run[2].ask()
        run.before_launch = wait_for_hosts
        await fail(run, 2)
        run[0].finish()
        await settle()
        assert run[0].attended == 0
        hosts.set()
        await settle()
        run[2].ask()
        await settle()
        assert run[0].attended == 1
        run[2].form()

    train(scenario)


def test_replica_that_cannot_attend_is_failing_and_relaunched():
    async def gone() -> None:
        raise ConnectionError("gone")

    async def scenario(run):
        run[0].finish()
        run[0].attend = gone
        run[2].ask()
        await settle()
        await fail(run, 0)
        run[2].form()

    run = train(scenario)
    assert run.actions(0) == [START, RESPAWN]
    assert [event.cause for event in run.events(ReplicaFailed)] == ["it broke"]


def test_quorum_that_formed_without_the_late_one_is_attended_again(impatient):
    async def scenario(run):
        run[0].finish()
        run[1].finish()
        run[2].ask()
        while run[0].attended < 3 or run[1].attended < 3:
            await asyncio.sleep(0.001)
        run[2].form()

    assert train(scenario).reason is None


def test_replica_that_is_late_twice_is_attended_twice():
    async def scenario(run):
        run[0].finish()
        for _ in range(2):
            run[2].ask()
            await settle()
            run[2].form()
            await settle()
        assert run[0].attended == 2

    train(scenario)


def test_replica_that_finishes_later_joins_those_that_already_wait_in_a_quorum():
    async def scenario(run):
        run[0].quorum.clear()
        run[0].finish()
        run[2].ask()
        await settle()
        run[1].finish()
        await settle()
        assert [run[0].attended, run[1].attended] == [1, 1]
        run[0].quorum.set()
        run[2].form()

    assert train(scenario).reason is None


def test_replica_that_fails_while_it_attends_is_relaunched():
    async def scenario(run):
        run[0].finish()
        run[0].quorum.clear()
        run[2].ask()
        await settle()
        run[0].quorum.set()  # as the end of its processes does
        await fail(run, 0)
        run[2].form()

    run = train(scenario)
    assert run.actions(0) == [START, RESPAWN]
    assert run.reason is None


def test_held_replica_that_dies_is_relaunched_and_helped_by_its_peers():
    async def scenario(run):
        for replica_id in range(2):
            run[replica_id].finish()
        await fail(run, 0)
        run[0].ask()
        await settle()
        assert run[1].attended == 1
        assert not run[1].released
        run[0].form()
        run[0].finish()
        run[2].finish()
        await settle()
        assert all(run[replica_id].released for replica_id in range(3))

    run = train(scenario)
    assert run.actions(0) == [START, RESPAWN]


def test_nothing_is_relaunched_after_the_release():
    async def scenario(run):
        run[0].release = nothing_more  # it dies instead of leaving
        for replica in run.replicas:
            replica.finish()
        await settle()
        await fail(run, 0)

    async def nothing_more() -> None:
        return

    run = train(scenario)
    assert run.actions(0) == [START]
    assert run.reason is None


def test_replica_that_dies_of_the_release_does_not_fail_the_run():
    async def scenario(run):
        async def die() -> None:
            run[0].fail()
            raise ConnectionError("gone")

        run[0].release = die
        for replica in run.replicas:
            replica.finish()

    run = train(scenario)
    assert run.reason is None
    assert not run.events(ReplicaFailed)


def test_global_parameters_that_differ_at_the_end_fail_the_run():
    async def scenario(run):
        for replica_id, state in enumerate(["same", "same", "other"]):
            run[replica_id].finish(ranks=(0,))
            run[replica_id].finish(ranks=(1,), state=state)

    run = train(scenario, ranks=2)
    assert run.reason == "the replicas' global parameters differ at the end, on rank 1"
    assert not any(replica.released for replica in run.replicas)


def test_first_of_several_ranks_that_differ_is_named():
    async def scenario(run):
        run[0].finish()
        run[1].finish(state="other")
        run[2].finish()

    assert train(scenario, ranks=2).reason == "the replicas' global parameters differ at the end, on rank 0"


def test_ranks_of_a_replica_may_differ():
    async def scenario(run):
        for replica in run.replicas:
            replica.finish(ranks=(0,), state="first shard")
            replica.finish(ranks=(1,), state="second shard")

    assert train(scenario, ranks=2).reason is None


def test_replica_that_missed_the_last_outer_step_heals_in_one_more_quorum(impatient):
    async def scenario(run):
        run[0].finish(outer_step=3)
        run[1].finish(outer_step=3)
        run[2].finish(outer_step=2, state="older")
        while not all(replica.attended for replica in run.replicas):
            await asyncio.sleep(0.001)
        run[2].finish(outer_step=3)

    run = train(scenario)
    assert run.reason is None
    assert [event.outer_step for event in run.events(ReplicaFinished)] == [3, 3, 2, 3]


def test_ranks_that_tell_of_their_healing_one_after_the_other_are_waited_for(impatient):
    async def scenario(run):
        run[0].finish(outer_step=3)
        run[1].finish(outer_step=3)
        run[2].finish(outer_step=2, state="older")
        while not all(replica.attended for replica in run.replicas):
            await asyncio.sleep(0.001)
        run[2].finish(outer_step=3, ranks=(0,))
        await settle()
        run[2].finish(outer_step=3, ranks=(1,))

    run = train(scenario, ranks=2)
    assert run.reason is None
    assert [event.outer_step for event in run.events(ReplicaFinished)] == [3, 3, 2, 3]


def test_replica_that_never_reaches_the_last_outer_step_fails_the_run(impatient, monkeypatch):
    monkeypatch.setattr(finish, "ALIGN_SECONDS", 0.1)

    async def scenario(run):
        for replica_id, outer_step in enumerate([3, 3, 2]):
            run[replica_id].finish(outer_step=outer_step)

    run = train(scenario)
    assert run.reason == "the replicas' global parameters differ at the end, on rank 0"
    assert all(replica.attended > 0 for replica in run.replicas)


def test_replica_that_dies_in_the_last_quorum_is_waited_for(impatient):
    async def scenario(run):
        for replica_id, outer_step in enumerate([3, 3, 2]):
            run[replica_id].finish(outer_step=outer_step)
        while not run[2].attended:
            await asyncio.sleep(0.001)
        await fail(run, 2)
        assert run.actions(2) == [START, RESPAWN]

    assert train(scenario).reason is None


def test_replica_that_dies_in_the_last_quorum_may_take_long_to_come_back(impatient, monkeypatch):
    monkeypatch.setattr(finish, "ALIGN_SECONDS", 0.05)
    hosts = asyncio.Event()

    async def wait_for_hosts(_):
        await hosts.wait()

    async def scenario(run):
        for replica_id, outer_step in enumerate([3, 3, 2]):
            run[replica_id].finish(outer_step=outer_step)
        while not run[2].attended:
            await asyncio.sleep(0.001)
        run.before_launch = wait_for_hosts
        await fail(run, 2)
        await asyncio.sleep(2 * finish.ALIGN_SECONDS)
        run[1].quorum.clear()
        hosts.set()
        await settle()
        run[2].ask()
        while not run[1].waits:
            await asyncio.sleep(0.001)
        run[2].form()
        run[2].finish()
        await settle()
        assert not run[1].released, "it is still in a quorum"
        run[1].quorum.set()

    run = train(scenario)
    assert run.reason is None
    assert all(run[replica_id].released for replica_id in range(3))


def test_replica_that_healed_to_other_parameters_in_the_last_quorum_fails_the_run(impatient):
    async def scenario(run):
        for replica_id, outer_step in enumerate([3, 3, 2]):
            run[replica_id].finish(outer_step=outer_step)
        while not all(replica.attended for replica in run.replicas):
            await asyncio.sleep(0.001)
        run[2].finish(outer_step=3, state="other")

    assert train(scenario).reason == "the replicas' global parameters differ at the end, on rank 0"


def test_nobody_leaves_while_one_waits_in_a_quorum_and_all_help_it_out(impatient):
    async def scenario(run):
        run[0].quorum.clear()
        run[0].finish()
        run[2].ask()
        await settle()
        run[2].form()  # without replica 0, which waits for the next one
        run[1].finish()
        run[2].finish()
        await settle()
        assert not run[1].released
        while not (run[1].attended and run[2].attended):
            await asyncio.sleep(0.001)
        run[0].quorum.set()

    run = train(scenario)
    assert run.reason is None
    assert all(replica.released for replica in run.replicas)


def test_what_comes_about_in_the_moment_of_the_timeout_counts():
    async def wait() -> bool:
        changes, happened = Changes(), []
        waiting = asyncio.create_task(changes.until(lambda: bool(happened), within=0))
        await asyncio.sleep(0)
        happened.append(True)
        changes.notify()
        return await waiting

    assert asyncio.run(wait())


# Replicas compared after every outer step ----------------------------------------------------------------------------


def state(
    replica: int, outer_step: int, parameters: str = "same", momentum: str = "same", rank: int = 0
) -> ReplicaState:
    return ReplicaState(
        replica=replica,
        rank=rank,
        outer_step=outer_step,
        step=20 * outer_step,
        healed=False,
        global_parameters=parameters,
        outer_optimizer=momentum,
        optimizer=f"own of {replica}",
        lr=1e-3,
    )


def receive(*states: ReplicaState) -> Callable[[Run], Awaitable[None]]:
    async def scenario(run: Run) -> None:
        for each in states:
            run.controller.receive(each)
        await settle()

    return scenario


def test_outer_step_of_a_replica_that_died_with_it_may_be_taken_anew_and_otherwise():
    async def scenario(run):
        run.controller.receive(state(1, 2, "of one who died"))
        await fail(run, 1)
        run.controller.receive(state(1, 2, "its last words"))
        run.controller.receive(state(0, 2))

    assert train(scenario).reason is None


@pytest.mark.parametrize("what", ["parameters", "momentum"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_replica_that_differs_from_the_others_after_an_outer_step_heals(what, order):
    states = [state(0, 1, rank=1), state(1, 1, rank=1), state(2, 1, rank=1, **{what: "other"})]
    run = train(receive(*(states[index] for index in order)), ranks=2)
    assert run.reason is None
    (failed,) = run.events(ReplicaFailed)
    assert (failed.replica, failed.rank, failed.action) == (2, 1, "respawn")
    assert failed.cause == "its state after outer step 1 is not that of the other replicas (0, 1)"
    assert [replica.launch.attempt for replica in run.replicas if replica.launch.replica == 2] == [0, 1]


def test_replica_that_alone_took_an_outer_step_heals_without_its_parameters_being_compared():
    async def scenario(run):
        run[0].commit(1, lineage="of 0, 1 and 2")
        for replica in (1, 2):
            run[replica].commit(1, lineage="of 1 and 2")
        await settle()
        for replica in (1, 2):
            run[replica].commit(2, lineage="of 1 and 2, twice")

    run = train(scenario)
    assert run.reason is None
    assert [(event.replica, event.cause) for event in run.events(ReplicaFailed)] == [
        (0, "its state after outer step 1 is not that of the other replicas (1, 2)")
    ]


def test_replica_that_was_stopped_for_its_state_is_not_compared_until_it_has_healed():
    async def scenario(run):
        await receive(state(0, 1), state(1, 1), state(2, 1, "other"), state(2, 2, "other"), state(0, 2))(run)
        run.controller.receive(state(2, 1, "last words"))

    run = train(scenario)
    assert run.reason is None
    assert [event.replica for event in run.events(ReplicaFailed)] == [2]


def test_replicas_that_differ_fail_the_run_where_no_majority_tells_who_is_wrong():
    run = train(receive(state(0, 1), state(1, 1, "other")), num_replicas=2)
    assert run.reason == "replicas 0 and 1 differ after outer step 1, on rank 0"
    run = train(receive(state(0, 1), state(1, 1, "other"), state(2, 1, "third")))
    assert run.reason == "replicas 0 and 2 differ after outer step 1, on rank 0"


def test_replicas_that_are_lost_have_no_voice():
    async def scenario(run):
        await fail(run, 2)
        await receive(state(0, 1), state(1, 1, "other"))(run)

    assert train(scenario).reason == "replicas 0 and 1 differ after outer step 1, on rank 0"


def test_replicas_that_agree_after_each_outer_step_go_on():
    states = [state(replica, outer_step, f"of {outer_step}") for outer_step in range(1, 6) for replica in range(3)]
    run = train(receive(*states))
    assert run.reason is None
    assert len(run.events(ReplicaState)) == 15


def test_replica_one_outer_step_behind_is_still_compared():
    run = train(receive(state(0, 1), state(1, 1), state(0, 2), state(2, 1, "other")))
    assert [event.replica for event in run.events(ReplicaFailed)] == [2]


def test_memory_of_the_comparison_does_not_grow_with_the_run():
    run = train(receive(*(state(replica, outer_step) for outer_step in range(100) for replica in range(3))))
    assert len(run.controller._states._said) == 2


def test_replica_that_repeats_outer_steps_is_not_compared_with_itself():
    run = train(receive(state(0, 1), state(0, 1, "other")), num_replicas=1, min_replicas=1)
    assert run.reason is None


# The lighthouse ------------------------------------------------------------------------------------------------------


def test_lighthouse_that_dies_is_restarted_under_the_next_number():
    async def scenario(run):
        for number in range(2):
            run.lighthouses[number].died.set_result("killed by SIGKILL")
            await settle()

    run = train(scenario)
    assert [lighthouse.attempt for lighthouse in run.lighthouses] == [0, 1, 2]
    assert [event.cause for event in run.events(LighthouseFailed)] == ["killed by SIGKILL"] * 2
    assert not run.events(ReplicaFailed)


def test_all_replicas_know_of_the_new_lighthouse_before_it_starts():
    known = []

    async def scenario(run):
        async def note(_):
            known.extend(replica.lighthouse_attempt for replica in run.replicas)
            assert run.lighthouses[0].stopped

        run.before_lighthouse = note
        run.lighthouses[0].died.set_result("")
        await settle()

    train(scenario)
    assert known == [1, 1, 1]


def test_death_of_the_lighthouse_is_told_before_what_is_left_of_it_is_stopped():
    async def scenario(run):
        run.lighthouses[0].may_stop.clear()
        run.lighthouses[0].died.set_result("frozen")
        await settle()
        assert len(run.events(LighthouseFailed)) == 1
        assert len(run.lighthouses) == 1
        run.lighthouses[0].may_stop.set()

    train(scenario)


def test_replica_that_is_being_stopped_is_not_told():
    async def scenario(run):
        dying = run[1]
        dying.may_stop.clear()
        await fail(run, 1)
        run.lighthouses[0].died.set_result("")
        await settle()
        assert dying.lighthouse_attempt == 0
        dying.may_stop.set()

    assert train(scenario)[1].launch.lighthouse_attempt == 1


def test_replica_launched_during_the_restart_learns_of_it():
    async def scenario(run):
        launching = asyncio.Event()

        async def wait(_):
            await launching.wait()

        run.before_launch = wait
        await fail(run, 1)
        run.lighthouses[0].died.set_result("")
        await settle()
        launching.set()
        await settle()
        assert run[1].launch.lighthouse_attempt == 0
        assert run[1].lighthouse_attempt == 1

    train(scenario)


@pytest.mark.parametrize("answer", ["never", "error"])
def test_replica_launched_during_the_restart_trains_even_if_it_does_not_answer(answer, impatient, monkeypatch):
    launching = asyncio.Event()

    async def wait(_):
        await launching.wait()

    async def scenario(run):
        run.before_launch = wait
        await fail(run, 1)
        run.lighthouses[0].died.set_result("")
        await settle()
        monkeypatch.setattr(FakeReplica, "announce_lighthouse", {"never": never, "error": refuse}[answer])
        launching.set()
        while not run[1].runs:
            await asyncio.sleep(0.001)

    async def never(*_):
        await asyncio.Event().wait()

    async def refuse(*_):
        raise ConnectionError("gone")

    run = train(scenario)
    assert run.actions(1) == [START, RESPAWN]
    assert run.reason is None


def test_replica_launched_after_the_restart_is_launched_with_its_number():
    async def scenario(run):
        run.lighthouses[0].died.set_result("")
        await settle()
        await fail(run, 1)

    assert train(scenario)[1].launch.lighthouse_attempt == 1


@pytest.mark.parametrize("answer", ["never", "error"])
def test_replica_that_does_not_answer_does_not_hold_up_the_lighthouse(answer, impatient):
    async def mute(_: int) -> None:
        if answer == "error":
            raise ConnectionError("gone")
        await asyncio.Event().wait()

    async def scenario(run):
        run[1].announce_lighthouse = mute
        run.lighthouses[0].died.set_result("")
        while len(run.lighthouses) < 2:
            await asyncio.sleep(0.001)

    run = train(scenario)
    assert [run[0].lighthouse_attempt, run[2].lighthouse_attempt] == [1, 1]


@pytest.mark.parametrize("attempt", [0, 1])
def test_lighthouse_that_cannot_be_started_fails_the_run(attempt):
    async def refuse(number):
        if number == attempt:
            raise OSError("address in use")

    def setup(run):
        run.before_lighthouse = refuse

    async def scenario(run):
        if run.lighthouses:
            run.lighthouses[0].died.set_result("")

    run = train(scenario, setup=setup)
    assert run.reason == "the lighthouse cannot be started: OSError: address in use"


# Stopping: follow() sees to it that nothing is left ------------------------------------------------------------------


def cancel_after(scenario: Callable[[Run], Awaitable[None]], **options: Any) -> None:
    """Cancel the run after a scenario, as Ctrl-C does."""

    async def then_cancel(run: Run) -> None:
        await scenario(run)
        run.task.cancel()

    with pytest.raises(asyncio.CancelledError):
        train(then_cancel, **options)


def test_cancelled_run_stops_everything():
    cancel_after(nothing)


@pytest.mark.parametrize("turns", range(12))
def test_run_cancelled_at_any_moment_of_its_start_stops_everything(turns):
    def setup(run):
        async def cancel():
            for _ in range(turns):
                await asyncio.sleep(0)
            run.task.cancel()

        run.before_launch = run.before_lighthouse = take_a_turn
        run.cancelling = asyncio.create_task(cancel())

    async def take_a_turn(_):
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        train(nothing, setup=setup)


def test_run_cancelled_amid_launches_stops_those_that_are_up():
    async def only_first(launch):
        if launch.replica > 0:
            await asyncio.Event().wait()

    def setup(run):
        run.before_launch = only_first

    cancel_after(nothing, setup=setup)


def test_run_cancelled_while_a_replica_is_being_stopped_stops_it_wholly():
    async def scenario(run):
        run[1].may_stop.clear()
        await fail(run, 1)
        asyncio.get_running_loop().call_later(0.005, run[1].may_stop.set)

    cancel_after(scenario)


def test_run_cancelled_while_a_dead_lighthouse_is_being_stopped_stops_it_wholly():
    async def scenario(run):
        run.lighthouses[0].may_stop.clear()
        run.lighthouses[0].died.set_result("frozen")
        await settle()
        asyncio.get_running_loop().call_later(0.005, run.lighthouses[0].may_stop.set)

    cancel_after(scenario)


def test_run_cancelled_again_while_it_stops_still_stops_everything():
    async def scenario(run):
        for each in [*run.replicas, *run.lighthouses]:
            each.may_stop.clear()
            asyncio.get_running_loop().call_later(0.005, each.may_stop.set)
        run.task.cancel()
        await settle()
        assert not run.task.done()

    cancel_after(scenario)


def test_run_cancelled_before_a_relaunch_stops_everything():
    cancel_after(lambda run: fail(run, 1, times=2), policy=policy(backoff_seconds=60))


def test_run_cancelled_while_the_lighthouse_restarts_stops_everything():
    async def never(_):
        await asyncio.Event().wait()

    async def scenario(run):
        run.before_lighthouse = never
        run.lighthouses[0].died.set_result("")
        await settle()

    cancel_after(scenario)


def test_run_cancelled_while_replicas_attend_stops_everything():
    async def scenario(run):
        run[0].quorum.clear()
        run[0].finish()
        run[1].ask()
        await settle()

    cancel_after(scenario)


def test_failed_run_stops_a_replica_that_is_just_being_launched():
    async def scenario(run):
        async def never(_):
            await asyncio.Event().wait()

        run.before_launch = never
        await fail(run, 1)
        run.controller.receive(state(0, 1))
        run.controller.receive(state(2, 1, "other"))

    assert train(scenario).reason.startswith("replicas 0 and 2 differ")


def test_first_reason_to_fail_is_the_one_told():
    async def scenario(run):
        for replica in range(3):
            run.controller.receive(state(replica, 1, f"of {replica}"))
        for replica in range(3):
            run.controller.receive(state(replica, 2, f"of {replica}"))

    assert train(scenario).reason == "replicas 0 and 2 differ after outer step 1, on rank 0"


def test_error_in_the_log_fails_the_run_rather_than_stopping_one_supervision():
    async def scenario(run):
        def full(_):
            raise OSError("disk full")

        run.controller._log = full
        run[1].fail()

    with pytest.raises(OSError, match="disk full"):
        train(scenario)
