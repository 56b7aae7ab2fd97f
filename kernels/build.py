"""Build the kernels: ``python kernels/build.py`` for this machine's CPU, ``--gpu gfx942 gfx950`` for code objects too.

The CPU library needs a C++ compiler (``CXX``, g++ or clang++) and seconds; it goes into ``monarch_titan/float8/lib``,
where the package looks for it. Code objects need the clang in the PyPI package ``ziglang``, and no ROCm. Nothing needs
torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
LIBRARY = "libmonarch_titan_cpu.so"
DEFAULT_OUTPUT = KERNELS.parent / "monarch_titan" / "float8" / "lib"

# Never fused or reassociated: every variant gives the same bits. (Only what nobody looks at is given up: floating
# point exceptions and errno.)
CPU_FLAGS = (
    *(
        "-std=c++17",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-trapping-math",
        "-fno-math-errno",
        # Calls of memcpy in place of loops would copy 16 bytes at a time what is read 32 at a time just after.
        "-fno-tree-loop-distribute-patterns",
    ),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"),
)

VARIANTS = {
    "portable": (),
    "avx2": ("-march=x86-64-v3", "-mtune=generic"),
    "avx512": ("-march=x86-64-v4", "-mtune=generic", "-mprefer-vector-width=512"),
}

GPU_FLAGS = (
    *("-x", "hip", "--offload-device-only", "-DMT_BARE", "-nogpuinc", "-nogpulib", "-nostdinc", "-std=c++17", "-O3"),
    *(
        "-ffp-contract=off",
        "-fno-gpu-rdc",
        "-fuse-cuid=none",
        "-mcode-object-version=5",
        "-Rpass-analysis=kernel-resource-usage",
    ),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument"),
)


class BuildError(Exception):
    """The library could not be built; the message holds what the compiler said."""


class NoCompiler(BuildError):
    """This machine has no C++ compiler."""


def sources() -> list[Path]:
    """All files that the library is made of, this one included."""
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in (".hip", ".h", ".cpp", ".py"))


def compiler() -> str:
    """The C++ compiler of this machine. Raises NoCompiler."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if candidate and shutil.which(candidate):
            return candidate
    raise NoCompiler("no C++ compiler was found: install g++ or clang++, or set CXX.")


def run(*command: str | Path) -> str:
    """Run a compiler and return what it says."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stderr


def build_cpu(output: Path, more_flags: Sequence[str] = ()) -> Path:
    """Write the CPU library into a folder: all variants that this kind of machine may run. Raises BuildError."""
    cxx = compiler()
    names = VARIANTS if platform.machine() in ("x86_64", "AMD64") else ["portable"]
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:

        def compile_variant(name: str) -> Path:
            target = Path(scratch) / f"{name}.o"
            flags = (*CPU_FLAGS, *VARIANTS[name], f"-DMT_VARIANT={name}", f"-I{KERNELS / 'include'}", *more_flags)
            run(cxx, *flags, "-c", KERNELS / "cpu" / "variant.cpp", "-o", target)
            return target

        objects = list(pool.map(compile_variant, names))
        # Replaced in one step: processes that run keep the library that they have loaded.
        staged = output / f".{LIBRARY}.{os.getpid()}"
        source = KERNELS / "cpu" / "launch.cpp"
        run(cxx, *CPU_FLAGS, *more_flags, "-shared", "-pthread", source, *objects, "-ldl", "-o", staged)
        staged.replace(output / LIBRARY)
    return output / LIBRARY


def build_gpu(arch: str, output: Path) -> list[Path]:
    """Write a code object of every operation for an architecture, with its assembly and the compiler's remarks."""
    zig = [sys.executable, "-m", "ziglang"]
    folder = output / arch
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sorted(KERNELS.glob("*.hip")):
        assembly, target = folder / f"{source.stem}.s", folder / f"{source.stem}.o"
        flags = (f"--offload-arch={arch}", *GPU_FLAGS, f"-I{KERNELS / 'include'}")
        assembly.with_suffix(".remarks").write_text(run(*zig, "clang", *flags, "-S", source, "-o", assembly))
        machine = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-x", "assembler")
        run(*zig, "clang", *machine, "-c", assembly, "-o", target)
        run(*zig, "ld.lld", "-shared", "-o", target.with_suffix(".hsaco"), target)
        target.unlink()
        objects.append(target.with_suffix(".hsaco"))
    return objects


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder for what is built")
    parser.add_argument("--gpu", nargs="*", default=[], metavar="ARCH", help="gfx942, gfx950")
    options = parser.parse_args()
    try:
        built = [build_cpu(options.output)]
        for arch in options.gpu:
            built += build_gpu(arch, options.output)
    except BuildError as error:
        sys.exit(f"kernels/build.py: {error}")
    print(*built, sep="\n")


if __name__ == "__main__":
    main()
