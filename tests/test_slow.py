"""Nothing is slow in silence: one warning a process for each reason, with the command that mends it."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpus import H200, MI300X

import halfbyte as hb
from halfbyte import eager
from halfbyte.kernels.common import compiler, slow
from halfbyte.kernels.common.device import DeviceProperties, properties_for
from halfbyte.kernels.linear import cuda, reach
from halfbyte.kernels.linear.problem import Problem

WEIGHT = Problem(torch.bfloat16, 4096, 4096, "nf4", 64, torch.uint8, 256)
CACHES = (slow.no_kernels, eager.backend, reach.without_kernels, reach.without_tensor_cores)


@pytest.fixture(autouse=True)
def _nothing_told_yet() -> Iterator[None]:
    before = set(slow._told)
    slow._told.clear()
    for cached in CACHES:
        cached.cache_clear()
    yield
    slow._told.update(before)
    for cached in CACHES:
        cached.cache_clear()


def test_each_reason_is_told_once() -> None:
    with pytest.warns(UserWarning, match="halfbyte: it rains"):
        slow.warn("the footpath", "it rains")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slow.warn("the footpath", "it pours")
    with pytest.warns(UserWarning, match="halfbyte: it snows"):
        slow.warn("the road", "it snows")


@pytest.mark.parametrize(
    ("device", "missing", "words"),
    [
        ("cpu", "has_numba", "pip install numba"),
        ("cuda", "has_triton", "pip install triton"),
        ("mps", None, "no kernels for mps"),
    ],
)
def test_plain_torch(device: str, missing: str | None, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing is not None:
        assert slow.no_kernels(device) is None or device == "cuda"
        monkeypatch.setattr(slow, missing, lambda: False)
        slow.no_kernels.cache_clear()
    with pytest.warns(UserWarning, match=words):
        module = eager.backend("dequantize", device)
    assert module.__name__.endswith(".reference")


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import torch
import halfbyte as hb
weight, x = (torch.load(path) for path in sys.argv[1:3])
q = hb.quantize(weight)
ranks = hb.token_ranks(x, q, torch.tensor([1, 2, 3]))
torch.save([hb.dequantize(q), hb.linear(x, q), hb.nearest(x, q, 2)[1], ranks], sys.argv[3])
"""


@pytest.mark.slow
def test_results_without_numba_are_the_same(tmp_path: Path) -> None:
    weight, x, paths = torch.randn(64, 128), torch.randn(3, 128), [tmp_path / name for name in ("weight", "x", "found")]
    torch.save(weight, paths[0])
    torch.save(x, paths[1])
    told = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA, *paths], capture_output=True, text=True, check=True)
    assert told.stderr.count("numba is missing") == 1
    dense, product, rows, ranks = torch.load(paths[2])
    q = hb.quantize(weight)
    assert torch.equal(dense, hb.dequantize(q))
    torch.testing.assert_close(product, hb.linear(x, q))
    assert torch.equal(rows, hb.nearest(x, q, 2)[1])
    assert torch.equal(ranks, hb.token_ranks(x, q, torch.tensor([1, 2, 3])))


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "driver", object)
    assert reach.without_kernels(H200) is None
    reach.without_kernels.cache_clear()
    monkeypatch.setattr(compiler, "find", lambda: None)
    reason = str(reach.without_kernels(H200))
    assert "NVRTC, which compiles linear's kernels, is missing" in reason
    assert "pip install nvidia-cuda-nvrtc" in reason
    reach.without_kernels.cache_clear()
    monkeypatch.setattr(cuda, "properties_of", lambda index: H200)
    with pytest.warns(UserWarning, match="NVRTC, which compiles"):
        assert cuda.linear(torch.randn(1, 64), hb.quantize(torch.randn(32, 64)), None, False) is None


@pytest.mark.parametrize(
    ("facts", "changes", "words"),
    [
        (H200, {}, None),
        (H200, {"k": 4090}, "K = 4090 is no multiple of 32"),
        (H200, {"k": 4090, "dtype": torch.float32}, None),
        (H200, {"nested": 128}, "128 nested scales share an absmax"),
        (H200, {"align_packed": 4}, "packed.clone()"),
        (properties_for("sm_75"), {}, None),  # as fp16
        (properties_for("sm_75"), {"k": 4090}, "K = 4090 is no multiple of 32"),
        (properties_for("sm_75"), {"dtype": torch.float16}, None),
        (DeviceProperties("cuda", 70, 80, 98304), {"dtype": torch.float16}, "sm_75"),
    ],
)
def test_shapes_and_gpus(facts: DeviceProperties, changes: dict[str, object], words: str | None) -> None:
    reason = reach.without_tensor_cores(replace(WEIGHT, **changes), facts, False)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_bf16_that_no_row_of_x_may_change() -> None:
    for target, words in (("sm_75", "load the model in float16"), ("sm_80", None)):
        reason = reach.without_tensor_cores(WEIGHT, properties_for(target), True)
        assert (reason is None) if words is None else (reason is not None and words in reason)


def test_scales_that_no_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    q = hb.quantize(torch.randn(32, 64), "mxfp4")
    monkeypatch.setattr(cuda, "properties_of", lambda index: properties_for("sm_75"))
    monkeypatch.setattr(reach, "without_kernels", lambda properties: None)
    for batch_invariant in (False, True):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert cuda.linear(torch.randn(1, 64), q, None, batch_invariant) is None
        words = "for x of 16 bits and K a multiple of 32, so linear writes a dense copy of the weight"
        assert [words in str(one.message) for one in told] == [True] * (not batch_invariant)  # once a process


def test_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a kernel for few rows; for many, the dense weight is the faster way, and nothing has to be told."""
    told = str(reach.without_kernels(MI300X))
    assert "kernel for AMD GPUs takes no stacks of experts, and 64 rows of x at most" in told
    monkeypatch.setattr(cuda, "properties_of", lambda index: MI300X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for m in (1, 64, 65):
            assert cuda.linear(torch.randn(m, 64), hb.quantize(torch.randn(32, 64)), None, False) is None
