"""Invariants of the controller, its policy and its ledger, on random fault schedules in a simulated cluster."""

from __future__ import annotations

import dataclasses
import time

import pytest

from monarch_titan.control.controller import Controller
from monarch_titan.control.events import ReplicaFailed
from monarch_titan.control.finish import Finish
from monarch_titan.control.ledger import DataLedger
from monarch_titan.control.member import Member
from monarch_titan.control.recovery import Action, RecoveryPolicy
from monarch_titan.training.batches import Batches
from tests.simulation.cluster import play
from tests.simulation.invariants import broken, told
from tests.simulation.quorum import JOIN
from tests.simulation.schedule import Break, Crash, Death, Fault, LastWords, Moment, Outage, Schedule

SCHEDULES = 2500
"""What CI finds does not depend on the day. `make soak-simulation` looks elsewhere each time."""

BUDGET = 20.0
"""Seconds of one core. A machine that is too slow for all schedules plays fewer."""


@pytest.mark.slow
def test_invariants_hold_on_every_schedule():
    began = time.process_time()
    for seed in range(SCHEDULES):
        schedule = Schedule.draw(seed)
        assert not broken(schedule), told(seed, schedule)
        if time.process_time() - began > BUDGET:
            break


def survives(*faults: Fault, **options) -> None:
    """Assert that a run with these faults, all of which happen, ends well."""
    schedule = Schedule(faults=faults, **options)
    assert broken(schedule) == []
    story = play(schedule)
    assert story.status == "succeeded", story.reason
    assert len(story.died) >= len(schedule.of(Death))


def test_nothing_goes_wrong_without_faults():
    survives()
    assert not [logged for logged in play(Schedule()).runs[0].log if isinstance(logged.event, ReplicaFailed)]


# A replica heals, and attends, only after another death.
FIRST = {
    Moment.HEALING: [Death(replica=1, moment=Moment.WINDOW, nth=1)],
    Moment.ATTENDING: [Death(replica=2, moment=Moment.COMMITTED, nth=2)],
}


@pytest.mark.parametrize("last_words", LastWords)
@pytest.mark.parametrize("moment", Moment)
def test_death_at_every_moment_is_survived(moment, last_words):
    survives(*FIRST.get(moment, []), Death(replica=1, moment=moment), last_words=last_words, checkpoint_every=1)


def test_death_of_all_replicas_but_one_and_of_the_lighthouse_is_survived():
    survives(Outage(at=20.0, replicas=(0, 2), lighthouse=True))


def test_death_of_all_replicas_at_once_fails_the_run_which_can_be_started_again():
    dead = Outage(at=20.0, replicas=(0, 1, 2))
    schedule = Schedule(faults=(dead,), checkpoint_every=1)
    assert broken(schedule) == []
    assert "no other replica is left to heal from" in play(schedule).reason
    survives(dead, Crash(at=3600.0), checkpoint_every=1, outer_steps=4)


@pytest.mark.parametrize("lost", [(), (0,), (0, 1, 2)])
def test_run_that_is_killed_as_a_whole_goes_on(lost):
    survives(Crash(at=27.0, lost=lost), Crash(at=17.0), checkpoint_every=1, outer_steps=5)


def test_run_fails_at_once_when_the_only_replica_with_a_checkpoint_dies():
    only = (Crash(at=27.0, lost=(1, 2)), Death(replica=0, moment=Moment.START, nth=1))
    schedule = Schedule(faults=only, checkpoint_every=1, outer_steps=5)
    assert broken(schedule) == []
    assert "no other replica is left to heal from" in play(schedule).reason


def test_all_reduce_that_breaks_with_nobody_dead_is_survived():
    survives(Break(nth=1), torn=0)
    survives(Break(nth=1), torn=1)


def test_one_schedule_always_plays_the_same_way():
    schedule = Schedule(faults=(Death(replica=1, moment=Moment.OUTER_STEP),), torn=1)

    def log() -> list[tuple[float, str]]:
        return [(logged.at, type(logged.event).__name__) for logged in play(schedule).runs[0].log]

    assert log() == log()


# Found by the test above ----------------------------------------------------------------------------------------------


def test_replica_that_dies_with_an_outer_step_of_its_own_does_not_fail_the_run():
    """Replica 0 alone commits outer step 2, because replica 1 dies in it, and dies in the next window."""
    dies_in_it = Death(replica=1, moment=Moment.OUTER_STEP, nth=1)
    survives(dies_in_it, Death(replica=0, moment=Moment.WINDOW, nth=2), torn=1)


def test_replica_that_has_just_healed_keeps_the_run_going():
    """Replica 1 has replica 0's state when that one dies in the outer step after."""
    dies_in_it = Death(replica=0, moment=Moment.OUTER_STEP, after=0.25)
    survives(Death(replica=1, moment=Moment.WINDOW), dies_in_it, num_replicas=2)


