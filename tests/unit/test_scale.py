"""A job is measured at full scale without its hardware, as TorchTitan would build it, and leaves nothing behind."""

import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC
from torchtitan.models.deepseek_v3 import model_registry

from monarch_titan.config import activations, gpus, memory
from monarch_titan.config.base import as_monarch, base_config
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.scale import measure, render
from monarch_titan.config.sections import Base, Monarch
from monarch_titan.config.shards import MetaModel, local
from monarch_titan.training.outer import OUTER_OPTIMIZERS, Fragment

LLAMA, MOE = ("llama3", "llama3_debugmodel"), ("deepseek_v3", "deepseek_v3_debugmodel")

# The Llama 3 debug model: hidden size 256, 6 layers of 852,480 parameters, 2048 words in and out, and the last norm.
LAYER, WORDS, NORM = 852_480, 2048 * 256, 256
TOTAL = 6 * LAYER + 2 * WORDS + NORM


def configure(base=LLAMA, *, ranks=8, **options):
    """A configuration of one replica's ranks with options by their paths, ``__`` for the dot."""
    config = as_monarch(base_config(Base(module=base[0], config=base[1])))
    config.monarch.procs_per_host = ranks
    config.training.local_batch_size, config.training.seq_len = 4, 1024
    for path, value in options.items():
        *sections, name = path.split("__")
        section = config
        for each in sections:
            section = getattr(section, each)
        setattr(section, name, value)
    return config


def degrees(**values):
    names = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    names = {short: f"parallelism__{name}_parallel_degree" for short, name in names.items()}
    names["dp_replicate"] = "parallelism__data_parallel_replicate_degree"
    return {names.get(short, f"parallelism__{short}"): value for short, value in values.items()}


def items(config):
    """Bytes by item on the worst rank."""
    return measure(config).worst.memory.items


@pytest.fixture(scope="module")
def plain():
    return measure(configure())


# Full scale ----------------------------------------------------------------------------------------------------------

FULL_SCALE = """
import time
start = time.monotonic()
import dataclasses, json, resource
from monarch_titan.config.base import as_monarch, base_config
from monarch_titan.config.scale import measure
from monarch_titan.config.sections import Base
from monarch_titan.training.trainer import MonarchTrainer
config = as_monarch(base_config(Base(module="deepseek_v3", config="deepseek_v3_671b")))
config.monarch.num_replicas, config.monarch.hosts_per_replica, config.monarch.procs_per_host = 4, 32, 8
config.parallelism.expert_parallel_degree = 8
scale = measure(config)
print(json.dumps({
    "seconds": time.monotonic() - start, "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "layout": scale.layout, "parameters": scale.parameters, "active": scale.active,
    "items": scale.worst.memory.items,
}))
"""


def test_deepseek_v3_671b_on_1024_ranks_is_measured_in_one_small_process():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", FULL_SCALE], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] < 30 and found["gib"] < 4
    assert found["layout"] == (
        "1,024 ranks = 4 replicas x 32 hosts x 8; mesh pp 1 x dp_replicate 1 x dp_shard 256 x cp 1 x tp 1; "
        "experts: ep 8 x efsdp 32"
    )
    assert found["parameters"] == pytest.approx(671.03e9, rel=1e-4)
    assert found["active"] == pytest.approx(37.5e9, rel=0.01)  # 37 billion by the paper
    # 653.9 billion in experts, cut into 256 equal pieces; the rest is cut into as many with some padding.
    assert found["items"]["parameters"] == pytest.approx(4 * 671.03e9 / 256, rel=1e-3)


@pytest.mark.parametrize(
    ("flavor", "billions"), [("debugmodel", 0.0330), ("16B", 15.706), ("236B", 235.74), ("671B", 671.03)]
)
def test_all_parameters_of_deepseek_v3_are_there(flavor, billions):
    config = configure(MOE)
    config.model_spec = model_registry(flavor)  # which knows more flavours than there are configurations
    whole = MetaModel(config).whole
    assert sum(p.numel() for p in whole.parameters()) == pytest.approx(billions * 1e9, rel=1e-3)
    assert all(p.is_meta for p in whole.parameters())


# Shards --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [7, 8])
def test_first_and_last_rank_hold_what_fully_shard_gives_them(ranks):
    model = MetaModel(configure(ranks=ranks))
    for rank in (0, ranks - 1):
        with model.on_rank(rank) as part:
            ours = {name: local(p).shape for name, p in part.modules[0].named_parameters()}
        by_hand = MetaModel(configure(ranks=ranks)).whole
        dist.init_process_group("fake", rank=rank, world_size=ranks)
        try:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in by_hand.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(by_hand, mesh=mesh)
            assert ours == {name: p.to_local().shape for name, p in by_hand.named_parameters()}
        finally:
            dist.destroy_process_group()


