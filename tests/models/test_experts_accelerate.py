"""`accelerate(model, experts=...)`: dense experts in 4 bits where they are, what the report says, save, restore."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte as hb
from halfbyte.nn import Experts4bit

from .moe import FAMILIES, dequantized, experts_of, load, logits, make, same_bits, stands_for

transformers = pytest.importorskip("transformers", minversion="5.10")

from halfbyte.models.quantizer import HalfbyteConfig, config_from_bitsandbytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make("qwen3_moe").save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def by_bitsandbytes(path: Path) -> Any:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return load(path, quantization_config=config, device_map="cpu")


def quietly_restored(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hb.restore(model)


def test_a_bitsandbytes_model(path: Path, tmp_path: Path) -> None:
    model = by_bitsandbytes(path)
    report = hb.accelerate(model)
    [(reason, nbytes)] = [item for item in report.dense.items() if item[0].startswith("experts are dense")]
    assert "2 Qwen3MoeExperts keep 4 3-D parameters" in reason
    assert "accelerate(model, experts='nf4') quantizes them" in reason
    dense_bytes = sum(p.nbytes for p in model.parameters() if p.dim() == 3)
    assert nbytes == dense_bytes
    assert not report.rounded
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hb.restore(model)

    report = hb.accelerate(model, experts="nf4")
    assert list(report.rounded) == list(experts_of(model)) == [f"model.layers.{i}.mlp.experts" for i in (0, 1)]
    assert (sum(report.rounded.values()), report.rounded_to) == (dense_bytes, "nf4")
    assert "were quantized to nf4: only loading the model again brings their weights back" in str(report)
    assert not any("experts" in reason for reason in report.dense)
    assert set(report.rounded) <= set(report.modules)
    assert {report.kernels[layer] for layer in report.rounded} == {"experts: numba"}
    for layer, experts in experts_of(model).items():
        original = make("qwen3_moe").get_submodule(layer)
        q = hb.quantize(original.gate_up_proj.data, nested=False)
        assert torch.equal(experts.gate_up.packed.view(-1), q.packed.view(-1))
    assert not hb.accelerate(model).rounded  # there is nothing left to round

    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", config=config_from_bitsandbytes(tmp_path / "saved"))
    for layer, experts in experts_of(model).items():
        same_bits(experts, again.get_submodule(layer))
    stands_for(again, dequantized(again, path))
    with pytest.warns(UserWarning, match="experts of 2 layers, which stay in nf4: .* Load the model again"):
        hb.restore(model)
    assert experts_of(model)


@pytest.mark.parametrize(("family", "format"), [("gpt_oss", "mxfp4"), ("mixtral", "nf4"), ("deepseek_v3", "fp4")])
def test_a_dense_model(tmp_path: Path, family: str, format: str) -> None:
    make(family).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    report = hb.accelerate(model, experts=format)
    assert set(report.rounded) == set(report.modules) == set(experts_of(model))
    assert {experts.gate_up.format for experts in experts_of(model).values()} == {format}
    stands_for(model, dequantized(model, tmp_path / "dense"))
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    same_bits(model, again)
    quietly_restored(model)


def test_a_model_that_was_not_loaded_is_saved_as_well(tmp_path: Path) -> None:
    model = make("mixtral")
    hb.accelerate(model, experts="nf4")
    model.save_pretrained(tmp_path)
    same_bits(model, load(tmp_path))
    quietly_restored(model)


def test_with_halfbyte_linear_layers(path: Path, tmp_path: Path) -> None:
    model = load(path, quantization_config=HalfbyteConfig("fp4", experts=False))
    hb.accelerate(model, experts="nf4")
    stands_for(model, dequantized(model, path))
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.config.quantization_config.experts == "nf4"
    same_bits(model, again)
    quietly_restored(model)


def test_what_is_left_alone() -> None:
    model = make("mixtral", hidden_act="relu")
    with pytest.warns(UserWarning, match="MixtralExperts has an activation"):
        report = hb.accelerate(model, experts="nf4")
    assert len(report.skipped) == 2
    assert not report.rounded
    assert "halfbyte cannot compute them: MixtralExperts has an activation" in str(report)

    model = make("mixtral")
    model.model.layers[0].mlp.experts.forward = lambda *given: given[0]
    with pytest.warns(UserWarning, match="its forward is not that of its class"):
        report = hb.accelerate(model, experts="nf4")
    assert list(report.skipped) == ["model.layers.0.mlp.experts"]
    assert list(report.rounded) == ["model.layers.1.mlp.experts"]
    quietly_restored(model)

    with pytest.warns(UserWarning, match="K is 64, not a multiple of group_size 128"):
        report = hb.accelerate(make("mixtral"), experts="int4")
    assert len(report.skipped) == 2
    experts = make("mixtral").model.layers[0].mlp.experts
    with pytest.warns(UserWarning, match="it is the model itself"):
        hb.accelerate(experts, experts="nf4")
    with pytest.raises(ValueError, match="format is 'int5'"):
        hb.accelerate(make("mixtral"), experts="int5")


def test_hooks_of_accelerate_stay() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = make("mixtral")
    experts = model.model.layers[0].mlp.experts
    hooks.add_hook_to_module(experts, hooks.AlignDevicesHook("cpu"))
    expected = logits(model)
    hb.accelerate(model, experts="nf4")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Experts4bit)
    assert isinstance(experts._hf_hook, hooks.AlignDevicesHook)
    assert torch.isfinite(logits(model)).all()
    assert (logits(model) - expected).norm() < 0.5 * expected.norm()
    quietly_restored(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_loaded_by_halfbyte_is_in_the_report(tmp_path: Path, family: str) -> None:
    make(family).save_pretrained(tmp_path)
    model = load(tmp_path, quantization_config=HalfbyteConfig())
    expected = logits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = hb.accelerate(model)
        assert set(experts_of(model)) <= set(report.modules)
        assert report.packed_bytes >= sum(m.gate_up.nbytes + m.down.nbytes for m in experts_of(model).values())
        assert torch.equal(logits(model), expected)
        hb.restore(model)
    assert torch.equal(logits(model), expected)
