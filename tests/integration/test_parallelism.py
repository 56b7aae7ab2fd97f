"""Parallelism inside a replica changes where the training happens, not what is learned.

Every case starts from the weights of its model's reference, one rank alone, and sees the same batches: one short
document over and over, which all data-parallel ranks read and deal out among them.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_titan.control.events import ReplicaFailed
from tests.integration.harness import TrainingRun, kill
from tests.integration.ranks import Ranks

pytestmark = pytest.mark.integration

TEXT = """A replica is one full copy of the weights and of the processes that train it. How it spreads the work over its
ranks is its own affair: each rank may hold a part of every layer, a few of the layers, a few of the experts or a part
of every sequence. What the replica learns in a step must not depend on it, or its peers would learn something else."""

SHORT = {
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "sp": "parallelism.enable_sequence_parallel",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "balancer": "parallelism.context_parallel_load_balancer",
    "batch": "training.local_batch_size",
}
DEBUG = (
    "fault_tolerance.sync_steps=1",
    "training.disable_cuda_graphs=true",
    "training.gc_freq=100",
    "debug.seed=0",
    "metrics.log_freq=1",
    "dataloader.dataset=local_text",
    "hf_assets_path=byte_tokenizer",
    "validator.enable=false",
    "comm.trace_buf_size=0",
    "checkpoint.enable=true",
    "checkpoint.last_save_model_only=true",
    "checkpoint.export_dtype=float32",
)

# Model -> the base of its reference, tokens a sequence, sequences a step, steps, and the relative tolerance: experts
# multiply in bfloat16, where the order of a sum is seen.
MODELS = {
    "llama3": ("llama3.llama3_debugmodel", 256, 4, 3, 2e-5),
    "deepseek_v3": ("deepseek_v3.deepseek_v3_debugmodel", 256, 2, 3, 1e-3),
    "qwen3": ("qwen3.qwen3_debugmodel", 64, 2, 3, 2e-5),
    "qwen3_moe": ("qwen3.qwen3_moe_debug", 64, 2, 2, 1e-3),
    "gpt_oss": ("gpt_oss.gpt_oss_debugmodel", 256, 2, 2, 2e-3),
}

# Model or another base of it, ranks, what divides them.
CASES = [
    ("llama3", 2, "batch=2"),
    ("llama3", 2, "tp=2"),
    ("llama3", 2, "tp=2 sp=false"),
    ("llama3", 2, "cp=2"),
    ("llama3", 2, "pp=2 schedule=1F1B"),
    ("llama3 llama3.llama3_debugmodel_ce_loss", 2, "pp=2 schedule=ZBVZeroBubble activation_checkpoint=null"),
    ("llama3", 4, "dp_replicate=2 batch=1"),
    ("llama3", 4, "tp=2 cp=2"),
    ("llama3 llama3.llama3_debugmodel_varlen_attn", 4, "tp=2 pp=2 schedule=Interleaved1F1B"),
    ("deepseek_v3", 2, "ep=2 batch=1"),
    ("deepseek_v3", 2, "tp=2 ep=2"),
    ("deepseek_v3", 4, "ep=2 pp=2 batch=1 schedule=Interleaved1F1B"),
    ("qwen3", 2, "tp=2"),
    ("gpt_oss", 2, "ep=2 batch=1"),
    ("gpt_oss gpt_oss.gpt_oss_debugmodel_flex", 2, "cp=2"),
]
# `make test-parallelism` runs these, too.
MORE = [
    ("llama3", 2, "dp_replicate=2 batch=2"),
    ("llama3", 2, "cp=2 balancer=null"),
    ("llama3", 2, "cp=2 balancer=ptrr"),
    ("llama3", 2, "pp=2 schedule=GPipe"),
    ("llama3", 2, "pp=2 schedule=LoopedBFS"),
    ("llama3", 4, "pp=4 schedule=1F1B"),
    ("llama3 llama3.llama3_debugmodel_ce_loss", 2, "pp=2 schedule=InterleavedZeroBubble activation_checkpoint=null"),
    ("llama3 llama3.llama3_debugmodel_ce_loss", 2, "pp=2 schedule=DualPipeV activation_checkpoint=null"),
    ("llama3", 4, "batch=1"),
    ("llama3", 4, "tp=4"),
    ("llama3", 4, "tp=2 batch=2"),
    ("llama3", 4, "dp_replicate=2 tp=2 batch=2"),
    ("llama3", 4, "cp=2 batch=2"),
    ("llama3", 4, "pp=2 batch=2 schedule=1F1B"),
    ("llama3", 4, "cp=2 pp=2 schedule=1F1B"),
    ("deepseek_v3", 2, "batch=1"),
    ("deepseek_v3", 2, "tp=2"),
    ("deepseek_v3", 2, "tp=2 sp=false"),
    ("deepseek_v3", 2, "cp=2 ep=2"),
    ("deepseek_v3", 2, "pp=2 schedule=1F1B"),
    ("deepseek_v3", 4, "tp=2 ep=4 batch=1"),
    ("deepseek_v3", 4, "tp=2 pp=2 ep=2 schedule=1F1B"),
    ("deepseek_v3", 4, "cp=2 tp=2 ep=4"),
    ("qwen3", 2, "batch=1"),
    ("qwen3_moe", 2, "ep=2 batch=1"),
    ("qwen3_moe", 2, "tp=2 ep=2"),
    ("qwen3_moe", 2, "pp=2 schedule=1F1B"),
    ("gpt_oss", 2, "tp=2"),
    ("gpt_oss", 2, "tp=2 ep=2"),
    ("gpt_oss", 2, "pp=2 schedule=1F1B"),
    (
        "gpt_oss gpt_oss.gpt_oss_debugmodel_flex",
        2,
        "cp=2 balancer=ptrr parallelism.context_parallel_ptrr_mask_key=basic_mask",
    ),
]
if "MONARCH_TITAN_ALL_PARALLELISM" in os.environ:
    CASES += MORE


def spelled(words: str) -> list[str]:
    """Overrides as the command line takes them."""
    return [f"{SHORT.get(key, key)}={value}" for key, _, value in (word.partition("=") for word in words.split())]


class Trained:
    """Trains cases and keeps the references."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counter = itertools.count()
        self._references: dict[str, Any] = {}
        self.ranks = Ranks()
        self._text = folder / "text.txt"
        self._text.write_text(TEXT)

    def case(self, model: str, base: str, ranks: int, words: str) -> Any:
        """Losses and gradient norms of the steps."""
        reference, length, batch, steps, _ = MODELS[model]
        common = [*DEBUG, f"dataloader.dataset_path={self._text}", f"training.seq_len={length}"]
        seed = self._folder / f"{model}_seed"
        if not seed.exists():
            self.ranks.train(seed, reference, 1, *common, "checkpoint.create_seed_checkpoint=true")
        return self.ranks.train(
            self._folder / f"{model}_{next(self._counter)}",
            base or reference,
            ranks,
            *common,
            "checkpoint.load_only=true",
            "checkpoint.initial_load_model_only=true",
            f"checkpoint.initial_load_path={seed / 'checkpoint' / 'step-0'}",
            f"training.local_batch_size={batch}",
            f"training.steps={steps}",
            *spelled(words),
        )

    def reference(self, model: str) -> Any:
        if model not in self._references:
            self._references[model] = self.case(model, "", 1, "")
        return self._references[model]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("ranks")
    trained = Trained(folder)
    yield trained
    trained.ranks.close()
    for seed in folder.glob("*_seed"):  # up to a gigabyte
        shutil.rmtree(seed)