def test_the_worst_rank_is_the_first_of_its_pipeline_rank():
    """As said in first_ranks: no other rank holds more."""
    model = MetaModel(configure(ranks=6, **degrees(pp=2), parallelism__pipeline_parallel_schedule="1F1B"))
    held = []
    for rank in range(6):
        with model.on_rank(rank) as part:
            held.append(sum(local(p).numel() for p in part.modules[0].parameters()))
    assert model.first_ranks() == [0, 3]
    assert held[0] == max(held[:3]) > min(held[:3])
    assert held[3] == max(held[3:]) > min(held[3:])


@pytest.mark.parametrize(
    ("base", "layout", "copies"),
    [
        (LLAMA, {}, 1),
        (LLAMA, {"dp_replicate": 2}, 2),
        (LLAMA, {"pp": 2}, 1),
        (LLAMA, {"cp": 2}, 1),
        (MOE, {"ep": 4}, 1),
        (MOE, {"ep": 2, "pp": 2, "dp_replicate": 2}, 2),
    ],
)
def test_ranks_together_hold_every_parameter_once_in_each_copy(base, layout, copies):
    model = MetaModel(configure(base, **degrees(**layout), parallelism__pipeline_parallel_schedule="1F1B"))
    held = 0
    for rank in range(8):
        with model.on_rank(rank) as part:
            held += sum(local(p).numel() for module in part.modules for p in module.parameters())
    assert held == copies * sum(p.numel() for p in model.whole.parameters())


@pytest.mark.parametrize(("base", "layout"), [(LLAMA, {"tp": 2}), (MOE, {"tp": 2, "ep": 4, "cp": 2})])
def test_tensor_parallelism_repeats_only_what_it_does_not_cut(base, layout):
    model = MetaModel(configure(base, **degrees(**layout)))
    held, whole = 0, {name: p.numel() for name, p in model.whole.named_parameters()}
    for rank in range(8):
        with model.on_rank(rank) as part:
            held += sum(local(p).numel() for p in part.modules[0].parameters())
    repeated = sum(numel for name, numel in whole.items() if "norm" in name or "router" in name or "wkv_a" in name)
    assert sum(whole.values()) < held <= sum(whole.values()) + repeated


def test_padding_is_counted_and_noted():
    """256 rows of each norm over 300 ranks leave 44 with nothing but padding."""
    scale = measure(configure(ranks=300))
    (note,) = scale.notes
    assert (
        note.startswith("On rank 0 ") and "parameters have fewer rows than ranks that share them, as layers.0" in note
    )
    model = MetaModel(configure(ranks=300))
    with model.on_rank(299) as part:
        held = sum(local(p).nbytes for p in part.modules[0].parameters())
        assert memory.rank_memory(model.config, part).state["parameters"] > held
    assert measure(configure()).notes == []


