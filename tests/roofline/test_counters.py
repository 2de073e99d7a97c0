"""What ncu says is read and joined; where it is missing, may not, or fails, the report says so and goes on."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import record

from halfbyte.roofline import counters, steps
from halfbyte.roofline.counters import Counted, Refused
from halfbyte.roofline.names import NORMS, Label
from halfbyte.roofline.work import Amount

Q, K = Label("products", "q"), Label("products", "k")
CUDA = torch.device("cuda", 0)
STALL = counters.STALL.format("long_scoreboard")
HEADER = ["ID", "Kernel Name", counters.TIME, counters.READ, counters.WRITTEN, counters.OCCUPANCY, STALL]


def page(*kernels: tuple[str, float, float, float]) -> str:
    """ncu's raw page as CSV. kernels: (name, ns, bytes read, bytes written)."""
    rows = [HEADER, ["", "", "ns", "byte", "byte", "%", "inst"]]
    for number, (name, ns, read, written) in enumerate(kernels):
        rows.append(
            [str(number), name, f"{ns:,.0f}", f"{read:,.0f}", str(written), "48.5", "n/a" if number else "7.25"]
        )
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 1 (/usr/bin/python)", *lines, "==PROF== Disconnected", ""])


def test_parse() -> None:
    (first, second) = counters.parse(page(("void ns::gemm<int>(float *, int)", 2500, 1e6, 10), ("b", 1, 2, 3)))
    assert (first.name, first.ns, first.bytes, first.occupancy) == ("gemm", 2500, 1000010, 48.5)
    assert first.stalls["long_scoreboard"] == 7.25
    assert second.stalls["long_scoreboard"] == 0  # "n/a"
    with pytest.raises(Refused, match="no kernel"):
        counters.parse("==PROF== Connected\n==WARNING== No kernels were profiled.\n")


def test_join() -> None:
    """A copy, then a step of four kernels, of which one is a memory operation that ncu does not list."""
    found = record(q=4.0, norms=1.0)
    labels = [("ns::norm<1>", NORMS), ("Memcpy DtoD", NORMS), ("gemm", Q), ("gemm", K)]
    work = {Q: Amount(100, 1, 100), K: Amount(50, 1, 50)}
    kernels = counters.parse(
        page(
            ("copy_kernel", 1e6, 26e6, 26e6), ("write_kernel", 1, 1, 1), ("void ns::norm<1>(int)", 5, 7, 0),
            ("gemm", 10, 105e6, 5e6), ("gemm", 10, 50, 0),
        )
    )  # fmt: skip
    joined = counters.join(found, kernels, [("halfbyte", 1, labels, work)], 50.0, 1)
    told = joined["counters"]
    assert told["copy"] == {"counted_gb_per_s": 52.0, "measured_gb_per_s": 50.0, "apart": -0.0385}
    by_class = {entry["class"]: entry for entry in told["classes"]}
    assert (by_class["q"]["counted_bytes"], by_class["k"]["counted_bytes"]) == (110_000_000, 50)
    # q, as the runs say: there are two layers, and one was counted. Of k they say nothing.
    assert (by_class["q"]["computed_bytes"], by_class["k"]["computed_bytes"]) == (100_000_000, 50)
    assert by_class["norms"]["computed_bytes"] == 0
    q, norms = joined["runs"][0]["classes"]
    assert q["counted_bytes"] == 220_000_000  # 1.1 times the computed ones of all layers
    assert "counted_bytes" not in norms
    assert "counted_bytes" not in found["runs"][0]["classes"][0]  # the record that was given is as it was
    assert counters.beside(joined) == joined
    all_layers = counters.join(found, kernels, [("halfbyte", 1, labels, work)], 50.0, 2)
    assert all_layers["counters"]["classes"][1]["computed_bytes"] == 200_000_000


def test_steps_that_do_not_match_are_refused() -> None:
    with pytest.raises(Refused, match="saw 0 steps of 1"):
        counters.join(record(q=1.0), [], [("halfbyte", 1, [], {})], 50.0, 1)


def program(folder: Path, text: str, code: int = 0) -> str:
    """A program in ncu's place, which writes `text` into its log."""
    script = folder / "ncu"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({text!r})\n"
        f"sys.exit({code})\n"
    )
    script.chmod(0o755)
    return str(script)


def test_without_permission(tmp_path: Path) -> None:
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    with pytest.raises(Refused, match=r"may not read the counters \(ERR_NVGPUCTRPERM\); an administrator can"):
        counters.execute([program(tmp_path, said, 1)])


