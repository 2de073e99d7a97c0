"""The shapes that come into question for a product, and their estimated times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.linear.laid_out import MOST_SHARES, UNIT_K, copies_x
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_gemm.shape import (
    DECODERS,
    DIRECT,
    W_STAGES,
    WIDE_TILES_M,
    GemmPlan,
    how_decoded,
    tiles_of,
    x_stages,
)
from halfbyte.kernels.linear.tune import h200


def plans(m: int, problem: Problem, properties: DeviceProperties, back: bool) -> Iterator[GemmPlan]:
    """What comes into question, some of which may not be valid."""
    n, k = (problem.k, problem.n) if back else (problem.n, problem.k)
    if back and problem.numbers == "looked_up":
        for tile_m in narrowest(-(-m // 2), list(h200.BACK_MATES_UNIT)):
            stages = W_STAGES, x_stages(tile_m, problem, mates=2)
            for way in _ways_of_mates(m, n, k, tile_m, properties):
                yield GemmPlan(tile_m, 2, *stages, way.workers, 1, way.chunk, back=True, shares=way.shares, mates=2)
        for tile_m in narrowest(m, list(h200.BACK_DECODERS_UNIT)):
            decoders, of_w, of_x = DECODERS[tile_m]
            for way in _ways(m, n, k, tile_m, properties, back, in_order=False):
                if way.cluster == way.twins == 1:
                    made = GemmPlan(tile_m, 2, of_w, of_x, way.workers, 1, way.chunk, back=True)
                    yield replace(made, shares=way.shares, decoders=decoders)
    for tile_m in narrowest(m, tiles_of(problem, back)):
        stages = W_STAGES, x_stages(tile_m, problem)
        for in_order in (False,) if back else (False, True):
            numbers, spans = how_decoded(problem, back, in_order)
            kind = partial(GemmPlan, back=back, numbers=numbers, lane_spans=spans, in_order=in_order)
            for way in _ways(m, n, k, tile_m, properties, back, in_order):
                yield kind(tile_m, 2, *stages, way.workers, way.cluster, way.chunk, shares=way.shares, twins=way.twins)


def narrowest(m: int, tiles_m: Sequence[int]) -> Iterable[int]:
    """Of tiles of which as many cover x, those with the fewest rows."""
    return {-(-m // tile_m): tile_m for tile_m in reversed(tiles_m)}.values()


class Way(NamedTuple):
    """How tiles are dealt out. chunk: rows of x a launch. cluster, shares, twins: as of a plan."""

    workers: int
    chunk: int
    cluster: int = 1
    shares: int = 1
    twins: int = 1


def _ways(
    m: int, n: int, k: int, tile_m: int, properties: DeviceProperties, back: bool, in_order: bool
) -> Iterator[Way]:
    x_tiles, row_tiles, depth = -(-m // tile_m), -(-n // 128), -(-k // UNIT_K)
    chunk = tiles_at_once(x_tiles, k, tile_m, h200.BACK_X_BYTES if back else room_of(in_order))
    if tile_m <= h200.GEMM_MOST_CUT:
        for of_launch in (chunk,) if back or in_order else {chunk, -(-chunk // 2)}:
            yield Way(min(properties.sms, row_tiles * depth * last_of(x_tiles, of_launch)), of_launch * tile_m)
    if tile_m == h200.GEMM_TWINS_M:
        of_launch = tiles_at_once(x_tiles, k, tile_m, h200.GEMM_TWINS_X_BYTES)
        units = -(-row_tiles // 2) * depth * last_of(x_tiles, of_launch)
        yield Way(min(properties.clusters(2), units), of_launch * tile_m, twins=2)
    at_once = min(x_tiles, properties.sms // row_tiles)
    if not (back or in_order):
        at_once = min(at_once, max(1, h200.GEMM_ROOM // (2 * k * tile_m)))
    if at_once:
        yield Way(row_tiles * at_once, at_once * tile_m)
    if chunk < x_tiles:
        return
    cluster, tiles, rows = h200.GEMM_CLUSTER, row_tiles * x_tiles, x_tiles * tile_m
    for shares in range(1, min(properties.clusters(cluster) // tiles, depth // cluster) + 1):
        yield Way(tiles * shares, rows, cluster=cluster)  # every CTA has a unit
    # Of two a cluster is faster, which wide tiles leave no room for.
    for shares in range(2 if tile_m in WIDE_TILES_M else 3, min(properties.sms // tiles, depth, MOST_SHARES) + 1):
        if -(-depth // shares) < -(-depth // (shares - 1)):
            yield Way(tiles * shares, rows, shares=shares)


def _ways_of_mates(m: int, n: int, k: int, tile_m: int, properties: DeviceProperties) -> Iterator[Way]:
    """The same of mates, whose tiles count as one. Where each pair has whole tiles, all go along K together."""
    rows, most = 2 * tile_m, properties.clusters(2)
    x_tiles, row_tiles, depth = -(-m // rows), -(-n // 128), -(-k // UNIT_K)
    chunk = tiles_at_once(x_tiles, k, rows, h200.BACK_X_BYTES)
    yield Way(min(most, row_tiles * depth * last_of(x_tiles, chunk)), chunk * rows)
    if at_once := min(x_tiles, most // row_tiles):
        whole = chunk if chunk % at_once == 0 and chunk == last_of(x_tiles, chunk) else at_once
        yield Way(row_tiles * at_once, whole * rows)
    if chunk == x_tiles:
        for shares in range(2, min(most // (row_tiles * x_tiles), depth, MOST_SHARES) + 1):
            yield Way(row_tiles * x_tiles * shares, x_tiles * rows, shares=shares)


def room_of(in_order: bool) -> int:
    """Bytes of x a launch."""
    return h200.IN_ORDER_X_BYTES if in_order else h200.GEMM_X_BYTES


def last_of(x_tiles: int, chunk: int) -> int:
    """Tiles of the last launch: it may have fewer than the others, and every CTA has work in each."""
    return (x_tiles - 1) % chunk + 1


def tiles_at_once(x_tiles: int, k: int, tile_m: int, room: int) -> int:
    """Tiles of x a launch, as equal as can be, that stay in L2."""
    most = max(1, room // (2 * k * tile_m))
    return -(-x_tiles // -(-x_tiles // most))


def estimate(plan: GemmPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The estimated time of any plan for x [m, K], in µs."""
    return with_lasting(launches(plan, m, problem, properties))


