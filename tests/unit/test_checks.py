"""Options that contradict each other are refused by name before anything starts."""

import re
from pathlib import Path

import pytest

from monarch_titan import upstream
from monarch_titan.config.checks import check, check_here
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import load
from monarch_titan.training.cpu import adapt

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def resolve(tmp_path):
    """Loads the Llama 3 debug base (3 replicas of 2 ranks), or another, with overrides."""

    def resolve(*overrides, base="monarch_titan.llama3_debug_diloco"):
        module, _, config = base.partition(".")
        file = tmp_path / "run.toml"
        file.write_text(f'[torchtitan]\nmodule = "{module}"\nconfig = "{config}"\n')
        return load(file, f"dump_folder={tmp_path / 'out'}", *overrides)

    return resolve


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.toml")))
def test_the_files_to_start_from_can_be_run(tmp_path, name):
    check(load(CONFIGS / name, f"dump_folder={tmp_path}"))


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "monarch.num_replicas=1 monarch.min_replicas=1",
        "monarch.num_replicas=1 fault_tolerance.enable=false training.steps=1",
        "monarch.min_replicas=3 monarch.recovery.respawns=16 monarch.recovery.backoff_seconds=0",
        "fault_tolerance.semi_sync_method=none training.steps=1",
        "fault_tolerance.semi_sync_method=local_sgd training.steps=20",
        "fault_tolerance.num_fragments=4",
        "monarch.procs_per_host=4 parallelism.data_parallel_replicate_degree=2 parallelism.tensor_parallel_degree=2",
        "monarch.procs_per_host=8 parallelism.pipeline_parallel_degree=2 parallelism.context_parallel_degree=2 "
        "training.disable_cuda_graphs=true training.seq_len=256",
        "monarch.procs_per_host=16 parallelism.tensor_parallel_degree=16 parallelism.enable_sequence_parallel=false "
        "training.seq_len=136",
        "training.global_batch_size=8",
    ],
)
def test_what_fits_together(resolve, overrides):
    check(resolve(*overrides.split()))


