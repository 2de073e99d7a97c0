"""What `accelerate` says of a model: bytes that add up, kernels, and warnings that say what to do."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.measure import models
from halfbyte.models.report import Report, size
from halfbyte.nn import Linear4bit

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")


@pytest.fixture
def experts(tmp_path: Path) -> Any:
    """A small mixture of experts, loaded in 4 bits as far as that goes."""
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, vocab_size=128,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config = hb.HalfbyteConfig("nf4", block_size=32, experts=False)
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def held(model: nn.Module) -> int:
    """Bytes of every tensor of a model, and of the scales that bitsandbytes keeps beside its weights."""
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        found = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        for tensor in list(found):
            state = getattr(tensor, "quant_state", None)
            if state is not None:
                found += [state.absmax, state.offset, state.state2.absmax, state.state2.code]
        tensors.update((id(tensor), tensor) for tensor in found)
    return sum(tensor.nbytes for tensor in tensors.values())


def test_bytes_add_up() -> None:
    model = models.load("tiny", CPU, torch.bfloat16)
    report = hb.accelerate(model)
    weights = [hb.from_bitsandbytes(module.weight) for _, module in models.four_bit(model)]
    twice = sum(q.nested.code.nbytes for q in weights[1:])  # these share one code
    assert report.packed_bytes == sum(q.nbytes for q in weights) - twice
    assert report.packed_bytes + sum(report.dense.values()) == held(model)
    assert report.dense["embeddings"] == 1024 * 256 * 2
    assert report.kernels == dict.fromkeys(report.modules, "numba")


def test_what_is_left_alone_is_in_the_sums_too() -> None:
    model = models.load("tiny", CPU, torch.bfloat16)
    whole = hb.accelerate(model)
    hb.restore(model)
    model.model.layers[0].mlp.up_proj.forward = lambda x: x
    with pytest.warns(UserWarning, match="leaves 1 of 14 4-bit modules as they were"):
        report = hb.accelerate(model)
    assert (report.packed_bytes, report.dense) == (whole.packed_bytes, whole.dense)
    assert report.skipped.keys() == {"model.layers.0.mlp.up_proj"}
    assert report.kernels.keys() == set(report.modules) == set(whole.modules) - set(report.skipped)


def test_tied_weights_count_once() -> None:
    config = transformers.AutoConfig.for_model(
        "gpt2", vocab_size=128, n_embd=64, n_layer=1, n_head=2, n_positions=32, tie_word_embeddings=True
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.transformer.h[0].mlp.c_fc = Linear4bit(64, 256)
    report = hb.accelerate(model)
    assert report.dense["embeddings"] == (128 + 32) * 64 * 4
    assert not any("output layer" in reason for reason in report.dense)
    assert report.packed_bytes + sum(report.dense.values()) == held(model)
    assert report.dense["linear layers that were not loaded in 4 bits"] == (64 * 192 + 64 * 64 + 256 * 64) * 4


def test_experts_are_named(experts: Any) -> None:
    report = hb.accelerate(experts)
    [reason] = [reason for reason in report.dense if reason.startswith("experts are dense")]
    assert "3 Qwen3MoeExperts keep 6 3-D parameters, which bitsandbytes does not quantize" in reason
    assert report.dense[reason] == sum(p.nbytes for p in experts.parameters() if p.dim() == 3)
    assert reason in str(report)
    assert len(report.modules) == 12
    assert report.packed_bytes + sum(report.dense.values()) == held(experts)


def test_the_text_is_short_whatever_the_model() -> None:
    layers = {f"layer{i}": Linear4bit(64, 32, bias=False) for i in range(300)}
    for i in range(200, 300):
        layers[f"layer{i}"].forward = lambda x: x
    bnb = pytest.importorskip("bitsandbytes")
    layers |= {f"late{i}": bnb.nn.Linear4bit(64, 32, bias=False) for i in range(5)}
    with pytest.warns(UserWarning, match="leaves 5 of 305"):
        report = hb.accelerate(nn.ModuleDict(layers))
    lines = str(report).splitlines()
    assert lines[0] == "halfbyte computes 300 of 305 4-bit modules"
    assert "  300  numba" in lines
    [skipped] = [line for line in lines if "not quantized yet" in line]
    assert skipped.startswith("  5  ")
    assert skipped.endswith(": late0, late1, late2, ...")
    assert len(lines) < 10


def test_a_warning_says_what_to_do() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(bnb.nn.Linear4bit(64, 32))
    with pytest.warns(UserWarning, match="as they were") as caught:
        hb.accelerate(model)
    [told] = caught
    assert told.filename == __file__  # the line that called
    for words in ("leaves 1 of 1", "move it to its device first", ": 0)", "call accelerate again"):
        assert words in str(told.message)
    with pytest.warns(UserWarning, match=r"no 4-bit layer in this Linear .*HalfbyteConfig\(\)"):
        report = hb.accelerate(nn.Linear(8, 8))
    assert (report.modules, report.packed_bytes) == ((), 0)


def test_no_warning_where_all_is_well(experts: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hb.accelerate(experts)
        hb.accelerate(experts)


def test_a_report_is_frozen() -> None:
    report = hb.accelerate(models.load("tiny", CPU, torch.bfloat16))
    with pytest.raises(FrozenInstanceError):
        report.packed_bytes = 0  # type: ignore[misc]
    for mapping in (report.skipped, report.dense, report.kernels):
        with pytest.raises(TypeError):
            mapping["x"] = 1  # type: ignore[index]
    assert Report().dense == {}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (123456, "123 kB"), (4.2055e9, "4.21 GB"), (1.4e12, "1400 GB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert size(int(nbytes)) == text
