"""Files of the TOML era mean in 0.3.0 what they meant, key by key, and nothing of them is dropped in silence."""

import dataclasses
import re
from pathlib import Path

import pytest
import tomli
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from monarch_titan.config import era, era_table
from monarch_titan.config.era_table import FLUX, TABLE
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import find, load, load_given
from monarch_titan.config.rows import ASKS_NOTHING

FILES = Path(__file__).parent / "toml_era"
MODEL = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def keys_of(table, prefix=""):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def at(config, path):
    for name in path.split("."):
        config = (
            config[int(name)]
            if name.isdecimal()
            else (config[name] if isinstance(config, dict) else getattr(config, name))
        )
    return list(config) if isinstance(config, tuple) else config


# The table ----------------------------------------------------------------------------------------------------------


def test_the_files_hold_every_key_of_the_table():
    held = {key for file in FILES.glob("*.toml") for key, _ in keys_of(tomli.loads(file.read_text()))}
    # 0.1 spelled this key; the two others had no reader in any version that wrote TOML files.
    assert (TABLE.keys() | FLUX.keys()) - held == {
        "job.config_file",
        "quantize.linear.float8.force_recompute_fp8_weight_in_bwd",
        "validation.eval_freq",
    }


@pytest.mark.parametrize("name", ["torchtitan_0_1", "torchtitan_0_2", "flux"])
def test_every_key_ends_in_a_row_and_what_is_applied_is_in_the_configuration(name):
    loaded = load_given(find(FILES / f"{name}.toml"))
    rows = {}
    for row in loaded.rows:
        rows.setdefault(row.old, []).append(row)
    for key, _ in keys_of(tomli.loads((FILES / f"{name}.toml").read_text())):
        assert key in rows, key
        assert all(row.status in ("applied", "not applied") for row in rows[key]), rows[key]
        assert all(row.reason for row in rows[key] if row.status == "not applied"), rows[key]
    for row in loaded.rows:
        if row.status == "applied" and row.new and row.new != "activation_checkpoint.mode":
            assert at(loaded.config, row.new) == row.value, row


# What facts and TorchTitan's release notes say of each moved option: old key, a value, new path, new value.
MOVED = [
    ("job.dump_folder", '"x"', "dump_folder", "x"),
    ("job.description", '"x"', "monarch.description", "x"),
    ("job.print_config", "true", "debug.print_config", True),
    ("job.print_args", "true", "debug.print_config", True),
    ("job.save_config_file", '"x"', "debug.save_config_file", "x"),
    ("profiling.profile_freq", "3", "profiler.profile_freq", 3),
    ("metrics.log_freq", "3", "metrics.log_freq", 3),
    ("comm.init_timeout_seconds", "3", "comm.init_timeout_seconds", 3),
    ("compile.enable", "true", "compile.enable", True),
    ("debug.seed", "3", "debug.seed", 3),
    ("model.hf_assets_path", '"x"', "hf_assets_path", "x"),
    ("model.tokenizer_path", '"a/b/tokenizer.model"', "hf_assets_path", "a/b"),
    ("model.tokenizer_path", '"tokenizer.json"', "hf_assets_path", "."),
    ("model.tokenizer_path", '"a/b"', "hf_assets_path", "a/b"),
    ("optimizer.name", '"Adam"', "optimizer.param_groups.0.optimizer_name", "Adam"),
    ("optimizer.lr", "0.5", "optimizer.param_groups.0.optimizer_kwargs.lr", 0.5),
    ("optimizer.eps", "0.5", "optimizer.param_groups.0.optimizer_kwargs.eps", 0.5),
    ("optimizer.weight_decay", "0.5", "optimizer.param_groups.0.optimizer_kwargs.weight_decay", 0.5),
    ("optimizer.beta1", "0.5", "optimizer.param_groups.0.optimizer_kwargs.betas", [0.5, 0.95]),
    ("optimizer.beta2", "0.5", "optimizer.param_groups.0.optimizer_kwargs.betas", [0.9, 0.5]),
    ("lr_scheduler.lr_min", "0.1", "lr_scheduler.min_lr_factor", 0.1),
    ("training.dataset", '"c4"', "dataloader.dataset", "c4"),
    ("training.dataset_path", '"x"', "dataloader.dataset_path", "x"),
    ("training.compile", "true", "compile.enable", True),
    ("training.seed", "3", "debug.seed", 3),
    (
        "parallelism.module_fqns_per_model_part",
        '[["a"], ["output"]]',
        "parallelism.module_fqns_per_model_part",
        [["a"], ["lm_head"]],
    ),
    ("checkpoint.enable_checkpoint", "true", "checkpoint.enable", True),
    ("checkpoint.last_save_model_weights_only", "false", "checkpoint.last_save_model_only", False),
    ("float8.filter_fqns", '["output"]', "torchtitan.converters.float8_linear.filter_fqns", ["lm_head"]),
    (
        "quantize.linear.float8.filter_fqns",
        '["output", "x"]',
        "torchtitan.converters.float8_linear.filter_fqns",
        ["lm_head", "x"],
    ),
    ("fault_tolerance.process_group", '"nccl"', "fault_tolerance.process_group", "auto"),
    ("fault_tolerance.process_group", '"gloo"', "fault_tolerance.process_group", "gloo"),
    ("fault_tolerance.min_replica_size", "1", "monarch.min_replicas", 1),
    ("validation.freq", "3", "validator.freq", 3),
    ("validation.dataset", '"c4"', "validator.dataloader.dataset", "c4"),
]