def test_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="ended with code 3: ==ERROR== boom"):
        counters.execute([program(tmp_path, "==PROF== x\n==ERROR== boom\n", 3)])
    with pytest.raises(Refused, match="does not start"):
        counters.execute([str(tmp_path / "none")])
    monkeypatch.setattr(counters, "LONGEST", 0.0)
    with pytest.raises(Refused, match="more than"):
        counters.execute([program(tmp_path, "")])


def test_the_report_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cpu = counters.counted(record(q=1.0), torch.device("cpu"), required=True, say=said.append)
    assert cpu["counters"]["said"].startswith("bytes are computed from shapes: counters are read through ncu")
    assert said
    monkeypatch.setattr(counters, "PLACES", ())
    monkeypatch.setenv("PATH", "")
    none = counters.counted(record(q=1.0), CUDA, required=False, say=said.append)
    assert "ncu is not on this machine" in none["counters"]["said"]


def test_it_asks_what_it_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command to the record, with a program in ncu's place."""
    text = page(("copy_kernel", 10, 260, 240), ("write_kernel", 1, 1, 1), ("gemm", 10, 95, 5))
    monkeypatch.setattr(counters, "find", lambda device: program(tmp_path, text))
    monkeypatch.setattr(counters, "_copied", lambda device: 50.0)
    monkeypatch.setattr(counters, "_ask", lambda program, found, device, say: (
        counters.parse(counters.execute([program, *counters.options(counters.EVERYWHERE)])),
        [("halfbyte", 1, [("gemm", Q)], {Q: Amount(100, 1, 100)})],
        1,
    ))  # fmt: skip
    found = counters.counted(record(q=1.0), CUDA, required=False, say=lambda _: None)
    assert found["counters"]["said"] == "bytes are computed from shapes, and counted by ncu"
    assert found["counters"]["copy"]["apart"] == 0.0


def test_stalls_are_asked_of_those_that_take_longest() -> None:
    def longest(*kernels: tuple[str, float]) -> list[str]:
        return counters.longest([Counted(name, ns, 0, 0, {}) for name, ns in kernels])

    copy, mark = (counters.COPY, 99), (counters.MARK, 99)
    assert longest(copy, mark, ("a", 1), ("mm<x>", 9), ("a", 2)) == ["a", "mm<x>"]
    assert longest(copy, mark, *((f"k{n}", n) for n in range(50))) == ["k48", "k49"]
    assert longest(mark, ("a", 1), ("b", 2), ("c", 3), mark, ("a", 9), ("d", 8), ("c", 7)) == ["a", "b", "c", "d"]
    asked = counters.options(["x", "y"], ["mm", "a.b"])
    assert asked[asked.index("--metrics") + 1] == "x,y"
    assert asked[asked.index("--kernel-name") + 1] == r"regex:^(mm|a\.b)$"
    assert "--kernel-name" not in counters.options(["x"])


def test_stalls_go_to_the_same_call_of_a_kernel() -> None:
    kernels = [Counted(name, ns, 7, 8, {}) for name, ns in (("a", 1), ("b", 2), ("a", 3), ("c", 4))]
    stalled = [Counted(name, 0, 0, 0, {"wait": cycles}) for name, cycles in (("a", 1.0), ("a", 3.0), ("b", 2.0))]
    found = counters.with_stalls(kernels, stalled)
    assert [(k.name, k.ns, k.bytes, k.occupancy, k.stalls.get("wait")) for k in found] == [
        ("a", 1, 7, 8, 1.0), ("b", 2, 7, 8, 2.0), ("a", 3, 7, 8, 3.0), ("c", 4, 7, 8, None)
    ]  # fmt: skip


def test_plans_travel_as_text() -> None:
    plan = steps.Plan("tiny", ("halfbyte", "bf16"), (1, 8), 64, "cuda:0")
    assert steps.Plan.from_text(plan.to_text()) == plan


def test_steps_of_a_plan() -> None:
    """Here on a CPU: the order of the steps, and models as their providers have them."""
    pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    plan = steps.Plan("tiny", ("halfbyte", "bf16", "bitsandbytes"), (1, 2), 8, "cpu")
    found: list[Any] = [(step.provider, step.batch, tuple(step.work.run().shape)) for step in steps.steps(plan)]
    assert found == [(name, batch, (batch,)) for name in ("bitsandbytes", "halfbyte", "bf16") for batch in (1, 2)]
