"""Experts of small models, quantized while from_pretrained reads them: bits, logits, generate, save and load."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import halfbyte as hb
from halfbyte.nn import Linear4bit

from .memory import CAN_MEASURE, peak_of_loading
from .moe import (
    FAMILIES,
    PROJECTIONS,
    E,
    dequantized,
    experts_of,
    load,
    logits,
    make,
    oriented,
    same_bits,
    stacks,
    stands_for,
)

pytest.importorskip("transformers", minversion="5.10")

from halfbyte.models import experts_tensors
from halfbyte.models.quantizer import HalfbyteConfig

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[tuple[str, dict[str, Any]]] = [
    *((family, {"format": "nf4"}) for family in FAMILIES),
    ("qwen3_moe", {"format": "fp4", "block_size": 128}),
    ("qwen3_moe", {"format": "int4", "group_size": 32}),
    ("mixtral", {"format": "nf4", "experts": "mxfp4"}),
    ("gpt_oss", {"format": "mxfp4"}),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for family in FAMILIES:
        paths[family] = tmp_path_factory.mktemp(family)
        make(family).save_pretrained(paths[family])
    return paths


@pytest.mark.parametrize(
    ("family", "kind"), KINDS, ids=lambda given: given if isinstance(given, str) else given["format"]
)
def test_loaded_saved_and_loaded_again(
    checkpoints: dict[str, Path], family: str, kind: dict[str, Any], tmp_path: Path
) -> None:
    config = HalfbyteConfig(**kind)
    model = load(checkpoints[family], quantization_config=config)
    dense = make(family)
    assert len(experts_of(model)) == (1 if family == "deepseek_v3" else 2)
    for path, experts in experts_of(model).items():
        assert not experts.training
        original = dense.get_submodule(path)
        for name in PROJECTIONS:
            expected = hb.quantize(oriented(original, getattr(original, name).data), **config.experts_settings)
            for here, there in zip(stacks(experts)[name].tensors, expected.tensors, strict=True):
                assert torch.equal(here.view(-1), there.view(-1))
    stands_for(model, dequantized(model, checkpoints[family]))

    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any(key.endswith("experts.down_proj_scale") for key in saved)
    again = load(tmp_path)
    assert again.config.quantization_config.to_dict() == config.to_dict()
    same_bits(model, again)
    assert torch.equal(logits(model), logits(again))
    again.save_pretrained(tmp_path / "again")
    same_bits(model, load(tmp_path / "again"))


def test_experts_can_stay_dense(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = load(checkpoints["qwen3_moe"], quantization_config=HalfbyteConfig(experts=False))
    assert not experts_of(model)
    dense = make("qwen3_moe")
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj, dense.model.layers[0].mlp.experts.down_proj)
    model.save_pretrained(tmp_path)
    same_bits(model, load(tmp_path))


def test_modules_to_not_convert(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    config = HalfbyteConfig(modules_to_not_convert=["layers.0.mlp.experts"])
    model = load(checkpoints["qwen3_moe"], quantization_config=config)
    assert list(experts_of(model)) == ["model.layers.1.mlp.experts"]
    stands_for(model, dequantized(model, checkpoints["qwen3_moe"]))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    same_bits(model, again)
    stands_for(again, dequantized(model, checkpoints["qwen3_moe"]))


def test_stacks_that_transformers_renames(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.17")  # before, these models kept no fused experts
    make("granitemoe").save_pretrained(tmp_path / "dense")
    assert not any("experts" in key for key in load_file(tmp_path / "dense" / "model.safetensors"))
    model = load(tmp_path / "dense", quantization_config=HalfbyteConfig())
    assert len(experts_of(model)) == 2
    stands_for(model, dequantized(model, tmp_path / "dense"))
    model.save_pretrained(tmp_path / "saved")
    same_bits(model, load(tmp_path / "saved"))


def test_stacks_that_transformers_makes(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a model's own conversion does more than to merge, its result is quantized."""
    expected = load(checkpoints["qwen3_moe"], quantization_config=HalfbyteConfig())
    monkeypatch.setattr("halfbyte.models.experts_loading._parts", lambda *_: None)
    model = load(checkpoints["qwen3_moe"], quantization_config=HalfbyteConfig())
    same_bits(model, expected)
    model.save_pretrained(tmp_path)
    same_bits(model, load(tmp_path))


