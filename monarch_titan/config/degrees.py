"""Whether the degrees of parallelism divide the model and the batch, from the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer


def violations(config: MonarchTrainer.Config) -> list[str]:
    """One line for each degree that does not fit the model or the batch; building the model is not needed.

    For degrees that satisfy :func:`monarch_titan.config.checks.check_parallelism`.
    """
    if not hasattr(config.model_spec.model, "layers"):
        return []  # no language model; TorchTitan's own trainer of it knows what fits
    return [*_model_violations(config), *_pipeline_violations(config)]


def _model_violations(config: MonarchTrainer.Config) -> list[str]:
    degrees, layers = config.parallelism, config.model_spec.model.layers
    tp, ep = degrees.tensor_parallel_degree, degrees.expert_parallel_degree
    attentions = [layer.attention for layer in layers if getattr(layer, "attention", None) is not None]
    heads = {attention.n_heads for attention in attentions}
    kv_heads = {getattr(attention, "n_kv_heads", None) or attention.n_heads for attention in attentions}
    experts = {layer.moe.num_experts for layer in layers if getattr(layer, "moe", None) is not None}
    wrong = [
        _wrong("tensor_parallel_degree", f"divide the {number} {name} of the model", tp)
        for name, numbers in (("attention heads", heads), ("key and value heads", kv_heads - heads))
        for number in sorted(numbers)
        if number % tp
    ]
    return wrong + [
        _wrong("expert_parallel_degree", f"divide the {number} experts of the model", ep)
        for number in sorted(experts)
        if number % ep
    ]


def _pipeline_violations(config: MonarchTrainer.Config) -> list[str]:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class

    degrees, batch = config.parallelism, config.training.local_batch_size
    pp, micro = degrees.pipeline_parallel_degree, degrees.pipeline_parallel_microbatch_size
    if pp == 1:
        return []
    if config.model_spec.pipelining_fn is None:
        return [_wrong("pipeline_parallel_degree", f"be 1 with {config.model_spec.name}, which cannot be split", pp)]
    wrong = []
    if micro < 1 or batch % micro:
        rule = f"be a positive divisor of training.local_batch_size ({batch})"
        wrong.append(_wrong("pipeline_parallel_microbatch_size", rule, micro))
    if degrees.pipeline_parallel_schedule_csv:
        return wrong  # the file says how many stages there are
    schedule = degrees.pipeline_parallel_schedule
    try:
        kind = get_schedule_class(schedule)
    except ValueError:
        return [*wrong, _wrong("pipeline_parallel_schedule", "be a schedule that torch knows", f'"{schedule}"')]
    layers, stages = len(config.model_spec.model.layers), pp * (1 if issubclass(kind, PipelineScheduleSingle) else 2)
    if not wrong and kind is Schedule1F1B and batch // micro < pp:
        size = f"micro-batches of parallelism.pipeline_parallel_microbatch_size ({micro})"
        rule = f'make at least {pp} {size} for {pp} stages with "{schedule}"'
        wrong.append(_wrong("local_batch_size", rule, batch, "training"))
    if (parts := degrees.module_fqns_per_model_part) is not None:
        if len(parts) % pp:
            rule = f"have a multiple of pipeline_parallel_degree ({pp}) parts"
            wrong.append(_wrong("module_fqns_per_model_part", rule, len(parts)))
    elif stages > layers and degrees.pipeline_parallel_layers_per_stage is None:
        rule = f'make at most as many stages as the model has layers ({layers}); with "{schedule}" it makes {stages}'
        wrong.append(_wrong("pipeline_parallel_degree", rule, pp))
    return wrong


def _wrong(option: str, rule: str, value: Any, section: str = "parallelism") -> str:
    return f"{section}.{option} must {rule}, got {value}."


def notes_on_degrees(config: MonarchTrainer.Config) -> list[str]:
    """What the degrees allow and what costs something all the same."""
    degrees, batch = config.parallelism, config.training.local_batch_size
    if degrees.pipeline_parallel_degree == 1:
        return []
    microbatches, pp = batch // degrees.pipeline_parallel_microbatch_size, degrees.pipeline_parallel_degree
    if microbatches >= pp:
        return []
    return [f"training.local_batch_size gives {microbatches} micro-batches to {pp} pipeline ranks: some always wait."]
