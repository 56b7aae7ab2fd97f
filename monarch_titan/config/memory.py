"""What one rank's memory is filled with: exact for what is sharded, an estimate for what comes and goes.

Two moments are compared, because what they need beside the state is never there together: the end of a forward pass
with the first blocks of the backward pass, and the exchange with the other replicas. The total is the larger one.

    state      parameters, buffers, gradients, optimizer states, outer state      from the first step on
    training   + gathered parameters, unreduced gradients, float8, activations, logits
    exchange   + the flat buffer that replicas reduce

The allocator's fragmentation, the communication libraries' own buffers (0.5 to 2 GB) and workspaces are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy

from monarch_titan.config.activations import activation_bytes, logit_bytes
from monarch_titan.config.converters import enabled_converters
from monarch_titan.config.shards import Part, fsdp_units, gathered_numel, local

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer

STATES = {"Adam": 2, "AdamW": 2, "DistMuon": 1}
"""Tensors of a parameter's size that each of TorchTitan's optimizers keeps."""
FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank, by what they are for."""

    state: dict[str, int]
    training: dict[str, int]
    exchange: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    """What ``training.enable_cpu_offload`` keeps in the host's memory instead, for this rank."""

    @property
    def items(self) -> dict[str, int]:
        """All that is on the device at some time."""
        return self.state | self.training | self.exchange

    @property
    def total(self) -> int:
        """Bytes on the device when it is fullest."""
        return sum(self.state.values()) + max(sum(self.training.values()), sum(self.exchange.values()))


def rank_memory(config: MonarchTrainer.Config, part: Part) -> Memory:
    """Count the bytes of one rank."""
    parameters = list(_parameters(part))
    buffers = [buffer for module in part.modules for buffer in module.buffers()]
    outer, exchange = _between_replicas(config, parameters)
    sharded = {
        # The shard's storage, which FSDP pads to the size of the largest rank's.
        "parameters": sum(local(p).untyped_storage().nbytes() for _, p in parameters),
        "gradients": sum(_nbytes(p) for _, p in parameters if p.requires_grad),
        "optimizer states": _optimizer_states(config, parameters),
        "outer state": outer,
    }
    training = {
        **_fsdp_buffers(config, part),
        "activations": activation_bytes(config, part),
        "logits": logit_bytes(config, part),
    }
    kept = {"buffers": sum(_nbytes(buffer) for buffer in buffers)}
    if config.training.enable_cpu_offload:
        host = sharded | {"exchange between replicas": exchange}
        return Memory(state=kept, training=training, exchange={}, host=host)
    return Memory(state=sharded | kept, training=training, exchange={"exchange between replicas": exchange})


def _parameters(part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    for module in part.modules:
        yield from module.named_parameters()


def _nbytes(tensor: torch.Tensor) -> int:
    return local(tensor).nbytes


def _optimizer_states(config: MonarchTrainer.Config, parameters: list[tuple[str, torch.Tensor]]) -> int:
    """The first group whose pattern fits takes a parameter, as in TorchTitan's OptimizersContainer."""
    optimizer = config.optimizer
    bf16 = optimizer.implementation == "fused_opt_states_bf16"
    groups = [(re.compile(group.pattern), group) for group in optimizer.param_groups]
    total = 0
    for name, parameter in parameters:
        group = next((group for pattern, group in groups if pattern.search(name)), None)
        if group is None or not parameter.requires_grad:
            continue
        adam = group.optimizer_name in ("Adam", "AdamW")
        size = 2 if bf16 and adam else parameter.element_size()
        states = STATES.get(group.optimizer_name, 2) + bool(adam and group.optimizer_kwargs.get("amsgrad"))
        total += local(parameter).numel() * states * size
    return total


def _between_replicas(config: MonarchTrainer.Config, parameters: list[tuple[str, torch.Tensor]]) -> tuple[int, int]:
    """What the outer optimizer keeps (training/outer.py) and what an exchange needs for a moment (also gradients.py).

    Fragments are taken to be of equal size, which the parameters that they consist of allow more or less.
    """
    ours = config.fault_tolerance
    if not ours.enable:
        return 0, 0
    numel = sum(local(parameter).numel() for _, parameter in parameters)
    match ours.semi_sync_method:
        case "none":
            return 0, FP32 * sum(local(p).numel() for _, p in parameters if p.requires_grad)
        case "local_sgd":
            return FP32 * numel, FP32 * (numel + 1)
        case "diloco":
            copies = 2 if ours.outer_optimizer.momentum else 1
            return copies * FP32 * numel, FP32 * (-(-numel // ours.num_fragments) + 1)
    raise AssertionError(f"a method without a count: {ours.semi_sync_method}")


def _fsdp_buffers(config: MonarchTrainer.Config, part: Part) -> dict[str, int]:
    """Parameters in one piece and gradients before they are reduced.

    FSDP gathers the next unit while it computes one, so two are there, and those that are not resharded. A backward
    pass has one unit's gradients in the compute dtype and, to be reduced, in the reduce dtype. With pipeline
    parallelism gradients are reduced only after the last micro-batch and nothing is resharded between: all of it stays.
    """
    training, policy = config.training, config.parallelism.fsdp_reshard_after_forward
    pipelined = config.parallelism.pipeline_parallel_degree > 1
    size, reduced = (
        TORCH_DTYPE_MAP[dtype].itemsize for dtype in (training.mixed_precision_param, training.mixed_precision_reduce)
    )
    units = [(name, sum(map(gathered_numel, unit))) for module in part.modules for name, unit in fsdp_units(module)]
    numels = sorted((numel for _, numel in units), reverse=True)
    if pipelined or not get_fsdp_reshard_after_forward_policy(policy, pipelined):
        gathered = sum(numels)
    else:
        stays = [(name, numel) for name, numel in units if policy != "always" and name in ("", "norm", "lm_head")]
        passing = sorted((numel for name, numel in units if (name, numel) not in stays), reverse=True)
        gathered = sum(numel for _, numel in stays) + sum(passing[:2])
    largest = numels[0] if numels else 0
    waiting = sum(numels) * reduced if pipelined else 0
    return {
        "gathered parameters": gathered * size,
        "unreduced gradients": waiting + largest * (size + reduced),
        "float8": largest * _float8_copies(config),
    }


def _float8_copies(config: MonarchTrainer.Config) -> int:
    """Bytes a parameter of the unit at hand that float8 adds: its cast weights."""
    return int(bool(enabled_converters(config)))
