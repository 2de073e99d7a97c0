"""What inductor does for fused projections in the graphs that it compiles: their products become one operator.

Modules that are compiled do not ask their group (projections.py). Their products of the same x are several nodes of
one graph, and it is there that they are put together.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from operator import getitem
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from halfbyte.models import projections


class Merge(CustomGraphPass):
    """Makes one `halfbyte::linear_group` of every few `halfbyte::linear` that multiply the same few rows."""

    def __call__(self, graph: Graph) -> None:
        place = {node: i for i, node in enumerate(graph.nodes)}
        groups: dict[Hashable, list[Node]] = {}
        for node in place:
            if node.target is torch.ops.halfbyte.linear.default and (kind := _kind(node)) is not None:
                group = groups.setdefault(kind, [])
                # Where the first stands, all that the others need must be there already.
                if not group or all(place[needed] < place[group[0]] for needed in node.all_input_nodes):
                    group.append(node)
        for group in groups.values():
            if len(group) > 1:
                _merge(graph, group)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, projections.__file__))


def _kind(node: Node) -> Hashable | None:
    """What the products of one operator have in common, or None of a product that stays alone."""
    arguments: Any = node.args
    x, _, _, _, format, (_, k), block_size, nested_size, _, batch_invariant = arguments
    rows = prod(x.meta["val"].shape[:-1])
    if batch_invariant or not isinstance(rows, int) or rows > projections.MOST_ROWS:
        return None
    return x, k, format, block_size, nested_size


def _merge(graph: Graph, nodes: list[Node]) -> None:
    """Let one operator in the place of the first of them do for all."""
    arguments: Any = zip(*(node.args for node in nodes), strict=True)
    x, packed, scale, nested, format, shape, block_size, nested_size, bias, _ = arguments
    with graph.inserting_before(nodes[0]):
        group = graph.call_function(
            torch.ops.halfbyte.linear_group.default,
            (
                x[0], [*packed], [*scale], [tensor for each in nested for tensor in each], format[0],
                [n for n, _ in shape], shape[0][1], block_size[0], nested_size[0], [*bias],
            ),
        )  # fmt: skip
        group.meta["val"] = [node.meta["val"] for node in nodes]
        results = [graph.call_function(getitem, (group, i)) for i in range(len(nodes))]
    for node, result in zip(nodes, results, strict=True):
        result.meta.update(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
