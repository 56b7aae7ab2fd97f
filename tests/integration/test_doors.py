"""The three ways to train end in the same run; so does TorchTitan's plain one, without us."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monarch_titan.control.events import OuterStep, RunFinished, RunStarted, Step
from tests.integration.harness import ROOT, TrainingRun

pytestmark = pytest.mark.integration

FLAGS = {
    "monarch.num_replicas": "2",
    "monarch.procs_per_host": "1",
    "training.steps": "8",
    "training.seq_len": "32",
    "training.local_batch_size": "1",
    "fault_tolerance.sync_steps": "4",
}
OVERRIDES = [f"{key}={value}" for key, value in FLAGS.items()]
TITAN = ["--module", "monarch_titan", "--config", "llama3_debug_diloco"]
TITAN += [word for key, value in FLAGS.items() for word in (f"--{key}", value)]
LIBRARY = """
import sys, monarch_titan as mt
summary = mt.train(mt.load(*sys.argv[1:]))
assert summary.status == "succeeded" and summary.outer_steps == 2, summary
"""


def _losses(run: TrainingRun) -> dict[tuple[int, int], float]:
    return {(event.replica, event.step): event.loss for event in run.events(Step)}


def test_all_doors_lead_to_the_same_run(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text('[torchtitan]\nmodule = "monarch_titan"\nconfig = "llama3_debug_diloco"\n')
    folder = f"dump_folder={tmp_path / 'run'}"
    doors = {
        "toml": [sys.executable, "-m", "monarch_titan", "train", str(base), *OVERRIDES, folder],
        "torchtitan": [
            *(sys.executable, "-m", "torchtitan.train", *TITAN),
            *("--dump_folder", str(tmp_path / "run")),
        ],
        "library": [sys.executable, "-c", LIBRARY, str(base), *OVERRIDES, folder],
    }
    losses = {}
    for door, command in doors.items():
        with TrainingRun(tmp_path, command=command) as run:
            assert run.finish() == 0, run.terminal()
            assert run.events(RunStarted)[-1].num_replicas == 2
            assert len([event for event in run.events(OuterStep) if event.committed]) == 4
            losses[door] = _losses(run)
            assert run.left_over() == []
        run.folder.rename(tmp_path / door)
    assert losses["toml"] == losses["torchtitan"] == losses["library"]
    assert len(losses["toml"]) == 16


def test_config_toml_trains_again(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, *OVERRIDES) as run:
        assert run.finish() == 0, run.terminal()
    first = _losses(run)
    run.folder.rename(tmp_path / "first")
    command = [sys.executable, "-m", "monarch_titan", "train", str(tmp_path / "first" / "config.toml")]
    with TrainingRun(tmp_path, command=[*command, f"dump_folder={tmp_path / 'run'}"]) as again:
        assert again.finish() == 0, again.terminal()
    assert _losses(again) == first


def test_torchrun_trains_one_replica_plainly(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "monarch_titan.train", *TITAN, "--dump_folder", str(tmp_path / "run")),
    ]
    with TrainingRun(tmp_path, command=command) as run:
        assert run.finish() == 0, run.terminal()
        assert "Training completed" in run.terminal()
        assert not (run.folder / "events.jsonl").exists()
        assert run.left_over() == []


def test_spawned_trainers_start_from_one_seed_without_being_given_one(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text('[torchtitan]\nmodule = "monarch_titan"\nconfig = "llama3_debug_diloco"\n[debug]\nseed = "null"\n')
    overrides = [*OVERRIDES, "monarch.fork_server=false"]
    with TrainingRun(tmp_path, *overrides, config=base) as run:
        assert run.finish() == 0, run.terminal()
        assert len([event for event in run.events(OuterStep) if event.committed]) == 4
        assert "seed = 0" in (run.folder / "config.toml").read_text()
        assert run.left_over() == []


def test_mixture_of_experts_trains(tmp_path: Path) -> None:
    config = ROOT / "configs" / "deepseek_v3.toml"
    overrides = ["training.steps=8", "fault_tolerance.sync_steps=4", "training.seq_len=32"]
    with TrainingRun(tmp_path, *overrides, config=config) as run:
        assert run.finish() == 0, run.terminal()
        losses = [event.loss for event in run.events(Step) if event.replica == 0]
        assert losses[-1] < losses[0]


def test_loss_of_two_replicas_falls_on_real_text(tmp_path: Path) -> None:
    overrides = ["monarch.num_replicas=2", "monarch.procs_per_host=1", "training.steps=40", "training.seq_len=64"]
    with TrainingRun(tmp_path, *overrides) as run:
        assert run.finish() == 0, run.terminal()
        for replica in (0, 1):
            losses = [event.loss for event in run.events(Step) if event.replica == replica]
            assert sum(losses[-5:]) / 5 < 0.8 * sum(losses[:5]) / 5, losses
        assert run.events(RunFinished)[-1].status == "succeeded"


def test_mistake_costs_one_line_and_no_process(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, "monarch.min_replicas=9") as run:
        assert run.finish(60) == 2
        rule = "monarch.min_replicas must be between 1 and monarch.num_replicas (3), got 9."
        assert run.terminal().strip().splitlines() == [f"monarch-titan: error: command line: {rule}"]
        assert not run.folder.exists()
