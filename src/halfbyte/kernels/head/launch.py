"""The CUDA product of a few rows of x with a dense weight of many rows, a model's head (kernel.cu): what it is for, the
shape that it has, and how it is launched."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.common import compiler
from halfbyte.kernels.common.cuda_types import TYPES
from halfbyte.kernels.common.device import HOPPER, DeviceProperties, properties_of
from halfbyte.kernels.common.driver import Arguments, Launch, driver, kernels
from halfbyte.kernels.common.nvrtc import Constant, Variant, read_source
from halfbyte.kernels.common.thread_cache import ThreadCache

TILE, UNIT, COLUMNS = 16, 32, 8  # rows of W, numbers of K, rows of x: of what a warp multiplies at once
MOST_ROWS = 4 * COLUMNS  # which few K leave registers for
WARPS, WANTED = range(4, 17), 8  # that multiply
MOST_STAGE, LEAST_STAGES, MOST_STAGES = 33 << 10, 4, 16  # bytes, and how many
MOST_PIECES = 16
REGISTERS, MOST_OF_THREAD, OTHERS = 1 << 16, 255, 40  # of a CTA, of a thread, and those of them that hold no x
SUM_BUFFERS = 2
ALIGNED = 16  # bytes, of a copy
DTYPES = (torch.float16, torch.bfloat16)
LAYOUT = ("", "4Q2I", "")  # kernel.cu's Arguments, all of which change

launches: ThreadCache[Hashable, tuple[Launch, Arguments]] = ThreadCache()


class Shape(NamedTuple):
    """What kernel.cu's Config says of K, and of as many rows of x."""

    k: int
    m_tiles: int
    warps: int
    pieces: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        row = 2 * self.k // self.pieces
        return TILE * (row + (0 if row % 128 else 64))

    @property
    def shared_bytes(self) -> int:
        return self._ahead + self.stages * self.stage_bytes

    @property
    def _ahead(self) -> int:
        barriers = 16 * self.stages + 16 * SUM_BUFFERS
        return -(-barriers // 128) * 128 + SUM_BUFFERS * self.warps * self.m_tiles * 512

    @property
    def fits(self) -> bool:
        """Whether threads have registers for their part of x, and stages are short."""
        each = REGISTERS // (32 * (self.warps + 2)) // 8 * 8
        of_x = 4 * self.m_tiles * self.k // UNIT // self.warps
        return of_x <= min(each, MOST_OF_THREAD) - OTHERS and self.stage_bytes <= MOST_STAGE

    def filling(self, shared: int) -> Shape:
        """With as many stages as fit into so many bytes."""
        most = self._replace(stages=MOST_STAGES)
        return self._replace(stages=min(MOST_STAGES, (shared - most._ahead) // self.stage_bytes))


@lru_cache(1 << 8)
def shape_for(k: int, rows: int, shared: int) -> Shape | None:
    """The shape for rows of x on a GPU with so much shared memory a CTA, or None where the kernel is not for it: that
    with the longest stages, and of these, with about WANTED warps."""
    if not 0 < rows <= MOST_ROWS or k % UNIT:
        return None
    shapes = [shape.filling(shared) for shape in _shapes(k, -(-rows // COLUMNS)) if shape.fits]
    deep = [shape for shape in shapes if shape.stages >= LEAST_STAGES]
    return max(deep, key=lambda shape: (shape.stage_bytes, -abs(shape.warps - WANTED)), default=None)


def _shapes(k: int, m_tiles: int) -> Iterator[Shape]:
    for warps in WARPS:
        for pieces in range(1, MOST_PIECES + 1):
            if k // UNIT % (warps * pieces) == 0:
                yield Shape(k, m_tiles, warps, pieces, 0)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `head` is for x [..., K] on a CUDA device and a weight [N, K]."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if not (
        x.is_cuda
        and x.dtype in DTYPES
        and all(t.dtype is x.dtype and t.device == x.device and t.is_contiguous() for t in tensors)
        and weight.dim() == 2
        and 0 < x.shape[-1] == weight.shape[1]
        and x.data_ptr() % ALIGNED == weight.data_ptr() % ALIGNED == 0
    ):
        return False
    k = x.shape[-1]
    serves = _serves(len(weight), k, x.numel() // k, properties_of(x.get_device()))
    return serves and driver() is not None and compiler.find() is not None


def _serves(n: int, k: int, rows: int, properties: DeviceProperties) -> bool:
    """Whether the kernel is for so many rows of x and a weight [N, K]: all multiprocessors have a tile at least."""
    is_large = TILE * properties.sms <= n < 1 << 31
    return properties.ptx >= HOPPER and is_large and shape_for(k, rows, properties.shared_memory) is not None


def variants(
    rows: Iterable[int], weight: tuple[int, int], dtype: torch.dtype, bias: bool, properties: DeviceProperties
) -> set[Variant]:
    """What `head` compiles for these numbers of rows of x in `dtype` and a weight [N, K]."""
    n, k = weight
    if dtype not in DTYPES:
        return set()
    shapes = {shape_for(k, m, properties.shared_memory) for m in rows if _serves(n, k, m, properties)}
    return {variant(properties, dtype, shape, bias) for shape in shapes if shape is not None}


def head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T (+ bias) with fp32 sums, [..., N] in the dtype of x; of what `supports` says, on the current device.
    No kernel just ahead in the stream may write the weight. A row's bits depend on how many rows there are, and not on
    what the others hold."""
    (n, k), index = weight.shape, x.get_device()
    rows = x.numel() // k
    shape = shape_for(k, rows, properties_of(index).shared_memory)
    assert shape is not None, "supports() says so"
    key = index, x.dtype, shape, bias is not None
    launch, arguments = launches.get(key, lambda: _prepare(*key))
    y = x.new_empty((*x.shape[:-1], n))
    addresses = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    arguments.set(*addresses, rows, n)
    launch(torch._C._cuda_getCurrentRawStream(index), arguments.parameters)
    return y


def variant(
    properties: DeviceProperties, dtype: torch.dtype, shape: Shape, bias: bool, *, overlaps: bool = True
) -> Variant:
    """What is compiled."""
    constants: dict[str, Constant] = {
        "x": TYPES[dtype], **shape._asdict(), "bias": bias, "overlaps": overlaps, "mma_k": 16,
        "shared_bytes": shape.shared_bytes,
    }  # fmt: skip
    return Variant.of(source(), properties.capability, constants)


def threads(shape: Shape) -> int:
    return 32 * (shape.warps + 2)


def _prepare(index: int, dtype: torch.dtype, shape: Shape, bias: bool) -> tuple[Launch, Arguments]:
    properties = properties_of(index)
    compiled = variant(properties, dtype, shape, bias)
    (function,) = kernels(index, compiled, (("head", shape.shared_bytes),))
    launch = Launch(function, (properties.sms, 1), threads(shape), shape.shared_bytes, overlaps=True)
    return launch, Arguments(LAYOUT, (), ())


@cache
def source() -> str:
    path = Path(__file__).with_name("kernel.cu")
    return read_source(path, root=path.parents[1])
