"""Layers that bitsandbytes computes faster on this very CPU are left alone: by facts, and by a measurement."""

from __future__ import annotations

import gc
import time
import warnings
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.models import bitsandbytes as host
from halfbyte.models import projections, repacked
from halfbyte.models.repacked import FASTER, Facts

bnb = pytest.importorskip("bitsandbytes")

FACTS = Facts("cpu", True, False, 64, 128, "nf4", 64, True, torch.bfloat16)
repack = bnb.functional._convert_weight_packed_for_cpu


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Facts]:
    """bitsandbytes is the faster one wherever it may be; the facts that were asked about."""
    asked: list[Facts] = []

    def measured(facts: Facts, threads: int) -> tuple[float, float]:
        asked.append(facts)
        return 1.0, 2.0

    monkeypatch.setattr(repacked, "_measured", measured)
    monkeypatch.setattr(host, "is_faster", repacked.is_faster)
    return asked


def layer(n: int = 64, k: int = 128, **options: Any) -> Any:
    """A module in eval mode, as on a CPU with AVX512-BF16."""
    options = {"quant_type": "nf4", "compute_dtype": torch.bfloat16} | options
    module = bnb.nn.Linear4bit(k, n, **options).to("cpu").eval()
    module.support_avx512bf16_for_cpu = True
    return module


def accelerated(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return hb.accelerate(model)


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"dtype": torch.float32}, True),  # it casts x to bf16
        ({"format": "fp4", "nested": False}, True),
        ({"device": "cuda"}, False),
        ({"avx512bf16": False}, False),
        ({"training": True}, False),
        ({"n": 48}, False),  # it packs 32 rows side by side, and fails with others
        ({"k": 96}, False),  # its scales are a matrix
        ({"k": 96, "block_size": 32}, True),
    ],
)
def test_facts(change: dict[str, Any], may: bool, calls: list[Facts]) -> None:
    facts = replace(FACTS, **change)
    assert facts.may_be_faster is may
    assert repacked.is_faster(facts) is may
    assert calls == ([facts] if may else [])


def test_bitsandbytes_fails_where_the_facts_say_so() -> None:
    for n, k in ((48, 128), (64, 96)):
        module = layer(n, k)
        with pytest.raises((AssertionError, RuntimeError)):
            repack(module.weight.data, module.weight.quant_state)
    module = layer()
    repack(module.weight.data, module.weight.quant_state)


