"""What the hardware counted, joined to what was computed: bytes to and from memory, occupancy, stalls.

`ncu` runs steps.py in a child and lists a line a kernel: all that fits into one look at a kernel for every one of them,
and in a second child the stalls, which take several looks with all memory put back in between, for those that matter.
Where there is no `ncu`, or it may not, the report says so and stands on bytes computed from shapes. Two checks come
with it: the measured copy bandwidth against the counted bytes of a copy, and the computed bytes of weight products
against the counted ones.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from halfbyte.roofline.align import align
from halfbyte.roofline.names import Label, base, group_of

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "long_scoreboard", "short_scoreboard", "barrier", "wait", "mio_throttle", "lg_throttle", "math_pipe_throttle",
    "membar", "sleeping", "not_selected",
)  # fmt: skip
TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
EVERYWHERE = (TIME, READ, WRITTEN, OCCUPANCY)
MOST_STALLS = 2  # names of kernels, those that take longest in a step, of which stalls are asked
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
LONGEST = 120  # seconds that ncu may take for a model, each time
MARK, COPY = "write_kernel", "copy_kernel"
COMPUTED = "bytes are computed from shapes"


@dataclass(frozen=True)
class Counted:
    """A kernel as ncu saw it. ns: its duration. bytes: to and from memory. occupancy: percent of the warps that fit.
    stalls: why to how many cycles a warp waited for an issued instruction."""

    name: str
    ns: float
    bytes: float
    occupancy: float
    stalls: Mapping[str, float]


class Refused(Exception):
    """ncu is missing, may not, or failed; says which, in words."""


def counted(
    record: dict[str, Any], device: torch.device, *, required: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """The record with what the hardware counted, or with the reason why it was not asked."""
    try:
        program = find(device)
        say("asking the hardware through ncu")
        kernels, known, layers = _ask(program, record, device, say)
        return join(record, kernels, known, _copied(device), layers)
    except Refused as reason:
        if required:
            say(f"no counters: {reason}")
        return record | {"counters": {"said": f"{COMPUTED}: {reason}"}}


def find(device: torch.device) -> str:
    """The path of ncu. Raises Refused where it cannot be of use."""
    if device.type != "cuda" or torch.version.hip:
        raise Refused("counters are read through ncu, which needs an NVIDIA GPU")
    found = shutil.which("ncu") or next((str(p) for q in PLACES for p in sorted(Path("/").glob(q[1:]))), None)
    if found is None:
        raise Refused("ncu is not on this machine; it comes with the CUDA toolkit and Nsight Compute")
    return found


def _ask(
    program: str, record: Mapping[str, Any], device: torch.device, say: Callable[[str], None]
) -> tuple[list[Counted], list[Any], int]:
    """Every kernel that ncu saw, for each step (provider, batch, labels of its kernels, computed work), and how many
    layers its model has."""
    from halfbyte.measure.ab_run import empty_cache
    from halfbyte.roofline import run, steps
    from halfbyte.roofline.work import Shape, work_of

    empty_cache(device)  # the child needs its own
    runs = record["runs"]
    plan = steps.Plan(
        record["model"],
        tuple(dict.fromkeys(kept["provider"] for kept in runs)),
        tuple(dict.fromkeys(kept["batch"] for kept in runs)),
        record["context"],
        str(device),
    )
    child = [sys.executable, "-m", "halfbyte.roofline.steps", plan.to_text()]
    kernels = parse(execute([program, *options(EVERYWHERE), *child]))
    try:
        reasons = [STALL.format(stall) for stall in STALLS]
        kernels = with_stalls(kernels, parse(execute([program, *options(reasons, longest(kernels)), *child])))
    except Refused as reason:  # the bytes are what the report stands on
        say(f"no stalls: {reason}")
    known, layers = [], 1
    run.start_profiler(device)
    for step in steps.steps(plan):
        labels, calls = run.labelled(step.model, step.work)
        shape = Shape.of(step.model, step.decoder.cache, step.batch, 1, plan.context + 1)
        known.append((step.provider, step.batch, labels, work_of(calls, shape, {})))
        layers = step.model.config.get_text_config().num_hidden_layers
    return kernels, known, layers


def options(metrics: Sequence[str], names: Collection[str] = ()) -> list[str]:
    """Of ncu: these counters of every kernel between start and stop, or of those of such bare names, at the clocks as
    they are, from cold caches."""
    chosen = f"regex:^({'|'.join(map(re.escape, names))})$"
    return [
        "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics),
        "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all",
        "--target-processes", "application-only", *(("--kernel-name", chosen) if names else ()),
    ]  # fmt: skip


def longest(kernels: Iterable[Counted]) -> list[str]:
    """The bare names under which most time was spent, of every step."""
    steps: list[Counter[str]] = [Counter()]
    for kernel in kernels:
        if kernel.name == MARK:
            steps.append(Counter())
        elif kernel.name != COPY:
            steps[-1][kernel.name] += round(kernel.ns)
    return sorted({name for times in steps for name, _ in times.most_common(MOST_STALLS)})


def with_stalls(kernels: Sequence[Counted], stalled: Iterable[Counted]) -> list[Counted]:
    """The kernels with their stalls: the n-th of a name is the n-th of that name in both lists."""
    stalls: dict[str, deque[Mapping[str, float]]] = defaultdict(deque)
    for kernel in stalled:
        stalls[kernel.name].append(kernel.stalls)
    return [replace(k, stalls=stalls[k.name].popleft()) if stalls[k.name] else k for k in kernels]


def execute(command: Sequence[str]) -> str:
    """What ncu writes into its log. Raises Refused where it may not, fails, or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        try:
            done = subprocess.run(
                [command[0], "--log-file", str(log), *command[1:]],
                capture_output=True, text=True, timeout=LONGEST, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Refused(f"ncu took more than {LONGEST} s") from None
        except OSError as error:
            raise Refused(f"ncu does not start ({error})") from error
        told = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    everything = "\n".join((told, done.stdout, done.stderr))
    if "ERR_NVGPUCTRPERM" in everything:
        raise Refused(
            "this user may not read the counters (ERR_NVGPUCTRPERM); an administrator can allow it with the driver's "
            "option NVreg_RestrictProfilingToAdminUsers=0"
        )
    if done.returncode:
        lines = [line for line in everything.splitlines() if line.strip() and not line.startswith(('"', "==PROF=="))]
        raise Refused(f"ncu ended with code {done.returncode}: {lines[-1].strip() if lines else 'it says nothing'}")
    return told


def parse(text: str) -> list[Counted]:
    """The kernels in ncu's raw CSV page. Raises Refused where there are none."""
    lines = text.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise Refused("ncu listed no kernel")
    table = csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    return [_kernel(line) for line in table if line["ID"].strip()]  # the line without an ID has the units


def _kernel(line: Mapping[str, str]) -> Counted:
    def value(metric: str) -> float:
        try:
            return float(line.get(metric, "").replace(",", ""))
        except ValueError:  # "n/a": this GPU does not count it
            return 0.0

    stalls = {stall: value(STALL.format(stall)) for stall in STALLS}
    return Counted(base(line["Kernel Name"]), value(TIME), value(READ) + value(WRITTEN), value(OCCUPANCY), stalls)


def _copied(device: torch.device) -> float:
    """GB/s of the very copy that ncu counts, while nobody counts."""
    from halfbyte.roofline.ceilings import time_one, triton_way
    from halfbyte.roofline.steps import COPIED, COPIES

    source = torch.ones(COPIED // 4, dtype=torch.int32, device=device)
    run = triton_way("copy", source, torch.empty_like(source), COPIES)
    return 2 * COPIED * COPIES / time_one(run, device, 9).median / 1e3


def join(
    record: dict[str, Any], kernels: Sequence[Counted], known: Sequence[Any], measured: float, layers: int
) -> dict[str, Any]:
    """The record with counters: of the copy, of each class of each step, and beside the computed bytes of the runs.

    measured: GB/s of the copy by its own time. layers: of the model whose kernels were counted.
    """
    marks = [place for place, kernel in enumerate(kernels) if kernel.name == MARK]
    if len(marks) != len(known):
        raise Refused(f"ncu saw {len(marks)} steps of {len(known)}")
    classes: list[dict[str, Any]] = []
    for mark, end, (provider, batch, labels, work) in zip(marks, [*marks[1:], len(kernels)], known, strict=True):
        named = [(base(name), label) for name, label in labels if not name.startswith("Mem")]
        of_step = kernels[mark + 1 : end]
        found = align(named, [kernel.name for kernel in of_step])
        facts = {"provider": provider, "batch": batch}
        classes += [facts | entry for entry in _classes(of_step, found, work)]
    copies = [kernel for kernel in kernels[: marks[0]] if kernel.name == COPY]
    said = "bytes are computed from shapes, and counted by ncu"
    counters: dict[str, Any] = {"said": said, "layers": layers, "classes": classes}
    if copies and copies[0].ns:
        speed = copies[0].bytes / copies[0].ns
        counters["copy"] = {
            "counted_gb_per_s": round(speed, 1), "measured_gb_per_s": round(measured, 1),
            "apart": round(measured / speed - 1, 4) if speed else None,
        }  # fmt: skip
    return beside(record | {"counters": counters})


def _classes(kernels: Sequence[Counted], labels: Sequence[Label], work: Mapping[Label, Any]) -> list[dict[str, Any]]:
    found: dict[Label, list[Counted]] = {}
    for kernel, label in zip(kernels, labels, strict=True):
        found.setdefault(label if label.group == "products" else Label(label.group), []).append(kernel)
    return [
        {
            "class": label.name,
            "counted_bytes": round(sum(kernel.bytes for kernel in of)),
            "computed_bytes": work[label].bytes if label in work else 0,
            "us": round(sum(kernel.ns for kernel in of) / 1e3, 2),
            **_longest(max(of, key=lambda kernel: kernel.ns)),
        }
        for label, of in found.items()
    ]


def _longest(kernel: Counted) -> dict[str, Any]:
    """Occupancy and the two longest waits of a class's longest kernel."""
    worst = sorted(kernel.stalls.items(), key=lambda stall: -stall[1])[:2]
    waits = " ".join(f"{name} {cycles:.1f}" for name, cycles in worst if cycles)
    return {"kernel": kernel.name[:40], "occupancy": round(kernel.occupancy, 1), "stalls": waits}


def beside(record: dict[str, Any]) -> dict[str, Any]:
    """The record with computed bytes beside the counted ones of the counters, and the other way round in the runs.

    What a layer's products move, and whether their weights were made dense before, is known from the runs. What was
    counted of one layer stands for all.
    """
    counters = record.get("counters", {})
    of_runs = {
        (kept["provider"], kept["batch"], entry["class"]): entry.get("bytes", 0)
        for kept in record["runs"]
        if kept["mode"] != "prefill"
        for entry in kept["classes"]
    }
    classes = []
    for entry in counters.get("classes", ()):
        name = entry["class"]
        moved = of_runs.get((entry["provider"], entry["batch"], name))
        if moved and group_of(name) in ("products", "dequantize") and name != "lm_head":
            entry = entry | {"computed_bytes": moved * counters.get("layers", 1) // record["layers"]}
        classes.append(entry)
    if not classes:
        return record
    ratios = {
        (entry["provider"], entry["batch"], entry["class"]): entry["counted_bytes"] / entry["computed_bytes"]
        for entry in classes
        if entry["computed_bytes"]
    }
    runs = []
    for kept in record["runs"]:
        entries = []
        for entry in kept["classes"]:
            ratio = ratios.get((kept["provider"], kept["batch"], entry["class"]))
            if kept["mode"] != "prefill" and ratio is not None and entry.get("bytes"):
                entry = entry | {"counted_bytes": round(ratio * entry["bytes"])}
            entries.append(entry)
        runs.append(kept | {"classes": entries})
    return record | {"counters": counters | {"classes": classes}, "runs": runs}
