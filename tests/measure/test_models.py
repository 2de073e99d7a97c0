"""Named shapes with experts: in 4 bits as they are published, dense for bitsandbytes, and the runs of both."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from halfbyte.measure import models
from halfbyte.measure.ab_run import ab_runs, dense_fits
from halfbyte.measure.error import relative_error

pytest.importorskip("transformers", minversion="5.10")
pytest.importorskip("bitsandbytes")

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
KINDS = {"qwen3_moe": "nf4", "mixtral": "nf4", "gpt_oss": "mxfp4"}


def load(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    own = {"num_experts": 4, "moe_intermediate_size": 96} if kind == "qwen3_moe" else {}
    monkeypatch.setitem(models.SHAPES, "few", (kind, SIZES | own))
    torch.manual_seed(0)
    return models.load("few", CPU, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_experts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(kind, monkeypatch)
    experts = models.experts_of(model)
    assert len(experts) == 2
    for module in experts.values():
        assert (module.gate_up.shape, module.down.shape) == ((4, 192, 128), (4, 128, 96))
        assert module.gate_up.format == module.down.format == KINDS[kind]
        assert module.has_bias == (kind == "gpt_oss")
    assert not any(parameter.is_meta for parameter in model.parameters())
    ids = torch.arange(3, 15).view(1, -1)

    def logits() -> torch.Tensor:
        """Of a copy: some CPUs have bitsandbytes repack what it runs."""
        with torch.no_grad():
            found: torch.Tensor = deepcopy(model)(ids).logits
        return found.double()

    right = logits()
    models.make_experts_dense(model, torch.float32)
    assert not models.experts_of(model)
    assert list(models.four_bit(model))  # the linear layers still are
    assert relative_error(logits(), right) < 0.02
    models.make_dense(model, torch.float32)
    assert not list(models.four_bit(model))
    assert relative_error(logits(), right) < 0.02


def test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = load("mixtral", monkeypatch), []
    found = [
        (list(run.providers), len(models.experts_of(run.ours))) for run in ab_runs(model, model.dtype, told.append)
    ]
    assert found == [(["halfbyte"], 2), (["bitsandbytes"], 0)]
    [run] = ab_runs(models.load("tiny", CPU, torch.bfloat16), torch.bfloat16, told.append)
    assert list(run.providers) == ["bitsandbytes", "halfbyte"]
    assert dense_fits(run.ours, torch.bfloat16, told.append)
    assert not dense_fits(load("mixtral", monkeypatch), torch.bfloat16, told.append)  # `ab_runs` has said why
    assert not told


def test_named_shapes_are_of_whole_blocks() -> None:
    """All that there are can be made: seen on the meta device, with one layer."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from halfbyte.models.experts import facts_of, is_experts, misfit

    sizes = {}
    for name in ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"):
        kind, facts = models.SHAPES[name]
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **facts))
        sizes[name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1)
        [module, *_] = [module for module in model.modules() if is_experts(module)]
        found = facts_of(module)
        assert not isinstance(found, str), found
        format = models.FORMATS_OF_EXPERTS.get(kind, "nf4")
        assert misfit(found, format, 32 if format == "mxfp4" else 64) is None
    assert sizes == {"qwen3-30b-a3b": 30.5, "gpt-oss-20b": 20.9, "mixtral-8x7b": 46.7}
