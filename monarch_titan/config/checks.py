"""Whether the options of a configuration fit together, before any process starts.

TorchTitan and TorchFT check much of this too, but inside the trainers, after minutes, and once a rank.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_titan import upstream
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.loader import BYTE_TOKENIZER

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

    from monarch_titan.training.trainer import MonarchTrainer


def check(config: MonarchTrainer.Config) -> None:
    """Raise ConfigError for the first option that contradicts another or is out of its range.

    Creates ``dump_folder``, as the run would: whether it can be is found by doing it.
    """
    _check_monarch(config)
    _check_training(config)
    _check_fault_tolerance(config)
    _check_parallelism(config)
    _check_files(config)


def _require(holds: bool, option: str, rule: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"{option} must {rule}, got {json.dumps(value, ensure_ascii=False, default=str)}.")


def _at_least(lowest: float, section: Any, path: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value >= lowest, f"{path}.{name}", f"be at least {lowest}", value)


def _positive(section: Any, path: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        _require(value > 0, f"{path}.{name}", "be greater than 0", value)


def _check_monarch(config: MonarchTrainer.Config) -> None:
    monarch, recovery = config.monarch, config.monarch.recovery
    _at_least(1, monarch, "monarch", "num_replicas", "hosts_per_replica", "procs_per_host")
    if monarch.min_replicas is not None:
        rule = f"be between 1 and monarch.num_replicas ({monarch.num_replicas})"
        _require(1 <= monarch.min_replicas <= monarch.num_replicas, "monarch.min_replicas", rule, monarch.min_replicas)
    rule = 'be 1 with monarch.scheduler "local", which is one machine'
    local = monarch.scheduler == "local"
    _require(not local or monarch.hosts_per_replica == 1, "monarch.hosts_per_replica", rule, monarch.hosts_per_replica)
    _positive(monarch, "monarch", "quorum_timeout_seconds")
    names = ("heartbeat_timeout_ms", "join_timeout_ms", "quorum_tick_ms")
    _positive(monarch.lighthouse, "monarch.lighthouse", *names)

    path = "monarch.recovery"
    _at_least(1, recovery, path, "max_failures")
    rule = f"be between 1 and max_failures ({recovery.max_failures})"
    _require(1 <= recovery.respawns <= recovery.max_failures, f"{path}.respawns", rule, recovery.respawns)
    _at_least(0, recovery, path, "backoff_seconds", "max_backoff_seconds", "commit_retries")


def _check_fault_tolerance(config: MonarchTrainer.Config) -> None:
    ours, replicas = config.fault_tolerance, config.monarch.num_replicas
    path, method = "fault_tolerance", config.fault_tolerance.semi_sync_method
    rule = f"be true to join the replicas when monarch.num_replicas is greater than 1 (it is {replicas})"
    _require(ours.enable or replicas == 1, f"{path}.enable", rule, ours.enable)
    _at_least(1, ours, path, "sync_steps", "num_fragments")
    _positive(ours, path, "process_group_timeout_ms")
    rule = f'be 1 with {path}.semi_sync_method "{method}", because only "diloco" has fragments'
    _require(ours.num_fragments == 1 or method == "diloco", f"{path}.num_fragments", rule, ours.num_fragments)
    rule = f"be divisible by {path}.num_fragments ({ours.num_fragments})"
    _require(ours.sync_steps % ours.num_fragments == 0, f"{path}.sync_steps", rule, ours.sync_steps)
    rule = f"be at least {path}.sync_steps ({ours.sync_steps}), or the replicas are never synchronised"
    enough = not ours.enable or method == "none" or config.training.steps >= ours.sync_steps
    _require(enough, "training.steps", rule, config.training.steps)


def _check_training(config: MonarchTrainer.Config) -> None:
    _at_least(1, config.training, "training", "steps", "seq_len", "local_batch_size", "gc_freq")
    _at_least(1, config.metrics, "metrics", "log_freq")
    _positive(config.comm, "comm", "init_timeout_seconds", "train_timeout_seconds")
    real = config.comm.mode in ("default", "torchcomms")
    _require(real, "comm.mode", "be a real backend, which replicas can be joined with", config.comm.mode)
    seed = config.checkpoint.create_seed_checkpoint
    rule = "be false: a seed checkpoint is made by python -m torchtitan.train in one process"
    _require(not seed, "checkpoint.create_seed_checkpoint", rule, seed)


def _check_parallelism(config: MonarchTrainer.Config) -> None:
    """TorchTitan's rules for one replica, whose ranks are a world of their own."""
    from torchtitan.distributed import ParallelDims

    degrees, monarch = config.parallelism, config.monarch
    path, world = "parallelism", config.monarch.ranks_per_replica
    names = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    _at_least(1, degrees, path, *(f"{name}_degree" for name in names))
    shard = degrees.data_parallel_shard_degree
    rule = "be at least 1, or -1 for the ranks that are left"
    _require(shard == -1 or shard >= 1, f"{path}.data_parallel_shard_degree", rule, shard)
    try:
        dims = ParallelDims.from_config(degrees, world)
    except AssertionError as error:
        hosts, procs = monarch.hosts_per_replica, monarch.procs_per_host
        factors = {name: getattr(degrees, f"{name}_degree") for name in names[:-1]}
        factors = {name: degree for name, degree in factors.items() if degree > 1}
        if shard != -1:
            factors["data_parallel_shard"] = shard
        product = " * ".join(f"{path}.{name}_degree ({degree})" for name, degree in factors.items())
        raise ConfigError(
            f"{product} must {'divide' if shard == -1 else 'be'} the ranks of one replica, which are "
            f"monarch.hosts_per_replica ({hosts}) * monarch.procs_per_host ({procs}) = {world}."
        ) from error
    inner = dims.dp_shard * dims.cp * dims.tp
    rule = f"divide the ranks that share a pipeline stage's weights, dp_shard * cp * tp = {inner}"
    _require(inner % dims.ep == 0, f"{path}.expert_parallel_degree", rule, dims.ep)

    _check_shapes(config, dims)
    _check_model(config)
    _check_experts(config)
    if dims.cp > 1:
        _check_context_parallel(config)
    if dims.pp > 1:
        _check_pipeline_parallel(config, dims)
    if upstream.accelerator() is None:
        _check_without_accelerator(config)


