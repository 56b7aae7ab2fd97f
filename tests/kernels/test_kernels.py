"""The kernels give the bytes of the reference.

Compiled for this CPU: every variant that this machine runs. And compiled as they are for a GPU, with fibers for its
threads: in the flavours of both AMD architectures, so that their wires are the same, too."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monarch_titan.float8 import cpu, reference
from monarch_titan.float8.cpu import Library
from monarch_titan.float8.format import BLOCK, Format, flat_numel
from tests.kernels.builds import FLAVOURS, Fibers
from tests.kernels.inputs import FORMATS, LENGTHS, every_bf16, same, special_blocks, spread

FLAGS = {"portable": set(), "avx2": {"avx2", "fma", "bmi2"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
DTYPES = [torch.float32, torch.bfloat16]


def runs(variant: str) -> bool:
    cpu = Path("/proc/cpuinfo")
    return FLAGS[variant] <= set(cpu.read_text().split() if cpu.exists() else [])


pytestmark = pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.element}-{format.scale}")


CPU_VARIANTS = [variant for variant in FLAGS if runs(variant)]


@pytest.fixture(params=[*CPU_VARIANTS, *(f"fibers_{flavour}" for flavour in FLAVOURS)])
def library(request: pytest.FixtureRequest) -> Library:
    if request.param in CPU_VARIANTS:
        return request.getfixturevalue("cpu_variants")[request.param]
    return request.getfixturevalue("gpu_flavours")[request.param]


@pytest.fixture(scope="module")
def cpu_variants() -> dict[str, Library]:
    if not cpu.LIBRARY.exists():
        pytest.skip("there is no C++ compiler to build the library with")
    return {variant: Library(variant) for variant in CPU_VARIANTS}


@pytest.fixture(scope="module")
def gpu_flavours(fibers_folder: Path) -> dict[str, Library]:
    return {f"fibers_{flavour}": Fibers(fibers_folder, flavour) for flavour in FLAVOURS}


@functools.cache
def expected(make: Callable[..., torch.Tensor], *args: object) -> list[torch.Tensor]:
    """What the reference makes of an input: computed once for all variants. The last two are segments and format."""
    *args, segments, format = args
    x = make(*args)
    wire = reference.quantize_pack(x, segments, format)
    return [x, wire, *(reference.unpack(wire, x.numel(), dtype, format) for dtype in DTYPES)]


def compare(library: Library, segments: int, format: Format, make: Callable[..., torch.Tensor], *args: object) -> None:
    """There and back, in both output types."""
    x, wire, *back = expected(make, *args, segments, format)
    same(library.quantize_pack(x, segments, format), wire)
    for dtype, values in zip(DTYPES, back, strict=True):
        same(library.unpack(wire, x.numel(), dtype, format), values)


def with_scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """The values, 127 a block, each block led by an element that sets its scale."""
    rows = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    return torch.cat([torch.full((len(rows), 1), largest), rows], dim=1).flatten()


def every_bf16_up_to(largest: float, dtype: torch.dtype) -> torch.Tensor:
    values = every_bf16()
    return with_scale(values[values.abs() <= largest], largest).to(dtype)


def ties(largest: float, element: str) -> torch.Tensor:
    """The values midway between two codes, and their neighbours on both sides."""
    grid = reference.decode(torch.arange(256).to(torch.uint8), Format(element=element))
    grid = grid[grid.isfinite()].sort().values
    middle = (grid[1:] + grid[:-1]) / 2
    limits = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return with_scale(torch.cat([middle, *map(middle.nextafter, limits)]), largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("largest", [448.0, 3.5, 1e30, 1e-30, 2.0**-120, 2.0**-140])
def test_every_bf16_for_fixed_scales(library, format, dtype, largest):
    compare(library, 1, format, every_bf16_up_to, largest, dtype)


def test_every_bf16_as_it_comes(library, format):
    """In their order: neighbours share a block, which is poisoned where NaN and Inf begin."""
    compare(library, 1, format, every_bf16)
    compare(library, 3, format, every_bf16)


def test_every_code_is_read(library, format):
    """All codes that a wire may hold, under scales of every size; those it may not hold mean nothing."""
    codes = torch.arange(256).to(torch.uint8)
    held = reference.decode(codes, format).isfinite() & (codes != reference.NEGATIVE_ZERO)
    codes = codes.where(held, 0).view(2, BLOCK)
    scales = torch.exp2(torch.arange(-126.0, 118.0))
    if format.scale == "fp32":
        scales = scales * torch.linspace(1, 1.999, len(scales))
    scales = torch.cat([scales, torch.tensor([torch.nan])]).repeat_interleave(2)
    wire = reference.write_segments(codes.repeat(len(scales) // 2, 1), scales, 1, format)
    for dtype in DTYPES:
        numel = len(scales) * BLOCK
        same(library.unpack(wire, numel, dtype, format), reference.unpack(wire, numel, dtype, format))


def test_ties_are_rounded_to_even(library, format):
    compare(library, 1, format, ties, format.max, format.element)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_blocks(library, format, dtype):
    compare(library, 1, format, special_blocks, dtype)
    x, residual = special_blocks(dtype), spread(special_blocks(dtype).numel(), seed=1)
    ours, theirs = residual.clone(), residual.clone()
    wire = reference.quantize_pack_ef(x, theirs, 1, format)
    same(library.quantize_pack_ef(x, ours, 1, format), wire)
    same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("segments", [1, 2, 3, 7, 64])
def test_any_length_and_number_of_segments(library, format, dtype, numel, segments):
    x = spread(numel, numel + segments, dtype)
    compare(library, segments, format, spread, numel, numel + segments, dtype)
    ours, theirs = spread(numel, seed=2), spread(numel, seed=2)
    wire = reference.quantize_pack_ef(x, theirs, segments, format)
    same(library.quantize_pack_ef(x, ours, segments, format), wire)
    same(ours, theirs)


@functools.cache
def expected_sum(numel: int, ranks: int, format: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wire = torch.cat([reference.quantize_pack(spread(numel, seed=rank), 1, format) for rank in range(ranks)])
    return wire, reference.reduce_segments(wire, numel, format), reference.reduce_requant(wire, format)


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_reductions(library, format, ranks, numel):
    wire, total, segment = expected_sum(numel, ranks, format)
    same(library.reduce_segments(wire, numel, format), total)
    same(library.reduce_requant(wire, format), segment)


@pytest.mark.parametrize("ranks", range(1, 65))
def test_every_number_of_ranks(library, format, ranks):
    """All of an all-reduce: a segment for each rank, sums of what all sent, and the tensor of all sums."""
    wire, totals, back = expected_all_reduce(ranks, format)
    same(library.quantize_pack(spread(1000, seed=ranks), ranks, format), wire)
    received = wire.repeat_interleave(2, dim=0).view(ranks, 2, -1)
    reduced = torch.stack([library.reduce_requant(pair, format) for pair in received])
    same(reduced, totals)
    same(library.unpack(reduced, 1000, torch.float32, format), back)


@functools.cache
def expected_all_reduce(ranks: int, format: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wire = reference.quantize_pack(spread(1000, seed=ranks), ranks, format)
    totals = torch.stack([reference.reduce_requant(torch.stack([segment, segment]), format) for segment in wire])
    return wire, totals, reference.unpack(totals, 1000, torch.float32, format)


def test_one_poisoned_rank_poisons_one_block_of_the_sum(library, format):
    tensors = [spread(5 * BLOCK, seed=rank) for rank in range(4)]
    tensors[2][3 * BLOCK + 17] = torch.inf
    wire = torch.cat([library.quantize_pack(x, 1, format) for x in tensors])
    total = library.reduce_segments(wire, 5 * BLOCK, format).view(5, BLOCK)
    assert total.isnan().all(dim=1).tolist() == total.isnan().any(dim=1).tolist() == [False, False, False, True, False]
    again = library.unpack(library.reduce_requant(wire, format).unsqueeze(0), 5 * BLOCK, torch.float32, format)
    assert torch.equal(again.view(5, BLOCK).isnan(), total.isnan())


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("segments", [1, 3, 64])
@pytest.mark.parametrize("numels", [[], [0], [1], [0, 129, 0, 128, 1, 4097, 0]], ids=str)
def test_many_parameters_in_one_buffer(library, format, numels, segments, feedback):
    dtypes = [DTYPES[index % 2] for index in range(len(numels))]
    before = [spread(numel, seed=1, dtype=dtype) for numel, dtype in zip(numels, dtypes, strict=True)]
    after = [spread(numel, seed=2, dtype=dtype) for numel, dtype in zip(numels, dtypes, strict=True)]
    flat = flat_numel(numels, segments)
    ours, theirs = (spread(flat, seed=3) if feedback else None for _ in range(2))
    wire = reference.pseudograd_pack(before, after, theirs, segments, format)
    same(library.pseudograd_pack(before, after, ours, segments, format), wire)
    if feedback:
        same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (7, 384), (3, 7168), (4, 0)], ids=str)
def test_rows(library, format, dtype, shape):
    x = spread(shape[0] * shape[1], seed=5, dtype=dtype).view(shape)
    raw = reference.quantize_rows(x, Format(element=format.element))
    same(library.quantize_rows(x, format), raw)
    same(
        library.dequantize_rows(raw, dtype, format),
        reference.dequantize_rows(raw, dtype, Format(element=format.element)),
    )


@pytest.mark.parametrize("library", CPU_VARIANTS, indirect=True)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_the_number_of_threads_changes_nothing(library, format, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(library, 5, format, spread, 1 << 19, 7)
    finally:
        torch.set_num_threads(before)


WITHOUT_TORCH = """
import ctypes, pathlib, struct, sys
_, library, kernel, folder, numel, blocks, stride = sys.argv
numel, blocks, stride = int(numel), int(blocks), int(stride)
x = ctypes.create_string_buffer(pathlib.Path(folder, "x").read_bytes())
wire = ctypes.create_string_buffer(stride)
operation = struct.pack("PPQQIII", ctypes.addressof(x), ctypes.addressof(wire), numel, numel, blocks, UE8M0, blocks)
library = ctypes.CDLL(library)
library.mt_launch(ctypes.cast(library[kernel], ctypes.c_void_p), operation, blocks, 3)
pathlib.Path(folder, "wire").write_bytes(wire.raw)
assert "torch" not in sys.modules and "libgomp" not in pathlib.Path("/proc/self/maps").read_text()
"""


@pytest.mark.parametrize("variant", CPU_VARIANTS)
def test_threads_without_torch(cpu_variants, format, variant, tmp_path):
    """Where there is no OpenMP to lend its own."""
    x = spread(1 << 19, seed=8)
    wire = cpu_variants[variant].quantize_pack(x, 1, format)
    (tmp_path / "x").write_bytes(x.numpy().tobytes())
    script = WITHOUT_TORCH.replace("UE8M0", str(int(format.scale == "ue8m0")))
    arguments = (cpu.LIBRARY, f"{variant}_quantize_pack_f32_{format.element}", tmp_path, x.numel(), x.numel() // BLOCK)
    subprocess.run([sys.executable, "-c", script, *map(str, arguments), str(wire.numel())], check=True)
    assert (tmp_path / "wire").read_bytes() == wire.numpy().tobytes()