RANKS = "the ranks of one replica, which are monarch.hosts_per_replica (1) * monarch.procs_per_host"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("monarch.num_replicas=0", "monarch.num_replicas must be at least 1, got 0."),
        ("training.max_norm=nan", "training.max_norm must be greater than 0, got NaN."),
        ("lr_scheduler.warmup_steps=-1", "lr_scheduler.warmup_steps must be at least 0, got -1."),
        ("lr_scheduler.decay_ratio=inf", "lr_scheduler.decay_ratio must be between 0 and 1, got Infinity."),
        ("lr_scheduler.min_lr_factor=1.5", "lr_scheduler.min_lr_factor must be between 0 and 1, got 1.5."),
        ("monarch.min_replicas=0", "monarch.min_replicas must be between 1 and monarch.num_replicas (3), got 0."),
        ("monarch.min_replicas=4", "monarch.min_replicas must be between 1 and monarch.num_replicas (3), got 4."),
        ("monarch.procs_per_host=0", "monarch.procs_per_host must be at least 1, got 0."),
        ("monarch.hosts_per_replica=0", "monarch.hosts_per_replica must be at least 1, got 0."),
        (
            "monarch.hosts_per_replica=2",
            'monarch.hosts_per_replica must be 1 with monarch.scheduler "local", which is one machine, got 2.',
        ),
        ("monarch.quorum_timeout_seconds=0", "monarch.quorum_timeout_seconds must be greater than 0, got 0."),
        (
            "monarch.lighthouse.heartbeat_timeout_ms=-1",
            "monarch.lighthouse.heartbeat_timeout_ms must be greater than 0, got -1.",
        ),
        ("monarch.lighthouse.join_timeout_ms=0", "monarch.lighthouse.join_timeout_ms must be greater than 0, got 0."),
        ("monarch.lighthouse.quorum_tick_ms=0", "monarch.lighthouse.quorum_tick_ms must be greater than 0, got 0."),
        ("monarch.recovery.max_failures=0", "monarch.recovery.max_failures must be at least 1, got 0."),
        ("monarch.recovery.respawns=0", "monarch.recovery.respawns must be between 1 and max_failures (16), got 0."),
        ("monarch.recovery.respawns=17", "monarch.recovery.respawns must be between 1 and max_failures (16), got 17."),
        ("monarch.recovery.backoff_seconds=-1", "monarch.recovery.backoff_seconds must be at least 0, got -1.0."),
        ("monarch.recovery.backoff_seconds=nan", "monarch.recovery.backoff_seconds must be at least 0, got NaN."),
        (
            "monarch.recovery.max_backoff_seconds=-1",
            "monarch.recovery.max_backoff_seconds must be at least 0, got -1.0.",
        ),
        ("monarch.recovery.commit_retries=-1", "monarch.recovery.commit_retries must be at least 0, got -1."),
        (
            "fault_tolerance.enable=false",
            "fault_tolerance.enable must be true to join the replicas when monarch.num_replicas is greater than 1 "
            "(it is 3), got false.",
        ),
        ("fault_tolerance.sync_steps=0", "fault_tolerance.sync_steps must be at least 1, got 0."),
        ("fault_tolerance.num_fragments=0", "fault_tolerance.num_fragments must be at least 1, got 0."),
        (
            "fault_tolerance.num_fragments=3",
            "fault_tolerance.sync_steps must be divisible by fault_tolerance.num_fragments (3), got 20.",
        ),
        (
            "fault_tolerance.num_fragments=2 fault_tolerance.semi_sync_method=local_sgd",
            'fault_tolerance.num_fragments must be 1 with fault_tolerance.semi_sync_method "local_sgd", because only '
            '"diloco" has fragments, got 2.',
        ),
        (
            "fault_tolerance.process_group_timeout_ms=0",
            "fault_tolerance.process_group_timeout_ms must be greater than 0, got 0.",
        ),
        (
            "training.steps=19",
            "training.steps must be at least fault_tolerance.sync_steps (20), or the replicas are never synchronised, "
            "got 19.",
        ),
        ("training.steps=0", "training.steps must be at least 1, got 0."),
        ("training.seq_len=0", "training.seq_len must be at least 1, got 0."),
        ("training.local_batch_size=0", "training.local_batch_size must be at least 1, got 0."),
        ("metrics.log_freq=0", "metrics.log_freq must be at least 1, got 0."),
        ("comm.init_timeout_seconds=0", "comm.init_timeout_seconds must be greater than 0, got 0."),
        ("comm.train_timeout_seconds=0", "comm.train_timeout_seconds must be greater than 0, got 0."),
        (
            "comm.mode=local_tensor",
            'comm.mode must be a real backend, which replicas can be joined with, got "local_ten',
        ),
        (
            "checkpoint.create_seed_checkpoint=true",
            "checkpoint.create_seed_checkpoint must be false: a seed checkpoint",
        ),
        (
            "checkpoint.folder=/tmp/checkpoint",
            'checkpoint.folder must be a path below the folder of each replica, got "/tmp/checkpoint".',
        ),
        (
            "checkpoint.folder=../checkpoint",
            'checkpoint.folder must be a path below the folder of each replica, got "../checkpoint".',
        ),
        ("parallelism.tensor_parallel_degree=0", "parallelism.tensor_parallel_degree must be at least 1, got 0."),
        (
            "parallelism.data_parallel_shard_degree=0",
            "parallelism.data_parallel_shard_degree must be at least 1, or -1 for the ranks that are left, got 0.",
        ),
        (
            "monarch.procs_per_host=3 parallelism.tensor_parallel_degree=2",
            f"parallelism.tensor_parallel_degree (2) must divide {RANKS} (3) = 3.",
        ),
        (
            "parallelism.tensor_parallel_degree=4",
            f"parallelism.tensor_parallel_degree (4) must divide {RANKS} (2) = 2.",
        ),
        (
            "monarch.procs_per_host=4 parallelism.data_parallel_shard_degree=2 parallelism.context_parallel_degree=4",
            "parallelism.context_parallel_degree (4) * parallelism.data_parallel_shard_degree (2) must be "
            f"{RANKS} (4) = 4.",
        ),
        (
            "parallelism.data_parallel_shard_degree=1",
            f"parallelism.data_parallel_shard_degree (1) must be {RANKS} (2) = 2.",
        ),
        (
            "parallelism.expert_parallel_degree=3",
            "parallelism.expert_parallel_degree must divide the ranks that share a pipeline stage's weights, "
            "dp_shard * cp * tp = 2, got 3.",
        ),
        (
            "parallelism.tensor_parallel_degree=2 training.seq_len=127",
            "training.seq_len must be divisible by 2 for tensor_parallel_degree (2) and context_parallel_degree (1), "
            "got 127.",
        ),
        (
            "training.seq_len=100",
            "training.seq_len must be divisible by loss.num_chunks (8) * context_parallel_degree (1), got 100.",
        ),
        ("parallelism.context_parallel_degree=2 training.seq_len=126", "training.seq_len must be divisible by 4 for"),
        (
            "training.global_batch_size=6",
            "training.global_batch_size must be -1 or a multiple of training.local_batch_size (2) * data-parallel "
            "ranks in a replica (2), got 6.",
        ),
        ("training.global_batch_size=0", "training.global_batch_size must be -1 or a multiple of"),
        ("dataloader.dataset_path=/not/there", "dataloader.dataset_path must name a file or a folder that exists"),
        (
            "validator.enable=true dataloader.dataset_path=null validator.dataloader.dataset=local_text "
            "validator.dataloader.dataset_path=/not/there",
            "validator.dataloader.dataset_path must name a file or a folder that exists",
        ),
    ],
)
def test_contradiction_names_option_rule_and_value(resolve, overrides, message):
    with pytest.raises(ConfigError) as error:
        check(resolve(*overrides.split()))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


