"""What kernels/experts/sort.cu writes, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.experts import sort


class Expected(NamedTuple):
    """tiles: {expert, first, rows, 0} of each, and zeros for those that there are not. order: the pair of each sorted
    row. places: the sorted row of each pair, or -1. in_tiles: the same where every tile has
    tile_m rows, filled or not."""

    count: int
    tiles: Tensor
    order: Tensor
    places: Tensor
    in_tiles: Tensor


def routes_of(ids: Tensor, experts: int, tile_m: int, room: int) -> Expected:
    """The routes of ids [pairs], with room for so many tiles."""
    key = torch.where((ids >= 0) & (ids < experts), ids, experts).long()
    counts = torch.bincount(key, minlength=experts + 1)[:experts].tolist()
    order = key.argsort(stable=True)[: sum(counts)]
    places = torch.full((len(ids),), -1)
    places[order] = torch.arange(len(order))
    found, first = [], 0
    for expert, rows in enumerate(counts):
        found += [[expert, first + at, min(tile_m, rows - at), 0] for at in range(0, rows, tile_m)]
        first += rows
    if tile_m >= sort.FULL_FIRST:
        found.sort(key=lambda tile: tile[2] < tile_m)
    in_tiles = torch.full((len(ids),), -1)
    for number, (_, first, rows, _) in enumerate(found):
        in_tiles[order[first : first + rows]] = torch.arange(rows) + number * tile_m
    tiles = torch.tensor(found + [[0] * 4] * (room - len(found)), dtype=torch.int32).view(-1, 4)
    return Expected(len(found), tiles, order.int(), places.int(), in_tiles.int())


def table_of(routes: Expected, pairs: int) -> Tensor:
    """The memory of `sort.Routes` with these routes, of so many pairs."""
    parts = [torch.tensor([routes.count, 0, 0, 0], dtype=torch.int32), routes.tiles.flatten()]
    for each in (routes.order, routes.places, routes.in_tiles):
        parts.append(torch.zeros(-(-pairs // 4) * 4, dtype=torch.int32))
        parts[-1][: len(each)] = each
    return torch.cat(parts)


def written(table: Tensor, room: int, pairs: int, count: int) -> Expected:
    """The same from the memory of `sort.Routes`, of so many pairs, of which `count` have an expert."""
    header, tiles, rest = table[:4], table[4 : 4 * (1 + room)].view(-1, 4), table[4 * (1 + room) :]
    assert header[1:].tolist() == [0, 0, 0]
    order, places, in_tiles = (rest[at * (-(-pairs // 4) * 4) :][:pairs] for at in range(3))
    return Expected(int(header[0]), tiles, order[:count], places, in_tiles)
