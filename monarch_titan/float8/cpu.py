"""The operations on this machine's CPU, by the library that ``kernels/build.py`` builds when the package is."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from monarch_titan.float8.kernels import POINTER, U32, Kernels, Operation

LIBRARY = Path(__file__).parent / "lib" / "libmonarch_titan_cpu.so"


class Library(Kernels):
    """The kernels for one instruction set: ``avx512``, ``avx2`` or ``portable``, by default the best there is.

    Raises OSError where the library was not built, AttributeError for a variant that it lacks.
    """

    def __init__(self, variant: str | None = None) -> None:
        self.library = ctypes.CDLL(str(LIBRARY))
        self.library.mt_best_variant.restype = ctypes.c_char_p
        self.library.mt_launch.argtypes = (POINTER, POINTER, U32, U32)
        self.library.mt_launch.restype = None
        self.variant = variant or self.library.mt_best_variant().decode()
        self.kernel("reduce_segments_e4m3")

    @functools.cache  # noqa: B019 (there are a few libraries in a process, for as long as it lives)
    def kernel(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, f"{self.variant}_{name}"), POINTER).value or 0

    def launch(self, kernel: str, operation: Operation) -> None:
        """Run a kernel on as many threads as torch would use, and return when it is done."""
        address, blocks = self.kernel(kernel), operation.blocks
        self.library.mt_launch(address, ctypes.byref(operation), blocks, torch.get_num_threads())
