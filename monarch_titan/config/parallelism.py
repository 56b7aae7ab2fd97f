"""Whether a replica's degrees of parallelism fit its ranks, its model and its batch, before any process starts.

TorchTitan's rules, which it applies inside the trainers, after minutes; and the few that it does not know it has.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from monarch_titan import upstream
from monarch_titan.config.errors import ConfigError
from monarch_titan.config.rules import at_least, require

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

    from monarch_titan.training.trainer import MonarchTrainer


def check_parallelism(config: MonarchTrainer.Config) -> None:
    """TorchTitan's rules for one replica, whose ranks are a world of their own."""
    from torchtitan.distributed import ParallelDims

    degrees, monarch = config.parallelism, config.monarch
    path, world = "parallelism", config.monarch.ranks_per_replica
    names = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    at_least(1, degrees, path, *(f"{name}_degree" for name in names))
    shard = degrees.data_parallel_shard_degree
    rule = "be at least 1, or -1 for the ranks that are left"
    require(shard == -1 or shard >= 1, f"{path}.data_parallel_shard_degree", rule, shard)
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
    require(inner % dims.ep == 0, f"{path}.expert_parallel_degree", rule, dims.ep)

    _check_shapes(config, dims)
    _check_heads(config)
    _check_model(config)
    _check_experts(config)
    if dims.cp > 1:
        _check_context_parallel(config)
    if dims.pp > 1:
        _check_pipeline_parallel(config, dims)


def _check_shapes(config: MonarchTrainer.Config, dims: ParallelDims) -> None:
    training, sequence_parallel = config.training, config.parallelism.enable_sequence_parallel
    divisor = (dims.tp if sequence_parallel else 1) * (2 * dims.cp if dims.cp > 1 else 1)
    rule = f"be divisible by {divisor} for tensor_parallel_degree ({dims.tp}) and context_parallel_degree ({dims.cp})"
    require(training.seq_len % divisor == 0, "training.seq_len", rule, training.seq_len)
    if chunks := getattr(config.loss, "num_chunks", None):  # ChunkedLossWrapper
        rule = f"be divisible by loss.num_chunks ({chunks}) * context_parallel_degree ({dims.cp})"
        require(training.seq_len % (chunks * dims.cp) == 0, "training.seq_len", rule, training.seq_len)
    batch, ranks = training.local_batch_size, dims.dp_replicate * dims.dp_shard
    rule = f"be -1 or a multiple of training.local_batch_size ({batch}) * data-parallel ranks in a replica ({ranks})"
    size = training.global_batch_size
    # TorchTitan takes any negative number for "no accumulation".
    require(size < 0 or (size > 0 and size % (batch * ranks) == 0), "training.global_batch_size", rule, size)


def _parts(config: MonarchTrainer.Config, *kinds: Any) -> list[Any]:
    """Configurations of these kinds of module, and of kinds derived from them, anywhere in the model."""
    return [part for kind in kinds for _, part, *_ in config.model_spec.model.traverse(kind.Config)]


def _check_heads(config: MonarchTrainer.Config) -> None:
    layers, degree = getattr(config.model_spec.model, "layers", []), config.parallelism.tensor_parallel_degree
    attentions = [layer.attention for layer in layers if getattr(layer, "attention", None) is not None]
    heads = {attention.n_heads for attention in attentions}
    kv_heads = {getattr(attention, "n_kv_heads", None) or attention.n_heads for attention in attentions}
    for name, numbers in (("attention heads", heads), ("key and value heads", kv_heads - heads)):
        for number in sorted(numbers):
            rule = f"divide the {number} {name} of the model"
            require(number % degree == 0, "parallelism.tensor_parallel_degree", rule, degree)


def _check_model(config: MonarchTrainer.Config) -> None:
    """The model's own rules: longest sequence, tied weights in a pipeline and whatever else."""
    spec, backend = config.model_spec, config.parallelism.spmd_backend
    only = spec.name == "muse_glimmer"
    rule = f'be "spmd_types" for {spec.name}, which knows no other, and torch be 2.14 or newer'
    require(not only or backend == "spmd_types", "parallelism.spmd_backend", rule, backend)
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
    require(bool(experts), f"{path}.expert_parallel_degree", rule, degrees.expert_parallel_degree)
    for number in experts:
        rule = f"divide the {number} experts of the model"
        divides = number % degrees.expert_parallel_degree == 0
        require(divides, f"{path}.expert_parallel_degree", rule, degrees.expert_parallel_degree)
    works = degrees.enable_sequence_parallel or degrees.spmd_backend != "partial_dtensor"
    rule = (
        f"be true with both tensor_parallel_degree ({degrees.tensor_parallel_degree}) and expert_parallel_degree "
        f'({degrees.expert_parallel_degree}) above 1 and spmd_backend "partial_dtensor", which cannot hand experts '
        "tokens that are not sharded"
    )
    require(works or degrees.tensor_parallel_degree == 1, f"{path}.enable_sequence_parallel", rule, False)