def test_every_rank_has_coordinates_of_its_own():
    layout = degrees(pp=2, dp_replicate=2, tp=2, ep=4)
    model = MetaModel(configure(MOE, ranks=16, **layout, parallelism__pipeline_parallel_schedule="1F1B"))
    seen = []
    for rank in range(16):
        with model.on_rank(rank) as part:
            seen.append(part.coordinates)
    dense = [tuple(at[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")) for at in seen]
    assert dense == sorted(set(dense)) and dense[-1] == (1, 1, 1, 0, 1)
    assert len({(at["pp"], at["dp_replicate"], at["efsdp"], at["ep"]) for at in seen}) == 16


def test_stages_are_those_that_torchtitan_makes():
    scale = measure(configure(**degrees(pp=2), parallelism__pipeline_parallel_schedule="1F1B"))
    assert [kind.rank for kind in scale.kinds] == [0, 4]
    assert [kind.coordinates["pp"] for kind in scale.kinds] == [0, 1]
    assert [kind.ranks for kind in scale.kinds] == [4, 4]
    assert [kind.parameters for kind in scale.kinds] == [(3 * LAYER + WORDS) // 4, (3 * LAYER + WORDS + NORM) // 4]


def test_stages_named_by_the_user_and_several_a_rank():
    parts = [["tok_embeddings"], ["layers.0"], ["layers.1", "layers.2"], [f"layers.{i}" for i in (3, 4, 5)]]
    parts[-1] += ["norm", "lm_head"]
    options = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
    scale = measure(configure(**degrees(pp=2), **options, parallelism__module_fqns_per_model_part=parts))
    first, second = (kind.parameters for kind in scale.kinds)  # stages 0 and 2, 1 and 3
    assert first == (WORDS + 2 * LAYER) // 4
    assert second == (4 * LAYER + WORDS + NORM) // 4


# Memory --------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_small_model_by_hand(plain):
    shard = TOTAL // 8
    assert plain.parameters == plain.active == TOTAL
    found = plain.worst.memory.items
    assert {name: found[name] for name in found if name not in ("activations", "logits", "buffers")} == {
        "parameters": 4 * shard,
        "gradients": 4 * shard,
        "optimizer states": 8 * shard,
        "outer state": 8 * shard,
        # Two layers in bf16, and head and norm, which are not resharded.
        "gathered parameters": 2 * (2 * LAYER + WORDS + NORM),
        "unreduced gradients": (2 + 4) * LAYER,
        "float8": 0,
        "exchange between replicas": 4 * (shard + 1),
    }
    # 4 * 1024 tokens in 8 chunks; bf16 logit, fp32 copy, log-probability, gradient; fp32 gradient of the hidden state.
    assert found["logits"] == 4096 // 8 * 2048 * 14 + 4096 * 256 * 4


def test_total_is_state_and_the_larger_of_training_and_exchange():
    def total(**parts):
        return memory.Memory(state={"a": 1, "b": 2}, **parts).total

    assert total(training={"c": 10, "d": 20}, exchange={"e": 5}) == 33
    assert total(training={"c": 10}, exchange={"e": 50}) == 53


def test_optimizer_and_outer_state_are_what_the_real_ones_keep(plain):
    """One rank alone, with the optimizers themselves on the CPU."""
    scale = measure(configure(ranks=1))
    shapes = [p.shape for p in MetaModel(configure(ranks=1)).whole.parameters()]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    fragment = Fragment([("", p.data) for p in parameters], OUTER_OPTIMIZERS["diloco"], torch.device("cpu"))
    fragment.step(buffer := fragment.pseudo_gradient())
    outer = [*fragment.globals, *fragment.momentum()]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    found = scale.worst.memory.items
    assert found["optimizer states"] == sum(tensor.nbytes for tensor in states)
    assert found["outer state"] == sum(tensor.nbytes for tensor in outer)
    assert found["exchange between replicas"] == buffer.nbytes


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"training__dtype": "bfloat16"}, {"parameters": 0.5, "gradients": 0.5, "optimizer states": 0.5}),
        ({"optimizer__implementation": "fused_opt_states_bf16"}, {"optimizer states": 0.5}),
        ({"fault_tolerance__enable": False}, {"outer state": 0, "exchange between replicas": 0}),
        ({"fault_tolerance__semi_sync_method": "none"}, {"outer state": 0}),
        ({"fault_tolerance__semi_sync_method": "local_sgd"}, {"outer state": 0.5}),
        ({"fault_tolerance__num_fragments": 4}, {"exchange between replicas": 0.25}),
        ({"training__seq_len": 512}, {"activations": 0.5, "logits": 0.5, "buffers": 0.5}),
        ({"training__local_batch_size": 8}, {"activations": 2, "logits": 2}),
        (degrees(cp=2), {"activations": 0.5, "logits": 0.5}),
        (
            {"training__mixed_precision_param": "float32"},
            {"gathered parameters": 2, "unreduced gradients": 8 / 6, "activations": 2},
        ),
        (degrees(fsdp_reshard_after_forward="never"), {"gathered parameters": TOTAL / (2 * LAYER + WORDS + NORM)}),
        (degrees(fsdp_reshard_after_forward="always"), {"gathered parameters": 2 * LAYER / (2 * LAYER + WORDS + NORM)}),
    ],
    ids=" ".join,
)
def test_what_an_option_changes(plain, options, changed):
    before, after = plain.worst.memory.items, items(configure(**options))
    ratios = {name: after[name] / before[name] for name in before if before[name]}
    different = {name: ratio for name, ratio in ratios.items() if ratio != pytest.approx(1, rel=1e-4)}
    assert different == pytest.approx(changed, rel=1e-3)


