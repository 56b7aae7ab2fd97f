"""A whole run that is killed and started again: it ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from monarch_titan.control.checkpoints import newest
from monarch_titan.control.events import OuterStep, ReplicaStarted, ReplicaState, Resumed, Step
from tests.integration.harness import TrainingRun, kill

pytestmark = pytest.mark.integration

FAULTY = Path(__file__).with_name("faulty.toml")

# Outer steps at 5, 10, 15 ...; checkpoints at 10, 20 and 30, and the model at the end.
CHECKPOINTED = (
    "monarch.num_replicas=2",
    "training.steps=35",
    "fault_tolerance.sync_steps=5",
    "checkpoint.enable=true",
    "checkpoint.interval=10",
    "checkpoint.keep_latest_k=2",
)


def test_run_killed_as_a_whole_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    for folder in (uninterrupted, killed):
        folder.mkdir()
    with TrainingRun(uninterrupted, *CHECKPOINTED) as run:
        assert run.finish() == 0, run.terminal()
        states, losses = _states(run), _losses(run)
        assert _folders(run, 0) == _folders(run, 1) == ["step-20", "step-30", "step-35"]
    with TrainingRun(killed, *CHECKPOINTED) as run:
        run.wait_for(OuterStep, lambda event: event.replica == 0 and event.step == 25)
    assert run.left_over() == []
    saved = tmp_path / "saved"
    shutil.copytree(killed, saved)
    _restarted_as(killed, 20, states, losses)

    flipped = saved / "run" / "replica_1" / "checkpoint" / "step-20" / "__1_0.distcp"
    _flip_a_byte(flipped)
    (ignored,) = _restarted_as(saved, 10, states, losses)
    assert ignored == "replica_1/checkpoint/step-20: __1_0.distcp is not as it was written"


def test_run_killed_while_saving_resumes_from_what_was_whole(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *CHECKPOINTED, "checkpoint.async_mode=async") as run:
        run.wait_for(OuterStep, lambda event: event.replica == 0 and event.step == 15)
        while not (run.folder / "replica_0" / "checkpoint" / "step-20").exists():
            assert run.process.poll() is None, run.terminal()
    assert run.left_over() == []
    found = newest([run.folder / f"replica_{replica}" / "checkpoint" for replica in (0, 1)])
    with TrainingRun(tmp_path, *CHECKPOINTED) as run:
        assert run.finish() == 0, run.terminal()
        (resumed,) = run.events(Resumed)
        assert resumed.step == found.step >= 10
        assert run.left_over() == []


def test_replica_without_a_checkpoint_heals_from_those_that_have_one(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *CHECKPOINTED) as run:
        run.wait_for(OuterStep, lambda event: event.replica == 0 and event.step == 15)
    shutil.rmtree(run.folder / "replica_1" / "checkpoint")
    (run.folder / "events.jsonl").unlink()
    with TrainingRun(tmp_path, *CHECKPOINTED) as run:
        run.assert_ended_well(survivors=(0,))
        assert run.events(Resumed)[-1].replicas == [0]


def test_checkpoint_goes_on_with_other_replicas_and_ranks(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *CHECKPOINTED) as run:
        run.wait_for(OuterStep, lambda event: event.replica == 0 and event.step == 15)
        first = _losses(run)[0, 1]
    (run.folder / "events.jsonl").unlink()
    others = [*CHECKPOINTED, "monarch.num_replicas=3", "monarch.procs_per_host=1"]
    with TrainingRun(tmp_path, *others) as run:
        assert run.finish() == 2
        assert "was written by 2 replicas of 2 ranks, whose places in the data others cannot take" in run.terminal()
        assert not run.events()
    with TrainingRun(tmp_path, *others, "checkpoint.exclude_from_loading=[dataloader]") as run:
        run.assert_ended_well(survivors=(0, 1))
        (resumed,) = run.events(Resumed)
        assert (resumed.step, resumed.replicas) == (10, [0, 1])
        losses = _losses(run)
        assert max(losses[0, 11], losses[1, 11]) < first - 2, "it has forgotten what it had learned"


def test_replica_that_dies_right_after_a_restart_reads_nothing_twice(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *CHECKPOINTED, config=FAULTY) as run:
        run.wait_for(OuterStep, lambda event: event.replica == 1 and event.step == 15)
    record = tmp_path / "shard_2"  # of rank 0 of replica 1
    before = record.read_text().split()
    (run.folder / "events.jsonl").unlink()
    with TrainingRun(tmp_path, *CHECKPOINTED, config=FAULTY) as run:
        kill(*run.wait_for(ReplicaStarted, lambda event: event.replica == 1).pids.values())
        run.assert_ended_well(survivors=(0,))
        (resumed,) = run.events(Resumed)
        assert resumed.step == 10
    after = record.read_text().split()[len(before) :]
    assert before[10] in after, "the first sample after the checkpoint comes again"
    assert not set(before[:10]) & set(after), "samples that the checkpoint has seen were read twice"


def test_only_replica_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *CHECKPOINTED, "monarch.num_replicas=1", "monarch.procs_per_host=1") as run:
        run.wait_for(OuterStep, lambda event: event.step == 15)
        kill(run.started(0).pids[0])
        assert run.finish() == 0, run.terminal()
        steps = [event.step for event in run.events(OuterStep)]
        back = next(index for index in range(1, len(steps)) if steps[index] <= steps[index - 1])
        assert steps[back] in (15, 25), "from step 10, or 20 where the kill came late"
        assert steps[-1] == 35
        assert run.left_over() == []


def _restarted_as(
    folder: Path, step: int, states: dict[tuple[int, int, int], ReplicaState], losses: dict[tuple[int, int], float]
) -> list[str]:
    """Start again what was killed; it resumes at ``step`` and ends as the uninterrupted run. What it ignored."""
    (folder / "run" / "events.jsonl").unlink()
    with TrainingRun(folder, *CHECKPOINTED) as run:
        assert run.finish() == 0, run.terminal()
        (resumed,) = run.events(Resumed)
        assert (resumed.step, resumed.outer_step, resumed.replicas) == (step, step // 5, [0, 1])
        assert _losses(run) == {key: loss for key, loss in losses.items() if key[1] > step}
        assert _states(run) == {key: state for key, state in states.items() if key[2] > step // 5}
        assert run.left_over() == []
    return resumed.ignored


def _losses(run: TrainingRun) -> dict[tuple[int, int], float]:
    return {(event.replica, event.step): event.loss for event in run.events(Step)}


def _states(run: TrainingRun) -> dict[tuple[int, int, int], tuple[object, ...]]:
    return {
        (event.replica, event.rank, event.outer_step): (
            *(event.step, event.global_parameters, event.outer_optimizer, event.optimizer, event.lr),
        )
        for event in run.events(ReplicaState)
    }


def _folders(run: TrainingRun, replica: int) -> list[str]:
    return sorted(path.name for path in (run.folder / f"replica_{replica}" / "checkpoint").iterdir())


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
