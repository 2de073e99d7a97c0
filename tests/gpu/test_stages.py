"""Captured steps of several stages on GPUs: cut on one, and spread over two by accelerate's hooks.

The tokens of more families, and where each stage begins, are tested in tests/models/test_stages.py.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.models import fused, loop, stages, steps
from halfbyte.models import transformers as host
from halfbyte.models.captured import Captured
from halfbyte.models.carrying import carrier

from ..models.dispatched import cut, dispatched
from ..models.families import WINDOW, counted, generate, hooked, make, plainly, prompt
from .conftest import DEVICE, needs_two_gpus

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

SIDES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SIZES = [(1, 7, 0), (3, WINDOW, 2), (3, 2 * WINDOW + 3, 9)]  # texts, tokens, padding of the first
OPTIONS: dict[str, dict[str, Any]] = {
    "driven": {"max_time": 100.0},
    "beams": {"num_beams": 3},
    "guesses": {"prompt_lookup_num_tokens": 4},
}
two = pytest.param([0, 1], marks=needs_two_gpus, id="two")
one = pytest.param([0], id="one")
one_or_two = pytest.mark.parametrize("devices", [one, two])


@pytest.fixture(autouse=True)
def _library() -> Iterator[None]:
    yield
    host.undo_in_library()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """Every step that was captured."""
    made: list[Captured] = []
    begin = Captured.__init__

    def noted(self: Captured, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(Captured, "__init__", noted)
    return made


def devices_of(step: Captured) -> list[int | None]:
    return [graph.device.index for _, graph in step.stages]


def spread(model: Any, devices: list[int]) -> Any:
    """Over two GPUs; or cut into stages on one."""
    return dispatched(model, devices) if len(devices) > 1 else cut(dispatched(model, devices))


def in_4_bits(devices: list[int]) -> Any:
    """A Llama of four layers in bf16, its projections in 4 bits."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIDES)).to(DEVICE, torch.bfloat16).eval()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, hb.nn.Linear4bit.from_linear(child))
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "embed" in name or "head" in name:
            parameter.mul_(20)
    return dispatched(model, devices)


def memory(devices: list[int]) -> list[int]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return [torch.cuda.memory_allocated(device) for device in devices]


@one_or_two
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_tokens_are_those_of_before(family: str, devices: list[int], captures: list[Captured]) -> None:
    model = hooked(spread(make(family), devices))
    for texts, tokens, padding in SIZES:
        inputs = prompt(texts, tokens, padding)
        right = plainly(model, inputs)
        for _ in range(2):
            assert torch.equal(generate(model, inputs), right)
        end = int(right[0, tokens + 5])
        assert torch.equal(generate(model, inputs, eos_token_id=end), plainly(model, inputs, eos_token_id=end))
    for step in captures:
        found = devices_of(step)
        assert list(dict.fromkeys(found)) == devices
        assert found[-1] == 0  # where tokens are chosen
        assert len(found) > 2
    assert captures
    host.undo(model)
    assert not any(name in vars(model) for name in (*host.HOOKS, steps.POOL))
    assert torch.equal(generate(model, inputs), right)


@one_or_two
def test_samples(devices: list[int], captures: list[Captured]) -> None:
    """A seed repeats itself, whether the step is captured in the call or kept, and on one device or several."""
    model = hooked(spread(make("llama"), devices))
    options = {"do_sample": True, "temperature": 3.0, "top_k": 40, "top_p": 0.95}
    for texts in (1, 3):
        runs = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            runs.append(generate(model, prompt(texts, 10, 1), **options))
        assert torch.equal(runs[0], runs[1])
        assert not torch.equal(runs[0], runs[2])
        alone = hooked(make("llama"))
        torch.manual_seed(5)
        assert torch.equal(generate(alone, prompt(texts, 10, 1), **options), runs[0])
    assert captures


@one_or_two
@pytest.mark.parametrize("way", OPTIONS)
def test_loops_of_transformers(way: str, devices: list[int], captures: list[Captured]) -> None:
    model = hooked(spread(make("llama"), devices))
    ids = (torch.arange(20, device=DEVICE) % 5 + 3)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(2):
        assert torch.equal(generate(model, inputs, **OPTIONS[way]), plainly(model, inputs, **OPTIONS[way]))
    assert captures
    assert all(len(devices_of(step)) > 2 for step in captures)


