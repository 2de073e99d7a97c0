"""Launch Triton kernels, from the second call on at the cost of one driver call.

Triton's own launcher binds arguments, looks up a specialization and asks the driver about every pointer: 12 to 21 µs of
Python a call, several times what a small dequantize takes on the GPU. The kernel it compiled is an ordinary CUDA
function, so from then on we hand it to the driver ourselves, in 6 µs, with the same parameters.

That holds only for the specialization that was compiled. Triton specializes on types, on constants, on integers that
are 1 or multiples of 16, and on pointers that are such multiples. The caller's key stands for types and constants,
integers are part of it, and pointers are looked at here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch

from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Launch, driver
from halfbyte.kernels.common.patience import compiling
from halfbyte.kernels.common.thread_cache import ThreadCache

# Triton appends pointers for its global and its profiling scratch memory, depending on its version. Our kernels need
# neither, and the driver reads only as many parameters as the function has.
SCRATCH = 2


def launch(
    kernel: Any,
    index: int,
    arguments: tuple[Any, ...],
    key: Hashable,
    configure: Callable[[DeviceProperties], tuple[int, dict[str, Any]]],
) -> None:
    """Run a Triton kernel on device number `index`, which must be current, on its current stream.

    arguments: the kernel's tensors, tensor descriptors and integers, in order, without its constants.
    key: everything that `configure` depends on, besides the device.
    configure: the grid and the constants and options, for the device's properties; asked once per key and thread. With
        a constant OVERLAPS that is true, the kernel may begin before the one ahead of it is done (overlap.py).
    """
    integers = tuple([value for value in arguments if isinstance(value, int)])
    pointers = [value.data_ptr() for value in arguments if isinstance(value, torch.Tensor)]
    key = (id(kernel), index, key, integers)  # hashing a kernel itself means hashing its source
    again = launches.entries.get(key)
    aligned = not reduce(or_, pointers) % 16
    if again is not None and aligned:
        again(torch._C._cuda_getCurrentRawStream(index), arguments, pointers)
        return
    properties = properties_of(index)
    grid, options = configure(properties)
    with compiling():
        compiled = kernel[(grid,)](*arguments, **options)
    if properties.kind != "cuda" or again is not None or not aligned:
        return
    made: _DirectLaunch | _CompiledLaunch | None
    if len(pointers) + len(integers) == len(arguments):
        made = _direct_launch(compiled, grid, arguments, bool(options.get("OVERLAPS")))
    else:
        made = _CompiledLaunch(compiled, grid, [options[name] for name in kernel.arg_names if name in options])
    if made is not None:
        launches.keep(key, made)


class _DirectLaunch:
    """One kernel compiled for its integers and for pointers that are all multiples of 16, with one grid.

    Call it with the stream, the arguments, and the pointers among them. Raises RuntimeError when the driver refuses.
    """

    __slots__ = ("_launch", "_parameters", "_places", "_values")

    def __init__(self, run: Launch, parameters: Sequence[torch.Tensor | int]) -> None:
        slots = len(parameters) + SCRATCH
        self._launch = run
        self._values = (ctypes.c_uint64 * slots)()
        self._places = []
        for place, value in enumerate(parameters):
            if isinstance(value, int):
                self._values[place] = value
            else:
                self._places.append(place)
        base = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * slots)(*(base + 8 * i for i in range(slots)))

    def __call__(self, stream: int, arguments: Sequence[Any], pointers: Sequence[int]) -> None:
        values = self._values
        for place, pointer in zip(self._places, pointers, strict=True):
            values[place] = pointer
        self._launch(stream, self._parameters)


class _CompiledLaunch:
    """The same through Triton's launcher, which makes the descriptors; what it would look up is known."""

    __slots__ = ("_constants", "_run")

    def __init__(self, compiled: Any, grid: int, constants: Sequence[Any]) -> None:
        self._run, self._constants = compiled[(grid, 1, 1)], constants

    def __call__(self, stream: int, arguments: Sequence[Any], pointers: Sequence[int]) -> None:
        self._run(*arguments, *self._constants, stream=stream)


def _direct_launch(
    compiled: Any, grid: int, arguments: Sequence[torch.Tensor | int], overlaps: bool
) -> _DirectLaunch | None:
    """What Triton has just compiled for `arguments`, or None where only Triton's own launcher will do: no NVIDIA driver
    under its own name, or kernels of a kind that ours are not."""
    metadata = compiled.metadata
    scratch = metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0)
    if driver() is None or scratch or metadata.num_ctas > 1 or not isinstance(compiled.function, int):
        return None
    function, threads = ctypes.c_void_p(compiled.function), 32 * metadata.num_warps
    run = Launch(function, (grid, 1), threads, metadata.shared, overlaps=overlaps)
    return _DirectLaunch(run, parameters_of(compiled, arguments))


def parameters_of(compiled: Any, arguments: Sequence[torch.Tensor | int]) -> list[torch.Tensor | int]:
    """Those arguments that the compiled kernel still takes. An integer that is 1 has become a constant, unless its
    kernel says `do_not_specialize` of it."""
    kinds = compiled.src.signature.values()
    return [value for value, kind in zip(arguments, kinds, strict=False) if kind != "constexpr"]


launches: ThreadCache[Hashable, _DirectLaunch | _CompiledLaunch] = ThreadCache()
