"""A job of any size measured in one process without its hardware: does it fit together, and does it fit in memory.

    scale = measure(config)
    print(scale.layout)
    if (wrong := scale.shortage()) is not None: ...

The meshes, the pipeline's split and the sharding are TorchTitan's own (config/shards.py); bytes are counted in
config/memory.py, activations estimated in config/activations.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monarch_titan.config.errors import ConfigError
from monarch_titan.config.gpus import capacity
from monarch_titan.config.parallelism import check_parallelism

if TYPE_CHECKING:
    from rich.console import RenderableType

    from monarch_titan.config.memory import Memory
    from monarch_titan.config.shards import MetaModel, Part
    from monarch_titan.training.trainer import MonarchTrainer

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The ranks of a replica that share a pipeline rank, told by the one of them that holds most."""

    rank: int
    coordinates: dict[str, int]
    ranks: int
    """How many ranks of the replica are of this kind."""
    parameters: int
    """Elements that ``rank`` holds."""
    memory: Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What a configuration comes to on all its ranks."""

    num_replicas: int
    hosts_per_replica: int
    procs_per_host: int
    degrees: dict[str, int]
    """Mesh axis -> ranks along it: the dense mesh, slowest first, then ``ep`` and ``efsdp`` of the experts."""
    parameters: int
    """Of the whole model."""
    active: int
    """Of them, those that one token goes through: all but the experts it is not sent to."""
    kinds: list[Kind]
    """One a pipeline rank."""
    gpu: str | None
    notes: list[str]
    """What is allowed and costs something."""
    advice: dict[str, list[str]]
    """Item of memory -> the options that make it smaller, those in use left out."""

    @property
    def worst(self) -> Kind:
        """The ranks that need most memory."""
        return max(self.kinds, key=lambda kind: kind.memory.total)

    @property
    def lightest(self) -> Kind:
        return min(self.kinds, key=lambda kind: kind.memory.total)

    @property
    def layout(self) -> str:
        """One line: how the ranks are made up and arranged."""
        replica = self.hosts_per_replica * self.procs_per_host
        axes = dict(self.degrees)
        experts = f"ep {axes.pop('ep')} x efsdp {axes.pop('efsdp')}"
        mesh = " x ".join(f"{name} {degree}" for name, degree in axes.items())
        replicas, hosts = _plural(self.num_replicas, "replica"), _plural(self.hosts_per_replica, "host")
        ranks = _plural(self.num_replicas * replica, "rank")
        line = f"{ranks} = {replicas} x {hosts} x {self.procs_per_host}; mesh {mesh}"
        return f"{line}; experts: {experts}" if self.active != self.parameters else line

    def shortage(self) -> str | None:
        """What does not fit in the memory of ``monarch.gpu``, and what would help; None if it fits or none is named."""
        if self.gpu is None:
            return None
        size, kind = capacity(self.gpu), self.worst
        if kind.memory.total <= size:
            return None
        item, most = max(kind.memory.items.items(), key=lambda pair: pair[1])
        help_ = self.advice.get(item, [])
        return (
            f'monarch.gpu "{self.gpu}" has {_gib(size)}, and rank {kind.rank} of each replica needs '
            f"{_gib(kind.memory.total)}: most of it, {_gib(most)}, for its {item}."
            + (f" Smaller with: {'; '.join(help_)}." if help_ else "")
        )


def measure(config: MonarchTrainer.Config) -> Scale:
    """Build the meshes and the shards of every kind of rank and count what is in their memory.

    The configuration is not changed, and the process is left as it was. Takes about a second a pipeline rank.

    Raises ConfigError for degrees that do not fit the model, and with TorchTitan's own words for what else it refuses.
    """
    check_parallelism(config)
    if not hasattr(config.model_spec.model, "layers"):
        raise ConfigError(f"torchtitan.config must give a language model to be measured, got {config.model_spec.name}.")
    if (gpu := config.monarch.gpu) is not None:
        capacity(gpu)
    from monarch_titan.config.shards import MetaModel

    model, kinds, notes = MetaModel(config), [], []
    for rank in model.first_ranks():
        with model.on_rank(rank) as part:
            kinds.append(_kind(model, part))
            notes += _padding(part)
    dims = model.dims
    parameters, active = _count(model.whole)
    return Scale(
        num_replicas=config.monarch.num_replicas,
        hosts_per_replica=config.monarch.hosts_per_replica,
        procs_per_host=config.monarch.procs_per_host,
        degrees={name: getattr(dims, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        | {"efsdp": dims.dp_shard * dims.cp * dims.tp // dims.ep},
        parameters=parameters,
        active=active,
        kinds=kinds,
        gpu=gpu,
        notes=[*_idle(config), *notes],
        advice=_advice(config, active != parameters),
    )


def _kind(model: MetaModel, part: Part) -> Kind:
    from monarch_titan.config.memory import rank_memory
    from monarch_titan.config.shards import local

    return Kind(
        rank=part.rank,
        coordinates=part.coordinates,
        ranks=model.world_size // model.dims.pp,
        parameters=sum(local(parameter).numel() for module in part.modules for parameter in module.parameters()),
        memory=rank_memory(model.config, part),
    )


def _count(model: Any) -> tuple[int, int]:
    """All parameters, and those that one token goes through."""
    total = active = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if hasattr(module, "routed_experts"):
            experts = module.routed_experts.inner_experts
            numel = sum(parameter.numel() for parameter in experts.parameters())
            active -= numel - numel * module.router.top_k // experts.num_experts
    return total, active


def _idle(config: MonarchTrainer.Config) -> list[str]:
    """What the degrees allow and what costs something all the same."""
    degrees, batch = config.parallelism, config.training.local_batch_size
    if degrees.pipeline_parallel_degree == 1:
        return []
    microbatches, pp = batch // degrees.pipeline_parallel_microbatch_size, degrees.pipeline_parallel_degree
    if microbatches >= pp:
        return []
    return [f"training.local_batch_size gives {microbatches} micro-batches to {pp} pipeline ranks: some always wait."]


def _padding(part: Part) -> list[str]:
    from monarch_titan.config.shards import is_short

    short = [name for module in part.modules for name, parameter in module.named_parameters() if is_short(parameter)]
    if not short:
        return []
    return [f"On rank {part.rank} {len(short)} parameters have fewer rows than ranks that share them, as {short[0]}."]


# What would help -----------------------------------------------------------------------------------------------------


def _advice(config: MonarchTrainer.Config, mixture: bool) -> dict[str, list[str]]:
    """Options that make each item smaller, the nearest first."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    degrees, training, ours = config.parallelism, config.training, config.fault_tolerance
    shards = ["more monarch.hosts_per_replica, with parallelism.data_parallel_shard_degree = -1"]
    if degrees.data_parallel_replicate_degree > 1:
        shards.insert(0, "parallelism.data_parallel_replicate_degree = 1")
    offload = [] if training.enable_cpu_offload else ["training.enable_cpu_offload = true"]
    states = config.optimizer.implementation
    bf16 = [] if states == "fused_opt_states_bf16" else ['optimizer.implementation = "fused_opt_states_bf16"']
    experts = ["more parallelism.expert_parallel_degree"] if mixture else []
    whole = [*experts, "more parallelism.tensor_parallel_degree"]
    if degrees.pipeline_parallel_degree == 1 and degrees.fsdp_reshard_after_forward == "never":
        whole.insert(0, 'parallelism.fsdp_reshard_after_forward = "default"')
    full = isinstance(config.activation_checkpoint, FullAC.Config)
    tokens = ["less training.local_batch_size"] if training.local_batch_size > 1 else []
    tokens += ["more parallelism.context_parallel_degree", "less training.seq_len"]
    fragments = [] if ours.semi_sync_method != "diloco" else ["more fault_tolerance.num_fragments"]
    return {
        "parameters": shards + offload,
        "gradients": shards + offload,
        "optimizer states": bf16 + shards + offload,
        "outer state": shards + offload,
        "exchange between replicas": fragments + shards + offload,
        "gathered parameters": whole,
        "unreduced gradients": whole,
        "float8": whole,
        "activations": ([] if full else ["activation checkpointing in full"]) + tokens,
        "logits": ["a loss in more chunks", *tokens],
    }


