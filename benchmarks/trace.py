"""Where launches spend their time: what the kernels themselves read from the GPU's clock, on their way.

    python benchmarks/trace.py --rows 1,32                      # layers of a step, on a Hopper GPU
    python benchmarks/trace.py --model qwen3-30b-a3b --rows 64  # a block of experts, of so many tokens

A comment `//: something has happened` in a kernel is a mark. Here, and nowhere else, it becomes code: the first lane of
each warp that comes by stores the time, which takes some ten instructions and waits for nothing. Of a mark that is
passed again and again the last time counts, with `(first)` the first. Several layers or blocks run in a CUDA graph,
over weights that no cache holds together, and one of them is traced, with what stands before it and after it as always.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from constants import Work, forget, works
from rich.console import Console
from rich.table import Table

from halfbyte.bench.mixtures import MODELS
from halfbyte.kernels.common.nvrtc import Constant, Variant

MARK = re.compile(r"^ *//: (\(first\) )?(.+)$", re.M)
KERNEL = re.compile(r'extern "C" __global__ [^;{]*?(\w+)\(const __grid_constant__')
CTAS, WARPS = 2048, 32  # of a launch at most that are traced, and of a CTA
_STORE = """
__device__ __forceinline__ void passed(unsigned mark, bool first) {{
  const unsigned cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x % 32 || cta >= {ctas}) return;
  unsigned long long now, *at = reinterpret_cast<unsigned long long*>({address}ull);
  at += (mark * {ctas}u + cta) * {warps}u + threadIdx.x / 32;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  if (first) asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(at), "l"(now));
  else asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(at), "l"(now));
}}
"""


class Trace(NamedTuple):
    """A variant whose launches store times. times: int64 [mark, CTA, warp] in ns, LATER where nobody came by."""

    name: str
    marks: list[str]
    times: torch.Tensor


LATER = torch.iinfo(torch.int64).max


def marks_of(source: str) -> list[str]:
    return [match[2] for match in MARK.finditer(source)]


def with_marks(source: str, address: int) -> str:
    """The source, with code for its marks. address: where times go."""
    number = iter(range(len(marks_of(source))))
    marked = MARK.sub(lambda match: f"passed({next(number)}, {str(bool(match[1])).lower()});", source)
    begin = marked.index('#include "config.cuh"')
    return marked[:begin] + _STORE.format(address=address, ctas=CTAS, warps=WARPS) + marked[begin:]


@contextmanager
def traced(found: list[Trace], device: torch.device) -> Iterator[None]:
    """Within, what is bound to a weight stores times, each variant's to an entry of `found`."""
    plain = Variant.of
    variants: dict[Any, Variant] = {}

    def of(source: str, capability: int | str, constants: dict[str, Constant]) -> Variant:
        variant = plain(source, capability, constants)
        if not (marks := marks_of(source)):
            return variant
        if variant not in variants:
            times = torch.full((len(marks), CTAS, WARPS), LATER, device=device)
            found.append(Trace(name_of(variant), marks, times))
            variants[variant] = plain(with_marks(source, times.data_ptr()), capability, constants)
        return variants[variant]

    forget()
    Variant.of = of  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Variant.of = plain  # type: ignore[method-assign]
        forget(bound=False)


def name_of(variant: Variant) -> str:
    """What tells launches of a layer from each other: their kernels, and the shape."""
    known, kernels = dict(variant.constants), " and ".join(KERNEL.findall(variant.source))
    kinds = (
        "tile_m", "warpgroups", "warps", "token_warps", "ctas", "slice", "stages", "cluster", "shares", "resident",
        "resident_ctas",
    )  # fmt: skip
    more = [name for name in ("norm", "paired", "residual", "grouped", "experts") if known.get(name)]
    shape = (f"{name} {known[name]}" for name in kinds if known.get(name, 1) not in (0, 1))
    weights = [f"weights {known['parts']}"] if "parts" in known else []
    return ", ".join((kernels, *shape, *weights, *more))


def in_order(traces: Sequence[Trace]) -> Iterator[tuple[str, str, list[float]]]:
    """(launch, mark, µs since the first mark of all, by CTA and warp), as they follow each other in the median."""
    times = [trace.times.flatten(1).cpu() for trace in traces]
    begin = min(int(every.min()) for every in times)
    rows = []
    for trace, every in zip(traces, times, strict=True):
        for mark, some in zip(trace.marks, every, strict=True):
            if len(passed := some[some < LATER]):
                rows.append((trace.name, mark, sorted(((passed - begin) / 1000).tolist())))
    # Launches one after another, and within them marks.
    first = {name: min(found[0] for other, _, found in rows if other == name) for name, _, _ in rows}
    yield from sorted(rows, key=lambda row: (first[row[0]], statistics.median(row[2])))


def graph_of(calls: Sequence[Callable[[], Any]], found: list[Trace], device: torch.device) -> torch.cuda.CUDAGraph:
    """All calls, the one before the last with marks."""
    with traced(found, device):
        calls[-2]()
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def work_of(model: str | None, rows: int, device: torch.device) -> Work:
    """Layers of Llama-3 8B, or blocks of a model's experts, one a call."""
    name = f"{model}, block, T = {rows}" if model else f"llama 8b, layer, M = {rows}"
    ((_, make),) = works(name, (model,) if model else (), device, (rows,), (rows,))
    return make()


def show(traces: Sequence[Trace], console: Console) -> None:
    table = Table("µs", "first", "median", "last")
    before = ""
    for name, mark, found in in_order(traces):
        if name != before:
            table.add_section()
            table.add_row(f"[bold]{name}")
        before = name
        table.add_row(mark, *(f"{time:.2f}" for time in (found[0], statistics.median(found), found[-1])))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), help="of experts; layers of Llama-3 8B if there is none")
    parser.add_argument("--rows", default="1", help="of x, or tokens, comma-separated")
    given = parser.parse_args(arguments)
    device, console = torch.device("cuda", torch.cuda.current_device()), Console()
    for rows in map(int, given.rows.split(",")):
        calls = work_of(given.model, rows, device)
        found: list[Trace] = []
        graph = graph_of(calls, found, device)
        for _ in range(3):
            graph.replay()
        for trace in found:
            trace.times.fill_(LATER)
        graph.replay()
        torch.cuda.synchronize(device)
        console.print(f"{given.model or 'llama-3-8b'}, {rows} rows")
        show(found, console)
        forget()


if __name__ == "__main__":
    main()
