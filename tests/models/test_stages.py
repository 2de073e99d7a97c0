"""Models that accelerate spread over devices, on captured steps: each stage a graph, and tokens as before.

One device stands for several where a test cuts there. Without a GPU graphs are recordings (recorded.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.common import slow
from halfbyte.models import captured, fused, graphs, stages, steps
from halfbyte.models import transformers as host
from halfbyte.models.buckets import layers_by_device, least_bytes
from halfbyte.models.carrying import carrier
from halfbyte.models.driven import DrivenStep
from halfbyte.models.loop import Kind, TokenBuffers, TokenStep
from halfbyte.models.rotation import Rotation, mask_names
from halfbyte.models.store import CacheStore
from halfbyte.nn import Linear4bit

from .dispatched import cut, dispatched
from .families import DEVICE, OF_EXPERTS, WINDOW, captures, counted, generate, hooked, make, plainly, prompt
from .recorded import Recording, recordings
from .test_fused import accelerated, in_4_bits, quantized

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("captures")

SIZES = [(1, 7, 0), (3, WINDOW, 2), (2, 2 * WINDOW + 3, 9)]
ELSEWHERE = torch.device("meta")


@pytest.fixture
def recorded() -> Iterator[list[Recording]]:
    with recordings() as made:
        yield made


@pytest.fixture
def on_cpu(recorded: list[Recording]) -> Iterator[list[Recording]]:
    """Recordings of steps on the CPU, whatever GPU there is."""
    with captures(torch.device("cpu")):
        yield recorded


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of stages of every captured step that is replayed."""
    seen: list[int] = []
    replay = captured.Captured.replay

    def noted(self: captured.Captured) -> Any:
        seen.append(len(self.stages))
        return replay(self)

    monkeypatch.setattr(captured.Captured, "replay", noted)
    return seen


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3_moe"])
def test_tokens_of_several_stages(family: str, replays: list[int]) -> None:
    model = hooked(cut(dispatched(make(family), [DEVICE])))
    for texts, tokens, padding in SIZES:
        inputs = prompt(texts, tokens, padding)
        right = plainly(model, inputs)
        for _ in range(2):
            assert torch.equal(generate(model, inputs), right)
    assert len(replays) == 3 * (22 + 23)
    assert set(replays) == {4}
    host.undo(model)
    assert torch.equal(generate(model, inputs), right)


@pytest.mark.usefixtures("recorded")
def test_samples_ends_and_processors(replays: list[int]) -> None:
    model = hooked(cut(dispatched(make("llama"), [DEVICE])))
    inputs = prompt(2, 9, 3)
    end = int(plainly(model, inputs)[0, 9 + 7])
    for options in ({"do_sample": True, "temperature": 3.0}, {"eos_token_id": end}, {"repetition_penalty": 1.3}):
        found = []
        for run in (generate, generate, plainly):
            torch.manual_seed(3)
            found.append(run(model, inputs, **options))
        assert torch.equal(found[0], found[1])
        if DEVICE.type == "cpu" and "do_sample" not in options:
            assert torch.equal(found[0], found[2])
    assert set(replays) == {4}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_steps_that_transformers_drives(family: str, replays: list[int]) -> None:
    model = hooked(cut(dispatched(make(family), [DEVICE])))
    inputs = prompt(3, 9, 2)
    right = plainly(model, inputs)
    for _ in range(2):
        assert torch.equal(generate(model, inputs, max_time=100.0), right)
    options: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    found, expected = generate(model, inputs, **options), plainly(model, inputs, **options)
    assert torch.equal(found.sequences, right)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-4, atol=1e-4)
    assert set(replays) == {4}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}])
