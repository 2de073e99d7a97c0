"""The CUDA product's plans, and that its source compiles for every target that has the instructions, GPU or not."""

import math
import subprocess
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpus import H200
from hypothesis import given
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.formats.bitsandbytes import FORMATS
from halfbyte.kernels.common import nvrtc
from halfbyte.kernels.common.device import DeviceProperties
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.common.tensor_map import SWIZZLES
from halfbyte.kernels.linear import kernel
from halfbyte.kernels.linear.codebook import factor_of
from halfbyte.kernels.linear.kernel import plan_for
from halfbyte.kernels.linear.problem import Problem
from halfbyte.kernels.linear.sm90_decode import launch as decode
from halfbyte.kernels.linear.sm90_decode.launch import constants, source, target
from halfbyte.kernels.linear.sm90_decode.plan import (
    MOST_ROWS,
    ROWS,
    DecodePlan,
    Scales,
    decode_plan,
    is_valid,
    weight_chunk,
)

NESTED, FLAT, GROUPS = Scales(torch.uint8), Scales(torch.float32), Scales(torch.bfloat16, 128)
SCALES = (NESTED, FLAT, GROUPS, Scales(torch.float16), Scales(torch.uint8, 512), Scales(torch.float32, 4096))
MODELS = ((28672, 8192), (8192, 28672), (14336, 4096), (4096, 14336), (1024, 4096), (25600, 5120), (5120, 25600))


@given(
    m=st.integers(0, 64),
    n=st.integers(1, 8000).map(lambda n: 4 * n),
    k=st.integers(1, 128).map(lambda k: 256 * k),
    scales=st.sampled_from(SCALES),
    capability=st.sampled_from([75, 80, 89, 90, 100, 120]),
)
def test_every_plan_is_valid(m: int, n: int, k: int, scales: Scales, capability: int) -> None:
    shared = {75: 65536, 80: 166912, 89: 101376, 120: 101376}.get(capability, 232448)
    properties = DeviceProperties("cuda", capability, 132, shared)
    plan = decode_plan(m, n, k, scales, properties)
    if plan is None:
        return
    assert is_valid(plan, n, k, scales, properties)
    assert m <= 8 * plan.m_tiles * plan.batches <= MOST_ROWS
    assert plan.shared_bytes(scales) <= shared
    assert plan.blocks * plan.cluster * 64 >= k


@pytest.mark.parametrize("shape", MODELS)
def test_models_have_plans(shape: tuple[int, int]) -> None:
    for m in (1, 8, 16):
        assert decode_plan(m, *shape, NESTED, H200) is not None


CLASSES = tuple(product((90, 100, 120), (torch.bfloat16, torch.float16)))
EVERY = pytest.param(True, marks=pytest.mark.compile_all, id="all")


@pytest.mark.parametrize("every", [pytest.param(False, id="of each class"), EVERY])
@pytest.mark.parametrize(("capability", "dtype"), CLASSES)
def test_compiles(capability: int, dtype: torch.dtype, every: bool, tmp_path: Path) -> None:
    """Plans of some models; without `every` one of each class, spread over targets and dtypes."""
    properties = DeviceProperties("cuda", capability, 132, 232448)
    shapes = (*MODELS[:4], (21504, 5376), (28672, 4096), (16384, 2048), (3584, 18944))
    plans = {decode_plan(m, *shape, NESTED, properties) for m in (1, 16, 32, 64) for shape in shapes} - {None}
    plans |= {decode_plan(8, *shape, NESTED, properties, parts) for parts in (2, 3) for shape in shapes[2:]} - {None}
    cases = [(plan, scales) for plan in plans for scales in (NESTED, FLAT)]
    for scales in SCALES[2:]:
        cases += [
            (decode_plan(m, n, k, scales, properties), scales) for m, n, k in ((1, 28672, 8192), (16, 4096, 5120))
        ]
    if not every:
        kinds = {
            (plan.m_tiles, plan.parts > 1, plan.cluster > 1, plan.bulk_scales, plan.window_scales): plan
            for plan in plans
        }
        turn = CLASSES.index((capability, dtype))
        cases = [(kinds[kind], SCALES[turn % 2]) for kind in sorted(kinds)[turn :: len(CLASSES)]]
        cases += [(decode_plan(16, 4096, 5120, scales, properties), scales) for scales in SCALES[2 + turn : 3 + turn]]
    others = cycle((0, 256, 128, 64))  # K, in chunks of 128, 64 and 32 bytes, of which some is missing; 0: none is
    for plan, scales in cases:
        if plan is not None:
            format, bias = "int4" if scales.dtype == torch.bfloat16 else "nf4", plan.cluster % 2 == 0
            k = next(others) or 64 * plan.blocks * plan.cluster
            problem = Problem(dtype, 64, k, format, scales.block_size, scales.dtype, bias=bias)
            settings = constants(problem, plan)
            code = nvrtc.compile_cubin(source(), target(plan, properties), settings)
            path = tmp_path / "decode.cubin"
            path.write_bytes(code)
            assert _stack_bytes(path) <= 128  # a few spilled words, none of them an array


