"""Failures on purpose hit the process they are meant for, once."""

from __future__ import annotations

import os
from signal import SIGKILL
from typing import Any

import pytest

from monarch_titan.control.events import Event, FaultInjected, LighthouseStarted, ReplicaFailed, ReplicaStarted, Step
from monarch_titan.control.faults import KINDS, Fault, Faults, Injector

FIRST, SECOND = {0: 100, 1: 101}, {0: 200, 1: 201}


def started(replica: int, pids: dict[int, int], attempt: int = 0) -> ReplicaStarted:
    return ReplicaStarted(replica=replica, attempt=attempt, pids=pids, actor_pid=1)


def step(replica: int, number: int) -> Step:
    return Step(replica=replica, step=number, loss=1.0, tokens=1, seconds=1.0)


class Processes:
    """Stands in for the host's: which signals were sent, and which processes are dead."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.dead: set[int] = set()

    def kill(self, pid: int, number: int) -> None:
        if pid in self.dead:
            raise ProcessLookupError
        self.sent.append((pid, number))


@pytest.fixture
def processes(monkeypatch):
    processes = Processes()
    monkeypatch.setattr(os, "kill", processes.kill)
    return processes


def inject(*schedule: str, events: list[Event], **section: Any) -> list[Event]:
    """Show events to an injector of these faults; returns what it logs."""
    logged: list[Event] = []
    injector = Injector(Faults(schedule=list(schedule), **section), logged.append)
    for event in events:
        injector(event)
    return logged


def test_signal_goes_to_the_rank_at_the_step(processes):
    events = [started(0, {0: 1, 1: 2}), started(1, FIRST), step(1, 1), step(0, 2), step(0, 3)]
    inject("SIGKILL replica 1 rank 1 at step 2", events=events)
    assert processes.sent == []
    inject("SIGKILL replica 1 rank 1 at step 2", events=[*events, step(1, 2)])
    assert processes.sent == [(101, SIGKILL)]


def test_what_was_done_is_logged(processes):
    (event,) = inject("SIGSTOP replica 1 rank 0 at step 2", events=[started(1, FIRST), step(1, 2)])
    assert isinstance(event, FaultInjected)
    assert (event.replica, event.rank, event.step, event.pid, event.signal) == (1, 0, 2, 100, "SIGSTOP")


def test_step_that_is_not_reported_is_made_up_for_at_the_next(processes):
    (event,) = inject("SIGKILL replica 1 rank 0 at step 2", events=[started(1, FIRST), step(1, 10)])
    assert event.step == 10


def test_fault_is_injected_once(processes):
    events = [started(1, FIRST), step(1, 2), step(1, 3), started(1, SECOND, attempt=1), step(1, 2)]
    inject("SIGKILL replica 1 rank 0 at step 2", events=events)
    assert processes.sent == [(100, SIGKILL)]


def test_respawned_process_is_hit_and_not_the_old_one(processes):
    faults = ["SIGKILL replica 1 rank 0 at step 2", "SIGKILL replica 1 rank 0 at step 4"]
    inject(*faults, events=[started(1, FIRST), step(1, 2), started(1, SECOND, attempt=1), step(1, 4)])
    assert processes.sent == [(100, SIGKILL), (200, SIGKILL)]


def test_several_faults_at_one_step_are_all_injected(processes):
    faults = [f"SIGKILL replica 1 rank {rank} at step 2" for rank in range(2)]
    inject(*faults, events=[started(1, FIRST), step(1, 2)])
    assert processes.sent == [(100, SIGKILL), (101, SIGKILL)]


def test_process_that_has_just_died_leaves_the_fault_to_its_successor(processes):
    processes.dead = {100}
    events = [started(1, FIRST), step(1, 2), started(1, SECOND, attempt=1), step(1, 2)]
    (event,) = inject("SIGKILL replica 1 rank 0 at step 2", events=events)
    assert processes.sent == [(200, SIGKILL)]
    assert event.pid == 200


def test_whole_replica_and_the_lighthouse_can_be_hit(processes):
    events = [LighthouseStarted(address="", attempt=0, pid=7), started(1, FIRST), step(1, 2)]
    logged = inject("replica replica 1 at step 1", "lighthouse at step 2", events=events)
    assert processes.sent == [(100, SIGKILL), (101, SIGKILL), (7, SIGKILL)]
    assert [(event.replica, event.rank) for event in logged] == [(1, 0), (1, 1), (None, None)]


@pytest.mark.parametrize(
    "text", ["", "SIGKILL", "SIGWINCH at step 3", "SIGKILL rank 1 at step 3", "SIGKILL at step -1"]
)
def test_what_is_no_fault_is_refused(text):
    with pytest.raises(ValueError, match=text or "^$"):
        Fault.parse(text)


def test_fault_without_replica_or_rank_hits_a_random_one(processes):
    for seed in range(20):
        events = [started(0, {0: 1, 1: 2}), started(1, FIRST), step(1, 2)]
        inject("SIGKILL at step 2", events=events, seed=seed)
    assert {pid for pid, _ in processes.sent} == {1, 2, 100, 101}


def times(seconds: float, events: int = 4000, **section: Any) -> list[FaultInjected]:
    """Random faults of a run with a step every second."""
    run = [started(0, {0: 1}), started(1, FIRST)]
    run += [Step(time=second, replica=0, step=1, loss=1.0, tokens=1, seconds=1.0) for second in range(events)]
    return inject(events=run, mtbf_seconds=seconds, **section)


def test_random_faults_come_as_often_as_they_are_to_and_the_same_ones_for_a_seed(processes):
    faults = times(40.0)
    assert 70 < len(faults) < 130
    sent = list(processes.sent)
    assert {pid for pid, _ in sent} == {1, 100, 101}
    processes.sent.clear()
    times(40.0)
    assert processes.sent == sent
    processes.sent.clear()
    times(40.0, seed=1)
    assert processes.sent != sent


def test_random_faults_are_of_the_kinds_that_are_asked_for(processes):
    assert {fault.signal for fault in times(40.0, kinds=["SIGSTOP", "SIGSEGV"])} == {"SIGSTOP", "SIGSEGV"}


def test_replica_that_has_failed_is_not_hit_again_before_it_is_back(processes):
    gone = ReplicaFailed(replica=0, attempt=0, rank=0, step=1, cause="", log="", action="respawn")
    assert inject("SIGKILL replica 0 at step 2", events=[started(0, FIRST), gone, step(0, 2)]) == []


def test_without_faults_there_is_nothing_to_inject():
    assert not Faults().any
    assert Faults(mtbf_seconds=1).any
    assert Faults(schedule=["SIGKILL at step 3"]).any
    assert all(Fault.parse(f"{kind} at step 1").kind == kind for kind in KINDS)
