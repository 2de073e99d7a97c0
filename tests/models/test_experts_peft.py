"""PEFT's adapters of experts: what PEFT itself computes of the dense experts that the 4-bit ones stand for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte.models import peft_experts
from halfbyte.models.peft_experts import Rows

from .moe import FAMILIES, TOKENS, dequantized, experts_of, generated, load, logits, make, stacks

pytest.importorskip("transformers", minversion="5.10")
peft = pytest.importorskip("peft", minversion="0.21.2")

from halfbyte.models.quantizer import HalfbyteConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = ("experts.gate_up_proj", "experts.down_proj")


def adapted(model: Any, targets: tuple[str, ...] = BOTH, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=list(targets), **options)
    model = peft.get_peft_model(model, config)
    return drawn(model, seed)


def drawn(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Of each family the 4-bit model and the dense one that it stands for."""
    found = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        make(family).save_pretrained(path)
        model = load(path, quantization_config=HalfbyteConfig())
        found[family] = model, dequantized(model, path)
    return found


def losses(model: Any) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours: Any, theirs: Any) -> None:
    (loss, gradients), (their_loss, their_gradients) = losses(ours), losses(theirs)
    assert loss == pytest.approx(their_loss, rel=1e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
def test_forward_and_backward(pairs: Any, family: str, targets: tuple[str, ...]) -> None:
    ours, theirs = (adapted(copy.deepcopy(model), targets) for model in pairs[family])
    state = peft.get_peft_model_state_dict(theirs)
    hb.accelerate(ours)
    assert {name: t.shape for name, t in peft.get_peft_model_state_dict(ours).items()} == {
        name: t.shape for name, t in state.items()
    }
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-5)
    with Largest() as largest:
        losses(ours)
    assert largest.numel < min(q.numel for experts in experts_of(ours).values() for q in stacks(experts).values())
    same_gradients(ours.train(), theirs.train())
    hb.restore(ours)
    assert not any("forward" in vars(module) for module in ours.modules() if peft_experts.supports(module))


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_a_step_of_training_and_generate(pairs: Any) -> None:
    ours, theirs = (adapted(copy.deepcopy(model)) for model in pairs["mixtral"])
    hb.accelerate(ours)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        before, _ = losses(model)
        optimizer.step()
        after, _ = losses(model)
        assert after < before
    one, other = peft.get_peft_model_state_dict(ours), peft.get_peft_model_state_dict(theirs)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)
    assert torch.equal(generated(ours.eval()), generated(theirs.eval()))


def test_gradient_checkpointing_and_attention_too(tmp_path: Path) -> None:
    make("qwen3_moe").save_pretrained(tmp_path)
    quantized = load(tmp_path, quantization_config=HalfbyteConfig(modules_to_not_convert=["q_proj", "v_proj"]))
    models = []
    for model in (quantized, dequantized(quantized, tmp_path)):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=list(BOTH))
        model = drawn(peft.get_peft_model(model, config), 1)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        models.append(model.train())
    hb.accelerate(models[0])
    same_gradients(*models)


def test_several_adapters_one_disabled_and_none(pairs: Any) -> None:
    models = [adapted(copy.deepcopy(model)) for model in pairs["mixtral"]]
    for model in models:
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=list(BOTH))
        model.add_adapter("second", config)
        drawn(model, 3)
    hb.accelerate(models[0])
    seen = []
    for active in (["default"], ["second"], ["default", "second"]):
        for model in models:
            model.base_model.set_adapter(active)
        ours, theirs = map(logits, models)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        seen.append(ours)
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])
    with models[0].disable_adapter(), models[1].disable_adapter():
        torch.testing.assert_close(logits(models[0]), logits(models[1]), rtol=1e-4, atol=1e-5)


