"""The operations as torch ops, ``torch.ops.monarch_titan.*``: tensors in, bytes for a wire out, and back.

Any shape, any strides, empty tensors, float32 and bfloat16. ``element`` and ``scale`` are those of ``format.Format``.
All of them raise ValueError naming the argument that does not fit; none is differentiable. They are opaque to
torch.compile, with shapes that it can derive.

The bytes are the same whichever implementation runs. The log says once which does.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch_titan.float8 import cpu, reference
from monarch_titan.float8.checks import (
    FLOATS,
    check_device,
    check_dtype,
    check_out,
    check_output,
    check_segments,
    check_wire,
)
from monarch_titan.float8.format import BLOCK, Format, Layout, flat_numel

logger = logging.getLogger(__name__)


@functools.cache
def implementation() -> Any:
    """The library for this CPU, or the reference where the package was built without a compiler."""
    if not cpu.LIBRARY.exists():
        logger.warning(
            "FP8 operations run in plain torch, many times slower: %s does not exist, because no C++ compiler was "
            "found when the package was built. `python kernels/build.py` in a checkout builds it.",
            cpu.LIBRARY,
        )
        return reference
    library = cpu.Library()
    logger.info("FP8 operations run in the CPU library, variant %s.", library.variant)
    return library


@torch.library.custom_op("monarch_titan::quantize_pack", mutates_args=())
def quantize_pack(x: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    """A wire buffer, uint8 (segments, stride), of a tensor of any shape, cut into as many segments.

    Segment w holds the elements from ``w * ceil(numel / segments)`` on, so rows of a matrix become segments.
    """
    check_device("x", x)
    return implementation().quantize_pack(x.contiguous(), segments, quantize_pack_format(x, segments, element, scale))


def quantize_pack_format(x: torch.Tensor, segments: int, element: str, scale: str) -> Format:
    check_dtype("x", x, FLOATS)
    check_segments(segments)
    return Format(element=element, scale=scale)


@quantize_pack.register_fake
def _(x: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    format = quantize_pack_format(x, segments, element, scale)
    return empty_wire(x, Layout(format=format, numel=x.numel(), segments=segments))


@torch.library.custom_op("monarch_titan::quantize_pack_ef", mutates_args=("residual",))
def quantize_pack_ef(
    x: torch.Tensor, residual: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    """The same of ``x + residual``; what the wire does not hold of it becomes the residual, in place.

    Args:
        residual: float32, of the shape of ``x``; zeros before the first round. 0 in blocks that are not finite.
    """
    format = quantize_pack_ef_format(x, residual, segments, element, scale)
    check_device("x", x)
    check_device("residual", residual)
    kept = residual.contiguous()
    wire = implementation().quantize_pack_ef(x.contiguous(), kept, segments, format)
    return written_back(residual, kept, wire)


def quantize_pack_ef_format(x: torch.Tensor, residual: torch.Tensor, segments: int, element: str, scale: str) -> Format:
    check_dtype("residual", residual, FLOATS[:1])
    if residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}.")
    return quantize_pack_format(x, segments, element, scale)


@quantize_pack_ef.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    format = quantize_pack_ef_format(x, residual, segments, element, scale)
    return empty_wire(x, Layout(format=format, numel=x.numel(), segments=segments))


@torch.library.custom_op("monarch_titan::pseudograd_pack", mutates_args=("residual",))
def pseudograd_pack(
    global_params: Sequence[torch.Tensor],
    local_params: Sequence[torch.Tensor],
    residual: torch.Tensor | None = None,
    segments: int = 1,
    element: str = "e4m3",
    scale: str = "fp32",
) -> torch.Tensor:
    """One wire buffer, uint8 (segments, stride), of what many parameters moved, global - local.

    Args:
        global_params, local_params: pairs of one shape and dtype; dtypes may differ between pairs.
        residual: None, or float32 (flat_numel,) for error feedback as in :func:`quantize_pack_ef`.

    Each parameter starts a block of its own: ``format.offsets`` says where it lies in what :func:`unpack` returns for
    ``format.flat_numel`` elements.
    """
    layout = pseudograd_layout(global_params, local_params, residual, segments, element, scale)
    for name, tensors in (("global_params", global_params), ("local_params", local_params)):
        for index, tensor in enumerate(tensors):
            check_device(f"{name}[{index}]", tensor)
    pairs = [tensor.contiguous() for tensor in global_params], [tensor.contiguous() for tensor in local_params]
    if residual is None:
        return implementation().pseudograd_pack(*pairs, None, segments, layout.format)
    check_device("residual", residual)
    kept = residual.contiguous()
    return written_back(residual, kept, implementation().pseudograd_pack(*pairs, kept, segments, layout.format))


def pseudograd_layout(
    global_params: Sequence[torch.Tensor],
    local_params: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    segments: int,
    element: str,
    scale: str,
) -> Layout:
    check_segments(segments)
    if len(global_params) != len(local_params):
        raise ValueError(
            f"local_params must be as many as global_params, {len(global_params)}, got {len(local_params)}."
        )
    for index, (before, after) in enumerate(zip(global_params, local_params, strict=True)):
        check_dtype(f"global_params[{index}]", before, FLOATS)
        check_dtype(f"local_params[{index}]", after, (before.dtype,))
        if before.shape != after.shape:
            wanted = f"the shape of global_params[{index}], {tuple(before.shape)}"
            raise ValueError(f"local_params[{index}] must have {wanted}, got {tuple(after.shape)}.")
    numel = flat_numel([tensor.numel() for tensor in global_params], segments)
    if residual is not None:
        check_dtype("residual", residual, FLOATS[:1])
        if residual.shape != (numel,):
            raise ValueError(f"residual must have the shape ({numel},), got {tuple(residual.shape)}.")
    return Layout(format=Format(element=element, scale=scale), numel=numel, segments=segments)


@pseudograd_pack.register_fake
def _(
    global_params: Sequence[torch.Tensor],
    local_params: Sequence[torch.Tensor],
    residual: torch.Tensor | None = None,
    segments: int = 1,
    element: str = "e4m3",
    scale: str = "fp32",
) -> torch.Tensor:
    layout = pseudograd_layout(global_params, local_params, residual, segments, element, scale)
    like = global_params[0] if global_params else torch.empty(0)
    return empty_wire(like, layout)


@torch.library.custom_op("monarch_titan::reduce_segments", mutates_args=())
def reduce_segments(wire: torch.Tensor, numel: int, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    """The sum, float32 (numel,), of one segment from each rank, uint8 (ranks, stride), added in the order of ranks."""
    layout = one_segment(wire, numel, element, scale)
    check_device("wire", wire)
    return implementation().reduce_segments(wire.contiguous(), numel, layout.format)


def one_segment(wire: torch.Tensor, numel: int, element: str, scale: str) -> Layout:
    layout = Layout(format=Format(element=element, scale=scale), numel=numel)
    check_wire(wire, layout, "ranks")
    return layout


@reduce_segments.register_fake
def _(wire: torch.Tensor, numel: int, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    one_segment(wire, numel, element, scale)
    return wire.new_empty(numel, dtype=torch.float32)


@torch.library.custom_op("monarch_titan::reduce_requant", mutates_args=())
def reduce_requant(wire: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    """The same sum as a segment again: uint8 (ranks, stride) to (stride,)."""
    format = whole_segments(wire, element, scale)
    check_device("wire", wire)
    return implementation().reduce_requant(wire.contiguous(), format)


def whole_segments(wire: torch.Tensor, element: str, scale: str) -> Format:
    format = Format(element=element, scale=scale)
    check_dtype("wire", wire, (torch.uint8,))
    if wire.ndim != 2 or format.blocks(wire.shape[1]) is None:
        wanted = f"(ranks, stride), where a stride of whole blocks of {format.block_bytes} bytes is padded to 16"
        raise ValueError(f"wire must have the shape {wanted}, got {tuple(wire.shape)}.")
    return format


@reduce_requant.register_fake
def _(wire: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    whole_segments(wire, element, scale)
    return wire.new_empty(wire.shape[1])


@torch.library.custom_op("monarch_titan::unpack", mutates_args=())
def unpack(
    wire: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    """The flat tensor, float32 or bfloat16 (numel,), of the wire buffer, uint8 (segments, stride), that holds it."""
    layout = unpack_layout(wire, numel, dtype, element, scale)
    check_device("wire", wire)
    return implementation().unpack(wire.contiguous(), numel, dtype, layout.format)


def unpack_layout(wire: torch.Tensor, numel: int, dtype: torch.dtype, element: str, scale: str) -> Layout:
    check_output(dtype)
    segments = wire.shape[0] if wire.ndim else 0
    layout = Layout(format=Format(element=element, scale=scale), numel=numel, segments=max(segments, 1))
    check_wire(wire, layout, "segments")
    return layout


@unpack.register_fake
def _(
    wire: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    unpack_layout(wire, numel, dtype, element, scale)
    return wire.new_empty(numel, dtype=dtype)


# Fresh memory costs a large tensor more than the kernels do: on a CPU the system clears every page of it first. These
# write into what the caller keeps.


@torch.library.custom_op("monarch_titan::quantize_pack_out", mutates_args=("out",))
def quantize_pack_out(
    x: torch.Tensor, out: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32"
) -> None:
    """:func:`quantize_pack` into a wire buffer, uint8 (segments, stride)."""
    format = quantize_pack_format(x, segments, element, scale)
    check_device("x", x)
    check_out(out, Layout(format=format, numel=x.numel(), segments=segments).shape, (torch.uint8,))
    write(out, implementation().quantize_pack, x.contiguous(), segments, format)


@torch.library.custom_op("monarch_titan::reduce_segments_out", mutates_args=("out",))
def reduce_segments_out(wire: torch.Tensor, out: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> None:
    """:func:`reduce_segments` into a tensor of any shape, float32."""
    check_out(out, out.shape, FLOATS[:1])
    format = one_segment(wire, out.numel(), element, scale).format
    check_device("wire", wire)
    write(out, implementation().reduce_segments, wire.contiguous(), out.numel(), format)


@torch.library.custom_op("monarch_titan::unpack_out", mutates_args=("out",))
def unpack_out(wire: torch.Tensor, out: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> None:
    """:func:`unpack` into a tensor of any shape, float32 or bfloat16."""
    check_out(out, out.shape, FLOATS)
    format = unpack_layout(wire, out.numel(), out.dtype, element, scale).format
    check_device("wire", wire)
    write(out, implementation().unpack, wire.contiguous(), out.numel(), out.dtype, format)


@quantize_pack_out.register_fake
@reduce_segments_out.register_fake
@unpack_out.register_fake
def _(*args: object, **kwargs: object) -> None:
    """Nothing is returned."""


def write(out: torch.Tensor, operation: Callable[..., torch.Tensor], *args: object) -> None:
    """What an operation returns, into ``out``: without a copy where the operation can write there itself."""
    if operation.__module__ == reference.__name__ or not out.is_contiguous():
        out.copy_(operation(*args).view(out.shape))
    else:
        operation(*args, out=out)


@torch.library.custom_op("monarch_titan::quantize_rows", mutates_args=())
def quantize_rows(x: torch.Tensor, element: str = "e4m3") -> torch.Tensor:
    """Rows, uint8 (rows, columns + columns / 32), of a matrix whose columns divide by 128: codes, then fp32 scales."""
    format = rows_format(x, element)
    check_device("x", x)
    return implementation().quantize_rows(x.contiguous(), format)


def rows_format(x: torch.Tensor, element: str) -> Format:
    check_dtype("x", x, FLOATS)
    if x.ndim != 2 or x.shape[1] % BLOCK:
        raise ValueError(f"x must have the shape (rows, a multiple of {BLOCK}), got {tuple(x.shape)}.")
    return Format(element=element)


@quantize_rows.register_fake
def _(x: torch.Tensor, element: str = "e4m3") -> torch.Tensor:
    rows_format(x, element)
    return x.new_empty(x.shape[0], x.shape[1] + x.shape[1] // 32, dtype=torch.uint8)


@torch.library.custom_op("monarch_titan::dequantize_rows", mutates_args=())
def dequantize_rows(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16, element: str = "e4m3") -> torch.Tensor:
    """The matrix, float32 or bfloat16 (rows, columns), of the rows that :func:`quantize_rows` made."""
    format = dequantize_rows_format(rows, dtype, element)
    check_device("rows", rows)
    return implementation().dequantize_rows(rows.contiguous(), dtype, format)


def dequantize_rows_format(rows: torch.Tensor, dtype: torch.dtype, element: str) -> Format:
    check_output(dtype)
    check_dtype("rows", rows, (torch.uint8,))
    row_block = BLOCK + 4
    if rows.ndim != 2 or rows.shape[1] % row_block:
        raise ValueError(f"rows must have the shape (rows, a multiple of {row_block}), got {tuple(rows.shape)}.")
    return Format(element=element)


@dequantize_rows.register_fake
def _(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16, element: str = "e4m3") -> torch.Tensor:
    dequantize_rows_format(rows, dtype, element)
    return rows.new_empty(rows.shape[0], rows.shape[1] // 33 * 32, dtype=dtype)


def empty_wire(like: torch.Tensor, layout: Layout) -> torch.Tensor:
    return like.new_empty(layout.shape, dtype=torch.uint8)


def written_back(residual: torch.Tensor, kept: torch.Tensor, wire: torch.Tensor) -> torch.Tensor:
    """The wire, once a residual that had to be copied to be contiguous has what was written to its copy."""
    if kept.data_ptr() != residual.data_ptr() or not residual.is_contiguous():
        residual.copy_(kept)
    return wire