# Models and parallelism

TITAN = ("dataloader.dataset=local_text", "hf_assets_path=byte_tokenizer", "training.disable_cuda_graphs=true",
         "monarch.procs_per_host=4", "training.seq_len=512", "training.steps=20")  # fmt: skip
TP, PP, CP, EP = (f"parallelism.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context", "expert"))
SCHEDULE = "parallelism.pipeline_parallel_schedule"
BALANCER = "parallelism.context_parallel_load_balancer"


@pytest.mark.parametrize("dtensor", [True, False])
@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        ("llama3.llama3_debugmodel", f"{TP}=4"),
        ("llama3.llama3_debugmodel", f"{TP}=2 parallelism.enable_sequence_parallel=false {CP}=2"),
        ("llama3.llama3_debugmodel", f"{CP}=4"),
        ("llama3.llama3_debugmodel", f"{CP}=2 {BALANCER}=null"),
        ("llama3.llama3_debugmodel", f"{PP}=2 {TP}=2"),
        ("llama3.llama3_debugmodel", f"{PP}=4 {SCHEDULE}=1F1B training.local_batch_size=4"),
        ("llama3.llama3_debugmodel_varlen_attn", f"{PP}=2 {TP}=2"),
        ("llama3.llama3_debugmodel_ce_loss", f"{PP}=2 {SCHEDULE}=ZBVZeroBubble activation_checkpoint=null"),
        ("deepseek_v3.deepseek_v3_debugmodel", f"{EP}=4"),
        ("deepseek_v3.deepseek_v3_debugmodel", f"{EP}=4 {TP}=2 {CP}=2"),
        ("deepseek_v3.deepseek_v3_debugmodel", f"{EP}=2 {PP}=2 {SCHEDULE}=Interleaved1F1B"),
        ("qwen3.qwen3_moe_debug", f"{EP}=4 {TP}=2"),
        ("gpt_oss.gpt_oss_debugmodel", f"{EP}=2 {TP}=2"),
        ("gpt_oss.gpt_oss_debugmodel_flex", f"{CP}=2"),
        (
            "gpt_oss.gpt_oss_debugmodel_flex",
            f"{CP}=2 {BALANCER}=ptrr parallelism.context_parallel_ptrr_mask_key=basic_mask",
        ),
    ],
)
def test_parallelism_that_fits_the_model(resolve, monkeypatch, base, overrides, dtensor):
    monkeypatch.setattr(upstream, "accelerator", lambda: None)
    monkeypatch.setattr(upstream, "spmd_backend_needs_dtensor", lambda: dtensor)
    config = resolve(*TITAN, *overrides.split(), base=base)
    before = config.model_spec.model.to_dict()
    adapt(config)
    check(config)
    assert config.model_spec.model.to_dict() == before


DEBUG = "llama3 debugmodel and training.local_batch_size"
WHOLE = '"1F1B", "GPipe", "Interleaved1F1B" and "LoopedBFS", which do not split the backward pass, with'


