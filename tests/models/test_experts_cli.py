"""`halfbyte quantize` of models with experts, one by one and in stacks: transformers loads what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import halfbyte as hb
from halfbyte.checkpoints import dequantize_checkpoint, quantize_checkpoint
from halfbyte.cli import app

from .moe import FAMILIES, dequantized, experts_of, load, logits, make, rewritten, same_bits, stacks, stands_for
from .test_experts_checkpoints import MXFP4, in_mxfp4

pytest.importorskip("transformers", minversion="5.10")

from halfbyte.models.quantizer import HalfbyteConfig, config_from_compressed_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: list[dict[str, Any]] = [{"format": "nf4"}, {"format": "int4", "group_size": 32}, {"format": "mxfp4"}]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for family in FAMILIES:
        paths[family] = tmp_path_factory.mktemp(family)
        make(family).save_pretrained(paths[family])
    return paths


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["format"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_writes_is_what_loading_makes(
    sources: dict[str, Path], tmp_path: Path, family: str, kind: dict[str, Any]
) -> None:
    planned = quantize_checkpoint(sources[family], tmp_path / "x", dry_run=True, **kind)
    summary = quantize_checkpoint(sources[family], tmp_path / "x", **kind)
    assert not summary.experts
    assert not summary.skipped
    assert [layer.name for layer in planned.layers] == [layer.name for layer in summary.layers]
    assert all(layer.relative_error is not None and layer.relative_error < 0.2 for layer in summary.layers)
    said = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert said == HalfbyteConfig(**kind).to_dict()

    written = load(tmp_path / "x")
    by_loading = load(sources[family], quantization_config=HalfbyteConfig(**kind))
    assert experts_of(written).keys() == experts_of(by_loading).keys() != set()
    for path, experts in experts_of(written).items():
        for name, q in stacks(experts).items():
            expected = stacks(experts_of(by_loading)[path])[name]
            assert torch.equal(q.packed, expected.packed)
            assert torch.equal(q.scale, expected.scale)
    stands_for(written, dequantized(written, sources[family]))

    dequantize_checkpoint(tmp_path / "x", tmp_path / "back")
    dense = load(tmp_path / "back")
    assert not experts_of(dense)
    torch.testing.assert_close(logits(dense), logits(written), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_experts_of_gpt_oss_stay_in_mxfp4(sources: dict[str, Path], tmp_path: Path, format: str) -> None:
    source = rewritten(sources["gpt_oss"], tmp_path / "theirs", in_mxfp4, MXFP4)
    summary = quantize_checkpoint(source, tmp_path / "x", format)
    assert all("self_attn" in layer.name for layer in summary.layers)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "x"))
    names = [name for name in before if name.endswith(("_blocks", "_scales"))]
    assert len(names) == 8
    assert all(torch.equal(before[name], after[name]) for name in names)
    model = load(tmp_path / "x")
    assert {experts.gate_up.format for experts in experts_of(model).values()} == {"mxfp4"}
    assert model.model.layers[0].self_attn.q_proj.weight.format == format
    stands_for(model, dequantized(model, sources["gpt_oss"]))
    model.save_pretrained(tmp_path / "saved")
    same_bits(model, load(tmp_path / "saved"))
    dequantize_checkpoint(tmp_path / "x", tmp_path / "back")
    torch.testing.assert_close(logits(load(tmp_path / "back")), logits(model), rtol=1e-4, atol=1e-5)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command(sources: dict[str, Path], tmp_path: Path) -> None:
    result = run("quantize", sources["mixtral"], tmp_path / "x", "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["layers"]) == 8 + 2 * 3 * 4
    result = run("quantize", sources["mixtral"], tmp_path / "y", "--no-experts")
    assert result.exit_code == 0, result.output
    assert "left dense: 24 weights of experts" in " ".join(result.stdout.split())
    said = json.loads((tmp_path / "y" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "bitsandbytes"
    result = run("quantize", tmp_path / "x", tmp_path / "z")
    assert result.exit_code == 1
    assert "is quantized already" in result.stderr


def test_a_layer_is_quantized_as_a_whole(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"11 of the 12 weights of 'model\.layers\.1\.mlp\.experts' are chosen"):
        quantize_checkpoint(sources["qwen3_moe"], tmp_path / "x", exclude=["model.layers.1.mlp.experts.2.up_proj"])
    summary = quantize_checkpoint(sources["qwen3_moe"], tmp_path / "x", exclude=["model.layers.1.mlp.experts.*"])
    assert len(summary.experts) == 12
    model = load(tmp_path / "x")
    assert list(experts_of(model)) == ["model.layers.0.mlp.experts"]
    stands_for(model, dequantized(model, sources["qwen3_moe"]))
    # K = 96 of the down projections is no multiple of 64, so gate and up stay dense, too.
    summary = quantize_checkpoint(sources["qwen3_moe"], tmp_path / "y", "int4", group_size=64)
    assert len(summary.skipped) == 24
    assert not experts_of(load(tmp_path / "y", config=config_from_compressed_tensors(tmp_path / "y")))


def test_experts_that_nothing_computes_in_4_bits_stay_dense(tmp_path: Path) -> None:
    make("mixtral", hidden_act="relu").save_pretrained(tmp_path / "dense")
    summary = quantize_checkpoint(tmp_path / "dense", tmp_path / "x")
    assert len(summary.experts) == 24
    with pytest.raises(ValueError, match="one of several experts, of a kind that nothing keeps in 4 bits"):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "y", include=["*experts*"])


def test_only_experts(sources: dict[str, Path], tmp_path: Path) -> None:
    summary = quantize_checkpoint(sources["gpt_oss"], tmp_path, only=["*.experts.*"], overwrite=True)
    assert len(summary.layers) == 4
    model = load(tmp_path)
    assert len(experts_of(model)) == 2
    assert not any(isinstance(module, hb.nn.Linear4bit) for module in model.modules())