def test_adapters_of_a_dense_model_go_on_over_quantized_experts(tmp_path: Path) -> None:
    make("gpt_oss").save_pretrained(tmp_path)
    model = adapted(load(tmp_path))
    state = {name: tensor.clone() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    hb.accelerate(model, experts="nf4")
    ours = logits(model)
    with pytest.warns(UserWarning, match="stay in nf4"):
        hb.restore(model)
    dense = adapted(dequantized_base(model, tmp_path))
    peft.set_peft_model_state_dict(dense, state)
    torch.testing.assert_close(ours, logits(dense), rtol=1e-4, atol=1e-5)


def dequantized_base(model: Any, path: Path) -> Any:
    """The dense model of a PEFT model's experts."""
    base = model.unload()
    assert len(experts_of(base)) == 2
    return dequantized(base, path)


def test_bf16_and_autocast(pairs: Any) -> None:
    ours, theirs = (adapted(copy.deepcopy(model)) for model in pairs["qwen3_moe"])
    hb.accelerate(ours)
    right = logits(theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert (logits(ours) - right).norm() < 0.05 * right.norm()
    hb.restore(ours)
    ours.bfloat16()
    assert {p.dtype for n, p in ours.named_parameters() if n.endswith("_scale")} == {torch.float32}
    hb.accelerate(ours)
    assert (logits(ours).float() - right).norm() < 0.05 * right.norm()


def test_merging_is_refused(pairs: Any) -> None:
    model = adapted(copy.deepcopy(pairs["mixtral"][0]))
    hb.accelerate(model)
    with pytest.raises(ValueError, match="cannot be merged into 4-bit experts"):
        model.merge_adapter()
    with pytest.raises(ValueError, match="cannot be merged into 4-bit experts"):
        model.merge_and_unload()


def test_an_older_peft_is_told(pairs: Any) -> None:
    model = adapted(copy.deepcopy(pairs["mixtral"][0]))
    hb.accelerate(model)
    for module in model.modules():
        if peft_experts.supports(module):
            module.lora_A["default"] = nn.Linear(32, 16, bias=False)
    with pytest.raises(ValueError, match=r"maps 32 to .* pip install -U peft"):
        model(TOKENS)


def test_adapters_turned_round(tmp_path: Path) -> None:
    """PEFT 0.18 has A at the output of dense experts [E, N, K], and B at their input."""
    make("mixtral").save_pretrained(tmp_path)
    model = adapted(load(tmp_path))
    hb.accelerate(model, experts="nf4")
    expected = logits(model)
    for module in model.modules():
        if peft_experts.supports(module):
            a, b = module.lora_A["default"], module.lora_B["default"]
            n, k, count = len(b.weight), a.weight.shape[1], module.num_experts
            turned = b.weight.data.view(n, -1, count).permute(2, 1, 0).reshape(-1, n)
            b.weight.data = a.weight.data.view(count, -1, k).permute(2, 1, 0).reshape(k, -1)
            a.weight.data = turned
            module._did_swap_in_out_features = False
            assert peft_experts._is_turned(module, module.get_base_layer())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True], ids=["one by one", "torch's grouped product"])
def test_rows_without_an_expert_are_zeros(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is what GPUs use; torch has it for bf16 on CPUs as well."""
    monkeypatch.setattr(peft_experts, "_has_grouped", lambda *_: grouped)
    torch.manual_seed(0)
    expert = torch.tensor([3, -1, 0, 3, 4, 1])
    rows = Rows(expert, 4)
    x, w = torch.randn(6, 16).bfloat16().requires_grad_(), torch.randn(4, 16, 8).bfloat16().requires_grad_()
    y = peft_experts.product(x[rows.order], w, rows)
    none = torch.zeros(8, dtype=torch.bfloat16)
    expected = torch.stack([x[i] @ w[e] if 0 <= e < 4 else none for i, e in enumerate(expert.tolist())])
    torch.testing.assert_close(y, expected[rows.order])
    grad = torch.randn(6, 8).bfloat16()
    ours = torch.autograd.grad(y, (x, w), grad)
    theirs = torch.autograd.grad(expected[rows.order], (x, w), grad)
    for one, other in zip(ours, theirs, strict=True):  # autograd adds the rows of an expert up in bf16
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
