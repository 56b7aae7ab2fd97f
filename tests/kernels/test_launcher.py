"""The launcher, from torch ops down to a driver: a stand-in for one runs the launches that it is given on the CPU.

The package's code objects need GPUs that a test machine lacks, so the modules here are ELF images with the kernels'
names and nothing else; real ones are looked into where the compiler for them is there.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch_titan.float8 import checks, launcher, ops, reference
from monarch_titan.float8.driver import CudaDriver, DriverError
from monarch_titan.float8.format import Format, Layout, flat_numel
from monarch_titan.float8.launcher import Launcher, NoCodeObjects
from tests.kernels.inputs import FORMATS, same, special_blocks, spread
from tests.kernels.stand_in import STREAM, StandIn, build_images

E4M3 = Format()
WIDE = spread(40 * 30, seed=6).view(40, 30)


@pytest.fixture(scope="module")
def code_objects(driver_library: ctypes.CDLL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lib")
    build_images(folder)
    return folder


@pytest.fixture(params=["gfx942", "gfx950", "sm_90"])
def gpu(request: pytest.FixtureRequest, driver_library: ctypes.CDLL, code_objects: Path) -> Iterator[StandIn]:
    yield StandIn(driver_library, request.param, code_objects)
    driver_library.driver_recover()


def results(kernels: Any, dtype: torch.dtype, format: Format, device: str = "cpu") -> list[torch.Tensor]:
    """What all operations, of a Kernels or of the reference, make of tensors of all kinds."""
    found = []
    for made in (special_blocks(dtype), spread(4097, seed=1, dtype=dtype), spread(1, seed=2, dtype=dtype)):
        x, residual = made.to(device), spread(made.numel(), seed=3).to(device)
        wire = kernels.quantize_pack(x, 3, format)
        part = Layout(format=format, numel=x.numel(), segments=3).segment
        found += [
            wire,
            kernels.unpack(wire, x.numel(), dtype, format),
            kernels.quantize_pack_ef(x, residual, 3, format),
        ]
        found += [residual, kernels.reduce_segments(wire, part, format), kernels.reduce_requant(wire, format)]
        before, after = [x, x[:0], x.float()], [x * 2, x[:0], x.float() - 1]
        residual = spread(flat_numel([tensor.numel() for tensor in before], 3), seed=4).to(device)
        found += [kernels.pseudograd_pack(before, after, None, 3, format)]
        found += [kernels.pseudograd_pack(before, after, residual, 3, format), residual]
    rows = spread(7 * 384, seed=5, dtype=dtype).view(7, 384).to(device)
    raw = kernels.quantize_rows(rows, Format(element=format.element))
    return [*found, raw, kernels.dequantize_rows(raw, dtype, Format(element=format.element))]


every_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: f"{format.element}-{format.scale}")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@every_format
@every_dtype
def test_every_operation_gives_the_references_bytes(gpu, format, dtype):
    for ours, theirs in zip(results(gpu.launcher, dtype, format), results(reference, dtype, format), strict=True):
        same(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_format
@every_dtype
def test_a_gpu_gives_the_references_bytes(format, dtype):
    kernels = Launcher.on(torch.device("cuda:0"))
    for ours, theirs in zip(results(kernels, dtype, format, "cuda:0"), results(reference, dtype, format), strict=True):
        same(ours.cpu(), theirs)


def test_torch_ops_on_a_gpu(driver_library, code_objects, monkeypatch, caplog):
    """Tensors that say they are on a ROCm device are all that a test must do without."""
    gpu = StandIn(driver_library, "gfx942", code_objects)
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(launcher, "FOLDER", code_objects)
    monkeypatch.setattr(checks, "check_devices", lambda tensors: torch.device("cuda:1"))
    ops.implementation.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            wires = [ops.quantize_pack(WIDE.T, 2) for _ in range(3)]
    finally:
        ops.implementation.cache_clear()
    assert [record.message for record in caplog.records] == ["FP8 operations on cuda:1 run the kernels for gfx942."]
    assert [launch["stream"] for launch in gpu.launches()] == [str(STREAM)] * 3
    same(wires[0], reference.quantize_pack(WIDE.T.contiguous(), 2, E4M3))


def test_gpus_read_bytes_at_multiples_of_four(gpu, monkeypatch):
    """Wires may lie anywhere all the same, and so may what results are written into."""
    monkeypatch.setattr(ops, "implementation", lambda device: gpu.launcher)
    wire = reference.quantize_pack(WIDE, 2, E4M3)
    for shift in (1, 2, 4):
        moved = torch.empty(wire.numel() + shift, dtype=torch.uint8)[shift:].view(wire.shape)
        ops.quantize_pack_out(WIDE, moved, 2)
        same(moved, wire)
        same(ops.unpack(moved, WIDE.numel()), reference.unpack(wire, WIDE.numel(), torch.float32, E4M3))
        ops.reduce_requant(moved)
        ops.reduce_segments(moved, WIDE.numel() // 2)
    for launch in gpu.launches():
        argument = bytes.fromhex(launch["argument"])
        wires = {"quantize_pack": [1], "unpack": [0], "reduce_requant": [0, 1], "reduce_segments": [0]}
        for index in wires[re.sub("(_f32)?_e4m3", "", launch["kernel"])]:
            assert struct.unpack_from("<Q", argument, 8 * index)[0] % 4 == 0, launch["kernel"]


def test_the_argument_travels_by_value(gpu):
    """Byte for byte as the kernel's struct, whose fields and padding are written out here once more."""
    x = spread(1000, seed=1)
    wire = gpu.launcher.quantize_pack(x, 2, Format(scale="ue8m0"))
    [launch] = gpu.launches()
    fields = (x.data_ptr(), wire.data_ptr(), 1000, 500, 4, 1, 8)
    assert bytes.fromhex(launch["argument"]) == struct.pack("<QQQQIII4x", *fields)
    assert launch == launch | {"kernel": "quantize_pack_f32_e4m3", "threads": "256", "groups": "1"}


