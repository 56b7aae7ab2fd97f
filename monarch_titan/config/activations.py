"""How much a rank keeps between forward and backward: an estimate, unlike what its parameters take.

Counted as in Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, section 4.1), tensor by tensor of what autograd
saves, in elements a token of one transformer block. Their 34 bytes a hidden element are GPT's; with SwiGLU, without
dropout and with attention that saves no scores, a block of hidden size d keeps

    2 d            the residual stream before each of the two norms
    norms          what each norm gives, the low-rank ones of MLA included
    linears        what each linear layer gives: q, k, v, their low-rank forms, gate and up projection of SwiGLU
    h v + 2 h      attention's result and its fp32 log-sum-exp, h heads of size v
    h k            MLA only: keys of size k put together for every head
    2 f            SwiGLU of size f: the activated gate and its product with the up projection
    K (3 d + 4 f)  K experts a token, of size f: the token sent, received and returned, and their SwiGLU

An output that a row-parallel layer adds to the residual stream is the residual of the next norm: counted once, there.
Tokens are assumed to spread evenly over the experts. Tensor parallelism divides what comes out of column-parallel
layers, and with sequence parallelism the residual stream and the block's norms; context parallelism divides tokens.

Of this, selective checkpointing as TorchTitan does it keeps the block's input, every second matrix product, attention's
result and what all-to-all delivers; full checkpointing keeps the input alone. Either recomputes one block at a time,
which is then all there. A memory budget of b lies at the fraction b between full checkpointing and none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import MoE

from monarch_titan.config.shards import Part, axis_size, sharded_dim

if TYPE_CHECKING:
    from monarch_titan.training.trainer import MonarchTrainer

LOGIT_BYTES = 2 + 4 + 4 + 4
"""A logit in bf16, its fp32 copy, its log-probability and its gradient: TorchTitan computes the loss in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Elements a token that one transformer block keeps."""

    everything: float
    selected: float
    input: float


def block(layer: nn.Module, *, sequence_parallel: bool) -> Block:
    """Count the elements a token of a transformer block that TorchTitan has sharded."""
    linears = norms = attention = experts = delivered = swiglu = 0.0
    tp, hidden = _tp(layer), _hidden_size(layer)
    sequence = tp if sequence_parallel else 1
    into_residual = {getattr(module, name, None) for module in layer.modules() for name in ("wo", "w2")}
    of_block = set(layer.children())
    for module in layer.modules():
        if isinstance(module, nn.Linear) and module not in into_residual:
            linears += _rows(module)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            norms += math.prod(module.normalized_shape) / (sequence if module in of_block else 1)
        elif isinstance(module, FeedForward):
            swiglu += 2 * _rows(module.w1)
        elif isinstance(module, MoE):
            experts, delivered = _experts(module, hidden, tp)
        elif hasattr(module, "inner_attention"):
            attention += _attention(module) / tp
    residual = hidden / sequence
    everything = 2 * residual + norms + linears + attention + swiglu + experts
    selected = residual + linears / 2 + attention + delivered
    return Block(everything=everything, selected=min(selected, everything), input=residual)


def _hidden_size(layer: nn.Module) -> int:
    """What the block's own norms normalise."""
    norm = next(child for child in layer.children() if isinstance(child, nn.RMSNorm | nn.LayerNorm))
    return math.prod(norm.normalized_shape)


def _tp(layer: nn.Module) -> int:
    sizes = {axis_size(p, "tp") for p in layer.parameters() if sharded_dim(p, "tp") is not None}
    return max(sizes, default=1)


def _rows(linear: nn.Linear) -> float:
    """Elements a token that a linear layer gives on one rank."""
    return linear.out_features / (axis_size(linear.weight, "tp") if sharded_dim(linear.weight, "tp") == 0 else 1)


def _attention(attention: Any) -> float:
    """Attention's result and log-sum-exp, and MLA's keys, of all heads."""
    heads = attention.n_heads
    keys = heads * attention.qk_head_dim if hasattr(attention, "kv_lora_rank") else 0
    return attention.wo.in_features + 2 * heads + keys


