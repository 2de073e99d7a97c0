"""Unsloth's two 4-bit functions: in a stand-in of the same signatures, and in the files of Unsloth where it is."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.measure.error import relative_error
from halfbyte.models import bitsandbytes as layers
from halfbyte.models import unsloth as host

bitsandbytes = pytest.importorskip("bitsandbytes")
F = bitsandbytes.functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, N = 192, 96
UNSLOTH = find_spec("unsloth")  # found without importing it: that asks for a GPU

# Of Unsloth's kernels/utils.py and kernels/fast_lora.py, the names, signatures and ways from one to the other.
UTILS = """
import torch

calls = []

def fast_dequantize(W, quant_state = None, out = None, use_global_buffer = False):
    calls.append("fast_dequantize")
    return W if quant_state is None else ("original", quant_state, out, use_global_buffer)

def fast_gemv(X, W, quant_state, out = None):
    calls.append("fast_gemv")
    return torch.matmul(X, W, out = out) if quant_state is None else ("original", quant_state, out)

def fast_linear_forward(proj, X, temp_lora = None, out = None):
    W = proj.weight
    if X.shape[:2] == (1, 1):
        return fast_gemv(X, W, W.quant_state, out = out)
    return torch.matmul(X, fast_dequantize(W.t(), W.quant_state, use_global_buffer = True), out = out)

def matmul_lora(X, W, W_quant, A, B, s, out = None):
    return torch.matmul(X, fast_dequantize(W.t(), W_quant, use_global_buffer = True)) + X @ A.t() @ B.t() * s
"""
FAST_LORA = """
import torch
from .utils import fast_dequantize, matmul_lora

class LoRA_W(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, W, W_quant, A, B, S):
        ctx.save_for_backward(A, B, X)
        ctx.others = W, W_quant, S
        return matmul_lora(X, W, W_quant, A, B, S)

    @staticmethod
    def backward(ctx, dY):
        (A, B, X), (W, W_quant, S) = ctx.saved_tensors, ctx.others
        W = fast_dequantize(W.t(), W_quant)
        d_A, d_B = (dY @ B).flatten(0, 1).T @ X.flatten(0, 1), dY.flatten(0, 1).T @ (X @ A.T).flatten(0, 1)
        return dY @ W.t() + dY @ B @ A * S, None, None, d_A * S, d_B * S, None
"""


class Hollow(ModuleType):
    """A module that has every name, for what Unsloth's files import and these tests never reach."""

    __path__: list[str] = []  # noqa: RUF012 - it passes for a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def real_file(name: str) -> ModuleType:
    """One module of Unsloth's kernels, without the package around it."""
    assert UNSLOTH is not None
    assert UNSLOTH.submodule_search_locations is not None
    folder = Path(next(iter(UNSLOTH.submodule_search_locations))) / "kernels"
    file = spec_from_file_location(f"unsloth.kernels.{name}", folder / f"{name}.py")
    assert file is not None
    assert file.loader is not None
    module = module_from_spec(file)
    sys.modules[module.__name__] = module
    file.loader.exec_module(module)
    return module


