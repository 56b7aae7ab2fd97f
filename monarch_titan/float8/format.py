"""What FP8 bytes look like on a wire, the same on every device.

A tensor travels as segments, one a receiver. Each holds whole blocks of 128 elements, in three parts::

    codes:  128 bytes a block, OCP e4m3 or e5m2; never a NaN, an infinity or the negative zero
    scales: one a block, what its codes are multiplied with: fp32 little-endian, or ue8m0, a power of two's exponent
    zeros:  up to the next 16 bytes

Codes lie together, not beside their scales, so that every device reads them 16 bytes at a time. A block with a value
that is not finite has the scale NaN and codes of zero: the poison reaches whoever reads the block, and no other block.

AMD's gfx942 (MI300X, MI325X) converts only to the FNUZ flavour, where every code means half as much: it converts half
of a value to the same byte, so the wire holds OCP bytes there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 128
"""Elements that share a scale."""

ALIGNMENT = 16
"""Bytes: every segment starts at a multiple of it."""

ELEMENTS = {"e4m3": 448.0, "e5m2": 57344.0}
"""The largest value of each."""

SCALES = {"fp32": 4, "ue8m0": 1}
"""Bytes of each."""

SMALLEST_SCALE = 2.0**-126
"""The smallest fp32 that is not subnormal, so that its inverse is finite."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Format:
    """How a block is written."""

    element: str = "e4m3"
    """``e4m3``, 3 bits of mantissa, or ``e5m2``, 2 bits and more range."""
    scale: str = "fp32"
    """``fp32``, or ``ue8m0``: a power of two in one byte, which uses less of the element's range.

    Values within a rounding step of fp32's own limit may come back infinite from it.
    """

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS:
            raise ValueError(f"element must be one of {', '.join(ELEMENTS)}, got {self.element!r}.")
        if self.scale not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {self.scale!r}.")

    @property
    def max(self) -> float:
        return ELEMENTS[self.element]

    @property
    def block_bytes(self) -> int:
        return BLOCK + SCALES[self.scale]

    def stride(self, blocks: int) -> int:
        """Bytes of a segment of so many blocks."""
        return round_up(blocks * self.block_bytes, ALIGNMENT)

    def blocks(self, stride: int) -> int | None:
        """Blocks of a segment of so many bytes, or None where no segment has that size."""
        blocks = stride // self.block_bytes
        return blocks if self.stride(blocks) == stride else None


@dataclass(kw_only=True, slots=True, frozen=True)
class Layout:
    """Where the elements of a flat tensor lie on the wire.

    Segment w holds the elements from ``w * segment`` on, ``segment`` of them or what is left; the rest of its last
    block, and of the last segments where the division does not work out, is zeros.
    """

    format: Format
    numel: int
    """Elements of the whole tensor."""
    segments: int = 1

    def __post_init__(self) -> None:
        if self.segments < 1:
            raise ValueError(f"segments must be at least 1, got {self.segments}.")
        if self.numel < 0:
            raise ValueError(f"numel must not be negative, got {self.numel}.")

    @property
    def segment(self) -> int:
        """Elements a segment."""
        return -(-self.numel // self.segments)

    @property
    def blocks(self) -> int:
        """Blocks a segment."""
        return -(-self.segment // BLOCK)

    @property
    def stride(self) -> int:
        """Bytes a segment."""
        return self.format.stride(self.blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the wire buffer, uint8."""
        return self.segments, self.stride


def offsets(numels: Sequence[int]) -> list[int]:
    """Where tensors of these sizes start in a flat buffer in which no block belongs to two of them."""
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += round_up(numel, BLOCK)
    return starts


def flat_numel(numels: Sequence[int], segments: int) -> int:
    """Elements of that flat buffer, with zeros at its end so that every segment holds the same whole blocks."""
    return round_up(sum(round_up(numel, BLOCK) for numel in numels), BLOCK * segments)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
