"""Models with 4-bit experts on a GPU: loaded there expert by expert, their logits, adapters in grouped launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import halfbyte as hb
from halfbyte.measure.error import relative_error
from halfbyte.models import peft_experts
from halfbyte.models.peft_experts import Rows

from ..models.moe import FAMILIES, TOKENS, dequantized, experts_of, load, make, same_bits

pytest.importorskip("transformers", minversion="5.10")

from halfbyte.models.quantizer import HalfbyteConfig

DEVICE = torch.device("cuda", 0)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS.to(model.device)).logits.double().cpu()
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_saved_and_compared_with_dense(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path / "dense")
    config, options = HalfbyteConfig(), {"dtype": torch.bfloat16, "device_map": "auto"}
    model = load(tmp_path / "dense", quantization_config=config, **options)
    assert experts_of(model)
    assert all(parameter.device == DEVICE for parameter in model.parameters())
    on_cpu = load(tmp_path / "dense", quantization_config=config, dtype=torch.bfloat16)
    for path, experts in experts_of(on_cpu).items():
        assert torch.equal(experts.gate_up.packed, model.get_submodule(path).gate_up.packed.cpu())
    right = logits(dequantized(on_cpu, tmp_path / "dense"))
    assert relative_error(logits(model), right) < 0.05
    model.save_pretrained(tmp_path / "saved")
    same_bits(model, load(tmp_path / "saved", **options))


@pytest.mark.parametrize("sides", [(256, 16), (16, 384)], ids=["A", "B"])
def test_adapters_in_one_launch(sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one expert after the other; some experts have no row, and some rows have no expert."""
    count, rows_of_x = 16, 1000
    expert = torch.randint(-1, count + 1, (rows_of_x,), device=DEVICE)
    expert[expert == 3] = 4
    rows = Rows(expert, count)
    x = torch.randn(rows_of_x, sides[0], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(count, *sides, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows_of_x, sides[1], device=DEVICE, dtype=torch.bfloat16)
    results = []
    for grouped in (peft_experts._has_grouped(x, w), False):
        monkeypatch.setattr(peft_experts, "_has_grouped", lambda *_, grouped=grouped: grouped)
        y = peft_experts.product(x, w, rows)
        results.append((y.detach(), *torch.autograd.grad(y, (x, w), grad)))
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other.double()) < 1e-2
    assert not results[0][2][3].any()


def test_the_host_does_not_wait_for_rows() -> None:
    """Where experts' rows end, and products with them forward and back, stay on the device."""
    count, expert = 16, torch.randint(-1, 17, (1000,), device=DEVICE)
    x = torch.randn(1000, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(count, 256, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    q = hb.quantize(torch.randn(count, 512, 256, device=DEVICE).bfloat16(), "nf4")
    if not peft_experts._has_grouped(x, w):
        pytest.skip("needs Hopper")

    def step() -> tuple[torch.Tensor, ...]:
        rows = Rows(expert, count)
        low = peft_experts.product(x, w, rows)
        y = hb.grouped_linear(x, q, rows.expert)
        return torch.autograd.grad((low, y), (x, w), (low.detach(), y.detach()))

    right = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(found, right, strict=True):
        assert relative_error(one, other.double()) < 1e-2


def test_a_step_of_training(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion="0.21.2")
    make("qwen3_moe").save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=HalfbyteConfig(), dtype=torch.bfloat16, device_map={"": 0})
    config = peft.LoraConfig(
        r=8, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, config)
    hb.accelerate(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    ids, losses = TOKENS.to(DEVICE), []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