def _stack_bytes(path: Path) -> int:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return max(int(word.removeprefix("STACK:")) for word in usage.split() if word.startswith("STACK:"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_factors_make_rounding_the_codebook_better_than_rounding_weights(format: str, dtype: torch.dtype) -> None:
    values = torch.tensor(FORMATS[format].codebook, dtype=torch.float64)
    factor = factor_of(format, dtype)
    error = ((values * factor).to(dtype).double() / factor - values).square().mean().sqrt()
    scales = torch.linspace(0.5, 1, 1001, dtype=torch.float64).unsqueeze(1)
    rounded = ((values * scales).to(dtype).double() / scales - values).square().mean().sqrt()
    assert error < rounded / 2.5


def test_a_plan_that_leaves_part_of_k_is_not_valid() -> None:
    assert is_valid(DecodePlan(1, 16, 8, 2, 1), 64, 8192, NESTED, H200)
    assert is_valid(DecodePlan(1, 16, 8, 4, 1, steps=2), 64, 8192, NESTED, H200)
    assert not is_valid(
        DecodePlan(1, 16, 8, 4, 1, steps=4), 64, 8192, NESTED, H200
    )  # a quad decodes four blocks' scales
    assert not is_valid(DecodePlan(1, 16, 8, 2, 1), 64, 16384, NESTED, H200)
    assert not is_valid(DecodePlan(1, 16, 8, 2, 2), 64, 8192, NESTED, H200)  # a CTA with nothing to do
    assert not is_valid(DecodePlan(1, 16, 8, 2, 1), 63, 8192, NESTED, H200)
    # Rows whose scales are no multiple of 16 bytes: all of a tile's at once, or not at all.
    assert is_valid(DecodePlan(1, 11, 8, 2, 1, bulk_scales=True), 64, 5376, NESTED, H200)
    assert not is_valid(DecodePlan(1, 11, 8, 2, 1), 64, 5376, NESTED, H200)
    assert not is_valid(DecodePlan(1, 8, 8, 2, 2, bulk_scales=True), 64, 5376, NESTED, H200)
    assert is_valid(DecodePlan(1, 8, 8, 2, 2, window_scales=True), 64, 5376, NESTED, H200)
    assert not is_valid(
        DecodePlan(1, 8, 8, 2, 2, window_scales=True), 64, 5440, NESTED, H200
    )  # a last row would end beyond
    assert not is_valid(DecodePlan(1, 11, 8, 2, 1, bulk_scales=True), 64, 5440, NESTED, H200)
    in_one_piece = DecodePlan(1, 12, 4, 2, 1, bulk_scales=True, bulk_weights=True, experts=32, pairs=32)
    assert is_valid(in_one_piece, 64, 2880, NESTED, H200)
    assert not is_valid(in_one_piece, 64, 3072, NESTED, H200)  # rows of a multiple of 128 bytes lie in the same banks
    assert not is_valid(replace(in_one_piece, experts=0, pairs=0), 64, 2880, NESTED, H200)
    # A warp too many, and rows of scales are no multiple of 16 bytes apart in shared memory.
    assert is_valid(DecodePlan(1, 10, 8, 2, 1), 64, 4096, NESTED, H200)
    assert not is_valid(DecodePlan(1, 9, 8, 2, 1), 64, 4096, NESTED, H200)
    assert is_valid(DecodePlan(1, 8, 8, 2, 1, sum_buffers=1), 64, 4096, NESTED, H200)
    assert not is_valid(DecodePlan(1, 8, 8, 2, 1, sum_buffers=0), 64, 4096, NESTED, H200)
    assert is_valid(DecodePlan(1, 8, 8, 2, 1, first_stages=2), 64, 4096, NESTED, H200)
    assert not is_valid(
        DecodePlan(1, 8, 8, 2, 1, first_stages=0), 64, 4096, NESTED, H200
    )  # nothing would ever be asked for
    assert is_valid(DecodePlan(1, 8, 8, 2, 1, joined=2), 64, 4096, GROUPS, H200)
    assert not is_valid(DecodePlan(1, 8, 8, 2, 1, joined=4), 64, 4096, GROUPS, H200)  # other scales than the first
    assert not is_valid(DecodePlan(1, 8, 8, 2, 1, joined=2), 64, 4096, NESTED, H200)
    assert is_valid(DecodePlan(1, 4, 8, 2, 1, resident_ctas=2), 64, 2048, NESTED, H200)
    assert not is_valid(DecodePlan(1, 8, 8, 4, 1, resident_ctas=2), 64, 4096, NESTED, H200)
    assert is_valid(DecodePlan(2, 16, 4, 2, 1, reducers=2), 64, 4096, NESTED, H200)
    assert not is_valid(DecodePlan(1, 8, 8, 2, 1, reducers=2), 64, 4096, NESTED, H200)


def test_registers_are_handed_over_where_there_are_so_many() -> None:
    def valid(warps: int, registers: int, properties: DeviceProperties = H200) -> bool:
        plan = DecodePlan(4, warps, 4, 2, 1, registers=registers)
        return is_valid(plan, 64, 256 * warps, NESTED, properties)

    assert valid(8, 232)
    assert valid(16, 104)
    assert valid(4, 240)
    assert not valid(8, 240)
    assert valid(16, 112)
    assert not valid(16, 120)
    assert not valid(8, 230)
    assert not valid(6, 200)
    assert not valid(8, 232, replace(H200, capability=100))


def test_less_shared_memory_holds_fewer_stages() -> None:
    for m, n, k in ((8, 28672, 8192), (8, 4096, 14336), (8, 21504, 5376), (16, 2048, 2048)):
        plan, less = (
            decode_plan(m, n, k, NESTED, properties) for properties in (H200, replace(H200, shared_memory=101376))
        )
        assert plan is not None
        assert less is not None
        assert less.shared_bytes(NESTED) <= 101376 < plan.shared_bytes(NESTED)


@pytest.mark.parametrize("k", [64, 128, 192, 256, 960, 4096, 5376])
def test_chunks_of_a_row(k: int) -> None:
    """A row of W is a whole number of them: the last one of the last row ends where W ends."""
    chunk = weight_chunk(k)
    assert chunk in (32, 64, 128)
    assert k // 2 % chunk == 0


@given(
    m=st.integers(1, 64),
    n=st.integers(1, 2000).map(lambda n: 4 * n),
    k=st.integers(1, 256).map(lambda k: 64 * k),
    scales=st.sampled_from(SCALES),
)
def test_a_copy_brings_what_a_stage_has_room_for(m: int, n: int, k: int, scales: Scales) -> None:
    """Boxes of the tensor maps: within what the hardware takes, W's end where W ends, and as many bytes as
    sm90_decode/kernel.cu waits for."""
    plan = decode_plan(m, n, k, scales, H200)
    if plan is None:
        return
    maps: list[tuple[tuple[int, ...], ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "tensor_map", lambda address, *rest: maps.append(rest) or b"")
        nested = 256 if scales.nested else 0
        format = "int4" if scales.dtype in (torch.float16, torch.bfloat16) else "nf4"
        problem = Problem(torch.bfloat16, n, k, format, scales.block_size, scales.dtype, nested)
        decode._described(plan, problem, (0,) * 5)
    assert len(maps) == (1 if plan.bulk_scales or plan.window_scales else 2)
    for sizes, strides, box in maps:
        assert box[0] in SWIZZLES
        assert max(box) <= 256
        assert all(stride % 16 == 0 for stride in strides)
        assert sizes[1] == n
        assert box[1] == ROWS
    (chunk, _, chunks), (row, _), box = maps[0]
    assert chunk * chunks == row == k // 2
    assert math.prod(box) * plan.steps == ROWS * plan.blocks * 32
    for (row, _), _, box in maps[1:]:
        assert row == scales.bytes_of(k // 64)
        assert plan.scale_row(scales) % box[0] == 0
        assert plan.scale_row(scales) - box[0] < scales.bytes_of(plan.blocks) <= plan.scale_row(scales)


@given(
    m=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 2000).map(lambda n: 4 * n), min_size=1, max_size=4),
    k=st.integers(1, 64).map(lambda k: 256 * k),
    nested=st.booleans(),
)
def test_every_group_plan_is_valid(m: int, sizes: list[int], k: int, nested: bool) -> None:
    scales = NESTED if nested else FLAT
    scale = torch.uint8 if nested else torch.float32
    group = [Problem(torch.bfloat16, n, k, "nf4", 64, scale, 256 if nested else 0) for n in sizes]
    plan = decode.plan_group(m, group, H200)
    if plan is not None:
        assert plan.parts == len(sizes) > 1
        assert all(is_valid(plan, n, k, scales, H200) for n in sizes)
        assert 1 <= m <= 8 * plan.m_tiles
        alone = decode_plan(m, sum(sizes), k, scales, H200)
        assert alone is not None
        assert plan.shared_bytes(scales) == replace(plan, parts=1).shared_bytes(scales) + 1024 * (len(sizes) - 1)


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    text = '#include "config.cuh"\nextern "C" __global__ void f(int* p) { *p = Config::value; }'
    variants = [Variant.of(text, 90, {"value": value}) for value in (1, 2)]
    code = nvrtc.cubin(variants[0])
    (entry,) = tmp_path.iterdir()
    monkeypatch.setattr(nvrtc, "compile_cubin", lambda *_: pytest.fail("compiled although it is cached"))
    assert nvrtc.cubin(variants[0]) == code
    monkeypatch.undo()
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    for damage in (entry.read_bytes()[:-7], b"", entry.read_bytes()[:40] + b"x" + entry.read_bytes()[41:]):
        entry.write_bytes(damage)
        assert nvrtc.cubin(variants[0]) == code
        assert len(list(tmp_path.iterdir())) == 1
    assert nvrtc.cubin(variants[1]) != code
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "entry" / "not" / "a" / "directory"))
    (tmp_path / "entry").write_text("a file")
    assert nvrtc.cubin(variants[0]) == code


