"""What stands for a GPU in tests: fibers that find threads which part, and the conversion instructions."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from monarch_titan.float8 import reference
from monarch_titan.float8.cpu import POINTER, U32, Operation
from monarch_titan.float8.format import ELEMENTS
from tests.kernels.builds import FLAVOURS, HERE, KERNELS, Divergence, Fibers
from tests.kernels.inputs import every_bf16, same, spread

DTYPES = {"ocp": reference.DTYPES, "fnuz": reference.FNUZ_DTYPES}
LARGEST = {"ocp": ELEMENTS, "fnuz": {"e4m3": 240.0, "e5m2": 57344.0}}
ALL_CODES = torch.arange(256).to(torch.uint8)


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fibers(fibers_folder, flavour: str) -> Fibers:
    return Fibers(fibers_folder, flavour)


@pytest.mark.parametrize("element", ELEMENTS)
def test_all_codes_are_converted_both_ways(fibers, flavour, element):
    """As torch does, which knows both flavours."""
    values = ALL_CODES.view(DTYPES[flavour][element]).float()
    same(fibers.decode(ALL_CODES, element), values)
    finite = values.isfinite()
    same(fibers.encode(values[finite], element), ALL_CODES[finite])


@pytest.mark.parametrize("element", ELEMENTS)
def test_all_values_are_rounded_to_nearest_even(fibers, flavour, element):
    grid = ALL_CODES.view(DTYPES[flavour][element]).float()
    grid = grid[grid.isfinite()].sort().values
    ties = (grid[1:] + grid[:-1]) / 2
    neighbours = [ties.nextafter(torch.tensor(limit)) for limit in (math.inf, -math.inf)]
    values = torch.cat([ties, *neighbours, every_bf16(), spread(4096, seed=1)])
    values = values[values.abs() <= LARGEST[flavour][element]]
    same(fibers.encode(values, element), values.to(DTYPES[flavour][element]).view(torch.uint8))


@pytest.mark.parametrize("element", ELEMENTS)
def test_what_is_out_of_range_is_no_number(fibers, flavour, element):
    largest = LARGEST[flavour][element]
    values = torch.tensor([2.0 * largest, -2.0 * largest, math.inf, math.nan])
    assert fibers.decode(fibers.encode(values, element), element).isnan().all()


@pytest.mark.parametrize("element", ELEMENTS)
def test_both_flavours_mean_the_same_by_all_codes(fibers_folder, element):
    """That the wire may hold: OCP's value is twice FNUZ's, and half of it is written as the same byte."""
    ocp, fnuz = (Fibers(fibers_folder, flavour) for flavour in FLAVOURS)
    values = ocp.decode(ALL_CODES, element)
    held = values.isfinite() & (ALL_CODES != reference.NEGATIVE_ZERO)
    same(fnuz.decode(ALL_CODES[held], element) * 2, values[held])
    same(fnuz.encode(values[held] / 2, element), ocp.encode(values[held], element))


class Diverging(Operation):
    _fields_ = (("out", POINTER), ("kind", U32), ("blocks", U32))


KINDS = {
    "kLaneLeaves": "lane 0 of team 0 waits in a team operation at fibers.cpp:{0}, lane 5 of team 0 has left the kernel",
    "kTwoLines": "lane 0 of team 0 waits in a team operation at fibers.cpp:{1}, "
    "lane 1 of team 0 waits in a team operation at fibers.cpp:{0}",
    "kTwoCopies": "lane 0 of team 0 waits in a team operation at block.h:{0}, "
    "lane 3 of team 0 waits in a team operation at block.h:{0}",
    "kBarrierSkipped": "lane 0 of team 0 waits in a barrier at fibers.cpp:{0}, lane 0 of team 7 has left the kernel",
    "kBarrierAndTeam": "lane 0 of team 0 waits in a team operation at fibers.cpp:{1}, "
    "lane 2 of team 0 waits in a barrier at fibers.cpp:{0}",
    "kTwoBarriers": "lane 0 of team 0 waits in a barrier at fibers.cpp:{1}, "
    "lane 0 of team 3 waits in a barrier at fibers.cpp:{0}",
}
"""What is said of each kernel of fibers.cpp, with the lines of its calls."""


def run_diverging(fibers: Fibers, kind: int) -> list[int]:
    out = (ctypes.c_uint32 * 512)()
    fibers.launch("diverging", Diverging(ctypes.addressof(out), kind, 64))
    return list(out)


def test_threads_that_stay_together_get_their_results(fibers):
    largest = [lane // 8 * 8 + 7 if lane // 8 % 2 else 0 for lane in range(256)]
    assert run_diverging(fibers, 0) == largest * 2


def calls_of(kind: str) -> list[int]:
    """The lines on which the kernel of a kind calls what its threads must call together."""
    source = (HERE / "fibers.cpp").read_text().splitlines()
    start = next(index for index, line in enumerate(source) if f"case {kind}:" in line)
    body = source[start : start + source[start:].index("                break;")]
    return [start + index + 1 for index, line in enumerate(body) if "team_max(" in line or "__syncthreads(" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_part_are_found(fibers, kind):
    block_h = (KERNELS / "include" / "block.h").read_text().splitlines()
    in_block_scale = [index for index, line in enumerate(block_h, 1) if "team_max(" in line]
    with pytest.raises(Divergence) as divergence:
        run_diverging(fibers, 1 + list(KINDS).index(kind))
    expected = KINDS[kind].format(*(calls_of(kind) or in_block_scale))
    assert str(divergence.value) == f"workgroup 0 diverges: {expected}"
    test_threads_that_stay_together_get_their_results(fibers)