def _experts(moe: Any, dim: int, tp: int) -> tuple[float, float]:
    """Elements a token of the routed experts, and how many of them all-to-all delivers."""
    experts = moe.routed_experts.inner_experts
    weights = [weight for weight in experts.parameters() if weight.ndim == 3]
    size = sum(weight.numel() for weight in weights) / (3 * dim * experts.num_experts)
    top_k = moe.router.top_k
    if any(sharded_dim(weight, "ep") is not None for weight in weights):
        # With expert parallelism the ranks of a tensor-parallel group dispatch a part of the tokens each.
        return top_k * (3 * dim + 4 * size) / tp, top_k * 2 * dim / tp
    return top_k * (3 * dim + 4 * size / tp), 0


# A rank ---------------------------------------------------------------------------------------------------------------


def activation_bytes(config: MonarchTrainer.Config, part: Part) -> int:
    """Bytes that one rank keeps when it keeps most: its micro-batches in flight, and a block being recomputed."""
    tokens = tokens_per_microbatch(config)
    size = 2 if config.training.mixed_precision_param == "bfloat16" else 4
    sequence_parallel = config.parallelism.enable_sequence_parallel
    blocks = [[block(b, sequence_parallel=sequence_parallel) for b in m.layers.values()] for m in part.modules]
    kept = [sum(_kept(one, config.activation_checkpoint) for one in stage) for stage in blocks]
    everything = [one.everything for stage in blocks for one in stage]
    recomputed = 0.0
    if config.activation_checkpoint is not None and everything:
        recomputed = max(everything)
    return int((_in_flight(part, kept, config) + recomputed) * tokens * size)


def tokens_per_microbatch(config: MonarchTrainer.Config) -> int:
    """Tokens that go through a rank's blocks at once."""
    parallelism, training = config.parallelism, config.training
    pipelined = parallelism.pipeline_parallel_degree > 1
    batch = parallelism.pipeline_parallel_microbatch_size if pipelined else training.local_batch_size
    return batch * training.seq_len // parallelism.context_parallel_degree


def _kept(one: Block, checkpointing: Any) -> float:
    if checkpointing is None:
        return one.everything
    if isinstance(checkpointing, FullAC.Config):
        return one.input
    if isinstance(checkpointing, SelectiveAC.Config):
        return one.selected
    assert isinstance(checkpointing, MemoryBudgetAC.Config)
    return one.input + checkpointing.memory_budget * (one.everything - one.input)


def _in_flight(part: Part, kept: list[float], config: MonarchTrainer.Config) -> float:
    """The most that this rank's stages keep at once, by playing the pipeline's own schedule through."""
    if part.schedule is None:
        return sum(kept)
    microbatches = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    order = part.schedule.pipeline_order
    if not order:
        return sum(kept) * microbatches
    done = [step for action in order[part.coordinates["pp"]] if action for step in action.sub_actions or (action,)]
    stages = sorted({step.stage_index for step in done})
    size = dict(zip(stages, kept, strict=True))
    held, most = 0.0, 0.0
    for step in done:
        if step.computation_type.name == "FORWARD":
            held += size[step.stage_index]
        elif step.computation_type.name in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            held -= size[step.stage_index]
        most = max(most, held)
    return most


def logit_bytes(config: MonarchTrainer.Config, part: Part) -> int:
    """Bytes of the logits that one chunk of the loss needs, and of the hidden states' fp32 gradient."""
    heads = [module.lm_head for module in part.modules if getattr(module, "lm_head", None) is not None]
    if not heads:
        return 0
    chunks = getattr(config.loss, "num_chunks", 1)
    tokens = tokens_per_microbatch(config)
    gathered = 4 * heads[0].in_features if chunks > 1 else 0
    return int(tokens * (_rows(heads[0]) * LOGIT_BYTES / chunks + gathered))