@pytest.fixture(params=["stand-in", "unsloth"])
def kernels(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The modules `utils` and `fast_lora`. Afterwards all is as it was."""
    before = set(sys.modules)
    if request.param == "unsloth":
        if UNSLOTH is None:
            pytest.skip("Unsloth is not installed")
        version = pytest.importorskip("packaging.version").Version
        for name in ("unsloth_zoo", "unsloth_zoo.utils"):
            monkeypatch.setitem(sys.modules, name, Hollow(name))
        sys.modules["unsloth_zoo.utils"].Version = lambda text: version(str(text))  # type: ignore[attr-defined]
    for name in ("unsloth", "unsloth.kernels"):
        monkeypatch.setitem(sys.modules, name, Hollow(name))
    names = {"utils": UTILS, "fast_lora": FAST_LORA}
    if request.param == "stand-in":
        for name, source in names.items():
            module = ModuleType(f"unsloth.kernels.{name}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            module.__package__ = "unsloth.kernels"
            exec(source, module.__dict__)
    else:
        files = ("fp8", "geglu", "indexing", "int4_packed", "nvfp4", "rms_layernorm", "swiglu")
        siblings = ["bnb_availability", "device_type", *(f"kernels.{name}" for name in files)]
        for sibling in siblings:
            monkeypatch.setitem(sys.modules, f"unsloth.{sibling}", Hollow(f"unsloth.{sibling}"))
        device: Any = sys.modules["unsloth.device_type"]
        device.DEVICE_TYPE, device.DEVICE_COUNT, device.is_hip = "cuda", 1, lambda: False
        sys.modules["unsloth.bnb_availability"].native_kernels_ready = lambda *_: False  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            if DEVICE == "cpu":  # it asks for the first GPU and its stream on import
                patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
                patch.setattr(torch.cuda, "device_count", lambda: 1)
                patch.setenv("UNSLOTH_BNB_TRITON", "0")  # and for what it can do
            for name in names:
                real_file(name)
    yield tuple(sys.modules[f"unsloth.kernels.{name}"] for name in names)  # type: ignore[misc]
    host.undo_in_library()
    for name in set(sys.modules) - before:
        if name.startswith("unsloth"):
            del sys.modules[name]


@pytest.fixture
def replaced(kernels: Any) -> Any:
    host.apply_to_library()
    return kernels[0]


def quantized(
    dtype: torch.dtype = torch.bfloat16, nested: bool = True, storage: torch.dtype = torch.uint8, kind: str = "nf4"
) -> tuple[Tensor, Any]:
    torch.manual_seed(0)
    weight = torch.randn(N, K, device=DEVICE, dtype=dtype)
    packed, state = F.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, quant_storage=storage)
    return packed, state


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantize_gives_the_bits_of_bitsandbytes(
    replaced: Any, dtype: torch.dtype, nested: bool, storage: torch.dtype, kind: str
) -> None:
    packed, state = quantized(dtype, nested, storage, kind)
    right = F.dequantize_4bit(packed, state)
    for _ in range(2):  # the second time from what is kept with the state
        dense = replaced.fast_dequantize(packed, state)
        assert dense.dtype == dtype
        assert torch.equal(dense, right)
    assert torch.equal(replaced.fast_dequantize(packed.t(), state), right.t())
    assert torch.equal(replaced.fast_dequantize(packed.t(), state, use_global_buffer=True), right.t())
    out = torch.full_like(right, float("nan"))
    assert replaced.fast_dequantize(packed, state, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, right)
    out.fill_(float("nan"))
    replaced.fast_dequantize(packed.t(), quant_state=state, out=out)
    assert torch.equal(out, right)


def test_each_call_has_memory_of_its_own(replaced: Any) -> None:
    packed, state = quantized()
    first = replaced.fast_dequantize(packed, state, None, True)
    second = replaced.fast_dequantize(packed, state, None, True)
    assert first.data_ptr() != second.data_ptr()
    assert not first.is_inference()


def test_a_state_of_old_versions(replaced: Any) -> None:
    packed, state = quantized()
    second = [state.state2.absmax, state.state2.code, state.state2.blocksize, None, None, None, None]
    old = [state.absmax, state.shape, state.dtype, state.blocksize, [state.offset, second], "nf4", state.code]
    assert torch.equal(replaced.fast_dequantize(packed.t(), old), F.dequantize_4bit(packed, state).t())
    x = torch.randn(1, 1, K, device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(replaced.fast_gemv(x, packed, old), replaced.fast_gemv(x, packed, state))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gemv(replaced: Any, dtype: torch.dtype) -> None:
    packed, state = quantized(dtype)
    x = torch.randn(1, 1, K, device=DEVICE, dtype=dtype, requires_grad=True)
    right = x.double() @ F.dequantize_4bit(packed, state).double().T
    y = replaced.fast_gemv(x, packed, state)
    assert y.shape == (1, 1, N)
    assert y.dtype == dtype
    assert not y.requires_grad
    assert relative_error(y, right) < 5e-3
    buffer = torch.full((1, 1, 2 * N), float("nan"), device=DEVICE, dtype=dtype)
    out = buffer[:, :, :N]
    assert replaced.fast_gemv(x, packed, state, out=out) is out
    assert torch.equal(out, y)
    assert buffer[:, :, N:].isnan().all()


def test_a_weight_that_is_replaced_is_seen(replaced: Any) -> None:
    packed, state = quantized()
    replaced.fast_dequantize(packed, state)
    other = packed.flip(0).contiguous()
    assert torch.equal(replaced.fast_dequantize(other, state), F.dequantize_4bit(other, state))
    state.absmax = state.absmax.flip(0).contiguous()
    assert torch.equal(replaced.fast_dequantize(other, state), F.dequantize_4bit(other, state))


def test_without_a_state_the_original_is_called(replaced: Any) -> None:
    weight, x = torch.randn(K, N), torch.randn(1, 1, K)
    assert replaced.fast_dequantize(weight) is weight
    assert replaced.fast_dequantize(weight, None, None) is weight
    assert torch.equal(replaced.fast_gemv(x, weight, None), torch.matmul(x, weight))


@pytest.mark.parametrize("kernels", ["stand-in"], indirect=True)
def test_other_formats_go_to_the_original(replaced: Any) -> None:
    x = torch.randn(1, 1, K, device=DEVICE, dtype=torch.bfloat16)
    packed, state = quantized()
    eight, of_eight = F.quantize_blockwise(torch.randn(N, K, device=DEVICE))
    scale = torch.ones(N, 1)
    for weight, other in [(eight, of_eight), (torch.empty(N, K, dtype=torch.float8_e4m3fn), scale), (packed, object())]:
        assert replaced.fast_dequantize(weight, other, use_global_buffer=True) == ("original", other, None, True)
        assert replaced.fast_gemv(x, weight, other) == ("original", other, None)
    for rows in (x.half(), x.expand(1, 2, K)):
        assert replaced.fast_gemv(rows, packed, state)[0] == "original"


def test_unsloths_own_functions_reach_it(replaced: Any, kernels: Any) -> None:
    utils, fast_lora = kernels
    layer = bitsandbytes.nn.Linear4bit(K, N, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16).to(DEVICE)
    layer.weight.quant_state.dtype = torch.bfloat16
    weight = F.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    for shape in [(1, 1, K), (3, 1, K)]:
        x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        with torch.no_grad():
            y = utils.fast_linear_forward(layer, x)
        assert relative_error(y, x.double() @ weight.double().T) < 5e-3
    x = torch.randn(2, 5, K, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    a = torch.randn(4, K, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(N, 4, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(2, 5, N, device=DEVICE, dtype=torch.bfloat16)
    y = fast_lora.LoRA_W.apply(x, layer.weight, layer.weight.quant_state, a, b, 0.5)
    y.backward(upstream)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, a, b)]
    right = exact[0] @ weight.double().T + exact[0] @ exact[1].T @ exact[2].T * 0.5
    right.backward(upstream.double())
    assert relative_error(y.detach(), right.detach()) < 1e-2
    for ours, reference in zip((x, a, b), exact, strict=True):
        assert relative_error(ours.grad, reference.grad) < 2e-2
    assert "fast_dequantize" not in getattr(utils, "calls", [])
    layers.undo(layer)
    assert not hasattr(layer.weight.quant_state, layers.ATTRIBUTE)


@pytest.mark.usefixtures("no_other_model")
def test_names_are_replaced_for_as_long_as_a_model_is_accelerated(kernels: Any) -> None:
    utils, fast_lora = kernels
    originals = utils.fast_dequantize, utils.fast_gemv
    models = [bitsandbytes.nn.Linear4bit(K, N, quant_type="nf4").to(DEVICE) for _ in range(2)]
    for model in models:
        hb.accelerate(model)
        assert utils.fast_dequantize is fast_lora.fast_dequantize is host.fast_dequantize
        assert utils.fast_gemv is host.fast_gemv
    hb.restore(models[0])
    assert utils.fast_gemv is host.fast_gemv
    hb.restore(models[1])
    assert (utils.fast_dequantize, utils.fast_gemv) == originals
    assert fast_lora.fast_dequantize is originals[0]


def test_without_unsloth_nothing_happens() -> None:
    assert host.HOME not in sys.modules
    host.apply_to_library()
    host.undo_in_library()
    assert isinstance(hb.accelerate(nn.Linear(2, 2)).modules, tuple)
