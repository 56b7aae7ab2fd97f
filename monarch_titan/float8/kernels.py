"""The operations as the kernels are asked for them: results allocated, arguments packed, a kernel launched.

The structures are those of the ``.hip`` file of each operation, field by field, the same on a CPU and on a GPU.
Arguments are taken for valid, tensors for contiguous, aligned and on the device of the kernels; ``ops`` sees to all
of it. A result is written into ``out`` where that is given.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from monarch_titan.float8.format import BLOCK, Format, Layout, flat_numel, offsets

U32, U64, POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Operation(ctypes.Structure):
    """What a kernel is told; the last field of each is the number of blocks."""

    name: ClassVar[str]
    """Of the ``.hip`` file."""
    blocks: int


class Segment(ctypes.Structure):
    _fields_ = (("blocks", U32), ("ue8m0", U32))


class QuantizePack(Operation):
    name = "quantize_pack"
    _fields_ = (
        *(("x", POINTER), ("wire", POINTER), ("numel", U64), ("segment_numel", U64)),
        *(("segment", Segment), ("blocks", U32)),
    )


class QuantizePackEf(Operation):
    name = "quantize_pack_ef"
    _fields_ = (
        *(("x", POINTER), ("residual", POINTER), ("wire", POINTER), ("numel", U64), ("segment_numel", U64)),
        *(("segment", Segment), ("blocks", U32)),
    )


class Span(ctypes.Structure):
    _fields_ = (("global", POINTER), ("local", POINTER), ("numel", U64), ("first_block", U32), ("bf16", U32))


class PseudogradPack(Operation):
    name = "pseudograd_pack"
    _fields_ = (
        *(("spans", POINTER), ("residual", POINTER), ("wire", POINTER)),
        *(("segment", Segment), ("count", U32), ("blocks", U32)),
    )


class ReduceSegments(Operation):
    name = "reduce_segments"
    _fields_ = (
        *(("wire", POINTER), ("out", POINTER), ("numel", U64)),
        *(("segment", Segment), ("ranks", U32), ("blocks", U32)),
    )


class ReduceRequant(Operation):
    name = "reduce_requant"
    _fields_ = (("wire", POINTER), ("out", POINTER), ("segment", Segment), ("ranks", U32), ("blocks", U32))


class Unpack(Operation):
    name = "unpack"
    _fields_ = (
        *(("wire", POINTER), ("out", POINTER), ("numel", U64), ("segment_numel", U64)),
        *(("segment", Segment), ("blocks", U32)),
    )


class QuantizeRows(Operation):
    name = "quantize_rows"
    _fields_ = (("input", POINTER), ("out", POINTER), ("row_blocks", U32), ("blocks", U32))


class DequantizeRows(QuantizeRows):
    name = "dequantize_rows"


class Kernels(ABC):
    """All operations, on the device that a subclass launches kernels on."""

    @abstractmethod
    def launch(self, kernel: str, operation: Operation) -> None:
        """Run a kernel by its name, after what torch was asked before to do on the device."""

    def run(self, operation: Operation, *types: str) -> None:
        """Run the operation's kernel for some types, ``f32``, ``e4m3``."""
        self.launch("_".join((operation.name, *types)), operation)

    def quantize_pack(
        self, x: torch.Tensor, segments: int, format: Format, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout = Layout(format=format, numel=x.numel(), segments=segments)
        wire = x.new_empty(layout.shape, dtype=torch.uint8) if out is None else out
        where = (layout.numel, layout.segment, segment(layout.blocks, format), segments * layout.blocks)
        self.run(QuantizePack(x.data_ptr(), wire.data_ptr(), *where), DTYPES[x.dtype], format.element)
        return wire

    def quantize_pack_ef(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        segments: int,
        format: Format,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout = Layout(format=format, numel=x.numel(), segments=segments)
        wire = x.new_empty(layout.shape, dtype=torch.uint8) if out is None else out
        where = (layout.numel, layout.segment, segment(layout.blocks, format), segments * layout.blocks)
        self.run(
            QuantizePackEf(x.data_ptr(), residual.data_ptr(), wire.data_ptr(), *where), DTYPES[x.dtype], format.element
        )
        return wire

    def pseudograd_pack(
        self,
        global_params: Sequence[torch.Tensor],
        local_params: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        segments: int,
        format: Format,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        numels = [tensor.numel() for tensor in global_params]
        layout = Layout(format=format, numel=flat_numel(numels, segments), segments=segments)
        device = global_params[0].device if global_params else None
        wire = torch.empty(layout.shape, dtype=torch.uint8, device=device) if out is None else out
        spans = (Span * len(numels))(
            *(
                Span(
                    before.data_ptr(), after.data_ptr(), before.numel(), start // BLOCK, before.dtype is torch.bfloat16
                )
                for before, after, start in zip(global_params, local_params, offsets(numels), strict=True)
            )
        )
        # Kernels read the spans where the wire is. (torch makes no tensor of an empty array, and no kernel runs then.)
        table = torch.frombuffer(spans, dtype=torch.uint8).to(wire.device) if numels else None
        pointers = (address(table), address(residual), wire.data_ptr())
        where = (segment(layout.blocks, format), len(spans), segments * layout.blocks)
        self.run(PseudogradPack(*pointers, *where), format.element)
        return wire

    def reduce_segments(
        self, wire: torch.Tensor, numel: int, format: Format, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = wire.new_empty(numel, dtype=torch.float32) if out is None else out
        blocks = Layout(format=format, numel=numel).blocks
        where = (numel, segment(blocks, format), len(wire), blocks)
        self.run(ReduceSegments(wire.data_ptr(), out.data_ptr(), *where), format.element)
        return out

    def reduce_requant(self, wire: torch.Tensor, format: Format, out: torch.Tensor | None = None) -> torch.Tensor:
        out = wire.new_empty(wire.shape[1]) if out is None else out
        blocks = wire.shape[1] // format.block_bytes
        where = (segment(blocks, format), len(wire), blocks)
        self.run(ReduceRequant(wire.data_ptr(), out.data_ptr(), *where), format.element)
        return out

    def unpack(
        self, wire: torch.Tensor, numel: int, dtype: torch.dtype, format: Format, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout = Layout(format=format, numel=numel, segments=len(wire))
        out = wire.new_empty(numel, dtype=dtype) if out is None else out
        where = (numel, layout.segment, segment(layout.blocks, format), len(wire) * layout.blocks)
        self.run(Unpack(wire.data_ptr(), out.data_ptr(), *where), DTYPES[dtype], format.element)
        return out

    def quantize_rows(self, x: torch.Tensor, format: Format, out: torch.Tensor | None = None) -> torch.Tensor:
        rows, columns = x.shape
        out = x.new_empty(rows, columns + columns // 32, dtype=torch.uint8) if out is None else out
        self.run(
            QuantizeRows(x.data_ptr(), out.data_ptr(), columns // BLOCK, rows * columns // BLOCK),
            DTYPES[x.dtype],
            format.element,
        )
        return out

    def dequantize_rows(
        self, raw: torch.Tensor, dtype: torch.dtype, format: Format, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, columns = raw.shape[0], raw.shape[1] // 33 * 32
        out = raw.new_empty(rows, columns, dtype=dtype) if out is None else out
        self.run(
            DequantizeRows(raw.data_ptr(), out.data_ptr(), columns // BLOCK, rows * columns // BLOCK),
            DTYPES[dtype],
            format.element,
        )
        return out


def segment(blocks: int, format: Format) -> Segment:
    return Segment(blocks, format.scale == "ue8m0")


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
