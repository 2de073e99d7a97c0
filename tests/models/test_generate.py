"""`generate` on kept caches and captured steps gives what transformers' own loop gives.

On a CPU a captured step runs as it is; on a GPU the same tests replay graphs.
"""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.models import graphs, loop, stepping, steps
from halfbyte.models import transformers as host

from .families import DEVICE, FAMILIES, MIXED, SIDES, WINDOW, counted, generate, hooked, make, plainly, prompt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("captures")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return hooked(make(request.param))


@pytest.fixture
def llama() -> Any:
    return hooked(make("llama"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every token that a captured loop makes after the first."""
    return counted(monkeypatch, loop.TokenStep, "advance")


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every replay in transformers' own loop."""
    return counted(monkeypatch, graphs.Step, "replay")


def pool_of(model: Any) -> steps.StepPool:
    pool = steps.pool_of(model)
    assert pool is not None
    return pool


SIZES = [
    (1, 7, 0),
    (2, WINDOW - 1, 3),
    (3, WINDOW, 2),
    (1, WINDOW + 1, 0),
    (5, 2 * WINDOW + 3, 9),
    (1, 1, 0),
    (2, 120, 0),
]


def test_greedy_tokens_of_every_family(model: Any, made: list[int]) -> None:
    """Before and behind a full window, across the sizes of caches, and a second time with what is kept."""
    right: dict[tuple[int, ...], Tensor] = {}
    for _ in range(2):
        for size in SIZES:
            inputs = prompt(*size)
            made.clear()
            found = generate(model, inputs)
            assert len(made) == 23
            if size not in right:
                right[size] = plainly(model, inputs)
                assert len(made) == 23
            assert torch.equal(found, right[size]), size
    assert {(bucket.store.rows, bucket.store.tokens) for bucket in pool_of(model).buckets} == {
        (1, 128), (2, 128), (4, 128), (8, 128), (2, 192),
    }  # fmt: skip


def test_a_model_that_sees(made: list[int]) -> None:
    """Images and types of tokens concern the prompt; all further steps are those of text."""
    sides = {name: SIDES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    text = sides | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": WINDOW}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text | {"layer_types": MIXED, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=90,
    )
    torch.manual_seed(0)
    model = hooked(transformers.Gemma3ForConditionalGeneration(config).to(DEVICE).eval().requires_grad_(False))
    model.generation_config.eos_token_id = None
    inputs = prompt(2, 15, 3)
    inputs["input_ids"][inputs["input_ids"] >= 90] = 5
    seen = {name: tensor.clone() for name, tensor in inputs.items()}
    seen["input_ids"][:, 5:9] = 90
    seen["token_type_ids"] = (seen["input_ids"] == 90).long()
    seen["pixel_values"] = torch.randn(2, 3, 28, 28, device=DEVICE)
    for given in (inputs, seen, inputs):
        made.clear()
        assert torch.equal(generate(model, given), plainly(model, given))
        assert len(made) == 23
    assert torch.equal(generate(model, seen, max_time=100.0), plainly(model, seen))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_attention_in_plain_torch(family: str, made: list[int]) -> None:
    model = hooked(make(family, attn_implementation="eager"))
    inputs = prompt(3, 15, 4)
    right = plainly(model, inputs)
    for _ in range(2):
        assert torch.equal(generate(model, inputs), right)
    assert made


def test_texts_end_at_their_own_time(llama: Any, made: list[int]) -> None:
    inputs = prompt(3, 9)
    free = generate(llama, inputs, max_new_tokens=40)
    ends = [int(free[0, 9 + 5]), int(free[1, 9 + 11]), int(free[2, 9 + 2])]
    for eos in (ends, ends[:1], ends[2]):
        right = plainly(llama, inputs, max_new_tokens=40, eos_token_id=eos)
        for _ in range(2):
            made.clear()
            found = generate(llama, inputs, max_new_tokens=40, eos_token_id=eos)
            assert torch.equal(found, right)
            assert len(made) <= right.shape[1] - 9 - 1 + loop.AHEAD
    assert right.shape[1] <= 49


def test_an_end_as_the_first_token_and_only_one_token(llama: Any) -> None:
    inputs = prompt(1, 9)
    first = int(generate(llama, inputs, max_new_tokens=1)[0, 9])
    assert generate(llama, inputs, eos_token_id=first).shape == (1, 10)
    assert torch.equal(generate(llama, inputs, max_new_tokens=1), plainly(llama, inputs, max_new_tokens=1))


PROCESSED = {
    "repetition": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [7, 9], [11, 12, 13]]},
    "bias": {"sequence_bias": [[[5], 4.0], [[6, 7], 9.0]]},
    "least": {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
    "least length": {"min_length": 30, "eos_token_id": list(range(3, 40))},
    "forced end": {"forced_eos_token_id": 17, "eos_token_id": 17},
    "suppressed": {"suppress_tokens": list(range(3, 60)), "begin_suppress_tokens": [70, 71]},
    "valid": {"remove_invalid_values": True, "renormalize_logits": True},
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSED)
def test_logits_processors(name: str, llama: Any, made: list[int]) -> None:
    """Tokens and scores, of prompts of two lengths, by one captured step."""
    for tokens in (11, 18):
        inputs = prompt(3, tokens, 2)
        options = PROCESSED[name] | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        found, right = generate(llama, inputs, **options), plainly(llama, inputs, **options)
        assert torch.equal(found.sequences, right.sequences)
        for ours, theirs in ((found.scores, right.scores), (found.logits, right.logits)):
            assert len(ours) == len(theirs)
            torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-3)
    assert made
    (bucket,) = pool_of(llama).buckets
    assert len(bucket.loops) == 1


