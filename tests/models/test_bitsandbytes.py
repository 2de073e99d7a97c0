"""One Linear4bit of bitsandbytes, in every dress, and the modules that are left alone."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.formats.bitsandbytes import from_bitsandbytes
from halfbyte.measure.error import relative_error
from halfbyte.models import bitsandbytes as host

bitsandbytes = pytest.importorskip("bitsandbytes")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, N = 192, 96


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"quant_type": "nf4", "compute_dtype": torch.bfloat16, "bias": True} | options
    return bitsandbytes.nn.Linear4bit(K, N, **settings).to(DEVICE)


def exact(module: Any, x: Tensor) -> Tensor:
    weight = hb.dequantize(from_bitsandbytes(module.weight), torch.float32).double()
    bias = None if module.bias is None else module.bias.double()
    return nn.functional.linear(x.double(), weight, bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_types_and_storage(quant_type: str, storage: torch.dtype, nested: bool, bias: bool) -> None:
    module = make(quant_type=quant_type, quant_storage=storage, compress_statistics=nested, bias=bias)
    x = torch.randn(2, 3, K, device=DEVICE, dtype=torch.bfloat16)
    twin = copy.deepcopy(module)
    assert host.apply(module) is None
    y, right = module(x), exact(module, x)
    assert y.shape == (2, 3, N)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, right) <= 1.05 * relative_error(twin(x), right) + 1e-9


@pytest.mark.parametrize("compute", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_those_of_bitsandbytes(given: torch.dtype, compute: torch.dtype | None) -> None:
    module = make(compute_dtype=compute)
    x = torch.randn(4, K, device=DEVICE).to(given)
    twin = copy.deepcopy(module)
    host.apply(module)
    ours, theirs, right = module(x), twin(x), exact(module, x)
    assert ours.dtype == theirs.dtype == given
    assert module.compute_dtype == twin.compute_dtype
    assert relative_error(ours, right) <= 1.05 * relative_error(theirs, right) + 1e-6
    assert module.bias.dtype == torch.float32  # bitsandbytes casts the parameter itself; we do not


def test_gradients_are_those_of_the_dense_weight() -> None:
    module = make()
    module.bias.requires_grad_()
    host.apply(module)
    x = torch.randn(5, K, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(5, N, device=DEVICE, dtype=torch.bfloat16)
    module(x).backward(upstream)
    weight = hb.dequantize(from_bitsandbytes(module.weight), torch.bfloat16)
    assert torch.equal(x.grad, upstream @ weight)
    torch.testing.assert_close(module.bias.grad, upstream.sum(0).float(), rtol=1e-2, atol=1e-2)
    assert module.weight.grad is None


def test_a_weight_that_is_replaced_is_seen() -> None:
    module, other = make(), make()
    host.apply(module)
    x = torch.randn(2, K, device=DEVICE, dtype=torch.bfloat16)
    first = module(x)
    with torch.no_grad():
        other.weight = bitsandbytes.nn.Params4bit(torch.randn(N, K), quant_type="fp4").to(DEVICE)
    module.weight = other.weight
    assert relative_error(module(x), exact(module, x)) < 5e-3
    assert not torch.equal(module(x), first)
    module.weight.data = module.weight.data.flip(0).contiguous()  # the same object, other memory
    assert relative_error(module(x), exact(module, x)) < 5e-3


def test_a_dense_weight_put_in_its_place_goes_to_bitsandbytes() -> None:
    module = make()
    host.apply(module)
    module.weight = nn.Parameter(torch.randn(N, K), requires_grad=False)
    module.quant_state = None
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever bitsandbytes says of it
        module(torch.randn(2, K, device=DEVICE, dtype=torch.bfloat16))


def test_no_memory_outlives_a_weight() -> None:
    import weakref

    module = make()
    host.apply(module)
    module(torch.randn(2, K, device=DEVICE, dtype=torch.bfloat16))
    gone = weakref.ref(module.weight.quant_state)
    module.weight = make().weight
    module.quant_state = module.weight.quant_state
    assert gone() is None


def test_modules_that_are_left_alone() -> None:
    unquantized = bitsandbytes.nn.Linear4bit(K, N)
    assert "not quantized yet" in str(host.apply(unquantized))
    assert "without memory" in str(host.apply(bitsandbytes.nn.Linear4bit(K, N, device="meta")))
    foreign = make()
    foreign.forward = lambda x: x
    assert "other code has replaced it" in str(host.apply(foreign))
    assert foreign.forward(3) == 3
    double = make(compute_dtype=torch.float64)
    assert "compute_dtype is torch.float64" in str(host.apply(double))
    turned = make()
    turned.weight.quant_state.shape = torch.Size((K, N))
    assert "not [96, 192]" in str(host.apply(turned))
    for module in (unquantized, double, turned):
        assert "forward" not in vars(module)
    assert not host.supports(nn.Linear(2, 2))
    assert not host.supports(hb.nn.Linear4bit(64, 64))


def test_under_hooks_of_accelerate() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    module = make()
    twin = copy.deepcopy(module)
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device=DEVICE))
    assert host.apply(module) is None
    x = torch.randn(2, K, device=DEVICE, dtype=torch.bfloat16)
    host.apply(twin)
    assert torch.equal(module(x), twin(x))
    host.undo(module)
    assert not host.is_applied(module)
    hooks.remove_hook_from_module(module)
    assert module.forward.__func__ is bitsandbytes.nn.Linear4bit.forward
    offloaded = make()
    hooks.add_hook_to_module(offloaded, hooks.AlignDevicesHook(execution_device=DEVICE, offload=True))
    assert "offloaded" in str(host.apply(offloaded))


@pytest.mark.skipif(DEVICE != "cpu", reason="bitsandbytes repacks for CPUs alone")
def test_a_weight_that_bitsandbytes_has_repacked() -> None:
    module = make()
    if not getattr(module, "support_avx512bf16_for_cpu", False):
        pytest.skip("this CPU has no AVX512-BF16")
    x = torch.randn(2, K, dtype=torch.bfloat16)
    module.eval()(x)
    assert "repacked" in str(host.apply(module))
    late = make().eval()
    host.apply(late)
    assert relative_error(late(x), exact(late, x)) < 5e-3
    assert not getattr(late.weight.quant_state, "packing_format_for_cpu", False)