@one_or_two
def test_four_bits_in_fused_layers(
    devices: list[int], captures: list[Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of one graph on one device: the kernels are the same."""
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    alone = in_4_bits([0])
    hb.accelerate(alone)
    cases = [prompt(1, 9), prompt(3, 14, 3)]
    right = [generate(alone, inputs, **options) for inputs in cases]
    hb.restore(alone)
    layers = counted(monkeypatch, fused._Layer, "_compute")
    captures.clear()
    model = in_4_bits(devices)
    if len(devices) == 1:
        cut(model)
    report = hb.accelerate(model)
    assert report.generation == host.ON_GRAPHS
    kept = []
    for _ in range(2):
        for inputs, expected in zip(cases, right, strict=True):
            for _ in range(2):
                found = generate(model, inputs, **options)
                assert torch.equal(found.sequences, expected.sequences)
                assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
        assert [devices_of(step) for step in captures] == [[0, 0, 0, 0] if len(devices) == 1 else [0, 1, 0]] * 2
        del found
        captures.clear()
        hb.release(model)
        kept.append(memory(devices))
    assert len(layers) == 4 * (2 * 4 - 1)  # two runs of a bucket each, of which the very first compares
    for now, then in zip(*kept, strict=True):
        assert now - then < 1 << 20
    hb.restore(model)
    assert generate(model, cases[0], max_new_tokens=3).shape == (1, 12)


@one_or_two
def test_the_host_waits_for_nothing(devices: list[int], captures: list[Captured]) -> None:
    """Neither for a graph nor for a copy from device to device."""
    model = hooked(spread(make("mistral"), devices))
    generate(model, prompt(3, 9))
    (step,) = captures
    for device in devices:
        torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # about 0.1 s, ahead of the first stage
        with torch.no_grad():
            step.replay()
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    event.synchronize()


@one_or_two
def test_another_stream(devices: list[int]) -> None:
    model = hooked(spread(make("llama"), devices))
    inputs = prompt(2, 9)
    right = generate(model, inputs)
    for _ in range(3):
        sides = [torch.cuda.Stream(device) for device in devices]
        for side in sides:
            side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(sides[-1]), torch.cuda.stream(sides[0]):
            found = generate(model, inputs)
        assert torch.equal(generate(model, inputs), right)
        for side in sides:
            side.synchronize()
        assert torch.equal(found, right)


def asks_for_a_number(x: Tensor) -> None:
    x.sum().item()


def raises(x: Tensor) -> None:
    raise KeyError("of Python")


@pytest.mark.parametrize("failure", [asks_for_a_number, raises])
@one_or_two
def test_a_capture_that_fails_in_a_later_stage(failure: Callable[[Tensor], None], devices: list[int]) -> None:
    """Streams, generators and the current device are as before, and the next capture succeeds."""
    x = torch.ones(1000, device=DEVICE)
    last = torch.device("cuda", devices[-1])
    states = [torch.cuda.get_rng_state(device) for device in devices]

    def function() -> Tensor:
        there: Tensor = carrier().carry(x * 2, last, cuts=True)
        failure(there)
        return there

    with pytest.raises((RuntimeError, KeyError)):
        Captured(function, DEVICE)
    for device, state in zip(devices, states, strict=True):
        assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
        assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert not torch.cuda.is_current_stream_capturing()

    def succeeds() -> Tensor:
        moved: Tensor = carrier().carry(carrier().carry(x * 2, last, cuts=True) + 1, DEVICE, cuts=True)
        return moved - 3

    step = Captured(succeeds, DEVICE)
    for value in (1.0, 5.0):
        x.fill_(value)
        assert step.replay().eq(2 * value - 2).all()


@needs_two_gpus
def test_captures_on_each_device_in_turn() -> None:
    """torch's own capture stream stays on the device that captured first."""
    for index in (0, 1, 0):
        device = torch.device("cuda", index)
        x = torch.ones(10, device=device)
        with torch.cuda.device(device):
            step = Captured(lambda x=x: x * 3, device)  # type: ignore[misc]
        x.fill_(2)
        assert step.replay().eq(6).all()


@needs_two_gpus
def test_an_operation_between_the_parts_is_refused() -> None:
    """It would run once, in the capture; tokens are right all the same."""

    def stray(*_: Any) -> None:
        torch.zeros(1, device=DEVICE).add_(1)

    model = spread(make("llama"), [0, 1])
    model.model.norm.register_forward_pre_hook(stray)
    hooked(model)
    inputs = prompt(2, 9)
    right = plainly(model, inputs)
    with pytest.warns(UserWarning, match="goes on without one"):
        assert torch.equal(generate(model, inputs), right)


@needs_two_gpus
@pytest.mark.parametrize("swapped", [False, True])
def test_loaded_with_device_map(
    swapped: bool, tmp_path: Path, captures: list[Captured], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By from_pretrained, in 4 bits; the first part on either GPU."""
    first, last = (1, 0) if swapped else (0, 1)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIDES)).to(torch.bfloat16).save_pretrained(tmp_path)
    places = {f"model.layers.{i}": first if i < 2 else last for i in range(4)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=hb.HalfbyteConfig(),
        dtype=torch.bfloat16,
        device_map=places
        | {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last, "lm_head": last},
    )
    assert stages.devices_of(model) == {torch.device("cuda", 0), torch.device("cuda", 1)}
    inputs = {name: tensor.to(model.device) for name, tensor in prompt(2, 9).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without CUDA graphs")
        assert hb.accelerate(model).generation == host.ON_GRAPHS
    kept = counted(monkeypatch, loop.TokenStep, "advance")
    found = generate(model, inputs)
    assert torch.equal(generate(model, inputs), found)
    assert len(kept) == 2 * 23
    (step,) = captures
    assert devices_of(step) == [first, last, first]
    pool = steps.pool_of(model)
    assert pool is not None
    assert [pair[0].device.index for pair in pool.buckets[0].store.layers if pair] == [first, first, last, last]
    hb.restore(model)


@needs_two_gpus
def test_one_model_of_two_keeps_a_share_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hooked(spread(make("llama"), [0, 1]))
    limit = 64 << 20  # graphs keep some MB each, whatever the model
    monkeypatch.setattr(steps, "SHARE", limit / min(map(steps.total_bytes, (DEVICE, torch.device("cuda", 1)))))
    generate(model, prompt(1, 9))
    host.release(model)
    before = memory([0, 1])
    for number in range(12):
        generate(model, prompt(1 + number % 5, 5 + 37 * number % 400), max_new_tokens=4)
    for now, then in zip(memory([0, 1]), before, strict=True):
        assert now - then <= 2 * limit
    host.release(model)
    for now, then in zip(memory([0, 1]), before, strict=True):
        assert now - then < 1 << 20
