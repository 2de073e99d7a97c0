"""A CUDA driver that runs kernels' own source on a CPU (cuda_on_cpu.py): all of a launch is tested, from its plan and
arguments to the numbers that it leaves."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
from cuda_on_cpu import Shape
from gpus import H200
from torch import Tensor

from halfbyte.kernels.common import driver, tensor_map
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.sm90_decode import launch as decode

SMALL, CLUSTERS = replace(H200, sms=32), 4  # that run at once: a CTA then has several tiles


class Driver:
    """readable: what kernels may copy from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.readable = folder, list[Tensor]()
        self._variants: list[Variant] = []
        self._functions: list[tuple[Variant, str]] = []

    def cubin(self, variant: Variant) -> bytes:
        self._variants.append(variant)
        return b"%d" % (len(self._variants) - 1)

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        module._obj.value = int(code) + 1
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self._functions.append((self._variants[module.value - 1], name.decode()))
        function._obj.value = len(self._functions)
        return 0

    def cuFuncSetAttribute(self, *_: Any) -> int:
        return 0

    def cuOccupancyMaxActiveClusters(self, count: Any, *_: Any) -> int:
        count._obj.value = CLUSTERS
        return 0

    def cuTensorMapEncodeTiled(
        self, at: Any, kind: int, rank: int, address: Any, sizes: Any, strides: Any, box: Any, steps: Any,
        interleaving: int, swizzle: int, *_: int,
    ) -> int:  # fmt: skip
        assert (kind, interleaving, set(steps)) == (0, 0, {1})
        assert all(stride % 16 == 0 for stride in strides)
        assert address.value % 16 == 0
        assert all(side <= 256 for side in box)
        described = cuda_on_cpu.map_of(address.value, list(sizes), list(strides), list(box), swizzle)
        ctypes.memmove(at, described, len(described))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        variant, name = self._functions[function.value - 1]
        constants: dict[str, Any] = dict(variant.constants)
        x, y, z = config._obj.grid
        bits = ctypes.string_at(parameters[0], struct.calcsize("".join(decode.layout(constants["parts"]))))
        shape = Shape(x, config._obj.block[0], config._obj.shared, y, z, constants["cluster"])
        assert min(x, y, z) > 0
        assert cuda_on_cpu.run(self.folder, variant, name, bits, shape, self.readable) == 0
        return 0


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    there = Driver(tmp_path)
    monkeypatch.setattr(driver, "driver", lambda: there)
    monkeypatch.setattr(driver, "cubin", there.cubin)
    monkeypatch.setattr(decode, "properties_of", lambda index: SMALL)
    caches = driver.kernels.cache_clear, tensor_map.tensor_map.cache_clear, decode.launches.entries.clear
    for clear in caches:
        clear()
    yield there
    for clear in caches:
        clear()
