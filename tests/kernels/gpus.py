"""GPUs that tests compile for without having them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.common.launch import SCRATCH, parameters_of
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
    special = {param.name for param in kernel.params if not param.do_not_specialize}
    ones = {name: 1 for name, value in values.items() if isinstance(value, int) and value == 1 and name in special}
    taken = {name: value for name, value in values.items() if name not in ones}
    signature = {n: pointer(v.dtype) if isinstance(v, torch.Tensor) else "i32" for n, v in taken.items()}
    unaligned = [n for n, value in taken.items() if isinstance(value, int) and (value % 16 or n not in special)]
    grid, options = configure(gpu_of(target))
    constants = {name: options.pop(name) for name in kernel.arg_names if name in options} | ones
    compiled = compile_for(kernel, target, signature, constants, unaligned, **options)
    if isinstance(target, int):
        entry = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
        given = parameters_of(compiled, arguments)
        assert entry.count(".param") == len(given) + SCRATCH
        assert len(given) == len(taken)
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
