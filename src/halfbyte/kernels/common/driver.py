"""NVIDIA's driver, called directly: load machine code, launch it at the cost of one call."""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache, partial
from typing import Any

import torch

from halfbyte.kernels.common.nvrtc import Variant, cubin

_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_WIDE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


@cache
def driver() -> Any:
    """The driver's library, or None where there is none (no GPU, AMD).

    PyDLL keeps the interpreter lock: calls are short, and a launch's arguments stay its own.
    """
    if torch.version.hip:
        return None
    try:
        return ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises RuntimeError for any answer but success."""
    function = getattr(driver(), name)
    status = function(*arguments)
    if status == _NO_CONTEXT:
        bind_context()
        status = function(*arguments)
    if status:
        raise RuntimeError(f"the CUDA driver answered {name} with error {status} (see CUresult in cuda.h)")


def capture_of(stream: int) -> int:
    """The number of the capture that the stream is in, which no other capture of this process has; 0 if in none."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    none = ctypes.c_void_p()
    found = ctypes.byref(status), ctypes.byref(number)
    call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found, none, none, none)
    return number.value if status.value else 0


def bind_context() -> None:
    """Give this thread the context of its current device, the one that torch uses. A thread that has not called CUDA
    yet has none, such as one of autograd's whose first call is a gradient of ours."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(torch._C._cuda_getDevice()))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


@cache
def kernels(
    index: int | None,
    variant: Variant,
    shared_bytes: tuple[tuple[str, int], ...],
    carveout: int | None = None,
    wide: bool = False,
) -> tuple[ctypes.c_void_p, ...]:
    """Kernels by name, compiled or from the cache, loaded for device number `index`, which must be current, and allowed
    that much dynamic shared memory each.

    carveout: the percentage of a multiprocessor's L1 that is to be shared memory. It changes only while the
    multiprocessor is idle, so kernels that overlap must agree on it. wide: clusters of more than eight CTAs, which not
    every GPU has.
    """
    module = ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), cubin(variant))
    functions = []
    for name, count in shared_bytes:
        function = ctypes.c_void_p()
        call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if count:
            call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, ctypes.c_int(count))
        if carveout is not None:
            call("cuFuncSetAttribute", function, _SHARED_CARVEOUT, ctypes.c_int(carveout))
        if wide:
            call("cuFuncSetAttribute", function, _WIDE_CLUSTERS, ctypes.c_int(1))
        functions.append(function)
    return tuple(functions)


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Arguments:
    """The one structure that a kernel takes. Most of it is written once; some of it, side by side, for every launch.

    layout: the structure in three parts, as Python's struct module writes them: what comes before the fields that
    change, those, and what comes after. before, after: the values that stay. memory, at: where it is to be, as a part
    of something larger. Not to be shared between threads.
    """

    __slots__ = ("_buffer", "parameters", "set")

    def __init__(
        self,
        layout: tuple[str, str, str],
        before: tuple[Any, ...],
        after: tuple[Any, ...],
        memory: Any = None,
        at: int = 0,
    ) -> None:
        whole, changing = struct.Struct("".join(layout)), struct.Struct(layout[1])
        zeros = changing.unpack(bytes(changing.size))
        self._buffer = ctypes.create_string_buffer(whole.size) if memory is None else memory
        whole.pack_into(self._buffer, at, *before, *zeros, *after)
        # Called with the fields that change.
        self.set = partial(changing.pack_into, self._buffer, at + struct.calcsize(layout[0]))
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer) + at)


class Launch:
    """A kernel with its grid. Call it with a stream and its arguments.

    cluster: CTAs side by side along y that share memory (0: no cluster). overlaps: may begin before the kernel ahead of
    it in the stream is done, and waits for it by itself.
    """

    __slots__ = ("_attributes", "_config", "_function", "_launch", "_reference")

    def __init__(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int = 0,
        cluster: int = 0,
        overlaps: bool = False,
    ) -> None:
        self._function = function
        attributes = []
        if cluster:
            attributes.append(_Attribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(1, cluster, 1)))
        if overlaps:
            attributes.append(_Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (ctypes.c_uint * 16)(1)))
        self._attributes = (_Attribute * len(attributes))(*attributes)
        self._config = _Config(
            (ctypes.c_uint * 3)(*grid, 1),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes,
            None,
            ctypes.addressof(self._attributes),
            len(attributes),
        )
        self._reference = ctypes.byref(self._config)
        self._launch = driver().cuLaunchKernelEx

    def most_clusters(self) -> int:
        """How many clusters of this launch the device holds at once."""
        clusters = ctypes.c_int()
        call("cuOccupancyMaxActiveClusters", ctypes.byref(clusters), self._function, self._reference)
        return clusters.value

    def set_grid(self, x: int, y: int, z: int = 1) -> None:
        self._config.grid[:] = (x, y, z)

    def __call__(self, stream: int, parameters: Any) -> None:
        """parameters: an array of pointers, to each of the kernel's. Raises RuntimeError when the driver refuses."""
        self._config.stream = stream
        if self._launch(self._reference, self._function, parameters, None):
            call("cuLaunchKernelEx", self._reference, self._function, parameters, None)  # once more, which may help
