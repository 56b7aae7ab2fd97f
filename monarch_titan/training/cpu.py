"""Language models on a machine without an accelerator.

TorchTitan's language models know only attention kernels for GPUs. Its own override mechanism swaps in ones that take
the same masks and are exact, with a dense mask: memory and time grow with length squared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from monarch_titan import upstream

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

OVERRIDES = tuple(f"{__name__}.{name}" for name in ("sdpa_attention", "sdpa_varlen_attention", "gpt_oss_experts"))
"""For ``override.imports`` on a CPU machine."""

OutTransform: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def attend(
    q_BLNH: torch.Tensor,  # noqa: N803 (TorchTitan shards attention by these names)
    k_BLNH: torch.Tensor,  # noqa: N803
    v_BLNH: torch.Tensor,  # noqa: N803
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_transform: OutTransform | None = None,
) -> torch.Tensor:
    """Attention with a dense mask.

    Args:
        q_BLNH, k_BLNH, v_BLNH: (batch, length, heads, head size), any float dtype. With ``enable_gqa`` keys and values
            may have fewer heads, each for several heads of the query.
        mask: bool, broadcast to (batch, heads, length of q, length of k); True where a query sees a key, which every
            query does.
        scale: of the scores, one over the root of the query's head size by default.
        out_transform: is given the output and the logarithm of the softmax's denominator, float32 (batch, length,
            heads), and its result is returned; attention sinks are made of it.

    Returns (batch, length, heads, head size) in the dtype of the query.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    if out_transform is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa).transpose(
            1, 2
        )
    # No kernel for the CPU gives the denominator together with its gradient.
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.float() @ k.float().transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.float()
    return out_transform(out.to(q.dtype).transpose(1, 2), lse.transpose(1, 2))


class SdpaAttention(FlexAttention):
    """FlexAttention's interface over :func:`attend`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    # All layers of a step are given the same few mask objects: one dense copy of each serves them all.
    _dense: ClassVar[WeakKeyDictionary[BlockMask, torch.Tensor]] = WeakKeyDictionary()

    def forward(
        self,
        q_BLNH: torch.Tensor,  # noqa: N803
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
        **unsupported: object,
    ) -> torch.Tensor:
        """Attend where the block mask allows it.

        Raises NotImplementedError for an option of FlexAttention that has no equivalent here.
        """
        if given := [name for name, value in unsupported.items() if value is not None]:
            raise NotImplementedError(f"attention on CPU does not support {', '.join(given)}.")
        mask = self._dense.get(attention_masks)
        if mask is None:
            batch, length = q_BLNH.shape[:2]
            mask = create_mask(attention_masks.mask_mod, batch, 1, length, k_BLNH.shape[1], device=q_BLNH.device.type)
            self._dense[attention_masks] = mask
        return attend(q_BLNH, k_BLNH, v_BLNH, mask, scale=scale, enable_gqa=enable_gqa, out_transform=out_transform)


class SdpaVarlenAttention(VarlenAttention):
    """VarlenAttention's interface over :func:`attend`."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,  # noqa: N803
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: VarlenMetadata,
        **options: object,
    ) -> torch.Tensor:
        """Attend within documents, whose first tokens ``attention_masks`` counts over the whole batch."""
        batch, length = q_BLNH.shape[:2]
        tokens = torch.arange(batch * length, dtype=torch.int32, device=q_BLNH.device).view(batch, length)
        document = torch.searchsorted(attention_masks.cu_seq_q, tokens, right=True)
        mask = document.unsqueeze(2) == document.unsqueeze(1)
        back = tokens[0].unsqueeze(1) - tokens[0]  # from each query to each key
        left, right = self.window_size  # -1: no limit
        if left >= 0:
            mask &= back <= left
        if right >= 0:
            mask &= back >= -right
        return attend(q_BLNH, k_BLNH, v_BLNH, mask.unsqueeze(1), **options)  # type: ignore[arg-type]


@override(target=FlexAttention.Config, exact=True, description="attention without a GPU")
def sdpa_attention(config: FlexAttention.Config) -> SdpaAttention.Config:
    """Swap every FlexAttention of a model."""
    return derive(config, SdpaAttention.Config)


@override(target=VarlenAttention.Config, exact=True, description="attention without a GPU")
def sdpa_varlen_attention(config: VarlenAttention.Config) -> SdpaVarlenAttention.Config:
    """Swap every VarlenAttention of a model."""
    return derive(config, SdpaVarlenAttention.Config)


class GptOssExperts(GptOssGroupedExperts):
    """GPT-OSS's experts for activations of any dtype: TorchTitan's give bfloat16 and expect the same beside it."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:  # noqa: N803
        """TorchTitan's result in the dtype of ``x_RD``."""
        return super().forward(x_RD, num_tokens_per_expert_E).to(x_RD.dtype)


@override(target=GptOssGroupedExperts.Config, exact=True, description="experts in float32")
def gpt_oss_experts(config: GptOssGroupedExperts.Config) -> GptOssExperts.Config:
    """Swap the experts of every layer."""
    return derive(config, GptOssExperts.Config)


def adapt(config: Trainer.Config) -> None:
    """Rewrite a configuration in place for the device and the torch at hand; a second call changes nothing."""
    if upstream.spmd_backend_needs_dtensor():
        config.parallelism.spmd_backend = "partial_dtensor"
    if upstream.accelerator() is not None:
        return
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    imports = config.override.imports
    config.override.imports = [*imports, *(name for name in OVERRIDES if name not in imports)]


def use_sum_reductions(model: torch.nn.Module) -> None:
    """Make FSDP reduce gradients by a sum and a division: gloo has no pre-multiplied sum."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
