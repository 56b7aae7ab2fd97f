"""The kernels for AMD's GPUs, as machine code: the right instructions, no spills, the same bytes each time."""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
OPERATIONS = sorted(path.stem for path in KERNELS.glob("*.hip"))
ARCHITECTURES = ["gfx942", "gfx950"]

WRITERS = {"quantize_pack", "quantize_pack_ef", "pseudograd_pack", "reduce_requant", "quantize_rows"}
READERS = {"quantize_pack_ef", "pseudograd_pack", "reduce_segments", "reduce_requant", "unpack", "dequantize_rows"}
FP8 = {"e4m3": "fp8", "e5m2": "bf8"}


@dataclass(frozen=True)
class Kernel:
    name: str
    code: str
    resources: dict[str, int]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder an architecture, each with every operation's assembly, remarks and code object."""
    pytest.importorskip("ziglang", reason="its clang compiles for AMD's GPUs")
    folder = tmp_path_factory.mktemp("gpu")
    for arch in ARCHITECTURES:
        build_gpu(arch, folder)
    return folder


def build_gpu(arch: str, folder: Path) -> None:
    runpy.run_path(str(KERNELS / "build.py"))["build_gpu"](arch, folder, listings=folder)


def kernels(built: Path, arch: str, operation: str) -> list[Kernel]:
    assembly = (built / arch / f"{operation}.s").read_text()
    remarks = (built / arch / f"{operation}.remarks").read_text()
    found = []
    for report in remarks.split("Function Name: ")[1:]:
        name = report.split()[0]
        code = assembly[assembly.index(f"\n{name}:") : assembly.index(f".size\t{name},")]
        resources = re.findall(r"remark: .*?\s+([\w ]+?)(?: \[[\w/]+\])?: (\d+) \[-R", report)
        found.append(Kernel(name, code.split(".section")[0], {key: int(value) for key, value in resources}))
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_conversions_are_the_hardwares(built, arch, operation):
    for kernel in kernels(built, arch, operation):
        kind = FP8[kernel.name.rsplit("_", 1)[1]]
        assert (f"v_cvt_pk_{kind}_f32" in kernel.code) == (operation in WRITERS), kernel.name
        assert (f"v_cvt_pk_f32_{kind}" in kernel.code) == (operation in READERS), kernel.name


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operation", sorted(WRITERS))
def test_the_maximum_is_found_without_memory(built, arch, operation):
    for kernel in kernels(built, arch, operation):
        for step in (r"quad_perm:\[1,0,3,2\]", r"quad_perm:\[2,3,0,1\]", "row_half_mirror"):
            assert re.search(step, kernel.code), (kernel.name, step)
        assert "ds_" not in kernel.code and "s_barrier" not in kernel.code, kernel.name


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_accesses_are_16_bytes(built, arch, operation):
    """Where a block is whole and aligned; the way for the others is there too."""
    for kernel in kernels(built, arch, operation):
        assert "global_load_dwordx4" in kernel.code and "global_store_dwordx4" in kernel.code, kernel.name


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_registers_suffice(built, arch, operation):
    """For as many waves as the file's head says."""
    head = (KERNELS / f"{operation}.hip").read_text()
    vgprs, waves = map(int, re.search(r"VGPRs: at most (\d+), for (\d+) waves", head).groups())
    for kernel in kernels(built, arch, operation):
        assert kernel.resources["ScratchSize"] == 0 and "scratch_" not in kernel.code, kernel.name
        assert kernel.resources["SGPRs Spill"] == kernel.resources["VGPRs Spill"] == 0, kernel.name
        assert kernel.resources["VGPRs"] <= vgprs, kernel.name
        assert kernel.resources["Occupancy"] >= waves, kernel.name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_code_objects_are_the_same_each_time(built, arch, tmp_path):
    build_gpu(arch, tmp_path)
    for operation in OPERATIONS:
        again, first = (folder / arch / f"{operation}.hsaco" for folder in (tmp_path, built))
        assert again.read_bytes() == first.read_bytes(), operation
