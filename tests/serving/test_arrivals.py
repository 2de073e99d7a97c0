"""Weights that arrive tensor by tensor are whole, cut and merged as they should be, and errors name what is missing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.formats.layouts import layout_of
from halfbyte.formats.weight import QuantizedWeight
from halfbyte.serving.arrivals import LAYOUTS, Arrivals, Span, Weight, cut, keys_of, parameter_of
from halfbyte.serving.products import merged, product

N, K = 96, 256
KINDS = [("nf4", {"nested": True}), ("fp4", {"nested": False}), ("int4", {"group_size": 64}), ("mxfp4", {})]
CPU = torch.device("cpu")


def made(format: str, n: int = N, k: int = K, seed: int = 0, **settings: Any) -> QuantizedWeight:
    torch.manual_seed(seed)
    return hb.quantize(torch.randn(n, k, dtype=torch.bfloat16), format, **settings)


def dense(weight: Weight) -> torch.Tensor:
    return hb.dequantize(weight, torch.float32) if isinstance(weight, QuantizedWeight) else weight.float()


def whole(weight: Weight) -> dict[Hashable, Weight]:
    return {0: weight}


def test_parameters_have_names_of_their_own() -> None:
    names = [parameter_of(key) for key in keys_of(tuple(LAYOUTS))]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    assert names[0] == "weight"


@pytest.mark.parametrize(("format", "settings"), KINDS)
@pytest.mark.parametrize("backwards", [False, True])
def test_a_weight_is_there_with_its_last_tensor(format: str, settings: dict[str, Any], backwards: bool) -> None:
    q = made(format, **settings)
    arrivals = Arrivals(CPU, torch.bfloat16, None, tuple(LAYOUTS))
    tensors = list(layout_of(format).to_tensors("weight", q).items())
    for key, tensor in reversed(tensors) if backwards else tensors:
        assert not arrivals.found
        arrivals.add((0,), key, tensor, K, whole)
    (found,) = arrivals.take([0], "layer")
    assert torch.equal(dense(found), dense(q))
    assert not arrivals.found


def test_bytes_in_another_dtype_are_no_dense_weight() -> None:
    q = made("nf4", nested=False)
    arrivals = Arrivals(CPU, torch.bfloat16, {"format": "fp4"}, ("bitsandbytes",))
    for key, tensor in layout_of("nf4").to_tensors("weight", q).items():
        stored = tensor.view(-1).view(torch.bfloat16).view(-1, 1) if key == "weight" else tensor
        arrivals.add((0,), key, stored, K, whole)
    assert torch.equal(dense(arrivals.take([0], "layer")[0]), dense(q))


def test_dense_weights_stay_or_are_rounded() -> None:
    weight = torch.randn(N, K)
    for settings in (None, {"format": "nf4", "nested": True}):
        arrivals = Arrivals(CPU, torch.bfloat16, settings, ("bitsandbytes",))
        arrivals.add((0,), "weight", weight, K, whole)
        (found,) = arrivals.take([0], "layer")
        right = weight.bfloat16() if settings is None else hb.quantize(weight.bfloat16(), **settings)
        assert isinstance(found, QuantizedWeight) == (settings is not None)
        assert torch.equal(dense(found), dense(right))


def test_what_is_missing_or_not_read_is_named() -> None:
    tensors = layout_of("nf4").to_tensors("weight", made("nf4", nested=True))
    arrivals = Arrivals(CPU, torch.bfloat16, None, tuple(LAYOUTS))
    for key, tensor in tensors.items():
        if key != "weight.nested_absmax":
            arrivals.add((0,), key, tensor, K, whole)
    with pytest.raises(
        ValueError, match=r"model\.q_proj lacks a weight, number 0: .*'weight\.quant_map'.*get it again"
    ):
        arrivals.take([0], "model.q_proj")
    arrivals = Arrivals(CPU, torch.bfloat16, None, tuple(LAYOUTS))
    with pytest.raises(ValueError, match=r"model\.q_proj lacks a weight, number 0: the checkpoint gave nothing"):
        arrivals.take([0], "model.q_proj")
    for key, tensor in layout_of("int4").to_tensors("weight", made("int4")).items():
        arrivals.add((0,), key, tensor, K, whole)
    arrivals.add((0,), "weight_zero_point", torch.zeros(1), K, whole)
    with pytest.raises(ValueError, match=r"model\.q_proj has weight_zero_point; only symmetric"):
        arrivals.take([0], "model.q_proj")


def test_spans() -> None:
    assert [Span(64, 16, rank, 4).range for rank in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    # Two key heads for four processes: neighbours share one.
    assert [Span(64, 32, rank, 4).range for rank in range(4)] == [(0, 32), (0, 32), (32, 64), (32, 64)]
    assert Span(64, 64, 3, 4).range == (0, 64)
    for total, kept, size in ((64, 24, 2), (64, 16, 2), (16, 32, 2)):
        with pytest.raises(ValueError, match=f"{total} cannot be cut into parts of {kept}"):
            Span(total, kept, 0, size).range  # noqa: B018


@pytest.mark.parametrize(("format", "settings"), [*KINDS, ("dense", {})])
def test_cuts(format: str, settings: dict[str, Any]) -> None:
    weight: Weight = torch.randn(N, K) if format == "dense" else made(format, **settings)
    part = cut(weight, (32, 64), (64, 192))
    assert torch.equal(dense(part), dense(weight)[32:64, 64:192])
    assert cut(weight, (0, N), (0, K)) is weight


@pytest.mark.parametrize("kinds", [[0, 0, 0], [1, 1, 1], [2, 2], [0, 3, 0], [3, 3], [1, 1, 0, 3]])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_products_of_merged_weights(kinds: list[int], batch_invariant: bool) -> None:
    """The same values whatever was merged: as few weights as there can be, each row in its place."""
    choices = [("nf4", {"nested": True}), ("nf4", {"nested": False}), ("int4", {"group_size": 64})]
    weights: list[Weight] = []
    for place, kind in enumerate(kinds):
        if kind == 3:
            weights.append(torch.randn(32 + place, K))
        else:
            weights.append(made(choices[kind][0], n=32 + place, seed=place, **choices[kind][1]))
    fewer = merged(weights)
    assert len(fewer) == {(0, 0, 0): 3, (0, 3, 0): 3, (1, 1, 0, 3): 3}.get(tuple(kinds), 1)
    x, bias = torch.randn(3, 5, K), torch.randn(sum(weight.shape[0] for weight in weights))
    right = torch.nn.functional.linear(x.double(), torch.cat([dense(w) for w in weights]).double(), bias.double())
    for given in (bias, None):
        y = product(x, fewer, given, batch_invariant)
        wanted = right if given is not None else right - bias.double()
        assert y.shape == wanted.shape
        assert (y.double() - wanted).norm() / wanted.norm() < 1e-6
    if batch_invariant and 3 not in kinds:  # on a GPU, vLLM makes torch's own products batch-invariant
        assert torch.equal(product(x[:1, :1], fewer, bias, True), product(x, fewer, bias, True)[:1, :1])
