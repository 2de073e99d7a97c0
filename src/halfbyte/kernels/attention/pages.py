"""A cache in pages, as transformers' continuous batching keeps it, and how attention over it is cut into programs.

All layers' pages lie in one tensor. A layer sees it as rows, one a token, from an address of its own on; where a
request's tokens lie is said by a row for each token, or by a page for each `page` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from halfbyte.kernels.attention.plan import LEAST_ROWS, plan_for
from halfbyte.kernels.common.device import DeviceProperties

FEW_TOKENS = 256  # of a batch: up to here most requests have one new token, and larger tiles would be mostly empty
LARGE_TILE = 64  # rows of a program where there are more
PADDED = 16  # tokens of such a batch for each tile that is taken to be at work
LEAST_FRESH = 16  # new tokens at once: the least side of a product on tensor cores


class Pages(NamedTuple):
    """keys, values: [rows, heads that share keys, size], whose heads lie one behind the other. places: int64 [tokens],
    the rows of all requests' tokens, one request behind the other (page = 0); or int32 [requests, pages], the pages of
    each, where page p holds rows p * page to (p + 1) * page - 1. What lies behind a request's tokens may be anything.

    With pages every request has one new token at most, and `attend_pages` puts its key and value into the cache."""

    keys: Tensor
    values: Tensor
    places: Tensor
    page: int = 0


@dataclass(frozen=True)
class PagesPlan:
    """block: tokens of the cache at once. fresh: new tokens at once. parts: the most programs that share the cached
    tokens of a tile. rows: of a program's product. new: new tokens of a tile. warps, stages: Triton's options. least:
    blocks that a part is worth."""

    block: int
    fresh: int
    parts: int
    rows: int = 16
    new: int = 1
    warps: int = 4
    stages: int = 3
    least: int = 1

    def tiles(self, tokens: int, requests: int, alone: bool) -> int:
        """As many as there can be, wherever requests begin. alone: every request has one new token at most."""
        return requests if alone else tokens // self.new + requests


def plan_pages(
    properties: DeviceProperties, tokens: int, most_new: int, most_cached: int, group: int, heads: int, width: int
) -> PagesPlan:
    """tokens: new ones of the batch. most_new, most_cached: of a request, at most. group: heads that share keys.
    heads: of keys. width: of a head, in units of 16 bits."""
    rows = group
    if most_new > 1:  # or the number was padded, and every request has one
        rows = max(group, LEAST_ROWS if tokens <= FEW_TOKENS else LARGE_TILE)
    most_cached = max(1, most_cached)
    of_one = plan_for(properties, heads, most_cached, width, rows)  # rows: what this GPU computes at once
    new = 1 if most_new == 1 else max(1, of_one.rows // group)
    tiles = tokens // new
    if most_new > 1 and tokens <= FEW_TOKENS:
        tiles = tokens // PADDED  # in a captured step most of them may be padding
    plan = plan_for(properties, heads * max(1, tiles), most_cached, width, group * new)
    fresh = min(plan.block, max(LEAST_FRESH, 1 << (most_new - 1).bit_length()))
    return PagesPlan(plan.block, fresh, plan.parts, plan.rows, new, plan.warps, plan.stages, plan.least)
