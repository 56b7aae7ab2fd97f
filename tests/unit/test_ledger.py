"""Where a respawned replica goes on in its data."""

from monarch_titan.control.ledger import DataLedger

ANY = 99
"""An outer step that is later than all reported ones."""


def ledger(*reports: tuple[int, int, int, str]) -> DataLedger:
    """A ledger of two ranks with reports of replica 1: attempt, rank, outer step, position."""
    ledger = DataLedger(ranks_per_replica=2)
    for attempt, rank, outer_step, position in reports:
        ledger.record(1, attempt, rank, outer_step, position)
    return ledger


def test_nothing_is_known_before_the_first_outer_step():
    assert ledger().positions(1, ANY) == {}


def test_outer_step_counts_when_all_ranks_have_reported_it():
    assert ledger((0, 0, 1, "a")).positions(1, ANY) == {}
    assert ledger((0, 0, 1, "a"), (0, 1, 1, "b")).positions(1, ANY) == {0: "a", 1: "b"}


def test_newest_complete_outer_step_counts():
    reports = [(0, 0, 1, "a"), (0, 1, 1, "b"), (0, 0, 2, "c"), (0, 1, 2, "d"), (0, 0, 3, "e")]
    assert ledger(*reports).positions(1, ANY) == {0: "c", 1: "d"}


def test_outer_step_that_no_peer_has_does_not_count():
    reports = [(0, 0, 1, "a"), (0, 1, 1, "b"), (0, 0, 2, "c"), (0, 1, 2, "d")]
    assert ledger(*reports).positions(1, 2) == {0: "c", 1: "d"}
    assert ledger(*reports).positions(1, 1) == {0: "a", 1: "b"}
    assert ledger(*reports).positions(1, 0) == {}


def test_rank_may_be_an_outer_step_ahead():
    reports = [(0, 0, 1, "a"), (0, 0, 2, "c"), (0, 1, 1, "b")]
    assert ledger(*reports).positions(1, ANY) == {0: "a", 1: "b"}
    assert ledger(*reports, (0, 1, 2, "d")).positions(1, ANY) == {0: "c", 1: "d"}


def test_attempts_are_not_mixed():
    reports = [(0, 0, 1, "a"), (0, 1, 1, "b"), (0, 0, 2, "dead"), (1, 1, 2, "d")]
    assert ledger(*reports).positions(1, ANY) == {0: "a", 1: "b"}
    assert ledger(*reports, (1, 0, 2, "c")).positions(1, ANY) == {0: "c", 1: "d"}


def test_outer_step_that_a_later_attempt_takes_again_replaces_the_first():
    reports = [(0, 0, 5, "dead"), (0, 1, 5, "dead"), (1, 0, 5, "c"), (1, 1, 5, "d")]
    assert ledger(*reports).positions(1, ANY) == {0: "c", 1: "d"}


def test_late_report_of_a_dead_attempt_does_not_go_back():
    reports = [(0, 0, 5, "dead"), (1, 0, 3, "c"), (1, 1, 3, "d"), (0, 1, 5, "dead")]
    assert ledger(*reports).positions(1, ANY) == {0: "c", 1: "d"}


def test_replicas_are_apart():
    known = ledger((0, 0, 1, "a"), (0, 1, 1, "b"))
    assert known.positions(0, ANY) == {}


def test_memory_does_not_grow_with_the_run():
    known = ledger(*((attempt, rank, step, "x") for attempt in range(3) for step in range(100) for rank in range(2)))
    assert len(known._reported[1]) == 2