@pytest.mark.parametrize(("old", "value", "new", "now"), MOVED)
def test_moved_option(write, old, value, new, now):
    section, _, key = old.rpartition(".")
    model = MODEL if section != "model" else f"{MODEL}{key} = {value}\n"
    table = f"[{section}]\n{key} = {value}\n" if section != "model" else ""
    assert at(load(write(model + table)), new) == now


def test_async_tensor_parallelism_belongs_to_compile(write):
    text = "[compile]\nenable = true\n[parallelism]\nenable_async_tensor_parallel = true\n"
    assert load(write(MODEL + text)).compile.enable_async_tensor_parallel


def test_communication_of_experts_is_the_models(write):
    text = '[model]\nname = "deepseek_v3"\n[parallelism]\nexpert_parallel_comm_backend = "hybridep"\n'
    config = load(write(text))
    assert config.torchtitan.moe_comm_backend == "hybridep"
    assert "HybridEP" in repr(config.model_spec.model)


@pytest.mark.parametrize(
    ("mode", "policy"),
    [("selective", SelectiveAC), ("full", FullAC), ("memory_budget", MemoryBudgetAC), ("none", None)],
)
def test_modes_of_activation_checkpointing(write, mode, policy):
    compiled = "[compile]\nenable = true\n"  # a memory budget needs it
    config = load(write(f'{MODEL}{compiled}[activation_checkpoint]\nmode = "{mode}"\n'))
    assert type(config.activation_checkpoint) is (policy.Config if policy else type(None))


# Defaults -----------------------------------------------------------------------------------------------------------


def test_silence_means_what_it_meant_in_the_era(write):
    config = load(write(MODEL))
    (group,) = config.optimizer.param_groups
    kwargs = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert (group.optimizer_name, group.optimizer_kwargs) == ("AdamW", kwargs)
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (10_000, 2048, 8)
    assert config.training.disable_cuda_graphs
    assert config.parallelism.expert_parallel_degree == 1
    assert config.dataloader.dataset == "c4_test"
    assert config.profiler.save_traces_folder == "profile_traces"
    assert type(config.activation_checkpoint) is SelectiveAC.Config
    assert config.lr_scheduler.warmup_steps == 200


