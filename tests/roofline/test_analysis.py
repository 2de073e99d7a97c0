"""Bytes and flops from shapes, and times against roofs, worked out by hand."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from synthetic import limits, record
from torch import nn

import halfbyte as hb
from halfbyte.roofline import compare, names, render
from halfbyte.roofline import record as records
from halfbyte.roofline.analysis import Roofs, entries, floor, in_order, rows
from halfbyte.roofline.attribution import Profile
from halfbyte.roofline.names import ATTENTION, DEQUANTIZE, GAPS, NORMS, Label
from halfbyte.roofline.roles import Call, label_of, marked, stored_bytes
from halfbyte.roofline.run import Run
from halfbyte.roofline.work import Amount, Shape, work_of

Q, DOWN = Label("products", "q"), Label("products", "down")


def shape(batch: int = 2, tokens: int = 1, cached: tuple[int, ...] = (10,)) -> Shape:
    return Shape(batch, tokens, cached, heads=4, kv_heads=2, head=8)


def test_the_order_of_classes() -> None:
    found = ["gaps", "norms", "down", "q+k+v", "expert", "k", "v", "q", "gate+up", "lm_head", "up"]
    layer = ["q", "k", "v", "q+k+v", "up", "gate+up", "down", "lm_head", "expert"]
    assert in_order(found) == [*layer, "norms", "gaps"]


def test_a_product() -> None:
    call = Call(Q, moved=100, weight=1000, numel=2 * 16, rows=2, k=32, n=16)
    work = work_of([call], shape(), {})
    assert work[Q] == Amount(1100, 2 * 2 * 32 * 16, 1100)


def test_a_product_with_a_weight_made_dense() -> None:
    call = Call(Q, moved=100, weight=300, numel=2 * 16, rows=2, k=32, n=16)
    work = work_of([call], shape(), {"q": True})
    assert work[Q] == Amount(2 * 32 * 16 + 100, 2 * 2 * 32 * 16, 400)
    assert work[DEQUANTIZE] == Amount(300 + 2 * 32 * 16, 0, 0)


def test_attention() -> None:
    work = work_of([], shape(), {})
    keys, queries = 2 * 2 * 8 * 10, 2 * 4 * 8
    assert work[ATTENTION] == Amount(2 * (2 * keys + 2 * queries), 4 * queries * 10, 2 * (2 * keys + 2 * queries))
    prefill = work_of([], shape(tokens=10), {})
    assert prefill[ATTENTION].flops == 4 * 10 * queries * 5.5


def test_norms() -> None:
    assert work_of([Call(NORMS, 64, 16, 16)], shape(), {})[NORMS] == Amount(80, 64, 80)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.q_proj = nn.Linear(8, 4, bias=False)
        self.odd = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.odd(self.self_attn.q_proj(x)))


def test_roles_and_calls() -> None:
    model = Model()
    labels = {path: label_of(path, module, model.head) for path, module in model.named_modules()}
    assert labels == {
        "": None, "self_attn": None, "self_attn.q_proj": Q, "odd": Label("products", "odd"),
        "head": Label("products", "lm_head"),
    }  # fmt: skip
    with marked(model) as calls:
        model(torch.ones(5, 8))
    assert calls[0] == Call(Q, 4 * 5 * (8 + 4), 4 * 32, 20, 5, 8, 4)
    assert [call.label.role for call in calls] == ["q", "odd", "lm_head"]
    model(torch.ones(1, 8))
    assert len(calls) == 3
    assert not model.odd._forward_hooks


def test_roles_go_through_adapters() -> None:
    assert label_of("layers.0.self_attn.v_proj.base_layer", nn.Linear(2, 2), None) == Label("products", "v")


def test_stored_bytes() -> None:
    layer = hb.nn.Linear4bit(128, 64, dtype=torch.bfloat16)
    assert stored_bytes(layer) == layer.weight.nbytes + 2 * 64
    bnb = pytest.importorskip("bitsandbytes")
    theirs = bnb.nn.Linear4bit(128, 64, bias=False, quant_type="nf4").to("cpu")
    q = hb.from_bitsandbytes(theirs.weight)
    assert stored_bytes(theirs) == q.nbytes == 128 * 64 // 2 + q.scale.nbytes + sum(t.nbytes for t in q.tensors[2:])


def run_of(classes: dict[Label, tuple[float, float]], work: dict[Label, Amount]) -> Run:
    profile = Profile(sum(us for us, _ in classes.values()), classes, {label: {"kernel": (1, 1)} for label in classes})
    return Run("halfbyte", "eager", 1, {"median_ms": 1.0}, 1.0, profile, work, 0.0)


def test_products_of_one_kernel_are_joined() -> None:
    """q, k and v computed by one kernel, launched when q is called."""
    roles = [Label("products", role) for role in "qkv"]
    found = entries(run_of({roles[0]: (30.0, 1), GAPS: (5.0, 0)}, {role: Amount(100, 10, 100) for role in roles}))
    assert [(entry["class"], entry.get("bytes")) for entry in found] == [("q+k+v", 300), ("gaps", None)]
    assert names.group_of("q+k+v") == "products"


def test_dequantize_of_several_roles_is_one_class() -> None:
    work = {DEQUANTIZE: Amount(500, 0, 0)}
    found = entries(run_of({Label("dequantize", "q"): (3.0, 1), Label("dequantize", "k"): (4.0, 2)}, work))
    assert found == [{"class": "dequantize", "ms": 0.007, "kernels": 3, "bytes": 500, "least": 0, "kernel": "kernel"}]


def test_rows() -> None:
    found = record(q=4.0, norms=1.0, other=2.0, gaps=3.0)
    roofs = Roofs.of(found["ceilings"])
    assert roofs == Roofs(read=100.0, copy=50.0, matrix=1.0)  # of the largest buffer
    q, norms, other, gaps = rows(found["runs"][0], roofs)
    assert (q.share, q.gb_per_s, q.tflop_per_s, q.intensity) == pytest.approx((0.4, 50.0, 0.2, 4.0))
    assert (q.floor, q.of_roof, q.gain) == pytest.approx((2.0, 0.5, 2.0))
    assert norms.of_roof is None
    assert other.gain == 0  # nothing is known of it
    assert gaps.gain == 3.0
    assert floor([q, norms, other, gaps]) == pytest.approx(2.0)


def test_where_flops_bind() -> None:
    found = record(q=4.0)
    found["runs"][0]["classes"][0]["flops"] = 3_000_000_000
    (q,) = rows(found["runs"][0], Roofs.of(found["ceilings"]))
    assert q.of_roof == pytest.approx(0.75)


def test_terminal_at_80_columns() -> None:
    found = record(q=4.0, norms=1.0, other=2.0, gaps=3.0)
    found["runs"][0]["other"] = [{"name": "mystery", "ms": 2.0, "kernels": 1}]
    console = Console(width=80, record=True, file=StringIO())
    render.report(console, found)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "other: mystery" in text


def write(folder: Path, found: dict) -> str:
    folder.mkdir()
    (folder / records.NAME).write_text(records.dumps(found))
    return str(folder)


def test_compare(tmp_path: Path) -> None:
    a = write(tmp_path / "a", record("bitsandbytes", q=4.0, dequantize=2.0, gaps=1.0))
    b = write(tmp_path / "b", record("halfbyte", q=2.0, gaps=1.0))
    console = Console(width=80, record=True, file=StringIO())
    console.print(compare.table(a, b))
    lines = console.export_text().splitlines()
    found = {line.split()[0]: line.split()[1:] for line in lines if line.split()}
    assert found["q"] == ["4.00", "2.00", "-2.000", "2.00"]
    assert found["dequantize"] == ["2.00", "-2.000"]
    assert any("same model, context, device and torch" in line for line in lines)
    both = record("bitsandbytes", q=4.0)
    both["runs"] += record("halfbyte", q=1.0)["runs"]
    path = write(tmp_path / "both", both)
    assert compare.table(f"{path}:bitsandbytes", f"{path}:halfbyte").row_count == 4


def test_compare_says_what_is_wrong(tmp_path: Path) -> None:
    a = write(tmp_path / "a", record("bitsandbytes", q=4.0))
    other = record("bitsandbytes", q=4.0)
    other["runs"][0]["batch"] = 8
    b = write(tmp_path / "b", other)
    with pytest.raises(ValueError, match="no run in common: A has batch 1 eager bitsandbytes; B has batch 8"):
        compare.table(a, b)
    with pytest.raises(ValueError, match="has no run of bf16; it has bitsandbytes"):
        compare.table(f"{a}:bf16", b)
    with pytest.raises(ValueError, match="no report of `halfbyte profile`"):
        compare.table(str(tmp_path), a)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        compare.table(str(tmp_path / "x.json"), a)
    (tmp_path / "y.json").write_text('{"bench": "decode"}')
    with pytest.raises(ValueError, match="record of `halfbyte bench decode`"):
        compare.table(str(tmp_path / "y.json"), a)


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = record(q=4.0, gaps=1.0)
    path = Path(write(tmp_path / "a", found))
    assert records.read(path) == found == records.read(path / records.NAME)
    assert '{"class": "q"' in records.dumps(found).replace("{ ", "{")
    assert records.to_csv([found]).splitlines()[1].startswith("m,1,eager,halfbyte,q,products,4.0,0.8,")
    assert limits().memory("read") == 100.0


def test_compare_sums_what_the_other_side_has_as_one() -> None:
    def run(**ms: float) -> dict[str, Any]:
        return {"classes": [{"class": name, "ms": value} for name, value in ms.items()]}

    alone, together = run(q=2.0, k=1.0, v=1.5, norms=0.5), run(**{"q+k+v": 3.0, "norms": 0.5})
    assert compare._classes(alone, together) == [("q+k+v", 4.5, 3.0), ("norms", 0.5, 0.5)]
    assert compare._classes(together, alone) == [("q+k+v", 3.0, 4.5), ("norms", 0.5, 0.5)]
    assert compare._classes(alone, alone)[:3] == [("q", 2.0, 2.0), ("k", 1.0, 1.0), ("v", 1.5, 1.5)]
