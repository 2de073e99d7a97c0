from __future__ import annotations

import pytest
import torch
from gpus import H200

import halfbyte as hb
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.experts import cuda as experts
from halfbyte.kernels.head import launch as heads
from halfbyte.kernels.linear.dispatch import choose_fused, choose_mlp, variant_of
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.problem import problem_of
from halfbyte.kernels.linear.sm90_decode.launch import rows_of
from halfbyte.serving import ahead
from halfbyte.serving.ahead import Ahead

X = torch.empty(0, dtype=torch.bfloat16)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[set[nvrtc.Variant]]:
    """What is compiled ahead, call by call, as on an H200."""
    found: list[set[nvrtc.Variant]] = []
    monkeypatch.setattr(ahead.reach, "can_compile", lambda device: True)
    monkeypatch.setattr(ahead, "properties_of", lambda index: H200)
    monkeypatch.setattr(ahead, "_compile", lambda variants: found.append(set(filter(None, variants))))
    return found


def test_rows() -> None:
    assert Ahead(3).rows == [1, 2, 3]
    assert Ahead(70).rows == [*range(1, 65), 70]
    rows = Ahead(8192).rows
    assert rows[-1] == 8192
    assert {64, 72, 512, 576, 2048, 2560} <= set(rows)
    assert len(rows) < 200


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_products_of_a_layer(compiled: list[set[nvrtc.Variant]], batch_invariant: bool) -> None:
    """Each weight alone, and all in one launch; a layer like one before is not looked at again."""
    these = Ahead(600, batch_invariant)
    weights = [hb.quantize(torch.randn(n, 512), nested=True) for n in (256, 64, 64)]
    for _ in range(2):
        these.linear(X.dtype, weights, False)
    these.linear(X.dtype, [torch.randn(8, 8)], False)  # dense
    (found,) = compiled
    problems = tuple(problem_of(X, q, None) for q in weights)
    for m in (1, 7, 64, 100, 300, 600):
        for group in ((problems[0],), (problems[1],), problems):
            wanted = variant_of(m, group, H200, batch_invariant)
            if wanted is not None:
                assert wanted in found or m not in these.rows


def test_a_head(compiled: list[set[nvrtc.Variant]]) -> None:
    these = Ahead(100)
    these.head(torch.zeros(16 * H200.sms, 512, dtype=X.dtype), False)
    assert compiled.pop() == heads.variants(range(1, 33), (16 * H200.sms, 512), X.dtype, False, H200) != set()


def test_a_whole_layer(compiled: list[set[nvrtc.Variant]]) -> None:
    """What stands beside products is compiled with them, for each number of rows; a layer like one before is not looked
    at again."""
    these = Ahead(100)
    sides = ([512, 128, 128], 512), ([512], 512), ([1024, 1024], 512), ([512], 1024)
    groups = [[hb.quantize(torch.randn(n, k)) for n in rows] for rows, k in sides]
    for _ in range(2):
        these.layer(X.dtype, groups, [True, False, False, False])
    (found,) = compiled
    qkv, out, gates, (down,) = (
        tuple(problem_of(X, q, X if number == 0 else None) for q in group) for number, group in enumerate(groups)
    )
    norm, added = (1e-6, 0.0), Fusion(residual=1.0, static=True)
    for m in (1, 8, 16, 64):
        for group, fusion in ((qkv, Fusion(norm, static=True)), (out, added), ((down,), added)):
            if (fused := choose_fused(m, group, fusion, H200)) is not None:
                assert fused.kernel.group_variant(group, fused.plan, H200) in found
        if (mlp := choose_mlp(m, (*gates, down), Fusion(norm, "silu", static=True), added, H200)) is not None:
            assert mlp.kernel.group_variant(gates, mlp.gates, H200) in found


def test_experts(compiled: list[set[nvrtc.Variant]]) -> None:
    gate_up, down = hb.quantize(torch.randn(16, 256, 128)), hb.quantize(torch.randn(16, 128, 128))
    for _ in range(2):
        Ahead(600).experts(X.dtype, gate_up, down, "silu", 2, False)
    Ahead(600, batch_invariant=True).experts(X.dtype, gate_up, down, "silu", 2, False)
    first, again = compiled
    assert first == again
    both = problem_of(X, rows_of(gate_up), None), problem_of(X, rows_of(down), None)
    for tokens in (1, 16, 64, 320, 576):
        wanted = experts.variants(tokens, 2, 16, *both, "silu", H200)
        assert len(wanted) == (2 if tokens < 320 else 3)  # and the sort
        assert first >= set(wanted)


def test_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_compile", lambda variants: pytest.fail("compiles"))
    q = hb.quantize(torch.randn(16, 128))
    Ahead(8).linear(X.dtype, [q], False)
    Ahead(8).experts(
        X.dtype, hb.quantize(torch.randn(2, 64, 64)), hb.quantize(torch.randn(2, 64, 32)), "silu", 1, False
    )