@pytest.mark.parametrize(
    ("base", "overrides", "message"),
    [
        (
            "llama3.llama3_debugmodel",
            f"{TP}=3 monarch.procs_per_host=3 training.seq_len=528",
            "parallelism.tensor_parallel_degree must divide the 16 attention heads of the model, got 3.",
        ),
        (
            "llama3.llama3_debugmodel",
            "training.seq_len=262144",
            "llama3 debugmodel cannot be trained this way: Training sequence length 262144 exceeds",
        ),
        (
            "qwen3.qwen3_debugmodel",
            f"{PP}=2",
            "qwen3 debugmodel cannot be trained this way: Weight tying is not supported with Pipeline Parallel.",
        ),
        (
            "deepseek_v3.deepseek_v3_debugmodel_mtp",
            f"{PP}=2",
            "deepseek_v3 debugmodel cannot be trained this way: MTP does not support pipeline parallelism yet.",
        ),
        (
            "llama3.llama3_debugmodel",
            f"{EP}=2",
            "parallelism.expert_parallel_degree must be 1 for llama3 debugmodel, which has no experts, got 2.",
        ),
        (
            "deepseek_v3.deepseek_v3_debugmodel",
            f"{EP}=3 monarch.procs_per_host=3",
            "parallelism.expert_parallel_degree must divide the 8 experts of the model, got 3.",
        ),
        (
            "deepseek_v3.deepseek_v3_debugmodel",
            f"{EP}=2 {TP}=2 parallelism.enable_sequence_parallel=false parallelism.spmd_backend=partial_dtensor",
            "parallelism.enable_sequence_parallel must be true with both tensor_parallel_degree (2) and "
            'expert_parallel_degree (2) above 1 and spmd_backend "partial_dtensor", which cannot hand experts tokens '
            "that are not sharded, got false.",
        ),
        (
            "gpt_oss.gpt_oss_debugmodel",
            f"{CP}=2",
            "parallelism.context_parallel_degree must be 1 for gpt_oss debugmodel, whose attention TorchTitan cannot "
            "divide along the sequence, got 2.",
        ),
        (
            "llama3.llama3_debugmodel",
            f"{CP}=2 training.seq_len=384",
            "training.seq_len must be divisible by 256 for context_parallel_degree (2) with flex attention, which "
            "masks by blocks, got 384.",
        ),
        (
            "llama3.llama3_debugmodel",
            f"{CP}=2 {BALANCER}=tail",
            'parallelism.context_parallel_load_balancer must be "headtail", "ptrr" or null, got "tail".',
        ),
        (
            "gpt_oss.gpt_oss_debugmodel_flex",
            f"{CP}=2 {BALANCER}=ptrr",
            "parallelism.context_parallel_ptrr_mask_key must be one of basic_mask, sliding_window_mask for gpt_oss "
            'with context_parallel_load_balancer "ptrr", got null.',
        ),
        (
            "llama3.llama3_debugmodel",
            f"{PP}=2 {SCHEDULE}=1F1B training.local_batch_size=1",
            "training.local_batch_size must make at least 2 micro-batches of parallelism.pipeline_parallel_microbatch_"
            'size (1) for 2 stages with "1F1B", got 1.',
        ),
        (
            "llama3.llama3_debugmodel",
            f"{PP}=8 monarch.procs_per_host=8",
            f"{PP} must make at most as many stages as the model has layers (6); with "
            '"Interleaved1F1B" it makes 16, got 8.',
        ),
        (
            "llama3.llama3_debugmodel",
            f"{PP}=2 {SCHEDULE}=2F2B",
            f'{SCHEDULE} must be a schedule that torch knows, got "2F2B".',
        ),
        (
            "llama3.llama3_debugmodel",
            f"{PP}=2 parallelism.pipeline_parallel_schedule_csv=/not/there",
            f'{SCHEDULE} "Interleaved1F1B" does not fit pipeline_parallel_degree (2), {DEBUG} (8): '
            "The specified path /not/there does not exist or is not a file.",
        ),
        (
            "llama3.llama3_debugmodel_ce_loss",
            f"{PP}=2 {SCHEDULE}=ZBVZeroBubble",
            f"{SCHEDULE} must be one of {WHOLE} selective activation checkpointing, which forbids a second pass, "
            'got "ZBVZeroBubble".',
        ),
        (
            "llama3.llama3_debugmodel",
            f"{PP}=2 {SCHEDULE}=DualPipeV activation_checkpoint=null",
            f"{SCHEDULE} must be one of {WHOLE} a ChunkedLossWrapper, through which the last norm would get no "
            'gradient, got "DualPipeV".',
        ),
        (
            "muse_glimmer.muse_glimmer_debugmodel",
            "parallelism.spmd_backend=partial_dtensor",
            'parallelism.spmd_backend must be "spmd_types" for muse_glimmer, which knows no other, and torch be 2.14 '
            'or newer, got "partial_dtensor".',
        ),
    ],
)
def test_parallelism_that_the_model_cannot_do(resolve, base, overrides, message):
    with pytest.raises(ConfigError) as error:
        check(resolve(*TITAN, *overrides.split(), base=base))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("base", "overrides", "message"),
    [
        (
            "llama3.llama3_debugmodel",
            "training.enable_cpu_offload=true",
            "training.enable_cpu_offload must be false without an accelerator to offload from, got true.",
        ),
        (
            "deepseek_v3.deepseek_v3_debugmodel_hybridep",
            f"{EP}=2",
            "torchtitan.config must give a model without HybridEPTokenDispatcher, which needs an accelerator, got "
            '"deepseek_v3_debugmodel_hybridep".',
        ),
        (
            "llama3.llama3_debugmodel_dist_gemm",
            f"{TP}=2",
            "torchtitan.config must give a model without AllGatherFusedFeedForward, which needs an accelerator, got "
            '"llama3_debugmodel_dist_gemm".',
        ),
    ],
)
def test_what_needs_an_accelerator(resolve, monkeypatch, base, overrides, message):
    config = resolve(*TITAN, *overrides.split(), base=base)
    monkeypatch.setattr(upstream, "accelerator", lambda: "cuda")
    check(config)
    monkeypatch.setattr(upstream, "accelerator", lambda: None)
    with pytest.raises(ConfigError) as error:
        check_here(config)
    assert str(error.value) == message


