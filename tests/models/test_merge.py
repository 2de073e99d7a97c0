"""The pass that inductor runs: products of one x become one operator, and the graph computes the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import halfbyte as hb
from halfbyte.models import regions
from halfbyte.models.merge import Merge
from halfbyte.models.projections import MOST_ROWS

GROUP, ONE = torch.ops.halfbyte.linear_group.default, torch.ops.halfbyte.linear.default


def weight(n: int, format: str = "nf4", **options: Any) -> hb.QuantizedWeight:
    return hb.quantize(torch.randn(n, 128), format, **options)


def merged(function: Callable[[Tensor], Any], rows: int = 3, **options: Any) -> list[int]:
    """How many products each operator of the graph makes, in order, after the pass; what it computes is checked."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    products: list[int] = []

    def compile(graph: GraphModule, _: Any) -> Any:
        Merge()(graph.graph)
        graph.graph.lint()
        graph.recompile()
        for node in graph.graph.nodes:
            if node.target in (GROUP, ONE):
                products.append(len(node.args[1]) if node.target is GROUP else 1)
        return make_boxed_func(graph.forward)

    x = torch.randn(rows, 128)
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=compile), **options)
        for ours, right in zip(compiled(x), function(x), strict=True):
            assert torch.equal(ours, right)
    return products


@pytest.mark.parametrize(
    "options", [{}, {"nested": False}, {"format": "fp4", "block_size": 32}, {"format": "int4", "group_size": 32}]
)
def test_products_of_one_x(options: dict[str, Any]) -> None:
    q, k, v, o = (weight(n, **options) for n in (96, 32, 64, 8))
    bias = torch.randn(32)

    def attention(x: Tensor) -> tuple[Tensor, ...]:
        return hb.linear(x, q), torch.relu(hb.linear(x, k, bias)), hb.linear(x, v), hb.linear(x + 1, o)

    assert merged(attention) == [3, 1]


def test_users_between_the_products() -> None:
    gate, up, down = weight(128), weight(128), weight(64)

    def mlp(x: Tensor) -> tuple[Tensor, ...]:
        return (hb.linear(torch.relu(hb.linear(x, gate)) * hb.linear(x, up), down),)

    assert merged(mlp) == [2, 1]


def test_products_that_stay_alone() -> None:
    a, b = weight(128), weight(128)

    def both(x: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return hb.linear(x, a, **options), hb.linear(x, b, **options)

    assert merged(both, MOST_ROWS) == [2]
    assert merged(both, MOST_ROWS + 1) == [1, 1]
    assert merged(lambda x: both(x, batch_invariant=True)) == [1, 1]
    assert merged(both, dynamic=True) == [1, 1]  # of however many rows

    def apart(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return hb.linear(x, a), hb.linear(y, b)

    assert merged(apart) == [1, 1]
    others = [weight(8, format="fp4"), weight(8, nested=False), weight(8, block_size=128), weight(8, "int4")]
    assert merged(lambda x: [hb.linear(x, q) for q in (a, *others)]) == [1] * 5


def test_a_bias_that_is_made_later_or_from_another_product() -> None:
    a, b, c = weight(16), weight(16), weight(16)

    def late(x: Tensor) -> tuple[Tensor, ...]:
        first = hb.linear(x, a)
        return first, hb.linear(x, b, first[0].contiguous()), hb.linear(x, c)

    assert merged(late) == [2, 1]


@pytest.mark.slow
def test_regions_run_with_it() -> None:
    """The MLPs of two layers, through inductor: one graph for both, with one operator for gate and up."""
    pytest.importorskip("transformers")
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(LlamaMLP(LlamaConfig(hidden_size=128, intermediate_size=64)) for _ in range(2)))
    for mlp in model:
        for name, dense in list(mlp.named_children()):
            if isinstance(dense, nn.Linear):
                setattr(mlp, name, hb.nn.Linear4bit.from_linear(dense))
    hb.accelerate(model)
    x = torch.randn(3, 128)
    with torch.no_grad():
        right = model(x)
        counters.clear()
        with regions.compiled_regions(model):
            result, codes = run_and_get_code(model, x)
    assert counters["stats"]["unique_graphs"] == 1
    [code] = codes
    assert code.count("torch.ops.halfbyte.linear_group.default(") == 1
    assert code.count("torch.ops.halfbyte.linear.default(") == 1
    torch.testing.assert_close(result, right, rtol=1e-6, atol=1e-6)


def test_inductor_knows_it_by_its_source() -> None:
    assert Merge().uuid() == Merge().uuid()
    assert Merge().uuid() is not None
