"""Old files, recipes and trainers of other models train under Monarch, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tomli

from monarch_titan.control.events import OuterStep, RunStarted, Step
from tests.integration.harness import TrainingRun

pytestmark = pytest.mark.integration

ERA = """
[model]
name = "llama3_ft"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"

[optimizer]
lr = 8e-4

[training]
dataset = "c4_test"
steps = 100

[quantize.linear.float8]
filter_fqns = ["output"]

[fault_tolerance]
enable = true
semi_sync_method = "diloco"
sync_steps = 4
num_fragments = 2
process_group = "nccl"
"""
MONARCH = """
[monarch]
num_replicas = 2
procs_per_host = 1
"""
SMALL = ["training.steps=8", "training.seq_len=32", "training.local_batch_size=1", "metrics.log_freq=1"]
LOCAL = ["training.dataset=local_text", "model.hf_assets_path=byte_tokenizer"]


def train(tmp_path: Path, config: str, *overrides: str) -> TrainingRun:
    """A run of ``monarch-titan train`` that has ended well."""
    command = [sys.executable, "-m", "monarch_titan", "train", config, f"dump_folder={tmp_path / 'run'}", *overrides]
    with TrainingRun(tmp_path, command=command) as run:
        assert run.finish() == 0, run.terminal()
        assert run.left_over() == []
    return run


def test_file_of_the_toml_era_and_a_monarch_section(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(ERA + MONARCH)
    run = train(tmp_path, str(file), *SMALL, *LOCAL)
    (started,) = run.events(RunStarted)
    assert (started.num_replicas, started.method, started.sync_steps) == (2, "diloco", 4)
    assert run.committed() == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}  # two fragments, each every 4 steps
    resolved = tomli.loads((run.folder / "config.toml").read_text())
    assert resolved["torchtitan"]["converters"]["float8_linear"] == {"filter_fqns": ["lm_head"], "enable": False}


def test_file_of_the_toml_era_alone_trains_one_replica(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(ERA.partition("[fault_tolerance]")[0])
    run = train(tmp_path, str(file), *SMALL, *LOCAL)
    assert run.events(RunStarted)[0].num_replicas == 1
    assert len(run.events(Step)) == 8
    assert run.events(OuterStep) == []


def test_recipe_with_float8_layers(tmp_path: Path) -> None:
    small = [*SMALL, "fault_tolerance.sync_steps=4", "replicas=2x2", "monarch.procs_per_host=1"]
    run = train(tmp_path, "deepseek_v3_debug_float8", *small)
    assert len([event for event in run.events(OuterStep) if event.committed]) == 4
    log = (tmp_path / "run" / "replica_0" / "rank_0.log").read_text()
    assert "Float8" in log


TRAINER = """
from dataclasses import dataclass, fields

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


class OwnTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        greeting: str = ""

    def train_step(self, data_iterator):
        print(f"own trainer says {self.config.greeting} at step {self.step}", flush=True)
        super().train_step(data_iterator)


def own():
    base = llama3_debugmodel()
    return OwnTrainer.Config(**{f.name: getattr(base, f.name) for f in fields(base)})
"""


def test_trainer_of_another_model_runs_under_monarch(tmp_path: Path) -> None:
    """TorchTitan's Flux brings a trainer of its own, and so may anybody."""
    (tmp_path / "own_trainer.py").write_text(TRAINER)
    file = tmp_path / "own.toml"
    file.write_text(
        'greeting = "hello"\nhf_assets_path = "byte_tokenizer"\n[torchtitan]\nmodule = "own_trainer"\nconfig = "own"\n'
        '[dataloader]\ndataset = "local_text"\n[fault_tolerance]\nsync_steps = 4\n' + MONARCH
    )
    run = train(tmp_path, str(file), *SMALL)
    assert run.committed() == {0: [1, 2], 1: [1, 2]}
    assert "own trainer says hello at step 8" in (run.folder / "replica_1" / "rank_0.log").read_text()
