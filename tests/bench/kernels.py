"""What FP8 operations cost, against torch's own: ``make bench-kernels``, or ``python -m tests.bench.kernels cuda``.

Each operation is timed in turns with three others, so that what disturbs the machine disturbs all of them, and ratios
are taken within a turn: the same in eager torch, as short as one would write it; a bare cast between the dtypes,
without scales; and a copy of an fp32 tensor. The copy's rate, bytes read and written in a second, is what memory gives;
an operation's is that of the bytes that it must read and write (the heads in ``kernels`` say how many). Results are
written into memory that is there already, but for those of eager torch.

On a GPU, events on the stream take the place of a clock. It has not been run on one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from monarch_titan.float8 import ops, reference
from monarch_titan.float8.format import BLOCK, Format
from tests.bench.common import machine, spread

NUMEL = 1 << 25
RANKS = 4
TURNS = 15
FORMAT = Format()
FP8 = reference.DTYPES[FORMAT.element]

Call = Callable[[], object]


@dataclass(kw_only=True, slots=True, frozen=True)
class Case:
    """An operation, what it is compared with, and the bytes that it reads and writes."""

    name: str
    ours: Call
    eager: Call
    cast: Call
    moved: int


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In eager torch, as :func:`dequantize`."""
    blocks = x.view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).float() / FORMAT.max
    return (blocks / scales).to(FP8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (codes.float() * scales).to(dtype)


def one_tensor(x: torch.Tensor, name: str) -> list[Case]:
    wire = ops.quantize_pack(x)
    codes, scales = quantize(x)
    narrow, wide = torch.empty_like(codes), torch.empty_like(x).view(codes.shape)
    moved = x.nbytes + wire.nbytes
    residual, start = torch.zeros_like(x, dtype=torch.float32), x.clone()
    matrix = x.view(-1, 4096)
    rows, matrix_again = ops.quantize_rows(matrix), torch.empty_like(matrix)

    def quantize_with_feedback() -> object:
        wanted = x.view(-1, BLOCK).float() + residual.view(-1, BLOCK)
        codes, scales = quantize(wanted)
        return codes, scales, wanted - dequantize(codes, scales)

    def to_fp8() -> object:
        return narrow.copy_(x.view(codes.shape))

    return [
        Case(
            name=f"quantize_pack, {name}",
            ours=lambda: ops.quantize_pack_out(x, wire),
            eager=lambda: quantize(x),
            cast=to_fp8,
            moved=moved,
        ),
        Case(
            name=f"unpack, {name}",
            ours=lambda: ops.unpack_out(wire, wide),
            eager=lambda: dequantize(codes, scales, x.dtype),
            cast=lambda: wide.copy_(codes),
            moved=moved,
        ),
        Case(
            name=f"quantize_pack_ef, {name}",
            ours=lambda: ops.quantize_pack_ef_out(x, residual, wire),
            eager=quantize_with_feedback,
            cast=to_fp8,
            moved=moved + 2 * residual.nbytes,
        ),
        Case(
            name=f"pseudograd_pack, {name}",
            ours=lambda: ops.pseudograd_pack_out([start], [x], None, wire),
            eager=lambda: quantize(start.float() - x.float()),
            cast=to_fp8,
            moved=moved + x.nbytes,
        ),
        Case(
            name=f"quantize_rows, {name}",
            ours=lambda: ops.quantize_rows_out(matrix, rows),
            eager=lambda: quantize(x),
            cast=to_fp8,
            moved=moved,
        ),
        Case(
            name=f"dequantize_rows, {name}",
            ours=lambda: ops.dequantize_rows_out(rows, matrix_again),
            eager=lambda: dequantize(codes, scales, x.dtype),
            cast=lambda: wide.copy_(codes),
            moved=moved,
        ),
    ]


def all_ranks(x: torch.Tensor) -> list[Case]:
    """The sums, of a wire for each rank: a cast is that of all their codes."""
    wire = ops.quantize_pack(x).repeat(RANKS, 1)
    codes, scales = (part.expand(RANKS, *part.shape).contiguous() for part in quantize(x))
    total, wide = torch.empty_like(x), torch.empty(codes.shape, device=x.device)
    segment = torch.empty_like(wire[0])
    return [
        Case(
            name=f"reduce_segments, {RANKS} ranks",
            ours=lambda: ops.reduce_segments_out(wire, total),
            eager=lambda: dequantize(codes, scales).sum(dim=0),
            cast=lambda: wide.copy_(codes),
            moved=wire.nbytes + total.nbytes,
        ),
        Case(
            name=f"reduce_requant, {RANKS} ranks",
            ours=lambda: ops.reduce_requant_out(wire, segment),
            eager=lambda: quantize(dequantize(codes, scales).sum(dim=0)),
            cast=lambda: wide.copy_(codes),
            moved=wire.nbytes + wire.nbytes // RANKS,
        ),
    ]


def timer(device: str) -> Callable[[Call], float]:
    """A function that measures the seconds of a call."""

    def by_clock(call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def by_events(call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    return by_events if device == "cuda" else by_clock


def measure(case: Case, copy: Call, copied: int, seconds: Callable[[Call], float]) -> str:
    """A row of the table. The first turn, which touches memory and code for the first time, is left out."""
    turns = [[seconds(call) for call in (case.ours, case.eager, case.cast, copy)] for _ in range(1 + TURNS)][1:]
    rate = statistics.median(case.moved / ours for ours, *_ in turns) / 1e9
    eager = spread([eager / ours for ours, eager, _, _ in turns])
    cast = spread([cast / ours for ours, _, cast, _ in turns])
    share = spread([100 * case.moved / ours / (copied / copy) for ours, _, _, copy in turns], digits=0)
    return f"| {case.name} | {rate:.1f} | {share} | {eager} | {cast} |"


def main(device: str) -> None:
    seconds = timer(device)
    x = torch.randn(NUMEL, device=device)
    copied = torch.empty_like(x)
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else machine()}; {torch.get_num_threads()} threads of torch"
    )
    print(f"{NUMEL} elements, {FORMAT.element}, {FORMAT.scale} scales; {TURNS} turns: median (least to most)\n")
    print("| operation | GB/s | % of a copy's rate | eager torch's time | a bare cast's time |\n|---|---|---|---|---|")
    for cases in (
        lambda: one_tensor(x, "f32"),
        lambda: one_tensor(x.bfloat16(), "bf16"),
        lambda: all_ranks(x[: NUMEL // RANKS]),
    ):
        for case in cases():
            row = measure(case, lambda: copied.copy_(x), x.nbytes + copied.nbytes, seconds)
            print(row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["cpu"])