def test_the_file_and_not_todays_recipe_says_what_is_left_out(write):
    """TorchTitan's own deepseek_v3_671b has expert_parallel_degree 2 and 2,000 steps of warm-up."""
    config = load(write('[model]\nname = "deepseek_v3"\nflavor = "671B"\n'))
    assert (config.parallelism.expert_parallel_degree, config.lr_scheduler.warmup_steps) == (1, 200)
    assert config.loss.loss_fn.global_vocab_size == 129_280


def test_replicas_are_joined_by_default_only_where_monarch_is_asked_for(write):
    section = "[fault_tolerance]\nsync_steps = 10\n"
    alone = load(write(MODEL + section)).fault_tolerance
    assert (alone.enable, alone.semi_sync_method, alone.process_group_timeout_ms) == (False, "none", 10_000)
    joined = load(write(MODEL + section + "[monarch]\nnum_replicas = 2\n")).fault_tolerance
    assert (joined.enable, joined.semi_sync_method, joined.sync_steps) == (True, "none", 10)


def test_without_a_section_the_replicas_are_joined_as_anywhere_here(write):
    ours = load(write(MODEL + "[monarch]\nnum_replicas = 2\n"))
    assert (ours.fault_tolerance.semi_sync_method, ours.fault_tolerance.sync_steps) == ("diloco", 20)


def test_without_monarch_there_is_one_replica_and_nothing_to_join(write):
    config = load(write(MODEL))
    assert (config.monarch.num_replicas, config.fault_tolerance.enable) == (1, False)


# Models and converters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flavor", "expected"),
    [
        ("llama3", "8B_varlen", ("llama3", "8B", "varlen")),
        ("llama3", "debugmodel_flex_attn", ("llama3", "debugmodel", "flex")),
        ("llama3_ft", "debugmodel", ("llama3", "debugmodel", "flex")),
        ("gpt_oss", "20b", ("gpt_oss", "20b", "flex")),
        ("qwen3", "debugmodel_moe", ("qwen3", "debugmodel_moe", "flex")),
    ],
)
def test_model_and_its_attention(write, name, flavor, expected):
    config = load(write(f'[model]\nname = "{name}"\nflavor = "{flavor}"\n'))
    base = config.torchtitan
    assert (base.module, base.flavor, base.attn_backend) == expected
    assert (config.model_spec.name, config.model_spec.flavor) == expected[:2]


@pytest.mark.parametrize("name", era_table.NO_MODELS)
def test_models_without_a_home_are_refused_by_name(write, name):
    with pytest.raises(
        ConfigError, match=rf"run\.toml:2: model\.name must be one of .*: TorchTitan 0\.3\.0 has .*'{name}'"
    ):
        load(write(f'[model]\nname = "{name}"\n'))


@pytest.mark.parametrize(
    ("converters", "enabled"),
    [
        ('["float8"]', {"float8_linear": True}),
        ('["quantize.linear.float8"]', {"float8_linear": True}),
        ('"quantize.grouped_mm.float8"', {"float8_grouped_experts": True}),
        ('["quantize.grouped_mm.mx"]', {"mxfp8_grouped_experts": True}),
        ("[]", {}),
    ],
)
def test_converters_are_switched_on_by_name(write, converters, enabled):
    tables = load(write(f"{MODEL}converters = {converters}\n")).torchtitan.converters
    assert {name: table["enable"] for name, table in tables.items()} == enabled


def test_converter_that_is_set_up_and_not_named_stays_off(write):
    text = f'{MODEL}[quantize.linear.float8]\nfilter_fqns = ["output"]\n'
    off = {"filter_fqns": ["lm_head"], "enable": False}
    assert load(write(text)).torchtitan.converters == {"float8_linear": off}
    on = load(write(text), "model.converters=[quantize.linear.float8]").torchtitan.converters
    assert on == {"float8_linear": off | {"enable": True}}


def test_filter_that_no_layer_has_is_noted(write):
    text = f'{MODEL}[quantize.linear.float8]\nfilter_fqns = ["attention.wk", "output", "auto_filter_small_kn"]\n'
    (note,) = load_given(find(write(text))).notes
    assert "'attention.wk' is in the name of no layer" in note


