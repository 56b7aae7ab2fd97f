"""Failures on purpose hit the process they are meant for, once."""

from __future__ import annotations

import os
from signal import SIGKILL, SIGSTOP

import pytest

from monarch_titan.control.events import Event, FaultInjected, ReplicaStarted, Step
from monarch_titan.control.faults import Fault, Injector

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


def inject(*faults: Fault, events: list[Event]) -> list[Event]:
    """Show events to an injector of these faults; returns what it logs."""
    logged: list[Event] = []
    injector = Injector(faults, logged.append)
    for event in events:
        injector(event)
    return logged


def test_signal_goes_to_the_rank_at_the_step(processes):
    events = [started(0, {0: 1, 1: 2}), started(1, FIRST), step(1, 1), step(0, 2), step(0, 3)]
    inject(Fault(replica=1, rank=1, step=2), events=events)
    assert processes.sent == []
    inject(Fault(replica=1, rank=1, step=2), events=[*events, step(1, 2)])
    assert processes.sent == [(101, SIGKILL)]


def test_what_was_done_is_logged(processes):
    (event,) = inject(Fault(replica=1, rank=0, step=2, signal=SIGSTOP), events=[started(1, FIRST), step(1, 2)])
    assert isinstance(event, FaultInjected)
    assert (event.replica, event.rank, event.step, event.pid, event.signal) == (1, 0, 2, 100, "SIGSTOP")


def test_step_that_is_not_reported_is_made_up_for_at_the_next(processes):
    (event,) = inject(Fault(replica=1, rank=0, step=2), events=[started(1, FIRST), step(1, 10)])
    assert event.step == 10


def test_fault_is_injected_once(processes):
    events = [started(1, FIRST), step(1, 2), step(1, 3), started(1, SECOND, attempt=1), step(1, 2)]
    inject(Fault(replica=1, rank=0, step=2), events=events)
    assert processes.sent == [(100, SIGKILL)]


def test_respawned_process_is_hit_and_not_the_old_one(processes):
    faults = [Fault(replica=1, rank=0, step=2), Fault(replica=1, rank=0, step=4)]
    inject(*faults, events=[started(1, FIRST), step(1, 2), started(1, SECOND, attempt=1), step(1, 4)])
    assert processes.sent == [(100, SIGKILL), (200, SIGKILL)]


def test_several_faults_at_one_step_are_all_injected(processes):
    faults = [Fault(replica=1, rank=rank, step=2) for rank in range(2)]
    inject(*faults, events=[started(1, FIRST), step(1, 2)])
    assert processes.sent == [(100, SIGKILL), (101, SIGKILL)]


def test_process_that_has_just_died_leaves_the_fault_to_its_successor(processes):
    processes.dead = {100}
    events = [started(1, FIRST), step(1, 2), started(1, SECOND, attempt=1), step(1, 2)]
    (event,) = inject(Fault(replica=1, rank=0, step=2), events=events)
    assert processes.sent == [(200, SIGKILL)]
    assert event.pid == 200
