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

from monarch_titan.float8 import checks, cpu, reference
from monarch_titan.float8.format import Layout
from monarch_titan.float8.launcher import Launcher

logger = logging.getLogger(__name__)


@functools.cache
def implementation(device: torch.device) -> Any:
    """The kernels on a device, or for a CPU the reference, where the package was built without a compiler."""
    if device.type == "cuda":
        launcher = Launcher.on(device)
        logger.info("FP8 operations on %s run the kernels for %s.", device, launcher.architecture)
        return launcher
    if not cpu.LIBRARY.exists():
        logger.warning(
            "FP8 operations run in plain torch, many times slower: %s does not exist, because no C++ compiler was "
            "found when the package was built. `python kernels/build.py` in a checkout builds it.",
            cpu.LIBRARY,
        )
        return reference
    library = cpu.Library()
    logger.info("FP8 operations on the CPU run the kernels for %s.", library.variant)
    return library


def kernels(**tensors: torch.Tensor) -> Any:
    """The implementation on the one device of these arguments."""
    return implementation(checks.check_devices(tensors) if tensors else torch.device("cpu"))


@torch.library.custom_op("monarch_titan::quantize_pack", mutates_args=())
def quantize_pack(x: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    """A wire buffer, uint8 (segments, stride), of a tensor of any shape, cut into as many segments.

    Segment w holds the elements from ``w * ceil(numel / segments)`` on, so rows of a matrix become segments.
    """
    format = checks.quantize_pack(x, segments, element, scale)
    return kernels(x=x).quantize_pack(x.contiguous(), segments, format)


@quantize_pack.register_fake
def _(x: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    format = checks.quantize_pack(x, segments, element, scale)
    return empty_wire(x, Layout(format=format, numel=x.numel(), segments=segments))


@torch.library.custom_op("monarch_titan::quantize_pack_ef", mutates_args=("residual",))
def quantize_pack_ef(
    x: torch.Tensor, residual: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    """The same of ``x + residual``; what the wire does not hold of it becomes the residual, in place.

    Args:
        residual: float32, of the shape of ``x``; zeros before the first round. 0 in blocks that are not finite.
    """
    format = checks.quantize_pack_ef(x, residual, segments, element, scale)
    kept = residual.contiguous()
    wire = kernels(x=x, residual=residual).quantize_pack_ef(x.contiguous(), kept, segments, format)
    write_back(residual, kept)
    return wire


@quantize_pack_ef.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    format = checks.quantize_pack_ef(x, residual, segments, element, scale)
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
    layout = checks.pseudograd_pack(global_params, local_params, residual, segments, element, scale)
    kept = None if residual is None else residual.contiguous()
    operation = kernels(**named(global_params, local_params, residual)).pseudograd_pack
    wire = operation(contiguous(global_params), contiguous(local_params), kept, segments, layout.format)
    write_back(residual, kept)
    return wire


@pseudograd_pack.register_fake
def _(
    global_params: Sequence[torch.Tensor],
    local_params: Sequence[torch.Tensor],
    residual: torch.Tensor | None = None,
    segments: int = 1,
    element: str = "e4m3",
    scale: str = "fp32",
) -> torch.Tensor:
    layout = checks.pseudograd_pack(global_params, local_params, residual, segments, element, scale)
    like = global_params[0] if global_params else torch.empty(0)
    return empty_wire(like, layout)


@torch.library.custom_op("monarch_titan::reduce_segments", mutates_args=())
def reduce_segments(wire: torch.Tensor, numel: int, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    """The sum, float32 (numel,), of one segment from each rank, uint8 (ranks, stride), added in the order of ranks."""
    layout = checks.reduce_segments(wire, numel, element, scale)
    return kernels(wire=wire).reduce_segments(aligned(wire), numel, layout.format)


@reduce_segments.register_fake
def _(wire: torch.Tensor, numel: int, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    checks.reduce_segments(wire, numel, element, scale)
    return wire.new_empty(numel, dtype=torch.float32)


@torch.library.custom_op("monarch_titan::reduce_requant", mutates_args=())
def reduce_requant(wire: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    """The same sum as a segment again: uint8 (ranks, stride) to (stride,)."""
    format = checks.reduce_requant(wire, element, scale)
    return kernels(wire=wire).reduce_requant(aligned(wire), format)


@reduce_requant.register_fake
def _(wire: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> torch.Tensor:
    checks.reduce_requant(wire, element, scale)
    return wire.new_empty(wire.shape[1])


@torch.library.custom_op("monarch_titan::unpack", mutates_args=())
def unpack(
    wire: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    """The flat tensor, float32 or bfloat16 (numel,), of the wire buffer, uint8 (segments, stride), that holds it."""
    layout = checks.unpack(wire, numel, dtype, element, scale)
    return kernels(wire=wire).unpack(aligned(wire), numel, dtype, layout.format)


@unpack.register_fake
def _(
    wire: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32, element: str = "e4m3", scale: str = "fp32"
) -> torch.Tensor:
    checks.unpack(wire, numel, dtype, element, scale)
    return wire.new_empty(numel, dtype=dtype)


@torch.library.custom_op("monarch_titan::quantize_rows", mutates_args=())
def quantize_rows(x: torch.Tensor, element: str = "e4m3") -> torch.Tensor:
    """Rows, uint8 (rows, columns + columns / 32), of a matrix whose columns divide by 128: codes, then fp32 scales."""
    format = checks.quantize_rows(x, element)
    return kernels(x=x).quantize_rows(x.contiguous(), format)


@quantize_rows.register_fake
def _(x: torch.Tensor, element: str = "e4m3") -> torch.Tensor:
    checks.quantize_rows(x, element)
    return x.new_empty(x.shape[0], x.shape[1] + x.shape[1] // 32, dtype=torch.uint8)


@torch.library.custom_op("monarch_titan::dequantize_rows", mutates_args=())
def dequantize_rows(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16, element: str = "e4m3") -> torch.Tensor:
    """The matrix, float32 or bfloat16 (rows, columns), of the rows that :func:`quantize_rows` made."""
    format = checks.dequantize_rows(rows, dtype, element)
    return kernels(rows=rows).dequantize_rows(aligned(rows), dtype, format)


@dequantize_rows.register_fake
def _(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16, element: str = "e4m3") -> torch.Tensor:
    checks.dequantize_rows(rows, dtype, element)
    return rows.new_empty(rows.shape[0], rows.shape[1] // 33 * 32, dtype=dtype)


# Fresh memory costs a large tensor more than the kernels do: on a CPU the system clears every page of it first. These
# write into what the caller keeps.


@torch.library.custom_op("monarch_titan::quantize_pack_out", mutates_args=("out",))
def quantize_pack_out(
    x: torch.Tensor, out: torch.Tensor, segments: int = 1, element: str = "e4m3", scale: str = "fp32"
) -> None:
    """:func:`quantize_pack` into a wire buffer, uint8 (segments, stride)."""
    format = checks.quantize_pack(x, segments, element, scale)
    checks.check_out(out, Layout(format=format, numel=x.numel(), segments=segments).shape, (torch.uint8,))
    write(out, kernels(x=x, out=out).quantize_pack, x.contiguous(), segments, format)


@torch.library.custom_op("monarch_titan::quantize_pack_ef_out", mutates_args=("residual", "out"))
def quantize_pack_ef_out(
    x: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
    segments: int = 1,
    element: str = "e4m3",
    scale: str = "fp32",
) -> None:
    """:func:`quantize_pack_ef` into a wire buffer, uint8 (segments, stride)."""
    format = checks.quantize_pack_ef(x, residual, segments, element, scale)
    checks.check_out(out, Layout(format=format, numel=x.numel(), segments=segments).shape, (torch.uint8,))
    kept = residual.contiguous()
    operation = kernels(x=x, residual=residual, out=out).quantize_pack_ef
    write(out, operation, x.contiguous(), kept, segments, format)
    write_back(residual, kept)


@torch.library.custom_op("monarch_titan::pseudograd_pack_out", mutates_args=("residual", "out"))
def pseudograd_pack_out(
    global_params: Sequence[torch.Tensor],
    local_params: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    out: torch.Tensor,
    segments: int = 1,
    element: str = "e4m3",
    scale: str = "fp32",
) -> None:
    """:func:`pseudograd_pack` into a wire buffer, uint8 (segments, stride)."""
    layout = checks.pseudograd_pack(global_params, local_params, residual, segments, element, scale)
    checks.check_out(out, layout.shape, (torch.uint8,))
    kept = None if residual is None else residual.contiguous()
    operation = kernels(**named(global_params, local_params, residual), out=out).pseudograd_pack
    write(out, operation, contiguous(global_params), contiguous(local_params), kept, segments, layout.format)
    write_back(residual, kept)


@torch.library.custom_op("monarch_titan::reduce_segments_out", mutates_args=("out",))
def reduce_segments_out(wire: torch.Tensor, out: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> None:
    """:func:`reduce_segments` into a tensor of any shape, float32."""
    checks.check_out(out, out.shape, checks.FLOATS[:1])
    format = checks.reduce_segments(wire, out.numel(), element, scale).format
    write(out, kernels(wire=wire, out=out).reduce_segments, aligned(wire), out.numel(), format)


@torch.library.custom_op("monarch_titan::reduce_requant_out", mutates_args=("out",))
def reduce_requant_out(wire: torch.Tensor, out: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> None:
    """:func:`reduce_requant` into a segment, uint8 (stride,)."""
    format = checks.reduce_requant(wire, element, scale)
    checks.check_out(out, wire.shape[1:], (torch.uint8,))
    write(out, kernels(wire=wire, out=out).reduce_requant, aligned(wire), format)


@torch.library.custom_op("monarch_titan::unpack_out", mutates_args=("out",))
def unpack_out(wire: torch.Tensor, out: torch.Tensor, element: str = "e4m3", scale: str = "fp32") -> None:
    """:func:`unpack` into a tensor of any shape, float32 or bfloat16."""
    checks.check_out(out, out.shape, checks.FLOATS)
    format = checks.unpack(wire, out.numel(), out.dtype, element, scale).format
    write(out, kernels(wire=wire, out=out).unpack, aligned(wire), out.numel(), out.dtype, format)


@torch.library.custom_op("monarch_titan::quantize_rows_out", mutates_args=("out",))
def quantize_rows_out(x: torch.Tensor, out: torch.Tensor, element: str = "e4m3") -> None:
    """:func:`quantize_rows` into rows, uint8 (rows, columns + columns / 32)."""
    format = checks.quantize_rows(x, element)
    checks.check_out(out, (x.shape[0], x.shape[1] // 32 * 33), (torch.uint8,))
    write(out, kernels(x=x, out=out).quantize_rows, x.contiguous(), format)


@torch.library.custom_op("monarch_titan::dequantize_rows_out", mutates_args=("out",))
def dequantize_rows_out(rows: torch.Tensor, out: torch.Tensor, element: str = "e4m3") -> None:
    """:func:`dequantize_rows` into a matrix, float32 or bfloat16 (rows, columns)."""
    checks.check_dtype("out", out, checks.FLOATS)
    format = checks.dequantize_rows(rows, out.dtype, element)
    checks.check_out(out, (rows.shape[0], rows.shape[1] // 33 * 32), checks.FLOATS)
    write(out, kernels(rows=rows, out=out).dequantize_rows, aligned(rows), out.dtype, format)


@quantize_pack_out.register_fake
@quantize_pack_ef_out.register_fake
@pseudograd_pack_out.register_fake
@reduce_segments_out.register_fake
@reduce_requant_out.register_fake
@unpack_out.register_fake
@quantize_rows_out.register_fake
@dequantize_rows_out.register_fake
def _(*args: object, **kwargs: object) -> None:
    """Nothing is returned."""


def write(out: torch.Tensor, operation: Callable[..., torch.Tensor], *args: object) -> None:
    """What an operation returns, into ``out``: without a copy where the operation can write there itself."""
    if operation.__module__ == reference.__name__ or aligned(out) is not out:
        out.copy_(operation(*args).view(out.shape))
    else:
        operation(*args, out=out)


def empty_wire(like: torch.Tensor, layout: Layout) -> torch.Tensor:
    return like.new_empty(layout.shape, dtype=torch.uint8)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is contiguous and starts at a multiple of 4 bytes, where a GPU can read words."""
    if tensor.is_contiguous() and tensor.data_ptr() % 4 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def contiguous(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def named(
    global_params: Sequence[torch.Tensor], local_params: Sequence[torch.Tensor], residual: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The tensors of a pseudo-gradient by the names that errors call them."""
    tensors = {f"global_params[{index}]": tensor for index, tensor in enumerate(global_params)}
    tensors |= {f"local_params[{index}]": tensor for index, tensor in enumerate(local_params)}
    return tensors if residual is None else {**tensors, "residual": residual}


def write_back(residual: torch.Tensor | None, kept: torch.Tensor | None) -> None:
    """A residual that had to be copied to be contiguous gets what was written to its copy."""
    if residual is None or kept is None:
        return
    if kept.data_ptr() != residual.data_ptr() or not residual.is_contiguous():
        residual.copy_(kept)