def _check_context_parallel(config: MonarchTrainer.Config) -> None:
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    degrees, path, spec = config.parallelism, "parallelism", config.model_spec
    degree, balancer = degrees.context_parallel_degree, degrees.context_parallel_load_balancer
    whole = spec.name in ("kimi_k2_5", "qwen3_5") or bool(_parts(config, VarlenAttention))
    rule = f"be 1 for {spec.name} {spec.flavor}, whose attention TorchTitan cannot divide along the sequence"
    require(not whole, f"{path}.context_parallel_degree", rule, degree)
    rule = 'be "headtail", "ptrr" or null'
    require(balancer in (None, "headtail", "ptrr"), f"{path}.context_parallel_load_balancer", rule, balancer)
    masks, key = ("basic_mask", "sliding_window_mask"), degrees.context_parallel_ptrr_mask_key
    rule = f'be one of {", ".join(masks)} for {spec.name} with context_parallel_load_balancer "ptrr"'
    known = spec.name != "gpt_oss" or balancer != "ptrr" or key in masks
    require(known, f"{path}.context_parallel_ptrr_mask_key", rule, key)
    block = degree * upstream.CONTEXT_PARALLEL_BLOCK
    rule = f"be divisible by {block} for context_parallel_degree ({degree}) with flex attention, which masks by blocks"
    fits = config.training.seq_len % block == 0 or not _parts(config, FlexAttention)
    require(fits, "training.seq_len", rule, config.training.seq_len)


def _check_pipeline_parallel(config: MonarchTrainer.Config, dims: ParallelDims) -> None:
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    path, spec, schedule = "parallelism", config.model_spec, config.parallelism.pipeline_parallel_schedule
    rule = f"be 1 for {spec.name} {spec.flavor}, which TorchTitan cannot cut into stages"
    require(spec.pipelining_fn is not None, f"{path}.pipeline_parallel_degree", rule, dims.pp)
    _check_stages(config, dims.pp)
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
    require(whole or not selective, f"{path}.pipeline_parallel_schedule", rule + reason, schedule)
    reason = "a ChunkedLossWrapper, through which the last norm would get no gradient"
    chunked = isinstance(config.loss, ChunkedLossWrapper.Config)
    require(whole or not chunked, f"{path}.pipeline_parallel_schedule", rule + reason, schedule)


def _check_stages(config: MonarchTrainer.Config, pp: int) -> None:
    """The rules of pipelines that can be told better than torch tells them."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class

    degrees, path, batch = config.parallelism, "parallelism", config.training.local_batch_size
    micro, schedule = degrees.pipeline_parallel_microbatch_size, degrees.pipeline_parallel_schedule
    rule = f"be a positive divisor of training.local_batch_size ({batch})"
    require(micro >= 1 and batch % micro == 0, f"{path}.pipeline_parallel_microbatch_size", rule, micro)
    if degrees.pipeline_parallel_schedule_csv:
        return  # the file says how many stages there are
    try:
        kind = get_schedule_class(schedule)
    except ValueError as error:
        option = f"{path}.pipeline_parallel_schedule"
        raise ConfigError(f'{option} must be a schedule that torch knows, got "{schedule}".') from error
    size = f"micro-batches of {path}.pipeline_parallel_microbatch_size ({micro})"
    rule = f'make at least {pp} {size} for {pp} stages with "{schedule}"'
    require(kind is not Schedule1F1B or batch // micro >= pp, "training.local_batch_size", rule, batch)
    if (parts := degrees.module_fqns_per_model_part) is not None:
        rule = f"have a multiple of pipeline_parallel_degree ({pp}) parts"
        require(len(parts) % pp == 0, f"{path}.module_fqns_per_model_part", rule, len(parts))
    elif degrees.pipeline_parallel_layers_per_stage is None:
        layers = len(config.model_spec.model.layers)
        stages = pp if issubclass(kind, PipelineScheduleSingle) else 2 * pp
        rule = f'make at most as many stages as the model has layers ({layers}); with "{schedule}" it makes {stages}'
        require(stages <= layers, f"{path}.pipeline_parallel_degree", rule, pp)


def check_without_accelerator(config: MonarchTrainer.Config) -> None:
    from torchtitan.models.common import dist_gemm, token_dispatcher

    offload = config.training.enable_cpu_offload
    require(not offload, "training.enable_cpu_offload", "be false without an accelerator to offload from", offload)
    dispatchers = [getattr(token_dispatcher, f"{name}EPTokenDispatcher") for name in ("Deep", "Hybrid", "MinimalAsync")]
    gemms = [dist_gemm.AllGatherFusedFeedForward, dist_gemm.AllGatherFusedQKVLinear, dist_gemm.RowParallelLinear]
    for part in _parts(config, *dispatchers, *gemms):
        kind = type(part).__qualname__.removesuffix(".Config")
        rule = f"give a model without {kind}, which needs an accelerator"
        require(False, "torchtitan.config", rule, config.torchtitan.config)
