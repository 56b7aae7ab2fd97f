"""Builds the FP8 kernels into the package: the CPU library, and a wheel's code objects. All else is in pyproject.toml.

Built here and not on first use, so that nobody who installs a wheel needs a compiler, and no process of a job waits
for one. It takes a C++ compiler and seconds, and no torch: neither setuptools' own C++ extensions nor torch's fit a
library that is loaded by ctypes and knows neither Python nor torch, so one wheel serves every version of both.

Without a compiler the package still builds and says what it lacks: without one for CPUs, FP8 operations run in plain
torch there; without one for some GPUs, they are refused on these.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import partial
from pathlib import Path
from types import ModuleType

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build


def load_kernels_build() -> ModuleType:
    """kernels/build.py: by its path, because no package is named ``kernels``."""
    spec = importlib.util.spec_from_file_location("kernels_build", Path(__file__).parent / "kernels" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = load_kernels_build()


def has_compiler() -> bool:
    try:
        kernels.compiler()
    except kernels.NoCompiler:
        return False
    return True


class BuildKernels(Command):
    """Puts them beside the modules: into the build folder, or into the checkout for an editable install.

    There only the CPU library, which takes seconds: one works on a GPU's kernels with kernels/build.py.
    """

    user_options = ()
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None
        self.built: list[Path] = []

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    @property
    def folder(self) -> Path:
        return Path("" if self.editable_mode else self.build_lib) / "monarch_titan" / "float8" / "lib"

    def run(self) -> None:
        gpus = () if self.editable_mode else kernels.ARCHITECTURES
        for make in (kernels.build_cpu, *(partial(kernels.build_gpu, arch) for arch in gpus)):
            try:
                self.built += make(self.folder)
            except kernels.NoCompiler as error:
                logging.warning("The package will lack FP8 kernels: %s", error)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.built]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(Path(__file__).parent)) for path in kernels.sources()]


class Build(build):
    sub_commands = (*build.sub_commands, ("build_kernels", None))


class Wheel(bdist_wheel):
    """Of this platform, but of any Python: the library does not know Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        return has_compiler()


setup(distclass=Package, cmdclass={"build": Build, "build_kernels": BuildKernels, "bdist_wheel": Wheel})
