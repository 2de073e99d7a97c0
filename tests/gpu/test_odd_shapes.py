"""Odd shapes, for compute-sanitizer: `make sanitize` runs just this file under memcheck, racecheck and initcheck.

Every kernel runs at sizes around the edges of its tiles. Results are compared with the CPU's, so that the same file is
worth something without the sanitizer. Weights come from the CPU, too: all that a sanitizer watches, it slows down, and
cuBLAS more than anything.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import pytest
import torch
from kinds import quantize

import halfbyte as hb
from halfbyte import eager_fused
from halfbyte.formats.spec import FORMATS
from halfbyte.kernels.attention import reference
from halfbyte.kernels.attention.fresh import Fresh
from halfbyte.kernels.attention.fresh import supports as supports_fresh
from halfbyte.kernels.attention.pages import Pages
from halfbyte.kernels.common.device import properties_of
from halfbyte.kernels.common.norm import Norm
from halfbyte.kernels.distance import shards
from halfbyte.kernels.experts import choose
from halfbyte.kernels.experts import cuda as experts_cuda
from halfbyte.kernels.experts.block import Block
from halfbyte.kernels.linear import cuda
from halfbyte.kernels.linear.fusion import Beside, Residual
from halfbyte.kernels.linear.kernel import plan_for, run
from halfbyte.kernels.linear.problem import addresses, problem_of
from halfbyte.kernels.linear.sm75 import launch as sm75
from halfbyte.kernels.linear.sm80 import launch as sm80
from halfbyte.kernels.linear.sm80.plan import is_valid as ring_fits
from halfbyte.kernels.linear.sm80_back import launch as sm80_back
from halfbyte.kernels.linear.sm80_back.plan import BackPlan
from halfbyte.kernels.linear.sm80_back.plan import is_valid as back_fits
from halfbyte.kernels.linear.sm80_gemm import launch as sm80_gemm
from halfbyte.kernels.linear.sm80_gemm.plan import ManyPlan
from halfbyte.kernels.linear.sm80_gemm.plan import is_valid as many_fits
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_decode.plan import DecodePlan, Scales, is_valid
from halfbyte.kernels.linear.sm90_gemm import launch as gemm
from halfbyte.kernels.linear.sm90_gemm import plan as gemm_plans
from halfbyte.kernels.linear.sm90_gemm.shape import GemmPlan
from halfbyte.kernels.linear.sm90_streamk import launch as hopper
from halfbyte.kernels.linear.sm90_streamk import plan as streamk_plans
from halfbyte.kernels.linear.sm90_streamk.shape import StreamKPlan
from halfbyte.kernels.linear.sm90_streamk.shape import is_valid as plan_fits
from halfbyte.kernels.linear.tune import h200
from halfbyte.kernels.pointwise import reference as pointwise
from halfbyte.measure.error import relative_error

from .test_paged import BOUND, PAGE, Cache, ends, states


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random ones, on the GPU."""
    return torch.randn(shape).to(dtype).cuda()


def weight(shape: tuple[int, ...], format: str = "nf4", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """A random weight or stack, on the GPU and on the CPU."""
    q = hb.quantize((torch.randn(shape) / shape[-1] ** 0.5).to(dtype), format, **options)
    return q.to("cuda"), q


def check_product(
    y: torch.Tensor, x: torch.Tensor, on_cpu: hb.QuantizedWeight, bias: torch.Tensor | None, most: float = 4e-3
) -> None:
    right = x.cpu().double() @ hb.dequantize(on_cpu, torch.float32).double().t()
    assert relative_error(y.cpu(), right + (0.0 if bias is None else bias.cpu().double())) < most


SHAPES = ((1, 1), (1, 63), (3, 21), (5, 65), (2, 1024), (1, 2049), (17, 127), (33, 4099), (129, 1000))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_blockwise(format: str, shape: tuple[int, int]) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for block_size, nested in ((32, True), (64, True), (64, False), (4096, True)):
            weight = torch.randn(shape).to(dtype)
            q = hb.quantize(weight, format, block_size=block_size, nested=nested)
            there = hb.quantize(weight.cuda(), format, block_size=block_size, nested=nested)
            assert there.packed.shape == q.packed.shape
            out = torch.full(shape, 777.0, dtype=dtype, device="cuda")
            hb.dequantize(q.to("cuda"), out=out)
            torch.testing.assert_close(out.cpu(), hb.dequantize(q), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(1, 128), (3, 384), (57, 1152)])
