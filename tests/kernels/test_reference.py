"""The reference against the definitions of the formats, one property a test."""

from __future__ import annotations

import math

import pytest
import torch

from monarch_titan.float8 import format as wire_format
from monarch_titan.float8 import reference
from monarch_titan.float8.format import BLOCK, Format, Layout
from tests.kernels.inputs import FORMATS, LENGTHS, SPECIAL, every_bf16, same, special_blocks, spread

E4M3, E5M2 = Format(element="e4m3"), Format(element="e5m2")
BITS = {"e4m3": (3, 7), "e5m2": (2, 15)}
"""Of the mantissa, and the exponent's bias."""


def value_of(code: int, element: str) -> float:
    """What OCP's specification says a byte means."""
    mantissa_bits, bias = BITS[element]
    sign, exponent, mantissa = code >> 7, code >> mantissa_bits & (0x7F >> mantissa_bits), code % (1 << mantissa_bits)
    if element == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if element == "e5m2" and exponent == 31:
        return math.nan if mantissa else (-math.inf if sign else math.inf)
    significand = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return math.copysign(significand * 2.0 ** (max(exponent, 1) - bias), -1 if sign else 1)


def finite_codes(format: Format) -> torch.Tensor:
    """All that a wire may hold, in order of value within each sign."""
    codes = torch.arange(256).to(torch.uint8)
    return codes[reference.decode(codes, format).isfinite() & (codes != reference.NEGATIVE_ZERO)]


def nearest(values: torch.Tensor, format: Format) -> torch.Tensor:
    """Codes found by looking at all of them: the nearest value, of two the even code."""
    positive = finite_codes(format)
    positive = positive[positive < 0x80]
    grid = reference.decode(positive, format).double()
    distance = (values.abs().double().unsqueeze(1) - grid).abs()
    tie = distance == distance.amin(dim=1, keepdim=True)
    odd = (positive & 1).double()
    codes = positive[torch.where(tie, odd, 2.0).argmin(dim=1)]
    return torch.where((values < 0) & (codes > 0), codes | 0x80, codes)


@pytest.mark.parametrize("element", BITS)
def test_all_codes_mean_what_the_specification_says(element):
    meant = torch.tensor([value_of(code, element) for code in range(256)])
    same(reference.decode(torch.arange(256).to(torch.uint8), Format(element=element)), meant)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.element)
def test_codes_come_back(format):
    codes = finite_codes(format)
    same(reference.encode(reference.decode(codes, format), format), codes)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.element)
def test_fnuz_writes_and_reads_the_same_bytes(format):
    codes = finite_codes(format)
    same(reference.decode_fnuz(codes, format), reference.decode(codes, format))
    values = torch.cat([every_bf16(), spread(1 << 16, seed=1)])
    values = values[values.abs() <= format.max]
    same(reference.encode_fnuz(values, format), reference.encode(values, format))


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.element)
def test_encoding_rounds_to_nearest_even(format):
    grid = reference.decode(finite_codes(format), format).sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    values = torch.cat(
        [grid, ties, ties.nextafter(torch.tensor(9e9)), ties.nextafter(torch.tensor(-9e9)), every_bf16()]
    )
    values = values[values.abs() <= format.max]
    same(reference.encode(values, format), nearest(values, format))


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("segments", [1, 3, 64])
@pytest.mark.parametrize("numel", LENGTHS)
def test_layout_and_error(numel, segments, format):
    x = spread(numel, seed=numel)
    wire = reference.quantize_pack(x, segments, format)
    layout = Layout(format=format, numel=numel, segments=segments)
    assert wire.shape == layout.shape and layout.stride % 16 == 0
    assert format.blocks(layout.stride) == layout.blocks
    back = reference.unpack(wire, numel, torch.float32, format)
    amax = reference.split(x, layout).abs().amax(dim=1, keepdim=True).repeat(1, BLOCK)
    mantissa_bits, bias = BITS[format.element]
    step = 2.0 ** (1 - bias - mantissa_bits) / format.max * (2 if format.scale == "ue8m0" else 1)
    bound = torch.maximum(x.abs() * 2.0 ** -(mantissa_bits + 1), reference.join(amax, layout) * step / 2) * (1 + 1e-5)
    assert ((back - x).abs() <= bound).all()


