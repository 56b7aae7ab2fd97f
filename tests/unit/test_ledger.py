"""Positions from which a relaunched replica can go on in its data."""

from monarch_titan.control.ledger import KEPT, DataLedger


def ledger(*reports: tuple[int, int, str]) -> DataLedger:
    """A ledger with reports of replica 1: rank, batches drawn, position."""
    ledger = DataLedger()
    for rank, batches, position in reports:
        ledger.record(1, rank, batches, position)
    return ledger


def test_nothing_is_known_before_the_first_report():
    assert ledger().positions(1) == {}


def test_each_rank_has_positions_of_its_own():
    assert ledger((0, 4, "a"), (1, 4, "b"), (0, 8, "c")).positions(1) == {0: {4: "a", 8: "c"}, 1: {4: "b"}}


def test_replicas_are_apart():
    assert ledger((0, 4, "a")).positions(0) == {}


def test_the_newest_reports_are_kept():
    known = ledger(*((0, count, str(count)) for count in range(100)))
    assert list(known.positions(1)[0]) == list(range(100 - KEPT, 100))


def test_one_that_went_back_is_newer_than_those_ahead_of_it():
    known = ledger(*((0, count, str(count)) for count in (10, 20, 30, 40, 20, 25)))
    assert set(known.positions(1)[0]) == {40, 20, 25}


def test_what_is_handed_out_does_not_change():
    known = ledger((0, 4, "a"))
    positions = known.positions(1)
    known.record(1, 0, 8, "b")
    assert positions == {0: {4: "a"}}