@pytest.mark.parametrize("theirs", [0.0, 5e-3])
@pytest.mark.parametrize("ours", [1e-3, 1e-2])
def test_the_measurement(theirs: float, ours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that take as long as they are told to; once for each kind of weight."""
    counts = {"theirs": 0, "ours": 0}

    def product(q: hb.QuantizedWeight, x: torch.Tensor) -> Any:
        def run() -> None:
            counts["theirs"] += 1
            time.sleep(theirs)

        return run

    def linear(x: torch.Tensor, q: hb.QuantizedWeight) -> None:
        counts["ours"] += 1
        time.sleep(ours)

    monkeypatch.setattr(repacked, "_product_of_bitsandbytes", product)
    monkeypatch.setattr(repacked, "linear", linear)
    monkeypatch.setattr(repacked, "MOST", 2)
    repacked._measured.cache_clear()
    try:
        assert repacked.is_faster(FACTS) is (theirs < ours)
        assert 4 <= counts["ours"] <= 2 * (repacked.ROUNDS + 1)
        before = dict(counts)
        assert repacked.is_faster(FACTS) is (theirs < ours)
        assert counts == before
    finally:
        repacked._measured.cache_clear()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_what_is_measured_is_a_product_of_that_kind(format: str, nested: bool) -> None:
    """The weight is one that `linear` takes, in bytes that bitsandbytes' kernel would read as its own."""
    facts = replace(FACTS, format=format, nested=nested)
    q = repacked._weight(facts)
    assert (q.format, q.shape, q.block_size, q.nested is not None) == (format, (64, 128), 64, nested)
    module = layer(quant_type=format, compress_statistics=nested)
    packed, state = repack(module.weight.data, module.weight.quant_state)
    given: list[Any] = []
    x = torch.ones(1, 128, dtype=torch.bfloat16)

    class Recorder:
        def default(self, *arguments: Any) -> None:
            given.extend(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.bitsandbytes, "gemv_4bit", Recorder())
        repacked._product_of_bitsandbytes(q, x)()
    assert given[0] is x
    assert (given[1].shape, given[1].dtype) == (packed.shape, packed.dtype)
    assert tuple(given[2]) == tuple(state.shape)
    assert (given[3].shape, given[3].dtype) == (state.absmax.shape, state.absmax.dtype)
    assert torch.equal(given[4], state.code)
    assert given[5] == state.blocksize


def test_without_such_a_product_halfbyte_is_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise AttributeError("another version")

    monkeypatch.setattr(repacked, "_product_of_bitsandbytes", missing)
    repacked._measured.cache_clear()
    try:
        assert not repacked.is_faster(FACTS)
    finally:
        repacked._measured.cache_clear()


def test_left_alone_without_a_warning_and_free_to_repack(calls: list[Facts]) -> None:
    model = nn.Sequential(layer(), layer(48))
    report = accelerated(model)
    assert report.skipped == {"0": FASTER}
    assert report.modules == ("1",)  # with which bitsandbytes fails
    assert FASTER in str(report)
    assert "forward" not in vars(model[0])
    packed = ref(model[0].weight.data.untyped_storage())
    weight = model[0].weight
    weight.data, weight.quant_state = repack(weight.data, weight.quant_state)  # what its first forward does
    gc.collect()
    assert packed() is None  # nothing of ours holds the bytes of before
    assert accelerated(model).skipped == {"0": FASTER}
    assert calls[-1] == calls[0]  # the same question of the repacked weight


def test_a_whole_model_left_alone(calls: list[Facts]) -> None:
    report = accelerated(nn.Sequential(layer(), layer()))
    assert not report.modules
    assert report.generation == "as before: no module was taken"
    assert report.packed_bytes > 0


@pytest.mark.parametrize("wins", ["theirs", "ours"])
def test_a_model_is_left_to_one_of_them(wins: str, calls: list[Facts], monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight is faster by bitsandbytes and one by halfbyte; a third only halfbyte can multiply with."""
    monkeypatch.setattr(host, "is_faster", lambda facts: facts.may_be_faster and facts.n == 64)
    times = {64: (1.0, 2.0), 96: (4.0, 1.0) if wins == "ours" else (1.2, 1.0)}
    monkeypatch.setattr(repacked, "_measured", lambda facts, threads: times[facts.n])
    model = nn.Sequential(layer(64), layer(96), layer(48))
    report = accelerated(model)
    if wins == "ours":
        assert set(report.modules) == {"0", "1", "2"}
        assert not report.skipped
    else:
        assert report.modules == ("2",)
        assert report.skipped == {"0": FASTER, "1": FASTER}
        assert not host.is_applied(model[1])
    hb.restore(model)


def test_one_accelerated_in_training_stays_so_until_accelerate_is_called_again(
    calls: list[Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projections, "ON_CPU", True)
    model = nn.Module()
    model.q_proj, model.k_proj = layer(), layer()
    model.train()
    assert len(accelerated(model).modules) == 2
    x = torch.randn(2, 128, dtype=torch.bfloat16, requires_grad=True)
    dense = hb.dequantize(from_bitsandbytes(model.q_proj.weight), torch.bfloat16)
    right = nn.functional.linear(x, dense, model.q_proj.bias.bfloat16())
    torch.testing.assert_close(model.q_proj(x), right, rtol=0.02, atol=0.02)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model.q_proj(x), right, rtol=0.02, atol=0.02)
    assert not getattr(model.q_proj.weight.quant_state, "packing_format_for_cpu", False)
    assert accelerated(model).skipped == {"q_proj": FASTER, "k_proj": FASTER}
    for module in (model.q_proj, model.k_proj):
        assert not host.is_applied(module)
        assert projections.GROUP not in vars(module)
        assert host.ATTRIBUTE not in vars(module.weight.quant_state)
    model.train()
    assert len(accelerated(model).modules) == 2
    hb.restore(model)


def test_one_that_was_repacked_before_halfbyte_came(calls: list[Facts], monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be taken any more. Nothing is wrong with that where bitsandbytes is the faster one."""
    module = layer()
    module.weight.data, module.weight.quant_state = repack(module.weight.data, module.weight.quant_state)
    assert accelerated(module).skipped == {"": FASTER}
    monkeypatch.setattr(repacked, "_measured", lambda facts, threads: (2.0, 1.0))
    with pytest.warns(UserWarning, match="take weights before the first forward pass"):
        hb.accelerate(module)
