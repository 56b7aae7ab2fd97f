"""Replicas that fail in the middle of training: survivors go on, the failed one heals and all end equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_titan.control.events import (
    LighthouseFailed,
    LighthouseStarted,
    OuterStep,
    Quorum,
    ReplicaFailed,
    ReplicaLost,
    RunFinished,
)
from tests.integration.harness import TrainingRun, kill

pytestmark = pytest.mark.integration

FAULTY = Path(__file__).with_name("faulty.toml")
# Replica 1 is the victim, at step 15: in the middle of the second window of 10 steps.
VICTIM, STEP = 1, 15
# Where the victim must have trained for a while after it is back, however busy the machine is.
LONGER = 50


def test_sigkill_of_one_rank(tmp_path: Path) -> None:
    with TrainingRun(tmp_path) as run:
        run.wait_for_step(VICTIM, STEP)
        kill(run.started(VICTIM).pids[1])
        failed = run.wait_for(ReplicaFailed)
        assert (failed.replica, failed.rank, failed.cause) == (VICTIM, 1, "killed by SIGKILL")
        assert (run.folder / failed.log).exists()
        run.assert_ended_well(survivors=(0, 2))
        assert run.committed()[0] == [1, 2, 3]


def test_sigkill_of_all_ranks_of_a_replica(tmp_path: Path) -> None:
    with TrainingRun(tmp_path) as run:
        run.wait_for_step(VICTIM, STEP)
        kill(*run.started(VICTIM).pids.values())
        assert run.wait_for(ReplicaFailed).cause == "killed by SIGKILL"
        run.assert_ended_well(survivors=(0, 2))


def test_sigkill_of_the_replica_actor(tmp_path: Path) -> None:
    with TrainingRun(tmp_path) as run:
        run.wait_for_step(VICTIM, STEP)
        kill(run.started(VICTIM).actor_pid)
        failed = run.wait_for(ReplicaFailed)
        assert failed.rank is None
        assert failed.cause.startswith("its replica actor died")
        run.assert_ended_well(survivors=(0, 2))


def test_exception_in_one_rank(tmp_path: Path) -> None:
    shard = 2 * VICTIM + 1  # rank 1
    with TrainingRun(tmp_path, f"dataloader.fail_shard={shard}", f"dataloader.fail_batch={STEP}", config=FAULTY) as run:
        failed = run.wait_for(ReplicaFailed)
        assert (failed.replica, failed.rank) == (VICTIM, 1)
        assert failed.cause == "ValueError: this batch cannot be read"
        assert "Traceback" in (run.folder / failed.log).read_text()
        run.assert_ended_well(survivors=(0, 2))


def test_death_of_the_lighthouse(tmp_path: Path) -> None:
    with TrainingRun(tmp_path) as run:
        run.wait_for_step(VICTIM, STEP)
        address = run.events(LighthouseStarted)[0].address
        kill(run.lighthouse_pid())
        run.wait_for(LighthouseFailed)
        restarted = run.wait_for(LighthouseStarted, lambda event: event.attempt == 1)
        assert restarted.address == address
        assert run.finish() == 0, run.terminal()
        assert not run.events(ReplicaFailed)
        # The new lighthouse may form its first quorum without a replica that it has not heard of yet; that one heals.
        for steps in run.committed().values():
            assert steps == sorted(set(steps))
            assert steps[-1] == 3
        ids = {event.quorum_id for event in run.events(Quorum)}
        assert len(ids) > 1, "a quorum of the new lighthouse must not pass for one of the old"
        assert run.left_over() == []


def test_replica_that_dies_before_the_first_outer_step_heals_too(tmp_path: Path) -> None:
    with TrainingRun(tmp_path) as run:
        run.wait_for_step(VICTIM, 5)
        kill(run.started(VICTIM).pids[0])
        run.assert_ended_well(survivors=(0, 2))
        assert not next(event for event in run.events(OuterStep) if event.replica == VICTIM).contributed


def test_replica_that_dies_after_the_last_outer_step_heals_from_held_peers(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, "training.steps=32") as run:
        run.wait_for(OuterStep, lambda event: event.replica == VICTIM and event.outer_step == 3 and event.committed)
        kill(run.started(VICTIM).pids[1])
        assert run.finish() == 0, run.terminal()
        healed = [event for event in run.events(Quorum) if event.replica == VICTIM and event.healing]
        assert len(healed) == 1
        assert {steps[-1] for steps in run.committed().values()} == {3}
        assert run.left_over() == []


@pytest.mark.parametrize("method", ["none", "local_sgd"])
def test_other_methods_heal_too(tmp_path: Path, method: str) -> None:
    with TrainingRun(tmp_path, f"fault_tolerance.semi_sync_method={method}") as run:
        run.wait_for_step(VICTIM, STEP)
        kill(run.started(VICTIM).pids[1])
        run.assert_ended_well(survivors=(0, 2))


def test_fragments_heal_too(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, "fault_tolerance.num_fragments=2") as run:
        run.wait_for_step(VICTIM, 17)
        kill(run.started(VICTIM).pids[1])
        run.assert_ended_well(survivors=(0, 2))
        assert run.committed()[0] == list(range(1, 7))
        silent = [event for event in run.events(OuterStep) if event.replica == VICTIM and not event.contributed]
        assert len(silent) == 2, "each fragment's first turn after healing gives nothing"


def test_healed_replica_goes_on_after_the_last_committed_sample(tmp_path: Path) -> None:
    shard = 2 * VICTIM
    with TrainingRun(tmp_path, f"training.steps={LONGER}", config=FAULTY) as run:
        run.wait_for_step(VICTIM, STEP)
        kill(run.started(VICTIM).pids[1])
        run.assert_ended_well(survivors=(0, 2))
    read = (tmp_path / f"shard_{shard}").read_text().split()
    committed, first_life = read[:10], len(read) - _trained_after_healing(run)
    assert read[first_life] == read[10], "the first sample after the committed window comes again"
    assert not set(read[first_life:]) & set(committed), "committed samples were read twice"


def _trained_after_healing(run: TrainingRun) -> int:
    """Batches of the victim's second life: it joins at the end of a window and trains what is left."""
    joined = next(event for event in run.events(OuterStep) if event.replica == VICTIM and not event.contributed)
    return LONGER - joined.step


def test_replica_that_never_recovers_is_given_up_and_the_others_finish(tmp_path: Path) -> None:
    overrides = ["dataloader.always=true", "dataloader.fail_shard=3", "monarch.recovery.max_failures=2"]
    with TrainingRun(tmp_path, *overrides, "monarch.recovery.respawns=1", config=FAULTY) as run:
        assert run.finish() == 0, run.terminal()
        assert [event.replica for event in run.events(ReplicaLost)] == [VICTIM]
        assert run.committed()[0] == run.committed()[2] == [1, 2, 3]
        assert run.left_over() == []


def test_run_whose_replicas_all_fail_ends_at_once_with_the_cause(tmp_path: Path) -> None:
    overrides = ["monarch.num_replicas=1", "dataloader.fail_shard=0", "dataloader.fail_batch=3"]
    with TrainingRun(tmp_path, *overrides, "monarch.procs_per_host=1", config=FAULTY) as run:
        assert run.finish() == 1
        last = run.terminal().strip().splitlines()[-1]
        assert last.startswith("monarch-titan: error: replica 0 rank 0 failed"), last
        assert last.endswith("ValueError: this batch cannot be read")
        assert run.events(RunFinished)[-1].status == "failed"
        assert run.left_over() == []