def test_int4(shape: tuple[int, int]) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for group_size in (32, 64, 128):
            weight = torch.randn(shape).to(dtype)
            q = hb.quantize(weight, "int4", group_size=group_size)
            there = hb.quantize(weight.cuda(), "int4", group_size=group_size)
            assert torch.equal(there.packed.cpu(), q.packed)
            assert torch.equal(there.scale.cpu(), q.scale)
            torch.testing.assert_close(hb.dequantize(there).cpu(), hb.dequantize(q), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4, 1024), (20, 1024), (36, 3072), (20, 7168), (68, 9216)])
def test_linear(shape: tuple[int, int]) -> None:
    """One row of W less than a tile and a few more, K over one CTA and over a cluster, every number of columns."""
    n, k = shape
    q, on_cpu = weight(shape)
    for m in (1, 5, 8, 13, 27):
        x, bias = numbers(m, k), numbers(n) if m % 2 else None
        check_product(hb.linear(x, q, bias), x, on_cpu, bias)


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((8452, 1024), DecodePlan(1, 2, 8, 2, 1)),
        ((6404, 1024), DecodePlan(1, 2, 8, 3, 1, steps=2)),
        ((6404, 1024), DecodePlan(1, 2, 8, 5, 1, steps=2, first_stages=2)),
        ((6404, 1024), DecodePlan(1, 2, 8, 2, 1, steps=2, first_stages=8)),
        ((4228, 768), DecodePlan(1, 2, 8, 3, 1, bulk_scales=True, steps=2)),  # its second step has 4 blocks of 8
        ((4228, 256), DecodePlan(1, 2, 8, 2, 1, bulk_scales=True, steps=2)),  # and here none
        ((4228, 1024), DecodePlan(2, 2, 8, 3, 1, steps=2)),
        ((2116, 320), DecodePlan(1, 1, 8, 3, 1, bulk_scales=True, steps=2)),  # rows of 160 bytes, in chunks of 32
        ((2116, 1152), DecodePlan(2, 5, 4, 2, 1, window_scales=True)),  # of 64
        ((2116, 8448), DecodePlan(1, 11, 8, 2, 2, window_scales=True, steps=2, first_stages=2)),
        ((2116, 2048), DecodePlan(1, 2, 8, 5, 2, steps=2)),
        ((2116, 2304), DecodePlan(1, 3, 8, 3, 2, window_scales=True)),  # its second CTA has 12 blocks of 24
        ((2116, 1792), DecodePlan(1, 1, 8, 5, 4, window_scales=True)),
        ((2116, 1792), DecodePlan(2, 2, 8, 4, 2, window_scales=True, steps=2)),
        ((2116, 1792), DecodePlan(1, 2, 8, 4, 2, window_scales=True, sum_buffers=1)),
        ((4228, 1024), DecodePlan(2, 4, 4, 3, 1, sum_buffers=1)),
        ((2116, 2048), DecodePlan(4, 8, 4, 2, 1, registers=232)),
        ((2116, 4096), DecodePlan(4, 8, 4, 2, 2, registers=232, sum_buffers=1)),
        ((8452, 1024), DecodePlan(1, 2, 8, 3, 1, steps=2, resident_ctas=2)),
        ((2116, 4096), DecodePlan(1, 8, 8, 3, 1, steps=2, joined=2)),
        ((4228, 1024), DecodePlan(2, 4, 4, 2, 1, joined=2, reducers=2)),
        ((2116, 2048), DecodePlan(2, 4, 4, 2, 2, sum_buffers=2, reducers=2)),
        ((2116, 2048), DecodePlan(4, 8, 4, 2, 1, registers=232, reducers=2, batches=2)),
        ((1060, 4096), DecodePlan(4, 8, 4, 2, 2, registers=232, reducers=2, batches=2)),
        ((2116, 8192), DecodePlan(1, 16, 8, 3, 1, steps=2, registers=112)),
    ],
    ids=str,
)
def test_linear_in_steps(shape: tuple[int, int], plan: DecodePlan) -> None:
    """So many tiles that every buffer is used again, and a last one that is not full."""
    n, k = shape
    groups = [("int4", {"group_size": size}) for size in (64, 128) if k % size == 0]
    for format, options in (("nf4", {}), ("nf4", {"nested": False}), *groups):
        q, on_cpu = weight(shape, format, **options)
        scales = Scales(q.scale.dtype, q.block_size)
        if not is_valid(plan, n, k, scales, properties_of(0)):
            # Whole rows of some scales may be aligned where those of others are not.
            assert format == "int4" or (q.nested and k % 256) or plan.joined > scales.blocks
            continue
        most = 8 * plan.m_tiles * plan.batches
        for m in (8 * plan.m_tiles * (plan.batches - 1) + 1, most):
            x, bias = numbers(m, k), numbers(n)
            y = torch.full((m, n), 777.0, device="cuda").bfloat16()
            run(decode, x, q, bias, y, plan)
            check_product(y, x, on_cpu, bias)


