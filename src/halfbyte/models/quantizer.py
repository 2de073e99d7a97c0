"""transformers' from_pretrained with 4-bit weights of ours: quantized as they are read, saved, loaded again.

Importing this module registers the quantization method "halfbyte" with transformers:

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HalfbyteConfig("nf4"), device_map="cuda")
    model.save_pretrained(folder)                                # loads with from_pretrained(folder), the same bits
    model = AutoModelForCausalLM.from_pretrained(path, config=config_from_bitsandbytes(path))  # bitsandbytes wrote it

While a model loads, its linear layers are transformers' own, on the meta device. Once all the tensors of one's weight
are there, `halfbyte.nn.Linear4bit` takes its place: no layer has a dense weight and a quantized one for longer than it
takes to round it, and a layer that a checkpoint holds dense stays as it is. So it is with experts (experts_loading.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import bitsandbytes, compressed_tensors, gpt_oss
from halfbyte.formats.spec import FORMATS
from halfbyte.formats.weight import FLOAT_DTYPES, QuantizedWeight
from halfbyte.models.experts import dense_module
from halfbyte.nn.experts import PROJECTIONS, Experts4bit
from halfbyte.nn.linear import NAMES, Linear4bit
from halfbyte.ops import dequantize, quantize

OLDEST = "5.10"
try:
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(OLDEST):
        raise ImportError(f"transformers is {transformers.__version__}")
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    from halfbyte.models import experts_loading
    from halfbyte.models.config import METHOD
    from halfbyte.models.config import HalfbyteConfig as HalfbyteConfig
    from halfbyte.models.config import config_from_bitsandbytes as config_from_bitsandbytes
    from halfbyte.models.config import config_from_compressed_tensors as config_from_compressed_tensors
    from halfbyte.models.config import config_from_gpt_oss as config_from_gpt_oss
    from halfbyte.models.experts_tensors import Places
except ImportError as error:
    raise ImportError(
        f"halfbyte.models.quantizer needs transformers >= {OLDEST} ({error}): pip install -U transformers"
    ) from error

# What a checkpoint may hold of a weight, after its name; _zero_point and _g_idx only to be refused by name.
SUFFIXES = (
    *bitsandbytes.SUFFIXES, *compressed_tensors.SUFFIXES, "_zero_point", "_g_idx", *gpt_oss.SUFFIXES, "",
)  # fmt: skip


class HalfbyteQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers asks, step by step, while from_pretrained loads a model with a HalfbyteConfig."""

    requires_calibration = False
    is_compileable = True
    is_trainable = True  # gradients flow to x and bias, which is what adapters need

    def __init__(self, quantization_config: HalfbyteConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.targets: frozenset[str] = frozenset()  # layers that the model could hold in 4 bits
        self.experts: frozenset[str] = frozenset()  # modules of dense experts, to be quantized or read in 4 bits
        self.places = Places()
        self.regrouped: set[str] = set()  # what model-specific conversions made before it was quantized

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    # Before anything is read.

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse to offload; also asked for the map that transformers infers of "auto"."""
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else {device_map}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "device_map offloads part of the model to the CPU or the disk, which halfbyte's layers do not support; "
                "give it devices with enough memory, or device_map='cpu' for all of it"
            )
        self.places.device_map = device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype is not None and dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype is {dtype}; torch.float16, torch.bfloat16 and torch.float32 are accepted")
        return dtype

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Leave room for the dense tensor that is being quantized."""
        return max_memory if self.pre_quantized else {key: size * 0.9 for key, size in max_memory.items()}

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        layers = {name: m for name, m in model.named_modules() if type(m) in (nn.Linear, Conv1D)}
        fp32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
        skipped = fp32
        if not self.pre_quantized:  # else the checkpoint says which weights are quantized
            given = self.quantization_config.modules_to_not_convert
            skipped = self.get_modules_to_not_convert(model, given, fp32, add_default_skips=True)
        layers = {name: layer for name, layer in layers.items() if should_convert_module(name, skipped)}
        self.targets = frozenset(layers)
        if self.pre_quantized or self.quantization_config.experts:
            settings = None if self.pre_quantized else self.quantization_config.experts_settings
            self.experts = experts_loading.expect(model, partial(should_convert_module, patterns=skipped), settings)
        if self.pre_quantized:
            return
        if not layers and not self.experts:
            raise ValueError(f"{type(model).__name__} has no linear layer to quantize; load it without this config")
        spec, size = FORMATS[self.quantization_config.format], self._size
        misfits = [f"{name} (K = {sides(m)[1]})" for name, m in layers.items() if spec.along_k and sides(m)[1] % size]
        if misfits:
            raise ValueError(
                f"{spec.size_name} {size} does not divide the input features of {len(misfits)} layers: "
                f"{', '.join(misfits[:5])}{', ...' if len(misfits) > 5 else ''}; take a smaller {spec.size_name}, "
                "another format, or name them in modules_to_not_convert"
            )

    @property
    def _size(self) -> int:
        """How many weights of a linear layer share a scale."""
        config = self.quantization_config
        size: int = config.group_size or config.block_size
        return size

    # While tensors arrive.

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        name, _, parameter = param_name.rpartition(".")
        return (parameter == "weight" and name in self.targets) or (parameter in PROJECTIONS and name in self.experts)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of a weight, its share of the scales included."""
        size: float = param.element_size()
        if not self.param_needs_quantization(model, param_name):
            return size
        config: HalfbyteConfig = self.quantization_config
        is_linear = param_name.rpartition(".")[0] in self.targets
        settings = config.settings if is_linear else config.experts_settings
        spec = FORMATS[settings["format"]]
        scale: float = size if spec.scale_dtype is None else 1 if settings["nested"] or spec.has_exponents else 4
        weights: int = settings[spec.size_name]
        return 0.5 + scale / weights

    def get_quantize_ops(self) -> Any:
        return Quantize(self)

    def get_weight_conversions(self) -> list[Any]:
        """What gathers the tensors of each weight of a quantized checkpoint: one converter for each last name."""
        if not self.pre_quantized:
            return []
        # The longest name first: "weight" would match the beginning of all the others.
        suffixes = sorted(SUFFIXES, key=len, reverse=True)
        names = sorted({name.rpartition(".")[2] for name in self.targets})
        return [
            WeightConverter([re.escape(f"{name}.weight{s}") for s in suffixes], f"{name}.weight", [Assemble()])
            for name in names
        ]

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Ours come first: those of the model are for dense tensors, and take packed ones for such."""
        conversions = [*self.get_weight_conversions(), *weight_conversions]
        if not self.experts:
            return conversions
        settings = self.quantization_config.experts_settings
        return [
            *experts_loading.converters(self.experts, conversions, settings, self.pre_quantized, self.places),
            *conversions,
        ]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """None, which is to say as in the file, for the tensors of a weight: casting would change scales and bytes."""
        if is_ours(converter):
            return None
        return super().get_new_dtype(converter, param, dtype)

    # Once all are there.

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module._non_persistent_buffers_set.update(NAMES)
        if format := experts_loading.settle(model):
            same = format == self.quantization_config.format
            self.quantization_config.experts = True if same else format
        # Saving undoes what the model's conversions did when loading. Ours are no such thing, and 4-bit weights cannot
        # be glued together again: they keep the names and shapes that they have in the model.
        conversions = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [c for c in conversions if not (is_ours(c) or self._cannot_undo(c))]
        return model

    def _cannot_undo(self, conversion: Any) -> bool:
        return isinstance(conversion, WeightConverter) and not self.regrouped.isdisjoint(conversion.target_patterns)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, Linear4bit):
                with torch.device("meta"):
                    dense = nn.Linear(module.in_features, module.out_features, bias=False)
                dense.weight = nn.Parameter(dequantize(module.weight, dtype), requires_grad=False)
                dense.register_parameter("bias", module.bias)
                model.set_submodule(name, dense.train(module.training))
            elif isinstance(module, Experts4bit):
                model.set_submodule(name, dense_module(module, dtype))
        return model


