"""Times held against ceilings: what a class reached, what it could reach, and what a step could take at least.

A class's floor is the time its bytes take at the measured bandwidth, or its flops at the measured matrix throughput,
whichever is longer. Products, attention and sampling read almost all that they move and are held against reading; the
others read and write, and are held against copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.roofline.names import GROUPS, Label, group_of
from halfbyte.roofline.run import Run

READERS = ("products", "attention", "sampling")
ORDER = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", "lm_head")


@dataclass(frozen=True)
class Roofs:
    """Measured ceilings. read, copy: GB/s of memory. matrix: TFLOP/s in the dtype of the products."""

    read: float
    copy: float
    matrix: float

    @classmethod
    def of(cls, ceilings: Mapping[str, Any], dtype: str = "bfloat16") -> Roofs:
        """From ceilings as a record keeps them."""
        speeds = {kind: sizes[max(sizes, key=int)]["median"] for kind, sizes in ceilings["bandwidth"].items()}
        return cls(speeds["read"], speeds["copy"], ceilings["matrix"][dtype]["median"])

    def memory(self, group: str) -> float:
        return self.read if group in READERS else self.copy


@dataclass(frozen=True)
class Row:
    """A class of one step. ms, kernels: a step. share: of the step's time. bytes, flops: a step. gb_per_s,
    tflop_per_s: reached. of_roof: the floor over the time. intensity: flops a byte. floor: ms that any way takes at
    least. What has no bytes, as gaps, reaches nothing and has no roof. counted: bytes by the hardware's counters."""

    name: str
    group: str
    ms: float
    share: float
    kernels: float
    bytes: int
    flops: int
    gb_per_s: float | None
    tflop_per_s: float | None
    of_roof: float | None
    intensity: float | None
    floor: float
    kernel: str = ""
    counted: int | None = None

    @property
    def gain(self) -> float:
        """ms that a step would save if the class were at its floor. Nothing is known of the floor of "other"."""
        return 0.0 if self.group == "other" else max(0.0, self.ms - self.floor)


def entries(run: Run) -> list[dict[str, Any]]:
    """A run's classes as a record keeps them: times, kernels and work. Products of which all time is in an earlier
    one, because one kernel computes both, are joined with it."""
    order = {label: place for place, label in enumerate(_ordered({*run.profile.classes, *run.work}))}
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    last: dict[str, Any] | None = None
    for label in order:
        us, kernels = run.profile.classes.get(label, (0.0, 0.0))
        amount = run.work.get(Label(label.group, label.role if label.group == "products" else ""))
        if label.group == "products" and not us and last is not None:
            last["class"] += f"+{label.name}"
            entry = last
        else:
            entry = joined.setdefault((label.group, label.name), _empty(label))
            last = entry if label.group == "products" else None
            if amount and label.group == "dequantize" and entry["bytes"]:
                amount = None  # roles of a dequantize have their bytes in one
        entry["ms"] += us / 1e3
        entry["kernels"] += kernels
        if amount:
            for key in ("bytes", "flops", "least"):
                entry[key] += getattr(amount, key)
        names = run.profile.names.get(label, {})
        top = max(names, key=lambda name: names[name][0], default="")
        if names and names[top][0] > entry["longest"]:
            entry["kernel"], entry["longest"] = top[:32], names[top][0]
    return [_rounded(entry) for entry in joined.values() if entry["ms"] or entry["class"] == "gaps"]


def _ordered(labels: Iterable[Label]) -> list[Label]:
    return sorted(labels, key=lambda label: (*_place(label.group, label.role), label.role))


def in_order(classes: Iterable[str]) -> list[str]:
    """Names of classes in the order of tables: as they come, but for products, which follow a layer."""
    return sorted(classes, key=lambda name: _place(group_of(name), name))


def _place(group: str, role: str) -> tuple[int, int, int]:
    """What one launch computes follows its parts."""
    *others, last = role.split("+")
    return GROUPS.index(group), ORDER.index(last) if last in ORDER else len(ORDER), len(others)


def _empty(label: Label) -> dict[str, Any]:
    return {
        "class": label.name, "group": label.group, "ms": 0.0, "kernels": 0.0, "bytes": 0, "flops": 0, "least": 0,
        "kernel": "", "longest": 0.0,
    }  # fmt: skip


def _rounded(entry: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing."""
    kept = {"class": entry["class"], "ms": round(entry["ms"], 5), "kernels": round(entry["kernels"], 2)}
    kept |= {key: entry[key] for key in ("bytes", "flops") if entry[key]}
    if entry["least"] != entry["bytes"]:
        kept["least"] = entry["least"]
    return kept | ({"kernel": entry["kernel"]} if entry["kernel"] else {})


def rows(run: Mapping[str, Any], roofs: Roofs) -> list[Row]:
    """The classes of a run, as a record keeps it, held against the roofs."""
    total = sum(entry["ms"] for entry in run["classes"])
    return [_row(entry, total, roofs) for entry in run["classes"]]


def _row(entry: Mapping[str, Any], total: float, roofs: Roofs) -> Row:
    group, ms = group_of(entry["class"]), entry["ms"]
    moved, flops = entry.get("bytes", 0), entry.get("flops", 0)
    counted = entry.get("counted_bytes")
    memory = roofs.memory(group)

    def floor_of(count: int) -> float:
        return float(max(count / memory / 1e6, flops / roofs.matrix / 1e9))

    has_work = bool(moved or flops) and ms > 0
    return Row(
        entry["class"], group, ms, ms / total if total else 0.0, entry["kernels"], moved, flops,
        moved / ms / 1e6 if has_work else None,
        flops / ms / 1e9 if has_work else None,
        floor_of(moved) / ms if has_work else None,
        flops / moved if moved else None,
        floor_of(entry.get("least", moved)) if entry.get("least", moved) else 0.0,
        entry.get("kernel", ""), counted,
    )  # fmt: skip


def floor(found: Iterable[Row]) -> float:
    """ms that the whole step takes at least: its classes' floors after one another, nothing between them."""
    return sum(row.floor for row in found)


def products(found: Iterable[Row]) -> tuple[float, float | None]:
    """Share of the step's time in weight products, and how near to their roof they are together."""
    weights = [row for row in found if row.group == "products"]
    time = sum(row.ms for row in weights)
    reached = sum((row.of_roof or 0.0) * row.ms for row in weights)
    return sum(row.share for row in weights), reached / time if time else None


HELP = {
    "products": "`accelerate` multiplies straight from the 4-bit bytes",
    "dequantize": "`accelerate` makes no dense copy of a weight that decoding needs",
    "norms": "fused by torch in the steps that `accelerate` lets `generate` capture",
    "elementwise": "fused by torch in the steps that `accelerate` lets `generate` capture",
    "gaps": "`accelerate` lets `generate` replay a step as one CUDA graph",
    "attention": "nothing: attention stays torch's",
    "copies": "nothing: the cache is transformers'",
    "sampling": "nothing: the choice of a token is transformers'",
    "other": "unknown kernels, so nothing is claimed",
}