@pytest.mark.parametrize("blocks, groups", [(1, 1), (32, 1), (33, 2), (512, 16), (513, 16), (5000, 16)])
def test_as_many_groups_as_the_device_holds(driver_library, code_objects, blocks, groups):
    gpu, x = StandIn(driver_library, "gfx942", code_objects, units=2), spread(blocks * 128, seed=1)
    same(gpu.launcher.quantize_pack(x, 1, E4M3), reference.quantize_pack(x, 1, E4M3))
    assert [launch["groups"] for launch in gpu.launches()] == [str(groups)]


def test_nothing_is_launched_for_nothing(gpu):
    for numels in ([], [0, 0]):
        empty = [torch.empty(numel) for numel in numels]
        assert gpu.launcher.pseudograd_pack(empty, empty, None, 3, E4M3).shape == (3, 0)
    assert gpu.launcher.quantize_pack(torch.empty(0), 2, E4M3).shape == (2, 0)
    assert gpu.launches() == []


def test_launches_go_to_the_stream_of_the_moment(gpu):
    for gpu.stream in (0, STREAM, 7):
        gpu.launcher.quantize_pack(torch.ones(5), 1, E4M3)
    assert [int(launch["stream"]) for launch in gpu.launches()] == [0, STREAM, 7]


def test_a_module_is_loaded_once_and_a_function_found_once(gpu):
    for x in (torch.ones(5), torch.ones(7), torch.ones(5).bfloat16(), torch.ones(7)):
        gpu.launcher.quantize_pack(x, 1, E4M3)
    calls = [
        re.sub(r"^(hip|cu)|groups.*", "", line).strip() for line in gpu.record() if "odule" in line or "aunch" in line
    ]
    f32, bf16 = "quantize_pack_f32_e4m3", "quantize_pack_bf16_e4m3"
    launch = "ModuleLaunchKernel" if gpu.launcher.driver.launch_call.startswith("hip") else "LaunchKernel"
    found = [f"ModuleGetFunction {f32}", f"{launch} {f32}", f"{launch} {f32}"]
    assert calls == ["ModuleLoadData", *found, f"ModuleGetFunction {bf16}", f"{launch} {bf16}", f"{launch} {f32}"]


