"""What an argument of an operation must be; a ValueError names the one that is not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monarch_titan.float8.format import Layout

FLOATS = (torch.float32, torch.bfloat16)


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(dtype_name, dtypes))}, got {dtype_name(tensor.dtype)}.")


def check_out(out: torch.Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    check_dtype("out", out, dtypes)
    check_device("out", out)
    if out.shape != tuple(shape):
        raise ValueError(f"out must have the shape {tuple(shape)}, got {tuple(out.shape)}.")


def check_output(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be {' or '.join(map(dtype_name, FLOATS))}, got {dtype_name(dtype)}.")


def check_device(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, the only device with FP8 kernels yet, got {tensor.device}.")


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