def test_tokenizer_files_are_needed_by_a_tokenizer_that_reads_them(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[torchtitan]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n')
    overrides = ["training.steps=20", f"dump_folder={tmp_path}"]
    rule = r'hf_assets_path must be a folder that exists, for the tokenizer, or "byte_tokenizer", .*, got "\./no"'
    with pytest.raises(ConfigError, match=rule):
        check_here(load(file, *overrides, "hf_assets_path=./no"))
    check_here(load(file, *overrides, f"hf_assets_path={tmp_path}"))


def test_validation_data_matters_only_with_validation(resolve):
    check(resolve("validator.dataloader.dataset=local_text", "validator.dataloader.dataset_path=/not/there"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dump_folder=''", 'dump_folder must name a folder, got "".'),
        ("monarch.scheduler=slurm", 'monarch.scheduler must be "local" to train'),
        (
            "torchtitan.converters.mxfp8_grouped_experts.enable=true",
            "torchtitan.converters: this machine cannot convert the model: ",
        ),
    ],
)
def test_what_this_machine_cannot_run(resolve, override, message):
    config = resolve(override)
    check(config)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        check_here(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("optimizer_kwargs.lr=fast", "optimizer_kwargs.lr must be what AdamW takes ("),
        ("optimizer_kwargs.lr=-1", "optimizer_kwargs.lr must be what AdamW takes (Invalid learning rate: -1), got -1."),
        ("optimizer_kwargs.betas=[0.9,2]", "optimizer_kwargs.betas must be what AdamW takes ("),
        ("optimizer_kwargs.weight_decy=1", "weight_decy; did you mean weight_decay?"),
        ("optimizer_name=SGD", 'optimizer_name must be one of Adam, AdamW, DistMuon, got "SGD".'),
        ("pattern='('", "pattern must be a regular expression ("),
    ],
)
def test_arguments_of_the_optimizer(resolve, arguments, message):
    with pytest.raises(ConfigError) as error:
        check(resolve(f"optimizer.param_groups.0.{arguments}"))
    assert "optimizer.param_groups.0." in str(error.value)
    assert message in str(error.value)


def test_group_without_a_learning_rate(resolve):
    config = resolve("optimizer.param_groups=[{pattern: a, optimizer_name: AdamW}]")
    with pytest.raises(ConfigError, match=r"optimizer\.param_groups\.0\.optimizer_kwargs must hold lr, got {}\."):
        check(config)


def test_dump_folder_is_created(tmp_path, resolve):
    check_here(resolve(f"dump_folder={tmp_path / 'a' / 'b'}"))
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(("folder", "reason"), [("file", "File exists"), ("file/below", "Not a directory")])
def test_unusable_dump_folder(tmp_path, resolve, folder, reason):
    (tmp_path / "file").touch()
    path = tmp_path / folder
    with pytest.raises(ConfigError) as error:
        check_here(resolve(f"dump_folder={path}"))
    assert str(error.value) == f"dump_folder must be a folder that can be written, got {str(path)!r}: {reason}."


def test_dump_folder_that_exists_must_be_writable(tmp_path, resolve, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"dump_folder must be a folder that can be written, .*: Permission denied\."):
        check_here(resolve())