def test_the_threads_own_device_is_left_as_it_was(gpu):
    """On any thread, and when a call fails."""

    def work() -> None:
        gpu.launcher.quantize_pack(torch.ones(5), 1, E4M3)
        gpu.fail(gpu.launcher.driver.launch_call, 719)
        with pytest.raises(DriverError):
            gpu.launcher.quantize_pack(torch.ones(5), 1, E4M3)
        gpu.library.driver_recover()
        device = ctypes.c_int()
        gpu.library.hipGetDevice(ctypes.byref(device))
        left.append((device.value, gpu.library.driver_contexts()))

    left: list[tuple[int, int]] = []
    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert left == [(0, 0), (0, 0)]


FAILURES = {
    "gfx942": ["hipGetDevice", "hipSetDevice", "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel"],
    "sm_90": [
        *("cuCtxPushCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuCtxPopCurrent_v2"),
    ],
}


@pytest.mark.parametrize("architecture, call", [(arch, call) for arch, calls in FAILURES.items() for call in calls])
@pytest.mark.parametrize("code, reason", [(719, "unspecified launch failure"), (12345, "unknown to the driver")])
def test_a_failed_call_is_one_clear_error(driver_library, code_objects, architecture, call, code, reason):
    gpu = StandIn(driver_library, architecture, code_objects)
    gpu.fail(call, code)
    try:
        with pytest.raises(DriverError) as error:
            gpu.launcher.quantize_pack(torch.ones(5), 1, E4M3)
    finally:
        driver_library.driver_recover()
    assert re.fullmatch(
        rf"{call} failed for quantize_pack(_f32_e4m3)? on GPU 1 with error {code}: {reason}\.", str(error.value)
    )
    same(gpu.launcher.quantize_pack(torch.ones(5), 1, E4M3), reference.quantize_pack(torch.ones(5), 1, E4M3))


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_device_that_cannot_be_opened(driver_library, call):
    driver_library.driver_fail(call.encode(), 101)
    try:
        with pytest.raises(DriverError) as error:
            CudaDriver(1, driver_library._name)
    finally:
        driver_library.driver_recover()
    assert str(error.value) == f"{call} failed for FP8 operations on GPU 1 with error 101: invalid device ordinal."


@pytest.mark.parametrize(
    "content, message",
    [
        (b"no ELF image", "LoadData failed for quantize_pack on GPU 1 with error 200: device kernel image is invalid."),
        (None, "GetFunction failed for quantize_pack_f32_e4m3 on GPU 1 with error 500: named symbol not found."),
    ],
)
def test_a_code_object_of_something_else(driver_library, code_objects, tmp_path, content, message):
    (tmp_path / "gfx942").mkdir()
    other = (code_objects / "gfx942" / "unpack.hsaco").read_bytes()
    (tmp_path / "gfx942" / "quantize_pack.hsaco").write_bytes(content or other)
    with pytest.raises(DriverError, match=re.escape(message)):
        StandIn(driver_library, "gfx942", tmp_path).launcher.quantize_pack(torch.ones(5), 1, E4M3)


def test_an_architecture_without_code_objects(driver_library, code_objects, tmp_path):
    with pytest.raises(NoCodeObjects) as error:
        StandIn(driver_library, "gfx90a", code_objects)
    assert str(error.value) == (
        "FP8 operations have no code objects for gfx90a, only for gfx942, gfx950, sm_90: "
        "`python kernels/build.py --gpu gfx90a` in a checkout builds them."
    )
    with pytest.raises(NoCodeObjects, match="for gfx942, only for no GPU: `python"):
        StandIn(driver_library, "gfx942", tmp_path)
