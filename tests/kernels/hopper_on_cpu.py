"""A CUDA driver that runs Hopper's kernels on a CPU, from their own source (cuda_on_cpu.py): all of a launch is tested,
from its plan and arguments to the numbers that it leaves."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Shape
from drivers import installed
from gpus import H200
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.common import driver
from halfbyte.kernels.common.nvrtc import Variant

SMALL, CLUSTERS = replace(H200, sms=32), 4  # that run at once: a CTA then has several tiles
DEVICE = torch.device("cpu")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Driver:
    """readable: what kernels may copy from, or read as what nobody writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.readable = folder, list[Tensor]()
        self.variants: list[Variant] = []
        self._functions: list[tuple[Variant, str]] = []

    def cubin(self, variant: Variant) -> bytes:
        self.variants.append(variant)
        return b"%d" % (len(self.variants) - 1)

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        module._obj.value = int(code) + 1
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self._functions.append((self.variants[module.value - 1], name.decode()))
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
        assert all(0 < side <= 256 for side in box)
        described = cuda_on_cpu.map_of(address.value, list(sizes), list(strides), list(box), swizzle)
        ctypes.memmove(at, described, len(described))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        variant, name = self._functions[function.value - 1]
        told = config._obj
        attributes = (driver._Attribute * told.count).from_address(told.attributes or 0) if told.count else ()
        cluster = next((one.value[1] for one in attributes if one.id == driver._CLUSTER_DIMENSION), 1)
        x, y, z = told.grid
        assert min(x, y, z) > 0
        constants = dict(variant.constants)
        together = int(constants.get("shares", 1)) if name == "multiply" else x if constants.get("combines") else 1
        shape = Shape(x, told.block[0], told.shared, y, z, cluster, together)
        bits = ctypes.string_at(parameters[0], cuda_on_cpu.size_of(self.folder, variant, name))
        wrong = cuda_on_cpu.run(self.folder, variant, name, bits, shape, self.readable)
        assert wrong != cuda_on_cpu.WAITING, f"{name}: all threads wait for each other"
        assert wrong == 0, f"{name}: {wrong} reads or uses of shared memory are wrong"
        return 0


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    there = Driver(tmp_path)
    empty = torch.empty

    def allocated(*arguments: Any, **options: Any) -> Tensor:  # what a launch takes for the time of a product
        tensor = empty(*arguments, **options)
        there.readable.append(tensor)
        return tensor

    monkeypatch.setattr(torch, "empty", allocated)
    with installed(monkeypatch, there, there.cubin, SMALL):
        yield there


def weight(*shape: int, k: int, dtype: torch.dtype, format: str, **options: Any) -> hb.QuantizedWeight:
    return hb.quantize((torch.randn((*shape, k)) / k**0.5).to(dtype), format, **options)


def parts_of(q: hb.QuantizedWeight) -> list[Tensor]:
    return [q.packed, q.scale, *(q.nested[:3] if q.nested else ())]


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def check(found: Tensor, right: Tensor, theirs: Tensor) -> None:
    """The error is not above that of torch's own operations, each of which rounds."""
    assert found.isfinite().all()
    ours, others = ((y.double() - right).square().mean() for y in (found, theirs))
    assert ours <= 1.05 * others
