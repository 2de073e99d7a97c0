"""`halfbyte bench experts`: products with stacks of experts, and whole blocks of them, for more and more tokens.

A case is one of three parts of a model's block: the product with gate_up, the product with down, or the block with its
router's product and choice. Every result is held against the fp64 one of the very weights that its provider was
given, and its error is recorded. Bytes are those of the experts that any token has, in the form in which the provider
has them, and of x, the result and the router; flops those of the products.

In the two products halfbyte finds on its own which rows belong to which expert. Peers are given rows that are sorted
already, and only their products are timed; "halfbyte, sorted ahead" is halfbyte's product under that condition. Whole
blocks contain all of that. They follow each other on one CUDA graph, as in a step of a model, wherever CUDA can capture
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte import eager_experts
from halfbyte import experts as operations
from halfbyte.bench import baselines
from halfbyte.bench.case import Case, first_line
from halfbyte.bench.humming import Humming
from halfbyte.bench.mixtures import DTYPE, Choice, Mixture, Stack, choices, facts_of, wanted_by
from halfbyte.kernels.experts import grouped, router_reference
from halfbyte.kernels.experts.reference import activate
from halfbyte.kernels.linear.reference import linear_exact
from halfbyte.measure.error import relative_error
from halfbyte.measure.report import DENSE, OURS, SORTED
from halfbyte.models.captured import Captured, current

HUMMING = "humming"
BLOCK = "block"
# The largest ‖y - y64‖ / ‖y64‖ that passes: that of `bench linear`, and a little more for a block, whose peer rounds
# after each of its steps.
BOUND = {"gate_up": 1.5 * 2.0**-8, "down": 1.5 * 2.0**-8, BLOCK: 2.0**-7}

Provider = Callable[[int], Tensor]
Exact = Callable[[int], Tensor]


def experts_cases(
    device: torch.device, models: Mapping[str, Mixture], tokens: Sequence[int], formats: Sequence[str] = ()
) -> Iterator[Case]:
    """One case a model, format, part and number of tokens. formats: each model's own unless given."""
    for name, mixture in models.items():
        for format in formats or (mixture.format,):
            stacks = {part: Stack(getattr(mixture, part), format, device) for part in ("gate_up", "down")}
            facts = facts_of(mixture) | {"weights": format, "dtype": str(DTYPE).removeprefix("torch.")}
            for part, stack in stacks.items():
                left_out: dict[str, str] = {}
                humming = _humming(stack, device, left_out)
                for count in tokens:
                    title = f"{name} {format}, {part}, T = {count}"
                    yield _product(title, part, mixture, stack, count, humming, facts, left_out, device)
            for count in tokens:
                yield _block(f"{name} {format}, {BLOCK}, T = {count}", mixture, stacks, count, facts, device)


def _humming(stack: Stack, device: torch.device, left_out: dict[str, str]) -> Humming | None:
    if not Humming.is_here(device):
        if device.type == "cuda":
            left_out[HUMMING] = "it is not installed; pip install humming-kernels"
        return None
    try:
        return Humming(stack.dense[0], stack.copies)
    except Exception as error:  # it compiles on this machine, which may fail in many ways; the others are timed anyway
        left_out[HUMMING] = f"it cannot take {list(stack.shape)}: {first_line(error)}"
        return None


