"""LoRA and DoRA adapters of PEFT over accelerated layers: the same numbers, and the same bits after a merge."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.measure.error import relative_error
from halfbyte.models import bitsandbytes as host
from halfbyte.models import peft as patch

peft = pytest.importorskip("peft")


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def weights(model: Any) -> dict[str, Tensor]:
    return {
        path: hb.dequantize(from_bitsandbytes(module.weight), torch.float32)
        for path, module in model.named_modules()
        if host.supports(module)
    }


def losses(model: Any, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = model(ids.to(model.device), labels=ids.to(model.device)).loss
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_and_backward(load: Any, prompts: Tensor, use_dora: bool, checkpointing: bool) -> None:
    model = adapted(load(), use_dora=use_dora).train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    theirs, their_gradients = losses(model, prompts[:8])
    assert len(hb.accelerate(model).modules) == 14
    ours, gradients = losses(model, prompts[:8])
    assert abs(ours - theirs) <= 1e-2 * abs(theirs)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, their_gradients[name]) < 3e-2, name


@pytest.mark.parametrize("use_dora", [False, True])
def test_merging_gives_the_bits_that_it_gives_without_halfbyte(load: Any, use_dora: bool) -> None:
    model = adapted(load(), use_dora=use_dora)
    plain = copy.deepcopy(model)
    hb.accelerate(model)
    model.merge_adapter()
    plain.merge_adapter()
    merged, right = weights(model), weights(plain)
    assert all(torch.equal(merged[path], right[path]) for path in right)
    model.unmerge_adapter()
    plain.unmerge_adapter()
    unmerged, right = weights(model), weights(plain)
    assert all(torch.equal(unmerged[path], right[path]) for path in right)


def test_merged_and_unloaded_it_still_runs_through_halfbyte(load: Any, prompts: Tensor) -> None:
    model = adapted(load())
    hb.accelerate(model)
    merged = model.merge_and_unload().eval()
    layers = [module for module in merged.modules() if host.supports(module)]
    assert all(map(host.is_applied, layers))
    x = torch.randn(3, layers[0].in_features, dtype=torch.bfloat16, device=merged.device)
    right = x.double() @ weights(merged)["model.layers.0.self_attn.q_proj"].double().T
    assert relative_error(layers[0](x), right) < 5e-3


@pytest.mark.usefixtures("no_other_model")
def test_the_function_is_replaced_wherever_it_is_and_put_back(load: Any) -> None:
    from peft.tuners.lora import bnb
    from peft.utils import integrations

    original = integrations.dequantize_bnb_weight
    assert original is not patch.dequantize_bnb_weight
    first, second = load(), load()
    hb.accelerate(first)
    hb.accelerate(second)
    layer = next(module for module in first.modules() if host.supports(module))
    assert bnb.dequantize_bnb_weight is integrations.dequantize_bnb_weight is patch.dequantize_bnb_weight
    assert torch.equal(integrations.dequantize_bnb_weight(layer.weight), original(layer.weight))
    hb.restore(first)
    assert bnb.dequantize_bnb_weight is patch.dequantize_bnb_weight
    hb.restore(second)
    assert bnb.dequantize_bnb_weight is integrations.dequantize_bnb_weight is original


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_lora_layer_in_one_node(load: Any, dropout: float, autocast: bool) -> None:
    """Results and all gradients beside the same formula in float64, at most as far from it as PEFT's are."""
    model = adapted(load(), lora_dropout=dropout).train()
    if not autocast:  # then its arithmetic is that of its parameters
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    layer = next(module for module in model.modules() if patch.supports(module))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight = hb.dequantize(from_bitsandbytes(layer.base_layer.weight), torch.float32).double()
    x = torch.randn(2, 7, layer.in_features, device=model.device, dtype=torch.bfloat16)
    upstream = torch.randn(2, 7, layer.out_features, device=model.device, dtype=torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        inputs = x.clone().requires_grad_()
        torch.manual_seed(1)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            y = layer(inputs)
        a.grad = b.grad = None
        y.backward(upstream)
        return y.detach(), inputs.grad, a.grad, b.grad  # type: ignore[return-value]

    theirs = run()
    hb.accelerate(model)
    assert patch._adapter(layer, x) is None or autocast or a.dtype is torch.bfloat16
    ours = run()
    torch.manual_seed(1)
    kept = layer.lora_dropout["default"](torch.ones_like(x)).double()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, a, b)]
    y = exact[0] @ weight.T + (exact[0] * kept) @ exact[1].T @ exact[2].T * layer.scaling["default"]
    y.backward(upstream.double())
    right = (y.detach(), *(tensor.grad for tensor in exact))
    for mine, other, reference in zip(ours, theirs, right, strict=True):
        assert mine.dtype == other.dtype
        assert relative_error(mine, reference) <= 1.1 * relative_error(other, reference) + 1e-3


def test_adapters_that_go_pefts_own_way(load: Any, prompts: Tensor) -> None:
    model = adapted(load()).eval()
    hb.accelerate(model)
    layer = next(module for module in model.modules() if patch.supports(module))
    x = torch.randn(2, layer.in_features, device=model.device, dtype=torch.bfloat16)
    with torch.autocast(model.device.type, torch.bfloat16):
        layer(x)
        assert patch._adapter(layer, x) is not None
        assert patch._adapter(layer, x.float()) is None
        with model.disable_adapter():
            assert patch._adapter(layer, x) is None
            assert torch.equal(layer(x), layer.base_layer(x))
        model.merge_adapter()
        assert patch._adapter(layer, x) is None
        model.unmerge_adapter()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        model.base_model.set_adapter(["default", "other"])
        assert patch._adapter(layer, x) is None
        assert layer(x).shape == (2, layer.out_features)
    model.set_adapter("default")
    assert patch._adapter(layer, x) is None  # fp32 adapters without autocast: PEFT computes them in fp32
    hb.restore(model)
    assert "forward" not in vars(layer)