def test_beams_and_guesses(options: dict[str, Any], replays: list[int]) -> None:
    model = hooked(cut(dispatched(make("llama"), [DEVICE])))
    ids = (torch.arange(20) % 5 + 3)[None].to(DEVICE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(2):
        assert torch.equal(generate(model, inputs, **options), plainly(model, inputs, **options))
    assert set(replays) == {4}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("cuts", [False, True])
def test_fused_layers_under_hooks_of_accelerate(family: str, cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = counted(monkeypatch, fused._Layer, "_attend")
    plain = quantized(make(family))
    inputs = prompt(2, 9, 3)
    right = generate(plain, inputs, max_new_tokens=8)
    assert len(layers) == 7 * 3 or DEVICE.type == "cuda"
    hb.restore(plain)
    layers.clear()
    model = dispatched(in_4_bits(make(family)), [DEVICE])
    model = accelerated(cut(model) if cuts else model)
    assert any(isinstance(module, Linear4bit) and "_hf_hook" in vars(module) for module in model.modules())
    before = [dict(vars(module)) for module in model.modules()]
    assert torch.equal(generate(model, inputs, max_new_tokens=8), right)
    assert len(layers) == 7 * 3 or DEVICE.type == "cuda"
    assert layers
    for module, own in zip(model.modules(), before, strict=True):  # accelerate's hooks are back
        assert vars(module).get("forward") is own.get("forward")
        assert not module._forward_pre_hooks
    hb.restore(model)


@pytest.mark.parametrize("cuts", [False, True])
def test_layers_of_bitsandbytes_under_hooks_of_accelerate(
    cuts: bool, load: Any, prompts: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = counted(monkeypatch, fused._Layer, "_attend")
    ids = prompts[:3].to(DEVICE)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = load()
    hb.accelerate(plain)
    right = generate(plain, inputs)
    hb.restore(plain)
    layers.clear()
    model = dispatched(load(), [DEVICE])
    if cuts:
        setattr(model, stages.CUTS, (model.model.layers[1], model.lm_head))
    hb.accelerate(model)
    for _ in range(2):
        assert torch.equal(generate(model, inputs), right)
    assert layers
    hb.restore(model)
    assert isinstance(model.model.layers[0].mlp.up_proj._hf_hook, accelerate.hooks.AlignDevicesHook)


def test_hooks_are_back_after_a_step_that_fails() -> None:
    model = cut(dispatched(make("llama"), [DEVICE]))
    forwards = [vars(module).get("forward") for module in model.modules()]

    def fails() -> None:
        with stages.staged(model):
            assert not any("forward" in vars(module) for module in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_another_thread_meets_a_step_that_is_being_built() -> None:
    """Its call of the model finds our hooks in the place of accelerate's, and copies for itself."""
    model = cut(dispatched(make("llama"), [DEVICE]))
    inputs = prompt(2, 9, 3)
    right = plainly(model, inputs)
    with stages.staged(model), ThreadPoolExecutor(1) as another:
        mine = carrier()
        assert torch.equal(another.submit(plainly, model, inputs).result(), right)
        assert not mine.carried


def test_a_model_that_changes_afterwards() -> None:
    """Its steps are built as before; that it cannot be captured any more is said where it is tried."""
    model = spread()
    split(model)
    assert stages.why_not(model)
    with stages.staged(model):
        assert "forward" in vars(model.model.layers[0])
        assert not any(module._forward_pre_hooks for module in model.modules())


def spread(family: str = "llama", **options: Any) -> Any:
    """The first layer and the embedding here, the rest elsewhere; not to be run, but to be captured."""
    model = make(family, **options).cpu()
    dispatched(model, ["cpu"])
    for module in (*model.model.layers[1:], model.model.norm, model.lm_head):
        module.to(ELSEWHERE)
    return model


def test_where_stages_begin() -> None:
    model = spread()
    assert stages.why_not(model) is None
    found = [(type(stop.module).__name__, stop.device.type) for stop in stages._stops(model)]
    assert found == [
        ("Embedding", "cpu"), ("LlamaDecoderLayer", "cpu"), ("LlamaDecoderLayer", "meta"),
        ("LlamaDecoderLayer", "meta"), ("LlamaRMSNorm", "meta"), ("LlamaRotaryEmbedding", "cpu"), ("Linear", "meta"),
    ]  # fmt: skip
    assert list(stages._stops(make("llama"))) == []
    head = make("llama").cpu()
    head.lm_head.to(ELSEWHERE)
    assert [type(stop.module).__name__ for stop in stages._stops(head)] == ["LlamaModel", "Linear"]


def store_of(model: Any, rows: int, tokens: int) -> CacheStore:
    """Its memory lies where the layers do."""
    store = CacheStore(transformers.StaticCache, model.config, rows, tokens)
    for index, layer in enumerate(model.model.layers):
        heads = model.config.num_key_value_heads, layer.self_attn.head_dim
        like = torch.zeros((rows, heads[0], 1, heads[1]), device=next(layer.parameters()).device)
        store.allocate(index, like, like)
    return store


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_operation_is_on_its_stages_device(family: str, attention: str, on_cpu: list[Recording]) -> None:
    """A recording refuses all others. Slots, masks, positions and angles are there; logits come back."""
    model = spread(family, attn_implementation=attention)
    if family in OF_EXPERTS:
        model.set_experts_implementation("batched_mm")  # as `generate` does for its steps on a GPU
    store = store_of(model, 2, 32)
    cpu = torch.device("cpu")
    buffers = TokenBuffers(2, 32, cpu)
    buffers.length.fill_(5)
    names = mask_names(model.config)
    assert names is not None
    rotation = Rotation(store, names, torch.float32 if attention == "eager" else None, cpu)
    assert {layer.cumulative_length.device for layer in rotation.cache.layers} == {cpu, ELSEWHERE}
    kind = Kind(samples=True, ends=(5,), logits=False, scores=True, extras=())
    step = TokenStep(model, rotation, buffers, [], kind, model.config.vocab_size, lambda function: function())
    with torch.no_grad():
        step._capture()
    assert step.captured is not None
    # The third layer of Gemma has another mask than the second, and other angles; they are asked for late.
    late = ["meta"] if family == "gemma3" else []
    assert [graph.device.type for _, graph in step.captured.stages] == ["cpu", "meta", *late, "cpu"]
    assert step.captured.outputs["scores"].device == cpu
    there = [(x.device.type, y.device.type) for x, y in step.captured.stages[1][0]]
    assert set(there) == {("cpu", "meta")}
    assert any(y is rotation.slots.on(ELSEWHERE) for _, y in step.captured.stages[1][0])
    assert [(x.device.type, y.device.type) for x, y in step.captured.stages[-1][0]] == [("meta", "cpu")]


def test_every_operation_of_a_driven_step_too(on_cpu: list[Recording]) -> None:
    model = spread()
    step = DrivenStep(model, store_of(model, 2, 32), 8, lambda function: function())
    with torch.no_grad():
        step._capture()
    assert step.captured is not None
    assert [graph.device.type for _, graph in step.captured.stages] == ["cpu", "meta", "cpu"]
    assert len(on_cpu) == 3


def test_every_operation_of_a_step_that_transformers_drives(on_cpu: list[Recording]) -> None:
    """Each layer counts its tokens on its own device."""
    for family in ("llama", "mistral", "gemma3"):
        model = spread(family)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        for layer, (keys, values) in zip(cache.layers, store_of(model, 2, 32).layers, strict=True):  # type: ignore[misc]
            layer.lazy_initialization(keys, values)
        ids = torch.ones((2, 1), dtype=torch.int64)
        masks: Any = torch.ones((2, 1, 1, 32), dtype=torch.bool)
        if family != "llama":
            sliding = torch.ones((2, 1, 1, WINDOW), dtype=torch.bool)
            masks = sliding if family == "mistral" else {"full_attention": masks, "sliding_attention": sliding}
        inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": masks, "output_hidden_states": True}
        leaves, structure = torch.utils._pytree.tree_flatten(inputs)
        on_cpu.clear()
        with torch.no_grad(), stages.staged(model):
            step = graphs.Step(model, cache, leaves, structure, ours=True)
        late = ["meta"] if family == "gemma3" else []
        assert [graph.device.type for graph in on_cpu] == ["cpu", "meta", *late, "cpu"]
        outputs = step.captured.outputs
        assert outputs.past_key_values is cache
        assert {x.device.type for x in (outputs.logits, *outputs.hidden_states)} == {"cpu"}


def test_an_operation_between_the_parts_is_refused_with_a_warning(on_cpu: list[Recording]) -> None:
    """Something of the model's own, which neither lies in a part nor belongs to its device."""
    model = spread()
    model.model.layers[2].register_forward_pre_hook(lambda *_: torch.zeros(1) + 1)
    step = DrivenStep(model, store_of(model, 2, 32), 8, lambda function: function())
    with torch.no_grad(), pytest.warns(UserWarning, match="goes on without one: .* in a stage on meta"):
        step._capture()
    assert step.captured is None
    assert not step.works


def test_the_share_is_of_every_device() -> None:
    model = spread()
    sizes = {"cpu": 300, "meta": 700}
    assert (
        least_bytes(layers_by_device(model), lambda device: sizes[device.type]) == 900
    )  # a third of the layers is on the first
    sizes["meta"] = 400
    assert least_bytes(layers_by_device(model), lambda device: sizes[device.type]) == 600
    assert least_bytes(layers_by_device(make("llama")), lambda device: 5) == 5
    packed = in_4_bits(make("llama").cpu())  # whose attention has no parameter, but buffers
    packed.model.layers[2].to(ELSEWHERE)
    assert least_bytes(layers_by_device(packed), lambda device: 100) == 150


def offload(model: Any) -> None:
    model.model.layers[1]._hf_hook.offload = True


def offload_again(model: Any) -> None:
    layer, mover = model.model.layers[0], accelerate.hooks.AlignDevicesHook("cpu")
    accelerate.hooks.add_hook_to_module(layer, mover, append=True)
    assert stages.why_not(model) is None
    mover.offload = True


def hook(model: Any) -> None:
    class Mine(accelerate.hooks.ModelHook):  # type: ignore[misc]
        pass

    accelerate.hooks.add_hook_to_module(model.model.layers[1], Mine())


def split(model: Any) -> None:
    model.model.layers[1].mlp.to_empty(device="cpu")


def wrap(model: Any) -> None:
    layer = model.model.layers[1]
    wrapped = layer.forward
    layer.forward = MethodType(lambda self, *args, **kwargs: wrapped(*args, **kwargs), layer)


def unhook(model: Any) -> None:
    accelerate.hooks.remove_hook_from_module(model, recurse=True)


REASONS: dict[str, Callable[[Any], None]] = {
    "part of it is offloaded, so weights move in every step; give it a device_map of GPUs alone": offload,
    "part of it is offloaded, so weights move": offload_again,
    "model.layers.1 has a hook that is not accelerate's own for device_map; remove that hook": hook,
    "model.layers.1 has a hook that is not accelerate's own": wrap,
    "the parts of model.layers.1 are on several devices; name whole layers in device_map": split,
    "its parts are on several devices without accelerate's hooks; load it with device_map": unhook,
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_cut_goes_as_before_with_a_warning(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "_told", set())
    model = spread()
    REASONS[reason](model)
    with pytest.warns(UserWarning, match=f"LlamaForCausalLM decodes without CUDA graphs: {reason}"):
        told = host.apply(model)
    assert told.startswith(f"as before: {reason}")
    assert steps.POOL not in vars(model)


def test_an_offloaded_model_gives_its_tokens_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "_told", set())
    model = make("llama")
    inputs = prompt(2, 9, 3)
    right = plainly(model, inputs)
    accelerate.cpu_offload(model.model.layers[1], DEVICE)
    with pytest.warns(UserWarning, match="part of it is offloaded"):
        host.apply(model)
    host.apply_to_library()
    assert torch.equal(generate(model, inputs), right)


@pytest.mark.usefixtures("recorded")
def test_release(replays: list[int]) -> None:
    model = hooked(cut(dispatched(make("llama"), [DEVICE])))
    inputs = prompt(2, 9)
    right = generate(model, inputs)
    pool = steps.pool_of(model)
    assert pool is not None
    assert pool.nbytes > 0
    hb.release(model)
    assert pool.nbytes == 0
    assert torch.equal(generate(model, inputs), right)
    assert len(replays) == 2 * 22
