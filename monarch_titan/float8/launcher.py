"""The operations on a GPU: the package's code objects, launched on torch's current stream.

``lib/<architecture>`` holds a code object of every operation, compiled when the package was built: ``.hsaco`` for
AMD's GPUs, ``.cubin`` for NVIDIA's. One is loaded at the first call of its operation, once a device, so a stream that
is captured into a graph should have run it before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path

import torch

from monarch_titan.float8.driver import CudaDriver, Driver, HipDriver
from monarch_titan.float8.kernels import Kernels, Operation

FOLDER = Path(__file__).parent / "lib"

# Of kernels/include/target.h: threads of a workgroup, and the blocks that it works on at a time.
THREADS, TEAMS = 256, 32

GROUPS_PER_UNIT = 8
"""Workgroups that a compute unit holds at a time, at most 2,048 threads; more would only wait for their turn."""


class NoCodeObjects(RuntimeError):
    """The package was built without code objects for a GPU."""


class Launcher(Kernels):
    """The kernels on one GPU; :meth:`on` finds out the arguments.

    Args:
        driver: of the device.
        architecture: ``gfx942``, ``sm_90``, ...: the folder of the code objects.
        units: the device's compute units or multiprocessors.
        stream: returns the handle of the stream to launch on.
        folder: where the folders of the architectures lie.

    Raises NoCodeObjects where there are none, DriverError for what the driver refuses.
    """

    def __init__(self, driver: Driver, architecture: str, units: int, stream: Callable[[], int], folder: Path) -> None:
        self.driver, self.architecture, self.units, self.stream = driver, architecture, units, stream
        self.images = images(folder, architecture)

    @classmethod
    def on(cls, device: torch.device) -> Launcher:
        """The kernels on a device of torch's type ``cuda``, which ROCm's builds use too."""
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            driver, architecture = HipDriver(device.index), properties.gcnArchName.split(":")[0]
        else:
            driver, architecture = CudaDriver(device.index), f"sm_{properties.major}{properties.minor}"
        return cls(
            driver,
            architecture,
            properties.multi_processor_count,
            lambda: torch.cuda.current_stream(device).cuda_stream,
            FOLDER,
        )

    @functools.cache  # noqa: B019 (a launcher lives as long as the process)
    def module(self, operation: str) -> c_void_p:
        return self.driver.load(self.images[operation], operation)

    @functools.cache  # noqa: B019
    def function(self, operation: str, kernel: str) -> c_void_p:
        return self.driver.find(self.module(operation), kernel)

    def launch(self, kernel: str, operation: Operation) -> None:
        if operation.blocks == 0:
            return  # to a driver, a grid of no workgroups is an error
        groups = min(-(-operation.blocks // TEAMS), self.units * GROUPS_PER_UNIT)
        with self.driver.selected(kernel):
            function = self.function(operation.name, kernel)
            self.driver.launch(function, groups, THREADS, operation, self.stream(), kernel)


def images(folder: Path, architecture: str) -> dict[str, bytes]:
    """The code objects of an architecture, by operation. Raises NoCodeObjects where there are none."""
    found = [path for path in (folder / architecture).glob("*") if path.suffix in (".hsaco", ".cubin")]
    if not found:
        others = ", ".join(architectures(folder)) or "no GPU"
        raise NoCodeObjects(
            f"FP8 operations have no code objects for {architecture}, only for {others}: "
            f"`python kernels/build.py --gpu {architecture}` in a checkout builds them."
        )
    return {path.stem: path.read_bytes() for path in found}


def architectures(folder: Path = FOLDER) -> list[str]:
    """Those with code objects in the package."""
    return sorted({path.parent.name for path in folder.glob("*/*") if path.suffix in (".hsaco", ".cubin")})
