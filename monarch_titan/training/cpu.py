"""Llama 3 and DeepSeek-V3 on a machine without an accelerator.

TorchTitan's language models know only attention kernels for GPUs. Its own override mechanism swaps in one that runs
``scaled_dot_product_attention`` with the same mask, which is exact and slow in the same places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention

from monarch_titan import upstream

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

SDPA_OVERRIDE = f"{__name__}.sdpa_attention"


class SdpaAttention(FlexAttention):
    """FlexAttention's interface over ``torch.nn.functional.scaled_dot_product_attention``."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    # All layers of a step are given the same mask object: one dense copy serves them all.
    _shared: ClassVar[tuple[BlockMask | None, torch.Tensor | None]] = (None, None)

    def forward(
        self,
        q_BLNH: torch.Tensor,  # noqa: N803 (TorchTitan shards attention by these names)
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: BlockMask,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unsupported: object,
    ) -> torch.Tensor:
        """Attend within documents.

        Args:
            q_BLNH, k_BLNH, v_BLNH: (batch, length, heads, head size), any float dtype.
            attention_masks: which keys each query may see; dense here, so memory grows with length squared.

        Returns (batch, length, heads, head size) in the dtype of the query. Raises NotImplementedError for an
        option of FlexAttention that has no equivalent here.
        """
        if given := [name for name, value in unsupported.items() if value is not None]:
            raise NotImplementedError(f"attention on CPU does not support {', '.join(given)}.")
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        block_mask, mask = SdpaAttention._shared
        if block_mask is not attention_masks:
            mask = create_mask(attention_masks.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device=q.device.type)
            SdpaAttention._shared = (attention_masks, mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


@override(target=FlexAttention.Config, exact=True, description="attention without a GPU")
def sdpa_attention(config: FlexAttention.Config) -> SdpaAttention.Config:
    """Swap every FlexAttention of a model; listed in ``override.imports`` on a CPU machine."""
    return derive(config, SdpaAttention.Config)


def adapt(config: Trainer.Config) -> None:
    """Rewrite a configuration in place for the device and the torch at hand; a second call changes nothing."""
    if upstream.spmd_backend_needs_dtensor():
        config.parallelism.spmd_backend = "partial_dtensor"
    if upstream.accelerator() is not None:
        return
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    if SDPA_OVERRIDE not in config.override.imports:
        config.override.imports = [*config.override.imports, SDPA_OVERRIDE]


def use_sum_reductions(model: torch.nn.Module) -> None:
    """Make FSDP reduce gradients by a sum and a division: gloo has no pre-multiplied sum."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
