"""Survivors of a failure: they do not wait, lose no window, and everybody's data is read once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monarch_titan.control.events import OuterStep, ReplicaFailed, ReplicasDiffer, ReplicaState
from tests.integration.harness import TrainingRun

pytestmark = pytest.mark.integration

FAULTY = Path(__file__).with_name("faulty.toml")
# Rank 1 of replica 1 fails at the beginning of the second outer all-reduce, while all others wait in it.
VICTIM = 1
IN_ALLREDUCE = ("dataloader.fail_shard=3", "dataloader.fail_batch=1", "dataloader.in_allreduce=true")
# A peer that nobody gave up would be waited for as long as this.
TIMEOUT = "fault_tolerance.process_group_timeout_ms=120000"
HANG_SECONDS = 5


@pytest.mark.parametrize(
    ("how", "cause"), [("SIGKILL", "killed by SIGKILL"), ("hang", r"it hung: no sign of life for (?P<seconds>\d+) s")]
)
def test_peer_lost_in_the_outer_allreduce_costs_nobody_a_window(tmp_path: Path, how: str, cause: str) -> None:
    options = (*IN_ALLREDUCE, f"dataloader.how={how}", TIMEOUT, f"monarch.recovery.hang_seconds={HANG_SECONDS}")
    with TrainingRun(tmp_path, *options, config=FAULTY) as run:
        failed = run.wait_for(ReplicaFailed)
        assert (failed.replica, failed.rank) == (VICTIM, 1)
        found = re.fullmatch(cause, failed.cause)
        assert found
        # On a slow machine ten times the longest step is more than hang_seconds.
        silence = int(found["seconds"]) if found.groups() else 0
        assert how != "hang" or HANG_SECONDS <= silence < 20 * HANG_SECONDS
        assert failed.time - float((tmp_path / "failed").read_text()) < silence + 3
        run.assert_ended_well(survivors=(0, 2))
    for replica in (0, 2):
        steps = [event for event in run.events(OuterStep) if event.replica == replica]
        assert [(event.outer_step, event.committed, event.step) for event in steps if event.outer_step <= 2] == [
            (1, True, 10),
            (1, False, 20),
            (2, True, 20),
        ]
        assert all(event.contributed for event in steps)
        lost, again = steps[1:3]
        assert lost.error is not None
        assert again.participants >= 2, "the victim may be back in time"
        assert again.time - failed.time < 10, "the next quorum does not wait for the dead one either"
        assert run.committed()[replica] == [1, 2, 3]
    assert _read_once(tmp_path)


def test_replica_that_computes_something_else_heals_from_the_others(tmp_path: Path) -> None:
    wrong = ("dataloader.fail_shard=3", "dataloader.fail_batch=15", "dataloader.how=corrupt")
    with TrainingRun(tmp_path, *wrong, "training.steps=40", config=FAULTY) as run:
        differ = run.wait_for(ReplicasDiffer)
        assert (differ.outer_step, differ.rank, differ.right, differ.wrong) == (2, 1, [0, 2], [VICTIM])
        failed = run.wait_for(ReplicaFailed)
        assert (failed.replica, failed.rank) == (VICTIM, 1)
        assert failed.cause == "its state after outer step 2 is not that of the other replicas (0, 2)"
        assert run.finish() == 0, run.terminal()
        assert run.left_over() == []
    last = [state for state in run.events(ReplicaState) if (state.outer_step, state.rank) == (4, 1)]
    assert {state.replica for state in last} == {0, 1, 2}
    assert len({(state.global_parameters, state.outer_optimizer) for state in last}) == 1


def _read_once(folder: Path) -> bool:
    """Whether the victim's second life began with the first batch that no committed outer step had seen."""
    read = (folder / f"shard_{2 * VICTIM}").read_text().split()
    # Its first life drew two windows of 10 and only the first of them is in the global parameters.
    return read[20:] == read[10 : 10 + len(read[20:])] and len(read) >= 20
