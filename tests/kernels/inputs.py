"""What the kernels are given in tests."""

from __future__ import annotations

import torch

from monarch_titan.float8.format import BLOCK, ELEMENTS, SCALES, Format

FORMATS = [Format(element=element, scale=scale) for element in ELEMENTS for scale in SCALES]

LENGTHS = [0, 1, 127, 128, 129, 4097]

SPECIAL = {
    "zeros": [0.0],
    "negative zero": [-0.0],
    "one NaN": [1.0, float("nan")],
    "one Inf": [1.0, float("inf")],
    "one -Inf": [-float("inf"), -1.0],
    "NaN and Inf": [float("nan"), float("inf")],
    "1e-38": [1e-38, -1e-38, 1e-40],
    "bf16 subnormals": [2.0**-133, -(2.0**-127)],
    "fp32 subnormals": [2.0**-149, -(2.0**-148)],
    "max finite": [torch.finfo(torch.float32).max, -1.0],
    "bf16 max finite": [torch.finfo(torch.bfloat16).max, -1e30],
    "wide": [2.0**-i for i in range(40)],
    "powers of two": [448.0, 224.0, -448.0],
    "just above a power of two": [448.0 * (1 + 2**-7), 1.0],
}


def special_blocks(dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor: each special block followed by a plain one, which it must leave alone."""
    blocks = []
    for values in SPECIAL.values():
        block = torch.zeros(BLOCK)
        block[: len(values)] = torch.tensor(values)
        blocks += [block, torch.linspace(-1, 1, BLOCK)]
    return torch.cat(blocks).to(dtype)


def spread(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values whose size differs from block to block and within each, from 2^-36 to 2^20."""
    random = torch.Generator().manual_seed(seed)
    blocks = -(-numel // BLOCK)
    values = torch.randn(blocks, BLOCK, generator=random)
    values *= torch.exp2(torch.randint(-20, 20, (blocks, 1), generator=random))
    values *= torch.exp2(torch.randint(-14, 1, values.shape, generator=random))
    return values.flatten()[:numel].to(dtype)


def every_bf16() -> torch.Tensor:
    """All 65,536, fp32, in their order: NaN and Inf included."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to the bit, but that a NaN is any NaN."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    numbers = ~ours.isnan() if ours.is_floating_point() else slice(None)
    assert torch.equal(ours[numbers].view(torch.uint8), theirs[numbers].view(torch.uint8))  # the sign of zero too