# What is refused or left out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[optimizer]\nearly_step_in_backward = true\n", 5, "optimizer.early_step_in_backward must be false"),
        ("[parallelism]\nexpert_tensor_parallel_degree = 2\n", 5, "expert_tensor_parallel_degree must be 1"),
        (
            '[parallelism]\npipeline_parallel_split_points = ["layers.2"]\n',
            5,
            "must be empty: 0.3.0 takes whole stages",
        ),
        ('[float8]\nrecipe_name = "tensorwise"\n', 5, 'float8.recipe_name must be "rowwise" or "rowwise_with_gw_hp"'),
        ("[fault_tolerance]\nshould_quantize = true\n", 5, "fault_tolerance.should_quantize must be false"),
        ("[fault_tolerance]\nfragment_sync_delay = 2\n", 5, "fault_tolerance.fragment_sync_delay must be 0"),
        ("[fault_tolerance]\nreplica_id = 2\n", 5, "fault_tolerance.replica_id must be left out"),
        (
            "[fault_tolerance]\ngroup_size = 8\n[monarch]\nnum_replicas = 2\n",
            5,
            "fault_tolerance.group_size must be the number of replica groups, monarch.num_replicas (2)",
        ),
        ('converters = ["mx"]\n', 4, "model.converters must name no mx"),
        ('converters = ["int4"]\n', 4, "model.converters must name only float8,"),
        ("converters = 5\n", 4, "model.converters must be a list of converters, got 5."),
        ('[optimizer]\nlr = "fast"\n', 5, "optimizer.lr must be a number, got 'fast'."),
        (
            "[profiling]\nprofile_freq = true\n",
            5,
            "profiling.profile_freq (profiler.profile_freq now) must be an integer, got true.",
        ),
        ("[training]\ndataset = 5\n", 5, "training.dataset (dataloader.dataset now) must be a string, got 5."),
        ("[parallelism]\ndisable_loss_parallel = 1\n", 5, "disable_loss_parallel must be true or false, got 1."),
        ("[parallelism]\nexpert_tensor_parallel_degree = true\n", 5, "expert_tensor_parallel_degree must be a number"),
        ("[validation]\nseq_len = 'x'\n", 5, "validation.seq_len must be a number, got 'x'."),
        ("[mx]\nfilter_fqns = 'x'\n", 5, "mx.filter_fqns must be a list, got 'x'."),
        ("[training]\nstep = 5\n", 5, "unknown option training.step; did you mean training.steps?"),
        ("[training]\ndatset = 'c4'\n", 5, "unknown option training.datset; did you mean training.dataset?"),
        ("[traning]\nsteps = 5\n", 5, "unknown option traning.steps; did you mean training.steps?"),
        ("[training]\nsteps = {x = 1}\n", 5, 'training.steps must be an integer, got {"x": 1}.'),
        ("[mine]\nx = 5\n", 5, "unknown option mine.x; there are the sections activation_checkpoint,"),
        ("[monarch]\nreplicas = 5\n", 5, "unknown option monarch.replicas; did you mean monarch.num_replicas?"),
        ('[activation_checkpoint]\nmode = "some"\n', 5, "activation_checkpoint.mode must be one of"),
    ],
)
def test_refused(write, text, line, message):
    file = write(MODEL + text)
    with pytest.raises(ConfigError) as error:
        load(file)
    assert str(error.value).startswith(f"{file}:{line}: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[float8]\nenable_fsdp_float8_all_gather = true\n", "[float8_comm] is to bring it back"),
        ("[float8]\nenable_fsdp_float8_all_gather = false\n", ASKS_NOTHING),
        ("[parallelism]\ndisable_loss_parallel = true\n", "TorchTitan 0.3.0 decides this by itself"),
        ("[activation_checkpoint]\nselective_ac_option = '2'\n", "no longer whole layers"),
        ("[activation_checkpoint]\nmode = 'none'\npreserve_rng_state = true\n", "it means nothing with activation_"),
        ("[validation]\nseq_len = 64\n", "0.3.0 validates with training.seq_len"),
        ("[memory_estimation]\nenable = true\n", "monarch-titan validate estimates memory"),
        ("[fault_tolerance]\ngroup_size = 2\n[monarch]\nnum_replicas = 2\n", "the number of replica groups, 2"),
        ("[experimental]\ncustom_import = 'my_pkg'\n", "0.3.0 has configuration functions for this"),
    ],
)
def test_left_out_with_the_reason(write, text, reason):
    rows = [row for row in load_given(find(write(MODEL + text))).rows if row.status == "not applied"]
    assert any(reason in row.reason for row in rows), rows


