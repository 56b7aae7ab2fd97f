"""What a soak came to, from its events."""

from __future__ import annotations

import pytest
from rich.console import Console

from monarch_titan.control.events import FaultInjected, OuterStep, ReplicaFailed, ReplicasDiffer, RunStarted
from monarch_titan.view.verdict import Soak, Verdict, print_verdict

WINDOW = 10
STARTED = RunStarted(
    dump_folder="",
    num_replicas=2,
    min_replicas=1,
    ranks_per_replica=1,
    steps=100,
    method="diloco",
    sync_steps=WINDOW,
    device="cpu",
    versions={},
)


def commit(time: float, replica: int, outer_step: int, first_batch: int, seen: list[int], **other) -> OuterStep:
    fields = {"participants": 2, "committed": True, "contributed": True, "seconds": 0.1, "bytes": 1, "step": 1}
    fields |= {"time": time, "replica": replica, "outer_step": outer_step} | other
    return OuterStep(first_batch=first_batch, seen_batches=seen, **fields)


def undisturbed(outer_steps: int) -> list[OuterStep]:
    """Two replicas that take an outer step every 10 s."""
    return [
        commit(10.0 * step, replica, step, WINDOW * (step - 1), [WINDOW * step] * 2)
        for step in range(1, outer_steps + 1)
        for replica in range(2)
    ]


def failed(time: float, replica: int = 1) -> ReplicaFailed:
    return ReplicaFailed(
        time=time, replica=replica, attempt=0, rank=0, step=1, cause="killed", log="", action="respawn"
    )


def verdict(*events) -> Verdict:
    soak = Soak()
    for event in (STARTED, *events):
        soak(event)
    return soak.verdict()


def test_undisturbed_run_has_all_its_goodput():
    found = verdict(*undisturbed(5))
    assert found.sound
    assert (found.outer_steps, found.goodput, found.undisturbed) == (5, 1.0, [10.0] * 4)
    assert (found.lost, found.repeated, found.differences, found.failures, found.faults) == (0, 0, 0, 0, 0)


def test_window_that_a_failure_took_is_missing_in_the_goodput():
    """Replica 1 fails in its third window and contributes again in the fourth, from where it had been."""
    events = [
        *undisturbed(2),
        FaultInjected(time=24.0, replica=1, rank=0, step=1, pid=2, signal="SIGKILL"),
        failed(25.0),
        commit(30.0, 0, 3, 20, [30, 20]),
        commit(30.0, 1, 3, 20, [30, 20], contributed=False),
        *(commit(40.0, replica, 4, first, [40, 30]) for replica, first in enumerate([30, 20])),
        *(commit(50.0, replica, 5, first, [50, 40]) for replica, first in enumerate([40, 30])),
    ]
    found = verdict(*events)
    assert found.sound
    assert found.goodput == pytest.approx(7 / 8)
    assert (found.failures, found.faults, found.undisturbed) == (1, 1, [10.0, 10.0])


def test_time_that_a_failure_took_is_missing_in_the_goodput():
    late = [commit(80.0, replica, 4, 30, [40, 40]) for replica in range(2)]
    found = verdict(*undisturbed(3), failed(35.0), *late)
    assert found.goodput == pytest.approx(30 / 70)


@pytest.mark.parametrize(("first_batch", "lost", "repeated"), [(20, 0, 0), (25, 5, 0), (17, 0, 3)])
def test_gaps_and_overlaps_in_the_data_are_found(first_batch, lost, repeated):
    found = verdict(*undisturbed(2), commit(30.0, 0, 3, first_batch, [30, 20]))
    assert (found.lost, found.repeated) == (lost, repeated)
    assert found.sound == (not lost and not repeated)


def test_window_that_was_not_committed_is_not_counted():
    lost = commit(25.0, 1, 2, 20, [20, 20], committed=False)
    assert verdict(*undisturbed(2), lost) == verdict(*undisturbed(2))


def test_first_outer_step_of_a_resumed_run_begins_where_it_says():
    assert verdict(commit(10.0, 0, 7, 60, [70, 70]), commit(20.0, 0, 8, 70, [80, 80])).sound


def test_replicas_that_differ_are_not_sound():
    found = verdict(*undisturbed(2), *(ReplicasDiffer(outer_step=2, rank=r, right=[0], wrong=[1]) for r in range(2)))
    assert found.differences == 1
    assert not found.sound


def test_run_that_commits_nothing_is_not_sound():
    found = verdict(failed(1.0))
    assert not found.sound
    assert found.goodput is None


def test_figures_are_printed(capsys):
    print_verdict(Console(width=120), verdict(*undisturbed(3), failed(35.0)))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "",
        "Verdict: sound",
        "outer steps committed              3",
        "failures                           1, of 0 injected faults",
        "goodput                            100.0% of what 2 replicas commit undisturbed (10.0 s an outer step, the "
        "median of 2)",
        "batches lost                       0",
        "batches repeated                   0",
        "outer steps with different states  0",
    ]