def test_one_expert_is_dense_at_a_time(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most, read = [0], experts_tensors._read

    def watched(given: list[Any]) -> Tensor:
        tensor = read(given)
        alive.add(tensor)
        most[0] = max(most[0], len(alive))
        return tensor

    monkeypatch.setattr(experts_tensors, "_read", watched)
    model = load(checkpoints["mixtral"], quantization_config=HalfbyteConfig())
    assert experts_of(model)
    assert 2 <= most[0] <= 3  # gate and up of one expert, and the last one of the expert before
    assert E > 3


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MEASURE, reason="memory is measured as Linux tells it")
def test_the_peak_of_memory_is_the_quantized_model_and_one_expert(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    hidden, inner, count = 512, 1024, 32
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_local_experts": count, "num_hidden_layers": 1}
    make("mixtral", **sizes).bfloat16().save_pretrained(tmp_path)
    peak, held = peak_of_loading(tmp_path, "bfloat16", checkpoints["mixtral"])
    gate_up = 2 * (2 * inner * hidden)  # bytes of an expert's in bf16
    assert peak - held < 3 * gate_up + 4e6  # as it is read, joined, and being rounded
    assert 3 * gate_up + 4e6 < count * gate_up / 5


def test_where_experts_go() -> None:
    """transformers copies converters, and infers the map of "auto" after it was given them."""
    places = experts_tensors.Places()
    merge = copy.deepcopy(experts_tensors.Merge(("w1",), {}, False, places))
    assert merge.places.of("model.layers.1.mlp.experts.down_proj") == torch.device("cpu")
    places.device_map = {
        "model.embed_tokens": "cpu",
        "model.layers.1": "cuda:1",
        "model.layers.10": torch.device("cuda", 2),
    }
    assert merge.places.of("model.layers.1.mlp.experts.down_proj") == torch.device("cuda", 1)
    assert merge.places.of("model.layers.10.mlp.experts.down_proj") == torch.device("cuda", 2)
    places.device_map = {"": "meta"}
    assert merge.places.of("model.layers.1.mlp.experts.down_proj") == torch.device("meta")


def test_the_biases_are_those_of_the_checkpoint(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["gpt_oss"], quantization_config=HalfbyteConfig(), dtype=torch.bfloat16)
    dense = make("gpt_oss").bfloat16()
    for path, experts in experts_of(model).items():
        original = dense.get_submodule(path)
        for name in PROJECTIONS:
            bias = getattr(experts, f"{name}_bias")
            assert bias.requires_grad
            assert torch.equal(bias, getattr(original, f"{name}_bias"))
            assert stacks(experts)[name].scale.dtype == torch.float32
            assert stacks(experts)[name].dtype == torch.bfloat16


def test_experts_that_cannot_be_cut_into_blocks(checkpoints: dict[str, Path]) -> None:
    options = {"format": "int4", "group_size": 64, "modules_to_not_convert": ["mlp.gate", "self_attn"]}
    with pytest.raises(ValueError, match=r"experts of 2 layers cannot be quantized: model\.layers\.0.*experts=False"):
        load(checkpoints["qwen3_moe"], quantization_config=HalfbyteConfig(**options))
    model = load(checkpoints["qwen3_moe"], quantization_config=HalfbyteConfig(experts=False, **options))
    assert not experts_of(model)


def test_unknown_experts_stay_dense(tmp_path: Path) -> None:
    make("mixtral", hidden_act="relu").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="experts of 2 layers dense: MixtralExperts has an activation that is none of"):
        model = load(tmp_path, quantization_config=HalfbyteConfig())
    assert not experts_of(model)
    assert any(isinstance(module, Linear4bit) for module in model.modules())
    stands_for(model, dequantized(model, tmp_path))


@pytest.mark.parametrize(("experts", "error"), [("int5", ValueError), (1, TypeError), (None, TypeError)])
def test_what_experts_may_be(experts: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"experts is|format is"):
        HalfbyteConfig(experts=experts)


def test_dequantize(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["gpt_oss"], quantization_config=HalfbyteConfig())
    expected = logits(model)
    dense = model.dequantize()
    assert not experts_of(dense)
    torch.testing.assert_close(logits(dense), expected, rtol=1e-4, atol=1e-5)
