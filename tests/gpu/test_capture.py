"""A capture that fails leaves nothing behind: stream, generator, allocator and the next model are as before."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.common.capture import capture
from halfbyte.recover.graphed import Graphed

from .conftest import DEVICE, captured, check_replay

Failure = Callable[[Tensor], object]


def asks_for_a_number(x: Tensor) -> object:
    return x.sum().item()


def raises(x: Tensor) -> object:
    x.add_(1)
    raise KeyError("of Python")


def leaves_work_on_another_stream(x: Tensor) -> object:
    """The capture cannot end while what it forked has not come back."""
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        return x.mul_(2)


def draws_and_asks(x: Tensor) -> object:
    torch.rand(5, device=DEVICE)
    return x.normal_().sum().item()


FAILURES: tuple[Failure, ...] = (asks_for_a_number, raises, leaves_work_on_another_stream, draws_and_asks)


class Circle:
    """Only the garbage collector finds what refers to itself, and it looks when it likes."""

    def __init__(self, kept: object = None) -> None:
        self.me, self.kept = self, kept


def test_an_old_graph_is_not_collected_during_a_capture() -> None:
    old, _ = captured(lambda: torch.ones(10, device=DEVICE).mul_(2))
    Circle(old)
    del old
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        result = torch.ones(10, device=DEVICE)
        for _ in range(200_000):  # each generation's threshold is passed many times
            Circle()
        result.mul_(3)
    assert gc.isenabled()
    graph.replay()
    assert result.eq(3).all()


def fail(failure: Failure) -> None:
    with pytest.raises((RuntimeError, KeyError)), capture(torch.cuda.CUDAGraph()):
        failure(torch.ones(1000, device=DEVICE))


@pytest.mark.parametrize("failure", FAILURES)
def test_the_thread_is_as_it_was(failure: Failure) -> None:
    stream = torch.cuda.current_stream()
    torch.manual_seed(7)
    torch.rand(3, device=DEVICE)
    state = torch.cuda.get_rng_state(DEVICE)
    expected = torch.rand(1000, device=DEVICE)
    torch.cuda.set_rng_state(state, DEVICE)
    fail(failure)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), state)
    assert torch.equal(torch.rand(1000, device=DEVICE), expected)


@pytest.mark.parametrize("failure", FAILURES)
def test_on_a_stream_of_the_callers(failure: Failure) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fail(failure)
        assert torch.cuda.current_stream() == side


@pytest.mark.parametrize("failure", FAILURES)
def test_graphs_before_and_after(failure: Failure) -> None:
    """One that draws random numbers goes on with the default generator, and new ones can be captured."""
    torch.manual_seed(1)
    graph, numbers = captured(lambda: torch.rand(100, device=DEVICE))
    torch.manual_seed(2)
    graph.replay()
    expected = numbers.clone(), torch.rand(4, device=DEVICE)
    fail(failure)
    torch.manual_seed(2)
    graph.replay()
    assert torch.equal(numbers, expected[0])
    assert torch.equal(torch.rand(4, device=DEVICE), expected[1])
    x = torch.randn(50, device=DEVICE)
    check_replay(lambda: [x * 2], [x * 2])


def test_no_memory_stays_with_the_capture() -> None:
    """The allocator serves other streams from what record_stream gives back, which it does not while it captures."""
    for _ in range(3):
        fail(asks_for_a_number)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    side = torch.cuda.Stream()
    for _ in range(20):
        x = torch.empty(1 << 20, device=DEVICE)
        x.record_stream(side)
        del x
        torch.cuda.synchronize()
        torch.empty(1, device=DEVICE)
    assert torch.cuda.memory_allocated() - before < 4 << 20


def test_recovery_goes_on_without_graphs() -> None:
    graphed = Graphed(lambda x: x * x.sum().item())
    x = torch.randn(10, device=DEVICE)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        torch.testing.assert_close(graphed(x), x * x.sum())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_sampling_and_the_next_model_after_a_model_that_fails() -> None:
    """The model goes on without a graph; what bitsandbytes then makes on the default stream is what it made before."""
    theirs = pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = [torch.randn(1024, 1024, device=DEVICE).bfloat16() for _ in range(8)]
    expected = [theirs.functional.quantize_4bit(weight, quant_type="nf4")[0] for weight in dense]
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, num_hidden_layers=2, vocab_size=512
    )
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    for layer in model.model.layers:
        for parent, name in ((layer.mlp, "up_proj"), (layer.mlp, "gate_proj"), (layer.self_attn, "o_proj")):
            setattr(parent, name, hb.nn.Linear4bit.from_linear(getattr(parent, name)))
    hb.accelerate(model)
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, inputs, output: output * bool(output.isfinite().all())
    )
    ids = torch.randint(3, 500, (2, 12), device=DEVICE)
    with pytest.warns(UserWarning, match="cannot be captured"):
        model.generate(ids, max_new_tokens=8, do_sample=True, attention_mask=torch.ones_like(ids))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    transformers.set_seed(3)
    sampled = model.generate(ids, max_new_tokens=8, do_sample=True, attention_mask=torch.ones_like(ids))
    transformers.set_seed(3)
    again = model.generate(ids, max_new_tokens=8, do_sample=True, attention_mask=torch.ones_like(ids))
    assert torch.equal(sampled, again)
    for weight, packed in zip(dense, expected, strict=True):
        for _ in range(3):
            assert torch.equal(theirs.functional.quantize_4bit(weight * 1, quant_type="nf4")[0], packed)
    hb.restore(model)