class Quantize(ConversionOps):  # type: ignore[misc]
    """Round each dense weight that arrives, put the 4-bit layer in place, and let go of the weight."""

    def __init__(self, quantizer: HalfbyteQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: Any, missing_keys: set[str] | None, target_patterns: Any, **_: Any
    ) -> dict[str, Any]:
        others = {}
        for key, given in input_dict.items():
            tensor = given[0] if isinstance(given, list) else given
            if not self.quantizer.param_needs_quantization(model, key):
                others[key] = tensor
                continue
            path, name = key.rsplit(".", 1)
            module = model.get_submodule(path)
            if path in self.quantizer.experts:  # merged as the model's own conversions do
                self.quantizer.regrouped.update(target_patterns)
                settings = self.quantizer.quantization_config.experts_settings
                experts_loading.round_stack(model, path, name, tensor, settings, missing_keys)
                continue
            if tuple(tensor.shape) != tuple(module.weight.shape):
                raise ValueError(f"{key!r} has shape {list(tensor.shape)}; the model has {list(module.weight.shape)}")
            weight = tensor.T if isinstance(module, Conv1D) else tensor
            self.quantizer.regrouped.update(target_patterns)
            put(model, key, quantize(weight, **self.quantizer.quantization_config.settings), missing_keys)
        return others


