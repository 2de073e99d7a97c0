"""The kernel of routers without a GPU: that it compiles for every kind of model, and chooses right on a CPU."""

from __future__ import annotations

import struct
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import Shape
from gpus import H200
from rings import usage

from halfbyte.kernels.common.device import properties_for
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.common.nvrtc import compile_cubin
from halfbyte.kernels.experts import choose, router_reference
from halfbyte.kernels.pointwise import reference

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Tokens, experts, K, those chosen, and: softmax over all, then over the sum of the best, a bias, narrow weights, and a
# norm.
CASES = [
    (3, 128, 256, 8, BF16, (True, True, False, False, False)),
    (11, 8, 1056, 2, F16, (True, False, False, True, False)),
    (8, 40, 96, 4, BF16, (False, False, True, True, False)),
    (11, 40, 1056, 4, BF16, (True, True, True, False, True)),
    (9, 8, 4096, 2, F16, (False, True, False, True, True)),
]


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
@pytest.mark.parametrize("alone", [True, False], ids=["one CTA", "a cluster"])
@pytest.mark.parametrize(("tokens", "experts", "k", "top_k", "dtype", "kinds"), CASES, ids=str)
def test_chooses(
    tokens: int,
    experts: int,
    k: int,
    top_k: int,
    dtype: torch.dtype,
    kinds: tuple[bool, ...],
    alone: bool,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    cluster = 1 if alone else choose.cluster_of(experts)
    x, weight = torch.randn(tokens, k).to(dtype), torch.randn(experts, k).to(dtype)
    weight[3] = weight[5] = weight[1]  # ties, of which the first wins
    before, normalizes, has_bias, narrow, has_norm = kinds
    norm = Norm((1 + torch.randn(k) / 8).to(dtype), 1e-5, 1.0 if dtype is F16 else 0.0)
    bias = torch.randn(experts).to(dtype) if has_bias else None
    if bias is not None:
        bias[3] = bias[5] = bias[1]
    ids = torch.full((tokens + 1, top_k), 77)
    weights = torch.full((tokens + 1, top_k), 7.0, dtype=dtype if narrow else torch.float32)
    normed = torch.full((tokens + 1, k), 7.0, dtype=dtype)
    made = choose.variant(H200, dtype, experts, k, top_k, *kinds, cluster=cluster, overlaps=False)
    given = x, weight, weight if bias is None else bias, norm.weight, ids, weights, normed
    bits = struct.pack("".join(choose.LAYOUT), *(t.data_ptr() for t in given), tokens, *norm[1:])
    shared = choose.shared_bytes(experts, cluster, k if has_norm else 0)
    shape = Shape(-(-tokens // choose.TOKENS), 32 * choose.WARPS, shared, y=cluster, cluster=cluster)
    assert cuda_on_cpu.run(tmp_path, made, "choose", bits, shape, []) == 0
    if has_norm:
        right = reference.rms_norm(x.double(), norm.weight.double(), *norm[1:])
        torch.testing.assert_close(normed[:tokens].double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)
        x = normed[:tokens]
    assert (normed[tokens if has_norm else 0 :] == 7).all()
    scores = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scores = scores.to(dtype)
    right = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    assert (ids[:tokens] == right).all()
    _, shares = router_reference.route(scores, top_k, before, normalizes, torch.float32)
    torch.testing.assert_close(weights[:tokens].float(), shares, rtol=2.0**-7 if narrow else 1e-4, atol=1e-7)
    assert (ids[tokens:] == 77).all()
    assert (weights[tokens:] == 7).all()


@pytest.mark.slow
@cuda_on_cpu.needs_compiler
def test_what_is_no_number(tmp_path: Path) -> None:
    """Ids are those of experts, and different ones, whatever the scores are."""
    x, weight = torch.ones(2, 32, dtype=BF16), torch.zeros(16, 32, dtype=BF16)
    weight[4], weight[9], weight[2] = float("nan"), float("inf"), float("-inf")
    x[1] = float("nan")
    ids, weights = torch.full((2, 4), 77), torch.empty(2, 4)
    made = choose.variant(H200, BF16, 16, 32, 4, True, True, False, False, cluster=1, overlaps=False)
    given = x, weight, weight, weight, ids, weights, x
    bits = struct.pack("".join(choose.LAYOUT), *(t.data_ptr() for t in given), 2, 0.0, 0.0)
    shape = Shape(1, 32 * choose.WARPS, choose.shared_bytes(16, 1))
    assert cuda_on_cpu.run(tmp_path, made, "choose", bits, shape, []) == 0
    assert ids.tolist() == [[4, 9, 0, 1], [0, 1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "experts", "k"),
    [(90, 128, 2048), (90, 256, 4096), (100, 8, 4096), (120, 32, 2880), (90, 512, 2048), (90, 256, 7168)],
)
def test_compiles_into_registers(capability: int, experts: int, k: int, tmp_path: Path) -> None:
    dtype, kinds = (F16, (True, True, False, False)) if capability == 100 else (BF16, (False, True, True, True))
    kinds = (*kinds, k <= choose.MOST_NORMED_K and experts <= choose.MOST_NORMED_EXPERTS)
    made = choose.variant(properties_for(f"sm_{capability}"), dtype, experts, k, 4, *kinds)
    path = tmp_path / "choose.cubin"
    path.write_bytes(compile_cubin(made.source, made.capability, dict(made.constants)))
    used = usage(path, "choose")
    assert used["STACK"] == used["LOCAL"] == 0, used
    assert used["REG"] <= 128
    assert choose.shared_bytes(experts, choose.cluster_of(experts), k if kinds[-1] else 0) <= 48 * 1024


def test_supports() -> None:
    assert [choose.cluster_of(experts) for experts in (8, 16, 32, 40, 64, 128, 512)] == [1, 1, 2, 4, 4, 8, 8]
    x, weight = torch.zeros(4, 64), torch.zeros(8, 64)
    assert not choose.supports(x, weight, None, 2, F32)
    x, weight = x.to(BF16), weight.to(BF16)
    assert not choose.supports(x[:0], weight, None, 2, F32)
    assert not choose.supports(x[:, :48].contiguous(), weight[:, :48].contiguous(), None, 2, F32)
    assert not choose.supports(x, weight, None, 9, F32)
    assert not choose.supports(x, weight, torch.zeros(8), 2, F32)
    assert not choose.supports(x, weight, None, 2, F16)
    norm = Norm(torch.ones(64, dtype=BF16), 1e-5)
    assert choose.supports_norm(norm, x, 256)
    assert not choose.supports_norm(norm, x, 257)
    assert not choose.supports_norm(norm._replace(weight=norm.weight.float()), x, 8)
    assert not choose.supports_norm(norm._replace(weight=torch.ones(128, dtype=BF16)[::2]), x, 8)
    wide = torch.zeros(4, 2 * choose.MOST_NORMED_K, dtype=BF16)
    assert not choose.supports_norm(Norm(wide[0], 1e-5), wide, 8)
