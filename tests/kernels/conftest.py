"""Kernel tests run what the sources say: the CPU library is built again where it is older than they are."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import torch

from monarch_titan.float8 import cpu

BUILD = Path(__file__).parents[2] / "kernels" / "build.py"


@pytest.fixture(scope="session", autouse=True)
def built_library() -> None:
    """Once a session, a few seconds. Without a compiler the tests of the library are skipped."""
    build = runpy.run_path(str(BUILD))
    newest = max(path.stat().st_mtime for path in build["sources"]())
    if cpu.LIBRARY.exists() and cpu.LIBRARY.stat().st_mtime >= newest:
        return
    if shutil.which("g++") or shutil.which("clang++"):
        build["build_cpu"](cpu.LIBRARY.parent)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors on a machine that does other things too: torch's threads would mostly wait for one another."""
    torch.set_num_threads(1)