@pytest.mark.parametrize("moment", [Moment.OUTER_STEP, Moment.COMMITTED])
def test_window_of_a_replica_that_died_in_or_right_after_its_outer_step_is_not_read_again(moment):
    """Replica 1 gives its window and dies: in the outer step that the others take, or before it can say so."""
    survives(Death(replica=1, moment=moment), last_words=LastWords.LOST, torn=2)


@pytest.mark.parametrize("fault", [Break(nth=0), Death(replica=1, moment=Moment.OUTER_STEP)], ids=str)
@pytest.mark.parametrize("seconds", [30.0, 100.0])
def test_replica_that_alone_has_an_outer_step_joins_the_others_again(fault, seconds):
    """Replica 0 has the result of an all-reduce, and is in its next window, perhaps longer than a quorum waits."""
    survives(fault, torn=1, window_seconds=(seconds,) * 3)
    failed = [log.event for log in play(Schedule(faults=(fault,), torn=1, window_seconds=(seconds,) * 3)).runs[0].log]
    stopped = [event.replica for event in failed if isinstance(event, ReplicaFailed) and "its state" in event.cause]
    assert stopped == ([0] if seconds > JOIN else [])


# The simulation notices -----------------------------------------------------------------------------------------------


def _mix_up_replicas(monkeypatch):
    positions = DataLedger.positions
    monkeypatch.setattr(DataLedger, "positions", lambda self, replica: positions(self, 0))


def _mix_up_ranks(monkeypatch):
    record = DataLedger.record
    monkeypatch.setattr(DataLedger, "record", lambda self, replica, _, *data: record(self, replica, 0, *data))


def _go_on_where_it_was_last(monkeypatch):
    go_to = Batches.go_to
    monkeypatch.setattr(Batches, "go_to", lambda self, count: go_to(self, max([count, *self._marks])))


def _take_a_failed_replica_for_one_with_a_state(monkeypatch):
    end_attempt = Member.end_attempt

    def end(self):
        end_attempt(self)
        self.has_state = True

    monkeypatch.setattr(Member, "end_attempt", end)


def _count_failures_for_ever(monkeypatch):
    received = Controller.receive

    def receive(self, message):
        failures = [member.failures for member in self._members]
        received(self, message)
        for member, before in zip(self._members, failures, strict=True):
            member.failures = max(member.failures, before)

    monkeypatch.setattr(Controller, "receive", receive)


def _never_give_up(monkeypatch):
    monkeypatch.setattr(RecoveryPolicy, "next", lambda *_: Action.RESPAWN)


def _hold_nobody_at_the_end(monkeypatch):
    monkeypatch.setattr(Finish, "_all_held", lambda self: any(member.held for member in self._members))


def _help_nobody_at_the_end(monkeypatch):
    monkeypatch.setattr(Finish, "_quorum_wanted", lambda self: False)


def _dying(moment: Moment, *nths: int) -> Schedule:
    return Schedule(outer_steps=5, faults=tuple(Death(replica=1, moment=moment, nth=nth) for nth in nths))


ALONE_WITH_ITS_STEP = Schedule(
    outer_steps=5,
    torn=1,
    faults=(Death(replica=1, moment=Moment.OUTER_STEP, nth=1), Death(replica=0, moment=Moment.WINDOW, nth=2)),
)
ALL_DEAD = Schedule(faults=(Outage(at=20.0, replicas=(0, 1, 2)),))
ONE_LATE = Schedule(window_seconds=(8.0, 9.0, 100.0))


@pytest.mark.parametrize(
    ("bug", "schedule", "noticed"),
    [
        (_mix_up_replicas, _dying(Moment.WINDOW, 1), "of another shard"),
        (_mix_up_ranks, dataclasses.replace(_dying(Moment.WINDOW, 1), ranks=2), "of another shard"),
        (_go_on_where_it_was_last, ALONE_WITH_ITS_STEP, "samples lost"),
        (_take_a_failed_replica_for_one_with_a_state, ALL_DEAD, "goes on for ever"),
        (_count_failures_for_ever, _dying(Moment.WINDOW, 1, 3), "in a row, not 0"),
        (_never_give_up, _dying(Moment.LAUNCH, *range(16)), "after 16 in a row"),
        (_hold_nobody_at_the_end, ONE_LATE, "end with different states"),
        (_help_nobody_at_the_end, _dying(Moment.COMMITTED, 4), "goes on for ever"),
    ],
)
def test_bug_is_noticed(monkeypatch, bug, schedule, noticed):
    assert broken(schedule) == []
    bug(monkeypatch)
    found = broken(schedule)
    assert any(noticed in sentence for sentence in found), found
