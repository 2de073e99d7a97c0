"""The products of a model by the names of its weights: which of them `accelerate` computes in one launch, and what each
compiles. Asked with what a checkpoint says of its weights, or with those of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from halfbyte.eager_fused import MOST_ROWS
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.dispatch import choose_fused, choose_mlp, variant_of
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.problem import Problem
from halfbyte.models.layers import activation_of, family_of_type, fusions
from halfbyte.models.projections import groups_of

# The products of one launch: one, or those of fused projections.
Group = tuple[Problem, ...]


class Fused(NamedTuple):
    """The products of one launch of a captured step, with what stands beside them. after: of gate and up, down with
    what it is added to."""

    group: Group
    fusion: Fusion
    after: tuple[Problem, Fusion] | None = None


def products_of(weights: Mapping[str, Problem], config: Mapping[str, Any]) -> set[Group | Fused]:
    """Each product alone, fused projections together, and what captured steps fuse with them. weights: by their names,
    which end with ".weight". config: of the text model, as config.json has it."""
    groups = {(one,) for one in weights.values()} | set(_grouped(weights))
    return {*groups, *_fused(weights, config)}


def variant_of_product(
    m: int, product: Group | Fused, properties: DeviceProperties, batch_invariant: bool
) -> Variant | None:
    """What is compiled for x with m rows, or None where nothing is."""
    if not isinstance(product, Fused):
        return variant_of(m, product, properties, batch_invariant)
    group, fusion, after = product
    many = m > MOST_ROWS
    if batch_invariant or (many and not fusion.activation):
        return None
    if after is not None and not many:
        down, beside = after
        mlp = choose_mlp(m, (*group, down), fusion, beside, properties)
        if mlp is not None:
            variant: Variant = mlp.kernel.group_variant(group, mlp.gates, properties)
            return variant
    fused = None if many else choose_fused(m, group, fusion, properties)
    if fused is None:  # then the norm has a launch of its own
        fused = choose_fused(m, group, replace(fusion, norm=None), properties)
    return fused.kernel.group_variant(group, fused.plan, properties) if fused else None


def _parents(weights: Mapping[str, Problem]) -> Iterator[Callable[[str], Problem | None]]:
    """The modules that layers with these weights belong to: each as a function from the name of a child to its
    weight."""
    for parent in {re.sub(r"[^.]+\.weight$", "", name) for name in weights}:
        yield lambda name, parent=parent: weights.get(f"{parent}{name}.weight")  # type: ignore[misc]


def _grouped(weights: Mapping[str, Problem]) -> Iterator[Group]:
    """The groups that `projections.link` makes."""
    for child in _parents(weights):
        yield from map(tuple, groups_of(child, lambda one: (one.k, one.format, one.block_size, one.nested)))


def _fused(weights: Mapping[str, Problem], config: Mapping[str, Any]) -> Iterator[Fused]:
    """What captured steps multiply in one launch with what stands beside it (models/fused.py)."""
    family = family_of_type(config.get("model_type", ""))
    activation = activation_of(SimpleNamespace(**config))
    if family is None or activation is None:
        return
    beside = fusions(family, activation)
    for child in _parents(weights):
        for names, fusion in beside.items():
            group = tuple(one for name in names if (one := child(name)) is not None)
            if len(group) < len(names):
                continue
            down, added = child("down_proj"), beside.get(("down_proj",))
            after = None if down is None or added is None or not fusion.activation else (down, added)
            yield Fused(group, fusion, after)
