"""A GPU's driver, called directly: code objects are loaded, their functions found and launched.

HIP's and CUDA's driver do this alike, under names of their own. ctypes suffices, so nothing has to be compiled against
one version of either, or of torch.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import ClassVar

HIP_LIBRARY = "libamdhip64.so"
CUDA_LIBRARY = "libcuda.so.1"

# How the list of a launch's extra parameters is marked in both; what ends it differs.
BUFFER_POINTER, BUFFER_SIZE = 1, 2


class DriverError(RuntimeError):
    """A call of the driver failed; the message names the call, what it was for, and the driver's reason."""


class Driver(ABC):
    """One device's driver. Handles of modules and functions are the driver's own.

    Args:
        library: path or name of the shared library.
        device: the device's index, as torch counts.
    """

    load_call: ClassVar[str]
    find_call: ClassVar[str]
    launch_call: ClassVar[str]
    text_call: ClassVar[str]
    end: ClassVar[int]
    """What ends the list of extra parameters."""

    def __init__(self, library: str | Path, device: int) -> None:
        self.library = ctypes.CDLL(str(library))
        self.device = device
        self.declare(self.load_call, c_void_p, c_char_p)
        self.declare(self.find_call, c_void_p, c_void_p, c_char_p)
        self.declare(self.launch_call, c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
        self.declare(self.text_call, c_int, c_void_p)

    def declare(self, name: str, *types: type) -> None:
        """The C types of a call's arguments. Without them ctypes would cut handles to 32 bits."""
        getattr(self.library, name).argtypes = types

    @abstractmethod
    def selected(self, purpose: str) -> AbstractContextManager[None]:
        """The device as this thread's current one, which the other calls need; the previous one again at the end."""

    def load(self, image: bytes, purpose: str) -> c_void_p:
        """The module of a code object. The image must stay in memory: HIP does not promise to copy it."""
        module = c_void_p()
        self.call(self.load_call, purpose, byref(module), image)
        return module

    def find(self, module: c_void_p, name: str) -> c_void_p:
        """A module's function."""
        function = c_void_p()
        self.call(self.find_call, name, byref(function), module, name.encode())
        return function

    def launch(
        self, function: c_void_p, groups: int, threads: int, argument: ctypes.Structure, stream: int, purpose: str
    ) -> None:
        """Queue a function of one argument, passed by value: the driver copies its bytes before this returns."""
        size = c_size_t(ctypes.sizeof(argument))
        extra = (c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(argument), BUFFER_SIZE, ctypes.addressof(size), self.end
        )
        self.call(self.launch_call, purpose, function, groups, 1, 1, threads, 1, 1, 0, stream, None, extra)

    def call(self, name: str, purpose: str, *args: object) -> None:
        """Call the driver; ``purpose`` is the kernel, or whatever else an error should say that it was for."""
        code = getattr(self.library, name)(*args)
        if code != 0:
            text = c_char_p()
            getattr(self.library, self.text_call)(code, byref(text))
            reason = (text.value or b"unknown to the driver").decode()
            raise DriverError(f"{name} failed for {purpose} on GPU {self.device} with error {code}: {reason}.")


class HipDriver(Driver):
    """AMD's; by default the library that torch has loaded."""

    load_call = "hipModuleLoadData"
    find_call = "hipModuleGetFunction"
    launch_call = "hipModuleLaunchKernel"
    text_call = "hipDrvGetErrorString"
    end = 3

    def __init__(self, device: int, library: str | Path | None = None) -> None:
        super().__init__(library or loaded(HIP_LIBRARY), device)
        self.declare("hipGetDevice", c_void_p)
        self.declare("hipSetDevice", c_int)

    @contextmanager
    def selected(self, purpose: str) -> Generator[None]:
        before = c_int()
        self.call("hipGetDevice", purpose, byref(before))
        if before.value == self.device:
            yield
            return
        self.call("hipSetDevice", purpose, self.device)
        try:
            yield
        finally:
            self.call("hipSetDevice", purpose, before)


class CudaDriver(Driver):
    """NVIDIA's."""

    load_call = "cuModuleLoadData"
    find_call = "cuModuleGetFunction"
    launch_call = "cuLaunchKernel"
    text_call = "cuGetErrorString"
    end = 0

    def __init__(self, device: int, library: str | Path = CUDA_LIBRARY) -> None:
        super().__init__(library, device)
        self.declare("cuInit", c_uint)
        self.declare("cuDeviceGet", c_void_p, c_int)
        self.declare("cuDevicePrimaryCtxRetain", c_void_p, c_int)
        self.declare("cuCtxPushCurrent_v2", c_void_p)
        self.declare("cuCtxPopCurrent_v2", c_void_p)
        handle, self.context = c_int(), c_void_p()
        self.call("cuInit", "FP8 operations", 0)
        self.call("cuDeviceGet", "FP8 operations", byref(handle), device)
        # The context that torch uses. It is held for as long as the process lives, as torch holds it.
        self.call("cuDevicePrimaryCtxRetain", "FP8 operations", byref(self.context), handle)

    @contextmanager
    def selected(self, purpose: str) -> Generator[None]:
        # Pushed each time: a new thread, autograd's for one, has no context until its first call of the runtime.
        self.call("cuCtxPushCurrent_v2", purpose, self.context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", purpose, byref(c_void_p()))


def loaded(name: str) -> str:
    """The path under which this process has a library loaded, else its name.

    torch's wheels for ROCm bring a HIP of their own beside the system's, and modules of one mean nothing to the other.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path("/" + line.partition("/")[2])
        if path.name.startswith(name):
            return str(path)
    return name
