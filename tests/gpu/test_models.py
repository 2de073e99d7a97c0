"""Whole models on a GPU: `generate` on CUDA graphs gives what it gives without them."""

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.linear import cuda
from halfbyte.measure import models
from halfbyte.measure.error import relative_error
from halfbyte.models import captured, norms, projections

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

SHAPES = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 64}),
    # Its window slides over 20 tokens: generation goes through a step before and after it is full.
    "gemma": ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 20, "num_hidden_layers": 7}),
}
TIE = 0.05  # logits as near as this, of their standard deviation: twice what bf16's roundings in a small model do
SIDES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 512}


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    kind, properties = SHAPES[request.param]
    monkeypatch.setitem(models.SHAPES, "small", (kind, {"num_hidden_layers": 2} | SIDES | properties))
    loaded = models.load("small", torch.device("cuda"), torch.bfloat16)
    loaded.requires_grad_(False)
    for name, parameter in loaded.named_parameters():
        if "embed" in name or "head" in name:  # logits far enough apart that rounding decides none
            parameter.mul_(20)
    yield loaded
    hb.restore(loaded)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every step that a graph makes."""
    made: list[int] = []
    replay = captured.Captured.replay

    def counted(step: captured.Captured) -> Any:
        made.append(1)
        return replay(step)

    monkeypatch.setattr(captured.Captured, "replay", counted)
    return made


def allocated() -> int:
    """Bytes on the GPU, but for what cuBLAS keeps for each stream that torch has ever captured on."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def prompt(batch: int, length: int = 12) -> Tensor:
    return torch.randint(3, 500, (batch, length), device="cuda")


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    settings = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, **settings | options)


def assert_same_but_for_ties(model: Any, found: Tensor, right: Tensor) -> None:
    """Texts [B, T] with the same tokens up to the first that rounding chose: one whose logit is as good as that
    of the right one. What comes after such a tie is another text."""
    for ours, theirs in zip(found, right, strict=True):
        differ = (ours != theirs).nonzero()
        if not len(differ):
            continue
        first = int(differ[0])
        logits = model(theirs[None, :first], use_cache=False).logits[0, -1].float()
        assert (logits[theirs[first]] - logits[ours[first]]).abs() < TIE * logits.std(), first


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_those_of_steps_without_a_graph(model: Any, batch: int, replays: list[int]) -> None:
    ids = prompt(batch)
    report = hb.accelerate(model)
    assert "CUDA graphs" in report.generation
    first = generate(model, ids)
    assert len(replays) >= 24 - 5
    second = generate(model, ids)
    made = len(replays)
    plain = generate(model, ids, disable_compile=True)
    assert len(replays) == made
    assert torch.equal(first, second)
    assert_same_but_for_ties(model, first, plain)


def test_attention_of_steps_is_ours(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("halfbyte.kernels.attention.attend")
    asked: list[Any] = []
    attend = kernels.attend

    def counted(query: Tensor, *others: Any, **named: Any) -> Tensor:
        asked.append(tuple(query.shape))
        return attend(query, *others, **named)

    monkeypatch.setattr(kernels, "attend", counted)
    hb.accelerate(model)
    generate(model, prompt(2))
    size = model.model.layers[0].self_attn.head_dim
    assert set(asked) == {(2, 4, 1, size)}
    assert len(asked) >= 2 * len(model.model.layers)  # a step that compiles, and one that is captured


def test_fused_projections_are_computed_in_one_launch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    compute = cuda.linear_group

    def counted(x: Tensor, weights: Any, biases: Any) -> Any:
        found = compute(x, weights, biases)
        groups.append(0 if found is None else len(found))
        return found

    monkeypatch.setattr(cuda, "linear_group", counted)
    ids = prompt(1, 3)
    hb.accelerate(model)
    layers = len(model.model.layers)
    with torch.no_grad():
        model(ids)  # bitsandbytes settles its dtypes in a first call
        groups.clear()
        together = model(ids).logits
        assert sorted(groups) == [2] * layers + [3] * layers
        again = model(ids).logits
        groups.clear()
        projections.unlink(model)
        alone = model(ids).logits
    assert not groups
    assert torch.equal(together, again)
    assert (together - alone).norm() < 1e-2 * alone.norm()


def test_logits_of_every_step(model: Any, replays: list[int]) -> None:
    """Outputs that the caller keeps are not overwritten by later steps."""
    ids = prompt(2)
    hb.accelerate(model)
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 12}
    ours = generate(model, ids, **options)
    assert replays
    exact = model(ours.sequences).logits[:, ids.shape[1] - 1 : -1].float()
    logits = torch.stack(ours.logits, 1)
    assert (logits - exact).norm() < 3e-2 * exact.norm()
    assert torch.equal(logits.argmax(-1), ours.sequences[:, ids.shape[1] :])


def test_padding_and_sampling(model: Any, replays: list[int]) -> None:
    ids = prompt(3)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    hb.accelerate(model)
    generated = generate(model, ids, attention_mask=mask, max_new_tokens=8)
    alone = generate(model, ids[1:2, 5:], attention_mask=mask[1:2, 5:], max_new_tokens=8)
    assert_same_but_for_ties(model, generated[1:2, 5:], alone)
    samples = []
    for _ in range(2):
        torch.manual_seed(1)
        samples.append(generate(model, ids, do_sample=True, num_return_sequences=2))
    assert torch.equal(*samples)
    assert samples[0].shape == (6, 36)
    assert replays