def test_each_parameter_goes_to_the_first_optimizer_whose_pattern_fits():
    config = configure()
    muon = ParamGroupConfig(pattern="layers.*weight", optimizer_name="DistMuon", optimizer_kwargs={})
    rest = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"amsgrad": True})
    config.optimizer.param_groups = [muon, rest]
    assert items(config)["optimizer states"] == 4 * (6 * LAYER + 3 * (2 * WORDS + NORM)) // 8


def test_offloaded_state_is_in_the_hosts_memory(plain):
    scale = measure(configure(training__enable_cpu_offload=True))
    found = scale.worst.memory
    assert list(found.state) == ["buffers"] and not found.exchange
    assert (
        found.host == {name: size for name, size in plain.worst.memory.items.items() if name in found.host}
        and len(found.host) == 5
    )


def test_a_pipeline_keeps_all_gathered_and_all_gradients():
    """TorchTitan neither reshards nor reduces between the micro-batches of a step."""
    found = items(configure(**degrees(pp=2), parallelism__pipeline_parallel_schedule="1F1B"))
    stage = 3 * LAYER + WORDS
    assert found["gathered parameters"] == 2 * stage
    assert found["unreduced gradients"] == 4 * stage + (2 + 4) * LAYER


def test_float8_adds_a_byte_a_parameter_of_the_largest_unit(plain):
    config = configure()
    with MetaModel(config).on_rank(0) as part:
        assert memory._fsdp_buffers(config, part)["float8"] == 0
        config.torchtitan.converters = {"float8_linear": {"filter_fqns": ["lm_head"]}}
        assert memory._fsdp_buffers(config, part)["float8"] == LAYER
        config.torchtitan.converters["float8_linear"]["enable"] = False
        assert memory._fsdp_buffers(config, part)["float8"] == 0


# Activations ---------------------------------------------------------------------------------------------------------


def count(base, index, *, sequence_parallel=True, **options):
    model = MetaModel(configure(base, **options))
    with model.on_rank(0) as part:
        return activations.block(part.modules[0].layers[str(index)], sequence_parallel=sequence_parallel)


def test_elements_of_a_llama_block_by_hand():
    d, heads, f = 256, 16, 768  # the debug model: 16 heads of 16, as many for keys and values
    kept = count(LLAMA, 0)
    linears = 3 * d + 2 * f
    assert kept.everything == 4 * d + linears + d + 2 * heads + 2 * f
    assert kept.selected == d + linears / 2 + d + 2 * heads
    assert kept.input == d


def test_elements_of_a_mixture_block_by_hand():
    d, heads, nope, rope, v, rank, f = 256, 16, 128, 64, 128, 512, 256
    linears = heads * (nope + rope) + rank + rope + heads * (nope + v)
    attention = heads * v + 2 * heads + heads * (nope + rope)
    routed, shared, router = 3 * (3 * d + 4 * f), 4 * 2 * f, 8
    assert count(MOE, 1).everything == 4 * d + rank + linears + attention + routed + shared + router
    alone, together = count(MOE, 1), count(MOE, 1, **degrees(ep=4))
    assert together.selected - alone.selected == 3 * 2 * d  # what all-to-all delivers
    assert together.everything == alone.everything


def test_tensor_parallelism_divides_a_block():
    d = 256
    whole, cut = count(LLAMA, 0), count(LLAMA, 0, **degrees(tp=2))
    assert cut.everything == whole.everything / 2 and cut.input == d / 2
    # Without sequence parallelism every rank has the whole residual stream and the norms' results.
    uncut = count(LLAMA, 0, sequence_parallel=False, **degrees(tp=2))
    assert uncut.everything == whole.everything / 2 + 2 * d and uncut.input == d
    experts = count(MOE, 1, **degrees(tp=2))
    assert count(MOE, 1).everything / 2 < experts.everything < count(MOE, 1).everything


def test_checkpointing_more_keeps_less():
    tokens, size = 4 * 1024, 2
    kept = count(LLAMA, 0)

    def found(policy):
        return items(configure(activation_checkpoint=policy))["activations"]

    assert found(None) == 6 * kept.everything * tokens * size
    assert found(FullAC.Config()) == (6 * kept.input + kept.everything) * tokens * size
    between = (kept.input + kept.everything) / 2
    config = configure(activation_checkpoint=MemoryBudgetAC.Config(memory_budget=0.5))
    assert items(config)["activations"] == (6 * between + kept.everything) * tokens * size
    assert items(configure())["activations"] == (6 * kept.selected + kept.everything) * tokens * size


