"""Profiles on a GPU: kernels that only move bytes, and roles of products in every mode."""

from pathlib import Path

import pytest
import torch

from halfbyte.measure import models
from halfbyte.roofline import ceilings, run
from halfbyte.roofline.analysis import Roofs, entries, rows

from .conftest import DEVICE

pytestmark = pytest.mark.alone
pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
SMALL = (
    "llama",
    {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> list[run.Run]:
    models.SHAPES["profiled"] = SMALL
    try:
        settings = run.Settings(batches=(1, 8), context=64, rounds=3)
        return list(run.facts_of("profiled", DEVICE, settings, print)["runs"])
    finally:
        del models.SHAPES["profiled"]


def test_every_run_is_there(runs: list[run.Run]) -> None:
    found = {(r.provider, r.mode, r.batch) for r in runs}
    assert len(found) == len(run.PROVIDERS) * len(run.MODES["cuda"]) * 2


def test_sums_agree_with_the_wall_clock(runs: list[run.Run]) -> None:
    for r in runs:
        total = sum(us for us, _ in r.profile.classes.values()) / 1e3
        assert total == pytest.approx(r.profiled, rel=0.03), (r.provider, r.mode, r.batch)


def test_products_are_known_by_role_in_every_mode(runs: list[run.Run]) -> None:
    for r in runs:
        found = {entry["class"]: entry for entry in entries(r)}
        calls = {name: found.get(name, {}).get("kernels", 0) for name in ("q", "k", "v", "o", "gate", "up", "down")}
        names = [name for entry in found for name in entry.split("+")]
        assert {"q", "k", "v", "o", "gate", "up", "down", "lm_head"} <= set(names), (r.provider, r.mode, r.batch, calls)
        assert "unnamed" not in names, (r.provider, r.mode, r.batch)
        assert found.get("other", {"ms": 0})["ms"] < 0.05 * r.profiled


def test_roles_take_alike_in_a_graph_and_in_eager_mode(runs: list[run.Run]) -> None:
    """The same kernels on the same weights: labels that slipped would show as times of another size."""
    by_key = {(r.provider, r.mode, r.batch): {e["class"]: e["ms"] for e in entries(r)} for r in runs}
    for (provider, mode, batch), found in by_key.items():
        if mode in ("graph", "fused graph"):
            eager = by_key[provider, "eager", batch]
            for name in ("gate", "down", "lm_head"):
                if name in found and name in eager:
                    assert found[name] == pytest.approx(eager[name], rel=0.35, abs=0.01), (provider, mode, batch, name)


def test_kernels_that_move_bytes() -> None:
    from halfbyte.roofline import triton

    source = torch.randint(0, 1000, (37 * triton.TILE,), dtype=torch.int32, device=DEVICE)
    target, sink = torch.full_like(source, -1), torch.full((triton.TILE,), 7, dtype=torch.int32, device=DEVICE)
    triton.copy(source, target, passes=2)
    assert torch.equal(source, target)
    triton.read(source, sink, passes=3)
    assert bool((sink == 7).all())
    triton.write(target, passes=2)
    assert torch.equal(target, (torch.arange(triton.TILE, dtype=torch.int32, device=DEVICE) + 1).repeat(37))


def test_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    found = ceilings.ceilings(DEVICE)
    roofs = Roofs.of(found.as_json())
    assert 0.5 < roofs.read / roofs.copy < 2
    assert found.bandwidth["read"][2**22].median > roofs.read  # in the cache
    assert found.launch["graph"] < found.launch["host"]
    assert ceilings.ceilings(DEVICE) == found


def test_no_class_is_faster_than_its_roof(runs: list[run.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    roofs = Roofs.of(ceilings.ceilings(DEVICE).as_json())
    for r in runs:
        for row in rows({"classes": entries(r)}, roofs):
            if row.group == "products" and row.bytes > 1e8:  # smaller ones may stay in the cache
                assert row.of_roof is not None
                assert row.of_roof < 1.05, (r.provider, r.mode, r.batch, row.name)
