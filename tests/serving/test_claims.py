"""Which checkpoints are served, by their configuration, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.serving.claims import claims, holds_experts, layouts_of, settings_of, stays_dense

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def packed(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128} | changes
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "input_activations": None}},
    }  # fmt: skip


def test_claims() -> None:
    assert claims(BITSANDBYTES, None)
    assert claims({"quant_method": "halfbyte", "format": "nf4"}, None)
    assert claims(packed(), "halfbyte")
    assert not claims(packed(), None)  # vLLM has kernels for these
    assert not claims(BITSANDBYTES, "bitsandbytes")
    assert not claims({"quant_method": "bitsandbytes", "load_in_8bit": True}, None)
    assert not claims({"quant_method": "awq"}, None)


def test_layouts() -> None:
    assert layouts_of(BITSANDBYTES) == ("bitsandbytes",)
    assert layouts_of(packed()) == ("compressed-tensors",)
    assert layouts_of({"quant_method": "mxfp4"}) == layouts_of({"quant_method": "gpt_oss_mxfp4"}) == ("gpt-oss",)
    assert layouts_of({"quant_method": "halfbyte"}) == ("bitsandbytes", "compressed-tensors", "gpt-oss")


def test_gpt_oss_is_asked_for_or_has_no_kernels_elsewhere() -> None:
    config = {"quant_method": "mxfp4"}
    for asked, others_can, taken in (
        ("halfbyte", True, True), (None, True, False), ("mxfp4", True, False),
        ("halfbyte", False, True), (None, False, True), ("marlin", False, False),
    ):  # fmt: skip
        assert claims(config, asked, "gpt_oss", others_can) == taken
    assert not claims(config, None, "deepseek_v4", False)
    with pytest.raises(ValueError, match="mxfp4 of 'deepseek_v4'; of such, halfbyte serves gpt-oss alone"):
        claims(config, "halfbyte", "deepseek_v4")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "without load_in_4bit"),
        ({"quant_method": "fp8"}, "quant_method is 'fp8'; halfbyte serves bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format is 'float-quantized'"),
        (packed(num_bits=8), "weights of num_bits 8; halfbyte serves 4"),
        (packed(symmetric=False), "weights of symmetric False"),
        (packed(strategy="channel", group_size=None), "weights of strategy 'channel'"),
        (packed(group_size=16), "weights of group_size 16; halfbyte serves 32 or 64 or 128"),
        (packed(actorder="weight"), "weights of actorder 'weight'"),
        (
            {
                **packed(),
                "config_groups": {"a": {**packed()["config_groups"]["group_0"], "input_activations": {"x": 1}}},
            },
            "a of the checkpoint quantizes activations",
        ),
    ],
)
def test_others_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        claims(config, "halfbyte")


def test_settings() -> None:
    assert settings_of({})[0]["format"] == "nf4"
    settings, names = settings_of({"format": "int4", "group_size": 64, "modules_to_not_convert": ["o_proj"]})
    assert (settings["format"], settings["group_size"], names) == ("int4", 64, ("o_proj",))
    for options, said in (
        ({"formt": "nf4"}, "formt: known options are format"),
        ({"format": "nf5"}, "nf5"),
        ({"format": "int4", "nested": True}, "nested is for"),
    ):
        with pytest.raises(ValueError, match=said):
            settings_of(options)
    with pytest.raises(TypeError, match="a list of names"):
        settings_of({"modules_to_not_convert": "o_proj"})


def test_names_that_stay_dense() -> None:
    for name in ("o_proj", "self_attn.o_proj", "model.layers.1", r"model\.layers\.\d+\.self_attn", "model"):
        assert stays_dense("model.layers.1.self_attn.o_proj", [name]), name
    for name in ("proj", "model.layers.11", "layers.1.self", "attn"):
        assert not stays_dense("model.layers.1.self_attn.o_proj", [name]), name


def test_experts_are_found_in_the_files(tmp_path: Path) -> None:
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    save_file({expert: torch.zeros(2), "model.q_proj.weight.absmax": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert not holds_experts(tmp_path)
    save_file({f"{expert}.absmax": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert holds_experts(tmp_path)
    save_file({"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert holds_experts(tmp_path)
    save_file({"model.layers.0.mlp.experts.down_proj_scale": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"in stacks of halfbyte's own \(.*down_proj_scale\)"):
        holds_experts(tmp_path)
    index = {"weight_map": {f"{expert}_packed": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert holds_experts(tmp_path)
