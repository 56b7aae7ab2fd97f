"""The operations on this machine's CPU, by the library that ``kernels/build.py`` builds when the package is.

The structures below are those of the ``.hip`` file of each operation, field by field. Arguments are taken for valid,
tensors for contiguous and on the CPU; ``ops`` sees to both. A result is written into ``out`` where that is given.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from monarch_titan.float8.format import BLOCK, Format, Layout, flat_numel, offsets

LIBRARY = Path(__file__).parent / "lib" / "libmonarch_titan_cpu.so"

U32, U64, POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Operation(ctypes.Structure):
    """What a kernel is told; the last field of each is the number of blocks."""


class Segment(ctypes.Structure):
    _fields_ = (("blocks", U32), ("ue8m0", U32))


class QuantizePack(Operation):
    _fields_ = (
        *(("x", POINTER), ("wire", POINTER), ("numel", U64), ("segment_numel", U64)),
        *(("segment", Segment), ("blocks", U32)),
    )


class QuantizePackEf(Operation):
    _fields_ = (
        *(("x", POINTER), ("residual", POINTER), ("wire", POINTER), ("numel", U64), ("segment_numel", U64)),
        *(("segment", Segment), ("blocks", U32)),
    )


class Span(ctypes.Structure):
    _fields_ = (("global", POINTER), ("local", POINTER), ("numel", U64), ("first_block", U32), ("bf16", U32))


class PseudogradPack(Operation):
    _fields_ = (
        *(("spans", POINTER), ("residual", POINTER), ("wire", POINTER)),
        *(("segment", Segment), ("count", U32), ("blocks", U32)),
    )


class ReduceSegments(Operation):
    _fields_ = (
        *(("wire", POINTER), ("out", POINTER), ("numel", U64)),
        *(("segment", Segment), ("ranks", U32), ("blocks", U32)),
    )


class ReduceRequant(Operation):
    _fields_ = (("wire", POINTER), ("out", POINTER), ("segment", Segment), ("ranks", U32), ("blocks", U32))


class Unpack(Operation):
    _fields_ = (
        *(("wire", POINTER), ("out", POINTER), ("numel", U64), ("segment_numel", U64)),
        *(("segment", Segment), ("blocks", U32)),
    )


class Rows(Operation):
    """Of quantize_rows and dequantize_rows both."""

    _fields_ = (("input", POINTER), ("out", POINTER), ("row_blocks", U32), ("blocks", U32))


class Library:
    """The kernels for one instruction set: ``avx512``, ``avx2`` or ``portable``, by default the best there is.

    Raises OSError where the library was not built, AttributeError for a variant that it lacks.
    """

    def __init__(self, variant: str | None = None) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        self.library.mt_best_variant.restype = ctypes.c_char_p
        self.library.mt_launch.argtypes = (POINTER, POINTER, U32, U32)
        self.library.mt_launch.restype = None
        self.variant = variant or self.library.mt_best_variant().decode()
        self.kernel("reduce_segments_e4m3")

    @functools.cache  # noqa: B019 (there are a few libraries in a process, for as long as it lives)
    def kernel(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, f"{self.variant}_{name}"), POINTER).value or 0

    def launch(self, name: str, operation: Operation) -> None:
        """Run a kernel on as many threads as torch would use, and return when it is done."""
        kernel, blocks = self.kernel(name), operation.blocks
        self.library.mt_launch(kernel, ctypes.byref(operation), blocks, torch.get_num_threads())

    def quantize_pack(
        self, x: torch.Tensor, segments: int, format: Format, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout = Layout(format=format, numel=x.numel(), segments=segments)
        wire = torch.empty(layout.shape, dtype=torch.uint8) if out is None else out
        where = (layout.numel, layout.segment, segment(layout.blocks, format), segments * layout.blocks)
        name = f"quantize_pack_{DTYPES[x.dtype]}_{format.element}"
        self.launch(name, QuantizePack(x.data_ptr(), wire.data_ptr(), *where))
        return wire

    def quantize_pack_ef(self, x: torch.Tensor, residual: torch.Tensor, segments: int, format: Format) -> torch.Tensor:
        layout = Layout(format=format, numel=x.numel(), segments=segments)
        wire = torch.empty(layout.shape, dtype=torch.uint8)
        where = (layout.numel, layout.segment, segment(layout.blocks, format), segments * layout.blocks)
        name = f"quantize_pack_ef_{DTYPES[x.dtype]}_{format.element}"
        self.launch(name, QuantizePackEf(x.data_ptr(), residual.data_ptr(), wire.data_ptr(), *where))
        return wire

    def pseudograd_pack(
        self,
        global_params: Sequence[torch.Tensor],
        local_params: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        segments: int,
        format: Format,
    ) -> torch.Tensor:
        numels = [tensor.numel() for tensor in global_params]
        layout = Layout(format=format, numel=flat_numel(numels, segments), segments=segments)
        wire = torch.empty(layout.shape, dtype=torch.uint8)
        spans = (Span * len(numels))(
            *(
                Span(
                    before.data_ptr(), after.data_ptr(), before.numel(), start // BLOCK, before.dtype is torch.bfloat16
                )
                for before, after, start in zip(global_params, local_params, offsets(numels), strict=True)
            )
        )
        pointers = (ctypes.addressof(spans), None if residual is None else residual.data_ptr(), wire.data_ptr())
        where = (segment(layout.blocks, format), len(spans), segments * layout.blocks)
        self.launch(f"pseudograd_pack_{format.element}", PseudogradPack(*pointers, *where))
        return wire

    def reduce_segments(
        self, wire: torch.Tensor, numel: int, format: Format, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty(numel) if out is None else out
        blocks = Layout(format=format, numel=numel).blocks
        where = (numel, segment(blocks, format), len(wire), blocks)
        self.launch(f"reduce_segments_{format.element}", ReduceSegments(wire.data_ptr(), out.data_ptr(), *where))
        return out

    def reduce_requant(self, wire: torch.Tensor, format: Format) -> torch.Tensor:
        out = torch.empty(wire.shape[1], dtype=torch.uint8)
        blocks = wire.shape[1] // format.block_bytes
        where = (segment(blocks, format), len(wire), blocks)
        self.launch(f"reduce_requant_{format.element}", ReduceRequant(wire.data_ptr(), out.data_ptr(), *where))
        return out

    def unpack(
        self, wire: torch.Tensor, numel: int, dtype: torch.dtype, format: Format, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        layout = Layout(format=format, numel=numel, segments=len(wire))
        out = torch.empty(numel, dtype=dtype) if out is None else out
        where = (numel, layout.segment, segment(layout.blocks, format), len(wire) * layout.blocks)
        name = f"unpack_{DTYPES[dtype]}_{format.element}"
        self.launch(name, Unpack(wire.data_ptr(), out.data_ptr(), *where))
        return out

    def quantize_rows(self, x: torch.Tensor, format: Format) -> torch.Tensor:
        rows, columns = x.shape
        out = torch.empty(rows, columns + columns // 32, dtype=torch.uint8)
        name = f"quantize_rows_{DTYPES[x.dtype]}_{format.element}"
        self.launch(name, Rows(x.data_ptr(), out.data_ptr(), columns // BLOCK, rows * columns // BLOCK))
        return out

    def dequantize_rows(self, raw: torch.Tensor, dtype: torch.dtype, format: Format) -> torch.Tensor:
        rows, columns = raw.shape[0], raw.shape[1] // 33 * 32
        out = torch.empty(rows, columns, dtype=dtype)
        name = f"dequantize_rows_{DTYPES[dtype]}_{format.element}"
        self.launch(name, Rows(raw.data_ptr(), out.data_ptr(), columns // BLOCK, rows * columns // BLOCK))
        return out


def segment(blocks: int, format: Format) -> Segment:
    return Segment(blocks, format.scale == "ue8m0")