def with_lasting(time: float) -> float:
    """Of launches that the GPU may be long at, and come to its limit of power."""
    (begin, end), more = h200.GEMM_LASTING
    return time * (1 + more * min(max(time - begin, 0) / (end - begin), 1))


def launches(plan: GemmPlan, m: int, problem: Problem, properties: DeviceProperties) -> float:
    """The same but for what the limit of power adds."""
    x_tiles, chunk = plan.x_tiles(m), plan.chunk // plan.x_rows
    others = (x_tiles - 1) // chunk  # launches ahead of the last one
    of_last = _launch(plan, x_tiles - others * chunk, problem, properties)
    return others * _launch(plan, chunk, problem, properties) + of_last if others else of_last


def _launch(plan: GemmPlan, x_tiles: int, problem: Problem, properties: DeviceProperties) -> float:
    """The same of a launch with so many tiles of x."""
    k, n = plan.sides(problem)
    tiles, depth, unit = plan.row_tiles(n) * x_tiles, -(-k // UNIT_K), units_of(plan)[plan.tile_m]
    if plan.shares > 1:
        _, whole = _ends(plan.tile_m)
        time = math.ceil(depth / plan.shares) * unit + whole / plan.shares
        time += h200.GEMM_SHARED * plan.tile_m / 256 * (1 - 1 / plan.shares)
    elif plan.cluster == 1:
        time = busiest(tiles, depth, plan.workers, plan.tile_m, unit, _apart(plan))
    else:
        (part, whole), shares = _ends(plan.tile_m), plan.workers // tiles
        time = (
            math.ceil(math.ceil(depth / shares) / plan.cluster) * unit
            + (whole + part * shares * (shares > 1)) / plan.cluster
        )
        time += h200.GEMM_CLUSTER_START + h200.GEMM_REDUCE * plan.tile_m / 256
    time += h200.GEMM_TWINS_START * (plan.twins > 1)
    reading = problem.megabytes / (h200.GEMM_BANDWIDTH * properties.rates.bandwidth)
    return start_of(plan, plan.tile_m * x_tiles, problem) + math.hypot(time / properties.rates.clock, reading)


def _apart(plan: GemmPlan) -> float:
    """How much longer units take where CTAs are at different places along K."""
    if plan.mates > 1:
        return h200.BACK_MATES_APART
    if plan.twins > 1:
        return h200.BACK_TWINS_APART if plan.back else h200.GEMM_TWINS_APART
    return h200.GEMM_APART


def start_of(plan: GemmPlan, rows: int, problem: Problem) -> float:
    """µs of a launch besides, with so many rows of x laid out or copied."""
    if copies_x(problem, plan):
        return h200.BACK_COPIED_START if plan.back else h200.GEMM_COPIED_START
    return h200.GEMM_START + h200.GEMM_LAYING * rows * plan.sides(problem)[0] / 1e6


def units_of(plan: GemmPlan) -> dict[int, float]:
    """µs of a unit, by tile_m."""
    if plan.mates > 1:
        return h200.BACK_MATES_UNIT
    if plan.decoders:
        return h200.BACK_DECODERS_UNIT
    if plan.back:
        return h200.BACK_COMPUTED_UNIT if plan.computes else h200.BACK_UNIT
    if plan.in_order:
        return h200.IN_ORDER_COMPUTED_UNIT if plan.computes else h200.IN_ORDER_UNIT
    return h200.GEMM_COMPUTED_UNIT if plan.computes else h200.GEMM_UNIT


def _ends(tile_m: int) -> tuple[float, float]:
    """µs of a part of a tile, and of a tile besides."""
    return h200.GEMM_PART * tile_m / 256, h200.GEMM_TILE * tile_m / 256


def busiest(tiles: int, depth: int, workers: int, tile_m: int, unit: float, apart: float) -> float:
    """µs of the busiest of so many CTAs that share tiles. apart: how much longer units take where CTAs are at different
    places along K."""
    part, whole = _ends(tile_m)
    if tiles % workers == 0:
        return tiles // workers * (depth * unit + whole)
    parts = min(1 + workers / tiles, DIRECT)
    return -(-tiles * depth // workers) * unit * apart + parts * part + whole * tiles / workers
