"""Router, experts and shared experts of a mixture-of-experts model are classes of their own, with bytes and flops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.nn import Experts4bit
from halfbyte.roofline.names import Label
from halfbyte.roofline.roles import Call, marked
from halfbyte.roofline.work import Shape, work_of

transformers = pytest.importorskip("transformers", minversion="5.10")

E, H, I, TOKENS, TOP = 8, 64, 96, 12, 2  # noqa: E741


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "deepseek_v3", vocab_size=96, hidden_size=H, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=128, moe_intermediate_size=I, n_routed_experts=E, num_experts_per_tok=TOP, n_group=2,
        topk_group=2, first_k_dense_replace=1, n_shared_experts=1, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def calls_of(model: Any) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    with marked(model) as calls, torch.no_grad():
        model(torch.arange(TOKENS)[None])
    for call in calls:
        if call.label.group == "products":
            found.setdefault(call.label.role, []).append(call)
    return found


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "nf4"])
def test_classes_bytes_and_flops(model: Any, packed: bool) -> None:
    experts = model.model.layers[1].mlp.experts
    stored = experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    if packed:
        hb.accelerate(model, experts="nf4")
        experts = model.model.layers[1].mlp.experts
        assert isinstance(experts, Experts4bit)
        stored = experts.gate_up.nbytes + experts.down.nbytes
    calls = calls_of(model)
    assert {"router", "experts", "shared_gate", "shared_up", "shared_down", "gate", "up", "down"} <= set(calls)
    [call] = calls["experts"]
    assert (call.rows, call.k, call.n) == (TOKENS * TOP, H, 3 * I)
    assert 1 <= call.weights <= E
    assert call.weight == stored * call.weights // E
    [router] = calls["router"]
    assert (router.rows, router.k, router.n) == (TOKENS, H, E)
    assert router.weight == E * H * 4
    work = work_of([call], Shape(1, TOKENS, (), 4, 4, 16), {"experts": packed})
    amount = work[Label("products", "experts")]
    assert amount.flops == 2 * TOKENS * TOP * 3 * H * I
    assert amount.least == call.weight + call.moved
    if packed:  # each expert that had a token is made dense
        assert amount.bytes == 2 * 3 * H * I * call.weights + call.moved
