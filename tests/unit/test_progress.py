"""Signs of life: how long what a rank does may take, and which rank has hung. No process, and a clock of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from monarch_titan.actors import hangs
from monarch_titan.actors.hangs import hung_rank
from monarch_titan.control.recovery import RecoveryPolicy
from monarch_titan.training import progress
from monarch_titan.training.progress import RECENT, Progress, Sign

POLICY = RecoveryPolicy(hang_seconds=10, hang_steps=20, pause_seconds=600)


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def take_steps(made, clock, *seconds):
    for each in seconds:
        with made.step():
            clock.now += each


def warm(clock):
    """Progress of a rank that has taken its first step."""
    made = Progress(POLICY)
    take_steps(made, clock, 300.0)
    return made


# Limits


def test_nothing_is_usual_before_a_step_after_the_first_has_ended(clock):
    made = Progress(POLICY)
    clock.now += 5
    assert made.sign() == Sign(seconds=5, limit=600, waiting=False, longest=None)
    for _ in range(2):
        with made.step():
            clock.now += 7
            assert made.sign() == Sign(seconds=7, limit=600, waiting=False, longest=None)
    assert made.sign().longest == 7


@pytest.mark.parametrize(("steps", "limit"), [([0.1, 0.4, 0.2], 10), ([0.1, 2.0, 0.2], 40), ([50], 600)])
def test_a_step_is_measured_by_the_longest_recent_one(clock, steps, limit):
    made = warm(clock)
    take_steps(made, clock, *steps)
    with made.step():
        clock.now += 3
        assert made.sign() == Sign(seconds=3, limit=limit, waiting=False, longest=pytest.approx(max(steps)))


def test_between_steps_a_checkpoint_may_take_long(clock):
    made = warm(clock)
    take_steps(made, clock, 0.1)
    clock.now += 100
    assert made.sign().limit == 600


def test_waits_for_peers_are_not_of_the_steps_length(clock):
    made = warm(clock)
    with made.step():
        clock.now += 2
        with made.waiting():
            clock.now += 300
            assert made.sign().waiting
        clock.now += 1
        assert not made.sign().waiting
        assert made.sign().seconds == 1
    assert made.sign().longest == 3


def test_one_that_waits_has_to_answer_all_the_same(clock):
    made = warm(clock)
    take_steps(made, clock, 0.1)
    with made.waiting():
        assert made.sign().limit == 10


def test_a_step_that_failed_is_no_measure(clock):
    made = Progress(POLICY)
    with pytest.raises(ValueError), made.step():
        clock.now += 50
        raise ValueError
    assert made.sign().longest is None


def test_an_old_long_step_is_forgotten(clock):
    made = warm(clock)
    take_steps(made, clock, 5.0, *[0.1] * RECENT)
    assert made.sign().longest == pytest.approx(0.1)


# Which rank


class Trainers:
    """Trainer actors that answer what the test says: signs, silence or the end of their process.

    Args:
        then: what all answer from their second answer on, if not the same again.
    """

    def __init__(self, answers, then):
        self.answers, self.then = answers, then

    def slice(self, gpus):
        answers = [self.answers[gpus]]

        async def answer():
            given = answers.pop() if answers else self.then or self.answers[gpus]
            if given == "silence":
                await asyncio.Event().wait()
            if given == "dead":
                raise RuntimeError("its process is gone")
            return given

        return SimpleNamespace(sign=SimpleNamespace(call_one=answer))


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(hangs, "SIGN_SECONDS", 0.01)


def hung(*answers, then=None, within=2.0, silence=0.05):
    """The verdict, or None if there is none for a while."""

    async def wait():
        try:
            ranks = list(range(len(answers)))
            return await asyncio.wait_for(hung_rank(Trainers(answers, then), ranks, silence), within)
        except TimeoutError:
            return None

    return asyncio.run(wait())


def sign(seconds=0.0, limit=10.0, waiting=False, longest=0.5):
    return Sign(seconds=seconds, limit=limit, waiting=waiting, longest=longest)


def test_ranks_that_get_on_are_left_alone():
    assert hung(sign(3), sign(0), None, sign(500, limit=10, waiting=True), within=0.2) is None


def test_a_rank_that_gives_no_sign_of_life_has_hung():
    assert hung(sign(1), "silence") == (1, "it hung: no sign of life for 0 s")


def test_the_limit_of_a_silence_is_that_of_the_last_sign():
    assert hung(sign(limit=0.05), silence=600, then="silence") == (0, "it hung: no sign of life for 0 s")


def test_a_step_that_does_not_end_has_hung():
    assert hung(sign(12), sign(3)) == (None, "it hung: 12 s in a step; the longest recent one took 0.5 s")


def test_a_silent_rank_is_to_blame_for_the_steps_that_others_cannot_end():
    assert hung(sign(12), "silence", silence=0.02) == (1, "it hung: no sign of life for 0 s")


def test_a_dead_process_has_not_hung():
    assert hung("dead", sign(1), within=0.2) is None
