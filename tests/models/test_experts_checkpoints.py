"""Checkpoints in which other libraries keep 4-bit experts: every form of keys is read, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss

from .moe import (
    PROJECTIONS,
    E,
    H,
    I,
    dequantized,
    experts_of,
    load,
    logits,
    make,
    oriented,
    rewritten,
    same_bits,
    stacks,
    stands_for,
)

pytest.importorskip("transformers", minversion="5.10")

from halfbyte.models.quantizer import (
    config_from_bitsandbytes,
    config_from_compressed_tensors,
    config_from_gpt_oss,
)

pytestmark = pytest.mark.usefixtures("one_thread")

ONE = re.compile(r"experts\.\d+\.\w+\.weight$")
BITSANDBYTES = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8",
}  # fmt: skip
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        },
    },
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    paths: dict[str, Path] = {}

    def written(family: str) -> Path:
        if family not in paths:
            paths[family] = tmp_path_factory.mktemp(family)
            make(family).save_pretrained(paths[family])
        return paths[family]

    return written


def in_nf4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return bitsandbytes.to_tensors(name, hb.quantize(tensor)) if ONE.search(name) else {name: tensor}


def in_int4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    q = hb.quantize(tensor, "int4", group_size=32) if ONE.search(name) else None
    return {name: tensor} if q is None else compressed_tensors.to_tensors(name, q)


def values(model: Any, path: str, name: str) -> Tensor:
    return hb.dequantize(stacks(model.get_submodule(path))[name])


def of_one_by_one(family: str, path: str, name: str, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The stack of a dense model, each projection of each expert rounded for itself."""
    stack: Tensor = getattr(make(family).get_submodule(path), name).data
    parts = 2 if name == "gate_up_proj" else 1
    return torch.stack([torch.cat([rounded(part) for part in expert.chunk(parts)]) for expert in stack])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize(
    ("change", "quantization", "read"),
    [(in_nf4, BITSANDBYTES, config_from_bitsandbytes), (in_int4, INT4, config_from_compressed_tensors)],
    ids=["bitsandbytes", "compressed-tensors"],
)
def test_one_by_one(
    dense: Callable[[str], Path], tmp_path: Path, family: str, change: Any, quantization: Any, read: Any
) -> None:
    path = rewritten(dense(family), tmp_path / "theirs", change, quantization)
    model = load(path, config=read(path))
    assert len(experts_of(model)) == (1 if family == "deepseek_v3" else 2)
    options = {"format": "int4", "group_size": 32} if quantization is INT4 else {}
    for layer in experts_of(model):
        for name in PROJECTIONS:
            # Nested scales too: their offsets differ from one projection to the next.
            expected = of_one_by_one(family, layer, name, lambda part: hb.dequantize(hb.quantize(part, **options)))
            assert torch.equal(values(model, layer, name), expected)
    stands_for(model, dequantized(model, dense(family)))
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    same_bits(model, again)
    assert torch.equal(logits(model), logits(again))


def unsloth_gpt_oss(name: str, tensor: Tensor) -> dict[str, Tensor]:
    match = re.fullmatch(r"(.*experts)\.(gate_up|down)_proj(_bias)?", name)
    if match is None:
        return {name: tensor}
    tensors: dict[str, Tensor] = {}
    for number, expert in enumerate(tensor):
        one = f"{match[1]}.{match[2]}_projs.{number}"
        if match[3]:
            tensors[f"{one}.bias"] = expert
        else:
            tensors |= bitsandbytes.to_tensors(f"{one}.weight", hb.quantize(expert.T.contiguous()))
    return tensors


def test_gpt_oss_of_unsloth(dense: Callable[[str], Path], tmp_path: Path) -> None:
    path = rewritten(dense("gpt_oss"), tmp_path, unsloth_gpt_oss, BITSANDBYTES)
    model = load(path, config=config_from_bitsandbytes(path), dtype=torch.bfloat16)
    biases = [p for name, p in model.named_parameters() if name.endswith("_proj_bias")]
    assert len(biases) == 4
    assert {bias.dtype for bias in biases} == {torch.bfloat16}
    model = load(path, config=config_from_bitsandbytes(path))
    original = make("gpt_oss")
    for layer in experts_of(model):
        theirs = original.get_submodule(layer)
        for name in PROJECTIONS:
            stack = oriented(theirs, getattr(theirs, name).data)
            expected = torch.stack([hb.dequantize(hb.quantize(expert)) for expert in stack])
            assert torch.equal(values(model, layer, name), expected)
    stands_for(model, dequantized(model, dense("gpt_oss")))


