"""Sleep mode: what vLLM loses while it sleeps is only what a reload brings back.

vLLM's CPU build does not sleep. On a GPU it loads weights into a pool of its own, by a context manager that routes the
allocations of the current thread, and at level 2 lets go of what is in it; the addresses stay. `Pool` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

import halfbyte as hb
from halfbyte.formats.layouts import layout_of
from halfbyte.formats.nested import dynamic_code
from halfbyte.formats.spec import codebook_tensor, exponents_tensor, midpoints_tensor
from halfbyte.kernels.quantize.reference import dynamic_table
from halfbyte.serving.arrivals import parameter_of
from halfbyte.serving.vllm import register
from halfbyte.serving.vllm.linear import HalfbyteLinearMethod

CONSTANTS = (codebook_tensor, exponents_tensor, midpoints_tensor, dynamic_code, dynamic_table)
N, K = 128, 256


class Pool(TorchDispatchMode):
    """Takes what this thread allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_new = function is torch.ops.aten.lift_fresh.default  # all that is seen of torch.tensor
        given = set() if is_new else {storage.data_ptr() for storage in storages((args, kwargs))}
        if function.namespace == "halfbyte":  # what a mode makes of our functions, and would not look into
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        found = function(*args, **(kwargs or {}))
        self.taken += [storage for storage in storages(found) if storage.data_ptr() not in given]
        return found

    def sleep(self) -> None:
        """As level 2 does, and what wakes up is anything."""
        for storage in self.taken:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x3B)  # a small number in any dtype


def storages(of: Any) -> list[torch.UntypedStorage]:
    tensors = [each for each in tree_leaves(of) if isinstance(each, torch.Tensor) and not each.is_meta]
    return [tensor.untyped_storage() for tensor in tensors if tensor.numel()]


@pytest.fixture(autouse=True)
def no_constants_yet() -> Iterator[None]:
    """As in a process that has just started; and none that a failed test has spoilt is left to others."""
    register()
    for constant in CONSTANTS:
        constant.cache_clear()
    with set_current_vllm_config(VllmConfig()):
        yield
    for constant in CONSTANTS:
        constant.cache_clear()


def in_flight(options: str) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return get_quantization_config("halfbyte").from_config_dict_json(options), {"weight": torch.randn(N, K)}


def prequantized(format: str, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Another process has made the weight, with constants of its own."""
    q = hb.quantize(torch.randn(N, K), format, **settings)
    tensors = {key: tensor.clone() for key, tensor in layout_of(format).to_tensors("weight", q).items()}
    for constant in CONSTANTS:
        constant.cache_clear()
    return get_quantization_config("halfbyte").from_config({"quant_method": "halfbyte"}), tensors


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(lambda: in_flight('{"format": "nf4", "nested": true}'), id="nf4 in flight"),
        pytest.param(lambda: in_flight('{"format": "mxfp4"}'), id="mxfp4 in flight"),
        pytest.param(lambda: prequantized("nf4", nested=True), id="nf4"),
        pytest.param(lambda: prequantized("fp4", nested=False), id="fp4"),
        pytest.param(lambda: prequantized("int4", group_size=64), id="int4"),
    ],
)
def test_level_2_and_a_reload(weights: Callable[[], tuple[Any, dict[str, torch.Tensor]]]) -> None:
    quantization, tensors = weights()
    layer: Any = torch.nn.Module()
    layer.tp_rank, layer.tp_size, x = 0, 1, torch.randn(3, K)
    layer.quant_method = method = HalfbyteLinearMethod(quantization.scheme, "model.layer")

    def load() -> None:
        for key, tensor in tensors.items():
            param = getattr(layer, parameter_of(key))
            param.weight_loader(param, tensor.clone())  # a copy from the host to the GPU

    with Pool() as pool:
        method.create_weights(layer, K, [N], K, N, torch.float32)
        record_metadata_for_reloading(layer)
        load()
        method.process_weights_after_loading(layer)
    y, places = method.apply(layer, x), [parameter.data_ptr() for parameter in layer.parameters()]
    pool.sleep()
    assert not torch.equal(method.apply(layer, x), y)
    initialize_layerwise_reload(layer)
    load()
    finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.float32))
    assert torch.equal(method.apply(layer, x), y)
    assert [parameter.data_ptr() for parameter in layer.parameters()] == places