def test_samples(llama: Any, made: list[int]) -> None:
    """A seed repeats itself. Where no row is added, torch draws the numbers that it draws for transformers."""
    options = {"do_sample": True, "temperature": 3.0, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.99}
    for texts in (2, 3):
        inputs = prompt(texts, 10, 1)
        runs = []
        for run in (generate, generate, plainly):
            torch.manual_seed(5)
            runs.append(run(llama, inputs, num_return_sequences=2, **options))
        assert runs[0].shape == (2 * texts, 34)
        assert torch.equal(runs[0], runs[1])
        if texts == 2 and DEVICE.type == "cpu":
            assert torch.equal(runs[0], runs[2])
        assert not torch.equal(generate(llama, inputs, num_return_sequences=2, **options), runs[0])
    assert made


def test_probabilities_that_are_no_numbers(llama: Any) -> None:
    inputs = prompt(1, 10)
    generate(llama, inputs, do_sample=True)
    llama.lm_head.weight[:, 0] = torch.nan
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        generate(llama, inputs, do_sample=True)


class Streamer:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.seen.append(value)

    def end(self) -> None:
        self.ended = True


def test_streamers_get_every_token_once(llama: Any, made: list[int]) -> None:
    inputs = prompt(1, 9)
    eos = int(generate(llama, inputs)[0, 9 + 12])
    for options in ({}, {"eos_token_id": eos}, {"max_new_tokens": 2}):
        mine, theirs = Streamer(), Streamer()
        found = generate(llama, inputs, streamer=mine, **options)
        plainly(llama, inputs, streamer=theirs, **options)
        assert mine.ended
        assert len(mine.seen) == len(theirs.seen)
        assert all(map(torch.equal, mine.seen, theirs.seen))
        assert torch.equal(torch.cat([value.flatten() for value in mine.seen]), found[0].cpu())
    assert made


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("hidden", [False, True])
def test_the_cache_that_is_handed_out(family: str, hidden: bool, made: list[int]) -> None:
    """It is a copy, in the form that transformers gives it, and a chat can go on with it."""
    model = hooked(make(family))
    options = {"return_dict_in_generate": True, "output_hidden_states": hidden}
    for tokens, new in ((9, 5), (9, 30), (WINDOW + 7, 9)):
        inputs = prompt(2, tokens)
        eos = int(plainly(model, inputs, max_new_tokens=new)[0, -2])
        found = generate(model, inputs, max_new_tokens=new, eos_token_id=eos, **options)
        right = plainly(model, inputs, max_new_tokens=new, eos_token_id=eos, cache_implementation="static", **options)
        assert torch.equal(found.sequences, right.sequences)
        assert type(found) is type(right)
        assert (found.hidden_states is None) is (right.hidden_states is None) is (not hidden)
        cache = found.past_key_values
        assert type(cache) is transformers.StaticCache
        seen = right.sequences.shape[1] - 1
        for ours, theirs in zip(cache.layers, right.past_key_values.layers, strict=True):
            assert ours.keys.shape == theirs.keys.shape
            held = min(seen, theirs.max_cache_len)
            torch.testing.assert_close(ours.keys[:, :, :held], theirs.keys[:, :, :held], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(ours.values[:, :, :held], theirs.values[:, :, :held], rtol=1e-4, atol=1e-4)
            assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == seen
        generate(model, prompt(2, 12))  # does not write to what was handed out
        torch.testing.assert_close(cache.layers[0].keys, right.past_key_values.layers[0].keys, rtol=1e-4, atol=1e-4)
    assert bool(made)


class Unknown(transformers.LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 50.0 * (torch.arange(scores.shape[-1], device=scores.device) % 2)


class After(transformers.StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 20, device=input_ids.device)


FALLS_BACK = {
    "a processor of the caller's": lambda: {"logits_processor": [Unknown()]},
    "a criterion of the caller's": lambda: {"stopping_criteria": [After()]},
    "a time": lambda: {"max_time": 100.0},
    "hidden states": lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
    "token by token": lambda: {"eta_cutoff": 1e-6, "do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("why", FALLS_BACK)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_calls_that_transformers_drives(why: str, family: str, made: list[int], driven: list[int]) -> None:
    """They replay a step a token, on a kept cache, and in a second call from the first step on."""
    model = hooked(make(family))
    inputs = prompt(3, 9, 2)
    options = FALLS_BACK[why]()
    right = plainly(model, inputs, **options)
    replays = []
    for _ in range(3):
        driven.clear()
        found = generate(model, inputs, **options)
        replays.append(len(driven))
        if isinstance(found, Tensor):
            assert torch.equal(found, right)
        else:
            assert torch.equal(found.sequences, right.sequences)
            for ours, theirs in zip(found.hidden_states, right.hidden_states, strict=True):
                torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-4, atol=1e-4)
    assert not made
    tokens = 10 if why == "a criterion of the caller's" else 23
    assert replays[1:] == [tokens, tokens]
    assert replays[0] < tokens
    other = prompt(3, 14, 1)  # of another length, in the same bucket
    if isinstance(right, Tensor):
        assert torch.equal(generate(model, other, **options), plainly(model, other, **options))
    assert len(pool_of(model).buckets) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_embeddings_in_the_place_of_tokens(family: str, made: list[int], driven: list[int]) -> None:
    """Their number is not that of tokens, of which there are none at first."""
    model = hooked(make(family))
    for tokens in (30, 126):
        inputs = prompt(2, tokens, 3)
        embedded = {
            "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
            "attention_mask": inputs["attention_mask"],
        }
        right = plainly(model, embedded, return_dict_in_generate=True, cache_implementation="static")
        assert right.sequences.shape == (2, 24)
        for _ in range(2):
            found = generate(model, embedded, return_dict_in_generate=True)
            assert torch.equal(found.sequences, right.sequences)
            for ours, theirs in zip(found.past_key_values.layers, right.past_key_values.layers, strict=True):
                assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == tokens + 23
                held = min(tokens + 23, theirs.max_cache_len)
                torch.testing.assert_close(ours.keys[:, :, :held], theirs.keys[:, :, :held], rtol=1e-4, atol=1e-4)
    assert driven
    assert not made


def test_calls_that_choose_their_own_way(llama: Any, made: list[int], driven: list[int]) -> None:
    inputs = prompt(1, 9)
    generate(llama, inputs, use_cache=False, max_new_tokens=4)
    generate(llama, inputs, cache_implementation="dynamic")
    generate(llama, inputs, past_key_values=transformers.DynamicCache(config=llama.config))
    generate(llama, inputs, prefill_chunk_size=4)
    assert not made
    assert pool_of(llama).nbytes == 0
    own = transformers.StaticCache(config=llama.config, max_cache_len=32)
    found = generate(llama, inputs, past_key_values=own)
    assert torch.equal(found, plainly(llama, inputs))
    assert own.layers[0].keys.shape[2] == 32
    assert driven
    assert not made


def test_two_threads_use_two_buckets(llama: Any, made: list[int]) -> None:
    sizes = [(1, 9, 0), (1, 14, 0), (2, 9, 3), (3, 30, 1)] * 4
    right = [plainly(llama, prompt(*size)) for size in sizes]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda size: generate(llama, prompt(*size)), sizes))
    assert all(map(torch.equal, found, right))
    assert made
    assert not any(bucket.is_busy for bucket in pool_of(llama).buckets)


def test_a_call_within_a_call_takes_another_bucket(llama: Any) -> None:
    """As a streamer may make one."""
    inputs, other = prompt(1, 9), prompt(1, 11)
    inner: list[Tensor] = []

    class Asks(Streamer):
        def put(self, value: Tensor) -> None:
            if len(inner) < 3:
                inner.append(generate(llama, other))

    found = generate(llama, inputs, streamer=Asks())
    assert torch.equal(found, plainly(llama, inputs))
    assert all(torch.equal(tokens, plainly(llama, other)) for tokens in inner)
    assert len(pool_of(llama).buckets) == 2


def test_where_calls_have_taken_the_memory_others_go_as_before(
    llama: Any, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = prompt(1, 9)
    right = plainly(llama, inputs)
    with pool_of(llama).lease(llama, transformers.StaticCache, 1, 40):
        monkeypatch.setattr(steps, "SHARE", 0.0)
        assert torch.equal(generate(llama, inputs), right)
        assert not made
        assert len(pool_of(llama).buckets) == 1
    assert not pool_of(llama).buckets


def alive(model: Any) -> list[Any]:
    """References to all keys that are kept."""
    return [weakref.ref(kept[0]) for bucket in pool_of(model).buckets for kept in bucket.store.layers if kept]


def test_release(llama: Any) -> None:
    inputs = prompt(2, 9)
    right = generate(llama, inputs)
    generate(llama, inputs, max_time=100.0)
    kept = alive(llama)
    assert len(kept) == 3
    gc.disable()  # nothing waits for it
    try:
        hb.release(torch.nn.ModuleList([llama]))
        assert not any(reference() is not None for reference in kept)
    finally:
        gc.enable()
    assert pool_of(llama).nbytes == 0
    assert torch.equal(generate(llama, inputs), right)
    hb.release(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="release takes"):
        hb.release("gpt2")  # type: ignore[arg-type]


def test_release_during_a_call_frees_after_it(llama: Any) -> None:
    inputs = prompt(1, 9)

    class Releases(Streamer):
        def put(self, value: Tensor) -> None:
            hb.release(llama)

    assert torch.equal(generate(llama, inputs, streamer=Releases()), plainly(llama, inputs))
    assert not pool_of(llama).buckets


@pytest.mark.usefixtures("no_other_model")
def test_restore(llama: Any, made: list[int]) -> None:
    theirs = transformers.GenerationMixin._sample
    assert hasattr(theirs, "__wrapped__")
    inputs = prompt(2, 9)
    right = generate(llama, inputs)
    kept, count = alive(llama), len(made)
    hb.restore(llama)
    assert not any(reference() is not None for reference in kept)
    assert steps.POOL not in vars(llama)
    assert not any(name in vars(llama) for name in host.HOOKS)
    assert transformers.GenerationMixin._sample is theirs.__wrapped__
    for name in ("_assisted_decoding", "_beam_search"):
        assert not hasattr(getattr(transformers.GenerationMixin, name), "__wrapped__")
    assert torch.equal(generate(llama, inputs), right)
    assert len(made) == count
    hooked(llama)
    assert torch.equal(generate(llama, inputs), right)
    assert len(made) > count


def test_a_copy_keeps_nothing_of_the_original(llama: Any, made: list[int]) -> None:
    inputs = prompt(1, 9)
    right = generate(llama, inputs)
    twin = copy.deepcopy(llama)
    assert pool_of(twin) is not pool_of(llama)
    assert pool_of(twin).nbytes == 0
    assert torch.equal(generate(twin, inputs), right)
    assert made


def test_a_model_that_has_changed_is_captured_anew(llama: Any, made: list[int]) -> None:
    inputs = prompt(1, 9)
    generate(llama, inputs)
    (before,) = pool_of(llama).buckets
    llama.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # in place: the graph reads it
    assert torch.equal(generate(llama, inputs), plainly(llama, inputs))
    assert pool_of(llama).buckets == [before]
    llama.model.layers[0].mlp.up_proj.weight.data = torch.randn(96, 64, device=DEVICE)
    assert torch.equal(generate(llama, inputs), plainly(llama, inputs))
    handle = llama.lm_head.register_forward_hook(lambda module, args, output: -output)
    assert torch.equal(generate(llama, inputs), plainly(llama, inputs))
    handle.remove()
    assert torch.equal(generate(llama, inputs), plainly(llama, inputs))
    assert before not in pool_of(llama).buckets
    assert made


def test_a_model_in_4_bits(load: Any, prompts: Tensor, made: list[int], driven: list[int]) -> None:
    """All that `accelerate` does at once, in bf16: a bucket and its rows change no token that is not a tie."""
    model = load()
    report = hb.accelerate(model)
    assert report.generation == host.ON_GRAPHS
    for texts in (1, 3):
        ids = prompts[:texts].to(model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        right = plainly(model, inputs)
        for _ in range(2):
            assert (generate(model, inputs) == right).float().mean() > 0.9
            assert (generate(model, inputs, max_time=100.0) == right).float().mean() > 0.9
            assert torch.equal(generate(model, inputs), generate(model, inputs))
    assert made
    assert driven
    hb.restore(model)
    assert torch.equal(generate(model, inputs), generate(model, inputs))


def test_inference_mode_and_autocast(llama: Any, made: list[int]) -> None:
    inputs = prompt(2, 9)
    right = plainly(llama, inputs)
    with torch.inference_mode():
        assert torch.equal(generate(llama, inputs), right)
        assert torch.equal(generate(llama, inputs, max_time=100.0), right)
    for _ in range(2):
        assert torch.equal(generate(llama, inputs), right)
        with torch.inference_mode():
            assert torch.equal(generate(llama, inputs), right)
        count = len(made)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            assert generate(llama, inputs).shape == right.shape  # as before: keys and values have two dtypes
        assert len(made) == count
    assert made


def test_where_memory_is_short_all_is_freed_and_tried_again(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = prompt(4, 9)
    generate(llama, other)
    kept = alive(llama)
    theirs, failures = type(llama)._prefill, [1]

    def fails_once(self: Any, input_ids: Tensor, config: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        outputs = theirs(self, input_ids, config, model_kwargs, **kwargs)
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("of the test")
        return outputs

    inputs = prompt(1, 9, 2)
    right = plainly(llama, inputs)
    generate(llama, inputs)
    monkeypatch.setattr(type(llama), "_prefill", fails_once)
    assert torch.equal(generate(llama, inputs), right)
    assert not failures
    assert not any(reference() is not None for reference in kept)
    failures.append(1)
    assert torch.equal(generate(llama, inputs, max_time=100.0), right)
    failures.extend([1, 1])
    with pytest.raises(torch.OutOfMemoryError):
        generate(llama, inputs)
    assert torch.equal(generate(llama, inputs), right)


def test_a_step_that_cannot_be_captured_goes_on_without(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = prompt(1, 9)
    right = plainly(llama, inputs)

    class Refused(stepping.Captured):
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(stepping, "Captured", Refused)
        patch.setattr(graphs, "Captured", Refused)
        for options in ({}, {"max_time": 100.0}):
            with pytest.warns(UserWarning, match="cannot be captured in a CUDA graph and goes on without one"):
                assert torch.equal(generate(llama, inputs, **options), right)
    for options in ({}, {"max_time": 100.0}):
        assert torch.equal(generate(llama, inputs, **options), right)
    (bucket,) = pool_of(llama).buckets
    assert all(step.captured is not None for step in bucket.loops.values())
    assert all(step is not None for step in bucket.store.steps.values())


@pytest.mark.slow
def test_two_hundred_calls_of_mixed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept stays within its share, and no token is wrong."""
    model = hooked(make("gemma3"))
    limit = 3_000_000
    monkeypatch.setattr(steps, "SHARE", limit / steps.total_bytes(DEVICE))
    generator = torch.Generator().manual_seed(0)
    sizes = set()
    for number in range(200):
        texts, tokens = (int(torch.randint(1, most, (), generator=generator)) for most in (7, 250))
        inputs = prompt(texts, tokens, padding=min(number % 4, tokens - 1))
        options = {"max_new_tokens": 2 + number % 5} | ({"max_time": 100.0} if number % 7 == 0 else {})
        found = generate(model, inputs, **options)
        if number % 5 == 0:
            assert torch.equal(found, plainly(model, inputs, **options)), number
        assert pool_of(model).nbytes <= limit
        sizes.add(len(pool_of(model).buckets))
    assert max(sizes) > 1


def test_experts_are_switched_until_there_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does around its loop of a model with experts, takes it a millisecond."""
    model = hooked(make("mixtral"))
    kind = transformers.GenerationMixin
    switched = counted(monkeypatch, kind, "_optimize_model_for_decode")
    right = generate(model, prompt(2, 7))
    assert len(switched) == 1
    if DEVICE.type == "cpu":
        monkeypatch.setattr(loop.TokenStep, "is_graph", True)
    assert torch.equal(generate(model, prompt(2, 7)), right)
    assert len(switched) == 1