@pytest.mark.parametrize(
    ("schedule", "batch", "in_flight"),
    [("1F1B", 4, (2, 1)), ("GPipe", 4, (4, 4)), ("1F1B", 2, (2, 1)), ("Interleaved1F1B", 4, (2.5, 1.5))],
)
def test_micro_batches_in_flight(schedule, batch, in_flight):
    """Played through the schedule: the first stage waits longest for its backward passes."""
    options = {"parallelism__pipeline_parallel_schedule": schedule, "training__local_batch_size": batch}
    parts = [["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["layers.3", "layers.4", "layers.5", "norm"]]
    if schedule.startswith("Inter"):
        parts = [["layers.0"], ["layers.1"], ["layers.2"], ["layers.3"]]  # one layer a stage: halves of a rank's two
    config = configure(**degrees(pp=2), **options, activation_checkpoint=None)
    config.parallelism.module_fqns_per_model_part = parts
    layer = count(LLAMA, 0).everything * 1024 * 2
    layers = 2 if schedule.startswith("Inter") else 3
    found = [kind.memory.training["activations"] / layer / layers for kind in measure(config).kinds]
    assert found == pytest.approx(list(in_flight))


# Rules ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "ranks", "options", "message"),
    [
        (
            LLAMA,
            3,
            {**degrees(tp=3), "training__seq_len": 1536},
            "parallelism.tensor_parallel_degree must divide the 16 attention heads of the model, got 3.",
        ),
        (MOE, 3, degrees(ep=3), "parallelism.expert_parallel_degree must divide the 8 experts of the model, got 3."),
        (
            LLAMA,
            8,
            {**degrees(pp=8, pipeline_parallel_schedule="1F1B"), "training__local_batch_size": 8},
            "parallelism.pipeline_parallel_degree must make at most as many stages as the model has layers (6); with "
            '"1F1B" it makes 8, got 8.',
        ),
        (
            LLAMA,
            4,
            degrees(pp=4, pipeline_parallel_schedule="Interleaved1F1B"),
            "parallelism.pipeline_parallel_degree must make at most as many stages as the model has layers (6); with "
            '"Interleaved1F1B" it makes 8, got 4.',
        ),
        (
            LLAMA,
            2,
            degrees(pp=2, pipeline_parallel_schedule="1F1B", pipeline_parallel_microbatch_size=4),
            "training.local_batch_size must make at least 2 micro-batches of "
            'parallelism.pipeline_parallel_microbatch_size (4) for 2 stages with "1F1B", got 4.',
        ),
        (
            LLAMA,
            2,
            degrees(pp=2, pipeline_parallel_microbatch_size=3),
            "parallelism.pipeline_parallel_microbatch_size must be a positive divisor of training.local_batch_size "
            "(4), got 3.",
        ),
        (
            LLAMA,
            2,
            degrees(pp=2, pipeline_parallel_schedule="2F2B"),
            'parallelism.pipeline_parallel_schedule must be a schedule that torch knows, got "2F2B".',
        ),
        (
            LLAMA,
            2,
            degrees(pp=2, module_fqns_per_model_part=[["layers.0"]]),
            "parallelism.module_fqns_per_model_part must have a multiple of pipeline_parallel_degree (2) parts, got 1.",
        ),
    ],
)
def test_degrees_that_do_not_fit(base, ranks, options, message):
    with pytest.raises(ConfigError) as refused:
        measure(configure(base, ranks=ranks, **options))
    assert str(refused.value) == message


def test_degrees_are_checked_against_the_ranks_first():
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree \(3\) must divide the ranks of one replica"):
        measure(configure(**degrees(tp=3)))


def test_fewer_key_heads_than_attention_heads_are_a_rule_of_their_own():
    config = configure(("llama3", "llama3_8b"), ranks=16, **degrees(tp=16))
    with pytest.raises(ConfigError, match="must divide the 8 key and value heads of the model, got 16"):
        measure(config)


def test_what_only_torchtitan_knows_is_a_users_mistake_too():
    with pytest.raises(ConfigError, match=r"llama3 debugmodel cannot be trained this way: .*maximum"):
        measure(configure(training__seq_len=10**6))
    assert not dist.is_initialized()


def test_a_pipeline_that_must_idle_is_noted():
    config = configure(**degrees(pp=2), parallelism__pipeline_parallel_schedule="GPipe", training__local_batch_size=1)
    assert measure(config).notes == [
        "training.local_batch_size gives 1 micro-batches to 2 pipeline ranks: some always wait."
    ]


# GPUs ----------------------------------------------------------------------------------------------------------------


def test_a_gpu_is_found_by_name_in_any_case():
    assert gpus.capacity("mi300x") == gpus.capacity("MI300X") == int(191.69 * 2**30)
    with pytest.raises(ConfigError) as refused:
        gpus.capacity("MI300")
    assert str(refused.value) == (
        "monarch.gpu must be one of A100-80GB, H100-80GB, H200, B200, MI300X, MI325X, MI355X, "
        'got "MI300"; did you mean MI300X?'
    )


def test_shortage_names_what_takes_most_and_what_would_help(plain):
    assert plain.shortage() is None  # no GPU is named
    assert dataclasses.replace(plain, gpu="H100-80GB").shortage() is None
    states = {"parameters": 10 * 2**30, "optimizer states": 200 * 2**30}
    fat = dataclasses.replace(plain.worst, memory=memory.Memory(state=states, training={}, exchange={}))
    assert dataclasses.replace(plain, gpu="H200", kinds=[*plain.kinds, fat]).shortage() == (
        'monarch.gpu "H200" has 139.72 GiB, and rank 0 of each replica needs 210.00 GiB: most of it, 200.00 GiB, for '
        'its optimizer states. Smaller with: optimizer.implementation = "fused_opt_states_bf16"; more '
        "monarch.hosts_per_replica, with parallelism.data_parallel_shard_degree = -1; "
        "training.enable_cpu_offload = true."
    )


def test_what_is_already_done_is_not_advised(plain):
    done = measure(configure(optimizer__implementation="fused_opt_states_bf16", training__enable_cpu_offload=True))
    assert len(plain.advice["optimizer states"]) - len(done.advice["optimizer states"]) == 2


def test_the_gpu_is_taken_from_the_configuration():
    @dataclasses.dataclass(kw_only=True, slots=True)
    class WithGpu(Monarch):
        gpu: str | None = None

    config = configure()
    config.monarch = WithGpu(procs_per_host=8, gpu="H200")
    assert measure(config).gpu == "H200"
    config.monarch.gpu = "Voodoo 2"
    with pytest.raises(ConfigError, match=r"^monarch.gpu must be one of "):
        measure(config)


def test_what_a_person_sees():
    scale = measure(configure(MOE, **degrees(pp=2, ep=2), monarch__num_replicas=3))
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(render(dataclasses.replace(scale, gpu="MI300X")))
    lines = console.export_text().splitlines()
    assert lines[:3] == [
        "24 ranks = 3 replicas x 1 host x 8",
        "mesh pp 2 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 1",
        "experts: ep 2 x efsdp 2",
    ]
    assert scale.layout == "; ".join(lines[:3])
    assert lines[3] == "33.01M parameters, 28.10M of them active"
    worst, lightest = scale.worst, scale.lightest
    header = next(line for line in lines if "memory of a rank" in line)
    assert f"rank {worst.rank}" in header and f"rank {lightest.rank}" in header and worst is not lightest
    total = next(line for line in lines if line.startswith("at most at once"))
    assert f"{worst.memory.total / 2**30:.2f} GiB" in total and f"{lightest.memory.total / 2**30:.2f} GiB" in total
    assert not any("float8" in line for line in lines)
    assert lines[-1] == "fits in MI300X (191.69 GiB)"


# Nothing stays behind ------------------------------------------------------------------------------------------------


def remembered():
    """Operations whose meshes DTensor would give out again."""
    return DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_info().currsize


def state():
    return {
        "initialised": dist.is_initialized(),
        "device": parallel_dims.device_type,
        "backend": dist_utils.get_spmd_backend(),
        "logging": (logging.root.manager.disable, logging.root.level),
        "threads": threading.active_count(),
        "environment": dict(os.environ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
    }


def test_nothing_stays_behind_and_a_second_time_gives_the_same():
    config = configure(MOE, **degrees(pp=2, ep=2))
    before, said = state(), repr(config.model_spec.model)
    first = measure(config)
    assert state() == before
    assert repr(config.model_spec.model) == said
    assert measure(config) == first
    assert state() == before and remembered() == 0


def test_nothing_stays_behind_when_it_fails():
    before = state()
    with pytest.raises(ZeroDivisionError), MetaModel(configure()).on_rank(0):
        raise ZeroDivisionError
    assert state() == before


def test_a_process_of_a_job_is_not_made_a_rank_of_another(plain):
    """And a real process group works after all the false ones."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="cannot pretend"):
            measure(configure())
        model = torch.nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is not None
    finally:
        dist.destroy_process_group()