def test_sections_of_a_third_party_pass_when_it_is_named(write):
    text = MODEL + '[job]\ncustom_config_module = "my_pkg.job_config"\n[mine]\nx = 5\n[training]\nmy_option = 1\n'
    rows = {row.old: row for row in load_given(find(write(text))).rows}
    for key in ("mine.x", "training.my_option"):
        assert rows[key].status == "not applied"
        assert rows[key].reason == "it belongs to my_pkg.job_config, which TorchTitan 0.3.0 does not read"


def test_a_slip_beside_a_third_party_is_a_slip(write):
    text = MODEL + '[job]\ncustom_config_module = "my_pkg.job_config"\n[training]\nlocal_batchsize = 1\n'
    with pytest.raises(ConfigError, match=r"did you mean training\.local_batch_size"):
        load(write(text))


# Both dialects -------------------------------------------------------------------------------------------------------


def test_new_names_beside_old_ones(write):
    config = load(write(MODEL + "[training]\ndisable_cuda_graphs = false\n[dataloader]\ninfinite = false\n"))
    assert not config.training.disable_cuda_graphs
    assert not config.dataloader.infinite


def test_either_name_on_the_command_line(write):
    file = write(MODEL + "[training]\ndataset = 'c4'\n[optimizer]\nlr = 1.0\n")
    assert load(file, "dataloader.dataset=c4_test").dataloader.dataset == "c4_test"
    assert load(file, "training.dataset=c4_test").dataloader.dataset == "c4_test"
    for name in ("optimizer.lr", "optimizer.param_groups.0.optimizer_kwargs.lr"):
        assert load(file, f"{name}=0.5").optimizer.param_groups[0].optimizer_kwargs["lr"] == 0.5


def test_old_name_on_the_command_line_over_the_new_one_in_the_file(write):
    file = write(MODEL + "[dataloader]\ndataset = 'c4'\n")
    with pytest.raises(ConfigError, match=r"command line: training\.dataset must be written dataloader\.dataset"):
        load(file, "training.dataset=c4_test")


def test_a_file_has_one_dialect(write):
    with pytest.raises(ConfigError, match=r"run\.toml:1: \[model\] is how TorchTitan 0\.2 names a model"):
        load(write(MODEL + '[torchtitan]\nmodule = "llama3"\nconfig = "llama3_8b"\n'))


@pytest.mark.parametrize("text", ["[training]\nsteps = 1\n", "[monarch]\nnum_replicas = 1\n", ""])
def test_what_both_dialects_hold_is_of_neither(write, text):
    assert not era.is_era(find(write(text)))
    with pytest.raises(ConfigError, match="add what to start from"):
        load(write(text))


def test_table_is_consistent():
    """Targets are options of 0.3.0, so that a row of the table cannot be wrong by a letter."""
    llama, flux = load(FILES / "torchtitan_0_1.toml"), load(FILES / "flux.toml")
    for table, config in ((TABLE, llama), (FLUX, flux)):
        for key, rule in table.items():
            if rule.to and not re.match(r"torchtitan\.|activation_checkpoint\.", rule.to):
                at(config, rule.to)
            assert rule.to or rule.reason, key
    assert all(dataclasses.is_dataclass(rule) for rule in TABLE.values())
