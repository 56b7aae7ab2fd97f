"""What an argument of an operation must be; a ValueError names the one that is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from monarch_titan.float8.format import BLOCK, Format, Layout, flat_numel

FLOATS = (torch.float32, torch.bfloat16)


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(dtype_name, dtypes))}, got {dtype_name(tensor.dtype)}.")


def check_out(out: torch.Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    check_dtype("out", out, dtypes)
    if out.shape != tuple(shape):
        raise ValueError(f"out must have the shape {tuple(shape)}, got {tuple(out.shape)}.")


def check_output(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be {' or '.join(map(dtype_name, FLOATS))}, got {dtype_name(dtype)}.")


def check_devices(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """The device that all arguments, by name, are on: a CPU or a GPU, which torch calls cuda under ROCm too."""
    (first, tensor), *others = tensors.items()
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{first} must be on a CPU, or a GPU of CUDA or ROCm, got {device}.")
    for name, other in others:
        if other.device != device:
            raise ValueError(f"{name} must be on the device of {first}, {device}, got {other.device}.")
    return device


def check_segments(segments: int) -> None:
    if segments < 1:
        raise ValueError(f"segments must be at least 1, got {segments}.")


def check_wire(wire: torch.Tensor, layout: Layout, rows: str) -> None:
    check_dtype("wire", wire, (torch.uint8,))
    if wire.ndim != 2 or wire.shape[0] < 1 or wire.shape[1] != layout.stride:
        wanted = f"({rows}, {layout.stride}) for {layout.segment} elements a segment"
        raise ValueError(f"wire must have the shape {wanted}, got {tuple(wire.shape)}.")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Of an operation's arguments each, real or without data. They return what the arguments say of the wire.


def quantize_pack(x: torch.Tensor, segments: int, element: str, scale: str) -> Format:
    check_dtype("x", x, FLOATS)
    check_segments(segments)
    return Format(element=element, scale=scale)


def quantize_pack_ef(x: torch.Tensor, residual: torch.Tensor, segments: int, element: str, scale: str) -> Format:
    check_dtype("residual", residual, FLOATS[:1])
    if residual.shape != x.shape:
        raise ValueError(f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}.")
    return quantize_pack(x, segments, element, scale)


def pseudograd_pack(
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


def reduce_segments(wire: torch.Tensor, numel: int, element: str, scale: str) -> Layout:
    layout = Layout(format=Format(element=element, scale=scale), numel=numel)
    check_wire(wire, layout, "ranks")
    return layout


def reduce_requant(wire: torch.Tensor, element: str, scale: str) -> Format:
    format = Format(element=element, scale=scale)
    check_dtype("wire", wire, (torch.uint8,))
    if wire.ndim != 2 or format.blocks(wire.shape[1]) is None:
        wanted = f"(ranks, stride), where a stride of whole blocks of {format.block_bytes} bytes is padded to 16"
        raise ValueError(f"wire must have the shape {wanted}, got {tuple(wire.shape)}.")
    return format


def unpack(wire: torch.Tensor, numel: int, dtype: torch.dtype, element: str, scale: str) -> Layout:
    check_output(dtype)
    segments = wire.shape[0] if wire.ndim else 0
    layout = Layout(format=Format(element=element, scale=scale), numel=numel, segments=max(segments, 1))
    check_wire(wire, layout, "segments")
    return layout


def quantize_rows(x: torch.Tensor, element: str) -> Format:
    check_dtype("x", x, FLOATS)
    if x.ndim != 2 or x.shape[1] % BLOCK:
        raise ValueError(f"x must have the shape (rows, a multiple of {BLOCK}), got {tuple(x.shape)}.")
    return Format(element=element)


def dequantize_rows(rows: torch.Tensor, dtype: torch.dtype, element: str) -> Format:
    check_output(dtype)
    check_dtype("rows", rows, (torch.uint8,))
    row_block = BLOCK + 4
    if rows.ndim != 2 or rows.shape[1] % row_block:
        raise ValueError(f"rows must have the shape (rows, a multiple of {row_block}), got {tuple(rows.shape)}.")
    return Format(element=element)
