"""When a failed replica is relaunched, where, and after which wait."""

import pytest

from monarch_titan.control.recovery import Action, RecoveryPolicy

RESPAWN, REALLOCATE, GIVE_UP = Action.RESPAWN, Action.REALLOCATE, Action.GIVE_UP


def actions(**options: int) -> list[Action]:
    """What follows 1, 2, ... 8 failures in a row."""
    return [RecoveryPolicy(**options).next(failures) for failures in range(1, 9)]


def test_new_hosts_are_asked_for_after_so_many_respawns():
    assert actions(respawns=3) == [RESPAWN, RESPAWN, REALLOCATE, RESPAWN, RESPAWN, REALLOCATE, RESPAWN, RESPAWN]


def test_each_failure_takes_new_hosts_where_none_may_be_respawned_on():
    assert actions(respawns=1) == [REALLOCATE] * 8


def test_replica_is_given_up_at_the_limit_and_beyond():
    assert actions(respawns=2, max_failures=4) == [RESPAWN, REALLOCATE, RESPAWN, *[GIVE_UP] * 5]


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (7, 32), (8, 60), (16, 60), (5000, 60)]
)
def test_wait_doubles_up_to_the_longest(failures, seconds):
    assert RecoveryPolicy().delay(failures) == seconds


def test_wait_starts_and_ends_where_it_is_told():
    policy = RecoveryPolicy(backoff_seconds=0.5, max_backoff_seconds=3.0)
    assert [policy.delay(failures) for failures in range(1, 7)] == [0, 0.5, 1, 2, 3, 3]


def test_no_backoff_is_no_wait():
    assert RecoveryPolicy(backoff_seconds=0).delay(16) == 0
