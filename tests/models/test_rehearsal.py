"""The model that `halfbyte warm` decodes with: every kind of layer, in 4 bits, for a few steps of every size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.models import fused, loop, rehearsal
from halfbyte.models import transformers as host
from halfbyte.nn import Linear4bit
from halfbyte.warm import Settings

from .families import FAMILIES, SIDES, counted

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captures", "no_other_model")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rehearse(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, facts = FAMILIES[family]
    transformers.AutoConfig.for_model(kind, **SIDES | facts).save_pretrained(tmp_path)
    made: list[Any] = []
    quantize = rehearsal._quantize
    monkeypatch.setattr(rehearsal, "_quantize", lambda model, settings: (quantize(model, settings), made.append(model)))
    steps, layers = counted(monkeypatch, loop.TokenStep, "advance"), counted(monkeypatch, fused._Layer, "_attend")
    monkeypatch.setattr(rehearsal, "SIZES", ((1, 128), (1, 512), (2, 128)))
    before = transformers.GenerationMixin._sample
    assert rehearsal.rehearse(tmp_path, torch.float32, Settings("nf4", 64, True)) > 0
    (model,) = made
    assert len(model.model.layers) == (1 if family == "llama" else 2)
    assert all(isinstance(layer.mlp.up_proj, Linear4bit) for layer in model.model.layers)
    assert not isinstance(model.lm_head, Linear4bit)
    assert 3 * 3 <= len(steps) <= 3 * (rehearsal.NEW + loop.AHEAD + 1)
    assert len(layers) == len(steps) * len(model.model.layers)
    assert transformers.GenerationMixin._sample is before
    assert not any(name in vars(model) for name in host.HOOKS)


def test_shorten() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=12)
    rehearsal.shorten(config)
    assert config.num_hidden_layers == len(config.layer_types) == 6
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_only_where_it_helps(tmp_path: Path) -> None:
    assert not rehearsal.can_rehearse(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert rehearsal.can_rehearse(tmp_path) == torch.cuda.is_available()
