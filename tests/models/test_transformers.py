"""Several models in one module: each that can be captured is hooked, each that cannot is named, and restore undoes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.models import transformers as host

GRAPHS = "on CUDA graphs, from the second token on"
ALL, NONE = set(host.HOOKS), set[str]()


@pytest.fixture
def models(load: Any) -> dict[str, Any]:
    return {name: load() for name in ("a", "b", "c")}


@pytest.fixture
def refused(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of models that cannot be captured. All others can, as they could on a GPU."""
    names: set[str] = set()
    looked = host._reason

    def reason(model: Any) -> str | None:
        if any(model is models[name] for name in names):
            return "it is too small"
        found = looked(model)
        return None if found is None or "CUDA graphs need a GPU" in found else found

    monkeypatch.setattr(host, "_reason", reason)
    return names


def hooks_of(models: dict[str, Any]) -> dict[str, set[str]]:
    """The hooks that are a model's own, whoever put them there."""
    return {name: set(host.HOOKS) & set(vars(model)) for name, model in models.items()}


@pytest.mark.parametrize("left", ["a", "b", "c"])
def test_one_that_cannot_be_captured_stops_no_other(models: dict[str, Any], refused: set[str], left: str) -> None:
    refused.add(left)
    together = nn.ModuleDict(models)
    assert hb.accelerate(together).generation == f"{GRAPHS}, but as before in {left} (it is too small)"
    assert hooks_of(models) == {name: NONE if name == left else ALL for name in models}
    hb.restore(together)
    assert hooks_of(models) == dict.fromkeys(models, NONE)


def test_what_the_report_says_of_all_and_of_none(models: dict[str, Any], refused: set[str]) -> None:
    together = nn.ModuleDict(models)
    assert hb.accelerate(together).generation == GRAPHS
    assert hooks_of(models) == dict.fromkeys(models, ALL)
    refused.update(models)  # as if they had moved: a second call says and does what is so by then
    told = ", ".join(f"{name} (it is too small)" for name in models)
    assert hb.accelerate(together).generation == f"as before in {told}"
    assert hooks_of(models) == dict.fromkeys(models, NONE)
    assert hb.accelerate(models["a"]).generation == "as before: it is too small"


def test_restore_takes_back_what_was_hooked_and_no_more(models: dict[str, Any], refused: set[str]) -> None:
    theirs = models["b"].get_compiled_call
    models["b"].get_compiled_call = theirs  # other code's
    together = nn.ModuleDict(models)
    told = hb.accelerate(together).generation
    assert told.startswith(f"{GRAPHS}, but as before in b (its get_compiled_call is not that of its class")
    hb.restore(models["a"])
    assert hooks_of(models) == {"a": NONE, "b": {"get_compiled_call"}, "c": ALL}
    hb.restore(together)
    assert hooks_of(models) == {"a": NONE, "b": {"get_compiled_call"}, "c": NONE}
    assert vars(models["b"])["get_compiled_call"] is theirs


@pytest.mark.usefixtures("refused")
def test_a_hooked_model_on_a_cpu_generates_as_before(models: dict[str, Any], text: Tensor) -> None:
    """Such as one that was moved there after `accelerate`."""
    model = models["a"].to("cpu")
    hb.accelerate(model)
    ids = text[None, :12]
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    hooked = model.generate(ids, **options)
    host.undo(model)
    assert torch.equal(hooked, model.generate(ids, **options))


def test_without_a_gpu_a_report_names_each(load: Any) -> None:
    pair = {"a": load(), "b": load()}
    if pair["a"].device.type == "cuda":
        pytest.skip("there is a GPU")
    reason = "(CUDA graphs need a GPU, and the model is on cpu)"
    report = hb.accelerate(nn.ModuleDict(pair))
    assert report.generation == f"as before in a {reason}, b {reason}"
    assert str(report).endswith(f"generate decodes {report.generation}")
    assert hooks_of(pair) == dict.fromkeys(pair, NONE)
