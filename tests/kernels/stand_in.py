"""A GPU that a test machine lacks: the launcher on a stand-in for its driver, which runs launches on the CPU.

Its modules may be ELF images with the kernels' names and nothing else, or the real code objects.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

from monarch_titan.float8 import driver
from monarch_titan.float8.driver import CudaDriver, HipDriver
from monarch_titan.float8.launcher import Launcher
from tests.kernels.builds import BUILD, HERE, KERNELS

OPERATIONS = sorted(path.stem for path in KERNELS.glob("*.hip"))

STREAM = 0x7F00_1234_5678_9ABC
"""Of 64 bits: a handle that is cut to 32 would be another."""


def names(operation: str) -> list[str]:
    """The kernels that a file defines."""
    return re.findall(r"^MT_KERNEL\((\w+),", (KERNELS / f"{operation}.hip").read_text(), flags=re.MULTILINE)


def build_driver(folder: Path) -> ctypes.CDLL:
    """The stand-in, under the name of HIP's library."""
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
    target = folder / driver.HIP_LIBRARY
    BUILD["run"](BUILD["compiler"](), *flags, BUILD["INCLUDE"], HERE / "driver.cpp", "-o", target)
    library = ctypes.CDLL(str(target))
    library.driver_take_record.restype = ctypes.c_char_p
    return library


def build_images(folder: Path) -> None:
    """Fill a folder like the package's ``lib``, for three architectures, with images that have nothing but names."""
    for operation in OPERATIONS:
        symbols = [symbol for name in names(operation) for symbol in (name, f"{name}.kd")]
        assembly, image = folder / f"{operation}.s", folder / f"{operation}.so"
        assembly.write_text("".join(f'.globl "{symbol}"\n"{symbol}": .quad 0\n' for symbol in symbols))
        BUILD["run"](BUILD["compiler"](), "-shared", "-nostdlib", "-x", "assembler", assembly, "-o", image)
        for arch, suffix in (("gfx942", "hsaco"), ("gfx950", "hsaco"), ("sm_90", "cubin")):
            (folder / arch).mkdir(exist_ok=True)
            shutil.copy(image, folder / arch / f"{operation}.{suffix}")


class StandIn:
    """A launcher on the second device of the stand-in driver, and what the driver saw."""

    def __init__(self, library: ctypes.CDLL, architecture: str, folder: Path, units: int = 304) -> None:
        self.library, self.path = library, library._name
        library.driver_recover()
        make = CudaDriver if architecture.startswith("sm_") else HipDriver
        self.stream = STREAM
        self.launcher = Launcher(make(1, self.path), architecture, units, lambda: self.stream, folder)
        self.record()

    def record(self) -> list[str]:
        """The driver's calls since it was last asked."""
        return self.library.driver_take_record().decode().splitlines()

    def launches(self) -> list[dict[str, str]]:
        calls = [line.split() for line in self.record() if "Launch" in line]
        return [{"kernel": name, **dict(item.split("=") for item in rest)} for _, name, *rest in calls]

    def fail(self, call: str, code: int) -> None:
        self.library.driver_fail(call.encode(), code)