# For people ----------------------------------------------------------------------------------------------------------


def render(scale: Scale) -> RenderableType:
    """The layout, a table with one row an item of memory, the notes and what does not fit."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    worst, lightest = scale.worst, scale.lightest
    size = f"{_count_text(scale.parameters)} parameters"
    if scale.active != scale.parameters:
        size += f", {_count_text(scale.active)} of them active"
    table = Table(box=None, pad_edge=False)
    table.add_column("memory of a rank")
    table.add_column(f"rank {worst.rank}, pp {worst.coordinates['pp']}", justify="right")
    if lightest is not worst:
        table.add_column(f"rank {lightest.rank}, pp {lightest.coordinates['pp']}", justify="right")
    kinds = [worst] if lightest is worst else [worst, lightest]
    for item in worst.memory.items:
        if any(kind.memory.items.get(item) for kind in kinds):
            table.add_row(item, *(_gib(kind.memory.items.get(item, 0)) for kind in kinds))
    table.add_row("at most at once", *(_gib(kind.memory.total) for kind in kinds), style="bold")
    for item in worst.memory.host:
        table.add_row(f"{item} (host)", *(_gib(kind.memory.host[item]) for kind in kinds))
    lines = [*map(Text, scale.layout.split("; ")), Text(size), Text(), table]
    lines += [Text(f"note: {note}") for note in scale.notes]
    if scale.gpu is not None:
        verb, style = ("does not fit", "red") if scale.shortage() else ("fits", "green")
        lines.append(Text(f"{verb} in {scale.gpu} ({_gib(capacity(scale.gpu))})", style=style))
    return Group(*lines)


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


def _count_text(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:,.2f}{unit}"
    return f"{number:,}"
