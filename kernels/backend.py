"""setuptools' way to build the package, with a compiler for AMD's GPUs where that makes a wheel.

pyproject.toml cannot ask for it: `requires` there holds for editable installs too, which would fetch 400 MB to compile
nothing with them, as they build code objects only where they are told to (`python kernels/build.py --gpu ...`).
"""

from __future__ import annotations

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), "ziglang==0.17.*"]
