"""The kernels touch no byte that is not theirs and do nothing that C++ leaves undefined.

Both the CPU library and the kernels with fibers for a GPU's threads, built with AddressSanitizer, which also guards
what torch allocates, and UndefinedBehaviorSanitizer. The first of either's complaints ends the process that makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import builds

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For a process with the sanitizers, and libraries that have them."""
    if not builds.has_compiler():
        pytest.skip("there is no C++ compiler to build the kernels with")
    runtime = builds.sanitizer_runtime()
    if runtime is None:
        pytest.skip("the C++ compiler comes without AddressSanitizer")
    folder = tmp_path_factory.mktemp("sanitized")
    builds.build_fibers(folder, builds.SANITIZERS)
    builds.BUILD["build_cpu"](folder, builds.SANITIZERS)
    return os.environ | {
        "MONARCH_TITAN_TEST_LIBRARIES": str(folder),
        "LD_PRELOAD": str(runtime),
        # Python and torch leave memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_kernel_tests_run_clean(environment):
    """But those that only try more values at the same addresses, and of the formats the two that differ most."""
    tests = [str(Path(__file__).with_name(name)) for name in ("test_kernels.py", "test_fibers.py")]
    formats = "(e4m3-fp32 or e5m2-ue8m0 or test_fibers)"
    few = f"{formats} and not every_bf16_for_fixed_scales and not every_number_of_ranks and not number_of_threads"
    done = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", few, *tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "skipped" not in done.stdout


MISTAKES = {
    "written": ("out = torch.empty(511)", "heap-buffer-overflow"),
    "read": ("wire = wire[:, :-16].clone()", "heap-buffer-overflow"),
    "misaligned": ("wire = torch.empty(wire.numel() + 1, dtype=torch.uint8)[1:].view(1, -1).copy_(wire)", "misaligned"),
}
"""What a caller could do wrong, and what the sanitizers say of it."""

CALL = """
import sys
from pathlib import Path
import torch
from monarch_titan.float8 import cpu
from monarch_titan.float8.format import Format
from tests.kernels.builds import Fibers
cpu.LIBRARY = Path(sys.argv[1]) / cpu.LIBRARY.name
library = Fibers(Path(sys.argv[1]), "ocp") if sys.argv[2] == "fibers" else cpu.Library(sys.argv[2])
wire, out = library.quantize_pack(torch.ones(512), 1, Format()), torch.empty(512)
{mistake}
library.unpack(wire, 512, torch.float32, Format(), out)
print("done")
"""


@pytest.mark.parametrize("mistake, library", [("written", "portable"), ("read", "fibers"), ("misaligned", "fibers")])
def test_mistakes_are_found(environment, mistake, library):
    """So that a clean run means something."""
    line, complaint = MISTAKES[mistake]
    done = run(environment, "-c", CALL.format(mistake=line), environment["MONARCH_TITAN_TEST_LIBRARIES"], library)
    assert done.returncode != 0 and complaint in done.stderr
