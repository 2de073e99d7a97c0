"""INT4 modules of compressed-tensors in a small model that it packed itself, loaded as users load theirs."""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.formats.compressed_tensors import from_compressed_tensors
from halfbyte.measure.error import relative_error
from halfbyte.models import compressed_tensors as host
from halfbyte.models import projections

pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 14  # linear layers of the model, the head aside
EVERYTHING = "Linear"
MLP = "re:.*(gate|up|down)_proj"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def scheme(target: str = EVERYTHING, input_activations: Any = None, **weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = {key: value for key, value in (INT4 | weights).items() if value is not None}
    return QuantizationScheme(
        targets=[target], weights=QuantizationArgs(**weights), input_activations=input_activations
    )


def activations() -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)


def pack(model: Any, *schemes: Any) -> Any:
    """Round the weights of `model` and pack them, as compressed-tensors does it, in place."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    groups = {f"group_{i}": scheme for i, scheme in enumerate(schemes)}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
    )
    for module in host._quantized(model):
        scale = module.weight_scale
        largest = module.weight.detach().abs().reshape(*scale.shape, -1).amax(-1)
        steps = 2 ** (module.quantization_scheme.weights.num_bits - 1) - 1
        scale.data.copy_(largest / steps)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


@pytest.fixture
def load(checkpoint: Path, tmp_path: Path) -> Iterator[Any]:
    """Packs the trained checkpoint with some schemes and loads the result. Afterwards all is restored."""
    loaded = []

    def load(*schemes: Any, **options: Any) -> Any:
        folder = tmp_path / f"packed-{len(loaded)}"
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        compressor = pack(model, *(schemes or [scheme()]))
        model.save_pretrained(folder)
        compressor.update_config(folder)
        loaded.append(again(folder, **options))
        return loaded[-1]

    yield load
    for model in loaded:
        hb.restore(model)


def again(folder: Path, **options: Any) -> Any:
    settings = {"dtype": torch.bfloat16, "device_map": {"": DEVICE}} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(ids.to(model.device)).logits
    return result


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if host.supports(module)]


def weight(module: Any, dtype: torch.dtype) -> Tensor:
    parts = (module.weight_packed.data, module.weight_scale.data, module.weight_shape.data)
    return hb.dequantize(from_compressed_tensors(*parts), dtype)


def in_fp32(model: Any) -> Any:
    """A copy of a packed model with the weights that its bytes stand for, all in fp32."""
    twin = copy.deepcopy(model)
    weights = {path: weight(module, torch.float32) for path, module in twin.named_modules() if host.supports(module)}
    logits(twin, torch.zeros(1, 1, dtype=torch.int64))  # compressed-tensors makes it dense
    nn.Module.float(twin)
    for path, dense in weights.items():
        twin.get_submodule(path).weight.data = dense
    return twin


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_logits_are_as_near_to_fp32_as_those_of_the_dense_model(load: Any, prompts: Tensor, group_size: int) -> None:
    model = load(scheme(group_size=group_size))
    exact = in_fp32(model)
    report = hb.accelerate(model)
    assert len(report.modules) == LAYERS
    assert not report.skipped
    ours = logits(model, prompts)
    twin = copy.deepcopy(model)
    hb.restore(model)
    theirs = logits(model, prompts)  # compressed-tensors has made it dense
    for module in model.modules():
        assert not hasattr(module, "weight_packed")
    right = logits(exact, prompts).double()
    assert relative_error(ours, right) <= 1.02 * relative_error(theirs, right)
    assert torch.equal(logits(twin, prompts), ours)


def test_weights_stay_packed_and_the_state_dict_the_same(load: Any, prompts: Tensor, tmp_path: Path) -> None:
    model = load()
    before = state(model)
    tensors = {
        path: (module.weight_packed, module.weight_scale)
        for path, module in model.named_modules()
        if host.supports(module)
    }
    hb.accelerate(model)
    ours = logits(model, prompts)
    assert same(before, state(model))
    for path, (packed, scale) in tensors.items():
        module = model.get_submodule(path)
        assert module.weight_packed is packed
        q = host.weight_of(module)
        assert q is not None
        assert q.packed.data_ptr() == packed.data_ptr()
        assert q.scale.data_ptr() == scale.data_ptr()
    model.save_pretrained(tmp_path / "saved")
    loaded = again(tmp_path / "saved")
    assert same(before, state(loaded))
    hb.accelerate(loaded)
    assert torch.equal(logits(loaded, prompts), ours)
    hb.restore(loaded)
    hb.restore(model)
    assert same(before, state(model))


def test_restore_leaves_nothing_behind(load: Any, prompts: Tensor) -> None:
    model = load()
    before = [{key: repr(value) for key, value in vars(module).items()} for module in model.modules()]
    hooks = dict(model._forward_pre_hooks)
    hb.accelerate(model)
    assert hb.accelerate(model).modules  # a second time changes nothing
    logits(model, prompts)
    hb.restore(model)
    hb.restore(model)
    assert [{key: repr(value) for key, value in vars(module).items()} for module in model.modules()] == before
    assert dict(model._forward_pre_hooks) == hooks
    assert not any(map(host.is_applied, model.modules()))


def test_a_layer_in_every_dress(load: Any) -> None:
    """One row and many, autocast, gradients, a compiled call."""
    model = load()
    hb.accelerate(model)
    layer = model.model.layers[0].mlp.down_proj
    dense = weight(layer, torch.float32).double()
    for sides in [(1,), (2, 3)]:
        x = torch.randn(*sides, layer.in_features, device=DEVICE, dtype=torch.bfloat16)
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert relative_error(y, x.double() @ dense.T) < 5e-3
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), y)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(layer(x.float()), y)
    x.requires_grad_()
    upstream = torch.randn_like(y)
    layer(x).backward(upstream)
    assert relative_error(x.grad, upstream.double() @ dense) < 5e-3


def test_weights_that_are_moved_or_replaced_are_seen(load: Any) -> None:
    model = load()
    hb.accelerate(model)
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, layer.in_features, device=DEVICE, dtype=torch.bfloat16)
    first = layer(x)
    layer.weight_packed.data = layer.weight_packed.data.flip(0).contiguous()  # the same object, other memory
    layer.weight_scale.data = layer.weight_scale.data.flip(0).contiguous()
    assert torch.equal(layer(x), first.flip(-1))
    layer.weight_scale = nn.Parameter(layer.weight_scale.data * 2, requires_grad=False)
    assert torch.equal(layer(x), 2 * first.flip(-1))
    twin = copy.deepcopy(layer)
    assert host.is_applied(twin)
    twin.weight_packed.data.zero_()
    assert relative_error(twin(x), x.double() @ weight(twin, torch.float32).double().T) < 5e-3
    assert torch.equal(layer(x), 2 * first.flip(-1))


def test_a_layer_made_dense_under_our_hands(load: Any) -> None:
    from compressed_tensors.compressors import decompress_module

    model = load()
    hb.accelerate(model)
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, layer.in_features, device=DEVICE, dtype=torch.bfloat16)
    dense = weight(layer, torch.bfloat16)
    layer(x)
    decompress_module(layer)
    assert torch.equal(layer.weight, dense)
    assert torch.equal(layer(x), nn.functional.linear(x, dense))
    assert vars(layer)[host.ATTRIBUTE].q is None  # and the packed bytes are free
    decompress_module(other := model.model.layers[1].mlp.down_proj)
    del other.quantization_scheme  # as later versions do when nothing of them is to remain
    assert other(x).shape == layer(x).shape
    hb.restore(model)
    assert not any(map(host.is_applied, model.modules()))


def test_modules_that_are_left_alone_become_dense_and_the_others_do_not(load: Any, prompts: Tensor) -> None:
    model = load(scheme("re:.*down_proj", input_activations=activations()), scheme())
    report = hb.accelerate(model)
    assert len(report.modules) == LAYERS - 2
    assert all("activations are quantized" in reason for reason in report.skipped.values())
    assert len(report.skipped) == 2
    logits(model, prompts)
    assert sum(hasattr(module, "weight_packed") for module in model.modules()) == LAYERS - 2


def test_two_schemes(load: Any, prompts: Tensor) -> None:
    """Half of the model has 8 bits: it becomes dense at the first forward pass, as without halfbyte."""
    model = load(scheme(MLP), scheme("re:.*[qkvo]_proj", num_bits=8))
    exact = copy.deepcopy(model)
    report = hb.accelerate(model)
    assert len(report.modules) == 6
    assert not report.skipped  # 8-bit modules are no business of ours
    ours = logits(model, prompts)
    assert all("mlp" in path for path, module in model.named_modules() if hasattr(module, "weight_packed"))
    assert torch.equal(logits(model, prompts), ours)
    hb.restore(model)
    theirs = logits(model, prompts)
    assert not any(hasattr(module, "weight_packed") for module in model.modules())
    assert not model._forward_pre_hooks
    assert torch.equal(logits(exact, prompts), theirs)
    right = logits(nn.Module.float(exact), prompts).double()
    assert relative_error(ours, right) <= 1.02 * relative_error(theirs, right)


def test_where_modules_lie_elsewhere_all_becomes_dense(load: Any) -> None:
    """Only compressed-tensors can unpack what accelerate keeps on a disk, and it takes the model as a whole."""
    model = load()
    layers(model)[0]._hf_hook = SimpleNamespace(offload=True)
    report = hb.accelerate(model)
    assert len(report.modules) == LAYERS - 1
    _, hooks, key = next(host._hooked(model))
    hooks[key].original = lambda model, args: seen.append(any(map(host.is_applied, model.modules())))
    seen: list[bool] = []
    hooks[key](model, ())
    assert seen == [False]


def test_reasons(load: Any) -> None:
    model = load()
    layer, *_, last = layers(model)

    def reason(**changes: Any) -> str:
        changed = copy.deepcopy(layer)
        for name, value in changes.items():
            setattr(changed, name, value)
        before = dict(vars(changed))
        result = host.apply(changed)
        assert vars(changed) == before
        return str(result)

    zeros = nn.Parameter(torch.zeros(1), requires_grad=False)
    assert "zero points" in reason(weight_zero_point=zeros)
    assert "zero points" in reason(quantization_scheme=scheme(symmetric=False))
    assert "activation order" in reason(weight_g_idx=zeros)
    weights = SimpleNamespace(num_bits=4, type="int", symmetric=True, actorder="group")  # as older versions have it
    old = SimpleNamespace(weights=weights, input_activations=None, output_activations=None)
    assert "activation order" in reason(quantization_scheme=old)
    assert "activations are quantized" in reason(quantization_scheme=scheme(input_activations=activations()))
    assert "format" in reason(quantization_scheme=scheme(type="float"))
    assert "is dense" in reason(quantization_status="frozen")
    assert "not [1, " in reason(out_features=1)
    assert "other code has replaced it" in reason(forward=lambda x: x)
    assert "meta" in str(host.apply(copy.deepcopy(last).to("meta")))
    assert "channel" in reason(weight_scale=nn.Parameter(layer.weight_scale.data[:, :1].repeat(1, 3)))

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert "other code" in reason(__class__=Other)
    assert not host.supports(nn.Linear(2, 2))
    assert not host.supports(hb.nn.Linear4bit(64, 64))


def test_a_model_that_was_used_before_is_dense_and_says_so(load: Any, prompts: Tensor) -> None:
    model = load()
    logits(model, prompts[:1])
    report = hb.accelerate(model)
    assert not report.modules
    assert len(report.skipped) == LAYERS
    assert all("call accelerate before using it" in reason for reason in report.skipped.values())


def test_under_hooks_of_accelerate(load: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = load()
    layer = layers(model)[0]
    x = torch.randn(2, layer.in_features, device=DEVICE, dtype=torch.bfloat16)
    before = layer.forward.__func__
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device=DEVICE))
    assert host.apply(layer) is None
    assert relative_error(layer(x), x.double() @ weight(layer, torch.float32).double().T) < 5e-3
    host.undo(layer)
    assert not host.is_applied(layer)
    hooks.remove_hook_from_module(layer)
    assert layer.forward.__func__ is before
    hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device=DEVICE, offload=True))
    assert "offloaded" in str(host.apply(layer))


def test_no_memory_outlives_a_model(load: Any, prompts: Tensor) -> None:
    import weakref

    model = load()
    hb.accelerate(model)
    logits(model, prompts[:1])
    layer = layers(model)[0]
    gone = weakref.ref(layer.weight_packed)
    host.undo(layer)
    del layer.weight_packed
    gc.collect()
    assert gone() is None


def test_fused_projections_are_computed_at_once(load: Any, prompts: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of each alone, under autocast too, and not from a weight or in a dtype that is another by then."""
    monkeypatch.setattr(projections, "ON_CPU", True)
    together, calls = projections.linear_group, []

    def linear_group(x: Tensor, weights: Any, *rest: Any, **options: Any) -> Any:
        calls.append(len(weights))
        return together(x, weights, *rest, **options)

    monkeypatch.setattr(projections, "linear_group", linear_group)
    model = load()
    hb.accelerate(model)

    def alone(module: Any, x: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(projections.Group, "compute", lambda *_: None)
            result: Tensor = module(x.clone())
        return result

    ids = prompts[:2, :6].to(model.device)  # no more rows than are computed at once
    for enabled in (False, True):
        calls.clear()
        with torch.autocast(model.device.type, torch.float16, enabled=enabled):
            ours = logits(model, ids)
            assert calls == [3, 2] * model.config.num_hidden_layers
            with monkeypatch.context() as patch:
                patch.setattr(projections.Group, "compute", lambda *_: None)
                assert torch.equal(logits(model, ids), ours)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        x = torch.randn(3, 128, device=model.device, dtype=torch.bfloat16)
        attention.q_proj(x)
        before = alone(attention.k_proj, x)
        attention.k_proj.weight_scale.mul_(2)
        assert torch.equal(attention.k_proj(x), 2 * before)
        attention.v_proj.weight_packed = nn.Parameter(attention.v_proj.weight_packed.flip(0).contiguous(), False)
        assert torch.equal(attention.v_proj(x), alone(attention.v_proj, x))
        attention.q_proj(x)
        with torch.autocast(model.device.type, torch.float16):
            assert attention.k_proj(x).dtype == torch.float16
