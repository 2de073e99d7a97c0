"""`halfbyte bench nearest`: the nearest rows of a matrix that several GPUs hold between them, beside one GPU.

A process a GPU, NCCL between them (gloo on a CPU). The matrix is several times larger than the caches, so every call
reads from memory. A call is timed by the wall clock of the slowest process, from idle GPUs to idle GPUs: what somebody
waits for who asks for rows. The rows found are compared with those of one GPU before anything is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from halfbyte import search
from halfbyte.measure.ab_run import clock
from halfbyte.measure.report import line, provenance
from halfbyte.measure.timing import summarize
from halfbyte.terminal import Table

WARMUPS = 3  # calls that are not counted
METHOD = "wall clock of a call, the slowest process, one after the other"


@dataclass(frozen=True)
class Settings:
    """candidates: rows and columns of the matrix. k: rows asked for. processes: GPUs, or processes on a CPU."""

    candidates: tuple[int, int] = (256000, 4096)
    dtype: torch.dtype = torch.bfloat16
    k: int = 5
    processes: int = 2
    rounds: int = 50


def nearest_rows(device: torch.device, settings: Settings) -> list[dict[str, Any]]:
    """Rows of a record: all on one device, and spread over all. Raises ValueError where GPUs are missing."""
    if device.type == "cuda" and torch.cuda.device_count() < settings.processes:
        raise ValueError(f"there are {torch.cuda.device_count()} GPUs here, and {settings.processes} are asked for")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.pt"
        arguments = (device.type, settings, Path(folder) / "meet", found)
        spawn(_process, arguments, nprocs=settings.processes)
        samples: dict[str, list[float]] = torch.load(found)
    (v, d), what = settings.candidates, ("GPU", "GPUs") if device.type == "cuda" else ("process", "processes")
    case = f"{v}×{d} {str(settings.dtype).removeprefix('torch.')}, k = {settings.k}"
    rows = []
    for (name, measured), count in zip(samples.items(), (1, settings.processes), strict=True):
        timing = summarize(measured, "wall")
        rows.append({
            "case": case, "provider": f"{count} {what[count > 1]}", "way": name,
            "median_us": round(timing.median, 1), "p20_us": round(timing.p20, 1), "p80_us": round(timing.p80, 1),
            "samples": timing.samples, "clock": "wall",
        })  # fmt: skip
    return rows


def _process(rank: int, kind: str, settings: Settings, meet: Path, found: Path) -> None:
    import torch.distributed as dist

    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=settings.processes,
        device_id=device if kind == "cuda" else None,
    )
    (v, d), generator = settings.candidates, torch.Generator(device).manual_seed(0)
    everything = torch.randn(v, d, generator=generator, dtype=settings.dtype, device=device)
    query = torch.randn(d, generator=generator, dtype=settings.dtype, device=device)
    dist.broadcast(everything, 0)  # generators of different devices need not agree
    dist.broadcast(query, 0)
    share = -(-v // settings.processes)
    mine = everything[rank * share : (rank + 1) * share]

    def alone() -> tuple[Tensor, Tensor]:
        return search.nearest(query, everything, settings.k)

    def together() -> tuple[Tensor, Tensor]:
        return search.nearest(query, mine, settings.k, group=dist.group.WORLD)

    if not all(map(torch.equal, alone(), together())):
        raise ValueError("the rows that all found together are not those that one finds")
    samples = {
        "alone": _samples(alone, device, settings.rounds),
        "together": _samples(together, device, settings.rounds),
    }
    slowest = torch.tensor(list(samples.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(dict(zip(samples, slowest.tolist(), strict=True)), found)
    dist.destroy_process_group()


def _samples(function: Callable[[], Any], device: torch.device, rounds: int) -> list[float]:
    """Microseconds of each call; the processes begin each one together."""
    import torch.distributed as dist

    measured = []
    for _ in range(WARMUPS + rounds):
        dist.barrier()
        measured.append(1e3 * clock(function, device))
    return measured[WARMUPS:]


def terminal_table(record: Mapping[str, Any]) -> Table:
    """Times, and how many times faster all are together."""
    table = Table(title=record["rows"][0]["case"], caption=record["method"])
    for head in ("", "µs", "p20-p80", "speed-up"):
        table.add_column(head, justify="right" if head else "left")
    for cells in _cells(record):
        table.add_row(*cells)
    return table


def markdown(record: Mapping[str, Any]) -> str:
    """The same in Markdown."""
    heads = [record["rows"][0]["case"], "µs a call", "20th to 80th percentile", "speed-up"]
    lines = [line(heads), line(["---", "---:", "---:", "---:"]), *map(line, _cells(record))]
    return "\n".join([*lines, "", provenance(record)])


def _cells(record: Mapping[str, Any]) -> list[list[str]]:
    one = record["rows"][0]["median_us"]
    return [
        [row["provider"], f"{row['median_us']:,.0f}", f"{row['p20_us']:,.0f}-{row['p80_us']:,.0f}",
         f"{one / row['median_us']:.2f}"]
        for row in record["rows"]
    ]  # fmt: skip
