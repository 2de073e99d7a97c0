"""A diffusers transformer in 4 bits gives, accelerated, what bitsandbytes gives."""

from pathlib import Path

import pytest
import torch

import halfbyte as hb

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("bitsandbytes")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # diffusers wants a GPU to quantize, although bitsandbytes does not
        from diffusers.quantizers.bitsandbytes import BnB4BitDiffusersQuantizer as Quantizer

        monkeypatch.setattr(Quantizer, "validate_environment", lambda *_, **__: None)
    torch.manual_seed(0)
    dense = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    dense.to(torch.bfloat16).save_pretrained(tmp_path)
    config = diffusers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = diffusers.FluxTransformer2DModel.from_pretrained(
        tmp_path, quantization_config=config, torch_dtype=torch.bfloat16, device_map={"": DEVICE}
    )
    inputs = {
        "hidden_states": torch.randn(2, 12, 64), "encoder_hidden_states": torch.randn(2, 5, 64),
        "pooled_projections": torch.randn(2, 64), "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randn(12, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip
    inputs = {name: value.to(DEVICE, torch.bfloat16) for name, value in inputs.items()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        exact = dense.to(DEVICE)(**inputs).sample.float()
        report = hb.accelerate(model)
        ours = model(**inputs).sample.float()
        hb.restore(model)
        after = {name: value.clone() for name, value in model.state_dict().items()}
        theirs = model(**inputs).sample.float()  # on some CPUs this repacks the weights
    assert len(report.modules) > 5
    assert not report.skipped
    assert (ours - theirs).norm() < 2e-2 * theirs.norm()
    assert (ours - exact).norm() < 0.5 * exact.norm()  # 4 bits, of random weights
    assert all(torch.equal(before[name], after[name]) for name in before)