@pytest.mark.parametrize("k", [256, 1024, 5376, 9216])
def test_linear_of_several_weights(k: int) -> None:
    """Weights that end within a tile, one behind the other, K over one CTA and over a cluster."""
    weights = [weight((n, k)) for n in (68, 4, 20)]
    for group in (weights, weights[:2]):
        for m in (1, 5, 8, 13, 16, 27, 32, 33):
            x = numbers(m, k)
            biases = [numbers(q.shape[0]) if m % 2 else None for q, _ in group]
            found = cuda.linear_group(x, [q for q, _ in group], biases)
            assert (found is not None) or m > 32  # above, only where one launch is faster than three
            if found is None:
                continue
            for y, (_, on_cpu), bias in zip(found, group, biases, strict=True):
                check_product(y, x, on_cpu, bias)


@pytest.mark.parametrize(("cluster", "held"), [(2, 1), (3, 1), (5, 1), (8, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize(("width", "groups"), [(8, 2), (16, 3), (24, 2), (32, 2), (48, 3), (64, 3)])
def test_linear_of_a_cluster(width: int, groups: int, cluster: int, held: int) -> None:
    """CTAs hold x and add up a tile among themselves: whole tiles or not, less of x than there is room for."""
    if properties_of(0).ptx != 90:
        pytest.skip("sm90_streamk/kernel.cu is for sm_90")
    n, k = 131, 256 * cluster * held - 192
    for format, options in (("nf4", {}), ("nf4", {"nested": False}), ("int4", {"group_size": 64})):
        q, on_cpu = weight((n, k), format, **options)
        for m in (1, width - 5, width + 3):
            tiles = -(-n // (64 * groups)) * -(-m // width)
            plan = StreamKPlan(width, groups, 2, tiles * cluster, held, cluster)
            if not plan_fits(plan, m, n, k, 64, properties_of(0)):
                # The sums of so many rows need more room than two stages.
                assert (width, cluster, held) in ((48, 5, 1), (64, 3, 1), (64, 5, 1))
                plan = replace(plan, stages=3)
            x, bias = numbers(m, k), numbers(n)
            y = torch.full((m, n), 777.0, device="cuda").bfloat16()
            run(hopper, x, q, bias, y, plan)
            check_product(y, x, on_cpu, bias)


@pytest.mark.parametrize("shape", [(1, 32), (7, 63), (33, 320), (129, 1088), (200, 2304)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_linear_of_every_format(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """K that ends within a block, a unit or a step; rows of W that end within a tile; every kernel."""
    n, k = shape
    cases = [("nf4", {"block_size": 64}), ("fp4", {"block_size": 32, "nested": False}), ("nf4", {"block_size": 256})]
    if k % 64 == 0:
        cases.append(("int4", {"group_size": 64}))
    for format, options in cases:
        q, on_cpu = weight(shape, format, dtype, **options)
        for m, invariant in ((1, False), (9, False), (40, False), (70, True)):
            x, bias = numbers(m, k, dtype=dtype), numbers(n, dtype=dtype) if m % 2 else None
            check_product(hb.linear(x, q, bias, batch_invariant=invariant), x, on_cpu, bias, 5e-3)


@pytest.mark.parametrize("shape", [(1, 32), (33, 320), (129, 1088), (530, 2304)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_linear_of_other_gpus(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """What serves GPUs from sm_75 on: rows and K that end within a tile, a unit or a stage; CTAs that share tiles."""
    n, k = shape
    cases = [("nf4", {}), ("fp4", {"block_size": 32, "nested": False}), ("mxfp4", {})]
    if k % 64 == 0:
        cases.append(("int4", {"group_size": 64}))
    for format, options in cases:
        if k % options.get("block_size", 32):
            continue
        q, on_cpu = weight(shape, format, dtype, **options)
        for m in (1, 9, 33, 70):
            x, bias = numbers(m, k, dtype=dtype), numbers(n, dtype=dtype) if m % 2 else None
            for kernel in (sm75, sm80):
                if (plan := plan_for(kernel, x, q, bias)) is None:
                    assert kernel is sm75  # which has no exponents
                    assert format == "mxfp4"
                    continue
                plans = [plan]
                if kernel is sm80:
                    tiles = math.prod(plan.sizes(m, n, k)[:2])
                    plans += [replace(plan, ctas=ctas, stages=3) for ctas in (1, tiles + 1)]
                    plans.append(plan_for(kernel, x, q, bias, True))
                    one = plans[-1]
                    plans.append(replace(one, ctas=3 * one.tiles(m, problem_of(x, q, bias))))
                    plans = [plan for plan in plans if ring_fits(plan, m, problem_of(x, q, bias), properties_of(0))]
                for plan in plans:
                    y = torch.full((m, n), 777.0, device="cuda").to(dtype)
                    run(kernel, x, q, bias, y, plan)
                    check_product(y, x, on_cpu, bias, 5e-3)


@pytest.mark.parametrize("k", [3840, 4864])
def test_linear_of_a_row_among_others(k: int) -> None:
    """Eight and ten CTAs share a tile: they add up in one order, at once where x is narrow and in groups elsewhere."""
    q, _ = weight((2049, k), dtype=torch.float16, block_size=128, nested=False)
    x = numbers(70, k, dtype=torch.float16)
    whole = hb.linear(x, q, batch_invariant=True)
    for m in (1, 9, 17, 33):
        assert torch.equal(hb.linear(x[:m], q, batch_invariant=True), whole[:m])


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's")
@pytest.mark.parametrize(("sides", "k"), [((300, 130, 1), 1088), ((9, 8, 7, 6), 320), ((129, 129), 64)])
@pytest.mark.parametrize("m", [1, 33, 65, 257])
def test_several_weights_in_one_launch(m: int, sides: tuple[int, ...], k: int) -> None:
    """By both kernels that can; twice, since a launch clears the sums that the one before has left."""
    weights, on_cpu = zip(*(weight((n, k)) for n in sides), strict=True)
    x, biases = numbers(m, k), [numbers(n) if n % 3 else None for n in sides]
    group = tuple(problem_of(x, q, bias) for q, bias in zip(weights, biases, strict=True))
    for kernel, plans in ((gemm, gemm_plans), (hopper, streamk_plans)):
        plan = plans.in_one_launch(m, group, properties_of(0))
        product = kernel.bind_group(x.device, m, group, tuple(map(addresses, weights)), plan)
        for _ in range(2):
            results = [torch.full((m, n), 777.0, device="cuda").to(x.dtype) for n in sides]
            told = (
                (0 if bias is None else bias.data_ptr(), y.data_ptr()) for bias, y in zip(biases, results, strict=True)
            )
            product(torch.cuda.current_stream().cuda_stream, x.data_ptr(), m, chain.from_iterable(told))
            for y, q, bias in zip(results, on_cpu, biases, strict=True):
                check_product(y, x, q, bias, 5e-3)


@pytest.mark.parametrize(("n", "k"), [(4, 1024), (36, 3072), (20, 7168), (68, 320)])
@pytest.mark.parametrize("m", [1, 5, 9, 20])
def test_linear_with_what_stands_beside(m: int, n: int, k: int) -> None:
    """Rows and K that fill no tile, one CTA along K and several, x laid out and not."""
    pair, on_cpu = zip(*(weight((n, k)) for _ in range(2)), strict=True)
    x, residual, gamma = numbers(m, k), numbers(m, n), numbers(k)
    dense = [hb.dequantize(q).float() for q in on_cpu]
    normed = pointwise.rms_norm(x.float().cpu(), gamma.cpu(), 1e-5, 1.0)
    (found,) = eager_fused.products(x, pair, [None, None], Beside(Norm(gamma, 1e-5, 1.0), "silu"))
    right = pointwise.gated(*(normed @ one.T for one in dense), "silu")
    assert relative_error(found.cpu(), right) < 1e-2
    (found,) = eager_fused.products(x, pair[:1], [None], Beside(residual=Residual(residual, 0.5)))
    assert relative_error(found.cpu(), residual.cpu() + 0.5 * x.float().cpu() @ dense[0].T) < 1e-2


@pytest.mark.parametrize(("inner", "hidden"), [(256, 1024), (512, 5120), (2048, 256)])
@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_experts(format: str, inner: int, hidden: int) -> None:
    """Units that are full and not, tokens that share experts and not, ids that are none."""
    experts, k = 5, 3
    stacks = [weight((experts, *sides), format) for sides in ((2 * inner, hidden), (hidden, inner))]
    (gate_up, down), on_cpu = zip(*stacks, strict=True)
    for tokens in (1, 3, 11, 43):
        x, weights = numbers(tokens, hidden), torch.rand(tokens, k).cuda()
        ids = torch.randint(-1, experts + 1, (tokens, k)).cuda()
        found = experts_cuda.moe(x, ids, weights, Block(gate_up, down, "silu"))
        assert found is not None
        right = hb.moe(x.float().cpu(), ids.cpu(), weights.cpu(), *on_cpu)
        assert relative_error(found.cpu(), right) < 1e-2


@pytest.mark.parametrize(("experts", "k", "top_k"), [(8, 32, 2), (128, 2080, 8), (40, 96, 4), (300, 544, 32)])
def test_a_router(experts: int, k: int, top_k: int) -> None:
    """Tokens that fill no cluster, experts that fill no tile, a K that leaves warps without work."""
    norm = Norm((1 + numbers(k) / 8).contiguous(), 1e-5)
    for tokens, is_normed in product((1, 7, 9, 37), (False, experts <= choose.MOST_NORMED_EXPERTS)):
        x, w, bias = numbers(tokens, k), numbers(experts, k), numbers(experts)
        assert choose.supports(x, w, bias, top_k, torch.float32)
        x, ids, weights = choose.choose(x, norm if is_normed else None, w, bias, top_k, False, True, torch.float32)
        scores = torch.nn.functional.linear(x.double(), w.double(), bias.double())
        apart = scores.topk(top_k).values - scores.gather(1, ids)
        assert (apart <= 2**-7 * scores.abs().amax(1, keepdim=True)).all()
        assert all(len(set(row)) == top_k for row in ids.tolist())
        assert relative_error(weights, scores.gather(1, ids).softmax(1)) < 0.2  # scores are rounded to 16 bits


@pytest.mark.parametrize(("inner", "hidden"), [(64, 320), (96, 160), (192, 1024)])
@pytest.mark.parametrize("format", ["nf4", "fp4", "mxfp4"])
def test_many_pairs_with_experts(format: str, inner: int, hidden: int) -> None:
    """Rows of W and pairs that fill no tile, K that ends within a unit, ids that are none, an expert without pairs."""
    multiply_pairs(format, inner, hidden, 64 if format == "nf4" and inner % 64 == 0 else 32, (172, 347))


@pytest.mark.usefixtures("sorts_as_other_gpus")
@pytest.mark.parametrize(("inner", "hidden"), [(32, 32), (96, 160), (160, 320)])
@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_many_pairs_with_experts_on_other_gpus(format: str, inner: int, hidden: int) -> None:
    """The same, of sums that are a single stage, and of few pairs."""
    multiply_pairs(format, inner, hidden, 32, (3, 120))


def multiply_pairs(format: str, inner: int, hidden: int, size: int, sizes: Sequence[int]) -> None:
    """Blocks of so many tokens, and gradients of both stacks, beside those of a CPU."""
    experts, k = 4, 3
    sides = ((2 * inner, hidden), (hidden, inner))
    stacks = [weight((experts, *both), format, block_size=size) for both in sides]
    (gate_up, down), on_cpu = zip(*stacks, strict=True)
    for tokens, activation in zip(sizes, ("silu", "swiglu_oai"), strict=True):
        x, weights = numbers(tokens, hidden), torch.rand(tokens, k).cuda()
        ids = torch.randint(-1, experts - 1, (tokens, k)).cuda()
        found = hb.moe(x, ids, weights, gate_up, down, activation)
        right = hb.moe(x.float().cpu(), ids.cpu(), weights.cpu(), *on_cpu, activation)
        assert relative_error(found.cpu(), right) < 1e-2
        for q, here in stacks:
            grad = numbers(tokens * k, q.shape[1])
            there = torch.ops.halfbyte.grouped_linear_backward(grad, *q.parts, ids.view(-1))
            right = torch.ops.halfbyte.grouped_linear_backward(grad.float().cpu(), *here.parts, ids.view(-1).cpu())
            assert relative_error(there.cpu(), right) < 1e-2


@pytest.mark.parametrize(("v", "d"), [(1, 1), (3, 64), (17, 127), (129, 33), (257, 192), (1000, 65)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_search(v: int, d: int, dtype: torch.dtype) -> None:
    for p in (1, 2, 17, 65):
        query, candidates = torch.randn(p, d).to(dtype), torch.randn(v, d).to(dtype)
        candidates[v // 2] = query[0]
        there = query.cuda(), candidates.cuda()
        distances = hb.distances(query, candidates)
        torch.testing.assert_close(hb.distances(*there).cpu(), distances, rtol=2e-5, atol=0)
        for k in {1, min(v, 7), min(v, 128)}:
            least, rows = hb.nearest(*there, k)
            right = distances.sort(dim=1).values[:, :k]
            torch.testing.assert_close(least.cpu(), right, rtol=2e-5, atol=0)
            torch.testing.assert_close(distances.gather(1, rows.cpu()), right, rtol=2e-5, atol=0)
        tokens = torch.randint(v, (p,))
        assert torch.equal(hb.token_ranks(*there, tokens.cuda()).cpu(), hb.token_ranks(query, candidates, tokens))


@pytest.mark.parametrize(("v", "d"), [(1, 64), (17, 128), (257, 192)])
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_search_among_packed_rows(format: str, v: int, d: int) -> None:
    size = math.gcd(d, FORMATS[format].block_size)  # of a group, which divides a row in some formats
    q = quantize(torch.randn(v, d).bfloat16(), format, size, FORMATS[format].nests).to("cuda")
    for p in (1, 3, 9):
        query = torch.randn(p, d, device="cuda").bfloat16()
        dense = hb.dequantize(q)
        torch.testing.assert_close(hb.distances(query, q), hb.distances(query, dense), rtol=2e-5, atol=0)
        least, _ = hb.nearest(query, q, min(v, 10))
        torch.testing.assert_close(least, hb.nearest(query, dense, min(v, 10))[0], rtol=2e-5, atol=0)


@pytest.mark.parametrize(("n", "k"), [(1, 64), (8, 64), (17, 192), (304, 128), (1030, 320)])
def test_many_rows_back(n: int, k: int) -> None:
    for m, tile_m, cluster in ((1, 96, 1), (97, 96, 2), (130, 128, 1), (300, 256, 2)):
        on_cpu = quantize(torch.randn(n, k).bfloat16(), "nf4", 64, True)
        q, dy = on_cpu.to("cuda"), numbers(m, n)
        tiles, depth = -(-k // 128) * -(-m // tile_m), -(-n // 256)
        cluster = min(cluster, depth)
        workers = min(132, tiles * depth) if cluster == 1 else tiles
        shape = (tile_m, 2, 3, 3 * 256 // tile_m, workers, cluster, -(-m // tile_m) * tile_m)
        out = torch.empty((m, k), dtype=torch.bfloat16, device="cuda")
        run(gemm, dy, q, None, out, GemmPlan(*shape, back=True))
        right = dy.cpu().double() @ hb.dequantize(on_cpu, torch.float32).double()
        assert relative_error(out.cpu(), right) < 4e-3


@pytest.mark.parametrize("shape", [(1, 32), (8, 64), (17, 192), (304, 160), (1030, 320)])
@pytest.mark.parametrize("format", ["nf4", "fp4", "int4", "mxfp4"])
def test_rows_back_on_other_gpus(format: str, shape: tuple[int, int]) -> None:
    """Rows of dy that are aligned and not, N and K that end within a tile, CTAs that share tiles."""
    (n, k), options = shape, {} if format == "mxfp4" else {"group_size" if format == "int4" else "block_size": 32}
    q, on_cpu = weight(shape, format, **options)
    for m in (1, 17, 100):
        dy = numbers(m, n)
        right = dy.cpu().double() @ hb.dequantize(on_cpu, torch.float32).double()
        problem = problem_of(dy, q, None)
        for columns in h200.SM80_BACK_SHAPES:
            tiles = math.prod(BackPlan(columns, 3, 1, 1).sizes(m, problem)[:2])
            for ctas in (1, tiles + 1):
                plan = BackPlan(columns, 3, 1, ctas)
                if not back_fits(plan, m, problem, properties_of(0)):
                    continue
                dx = torch.full((m, k), 777.0, device="cuda").bfloat16()
                run(sm80_back, dy, q, None, dx, plan)
                assert relative_error(dx.cpu(), right) < 5e-3


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("shape", [(1, 32), (17, 192), (304, 160), (1030, 320)])
@pytest.mark.parametrize("format", ["nf4", "fp4", "int4", "mxfp4"])
def test_many_rows_on_other_gpus(format: str, shape: tuple[int, int], back: bool) -> None:
    """Rows of x that are aligned and not, N and K that end within a tile, CTAs that share tiles."""
    (n, k), options = shape, {} if format == "mxfp4" else {"group_size" if format == "int4" else "block_size": 32}
    q, on_cpu = weight(shape, format, **options)
    dense = hb.dequantize(on_cpu, torch.float32).double()
    for m in (1, 70, 300):
        x = numbers(m, n if back else k)
        right, problem = x.cpu().double() @ (dense if back else dense.t()), problem_of(x, q, None)
        for kind in h200.MANY_SHAPES:
            tiles = ManyPlan(back, *kind, 3, 1, 1).tiles(m, problem)
            for ctas in (1, tiles + 1):
                plan = ManyPlan(back, *kind, 3, 1, ctas)
                if not many_fits(plan, m, problem, properties_of(0)):
                    continue
                out = torch.full((m, k if back else n), 777.0, device="cuda").bfloat16()
                run(sm80_gemm, x, q, None, out, plan)
                assert relative_error(out.cpu(), right) < 5e-3


@pytest.mark.parametrize(("p", "k", "counts"), [(1, 5, (7, 3)), (3, 33, (40, 0, 9)), (2, 128, (130, 1, 64, 200))])
def test_shards_of_a_matrix(p: int, k: int, counts: tuple[int, ...]) -> None:
    in_triton = pytest.importorskip("halfbyte.kernels.distance.shards_triton")
    everyone = []
    for count in counts:
        least = torch.rand(p, min(k, count), device="cuda").sort(dim=1).values
        rows = torch.randint(count + 1, least.shape, device="cuda")
        sent = shards.pack(least, rows, count, k)
        assert torch.equal(in_triton.pack(least, rows, count, k), sent)
        everyone.append(sent)
    found, right = (module.merge(torch.stack(everyone), p, k) for module in (in_triton, shards))
    assert all(map(torch.equal, found, right))


@pytest.mark.parametrize(
    ("texts", "heads", "tokens", "key", "value"),
    [(1, 1, 1, 1, 1), (2, 3, 5, 16, 8), (1, 8, 70, 128, 128), (33, 7, 4, 80, 72), (20, 8, 33, 256, 256)],
)
@pytest.mark.parametrize("count", [1, 3])
def test_append_to_a_cache(texts: int, heads: int, tokens: int, key: int, value: int, count: int) -> None:
    kernels = pytest.importorskip("halfbyte.kernels.cache.triton")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        keys, values, length = (
            torch.randn(texts, heads, tokens, key, device="cuda").to(dtype),
            torch.randn(texts, heads, tokens, value, device="cuda").to(dtype),
            torch.tensor(0, device="cuda"),
        )
        for place in range(tokens + 1):  # the last one does not fit
            new = [torch.randn(texts, count, heads, n, device="cuda").to(dtype).transpose(1, 2) for n in (key, value)]
            right = keys.clone(), values.clone()
            for there, tensor in zip(right, new, strict=True):
                there[:, :, place : place + count] = tensor[:, :, : tokens - place]
            assert kernels.supports(keys, values, *new, length, count)
            kernels.append(keys, values, *new, length)
            assert torch.equal(keys, right[0])
            assert torch.equal(values, right[1])
            assert int(length) == place + count
            length.fill_(place + 1)


@pytest.mark.parametrize(
    ("texts", "heads", "shared", "new", "tokens", "size", "value"),
    [
        (1, 1, 1, 1, 1, 8, 8),
        (2, 6, 3, 3, 37, 80, 80),
        (3, 8, 1, 8, 64, 128, 64),
        (1, 20, 1, 1, 4099, 256, 256),
        (2, 24, 2, 8, 1000, 192, 128),
        (33, 16, 8, 2, 130, 96, 96),
        (1, 32, 8, 1, 1000, 128, 128),
    ],
)
def test_attention(texts: int, heads: int, shared: int, new: int, tokens: int, size: int, value: int) -> None:
    front = pytest.importorskip("halfbyte.kernels.attention.attend")
    kernels = pytest.importorskip("halfbyte.kernels.attention.triton")
    rows = heads // shared * new
    usual = kernels.plan_for(properties_of(0), texts * shared, tokens, max(size, value), rows)
    ways = [partial(kernels.attend, plan=replace(usual, one_launch=one)) for one in (True, False)]
    for dtype, attend in product((torch.float16, torch.bfloat16), (front.attend, *ways)):
        query = torch.randn(texts, new, heads, size + 3, device="cuda")[..., :size].transpose(1, 2).to(dtype)
        keys, values = (torch.randn(texts, shared, tokens, d, device="cuda").to(dtype) for d in (size, value))
        mask = torch.rand(texts, 1, new, tokens, device="cuda") < 0.7
        mask[..., 0] = True
        for seen in (mask, mask[:1], None):
            assert kernels.supports(query, keys, values, seen)
            found = attend(query, keys, values, seen, 0.25)
            assert torch.equal(found, attend(query, keys, values, seen, 0.25))
            given = (tensor.double().cpu() for tensor in (query, keys, values))
            right = reference.attend(*given, None if seen is None else seen.cpu(), 0.25)
            assert relative_error(found.cpu(), right) < (8e-4 if dtype is torch.float16 else 6e-3)


@pytest.mark.parametrize(
    ("texts", "heads", "shared", "new", "tokens", "size", "value"),
    [
        (1, 1, 1, 2, 2, 8, 1),
        (2, 6, 3, 5, 37, 80, 80),
        (3, 24, 1, 8, 70, 128, 64),
        (2, 20, 4, 1, 1000, 96, 256),
        (3, 20, 4, 7, 1001, 128, 128),
        (33, 14, 2, 1, 57, 64, 64),
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_attention_of_new_tokens(
    texts: int, heads: int, shared: int, new: int, tokens: int, size: int, value: int, padding: int
) -> None:
    """Normed, rotated by a part of their heads, and put into the last places of the cache. padding: numbers behind
    each head, which leave heads where no kernel loads 16 bytes at once."""
    kernels = pytest.importorskip("halfbyte.kernels.attention.triton")
    front = pytest.importorskip("halfbyte.kernels.attention.attend")
    rotary = max(2, size // 4 * 2)
    norms = [Norm(torch.randn(size, device="cuda").bfloat16(), epsilon, 1.0) for epsilon in (1e-6, 1e-3)]
    query, key, added = (
        torch.randn(texts, new, n, d + padding, device="cuda").bfloat16()[..., :d].transpose(1, 2)
        for n, d in ((heads, size), (shared, size), (shared, value))
    )
    cos, sin = torch.randn(2, texts, new, rotary, device="cuda").bfloat16()
    slot = torch.tensor(tokens - new, device="cuda")
    fresh = Fresh(key, added, cos, sin, slot, *norms)
    keys, values = (torch.randn(texts, shared, tokens, d, device="cuda").bfloat16() for d in (size, value))
    exactly = [cache.double() for cache in (keys, values)]
    turned = reference.put(query.double(), *exactly, Fresh(*(t.double() for t in fresh[:4]), *fresh[4:]))
    places, last = torch.arange(tokens, device="cuda"), tokens - new + torch.arange(new, device="cuda")[:, None]
    mask = (places <= last).expand(texts, 1, new, tokens).contiguous()
    assert kernels.supports(query, keys, values, mask)
    assert supports_fresh(fresh, query, keys, values)
    found = front.attend(query, keys, values, mask, 0.25, fresh=fresh)
    assert relative_error(found, reference.attend(turned, *exactly, mask, 0.25)) < 2e-2
    assert relative_error(keys, exactly[0]) < 6e-3
    assert torch.equal(values.double(), exactly[1])


@pytest.mark.parametrize(("heads", "shared", "size"), [(3, 3, 16), (24, 1, 80), (6, 2, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_over_pages(dtype: torch.dtype, heads: int, shared: int, size: int) -> None:
    """Requests without a cached token, that fill a page and not; a token of each, prompts in chunks, rows of nobody."""
    kernels = pytest.importorskip("halfbyte.kernels.attention.paged")
    lengths, nowhere = [70, 0, 63, 64, 1, 300], torch.full((40,), 1 << 40, device="cuda")
    for new, window in (([1] * 6, 0), ([1] * 6, 20), ([5, 1, 0, 40, 2, 1], 0), ([33, 7, 1, 0, 1, 2], 50)):
        cache = Cache(lengths, shared, size, dtype)
        given = states(sum(new) + 3, heads, shared, size, dtype)
        where = ends(new), ends(map(sum, zip(lengths, new, strict=True)))
        places = torch.cat([torch.cat((rows, nowhere[:one])) for rows, one in zip(cache.rows, new, strict=True)])
        in_pages = max(new) == 1
        pages = Pages(cache.keys, cache.values, *((cache.table, PAGE) if in_pages else (places,)))
        right = pages._replace(
            keys=pages.keys.double().cpu(), values=pages.values.double().cpu(), places=pages.places.cpu()
        )
        most = {"most_new": max(new), "most_tokens": 341}
        found = kernels.attend_pages(*given, pages, *where, 0.09, **most, window=window)
        on_cpu = (tensor.double().cpu() for tensor in given)
        exactly = reference.attend_pages(*on_cpu, right, *(tensor.cpu() for tensor in where), 0.09, window=window)
        assert relative_error(found.cpu(), exactly) < BOUND[dtype]
        assert not found[-3:].any()
