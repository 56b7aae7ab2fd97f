"""A stream of events folds into the state of the run that a user asks about."""

import dataclasses
import math
from collections.abc import Iterator

import pytest

from monarch_titan.control.events import (
    Event,
    FaultInjected,
    LighthouseFailed,
    LighthouseStarted,
    OuterStep,
    Quorum,
    ReplicaFailed,
    ReplicaFinished,
    ReplicaLost,
    ReplicaStarted,
    Resumed,
    RunFinished,
    RunStarted,
    Step,
    to_json,
)
from monarch_titan.view.summary import RunSummary, State

START = 1000.0
STARTED = RunStarted(
    time=START,
    dump_folder="outputs/demo",
    num_replicas=3,
    min_replicas=2,
    ranks_per_replica=2,
    steps=60,
    method="diloco",
    sync_steps=20,
    device="cpu",
    versions={},
)


def step(at: float, replica: int, number: int, loss: float = 5.0, seconds: float = 0.5) -> Step:
    return Step(time=START + at, replica=replica, step=number, loss=loss, tokens=1000, seconds=seconds)


def quorum(at: float, replica: int, participants: int = 3, healing: bool = False) -> Quorum:
    return Quorum(
        time=START + at, replica=replica, quorum_id=1, participants=participants, healing=healing, seconds=0.1
    )


def outer(at: float, replica: int, number: int, *, error: str | None = None) -> OuterStep:
    return OuterStep(
        time=START + at,
        replica=replica,
        outer_step=number if error is None else number - 1,
        step=20 * number,
        participants=3,
        committed=error is None,
        contributed=True,
        seconds=0.1,
        bytes=1 << 20,
        error=error,
    )


def started(at: float, replica: int, attempt: int = 0) -> ReplicaStarted:
    return ReplicaStarted(time=START + at, replica=replica, attempt=attempt, pids={0: 1, 1: 2}, actor_pid=9)


def fault(at: float, replica: int = 1) -> FaultInjected:
    return FaultInjected(time=START + at, replica=replica, rank=1, step=30, pid=2, signal="SIGKILL")


def failed(at: float, replica: int = 1, attempt: int = 0, action: str = "respawn") -> ReplicaFailed:
    return ReplicaFailed(
        time=START + at,
        replica=replica,
        attempt=attempt,
        rank=1,
        step=30,
        cause="killed by SIGKILL",
        log=f"replica_{replica}/rank_1.log",
        action=action,
    )


