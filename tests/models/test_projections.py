"""Siblings computed at once: the bits of each alone, whatever happens between the call that computes and those that
take. Grouping is for GPUs; here it is switched on for the CPU."""

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte.models import projections
from halfbyte.recover.invariant import BatchInvariant

bitsandbytes = pytest.importorskip("bitsandbytes")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, SIZES = 128, (96, 32, 64)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many products each group made at once, call by call."""
    made: list[int] = []
    together = projections.linear_group

    def linear_group(x: Tensor, weights: Any, biases: Any, one_launch: bool) -> list[Tensor] | None:
        results = together(x, weights, biases, one_launch)
        made.append(len(weights))
        return results

    monkeypatch.setattr(projections, "ON_CPU", True)
    monkeypatch.setattr(projections, "linear_group", linear_group)
    torch.manual_seed(0)
    with torch.no_grad():
        yield made


class Attention(nn.Module):
    """Three projections that are not called in a forward of ours: tests call them as they like."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        for name, n in zip(PROJECTIONS, SIZES, strict=True):
            self.add_module(name, make(n))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x) for module in self.children()]


def theirs(n: int, **options: Any) -> Any:
    settings = {"bias": False, "quant_type": "nf4", "compute_dtype": torch.bfloat16} | options
    return bitsandbytes.nn.Linear4bit(K, n, **settings).to(DEVICE)


def ours(n: int, **options: Any) -> Any:
    bias = options.pop("bias", False)
    dense = nn.Linear(K, n, bias=bias, device=DEVICE, dtype=torch.bfloat16)
    return hb.nn.Linear4bit.from_linear(dense, **options).requires_grad_(False)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "bitsandbytes": theirs,
    "bitsandbytes, fp32 bias": lambda n: theirs(n, bias=True, compress_statistics=False),
    "bitsandbytes, compute dtype unset": lambda n: theirs(n, compute_dtype=None),
    "nf4": ours,
    "fp4, bias": lambda n: ours(n, format="fp4", nested=False, bias=True),
    "int4": lambda n: ours(n, format="int4", group_size=32),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, K, device=DEVICE, dtype=dtype)


def attention(kind: str = "nf4") -> Any:
    """Accelerated, and called once: the first call of a bitsandbytes layer settles its dtype."""
    module = Attention(KINDS[kind])
    hb.accelerate(module)
    module(random(1, 65))
    return module


def alone(module: nn.Module, x: Tensor) -> Any:
    """What it gives without a group, from an x of its own."""
    group = vars(module).pop(projections.GROUP, None)
    try:
        return module(x.detach().clone())
    finally:
        if group is not None:
            setattr(module, projections.GROUP, group)


def groups(model: nn.Module) -> list[set[str]]:
    """Names of the members of each."""
    found: dict[Any, set[str]] = {}
    for name, module in model.named_modules():
        if group := vars(module).get(projections.GROUP):
            found.setdefault(group, set()).add(name)
    return list(found.values())


def group_of(module: nn.Module) -> Any:
    return vars(module)[projections.GROUP]


def is_right(module: nn.Module, x: Tensor) -> bool:
    return torch.equal(module(x), alone(module, x))


# What is computed at once.


@kinds
@pytest.mark.parametrize("rows", [1, 7, projections.MOST_ROWS])
def test_one_call_has_the_bits_of_three(kind: str, rows: int, calls: list[int]) -> None:
    module = attention(kind)
    x = random(1, rows)
    right = [alone(child, x) for child in module.children()]
    for order in permutations(range(3)):
        children = list(module.children())
        results = {i: children[i](x) for i in order}
        for i in range(3):
            assert results[i].dtype == right[i].dtype
            assert results[i].is_contiguous()
            assert torch.equal(results[i], right[i])
        assert not vars(x)  # nothing is left on it
    assert calls == [3] * 6
    assert group_of(module.q_proj).wasted == 0