def test_offsets_keep_blocks_apart():
    assert wire_format.offsets([1, 0, 128, 129]) == [0, 128, 128, 256]
    assert wire_format.flat_numel([1, 0, 128, 129], segments=3) == 6 * BLOCK
    assert wire_format.flat_numel([], segments=3) == 0


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_special_blocks(format, dtype):
    x = special_blocks(dtype)
    wire = reference.quantize_pack(x, 1, format)
    codes, scales = reference.read_segments(wire, format)
    back = reference.unpack(wire, x.numel(), torch.float32, format)
    poisoned = ~x.float().view(-1, BLOCK).isfinite().all(dim=1)
    names = [name for special in SPECIAL for name in (special, "plain")]
    for name, code, scale, values, poison in zip(names, codes, scales, back.view(-1, BLOCK), poisoned, strict=True):
        assert bool(scale.isnan()) == bool(poison) == bool(values.isnan().all()), name
        overflows = format.scale == "ue8m0" and "max finite" in name  # rounded up, past the end of fp32's range
        assert poison or overflows or values.isfinite().all(), name
        assert not (code == reference.NEGATIVE_ZERO).any(), name
        if name in ("zeros", "negative zero"):
            assert scale == 1 and not code.any(), name


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_error_feedback_makes_up_for_what_was_lost(format):
    x, rounds = torch.randn(4097, generator=torch.Generator().manual_seed(0)), 50
    residual, sent, plain = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(rounds):
        sent += reference.unpack(reference.quantize_pack_ef(x, residual, 3, format), 4097, torch.float32, format)
        plain += reference.unpack(reference.quantize_pack(x, 3, format), 4097, torch.float32, format)
    error = (sent - rounds * x).norm() / (rounds * x).norm()
    assert error < 0.1 * (plain - rounds * x).norm() / (rounds * x).norm()
    if format == E4M3:
        assert error < 0.001


def test_reduction_is_the_sum_of_what_is_unpacked():
    segments = [spread(300, seed) for seed in range(5)]
    wire = torch.cat([reference.quantize_pack(x, 1, E4M3) for x in segments])
    total = torch.zeros(300)
    for segment in wire:
        total += reference.unpack(segment.unsqueeze(0), 300, torch.float32, E4M3)
    same(reference.reduce_segments(wire, 300, E4M3), total)
    same(reference.reduce_requant(wire, E4M3), reference.quantize_pack(total, 1, E4M3).flatten())


def test_rows_are_blocks_too():
    x = spread(5 * 256, seed=3).view(5, 256)
    raw = reference.quantize_rows(x, E4M3)
    assert raw.shape == (5, 256 + 8)
    back = reference.unpack(reference.quantize_pack(x, 1, E4M3), x.numel(), torch.bfloat16, E4M3)
    same(reference.dequantize_rows(raw, torch.bfloat16, E4M3), back.view(5, 256))


def test_error_of_one_pass_and_of_an_all_reduce():
    def error(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        return (ours - exact).norm() / exact.norm()

    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert error(reference.unpack(reference.quantize_pack(x, 4, E4M3), x.numel(), torch.float32, E4M3), x) < 0.030
    ranks = [x.roll(rank) for rank in range(4)]
    wires = torch.stack([reference.quantize_pack(rank, 4, E4M3) for rank in ranks])
    reduced = torch.stack([reference.reduce_requant(wires[:, segment].contiguous(), E4M3) for segment in range(4)])
    total = reference.unpack(reduced, x.numel(), torch.float32, E4M3)
    assert error(total, torch.stack(ranks).sum(dim=0)) < 0.042


@pytest.mark.parametrize("keys", [{"element": "e3m4"}, {"scale": "fp16"}])
def test_unknown_formats_are_named(keys):
    with pytest.raises(ValueError, match=f"{next(iter(keys))} must be one of"):
        Format(**keys)
