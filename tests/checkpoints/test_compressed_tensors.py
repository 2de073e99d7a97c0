"""INT4 checkpoints written here, loaded by plain transformers with the real compressed-tensors, if it is there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfbyte import ops
from halfbyte.checkpoints import dequantize_checkpoint, quantize_checkpoint
from halfbyte.formats.compressed_tensors import to_tensors

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_transformers_loads_what_we_write(tmp_path: Path, group_size: int) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, dtype=torch.bfloat16,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    summary = quantize_checkpoint(tmp_path / "dense", tmp_path / "int4", "int4", group_size=group_size)
    dequantize_checkpoint(tmp_path / "int4", tmp_path / "back")
    assert len(summary.layers) == 14

    tokens = torch.arange(24).view(2, 12)
    theirs, ours = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        for name in ("int4", "back")
    )
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)  # the first pass unpacks theirs
    for layer in summary.layers:
        module = layer.name.removesuffix(".weight")
        assert torch.equal(theirs.get_submodule(module).weight, ours.get_submodule(module).weight), module


def test_words_are_those_of_their_packer() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    weight = torch.randn(24, 256)
    tensors = to_tensors("w", ops.quantize(weight, "int4"))
    integers = unpack_from_int32(tensors["w_packed"], 4, torch.Size(weight.shape))
    expected = torch.round(weight / tensors["w_scale"].repeat_interleave(128, dim=1)).clamp(-7, 7)
    assert torch.equal(integers, expected.to(torch.int8))
    assert torch.equal(pack_to_int32(integers, 4), tensors["w_packed"])
