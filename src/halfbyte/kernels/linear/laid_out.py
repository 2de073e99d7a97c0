"""How the kernels for which x is laid out are launched: `lay_out`, then `multiply` of one kernel.cu, for any number of
weights."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch

from halfbyte.kernels.common import workspace
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, kernels
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.common.tensor_map import tensor_map
from halfbyte.kernels.common.thread_cache import ThreadCache
from halfbyte.kernels.linear.fusion import ALONE, Fusion
from halfbyte.kernels.linear.kernel import FusedProduct, GroupProduct, Product
from halfbyte.kernels.linear.problem import ALIGNMENT, Addresses, Problem
from halfbyte.kernels.linear.tune import h200

UNIT_K, STEP_K = 256, 64  # of K, a unit of work, and what sm90_gemm takes of x at a time
MOST_BOX = 256  # rows that a tensor copy brings
MOST_SHARES = 16  # equal ones, of a tile: a thread has what they leave in registers
NORM_PARTS = 4  # CTAs that lay a row out, normed, as device/lay_out.cuh has it
SWIZZLED = 128  # bytes of a row of x that wgmma takes at a time
# Arguments in device/laid_out.cuh: x, bias, out, x laid out, partial, left, other, the length of left and m change.
LAYOUT = ("128s4Q", "7Q2I", "7I4f64s52x")
# The same with a tensor map of x ahead of them, which changes with x.
COPIED_LAYOUT = ("", "128s128s4Q7Q2I", "7I4f64s52x")
ScaleLoads = Literal["one", "unit", "vector", "across"]
launches: ThreadCache[Hashable, tuple[Launch, Launch]] = ThreadCache()


def span_of(problem: Problem) -> int:
    """Weights of a row that share a scale, up to 64."""
    return min(problem.block_size, 64)


def scale_loads(problem: Problem) -> ScaleLoads:
    """How device/scale_rows.cuh loads the scales of a row."""
    o, size = problem, problem.scale.itemsize
    unit, row = UNIT_K // o.block_size * size, o.k // o.block_size * size
    if unit not in (4, 8, 16) or o.k % o.block_size:
        return "one"
    if o.k % UNIT_K:
        return "across" if o.n * row % ALIGNMENT == 0 and o.align_scale == ALIGNMENT else "one"
    if row % ALIGNMENT == 0 and o.align_scale == ALIGNMENT:
        return "vector"
    return "unit" if o.align_scale >= unit else "one"


def supports(problem: Problem) -> bool:
    """True for every format, x of 16 bits and K % 64 == 0 (K % 32 where 32 weights share a scale)."""
    o = problem
    return (
        o.dtype in (torch.float16, torch.bfloat16)
        and o.k % span_of(o) == 0 < o.k
        and o.has_known_scales
        and o.has_usual_nesting
        and o.align_packed == ALIGNMENT
    )


class LaidOutPlan(Protocol):
    """tile_m, rows: rows of x and of W in a tile. sums: that a CTA has of one. paired: tiles have as many rows of
    another weight. norm: x is normed as it is laid out. ctas: in all. workers: that share the work, CTAs, clusters
    twins or mates. cluster: CTAs of one, or 1. twins: CTAs that have neighbouring tiles of W and copy x to each other,
    or 1. mates: CTAs that have neighbouring tiles of x and decode W for each other, or 1.
    resident: units of x that a CTA lays out itself, or 0. threads: of a CTA. back: the
    product is with W transposed. in_order: x keeps the order of K, as it does on the way back. lays_units: a thread
    that lays x out takes a unit of a row at a time."""

    @property
    def tile_m(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def sums(self) -> int: ...
    @property
    def paired(self) -> bool: ...
    @property
    def norm(self) -> bool: ...
    @property
    def ctas(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def twins(self) -> int: ...
    @property
    def mates(self) -> int: ...
    @property
    def copied_rows(self) -> int: ...
    def row_tiles(self, n: int) -> int: ...
    @property
    def resident(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def back(self) -> bool: ...
    @property
    def in_order(self) -> bool: ...
    @property
    def lays_units(self) -> bool: ...
    def x_tiles(self, m: int) -> int: ...


class WarpgroupTiles:
    """What plans say of tiles by which warpgroups multiply, each 64 rows of W, beside one that brings all. tile_m: rows
    of x. paired: half of a tile's rows are another weight's. twins: CTAs that have neighbouring tiles of W, and
    the same rows of x, or 1. mates: the other way round."""

    tile_m: int
    warpgroups: int
    paired: bool
    twins: int
    mates: int

    def row_tiles(self, n: int) -> int:
        """Tiles of n rows of W, those of twins as one."""
        return -(-n // (self.rows * self.twins))

    @property
    def rows(self) -> int:
        """Rows of W in a tile; of each weight of a pair."""
        return 64 * self.warpgroups // (2 if self.paired else 1)

    @property
    def copied_rows(self) -> int:
        """Rows of W that a copy brings, on the way back."""
        return UNIT_K

    @property
    def sums(self) -> int:
        """Of a tile."""
        return 64 * self.warpgroups * self.tile_m

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.warpgroups + 1)

    @property
    def x_rows(self) -> int:
        """Rows of x in a tile, those of mates as one."""
        return self.tile_m * self.mates

    def x_tiles(self, m: int) -> int:
        """Such tiles of x [m, K]."""
        return -(-m // self.x_rows)


class GroupedPlan(LaidOutPlan, Protocol):
    """Of experts. chunk: the most rows of x, all tiles together. microseconds: the estimate."""

    @property
    def chunk(self) -> int: ...
    @property
    def microseconds(self) -> float: ...


def copies_x(problem: Problem, plan: LaidOutPlan) -> bool:
    """True if x is copied as it is, not laid out: it keeps its order, and its rows begin where tensor maps want it."""
    return plan.in_order or (plan.back and problem.n * 2 % ALIGNMENT == 0)


P = TypeVar("P", bound=LaidOutPlan)
WithPlan = tuple[Problem, Addresses, LaidOutPlan]  # a weight of a group


def can_be_numbered(plan: GroupedPlan, experts: int, n: int, k: int) -> bool:
    """True if numbers of 32 bits are enough for a stack of experts [N, K], or [K, N] on the way back."""
    units = -(-k // UNIT_K)
    return (
        plan.workers >= 1
        and plan.chunk > 0 == plan.chunk % plan.tile_m
        and -(-n // plan.rows) * plan.x_tiles(plan.chunk) * units + plan.workers < 1 << 32
        and plan.chunk * units * UNIT_K < 1 << 35  # pieces of eight
        and experts * (k if plan.back else n) < 1 << 32  # rows of W
    )


@dataclass(frozen=True)
class GroupPlan(Generic[P]):
    """The plans of several weights, for which x is laid out once, and the estimate. is_one_launch: each weight has CTAs
    of its own in one launch (side_by_side.py); else launches follow each other."""

    plans: tuple[P, ...]
    microseconds: float = field(compare=False)
    is_one_launch: bool = False

    def x_tiles(self, m: int) -> int:
        return self.plans[0].x_tiles(m)


class LaidOutKernel(Protocol):
    """The module `launch` of such a kernel."""

    def source(self) -> str: ...
    def variant(self, problem: Problem, plan: Any, properties: DeviceProperties, parts: int = 1) -> Variant: ...
    def codebook(self, problem: Problem) -> tuple[float, bytes]:
        """What sums are multiplied by in the end, and the sixteen numbers of nibbles, fp32."""


class Part(NamedTuple):
    """The launches of a product and what they are told. laid_out: bytes of x laid out, or 0 where CTAs keep x or copy
    it. partial: sums that CTAs leave for others."""

    device: torch.device
    lay_out: Launch
    multiply: Launch
    told: Told
    laid_out: int
    partial: int

    def __call__(
        self, stream: int, x: int, bias: int, out: int, laid_out: int, m: int, is_laid_out: bool = False, other: int = 0
    ) -> None:
        partial, left, fours = workspace.take(self.device, stream, self.partial)
        self.told.set(x, bias, out, laid_out, partial, left, other, fours, m)
        if self.laid_out and not is_laid_out:
            self.lay_out(stream, self.told.arguments.parameters)
        self.multiply(stream, self.told.arguments.parameters)


def bind(
    kernel: LaidOutKernel, device: torch.device, m: int, problem: Problem, weight: Addresses, plan: LaidOutPlan
) -> Product:
    """The product with a weight on the current device, of as many rows as there are tiles of x for m."""
    part = prepare(kernel, device, m, problem, weight, plan)

    def multiply(stream: int, x: int, bias: int, out: int, m: int) -> None:
        laid_out = torch.empty(part.laid_out, dtype=torch.uint8, device=device) if part.laid_out else None
        part(stream, x, bias, out, 0 if laid_out is None else laid_out.data_ptr(), m)

    return multiply


def bind_group(kernel: LaidOutKernel, device: torch.device, m: int, each: Sequence[WithPlan]) -> GroupProduct:
    """The products with several weights on the current device, one after the other, of as many rows as there are tiles
    of x for m; x is laid out once."""
    parts = [prepare(kernel, device, m, *one) for one in each]
    first = parts[0]

    def multiply(stream: int, x: int, m: int, results: Iterable[int]) -> None:
        laid_out = torch.empty(first.laid_out, dtype=torch.uint8, device=device)
        addresses = iter(results)
        for part in parts:
            bias, out = next(addresses), next(addresses)
            part(stream, x, bias, out, laid_out.data_ptr(), m, is_laid_out=part is not first)

    return multiply


def bind_fused(
    kernel: LaidOutKernel,
    device: torch.device,
    m: int,
    group: Sequence[Problem],
    weights: Sequence[Addresses],
    fusion: Fusion,
    plans: Sequence[LaidOutPlan],
) -> FusedProduct:
    """The product with a weight, to which something is added, or with the two weights of a gated pair, of as many rows
    as there are tiles of x for m. Of a pair gate comes first, with a result of its own, and the other combines with it
    as it stores."""
    parts = [prepare(kernel, device, m, *each, fusion) for each in zip(group, weights, plans, strict=True)]
    first, shares = parts[0], not any(plan.resident for plan in plans)
    gate_row = group[0].n * group[0].dtype.itemsize

    def multiply(stream: int, x: int, norm: int, residual: int, m: int, results: Iterable[int]) -> None:
        most = max(part.laid_out for part in parts)
        laid_out = torch.empty(most, dtype=torch.uint8, device=device) if most else None
        place = 0 if laid_out is None else laid_out.data_ptr()
        bias, out, *others = results
        if not fusion.activation:
            first(stream, x, bias, out, place, m, other=norm if fusion.norm else residual)
            return
        gate = torch.empty(m * gate_row, dtype=torch.uint8, device=device)
        first(stream, x, bias, gate.data_ptr(), place, m)
        parts[1](stream, x, others[0], out, place, m, is_laid_out=shares, other=gate.data_ptr())

    return multiply


def prepare(
    kernel: LaidOutKernel,
    device: torch.device,
    m: int,
    problem: Problem,
    weight: Addresses,
    plan: LaidOutPlan,
    fusion: Fusion = ALONE,
) -> Part:
    """The launches of a product on the current device, of as many rows as there are tiles of x for m."""
    o, index, given = problem, device.index, fixed_arguments(kernel, m, problem, weight, plan, fusion)
    compiled = kernel.variant(o, plan, properties_of(index))
    key = index, given.x_units, plan, compiled
    both = launches.get(key, lambda: make_launches(index, given.x_units, plan, compiled))
    partial = plan.ctas * plan.sums if given.fixes_up else 0
    return Part(device, *both, Told(given), given.laid_out, partial)


class FixedArguments(NamedTuple):
    """What a launch is told of a weight, and what follows from it. x_units, laid_out: tiles of x that are laid out
    and units of each, and their bytes, 0 where CTAs keep x or copy it. copied: where they do, the bytes of a row, and
    what one copy takes. fixes_up: CTAs share tiles."""

    fixed: tuple[Any, ...]
    sizes: tuple[int, ...]
    factors: tuple[Any, ...]
    x_units: tuple[int, int]
    laid_out: int
    copied: tuple[int, tuple[int, int]] | None
    fixes_up: bool

    @property
    def layout(self) -> tuple[str, str, str]:
        return COPIED_LAYOUT if self.copied else LAYOUT

    @property
    def bytes(self) -> int:
        """A multiple of 64, for tensor maps."""
        return struct.calcsize("".join(self.layout))


class Told:
    """The arguments of one weight. first_cta: the number of its first CTA. memory, at: as those of Arguments."""

    __slots__ = ("_copied", "_fixed", "arguments", "set")

    def __init__(self, given: FixedArguments, first_cta: int = 0, memory: Any = None, at: int = 0) -> None:
        before = () if given.copied else given.fixed
        after = *given.sizes, first_cta, *given.factors
        self._copied, self._fixed = given.copied, given.fixed
        self.arguments = Arguments(given.layout, before, after, memory, at)
        # Called with what changes, x first and m last.
        self.set: Callable[..., None] = self._set_with_map if given.copied else self.arguments.set

    def _set_with_map(self, x: int, *others: int) -> None:
        assert self._copied is not None
        row, box = self._copied
        self.arguments.set(tensor_map(x, (row, others[-1]), (row,), box), *self._fixed, x, *others)


def fixed_arguments(
    kernel: LaidOutKernel, m: int, problem: Problem, weight: Addresses, plan: LaidOutPlan, fusion: Fusion = ALONE
) -> FixedArguments:
    o = problem
    k, n = (o.n, o.k) if plan.back else (o.k, o.n)
    row_tiles, x_tiles, units = plan.row_tiles(n), plan.x_tiles(m), -(-k // UNIT_K)
    tiles = row_tiles * x_tiles
    fixes_up = plan.workers != tiles * plan.cluster if plan.resident else tiles % plan.workers > 0
    packed, *scales = weight
    box = (plan.rows // 2, plan.copied_rows) if plan.back else (UNIT_K // 2, plan.rows)
    weights = tensor_map(packed, (o.k // 2, o.n), (o.k // 2,), box)
    unit, codebook = kernel.codebook(o)
    sizes, factors = (
        (n, k, row_tiles, x_tiles, units, plan.workers),
        (unit, 1.0 if fusion.residual is None else fusion.residual, *(fusion.norm or (0.0, 0.0)), codebook),
    )
    of_box = plan.tile_m // (plan.twins if plan.twins > 1 else -(-plan.tile_m // MOST_BOX))
    copied = (2 * k, (SWIZZLED, of_box)) if copies_x(o, plan) else None
    laid_out = 0 if plan.resident or copied else x_tiles * units * plan.tile_m * UNIT_K * 2
    return FixedArguments((weights, *scales), sizes, factors, (x_tiles, units), laid_out, copied, fixes_up)


def make_launches(
    index: int, x_units: tuple[int, int], plan: LaidOutPlan, compiled: Variant, ctas: int = 0
) -> tuple[Launch, Launch]:
    """What lays x out, and the product. x_units: tiles of x, and units of each. ctas: of all weights, where there are
    several."""
    shared, cluster = int(dict(compiled.constants)["shared_bytes"]), plan.cluster * plan.twins * plan.mates
    workers = (ctas or plan.ctas) // cluster
    sums = 4 * 4 * plan.norm  # of squares, by warps
    lay_out, multiply = kernels(index, compiled, (("lay_out", sums), ("multiply", shared)), carveout=100)
    tiles, units = x_units
    threads = 8 * plan.tile_m * tiles  # of a run of steps, as device/lay_out.cuh has them
    grouped = dict(compiled.constants)["grouped"]
    steps = units if plan.lays_units or grouped else 4 * units
    runs = min(max(h200.LAYING_THREADS // threads, 1), steps) if grouped else steps
    laying = NORM_PARTS * plan.tile_m * tiles if plan.norm else -(-threads * runs // 128)
    return (
        Launch(lay_out, (workers + laying, 1), 128, sums, overlaps=True),
        Launch(
            multiply,
            (workers, cluster),
            plan.threads,
            shared,
            cluster=cluster if cluster > 1 else 0,
            overlaps=True,
        ),
    )