def _check_shapes(config: MonarchTrainer.Config, dims: ParallelDims) -> None:
    training, sequence_parallel = config.training, config.parallelism.enable_sequence_parallel
    divisor = (dims.tp if sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    rule = f"be divisible by {divisor} for tensor_parallel_degree ({dims.tp}) and context_parallel_degree ({dims.cp})"
    _require(training.seq_len % divisor == 0, "training.seq_len", rule, training.seq_len)
    if chunks := getattr(config.loss, "num_chunks", None):  # ChunkedLossWrapper
        rule = f"be divisible by loss.num_chunks ({chunks}) * context_parallel_degree ({dims.cp})"
        _require(training.seq_len % (chunks * dims.cp) == 0, "training.seq_len", rule, training.seq_len)
    batch, ranks = training.local_batch_size, dims.dp_replicate * dims.dp_shard
    rule = f"be -1 or a multiple of training.local_batch_size ({batch}) * data-parallel ranks in a replica ({ranks})"
    size = training.global_batch_size
    # TorchTitan takes any negative number for "no accumulation".
    _require(size < 0 or (size > 0 and size % (batch * ranks) == 0), "training.global_batch_size", rule, size)


def _parts(config: MonarchTrainer.Config, *kinds: Any) -> list[Any]:
    """Configurations of these kinds of module, and of kinds derived from them, anywhere in the model."""
    return [part for kind in kinds for _, part, *_ in config.model_spec.model.traverse(kind.Config)]


def _check_model(config: MonarchTrainer.Config) -> None:
    """The model's own rules: divisible heads, longest sequence, tied weights in a pipeline and whatever else."""
    spec, backend = config.model_spec, config.parallelism.spmd_backend
    only = spec.name == "muse_glimmer"
    rule = f'be "spmd_types" for {spec.name}, which knows no other, and torch be 2.14 or newer'
    _require(not only or backend == "spmd_types", "parallelism.spmd_backend", rule, backend)
    try:
        copy.deepcopy(spec.model).update_from_config(config=config)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"{spec.name} {spec.flavor} cannot be trained this way: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_experts(config: MonarchTrainer.Config) -> None:
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    degrees, path, spec = config.parallelism, "parallelism", config.model_spec
    if degrees.expert_parallel_degree == 1:
        return
    experts = {dispatcher.num_experts for dispatcher in _parts(config, LocalTokenDispatcher)}
    rule = f"be 1 for {spec.name} {spec.flavor}, which has no experts"
    _require(bool(experts), f"{path}.expert_parallel_degree", rule, degrees.expert_parallel_degree)
    for number in experts:
        rule = f"divide the number of experts, {number}"
        divides = number % degrees.expert_parallel_degree == 0
        _require(divides, f"{path}.expert_parallel_degree", rule, degrees.expert_parallel_degree)
    works = degrees.enable_sequence_parallel or degrees.spmd_backend != "partial_dtensor"
    rule = (
        f"be true with both tensor_parallel_degree ({degrees.tensor_parallel_degree}) and expert_parallel_degree "
        f'({degrees.expert_parallel_degree}) above 1 and spmd_backend "partial_dtensor", which cannot hand experts '
        "tokens that are not sharded"
    )
    _require(works or degrees.tensor_parallel_degree == 1, f"{path}.enable_sequence_parallel", rule, False)


def _check_context_parallel(config: MonarchTrainer.Config) -> None:
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    degrees, path, spec = config.parallelism, "parallelism", config.model_spec
    degree, balancer = degrees.context_parallel_degree, degrees.context_parallel_load_balancer
    whole = spec.name in ("kimi_k2_5", "qwen3_5") or bool(_parts(config, VarlenAttention))
    rule = f"be 1 for {spec.name} {spec.flavor}, whose attention TorchTitan cannot divide along the sequence"
    _require(not whole, f"{path}.context_parallel_degree", rule, degree)
    rule = 'be "headtail", "ptrr" or null'
    _require(balancer in (None, "headtail", "ptrr"), f"{path}.context_parallel_load_balancer", rule, balancer)
    masks, key = ("basic_mask", "sliding_window_mask"), degrees.context_parallel_ptrr_mask_key
    rule = f'be one of {", ".join(masks)} for {spec.name} with context_parallel_load_balancer "ptrr"'
    known = spec.name != "gpt_oss" or balancer != "ptrr" or key in masks
    _require(known, f"{path}.context_parallel_ptrr_mask_key", rule, key)
    block = degree * upstream.CONTEXT_PARALLEL_BLOCK
    rule = f"be divisible by {block} for context_parallel_degree ({degree}) with flex attention, which masks by blocks"
    fits = config.training.seq_len % block == 0 or not _parts(config, FlexAttention)
    _require(fits, "training.seq_len", rule, config.training.seq_len)


def _check_pipeline_parallel(config: MonarchTrainer.Config, dims: ParallelDims) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    path, spec, schedule = "parallelism", config.model_spec, config.parallelism.pipeline_parallel_schedule
    rule = f"be 1 for {spec.name} {spec.flavor}, which TorchTitan cannot cut into stages"
    _require(spec.pipelining_fn is not None, f"{path}.pipeline_parallel_degree", rule, dims.pp)
    try:
        upstream.check_pipeline(config, dims)
    except (AssertionError, OSError, ValueError) as error:
        raise ConfigError(
            f'{path}.pipeline_parallel_schedule "{schedule}" does not fit pipeline_parallel_degree ({dims.pp}), '
            f"{spec.name} {spec.flavor} and training.local_batch_size ({config.training.local_batch_size}): "
            f"{_one_line(error)}"
        ) from error
    whole = schedule.lower() not in ("dualpipev", "interleavedzerobubble", "zbvzerobubble")
    rule = 'be one of "1F1B", "GPipe", "Interleaved1F1B" and "LoopedBFS", which do not split the backward pass, with '
    reason = "selective activation checkpointing, which forbids a second pass"
    selective = isinstance(config.activation_checkpoint, SelectiveAC.Config)
    _require(whole or not selective, f"{path}.pipeline_parallel_schedule", rule + reason, schedule)
    reason = "a ChunkedLossWrapper, through which the last norm would get no gradient"
    chunked = isinstance(config.loss, ChunkedLossWrapper.Config)
    _require(whole or not chunked, f"{path}.pipeline_parallel_schedule", rule + reason, schedule)


def _check_without_accelerator(config: MonarchTrainer.Config) -> None:
    from torchtitan.models.common import dist_gemm, token_dispatcher

    offload = config.training.enable_cpu_offload
    _require(not offload, "training.enable_cpu_offload", "be false without an accelerator to offload from", offload)
    dispatchers = [getattr(token_dispatcher, f"{name}EPTokenDispatcher") for name in ("Deep", "Hybrid", "MinimalAsync")]
    gemms = [dist_gemm.AllGatherFusedFeedForward, dist_gemm.AllGatherFusedQKVLinear, dist_gemm.RowParallelLinear]
    for part in _parts(config, *dispatchers, *gemms):
        kind = type(part).__qualname__.removesuffix(".Config")
        rule = f"give a model without {kind}, which needs an accelerator"
        _require(False, "torchtitan.config", rule, config.torchtitan.config)


def _check_files(config: MonarchTrainer.Config) -> None:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    # Other tokenizers, such as the byte tokenizer, are given the path and read nothing.
    if isinstance(config.tokenizer, HuggingFaceTokenizer.Config):
        exists = os.path.exists(config.hf_assets_path)
        rule = f'be a folder that exists, for the tokenizer, or "{BYTE_TOKENIZER}", which needs none'
        _require(exists, "hf_assets_path", rule, config.hf_assets_path)
    loaders = {"dataloader": config.dataloader}
    if getattr(config.validator, "enable", False):
        loaders["validator.dataloader"] = config.validator.dataloader
    for option, loader in loaders.items():
        if loader.dataset == "local_text":
            _check_dataset(option, loader.dataset_path)
    _check_dump_folder(config.dump_folder)


def _check_dataset(option: str, path: str | None) -> None:
    from monarch_titan.training.text_files import check_dataset_path

    try:
        check_dataset_path(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace("dataloader.", f"{option}.", 1)) from error
    except OSError as error:
        value = f"{error.filename!r}: {error.strerror}"
        raise ConfigError(f"{option}.dataset_path must be readable, got {value}.") from error


def _check_dump_folder(folder: str) -> None:
    _require(bool(folder.strip()), "dump_folder", "name a folder", folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        value = f"{folder!r}: {error.strerror}"
        raise ConfigError(f"dump_folder must be a folder that can be written, got {value}.") from error
