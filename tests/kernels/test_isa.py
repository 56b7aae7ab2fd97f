"""The kernels for GPUs, as their compilers leave them: the right instructions, no spills, the same bytes each time."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from monarch_titan.float8.format import ELEMENTS, Format
from monarch_titan.float8.kernels import Kernels, Operation
from tests.kernels.builds import BUILD, KERNELS
from tests.kernels.stand_in import OPERATIONS, StandIn, names

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
    BUILD["build_gpu"](arch, folder, listings=folder)


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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_arguments_are_as_long_as_the_launcher_packs_them(built, arch):
    for argument in leaves(Operation):
        assembly = (built / arch / f"{argument.name}.s").read_text()
        sizes = re.findall(r"\.kernarg_segment_size: (\d+)", assembly)
        assert {int(size) for size in sizes} == {ctypes.sizeof(argument)}, argument.name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_code_objects_have_the_kernels_that_are_launched(built, arch, driver_library):
    """Through the launcher, into their symbol tables."""
    gpu = StandIn(driver_library, arch, built)
    for dtype in (torch.float32, torch.bfloat16):
        for element in ELEMENTS:
            launch_everything(gpu.launcher, dtype, Format(element=element))
    assert {launch["kernel"] for launch in gpu.launches()} == {name for file in OPERATIONS for name in names(file)}


def launch_everything(kernels: Kernels, dtype: torch.dtype, format: Format) -> None:
    x, residual = torch.ones(128, dtype=dtype), torch.zeros(128)
    wire = kernels.quantize_pack(x, 1, format)
    kernels.quantize_pack_ef(x, residual, 1, format)
    kernels.pseudograd_pack([x], [x], residual, 1, format)
    kernels.unpack(wire, 128, dtype, format)
    kernels.reduce_segments(wire, 128, format)
    kernels.reduce_requant(wire, format)
    kernels.dequantize_rows(kernels.quantize_rows(x.view(1, 128), format), dtype, format)


def leaves(base: type[Operation]) -> list[type[Operation]]:
    """The classes of this package that tell what a kernel is told."""
    found = [kind for kind in base.__subclasses__() if kind.__module__ == base.__module__]
    return found + [kind for parent in found for kind in leaves(parent)]


@pytest.mark.slow
def test_rocms_own_headers_make_no_difference(built, tmp_path):
    """The way of hipcc, with the headers that triton brings: the same instructions as without them."""
    headers = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "amd" / "include"
    resources = Path(importlib.util.find_spec("ziglang").origin).parent / "lib"
    # Of clang itself, and not in ziglang: for programs that use these names of C++'s.
    for name in ("__clang_cuda_math_forward_declares.h", "__clang_cuda_complex_builtins.h", *WRAPPERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    includes = ("-nogpuinc", "-nogpulib", "-resource-dir", resources, "-isystem", headers, "-isystem", tmp_path)
    flags = (*BUILD["HIP_FLAGS"], "-D__HIP_PLATFORM_AMD__", *includes, BUILD["INCLUDE"])
    for operation in OPERATIONS:
        source, assembly = KERNELS / f"{operation}.hip", tmp_path / f"{operation}.s"
        clang = (sys.executable, "-m", "ziglang", "clang", "--offload-arch=gfx942")
        BUILD["run"](*clang, *flags, "-S", source, "-o", assembly)
        bare = built / "gfx942" / assembly.name
        assert instructions(assembly.read_text()) == instructions(bare.read_text()), operation


WRAPPERS = [f"include/cuda_wrappers/{name}" for name in ("algorithm", "complex", "new")]


def instructions(assembly: str) -> list[str]:
    lines = [line.split(";")[0].strip() for line in assembly.splitlines()]
    return [line for line in lines if line and not line.startswith(".")]


@pytest.fixture(scope="module")
def built_for_nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        BUILD["gpu_compiler"]("sm_90")
    except BUILD["NoCompiler"] as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("nvidia")
    build_gpu("sm_90", folder)
    return folder


@pytest.mark.slow
def test_nvidia(built_for_nvidia, driver_library):
    """What is asked of AMD's, of the only code of NVIDIA's that can be read without CUDA's other tools."""
    for argument in leaves(Operation):
        listing = built_for_nvidia / "sm_90" / f"{argument.name}.ptx"
        remarks = listing.with_suffix(".remarks").read_text()
        assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", remarks)) == {"0"}, argument.name
        for code in listing.read_text().split(".visible .entry ")[1:]:
            name = re.match(r"\w+", code)[0]
            kind = name.rsplit("_", 1)[1]
            assert (f"cvt.rn.satfinite.{kind}x2.f32" in code) == (argument.name in WRITERS), name
            assert (f"cvt.rn.f16x2.{kind}x2" in code) == (argument.name in READERS), name
            assert "ld.global.v4" in code and "st.global.v4" in code, name
            assert ".approx" not in code and "fma." not in code, name
            assert int(re.search(r"_param_0\[(\d+)\]", code)[1]) == ctypes.sizeof(argument), name
    gpu = StandIn(driver_library, "sm_90", built_for_nvidia)
    for dtype in (torch.float32, torch.bfloat16):
        launch_everything(gpu.launcher, dtype, Format())