@pytest.mark.parametrize(("model", "ranks", "words"), CASES, ids=lambda value: str(value).replace(" ", ","))
def test_parallelism_does_not_change_the_training(trained: Trained, model: str, ranks: int, words: str) -> None:
    model, _, base = model.partition(" ")
    expected = trained.reference(model)
    losses = [loss for loss, _ in expected]
    assert losses[-1] < losses[0]
    steps = trained.case(model, base, ranks, words)
    tolerance = MODELS[model][-1]
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=tolerance)
    # The norm is a sum over millions of float32, taken in other pieces.
    assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in expected], rel=max(1e-3, 10 * tolerance))


# Replicas ------------------------------------------------------------------------------------------------------------

HEAL = {
    "pipeline of tensors": "pp=2 tp=2 batch=2 monarch.procs_per_host=4",
    "experts": "ep=2 torchtitan.config=deepseek_v3_debug_diloco",
}


@pytest.mark.parametrize("name", HEAL)
def test_replica_heals_part_by_part(tmp_path: Path, name: str) -> None:
    settings = (
        "monarch.num_replicas=2",
        "training.disable_cuda_graphs=true",
        "training.steps=12",
        "fault_tolerance.sync_steps=4",
        "fault_tolerance.num_fragments=2",
    )
    with TrainingRun(tmp_path, *settings, *spelled(HEAL[name])) as run:
        run.wait_for_step(replica=1, step=5)
        kill(run.started(1).pids[1])
        run.assert_ended_well(survivors=(0,))
        assert len(run.events(ReplicaFailed)) == 1
