"""Kernel tests run what the sources say: what is older than they are is built again, once a session."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from monarch_titan.float8 import cpu
from tests.kernels import builds, stand_in

BUILT = os.environ.get("MONARCH_TITAN_TEST_LIBRARIES")
"""A folder with what is to be tested: test_sanitizers.py builds one and runs other tests with it."""

if BUILT:
    cpu.LIBRARY = Path(BUILT) / cpu.LIBRARY.name


@pytest.fixture(scope="session", autouse=True)
def cpu_library() -> None:
    """A few seconds. Without a compiler the tests of the library are skipped."""
    newest = max(path.stat().st_mtime for path in builds.BUILD["sources"]())
    built = cpu.LIBRARY.exists() and cpu.LIBRARY.stat().st_mtime >= newest
    if not BUILT and not built and builds.has_compiler():
        builds.BUILD["build_cpu"](cpu.LIBRARY.parent)


@pytest.fixture(scope="session")
def fibers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the kernels as threads of a GPU, in both flavours."""
    if BUILT:
        return Path(BUILT)
    if not builds.has_compiler():
        pytest.skip("there is no C++ compiler to build the kernels with")
    folder = tmp_path_factory.mktemp("fibers")
    builds.build_fibers(folder)
    return folder


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A stand-in for a GPU's driver."""
    if not builds.has_compiler():
        pytest.skip("there is no C++ compiler to build the stand-in driver with")
    return stand_in.build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors on a machine that does other things too: torch's threads would mostly wait for one another."""
    torch.set_num_threads(1)
