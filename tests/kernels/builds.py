"""What tests compile from the kernels' sources, and how they run it."""

from __future__ import annotations

import ctypes
import functools
import runpy
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from monarch_titan.float8.cpu import POINTER, U32, Library, Operation

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
BUILD = runpy.run_path(str(KERNELS / "build.py"))

FLAVOURS = {"ocp": (), "fnuz": ("-DMT_FNUZ",)}
"""Of the conversion instructions: gfx950's and gfx942's."""

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")

# Optimized less than the CPU library, so that calls stay apart which the fibers tell by their addresses.
FIBER_FLAGS = ("-O1", "-DMT_FIBERS", "-DMT_VARIANT=fibers", f"-I{HERE}", f"-I{KERNELS / 'include'}", "-shared")


def fibers_library(folder: Path, flavour: str) -> Path:
    return folder / f"fibers_{flavour}.so"


def build_fibers(folder: Path, flags: Sequence[str] = ()) -> None:
    """Compile the kernels as threads of a GPU, in both flavours. Raises BuildError."""

    def build(flavour: str) -> None:
        options = (*BUILD["CPU_FLAGS"], *FIBER_FLAGS, *FLAVOURS[flavour], *flags)
        BUILD["run"](BUILD["compiler"](), *options, HERE / "fibers.cpp", "-o", fibers_library(folder, flavour))

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(build, FLAVOURS))


def sanitizer_runtime() -> Path | None:
    """AddressSanitizer's library, which a process must load first whose program was built without it."""
    found = subprocess.run(
        [BUILD["compiler"](), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    runtime = Path(found.stdout.strip())
    return runtime if runtime.is_absolute() else None


class Divergence(Exception):
    """Threads that must meet do not; the message says where they are."""


class Fibers(Library):
    """The operations as a GPU of that flavour runs them: ``launch`` raises Divergence."""

    groups = 2
    """Workgroups, so few that each has several blocks to do."""

    def __init__(self, folder: Path, flavour: str) -> None:
        self.library = ctypes.CDLL(str(fibers_library(folder, flavour)))
        self.variant = f"fibers_{flavour}"

    def launch(self, name: str, operation: Operation) -> None:
        kernel = getattr(self.library, name)
        kernel.argtypes, kernel.restype = (POINTER, U32), ctypes.c_char_p
        fault = kernel(ctypes.byref(operation), self.groups)
        if fault is not None:
            raise Divergence(fault.decode())

    def encode(self, values: torch.Tensor, element: str) -> torch.Tensor:
        """What the conversion instruction makes of fp32 values."""
        convert = getattr(self.library, f"encode_{element}")
        convert.argtypes, convert.restype = (ctypes.c_float,), ctypes.c_uint8
        return torch.tensor([convert(value) for value in values.tolist()], dtype=torch.uint8)

    def decode(self, codes: torch.Tensor, element: str) -> torch.Tensor:
        convert = getattr(self.library, f"decode_{element}")
        convert.argtypes, convert.restype = (ctypes.c_uint8,), ctypes.c_float
        return torch.tensor([convert(code) for code in codes.tolist()])


@functools.cache
def has_compiler() -> bool:
    try:
        BUILD["compiler"]()
    except BUILD["NoCompiler"]:
        return False
    return True