def run_with_a_fault() -> Iterator[Event]:
    """Three replicas for 60 steps; replica 1 is killed at step 30 and back with the outer step at 40."""
    yield STARTED
    for replica in range(3):
        yield started(2, replica)
    for number in range(1, 61):
        at = 2 + number / 2
        for replica in range(3):
            if replica != 1 or not 30 < number <= 40:
                yield step(at, replica, number)
        if number == 30:
            yield fault(17.1)
            yield failed(17.4)
            yield started(19, 1, attempt=1)
            yield step(20, 1, 1)
            yield quorum(21, 1, healing=True)
        if number % 20 == 0:
            for replica in range(3):
                yield quorum(at, replica)
                yield outer(at + 1, replica, number // 20)
    for replica in range(3):
        yield ReplicaFinished(time=START + 34, replica=replica, step=60, outer_step=3)
    yield RunFinished(time=START + 35, status="succeeded", seconds=35.0)


def fold(*events: Event) -> RunSummary:
    summary = RunSummary()
    for event in events:
        summary(event)
    return summary


def test_a_run_with_a_fault_is_told_in_figures():
    summary = fold(*run_with_a_fault())
    assert (summary.status, summary.elapsed, summary.step, summary.steps) == ("succeeded", 35.0, 60, 60)
    assert (summary.outer_steps, summary.participants) == (3, 3)
    assert [replica.attempts for replica in summary.replicas.values()] == [1, 2, 1]
    assert [replica.outer_steps for replica in summary.replicas.values()] == [3, 3, 3]
    assert all(replica.state is State.FINISHED for replica in summary.replicas.values())
    assert summary.tokens_per_second == pytest.approx((3 * 60 - 10 + 1) * 1000 / 35)


def test_recovery_counts_from_the_fault_to_the_next_committed_outer_step():
    (failure,) = fold(*run_with_a_fault()).failures
    assert (failure.event.replica, failure.cause, failure.injected) == (1, "killed by SIGKILL", True)
    assert failure.recovery_seconds == pytest.approx(23.0 - 17.1)


def test_recovery_counts_from_the_failure_when_no_fault_was_injected():
    events = [event for event in run_with_a_fault() if not isinstance(event, FaultInjected)]
    (failure,) = fold(*events).failures
    assert failure.recovery_seconds == pytest.approx(23.0 - 17.4)


@pytest.mark.parametrize("other", [fault(17.1, replica=2), fault(-60.0)], ids=["another replica", "long before"])
def test_recovery_is_not_counted_from_a_fault_that_did_not_cause_it(other):
    summary = fold(STARTED, other, started(2, 1), failed(17.4), started(19, 1, attempt=1), outer(23, 1, 2))
    assert summary.failures[0].recovery_seconds == pytest.approx(23.0 - 17.4)


def test_a_replica_that_fails_again_before_it_is_back_recovers_from_both_at_once():
    summary = fold(STARTED, failed(10), started(12, 1, 1), failed(13, attempt=1), started(15, 1, 2), outer(20, 1, 2))
    assert [failure.recovery_seconds for failure in summary.failures] == [10.0, 7.0]


def test_an_outer_step_that_does_not_commit_is_no_recovery():
    summary = fold(STARTED, failed(10), started(12, 1, 1), outer(20, 1, 2, error="peer left"))
    assert summary.failures[0].recovery_seconds is None
    assert summary.replicas[1].outer_failures == 1
    assert "replica 1 did not commit outer step 2 at step 40: peer left" in [note.text for note in summary.notes]


def test_an_outer_step_reported_late_by_the_dead_attempt_is_no_recovery():
    summary = fold(STARTED, failed(10), outer(10.1, 1, 1))
    assert summary.failures[0].recovery_seconds is None
    assert summary.replicas[1].state is State.RESPAWNING


def test_states_of_a_replica_follow_its_events():
    summary, states = RunSummary(), []
    for event in run_with_a_fault():
        summary(event)
        state = summary.replicas[1].state
        if not states or states[-1] is not state:
            states.append(state)
    healing = [State.RESPAWNING, State.STARTING, State.HEALING]
    assert states == [State.STARTING, State.TRAINING, *healing, State.TRAINING, State.WAITING, State.FINISHED]


def test_a_finished_replica_that_attends_a_quorum_still_waits_for_its_peers():
    finished = ReplicaFinished(time=START + 30, replica=0, step=60, outer_step=3)
    assert fold(STARTED, finished, quorum(31, 0), outer(32, 0, 3)).replicas[0].state is State.WAITING


@pytest.mark.parametrize(
    ("action", "state"),
    [("respawn", State.RESPAWNING), ("reallocate", State.REALLOCATING), ("give up", State.LOST)],
)
def test_the_state_after_a_failure_is_what_follows(action, state):
    assert fold(STARTED, failed(10, action=action)).replicas[1].state is state


def test_a_lost_replica_stays_lost_when_the_run_succeeds():
    lost = ReplicaLost(time=START + 11, replica=1, failures=16, cause="killed by SIGKILL")
    end = RunFinished(time=START + 35, status="succeeded", seconds=35.0)
    summary = fold(STARTED, failed(10, action="give up"), lost, end)
    assert [replica.state for replica in summary.replicas.values()] == [State.FINISHED, State.LOST, State.FINISHED]
    assert "replica 1 lost after 16 failures: killed by SIGKILL" in [note.text for note in summary.notes]


def test_tokens_a_second_follow_the_newest_steps_and_start_over_after_a_failure():
    summary = fold(STARTED, *(step(number, 0, number, seconds=0.5) for number in range(1, 11)))
    assert summary.replicas[0].tokens_per_second == pytest.approx(2000)
    summary(step(11, 0, 11, seconds=1.0))
    assert 1000 < summary.replicas[0].tokens_per_second < 2000
    summary(failed(12, replica=0))
    assert summary.replicas[0].tokens_per_second is None


def test_the_remaining_time_is_at_the_mean_pace():
    summary = fold(STARTED, step(10, 0, 1))
    assert summary.remaining_seconds(START + 10) is None
    summary(step(20, 0, 21))
    assert summary.remaining_seconds(START + 20) == pytest.approx(39 * 10 / 20)


def test_a_loss_that_is_no_number_is_noted_once():
    summary = fold(STARTED, *(step(number, 0, number, loss=math.nan) for number in (1, 2, 3)))
    assert math.isnan(summary.replicas[0].loss)
    assert [note.text for note in summary.notes] == ["replica 0 loss is nan at step 1"]


def test_a_lighthouse_that_fails_and_returns_is_noted():
    first = LighthouseStarted(time=START + 1, address="http://host:1", attempt=0, pid=8)
    gone = LighthouseFailed(time=START + 5, cause="exit code 1")
    again = LighthouseStarted(time=START + 6, address="http://host:1", attempt=1, pid=8)
    notes = fold(STARTED, first, gone, again).notes
    assert [(note.seconds, note.text) for note in notes] == [
        (5.0, "lighthouse failed: exit code 1; starting it again"),
        (6.0, "lighthouse answers again at http://host:1"),
    ]


def test_a_resumed_run_is_noted_with_what_it_could_not_use():
    resumed = Resumed(time=START, step=20, outer_step=2, replicas=[0, 2], ignored=["replica_1/checkpoint/step-40: cut"])
    summary = fold(STARTED, resumed)
    assert [note.text for note in summary.notes] == [
        "checkpoint not used: replica_1/checkpoint/step-40: cut",
        "resumed from the checkpoints of step 20, outer step 2",
        "replica 1 has no part of it and heals from its peers",
    ]
    assert summary.step == 20


def test_a_run_without_a_usable_checkpoint_says_that_it_begins_anew():
    notes = fold(STARTED, Resumed(time=START, step=0, outer_step=0, replicas=[], ignored=["cut"])).notes
    assert [note.text for note in notes] == [
        "checkpoint not used: cut",
        "no checkpoint can be used, training begins anew",
    ]


def test_a_traceback_is_told_by_its_last_line():
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: out of memory\n'
    assert fold(STARTED, dataclasses.replace(failed(1), cause=trace)).failures[0].cause == "RuntimeError: out of memory"


def test_read_takes_the_last_of_several_runs(tmp_path):
    path = tmp_path / "events.jsonl"
    second = [STARTED, step(3, 0, 7, loss=math.nan)]
    path.write_text("".join(to_json(event) + "\n" for event in [*run_with_a_fault(), *second]))
    summary = RunSummary.read(path)
    assert (summary.status, summary.step, summary.failures) == ("running", 7, [])
    assert math.isnan(summary.replicas[0].loss)


def test_read_leaves_out_events_of_a_newer_version_and_half_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = [
        to_json(STARTED),
        '{"time": 1, "event": "comet_seen", "tail": 3}',
        to_json(step(3, 0, 7)),
        '{"time": 1, "ev',
    ]
    path.write_text("\n".join(lines))
    assert RunSummary.read(path).step == 7