def test_every_batch_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x; in a cluster one without any would wait for ever. Nothing is launched before that is known."""
    launched: list[int] = []
    arguments = SimpleNamespace(set=lambda *given: launched.append(given[-2]), parameters=None)
    monkeypatch.setattr(decode, "_prepare", lambda *_: (lambda stream, parameters: None, arguments))
    problem = Problem(torch.bfloat16, 2048, 2048, "nf4", 64, torch.uint8, 256)
    plan = decode_plan(64, 2048, 2048, NESTED, H200)
    assert plan is not None
    assert plan.batches == 2
    multiply = decode.bind(torch.device("cuda", 0), 64, problem, (0,) * 5, plan)
    for m in (33, 64, 128, 0):
        multiply(0, 0, 0, 0, m)
    assert launched == [33, 64, 64, 64]
    for m in (1, 32, 65, 96):
        with pytest.raises(ValueError, match=f"got {m} rows of x: this plan is for 33 to 64 at a time"):
            multiply(0, 0, 0, 0, m)
    assert len(launched) == 4


def test_source_that_does_not_compile_says_so() -> None:
    with pytest.raises(Exception, match=r"undefined|identifier"):
        nvrtc.compile_cubin('extern "C" __global__ void f() { g(); }', 90, {})


@pytest.fixture
def _as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "properties_of", lambda index: H200)


@pytest.mark.usefixtures("_as_on_an_h200")
def test_what_the_kernel_is_for() -> None:
    x, weight = torch.randn(65, 1024).bfloat16(), torch.randn(64, 1024).bfloat16()
    q = hb.quantize(weight)
    for rows, columns in ((1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4), (33, 8), (64, 8)):
        plan = plan_for(decode, x[:rows], q, None, False)
        assert plan.m_tiles * plan.batches == columns
        assert plan_for(decode, x[:rows], q, None, True) == plan_for(decode, x[:1], q, None, False)
    assert plan_for(decode, x, q, None, True) is not None
    for no in (
        (x, q, None, False),
        (x[:0], q, None, False),
        (x[:1].float(), q, None, False),
        (x[:1], hb.quantize(weight, block_size=32), None, False),
        (x[:1], hb.quantize(weight, block_size=4096), None, False),  # rows end within a block
        (x[:1], hb.quantize(weight, "int4", group_size=32), None, False),
    ):
        assert plan_for(decode, *no) is None


def test_source_refuses_sizes_that_are_not_its_own() -> None:
    plan = decode_plan(1, 4096, 4096, NESTED, H200)
    right = constants(Problem(torch.bfloat16, 4096, 4096, "nf4", 64, torch.uint8, 256), plan)
    with pytest.raises(Exception, match="reckons with other sizes"):
        nvrtc.compile_cubin(source(), 90, right | {"shared_bytes": plan.shared_bytes(NESTED) + 16})
