"""GPUs that tests compile for without having them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.common.targets import CUDA_TARGETS, HIP_TARGETS, compile_for, pointer

TARGETS: tuple[int | str, ...] = (*CUDA_TARGETS, *HIP_TARGETS)
H200, A100 = properties_for("sm_90"), properties_for("sm_80")
MI300X = DeviceProperties("hip", 0, 304)


def gpu_of(target: int | str) -> DeviceProperties:
    """A common GPU of a target: 90 for sm_90, or a name of AMD's."""
    return properties_for(f"sm_{target}") if isinstance(target, int) else MI300X


def compile_launch(launch: Sequence[Any], target: int | str) -> tuple[Any, Any]:
    """What `kernels/common/launch.py` was asked for, compiled for a target: its grid there, and Triton's result."""
    kernel, _, arguments, _, configure = launch
    values = dict(zip(kernel.arg_names, arguments, strict=False))
    signature = {n: pointer(v.dtype) if isinstance(v, torch.Tensor) else "i32" for n, v in values.items()}
    unaligned = [name for name, value in values.items() if isinstance(value, int) and value % 16]
    grid, options = configure(gpu_of(target))
    constants = {name: options.pop(name) for name in kernel.arg_names if name in options}
    compiled = compile_for(kernel, target, signature, constants, unaligned, **options)
    assert compiled.asm["ptx" if isinstance(target, int) else "hsaco"]
    return grid, compiled


def on_targets(name: str, cases: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by case and target: each case for two targets, others for others in turn, and in
    `make compile-all` every case for every target."""
    few = {(case, (2 * case + turn * 5) % len(TARGETS)) for case in range(len(cases)) for turn in range(2)}
    rest = [pytest.mark.compile_all]
    return pytest.mark.parametrize(
        (*name.split(", "), "target"),
        [
            pytest.param(*(case if "," in name else [case]), target, marks=[] if (i, j) in few else rest)
            for i, case in enumerate(cases)
            for j, target in enumerate(TARGETS)
        ],
    )
