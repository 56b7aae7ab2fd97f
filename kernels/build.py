"""Build the kernels: ``python kernels/build.py`` for this machine's CPU, ``--gpu gfx942 gfx950`` for GPUs too.

What is built goes into ``monarch_titan/float8/lib``, where the package looks for it, and needs no torch:

- the CPU library by a C++ compiler (``CXX``, g++ or clang++), in seconds;
- code objects for AMD's GPUs by the clang in the PyPI package ``ziglang``, without ROCm, or by ROCm's own hipcc where
  that package is not installed or ``--hipcc`` is given (not tried with a real ROCm yet);
- code objects for NVIDIA's GPUs, sm_90 and later, by CUDA's nvcc, 12 or newer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KERNELS = Path(__file__).resolve().parent
INCLUDE = f"-I{KERNELS / 'include'}"
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
    ),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"),
)

# In place of loops g++ calls memcpy, which copies 16 bytes at a time what is read 32 at a time just after, and waits.
GXX_FLAGS = ("-fno-tree-loop-distribute-patterns",)

VARIANTS = {
    "portable": (),
    "avx2": ("-march=x86-64-v3", "-mtune=generic"),
    "avx512": ("-march=x86-64-v4", "-mtune=generic", "-mprefer-vector-width=512"),
}

# The kernels for GPUs have no calls and no state, and no bits that depend on the compiler: see CPU_FLAGS.
HIP_FLAGS = (
    *("-x", "hip", "--offload-device-only", "-std=c++17", "-O3", "-ffp-contract=off", "-fno-gpu-rdc"),
    *("-fuse-cuid=none", "-mcode-object-version=5", "-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument"),
)

# A clang that has neither ROCm's headers nor its library. It tells what resources a kernel takes.
BARE_FLAGS = ("-DMT_BARE", "-nogpuinc", "-nogpulib", "-nostdinc", "-Rpass-analysis=kernel-resource-usage")

CUDA_FLAGS = ("-x", "cu", "-std=c++17", "-O3", "-fmad=false", "-Werror", "all-warnings")

ARCHITECTURES = ("gfx942", "gfx950", "sm_90")
"""Those that a wheel has code objects for, where their compilers are there when it is built."""


class BuildError(Exception):
    """The library could not be built; the message holds what the compiler said."""


class NoCompiler(BuildError):
    """This machine lacks a compiler."""


def operations() -> list[Path]:
    """A file for each."""
    return sorted(KERNELS.glob("*.hip"))


def sources() -> list[Path]:
    """All files that the library is made of, this one included."""
    return sorted(path for path in KERNELS.rglob("*") if path.suffix in (".hip", ".h", ".cpp", ".py"))


def compiler() -> str:
    """The C++ compiler of this machine. Raises NoCompiler."""
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if candidate and shutil.which(candidate):
            return candidate
    raise NoCompiler("for CPUs, no C++ compiler was found: install g++ or clang++, or set CXX.")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a compiler. Raises BuildError with what it says where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done


def build_cpu(output: Path, more_flags: Sequence[str] = ()) -> list[Path]:
    """Write the CPU library into a folder: all variants that this kind of machine may run. Raises BuildError."""
    cxx = compiler()
    is_clang = "__clang__" in run(cxx, "-dM", "-E", "-x", "c++", os.devnull).stdout
    common = (*CPU_FLAGS, *(() if is_clang else GXX_FLAGS), *more_flags)
    names = VARIANTS if platform.machine() in ("x86_64", "AMD64") else ["portable"]
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:

        def compile_variant(name: str) -> Path:
            target = Path(scratch) / f"{name}.o"
            flags = (*VARIANTS[name], f"-DMT_VARIANT={name}", INCLUDE)
            run(cxx, *common, *flags, "-c", KERNELS / "cpu" / "variant.cpp", "-o", target)
            return target

        objects = list(pool.map(compile_variant, names))
        # Replaced in one step: processes that run keep the library that they have loaded.
        staged = output / f".{LIBRARY}.{os.getpid()}"
        source = KERNELS / "cpu" / "launch.cpp"
        run(cxx, *common, "-shared", "-pthread", source, *objects, "-ldl", "-o", staged)
        staged.replace(output / LIBRARY)
    return [output / LIBRARY]


def build_gpu(arch: str, output: Path, *, listings: Path | None = None, hipcc: bool = False) -> list[Path]:
    """Write a code object of every operation into a folder of the architecture's name. Raises BuildError.

    Args:
        listings: where to write each one's assembly and the compiler's remarks, into such a folder too.
        hipcc: use it, whether ziglang is there or not; it writes no listings.
    """
    build = gpu_compiler(arch, hipcc)
    folder = output / arch
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        beside = (listings or Path(scratch)) / arch
        beside.mkdir(parents=True, exist_ok=True)
        return list(pool.map(lambda source: build(arch, source, folder, beside), operations()))


def gpu_compiler(arch: str, hipcc: bool = False) -> Callable[[str, Path, Path, Path], Path]:
    """What makes code objects for an architecture on this machine. Raises NoCompiler."""
    if arch.startswith("sm_"):
        if not shutil.which("nvcc") or int(re.findall(r"release (\d+)", run("nvcc", "--version").stdout)[0]) < 12:
            raise NoCompiler(f"for {arch}, CUDA's nvcc, 12 or newer, was not found.")
        return build_with_nvcc
    if importlib.util.find_spec("ziglang") and not hipcc:
        return build_with_ziglang
    if not shutil.which("hipcc"):
        raise NoCompiler(f"for {arch}, neither the PyPI package ziglang nor ROCm's hipcc was found.")
    return build_with_hipcc


def build_with_ziglang(arch: str, source: Path, folder: Path, listings: Path) -> Path:
    zig = (sys.executable, "-m", "ziglang")
    assembly, linked = listings / f"{source.stem}.s", folder / f"{source.stem}.hsaco"
    target = listings / f"{source.stem}.o"
    flags = (f"--offload-arch={arch}", *HIP_FLAGS, *BARE_FLAGS, INCLUDE)
    remarks = run(*zig, "clang", *flags, "-S", source, "-o", assembly)
    assembly.with_suffix(".remarks").write_text(remarks.stderr)
    machine = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-x", "assembler")
    run(*zig, "clang", *machine, "-c", assembly, "-o", target)
    run(*zig, "ld.lld", "-shared", "-o", linked, target)
    return linked


def build_with_hipcc(arch: str, source: Path, folder: Path, listings: Path) -> Path:
    linked = folder / f"{source.stem}.hsaco"
    flags = (f"--offload-arch={arch}", "--no-gpu-bundle-output", *HIP_FLAGS, INCLUDE)
    run("hipcc", *flags, source, "-o", linked)
    return linked


def build_with_nvcc(arch: str, source: Path, folder: Path, listings: Path) -> Path:
    assembly, linked = listings / f"{source.stem}.ptx", folder / f"{source.stem}.cubin"
    run("nvcc", f"-arch={arch}", *CUDA_FLAGS, INCLUDE, "-ptx", source, "-o", assembly)
    remarks = run("nvcc", f"-arch={arch}", "-Xptxas", "-v", "-cubin", assembly, "-o", linked)
    assembly.with_suffix(".remarks").write_text(remarks.stdout + remarks.stderr)
    return linked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder for what is built")
    parser.add_argument("--gpu", nargs="*", default=[], metavar="ARCH", help=", ".join(ARCHITECTURES))
    parser.add_argument("--listings", type=Path, help="folder for the assembly of code objects")
    parser.add_argument("--hipcc", action="store_true", help="compile for AMD's GPUs with ROCm's compiler")
    options = parser.parse_args()
    try:
        built = build_cpu(options.output)
        for arch in options.gpu:
            built += build_gpu(arch, options.output, listings=options.listings, hipcc=options.hipcc)
    except BuildError as error:
        sys.exit(f"kernels/build.py: {error}")
    print(*built, sep="\n")


if __name__ == "__main__":
    main()
