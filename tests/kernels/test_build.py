"""Which compiler makes what, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.builds import BUILD
from tests.kernels.stand_in import OPERATIONS


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the only programs that there are: none yet."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def add_program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_missing_compiler_is_named(programs):
    missing = BUILD["NoCompiler"]
    with pytest.raises(
        missing, match=r"^for CPUs, no C\+\+ compiler was found: install g\+\+ or clang\+\+, or set CXX\.$"
    ):
        BUILD["build_cpu"](programs)
    with pytest.raises(missing, match=r"^for sm_90, CUDA's nvcc, 12 or newer, was not found\.$"):
        BUILD["build_gpu"]("sm_90", programs)
    with pytest.raises(missing, match=r"^for gfx942, neither the PyPI package ziglang nor ROCm's hipcc was found\.$"):
        BUILD["build_gpu"]("gfx942", programs, hipcc=True)


def test_an_old_nvcc_is_none(programs):
    add_program(programs, "nvcc", "echo 'Cuda compilation tools, release 11.8, V11.8.89'")
    with pytest.raises(BUILD["NoCompiler"], match="12 or newer"):
        BUILD["build_gpu"]("sm_90", programs)


def test_hipcc_takes_rocms_headers(programs, tmp_path):
    """As far as can be seen without ROCm: what it is asked to do."""
    add_program(programs, "hipcc", f'echo "$@" >> {tmp_path}/calls; for target; do :; done; : > "$target"')
    built = BUILD["build_gpu"]("gfx942", tmp_path / "lib", hipcc=True)
    assert sorted(built) == [tmp_path / "lib" / "gfx942" / f"{operation}.hsaco" for operation in OPERATIONS]
    assert all(path.exists() for path in built)
    for call in (tmp_path / "calls").read_text().splitlines():
        assert "--offload-arch=gfx942 --no-gpu-bundle-output -x hip" in call and "MT_BARE" not in call


def test_what_a_compiler_says_is_in_the_error(programs):
    add_program(programs, "hipcc", "echo 'error: no such architecture' >&2; exit 1")
    with pytest.raises(BUILD["BuildError"], match=r"hipcc --offload-arch=gfx1 .*\nerror: no such architecture"):
        BUILD["build_gpu"]("gfx1", programs, hipcc=True)