def test_calls_that_choose_their_own_way_are_left_alone(model: Any, replays: list[int]) -> None:
    from transformers import DynamicCache

    ids = prompt(1)
    hb.accelerate(model)
    generate(model, ids, use_cache=False, max_new_tokens=4)
    generate(model, ids, cache_implementation="dynamic")
    generate(model, ids, past_key_values=DynamicCache(config=model.config))
    assert not replays
    generate(model, ids, cache_implementation="static")
    assert replays
    hb.restore(model)
    made = len(replays)
    generate(model, ids)
    assert len(replays) == made
    assert not any(name in vars(model) for name in ("get_compiled_call", "_prepare_cache_for_generation"))


def test_a_model_that_cannot_be_captured_goes_on_without_a_graph(model: Any, replays: list[int]) -> None:
    ids = prompt(1)
    hb.accelerate(model)
    right = generate(model, ids, disable_compile=True)

    def synchronizing(module: Any, args: Any, output: Tensor) -> None:
        output.sum().item()

    hook = model.lm_head.register_forward_hook(synchronizing)
    with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph and goes on without one"):
        ours = generate(model, ids)
    hook.remove()
    assert not replays
    assert_same_but_for_ties(model, ours, right)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generate(model, ids)  # and once it can be, it is
    assert replays


def test_what_is_kept_does_not_grow_and_release_frees_it(model: Any) -> None:
    ids = prompt(2)
    hb.accelerate(model)
    generate(model, ids, disable_compile=True)  # bitsandbytes settles its dtypes in a first call
    empty = allocated()
    for _ in range(2):  # the second one captures prompts
        generate(model, ids)
    before = allocated()
    for new in (40, 7, 60):
        generate(model, ids, max_new_tokens=new)
        generate(model, ids[:, new % 5 :], max_new_tokens=new)
    assert allocated() - before < 1 << 20
    hb.release(model)
    assert allocated() - empty < 1 << 20


def test_with_an_adapter(model: Any, replays: list[int]) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    ids = prompt(2)
    hb.accelerate(adapted)
    ours = generate(adapted, ids)
    assert replays
    plain = generate(adapted, ids, disable_compile=True)
    assert_same_but_for_ties(adapted, ours, plain)
    hb.restore(adapted)


def test_a_training_step_has_the_gradients_of_bitsandbytes(model: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).train()
    adapted.enable_input_require_grads()
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = prompt(2, 40)

    def gradients() -> dict[str, Tensor]:
        adapted.zero_grad()
        adapted(ids, labels=ids).loss.backward()
        return {name: p.grad.float().clone() for name, p in adapted.named_parameters() if p.grad is not None}

    theirs = gradients()
    hb.accelerate(adapted)
    ours = gradients()
    assert ours.keys() == theirs.keys()
    assert ours
    for name in ours:
        assert (ours[name] - theirs[name]).norm() < 5e-2 * theirs[name].norm(), name
    hb.restore(adapted)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_norm_in_training(autocast: bool) -> None:
    """One kernel of torch's forward; at most as far from float64 as the module's own eight."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(4096).to("cuda", torch.bfloat16).train()
    norm.weight.data += 0.1 * torch.randn_like(norm.weight)
    x, upstream = torch.randn(2, 3, 77, 4096, device="cuda", dtype=torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, norm.weight)]
    y = exact[1] * exact[0] * (exact[0].square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    y.backward(upstream.double())
    right = (y.detach(), *(tensor.grad for tensor in exact))

    def run() -> tuple[Tensor, ...]:
        inputs = x.clone().requires_grad_()
        norm.weight.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = norm(inputs)
        y.backward(upstream)
        return y.detach(), inputs.grad, norm.weight.grad  # type: ignore[return-value]

    def launches() -> int:
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())

    theirs, before = run(), launches()
    norms.apply(norm)
    ours = run()
    assert 2 * launches() < before
    for mine, other, reference in zip(ours, theirs, right, strict=True):
        assert mine.dtype == other.dtype
        assert relative_error(mine, reference) <= 1.05 * relative_error(other, reference)


def test_a_model_quantized_while_loading(tmp_path: Any, replays: list[int]) -> None:
    """HalfbyteConfig on a GPU: the bytes that quantize makes there, and the same tokens by graphs as without them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", num_hidden_layers=2, num_key_value_heads=2, **SIDES)
    dense = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    dense.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=hb.HalfbyteConfig(), device_map={"": 0}
    )
    layer = loaded.model.layers[0].self_attn.q_proj
    assert isinstance(layer, hb.nn.Linear4bit)
    q = hb.quantize(dense.model.layers[0].self_attn.q_proj.weight.cuda())
    assert torch.equal(layer.weight.packed.flatten(), q.packed.flatten())
    ids = prompt(2)
    right = generate(loaded, ids)
    assert not replays
    hb.accelerate(loaded)
    found = generate(loaded, ids)
    hb.restore(loaded)
    assert found.shape == right.shape
    assert (found == right).float().mean() > 0.9  # random weights: a tie may fall otherwise
    assert replays