def _product(
    name: str,
    part: str,
    mixture: Mixture,
    stack: Stack,
    tokens: int,
    humming: Humming | None,
    facts: Mapping[str, Any],
    left_out: Mapping[str, str],
    device: torch.device,
) -> Case:
    count, n, k = stack.shape
    pairs = tokens * mixture.top_k
    chosen = choices(mixture, tokens, stack.copies, stack.bytes_of_expert, device)
    # What gate_up multiplies are the tokens; what down multiplies is another row for each pair.
    of_tokens = part == "gate_up"
    given = [choice.x if of_tokens else torch.randn((pairs, k), dtype=DTYPE, device=device) for choice in chosen]
    x = [rows.repeat_interleave(mixture.top_k, 0) if of_tokens else rows for rows in given]
    ordered = [rows[choice.order] for rows, choice in zip(x, chosen, strict=True)]
    offsets = [choice.offsets(count) for choice in chosen]
    of_torch = baselines.GroupedMm()
    providers: dict[str, Provider] = {
        OURS: lambda i: operations.grouped_linear(x[i], stack.weights[i % stack.copies], chosen[i].pairs),
        DENSE: lambda i: of_torch.linear(ordered[i], stack.dense[i % stack.copies], offsets[i]),
    }
    ours, dense = (cache(partial(_exact_products, x, chosen, weight)) for weight in (stack.exact, stack.exact_dense))
    right: dict[str, Exact] = {OURS: ours, DENSE: lambda i: dense(i)[chosen[i].order]}
    of_expert = {OURS: stack.bytes_of_expert, DENSE: stack.dense[0].nbytes // count}
    ids = [choice.ids if of_tokens else choice.pairs[:, None] for choice in chosen]
    sorted_ahead = _sorted_ahead(given, stack, ids)
    if sorted_ahead:
        providers[SORTED], right[SORTED] = lambda i: sorted_ahead[i](), ours
        of_expert[SORTED] = stack.bytes_of_expert
    if humming is not None:
        try:
            rows = [humming.rows(row, of_row) for row, of_row in zip(given, ids, strict=True)]
            humming(rows[0], 0)  # which compiles
        except Exception as error:  # as above
            left_out = {**left_out, HUMMING: f"it cannot multiply {pairs} pairs: {first_line(error)}"}
        else:
            providers[HUMMING] = lambda i: humming(rows[i], i % stack.copies)
            right[HUMMING] = cache(partial(_exact_products, x, chosen, humming.exact))
            of_expert[HUMMING] = humming.bytes_of_expert
    ends = (given[0].numel() + pairs * n) * DTYPE.itemsize
    wanted = wanted_by(chosen)
    counted = {"part": part, "tokens": tokens, "wanted": wanted, "flops": 2 * pairs * n * k, "inputs": len(chosen)}
    moved = {provider: ends + wanted * nbytes for provider, nbytes in of_expert.items()}
    check = partial(_check, bound=BOUND[part])
    everything = {**facts, **counted}
    return Case(name, moved, len(chosen), providers, right, check, device, everything, _error, left_out)


def _sorted_ahead(x: Sequence[Tensor], stack: Stack, ids: Sequence[Tensor]) -> list[Callable[[], Tensor]]:
    """Of each input, halfbyte's product of pairs that are sorted; none where no kernel sorts."""
    if x[0].device.type != "cuda":
        return []
    found = (
        grouped.sorted_ahead(rows, stack.weights[i % stack.copies], of_row)
        for i, (rows, of_row) in enumerate(zip(x, ids, strict=True))
    )
    return [product for product in found if product is not None]


def _exact_products(
    x: Sequence[Tensor], chosen: Sequence[Choice], weight: Callable[[int], Tensor], index: int
) -> Tensor:
    """The fp64 products of rows of x with their experts, [T k, N]."""
    rows, choice = x[index], chosen[index]
    parts = [(choice.pairs == expert).nonzero().view(-1) for expert in choice.experts]
    products = [linear_exact(rows[part], weight(e)) for part, e in zip(parts, choice.experts, strict=True)]
    return torch.cat(products)[torch.cat(parts).argsort()]


def _block(
    name: str,
    mixture: Mixture,
    stacks: Mapping[str, Stack],
    tokens: int,
    facts: Mapping[str, Any],
    device: torch.device,
) -> Case:
    gate_up, down = stacks["gate_up"], stacks["down"]
    copies = min(gate_up.copies, down.copies)
    of_ours = gate_up.bytes_of_expert + down.bytes_of_expert
    chosen = choices(mixture, tokens, copies, of_ours, device)
    biases = _bias(mixture, gate_up, device), _bias(mixture, down, device)
    experts = [
        baselines.GroupedMm().experts(gate_up.dense[i], down.dense[i], *biases, mixture.activation)
        for i in range(copies)
    ]

    def ours(i: int) -> Tensor:
        choice = chosen[i]
        router = choice.router, choice.router_bias
        ids, weights = eager_experts.choose(choice.x, *router, mixture.top_k, mixture.before, True, DTYPE)
        q = gate_up.weights[i % copies], down.weights[i % copies]
        return operations.moe(choice.x, ids, weights, *q, mixture.activation, *biases)

    def dense(i: int) -> Tensor:
        choice = chosen[i]
        scores = functional.linear(choice.x, choice.router, choice.router_bias)
        # The operations of transformers' routers.
        ids, weights = router_reference.route(scores, mixture.top_k, mixture.before, True, DTYPE)
        return experts[i % copies](choice.x, ids, weights)

    left_out: dict[str, str] = {}
    providers = {
        provider: _in_a_graph(provider, function, len(chosen), device, left_out)
        for provider, function in ((OURS, ours), (DENSE, dense))
    }
    right: dict[str, Exact] = {
        OURS: cache(partial(_exact_blocks, mixture, chosen, gate_up.exact, down.exact, biases)),
        DENSE: cache(partial(_exact_blocks, mixture, chosen, gate_up.exact_dense, down.exact_dense, biases)),
    }
    wanted = wanted_by(chosen)
    of_bias = sum(bias[0].nbytes for bias in biases if bias is not None)
    ends = 2 * chosen[0].x.nbytes + chosen[0].router.nbytes + wanted * of_bias
    of_dense = (gate_up.dense[0].nbytes + down.dense[0].nbytes) // mixture.experts
    moved = {OURS: ends + wanted * of_ours, DENSE: ends + wanted * of_dense}
    flops = 6 * tokens * mixture.top_k * mixture.hidden * mixture.inner + 2 * tokens * chosen[0].router.numel()
    counted = {"part": BLOCK, "tokens": tokens, "wanted": wanted, "flops": flops, "inputs": len(chosen)}
    check = partial(_check, bound=BOUND[BLOCK])
    everything = {**facts, **counted}
    return Case(name, moved, len(chosen), providers, right, check, device, everything, _error, left_out)


def _bias(mixture: Mixture, stack: Stack, device: torch.device) -> Tensor | None:
    return 0.1 * torch.randn(stack.shape[:2], dtype=DTYPE, device=device) if mixture.bias else None


def _exact_blocks(
    mixture: Mixture,
    chosen: Sequence[Choice],
    gate_up: Callable[[int], Tensor],
    down: Callable[[int], Tensor],
    biases: Sequence[Tensor | None],
    index: int,
) -> Tensor:
    """The fp64 result [T, H] of a block, with the choice and the weights of its router, which are bf16."""
    choice = chosen[index]
    y = torch.zeros((len(choice.pairs), mixture.hidden), dtype=torch.float64, device=choice.x.device)
    for expert in choice.experts:
        rows = (choice.pairs == expert).nonzero().view(-1)
        first, second = (None if bias is None else bias[expert] for bias in biases)
        inner = activate(linear_exact(choice.x[rows // mixture.top_k], gate_up(expert), first), mixture.activation)
        y[rows] = linear_exact(inner, down(expert), second)
    return (y.view(len(choice.x), mixture.top_k, -1) * choice.weights.double().unsqueeze(-1)).sum(1)


def _in_a_graph(name: str, provider: Provider, sets: int, device: torch.device, left_out: dict[str, str]) -> Provider:
    """A provider as one CUDA graph of all inputs, which runs when it is called with the first; as it is where CUDA
    refuses."""
    if device.type != "cuda":
        return provider
    try:
        with current(device):
            for index in range(sets):
                provider(index)  # what is compiled once, is compiled now
            graph = Captured(lambda: [provider(index) for index in range(sets)], device)
    except RuntimeError as error:
        left_out[f"a CUDA graph of {name}"] = first_line(error)
        return provider
    results: list[Tensor] = []

    def run(index: int) -> Tensor:
        if index == 0:
            results[:] = graph.replay()
        return results[index]

    return run


def _check(result: Tensor, right: Tensor, bound: float) -> str | None:
    if result.shape != right.shape:
        return f"shape {list(result.shape)} instead of {list(right.shape)}"
    error = relative_error(result, right)
    return None if error <= bound else f"error {error:.2e}, more than {bound:.1e}"


def _error(result: Tensor, right: Tensor) -> dict[str, float]:
    return {"relative_error": float(f"{relative_error(result, right):.4g}")}