class Assemble(ConversionOps):  # type: ignore[misc]
    """Make a 4-bit layer of the tensors that a checkpoint holds of its weight."""

    # transformers copies an operation for every weight: nothing is kept in it.

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, missing_keys: set[str] | None, **_: Any
    ) -> dict[str, Any]:
        name = full_layer_name.rpartition(".")[2]
        tensors = {}
        for pattern, given in input_dict.items():
            key = name + re.sub(r"\\(.)", r"\1", pattern).rpartition(f".{name}")[2]
            tensors[key] = given[0] if isinstance(given, list) else given
        if tensors.keys() == {name}:  # this one is dense
            return {full_layer_name: tensors[name].to(model.get_parameter(full_layer_name).dtype)}
        if f"{name}_blocks" in tensors:
            q = replace(gpt_oss.from_tensors(name, tensors), dtype=model.get_parameter(full_layer_name).dtype)
        else:
            library = compressed_tensors if f"{name}_packed" in tensors else bitsandbytes
            q = library.from_tensors(name, tensors)
        module = model.get_submodule(full_layer_name.rpartition(".")[0])
        if q.shape != sides(module):
            raise ValueError(f"{full_layer_name!r} has shape {list(q.shape)}; the model has {list(sides(module))}")
        put(model, full_layer_name, q, missing_keys)
        return {}


def put(model: Any, key: str, q: QuantizedWeight, missing_keys: set[str] | None) -> None:
    """Replace the layer whose weight is called `key`, keeping its bias, which may be there already or not yet."""
    name = key.rpartition(".")[0]
    dense = model.get_submodule(name)
    layer = Linear4bit.from_quantized(q, dense.bias).train(dense.training)
    # transformers gives new memory to all non-persistent buffers after loading, for the model to fill them again. These
    # are no such buffers; they are called so afterwards, since the layer itself writes them to state_dicts.
    layer._non_persistent_buffers_set.clear()
    # Nor are there weights to draw at random, neither for the model nor for a block that reaches into its layers.
    for flagged in (layer, layer.weight):
        flagged.__dict__["_is_hf_initialized"] = True
    model.set_submodule(name, layer)
    if missing_keys is not None:
        missing_keys.discard(key)


def sides(layer: Any) -> tuple[int, int]:
    """N and K."""
    n, k = layer.weight.shape
    return (k, n) if isinstance(layer, Conv1D) else (n, k)


def is_ours(conversion: Any) -> bool:
    steps = getattr(conversion, "operations", ())
    return any(isinstance(step, Assemble) or experts_loading.is_ours(step) for step in steps)


register_quantization_config(METHOD)(HalfbyteConfig)
register_quantizer(METHOD)(HalfbyteQuantizer)
