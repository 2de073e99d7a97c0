"""sm80's kernel for tests without a GPU: weights it is compiled for, its source on a CPU, and its machine code."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import cuda_on_cpu
import torch
from cuda_on_cpu import Shape
from gpus import H200
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.linear.problem import Problem, addresses, problem_of
from halfbyte.kernels.linear.sm80.launch import LAYOUT, arguments, constants, source, variant
from halfbyte.kernels.linear.sm80.plan import Sm80Plan

BF16, F16 = torch.bfloat16, torch.float16
SENTINEL = -1
REGISTERS = 65536  # of a multiprocessor

# For rows of x, an NF4 weight and a GPU of every size that kernels for many rows plan for.
any_problem = given(
    m=st.integers(1, 9000),
    n=st.integers(1, 60000),
    k=st.integers(1, 500).map(lambda k: 32 * k),
    block_size=st.sampled_from([32, 64, 128, 4096]),
    dtype=st.sampled_from([F16, BF16]),
    capability=st.sampled_from([80, 86, 89, 90, 100, 120]),
    sms=st.integers(1, 200),
)


def nf4(n: int = 1000, k: int = 4096, block_size: int = 64, dtype: torch.dtype = BF16) -> Problem:
    return Problem(dtype, n, k, "nf4", block_size, torch.uint8, 256)


def int4(n: int = 1000, k: int = 4096, block_size: int = 128, dtype: torch.dtype = F16) -> Problem:
    return Problem(dtype, n, k, "int4", block_size, dtype)


def on_cpu(folder: Path, x: Tensor, q: hb.QuantizedWeight, bias: Tensor | None, plan: Sm80Plan) -> Tensor:
    """The source itself, thread by thread: within the bounds of all tensors, and its workspace as it was found.
    folder: where it is compiled."""
    problem, (m, n) = problem_of(x, q, bias), (len(x), q.shape[0])
    out = torch.full((m + 2, n), 777.0, dtype=x.dtype)
    sums = torch.full((plan.partial_sums(m, problem),), SENTINEL, dtype=torch.int32)
    stale = torch.zeros(68, dtype=torch.int32)
    before, after = arguments(m, problem, addresses(q), plan)
    place = 0 if bias is None else bias.data_ptr()
    changing = (x.data_ptr(), place, out.data_ptr(), sums.data_ptr(), stale.data_ptr(), 16, m)
    bits = struct.pack("".join(LAYOUT), *before, *changing, *after)
    parts = [x, q.packed, q.scale, *(q.nested[:2] if q.nested else ())]
    sizes = plan.ctas, 32 * plan.warps, plan.shared_bytes(problem)
    assert cuda_on_cpu.run(folder, variant(problem, plan, H200), "multiply", bits, Shape(*sizes), parts) == 0
    assert (out[m:] == 777).all()
    assert (stale[:64] == SENTINEL).all()
    assert (stale[64:] == 0).all()
    return out[:m]


def compiled(folder: Path, problem: Problem, plan: Sm80Plan, capability: int) -> Path:
    """The cubin."""
    path = folder / "ring.cubin"
    path.write_bytes(nvrtc.compile_cubin(source(), capability, constants(problem, plan)))
    return path


def usage(cubin: Path, function: str = "multiply") -> dict[str, int]:
    """Of a function: registers ("REG"), "STACK", "SHARED", "LOCAL"."""
    text = _told("cuobjdump", "-res-usage", cubin)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text.split(f"Function {function}:")[1])}


def operations(cubin: Path) -> list[str]:
    """The names of all instructions."""
    text = _told("nvdisasm", cubin)
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?(\w+)", text, re.M)


def _told(tool: str, *arguments: object) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout
