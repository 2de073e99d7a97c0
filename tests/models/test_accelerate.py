"""accelerate and restore on a small trained model, loaded as users load theirs."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.measure.error import relative_error
from halfbyte.measure.models import make_dense
from halfbyte.models import bitsandbytes as host

LAYERS = 14  # Linear4bit modules of the checkpoint


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(ids.to(model.device)).logits
    return result


def same_state(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


@pytest.mark.slow
def test_every_module_is_taken_and_keeps_its_class_and_weight(load: Any, prompts: Tensor) -> None:
    model = load()
    weights = {path: module.weight for path, module in model.named_modules() if host.supports(module)}
    classes = [type(module) for module in model.modules()]
    report = hb.accelerate(model)
    assert set(report.modules) == set(weights)
    assert len(report.modules) == LAYERS
    assert not report.skipped
    assert [type(module) for module in model.modules()] == classes
    for path, weight in weights.items():
        assert model.get_submodule(path).weight is weight
    assert "14 of 14" in str(report)


def test_logits_are_as_near_to_fp32_as_those_of_bitsandbytes(load: Any, prompts: Tensor) -> None:
    model = load()
    theirs = logits(copy.deepcopy(model), prompts)
    hb.accelerate(model)
    ours = logits(model, prompts)
    hb.restore(model)
    make_dense(model, torch.float32)
    right = logits(model, prompts).double()
    # Both round their logits to bf16 in the end, which is most of either error, and on a CPU with AVX512-BF16 what is
    # left of it is bitsandbytes' repacked weights against torch's own product: one or the other is a little ahead.
    assert relative_error(ours, right) <= 1.1 * relative_error(theirs, right)


def test_greedy_tokens_are_those_of_before(load: Any, prompts: Tensor) -> None:
    """Where one differs, the two were a tie: nearer in float64 than a few roundings to bf16 can tell."""
    model = load()
    prompts = prompts.to(model.device)
    options = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(prompts)}
    before = copy.deepcopy(model).generate(prompts, **options)
    hb.accelerate(model)
    after = model.generate(prompts, **options)
    hb.restore(model)
    assert before.shape == after.shape == (64, 40)
    make_dense(model, torch.float32)
    exact = nn.Module.double(model)
    for row, other in zip(before, after, strict=True):
        different = (row != other).nonzero()
        if not len(different):
            continue
        first = int(different[0])
        scores = logits(exact, row[None, :first])[0, -1]
        best, rivals = scores.max(), scores[[int(row[first]), int(other[first])]]
        assert (best - rivals).max() <= 2**-5 * scores.abs().max()
    assert (before == after).all(1).float().mean() >= 0.9


def test_state_dict_is_the_same_before_with_and_after(load: Any, prompts: Tensor) -> None:
    model = load()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hb.accelerate(model)
    logits(model, prompts)
    assert same_state(before, model.state_dict())
    hb.restore(model)
    assert same_state(before, model.state_dict())


def test_saved_and_loaded_without_halfbyte_it_has_the_same_bits(load: Any, prompts: Tensor, tmp_path: Path) -> None:
    model = load()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hb.accelerate(model)
    logits(model, prompts)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert same_state(before, again.state_dict())
    assert again.generation_config.cache_implementation is None


def test_restore_leaves_nothing_behind(load: Any, prompts: Tensor) -> None:
    model = load()
    before = [set(vars(module)) for module in model.modules()]
    hb.accelerate(model)
    hb.accelerate(model)  # a second time changes nothing
    logits(model, prompts)
    hb.restore(model)
    hb.restore(model)
    assert [set(vars(module)) for module in model.modules()] == before
    assert not any(
        hasattr(state, host.ATTRIBUTE) for state in map(host._state_of, filter(host.supports, model.modules()))
    )


def test_copies_and_pickles(load: Any, prompts: Tensor) -> None:
    model = load()
    hb.accelerate(model)
    right = logits(model, prompts)
    twin = copy.deepcopy(model)
    hb.restore(model)
    assert all(host.is_applied(module) for module in twin.modules() if host.supports(module))
    assert torch.equal(logits(twin, prompts), right)
    layer = next(module for module in twin.modules() if host.supports(module))
    x = torch.randn(3, layer.in_features, dtype=torch.bfloat16, device=twin.device)
    again = pickle.loads(pickle.dumps(layer))
    host.apply(again)
    assert torch.equal(again(x), layer(x))


def test_a_module_that_holds_several_models_and_no_model_at_all(load: Any) -> None:
    both = nn.ModuleDict({"a": load(), "b": load()})
    assert len(hb.accelerate(both).modules) == 2 * LAYERS
    hb.restore(both)
    assert not any(host.is_applied(module) for module in both.modules() if host.supports(module))
    report = hb.accelerate(nn.Linear(8, 8))
    assert report.modules == ()
    assert "no module was taken" in report.generation
    for function in (hb.accelerate, hb.restore):
        with pytest.raises(TypeError, match=r"model is a str; .* takes"):
            function("gpt2")  # type: ignore[arg-type,operator]


def test_the_whole_step_compiles_without_a_break(load: Any, prompts: Tensor) -> None:
    model = load()
    hb.accelerate(model)
    layer = model.model.layers[0].mlp
    x = torch.randn(1, 5, 128, dtype=torch.bfloat16, device=model.device)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))
