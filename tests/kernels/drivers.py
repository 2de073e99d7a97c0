"""A CUDA driver that is not there: its "kernels" find all that they read by its addresses, and compute it in Python.

So what is tested with it is what is handed over: a stale address, or another thread's, gives another result.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from routes import routes_of

import halfbyte as hb
from halfbyte.formats.weight import NestedScale, QuantizedWeight
from halfbyte.kernels.common import driver, tensor_map, workspace
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.experts import reference as stacks
from halfbyte.kernels.experts import sort
from halfbyte.kernels.linear import cache, cuda, grouped, kernel, laid_out, reach, side_by_side
from halfbyte.kernels.linear.grouped import Grouping
from halfbyte.kernels.linear.reference import linear_exact
from halfbyte.kernels.linear.simt import launch as exact
from halfbyte.kernels.linear.sm75 import launch as tensor
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_streamk import launch as hopper
from halfbyte.kernels.pointwise import reference as pointwise

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
KERNELS = {b"decode": decode, b"multiply": hopper, b"product": tensor, b"exact": exact}


def memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    bytes_there = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(bytes_there, dtype=dtype).view(shape)


class Facts(NamedTuple):
    """Of a kernel: weights that a launch is for, whether it copies x as it is, and experts whose results it adds up."""

    parts: int
    copies: int
    combines: int


class Driver:
    """Kernels in Python. `like` is the weight that is multiplied, as far as its addresses do not say it."""

    def __init__(self) -> None:
        self.like: QuantizedWeight
        self.group: list[QuantizedWeight] = []  # the weights of one launch, where it is not `like` alone
        self.dtype = BF16
        self.activation = ""  # of a gated pair
        self.back = False  # the product is with the weight itself
        self.grouping: Grouping | None = None  # of a stack whose pairs are sorted
        self.tile_m = 0  # of those
        self.names = [b""]
        self.loaded: list[Facts] = []  # modules
        self.facts = [Facts(0, 0, 0)]  # of the kernel with each name
        self.seen: list[tuple[Any, int]] = []  # kernel and rows of x
        self.capture = 0  # the number of the one that all streams are in
        self.others: list[bytes] = []  # names of kernels before and after products
        self.workspaces: list[tuple[int, int, int]] = []  # of shared sums: theirs, what is left, how much
        self.bound: set[int] = set()  # threads that have a context
        self.pause = 0.0  # seconds before a launch looks at its arguments

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.bound.add(threading.get_ident())
        return 0

    def _lack_of_context(self) -> int:
        """What the driver answers to a thread that has no context: CUDA_ERROR_INVALID_CONTEXT."""
        return 0 if threading.get_ident() in self.bound else 201

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        module._obj.value = len(self.loaded)
        self.loaded.append(Facts(*map(int, code.split())))
        return self._lack_of_context()

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.names.append(name)
        self.facts.append(self.loaded[module.value or 0])
        function._obj.value = len(self.names) - 1
        return 0

    def cuFuncSetAttribute(self, *_: Any) -> int:
        return 0

    def cuOccupancyMaxActiveClusters(self, count: Any, *_: Any) -> int:
        count._obj.value = 66
        return 0

    def cuTensorMapEncodeTiled(self, at: Any, kind: int, rank: int, packed: Any, *_: Any) -> int:
        ctypes.memmove(at, struct.pack("Q", packed.value), 8)
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, *others: Any) -> int:
        status._obj.value, number._obj.value = 1, self.capture
        return self._lack_of_context()

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        if lack := self._lack_of_context():
            return lack
        time.sleep(self.pause)
        name = self.names[function.value]
        kernel = KERNELS.get(name)
        if name == b"sort_pairs":
            self._sort(*struct.unpack(sort.LAYOUT[1], ctypes.string_at(parameters[0], struct.calcsize(sort.LAYOUT[1]))))
        if kernel is None:  # what comes before or after the product
            self.others.append(self.names[function.value])
            return 0
        if kernel is decode:
            combines = self.facts[function.value].combines
            ahead = struct.calcsize(decode.SUMS) if combines else 0
            size = struct.calcsize("".join(decode.layout(len(self.group) or 1)))
            arguments = ctypes.string_at(parameters[0] + ahead, size)
            if combines:
                self._combined(ctypes.string_at(parameters[0], ahead), arguments, combines)
            else:
                self._decode(arguments)
            return 0
        if self.grouping is not None:
            layout = laid_out.COPIED_LAYOUT if self.grouping.ordered else laid_out.LAYOUT
            self._grouped(ctypes.string_at(parameters[0], struct.calcsize("".join(layout))))
            return 0
        copies = bool(self.facts[function.value].copies)
        for part in range(self.facts[function.value].parts):
            size = struct.calcsize("".join(laid_out.COPIED_LAYOUT if copies else laid_out.LAYOUT))
            self._one_product(kernel, parameters[0] + part * size, copies)
        return 0

    def _one_product(self, kernel: Any, arguments: int, copies: bool) -> None:
        """Of one weight, whose arguments are at an address. copies: with a tensor map of x."""
        layout = laid_out.LAYOUT if kernel is hopper else kernel.LAYOUT
        ahead = 128 if copies else 0
        first, *rest = struct.unpack_from(
            "".join(layout), ctypes.string_at(arguments + ahead, struct.calcsize("".join(layout)))
        )
        packed = struct.unpack_from("Q", first)[0] if kernel is hopper else first
        x, bias, out = rest[5:8] if kernel is exact else rest[4:7]
        changing = len(struct.unpack(layout[1], bytes(struct.calcsize(layout[1]))))
        m, n, k = rest[(5 if kernel is exact else 4) + changing - 1 :][:3]
        self.seen.append((kernel, m))
        if kernel is hopper:
            self.workspaces.append((*rest[8:10], rest[11]))
            assert rest[8] == 0 or ctypes.c_uint32.from_address(rest[8]).value == 0xFFFFFFFF  # MISSING
        like = next((like for like in self.group if like.packed.data_ptr() == packed), None) or self.like
        assert not copies or x == struct.unpack("Q", ctypes.string_at(arguments, 8))[0]
        if self.back:
            assert (k, n) == like.shape
            dense = self._dense(like, (packed, *rest[:4]))
            memory(out, (m, n), self.dtype).copy_(linear_exact(memory(x, (m, k), self.dtype), dense.t()))
            return
        assert (n, k) == like.shape
        self._multiply(like, (packed, *rest[:4]), m, x, bias, out)
        if kernel is hopper and (other := rest[10]):
            there, y = memory(other, (m, n), self.dtype), memory(out, (m, n), self.dtype)
            y.copy_(pointwise.gated(there, y, self.activation) if self.activation else there + rest[-4] * y)

    def _decode(self, arguments: bytes) -> None:
        group = self.group or [self.like]
        parts = len(group)
        values = struct.unpack("".join(decode.layout(parts)), arguments)
        every, of_weight = iter(values), 7
        weights = [next(every) for _ in range(of_weight * parts)]
        x, norm, residual, ids = (next(every) for _ in range(4))
        results = [next(every) for _ in range(2 * parts)]
        m, pairs = next(every), next(every)
        sizes = tuple(next(every) for _ in range(2 * parts))
        tiles, k, *routing = (next(every) for _ in range(7))
        _, epsilon, offset, factor = (next(every) for _ in range(4))
        if routing[0]:
            (mapped,), (packed, *others) = struct.unpack_from("Q", weights[0]), weights[2:of_weight]
            assert mapped == packed
            self._routed((packed, *others), x, ids, *results, pairs, sizes[0], tiles, k, *routing)
            return
        assert sizes[:parts] == tuple(like.shape[0] for like in group)
        counts = [-(-n // 16) for n in sizes[:parts]]
        assert sizes[parts:] == tuple(sum(counts[:part]) for part in range(parts))
        assert (tiles, k) == (sum(counts), group[0].shape[1])
        self.seen.append((decode, m))
        rows = memory(x, (m, k), self.dtype)
        if norm:
            rows = pointwise.rms_norm(rows, memory(norm, (k,), self.dtype), epsilon, offset)
        products = []
        for part, like in enumerate(group):
            weight_map, scale_map, packed, scale, *nested = weights[of_weight * part : of_weight * (part + 1)]
            (mapped,), (mapped_scale,) = struct.unpack_from("Q", weight_map), struct.unpack_from("Q", scale_map)
            assert mapped == packed
            assert mapped_scale in (0, scale)
            products.append(self._product(like, (packed, scale, *nested), rows, results[2 * part]))
        if self.activation:
            products = [pointwise.gated(*products, self.activation)]
            assert results[3] == 0
        if residual:
            products = [memory(residual, (m, sizes[0]), self.dtype) + factor * products[0]]
        for part, y in enumerate(products):
            memory(results[2 * part + 1], (m, sizes[part]), self.dtype).copy_(y)

    def _combined(self, sums: bytes, arguments: bytes, top_k: int) -> None:
        """Pairs of tokens with so many experts each, whose results are weighted and added up."""
        _, _, out, shares, added, _, narrow, factor = struct.unpack(decode.SUMS, sums)
        before, changing, after = decode.layout(1)
        at = struct.calcsize(before)
        *first, ids, bias, nowhere, m, pairs = struct.unpack_from(changing, arguments, at)
        assert nowhere == 0
        sizes = struct.unpack_from(after, arguments, struct.calcsize(before + changing))
        experts, n, wide_ids = sizes[4], sizes[5], sizes[7]
        rows = torch.zeros(pairs, n)
        somewhere = bytearray(arguments)
        struct.pack_into(changing, somewhere, at, *first, ids, bias, rows.data_ptr(), m, pairs)
        self._decode(bytes(somewhere))
        chosen = memory(ids, (pairs,), torch.int64 if wide_ids else torch.int32)
        known = (chosen >= 0) & (chosen < experts)
        weights = memory(shares, (pairs,), self.dtype if narrow else F32).float() * known
        total = factor * torch.einsum("tjn,tj->tn", rows.view(-1, top_k, n), weights.view(-1, top_k))
        if added:
            total = total + memory(added, tuple(total.shape), self.dtype)
        memory(out, tuple(total.shape), self.dtype).copy_(total)

    def _routed(
        self, addresses: Sequence[int], x: int, ids: int, bias: int, out: int, pairs: int, n: int, tiles: int, k: int,
        experts: int, rows: int, per_row: int, wide_ids: int, clears: int,
    ) -> None:  # fmt: skip
        """Pairs of a token and an expert, of which `like` is the stack."""
        assert n == experts * rows
        self.seen.append((decode, pairs))
        flat = decode.rows_of(self.like)
        given = memory(x, (-(-pairs // per_row), k), self.dtype)
        chosen = memory(ids, (pairs,), torch.int64 if wide_ids else torch.int32).tolist()
        every = self._product(flat, addresses, given, 0).float()
        every = every.view(-1, experts, rows)
        if bias:
            every = every + memory(bias, (experts, rows), self.dtype)
        found = [every[pair // per_row, e] if 0 <= e < experts else None for pair, e in enumerate(chosen)]
        gates = self.activation and per_row > 1
        assert tiles == rows // (32 if gates and self.activation != "swiglu_oai" else 16)
        # The second product of a block is the only one whose rows of x are pairs.
        dtype = F32 if self.activation and not gates else self.dtype
        for pair, row in enumerate(found):
            if row is not None:
                result = stacks.activate(row[None], self.activation)[0] if gates else row
                memory(out, (pairs, len(result)), dtype)[pair] = result
            elif clears:
                memory(out, (pairs, rows), dtype)[pair] = 0

    def _sort(self, ids: int, routes: int, pairs: int, experts: int, wide: int, room: int) -> None:
        chosen = memory(ids, (pairs,), torch.int64 if wide else torch.int32)
        found = routes_of(chosen, experts, self.tile_m, room)
        memory(routes, (4,), torch.int32).copy_(torch.tensor([found.count, 0, 0, 0]))
        memory(routes + 16, (room, 4), torch.int32).copy_(found.tiles)
        if found.count:
            memory(routes + 16 * (1 + room), (len(found.order),), torch.int32).copy_(found.order)
        for part, of_each in enumerate((found.places, found.in_tiles), 1):
            memory(routes + 16 * (1 + room + part * -(-pairs // 4)), (pairs,), torch.int32).copy_(of_each)

    def _grouped(self, arguments: bytes) -> None:
        """Tiles of sorted pairs, with the stack `like`."""
        grouping = self.grouping
        assert grouping is not None
        if grouping.ordered:
            map_of_x, first, *values = struct.unpack("".join(laid_out.COPIED_LAYOUT), arguments)
        else:
            map_of_x, (first, *values) = b"", struct.unpack("".join(laid_out.LAYOUT), arguments)
        addresses = (*struct.unpack_from("Q", first), *values[:4])
        (x, bias, out, place, *others, routes), (pairs, per_row) = values[4:11], values[11:13]
        (n, k, row_tiles, room, units, _), _ = values[13:19], values[19:]
        assert (grouping.experts, *((k, n) if self.back else (n, k))) == self.like.shape
        assert row_tiles in {-(-n // rows) for rows in (128, 192, 256)}
        assert units == -(-k // 256)
        assert others[0] == others[1] == 0 != (x if grouping.ordered else place)
        assert not grouping.ordered or (struct.unpack_from("Q", map_of_x), per_row, place) == ((x,), 0, 0)
        order = order_of(k, min(self.like.block_size, 64)) if grouping.ordered else slice(None)
        dense = self._dense(decode.rows_of(self.like), addresses).view(self.like.shape)
        self.seen.append((grouped, per_row))
        (count,) = memory(routes, (1,), torch.int32).tolist()
        if grouping.scatters:  # as device/lay_out.cuh clears rows
            places = memory(routes + 16 * (1 + room + -(-pairs // 4)), (pairs,), torch.int32)
            memory(out, (pairs, n), self.dtype)[places < 0] = 0
        for expert, begin, rows, _ in memory(routes + 16, (room, 4), torch.int32)[:count].tolist():
            assert 0 < rows <= self.tile_m
            for row in range(begin, begin + rows):
                (pair,) = memory(routes + 16 * (1 + room) + 4 * row, (1,), torch.int32).tolist()
                given = memory(x + (pair // per_row if per_row else row) * k * 2, (1, k), self.dtype)
                weights = dense[expert].t() if self.back else dense[expert][:, order]
                y = linear_exact(given, weights).float()[0]
                if bias:
                    y = y + memory(bias, (grouping.experts, n), self.dtype)[expert]
                if grouping.activation:
                    y = stacks.activate(y, grouping.activation)
                if grouping.orders:
                    y = y[order_of(len(y), min(self.like.block_size, 64))]
                kind = F32 if grouping.wide else self.dtype
                at = out + (pair if grouping.scatters else row) * len(y) * kind.itemsize
                memory(at, (len(y),), kind).copy_(y)

    def _multiply(self, like: QuantizedWeight, addresses: Sequence[int], m: int, x: int, bias: int, out: int) -> None:
        n, k = like.shape
        y = self._product(like, addresses, memory(x, (m, k), self.dtype), bias)
        memory(out, (m, n), self.dtype).copy_(y)

    def _product(self, like: QuantizedWeight, addresses: Sequence[int], x: torch.Tensor, bias: int) -> torch.Tensor:
        n, _ = like.shape
        return linear_exact(x, self._dense(like, addresses), memory(bias, (n,), self.dtype) if bias else None)

    def _dense(self, like: QuantizedWeight, addresses: Sequence[int]) -> torch.Tensor:
        packed, scale, *of_nested = addresses
        nested = like.nested
        if nested:
            there = (memory(at, tuple(t.shape), F32) for at, t in zip(of_nested, nested[:3], strict=True))
            nested = NestedScale(*there)
        parts = {
            "packed": memory(packed, like.packed.shape, like.packed.dtype),
            "scale": memory(scale, like.scale.shape, like.scale.dtype),
        }
        return hb.dequantize(replace(like, **parts, nested=nested), F32)


def order_of(k: int, span: int) -> torch.Tensor:
    """Which of K comes where as device/lay_out.cuh lays x out: a piece of eight is of one word of each of the four
    lanes that share a span, and a word is two neighbours."""
    words = torch.arange(k // 2).view(-1, 4, span // 8).transpose(1, 2).flatten()
    return torch.stack((2 * words, 2 * words + 1), dim=1).flatten()


def _code(variant: Variant) -> bytes:
    """What cuModuleLoadData is given of a variant: its facts."""
    constants = dict(variant.constants)
    facts = Facts(constants.get("parts", 1), constants.get("copies_x", 0), constants.get("combines", 0))
    return b"%d %d %d" % tuple(map(int, facts))


def pretend(monkeypatch: pytest.MonkeyPatch, properties: DeviceProperties) -> Iterator[Driver]:
    """The driver, while a GPU with these properties takes the place of the CPU."""
    there = Driver()
    with installed(monkeypatch, there, _code, properties):
        yield there


@contextmanager
def installed(
    monkeypatch: pytest.MonkeyPatch, there: Any, cubin: Callable[[Variant], bytes], properties: DeviceProperties
) -> Iterator[None]:
    """A driver and what it loads, in the place of CUDA's: nothing that was bound before, or meanwhile, stays."""
    monkeypatch.setattr(driver, "driver", lambda: there)
    for module in (cuda, kernel, laid_out, side_by_side, decode, exact, tensor):
        monkeypatch.setattr(module, "properties_of", lambda index: properties)
    monkeypatch.setattr(reach, "without_kernels", lambda properties: None)
    monkeypatch.setattr(driver, "cubin", cubin)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(workspace, "_lasting", workspace.Workspace)  # whose streams there are none of
    monkeypatch.setattr(workspace.kept, "by_stream", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    kept = (
        cache.products,
        cache.bound,
        cache.bound_groups,
        cache.bound_fused,
        cache.groups,
        cache.fused,
        cache.back,
        decode.launches,
        exact.launches,
        laid_out.launches,
        sort.launches,
        tensor.launches,
    )
    caches = (driver.kernels.cache_clear, tensor_map.tensor_map.cache_clear, *(one.entries.clear for one in kept))
    for clear in caches:
        clear()
    yield
    for clear in caches:
        clear()


def make(n: int, k: int, dtype: torch.dtype = BF16, **options: Any) -> QuantizedWeight:
    q = hb.quantize(torch.randn(n, k).to(dtype), **options)
    if q.nested:  # all weights share one code
        q = replace(q, nested=q.nested._replace(code=q.nested.code.clone()))
    return q


def right(x: torch.Tensor, q: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return linear_exact(x, hb.dequantize(q, F32), bias).to(x.dtype)