@pytest.mark.parametrize("compute", [torch.float32, torch.float16])
def test_x_that_is_cast_for_the_product(compute: torch.dtype, calls: list[int]) -> None:
    module = Attention(lambda n: theirs(n, compute_dtype=compute, bias=True))
    hb.accelerate(module)
    module(random(65))
    x = random(3)
    right = [alone(child, x) for child in module.children()]
    assert all(torch.equal(y, z) for y, z in zip(module(x), right, strict=True))
    assert right[0].dtype == torch.bfloat16
    assert calls == [3]


def test_the_first_call_of_a_layer_settles_its_dtype(calls: list[int]) -> None:
    module = Attention(lambda n: theirs(n, compute_dtype=None))
    hb.accelerate(module)
    for wanted in ([], [3]):
        module(random(2))
        assert [child.compute_dtype for child in module.children()] == [torch.bfloat16] * 3
        assert calls == wanted


def test_a_model(load: Any, prompts: Tensor, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    hb.accelerate(model)
    layers = model.config.num_hidden_layers
    assert sorted(map(len, groups(model))) == [2] * layers + [3] * layers
    prompts = prompts.to(model.device)
    for ids in (prompts[:2], prompts[:1, :1]):
        model(ids)
        calls.clear()
        ours = model(ids).logits
        assert calls == [3, 2] * layers
        with monkeypatch.context() as patch:
            patch.setattr(projections.Group, "compute", lambda *_: None)
            assert torch.equal(model(ids).logits, ours)
    calls.clear()
    model(prompts[:3])  # 72 rows
    assert calls == []


def test_more_rows_than_gain_from_it(calls: list[int]) -> None:
    module = attention()
    for shape in ((projections.MOST_ROWS + 1,), (5, 13)):
        assert is_right(module.q_proj, random(*shape))
    module(random(0))
    module(random(8, 8))
    assert calls == [3, 3]


def test_fused_projections_of_different_kinds() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = ours(32), ours(32, format="fp4"), ours(32)
            self.gate_proj, self.up_proj = theirs(32), theirs(32, compute_dtype=torch.float32)
            self.query, self.key, self.value = ours(32), theirs(32), nn.Linear(K, 32)
            self.wq, self.wk = ours(32), hb.nn.Linear4bit(64, 32)
            self.w1, self.w3 = theirs(32), None
            self.fc1, self.fc2 = ours(32), ours(32)

    module = Mixed()
    hb.accelerate(module)
    assert groups(module) == [{"q_proj", "v_proj"}]


def test_hooks_run_as_ever(calls: list[int]) -> None:
    module = attention()
    seen = []
    module.k_proj.register_forward_hook(lambda *_: seen.append("k"))
    module.v_proj.register_forward_hook(lambda _, __, y: y + 1)
    x = random(2)
    right = [alone(child, x) for child in module.children()]
    assert all(torch.equal(y, z) for y, z in zip(module(x), right, strict=True))
    assert seen == ["k", "k"]
    assert calls == [3]


# What happens in between.


def written(x: Tensor) -> None:
    x.add_(1)


def written_through_a_view(x: Tensor) -> None:
    x[:1].mul_(2)


def given_other_memory(x: Tensor) -> None:
    x.data = x.data + 1


def turned(x: Tensor) -> None:
    x.copy_(x.flip(-1))


@kinds
@pytest.mark.parametrize("change", [written, written_through_a_view, given_other_memory, turned])
def test_x_changes(kind: str, change: Callable[[Tensor], None]) -> None:
    module = attention(kind)
    x = random(2)
    before = module.q_proj(x), alone(module.k_proj, x)
    change(x)
    after = module.k_proj(x)
    assert not torch.equal(after, before[1])
    assert torch.equal(after, alone(module.k_proj, x))
    change(x)
    assert is_right(module.v_proj, x)
    assert is_right(module.q_proj, x)


def test_x_gets_another_shape() -> None:
    module = attention()
    x = random(2, 3)
    module.q_proj(x)
    x.resize_(3, 2, K)
    assert is_right(module.k_proj, x)
    assert module.v_proj(x).shape == (3, 2, SIZES[2])


@kinds
def test_another_x_of_the_same_numbers_memory_or_place(kind: str) -> None:
    for other in (Tensor.clone, Tensor.detach, lambda x: x[:], lambda _: random(2), copy.copy):
        module, x = attention(kind), random(2).add_(1)
        module.q_proj(x)
        y = other(x)
        x.add_(1)
        assert is_right(module.k_proj, y)
        del x
        for _ in range(3):  # in the place of the one that is gone
            assert is_right(module.v_proj, random(2))


def weight_replaced(module: Any, fresh: Any) -> None:
    if isinstance(module, hb.nn.Linear4bit):
        for name, buffer in fresh._buffers.items():
            setattr(module, name, buffer)
    else:
        module.weight = fresh.weight


def memory_replaced(module: Any, fresh: Any) -> None:
    if isinstance(module, hb.nn.Linear4bit):
        module.packed = fresh.packed
    else:
        module.weight.data = fresh.weight.data


def state_loaded(module: Any, fresh: Any) -> None:
    if isinstance(module, hb.nn.Linear4bit):
        module.load_state_dict(fresh.state_dict())
    else:
        module.load_state_dict({key: value for key, value in fresh.state_dict().items() if key in ("weight", "bias")})


def written_to(module: Any, fresh: Any) -> None:
    name = "packed" if isinstance(module, hb.nn.Linear4bit) else "weight"
    getattr(module, name).copy_(getattr(fresh, name))


def scales_replaced(module: Any, fresh: Any) -> None:
    if isinstance(module, hb.nn.Linear4bit):
        module.scale = 2 * module.scale
    else:
        module.weight.quant_state.absmax = 2 * module.weight.quant_state.absmax


def bias_replaced(module: Any, fresh: Any) -> None:
    bias = nn.Parameter(module.bias + 1, requires_grad=False)
    while bias._version < module.bias._version:
        bias.add_(0)
    module.bias = bias


def bias_written_to(module: Any, fresh: Any) -> None:
    module.bias.add_(1)


def bias_taken_away(module: Any, fresh: Any) -> None:
    module.bias = None


CHANGES = [
    weight_replaced, memory_replaced, state_loaded, written_to, scales_replaced, bias_replaced, bias_written_to,
    bias_taken_away,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["bitsandbytes, fp32 bias", "fp4, bias"])
def test_a_weight_or_bias_changes(kind: str, change: Callable[[Any, Any], None]) -> None:
    module = attention(kind)
    x = random(2)
    module.q_proj(x)
    before = alone(module.k_proj, x)
    change(module.k_proj, KINDS[kind](SIZES[1]))
    after = module.k_proj(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, alone(module.k_proj, x))
    assert is_right(module.v_proj, x)
    assert is_right(module.q_proj, x)


def test_a_compute_dtype_changes() -> None:
    module = attention("bitsandbytes")
    x = random(2, dtype=torch.float32)
    module.q_proj(x)
    before = alone(module.k_proj, x)
    module.k_proj.compute_dtype = torch.float32
    for _ in range(2):
        after = module.k_proj(x)
        assert not torch.equal(after, before)
        assert torch.equal(after, alone(module.k_proj, x))
        assert is_right(module.v_proj, x)
        assert is_right(module.q_proj, x)


def test_no_memory_outlives_x() -> None:
    module = attention()
    x = random(2)
    module.q_proj(x)
    left = [ref(result) for _, result in getattr(x, projections.RESULTS).results.values()]
    assert len(left) == 2
    first = module.k_proj(x)
    assert [result() is not None for result in left] == [True, True]
    del first
    assert [result() is not None for result in left] == [False, True]
    gc.disable()
    try:
        del x
        assert left[1]() is None
    finally:
        gc.enable()
    assert group_of(module.q_proj).wasted == 1


def test_a_weight_is_not_kept_alive() -> None:
    module = attention("bitsandbytes")
    module(random(2))
    gone = ref(module.k_proj.weight.quant_state)
    module.k_proj.weight = theirs(SIZES[1]).weight
    module.k_proj.quant_state = module.k_proj.weight.quant_state
    assert gone() is None


def test_an_error_in_between() -> None:
    module = attention()

    def fail(*_: Any) -> None:
        raise RuntimeError("in between")

    hook = module.k_proj.register_forward_pre_hook(fail)
    x = random(2)
    with pytest.raises(RuntimeError, match="in between"):
        module(x)
    assert is_right(module.v_proj, x)
    hook.remove()
    assert is_right(module.k_proj, x)
    assert all(torch.equal(y, alone(child, x)) for y, child in zip(module(x), module.children(), strict=True))


def test_an_error_is_that_of_the_module_it_is_of(calls: list[int]) -> None:
    module = attention("fp4, bias")
    module.k_proj.bias = nn.Parameter(torch.zeros(SIZES[1] + 1, dtype=torch.bfloat16, device=DEVICE), False)
    x = random(2)
    assert is_right(module.q_proj, x)
    with pytest.raises(ValueError, match=r"bias has shape \[33\]"):
        module.k_proj(x)
    module.k_proj.bias = nn.Parameter(torch.zeros(SIZES[1], device=DEVICE), False)
    assert is_right(module.q_proj, x)
    with pytest.raises(TypeError, match=r"bias has dtype torch\.float32 and x torch\.bfloat16"):
        module.k_proj(x)
    for wrong, error, words in (
        (random(2)[:, 1:], ValueError, r"x has shape \[2, 127\]"),
        (random(2).double(), TypeError, "x has dtype torch.float64"),
        (random(2).to_sparse(), TypeError, "x has layout"),
        (torch.tensor(1.0, device=DEVICE), ValueError, r"x has shape \[\]"),
        (None, TypeError, "x is a NoneType"),
    ):
        with pytest.raises(error, match=words):
            module.v_proj(wrong)
    assert calls == []


# What is wasted.


def test_cross_attention_stops_it(calls: list[int]) -> None:
    """The query is given one x, key and value another."""
    module = attention()
    for _ in range(10):
        x, memory = random(1), random(5)
        assert is_right(module.q_proj, x)
        assert is_right(module.k_proj, memory)
        assert is_right(module.v_proj, memory)
    assert 0 < len(calls) <= projections.MOST_WASTED + 1
    assert groups(module) == []
    hb.accelerate(module)  # begins anew
    assert groups(module) == [set(PROJECTIONS)]


def test_a_projection_that_is_never_called_stops_it(calls: list[int]) -> None:
    module = attention()
    x = random(1)  # the same one for ever, as where memory is static
    for _ in range(10):
        assert is_right(module.q_proj, x)
        assert is_right(module.k_proj, x)
    assert 0 < len(calls) <= projections.MOST_WASTED + 1
    assert groups(module) == []


def test_x_that_changes_before_the_last_stops_it(calls: list[int]) -> None:
    module = Attention(ours)
    del module.v_proj
    hb.accelerate(module)
    for _ in range(10):
        x = random(1)
        module.q_proj(x)
        x.requires_grad_()
        with torch.enable_grad():
            assert module.k_proj(x).requires_grad
    assert len(calls) == projections.MOST_WASTED


# Gradients, modes, tracing.


def test_gradients_that_are_wanted(calls: list[int]) -> None:
    module = attention("fp4, bias")
    with torch.enable_grad():
        x = random(2).requires_grad_()
        sum(y.float().square().sum() for y in module(x)).backward()
        right = x.grad
        x.grad = None
        projections.unlink(module)
        sum(y.float().square().sum() for y in module(x)).backward()
        assert torch.equal(x.grad, right)
        assert calls == []
        hb.accelerate(module)
        module(random(2))  # no gradient is wanted of this one
        assert calls == [3]
        module.k_proj.bias.requires_grad_()
        x = random(2)
        assert [y.requires_grad for y in module(x)] == [False, True, False]
        assert calls == [3]


def test_gradients_that_are_wanted_later() -> None:
    module = attention("fp4, bias")
    x = random(2).requires_grad_()
    module.q_proj(x)
    with torch.enable_grad():
        assert module.k_proj(x).requires_grad
    x = random(2)
    with torch.enable_grad():
        module.q_proj(x)
        x.requires_grad_()
        assert module.k_proj(x).requires_grad
        x = random(2)
        module.q_proj(x)
        module.k_proj.bias.requires_grad_()
        assert module.k_proj(x).requires_grad


def test_inference_mode(calls: list[int]) -> None:
    module = attention()
    outside = random(2)
    with torch.inference_mode():
        x = random(2)
        first = module.k_proj(x)
        module.q_proj(x)
        x.add_(1)  # which nobody could tell
        assert not torch.equal(module.k_proj(x), first)
        module.q_proj(outside)
    assert calls == []
    assert torch.equal(module.q_proj(x), alone(module.q_proj, x))
    assert calls == []
    assert not module.k_proj(outside).is_inference()
    assert is_right(module.v_proj, outside)
    assert calls == [3]


class Other(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_batch_invariance_is_that_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    # A dense weight on a CPU, whose bits are others.
    monkeypatch.setattr("halfbyte.kernels.linear.plan.most_fused_rows", lambda *_: 0)
    module = attention()
    x = random(projections.MOST_ROWS)
    module.q_proj(x)
    with BatchInvariant():  # type: ignore[no-untyped-call]
        within, first = module.k_proj(x), module.k_proj(x[:1].clone())
    assert torch.equal(within[:1], first)
    assert not torch.equal(within, alone(module.k_proj, x))
    assert is_right(module.k_proj, x)
    module = attention()
    x = random(projections.MOST_ROWS)
    with BatchInvariant():  # type: ignore[no-untyped-call]
        module.q_proj(x)
    with Other():  # type: ignore[no-untyped-call]
        assert is_right(module.k_proj, x)


def test_autocast_has_no_say() -> None:
    module = attention("bitsandbytes, fp32 bias")
    x = random(2)
    with torch.autocast(DEVICE, torch.float16):
        assert is_right(module.q_proj, x)
    assert is_right(module.k_proj, x)


def test_traced_projections_are_computed_alone(calls: list[int]) -> None:
    torch._dynamo.reset()
    module = attention()
    x = random(2)
    right = module(x)
    calls.clear()
    module.q_proj(x)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    results = torch.compile(module, fullgraph=True, backend=backend)(x)
    assert all(torch.equal(y, z) for y, z in zip(results, right, strict=True))
    assert calls == [3]
    [graph] = graphs
    assert sum(node.target is torch.ops.halfbyte.linear for node in graph.graph.nodes) == 3


def test_threads_share_modules_and_x() -> None:
    module = attention()
    xs = [random(2) for _ in range(4)]
    right = [[alone(child, x) for child in module.children()] for x in xs]
    wrong: list[int] = []

    def work(seed: int) -> None:
        children = list(module.children())
        with torch.no_grad():
            for turn in range(150):
                i, j = (seed + turn) % len(xs), (seed * turn) % 3
                for k in (j, (j + 1) % 3, (j + 2) % 3):
                    if not torch.equal(children[k](xs[i]), right[i][k]):
                        wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Copies, and the way back.


@pytest.mark.parametrize("kind", ["bitsandbytes", "nf4"])
def test_copies_and_pickles_are_in_no_group(kind: str, calls: list[int]) -> None:
    module = attention(kind)
    x = random(2)
    right = [alone(child, x) for child in module.children()]
    module.q_proj(x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert groups(twin) == []
        hb.accelerate(twin)
        assert groups(twin) == [set(PROJECTIONS)]
        twin(random(65))
        assert all(torch.equal(y, z) for y, z in zip(twin(x), right, strict=True))
    calls.clear()
    assert all(torch.equal(y, z) for y, z in zip(copy.deepcopy(module)(x), right, strict=True))
    assert calls == []
    shallow = copy.copy(module.k_proj)
    assert projections.shared(shallow, random(2)) is None
    assert torch.equal(shallow(x), right[1])
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(other, x)
        assert is_right(module.v_proj, other)
    assert copy.deepcopy(module.q_proj) is not None  # alone, without its group
    assert {key.rpartition(".")[0] for key in module.state_dict()} <= {
        f"{name}{end}" for name in PROJECTIONS for end in ("", ".weight", ".weight.quant_state")
    }


def test_nothing_is_kept_alive() -> None:
    module = attention()
    x = random(2)
    module.q_proj(x)
    members = [ref(child) for child in module.children()]
    del module
    gc.collect()
    assert [member() for member in members] == [None] * 3
    assert hasattr(x, projections.RESULTS)  # and so it is of no use to anybody


@pytest.mark.parametrize("kind", ["bitsandbytes", "nf4"])
def test_restore(kind: str, calls: list[int]) -> None:
    module = Attention(KINDS[kind])
    before = [set(vars(child)) for child in module.modules()]
    hb.accelerate(module)
    first = group_of(module.q_proj)
    hb.accelerate(module)
    assert group_of(module.q_proj) is not first
    x = random(2)
    module(x)
    calls.clear()
    module.q_proj(x)
    hb.restore(module)
    hb.restore(module)
    assert [set(vars(child)) for child in module.modules()] == before
    module(x)
    assert calls == [3]


def test_restore_of_one_projection_is_that_of_all(calls: list[int]) -> None:
    module = attention()
    hb.restore(module.k_proj)
    assert groups(module) == []
    module(random(2))
    assert calls == []


def test_a_layer_of_a_kind_of_its_own_is_left_alone() -> None:
    class Scaled(hb.nn.Linear4bit):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    module = Attention(ours)
    module.k_proj = Scaled.from_quantized(module.k_proj.weight)
    x = random(2)
    right = module(x)
    assert len(hb.accelerate(module).modules) == 3
    assert groups(module) == [{"q_proj", "v_proj"}]
    assert all(torch.equal(y, z) for y, z in zip(module(x), right, strict=True))


# Adapters.


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]]
)
def test_adapters(
    load: Any, prompts: Tensor, use_dora: bool, targets: list[str], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=use_dora)
    model = peft.get_peft_model(load(), config).eval()
    hb.accelerate(model)
    layers = model.config.num_hidden_layers
    ids = prompts[:2].to(model.device)

    def logits() -> Tensor:
        model(ids)
        calls.clear()
        result: Tensor = model(ids).logits
        with monkeypatch.context() as patch:
            patch.setattr(projections.Group, "compute", lambda *_: None)
            assert torch.equal(model(ids).logits, result)
        assert calls == [3, 2] * layers
        return result

    with torch.autocast(model.device.type, torch.bfloat16):
        adapted = logits()
    logits()
    model.merge_adapter()
    merged = logits()
    model.unmerge_adapter()
    with model.disable_adapter():
        assert not torch.equal(logits(), adapted)
    assert not torch.equal(merged, adapted)


def test_training_an_adapter_leaves_groups_as_they_are(load: Any, prompts: Tensor, calls: list[int]) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    hb.accelerate(model)
    ids = prompts[:1].to(model.device)
    with torch.enable_grad(), torch.autocast(model.device.type, torch.bfloat16):
        for _ in range(2 * projections.MOST_WASTED):
            model(ids, labels=ids).loss.backward()
    assert len(groups(model)) == 2 * model.config.num_hidden_layers
    assert all(group_of(m).wasted == 0 for m in model.modules() if projections.GROUP in vars(m))