def in_mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not re.search(r"experts\.(gate_up|down)_proj$", name):
        return {name: tensor}
    return gpt_oss.to_tensors(name, hb.quantize(tensor.transpose(1, 2).contiguous(), "mxfp4"))


def test_gpt_oss_in_mxfp4_is_read_as_it_is(
    dense: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rewritten(dense("gpt_oss"), tmp_path / "theirs", in_mxfp4, MXFP4)
    with monkeypatch.context() as patched:
        for module in ("quantizer", "experts", "experts_tensors"):
            patched.delattr(f"halfbyte.models.{module}.quantize")  # nothing is rounded
        model = load(path, config=config_from_gpt_oss(path))
    original = make("gpt_oss")
    for layer, experts in experts_of(model).items():
        theirs = original.get_submodule(layer)
        for name in PROJECTIONS:
            q = hb.quantize(oriented(theirs, getattr(theirs, name).data), "mxfp4")
            assert torch.equal(stacks(experts)[name].packed, q.packed)
            assert torch.equal(stacks(experts)[name].scale, q.scale)
    assert experts.gate_up.shape == (E, 2 * I, H)
    stands_for(model, dequantized(model, dense("gpt_oss")))
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert again.config.quantization_config.experts is True
    same_bits(model, again)


def test_dense_experts_of_a_quantized_checkpoint_stay_dense(dense: Callable[[str], Path], tmp_path: Path) -> None:
    def attention(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return bitsandbytes.to_tensors(name, hb.quantize(tensor)) if "self_attn.q_proj" in name else {name: tensor}

    path = rewritten(dense("mixtral"), tmp_path / "theirs", attention, BITSANDBYTES)
    model = load(path, config=config_from_bitsandbytes(path))
    assert not experts_of(model)
    original = make("mixtral").model.layers[1].mlp.experts
    assert torch.equal(model.model.layers[1].mlp.experts.gate_up_proj, original.gate_up_proj)
    model.save_pretrained(tmp_path / "ours")
    same_bits(model, load(tmp_path / "ours"))


def test_half_of_the_experts(dense: Callable[[str], Path], tmp_path: Path) -> None:
    def gate_and_up(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor} if "down" in name else in_nf4(name, tensor)

    path = rewritten(dense("qwen3_moe"), tmp_path, gate_and_up, BITSANDBYTES)
    with pytest.raises(ValueError, match="only gate_up_proj is 4-bit; both projections must be, or none"):
        load(path, config=config_from_bitsandbytes(path))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (r"experts\.2\.up_proj\.weight", "1 of 8 projections are missing, such as up_proj of expert 2"),
        (r"experts\.2\.up_proj\.weight\.absmax$", "absmax' is missing"),
    ],
)
def test_what_is_incomplete_does_not_load(
    dense: Callable[[str], Path], tmp_path: Path, lost: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def without(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {key: t for key, t in in_nf4(name, tensor).items() if not re.search(lost, key)}

    path = rewritten(dense("qwen3_moe"), tmp_path, without, BITSANDBYTES)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        load(path, config=config_from_bitsandbytes(path))
    assert message in " ".join(caplog.text.split())


def test_zero_points_are_refused(dense: Callable[[str], Path], tmp_path: Path) -> None:
    def asymmetric(name: str, tensor: Tensor) -> dict[str, Tensor]:
        tensors = in_int4(name, tensor)
        if ONE.search(name):
            tensors[f"{name}_zero_point"] = torch.zeros(1, dtype=torch.int32)
        return tensors

    path = rewritten(dense("qwen3_moe"), tmp_path, asymmetric, INT4)
    with pytest.raises(RuntimeError):
        load(path, config=config_from_compressed_tensors(path))


@pytest.mark.parametrize(
    ("read", "quantization", "message"),
    [
        (config_from_compressed_tensors, MXFP4, "is mxfp4; compressed-tensors' symmetric 4-bit integers"),
        (config_from_compressed_tensors, {**INT4, "config_groups": {}}, "in groups of one size"),
        (config_from_gpt_oss, BITSANDBYTES, "is bitsandbytes; a checkpoint of gpt-oss"),
        (config_from_bitsandbytes, INT4, "is compressed-tensors, without load_in_4bit"),
    ],
)
def test_configurations_of_other_kinds(
    dense: Callable[[str], Path], tmp_path: Path, read: Any, quantization: Any, message: str
) -> None:
    path = rewritten(dense("mixtral"), tmp_path, lambda name, tensor: {name: tensor}, quantization)
    with pytest.raises(ValueError, match=message):
        read(path)
