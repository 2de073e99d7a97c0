"""A case that needs no peer and no time, the record of its rows, and a stand-in for a peer that needs a GPU."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.bench import humming
from halfbyte.bench.case import Case, make_record, run, same_bits
from halfbyte.bench.predictions import properties_named
from halfbyte.kernels.linear.tune import h200

CPU = torch.device("cpu")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACTS = {"shape": [2, 3], "dtype": "bfloat16", "format": "nf4", "block_size": 64, "nested": True, "inputs": 2}


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/`name`.py as a module, for as long as the test lasts."""
    spec = spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # what scripts share
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def script_of_planner(name: str, plan: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The same of a script that may change every constant: what `plan` then says, if it keeps that, is forgotten."""
    module = load_script(name, monkeypatch)
    for constant in vars(h200):
        if constant.isupper():
            monkeypatch.setattr(h200, constant, copy.copy(getattr(h200, constant)))
    forget = (lambda: None) if plan is None else plan.cache_clear
    forget()
    yield module
    forget()


def rows_of(script: ModuleType, path: Path) -> list[Any]:
    return list(script.read(path, script.read_row, script.Row._fields))


def check_constants(script: ModuleType, record: Path, parts: Mapping[int, Iterable[Any]], every: int) -> None:
    """Constants of a planner are those of its record, as a fit to every so many of its rows finds them, about. parts:
    constants by `back`. Estimates are less than 8 % off, and what is chosen loses less than 2 %."""
    rows = rows_of(script, record)
    properties = properties_named(rows[0].device)
    chosen = float(script._lost(rows, properties).split("mean ")[1].split(",")[0])
    assert 1 <= chosen < 1.02
    for back, constants in parts.items():
        some = [row for row in rows if row.back == back][::every]
        found = script.fit_to(list(constants), some, lambda row: script._estimate(row, properties))
        before, after = (float(part.rstrip("%")) for part in found.removeprefix("rms error ").split(" -> "))
        assert after <= before < 8


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little data, and a ceiling that nobody has measured."""
    monkeypatch.setattr("halfbyte.bench.ceiling.copy_bandwidth", lambda device: (10.0, None))
    monkeypatch.setattr("halfbyte.bench.dequantize.MOST_SETS", 2)


@pytest.fixture
def _with_bitsandbytes(_quick: None) -> None:
    """The same where bitsandbytes is asked, too: its eager code."""
    pytest.importorskip("bitsandbytes")


@pytest.fixture
def case() -> Callable[..., Case]:
    """Makes a case of the providers it is given, and of "bitsandbytes", which is right."""

    def make(name: str = "2×3", **providers: Callable[[int], Any]) -> Case:
        providers.setdefault("bitsandbytes", lambda index: torch.full((6,), float(index)))
        return Case(name, 6000, 2, providers, "bitsandbytes", same_bits, CPU, FACTS)

    return make


@pytest.fixture
def record(case: Callable[..., Case]) -> dict[str, Any]:
    """Two cases: one where all are right, one where "peft" is wrong."""

    def right(index: int) -> torch.Tensor:
        return torch.full((6,), float(index))

    first = case("2×3", halfbyte=right, peft=right)
    second = case("4×6", halfbyte=right, peft=lambda _: torch.full((6,), -1.0))
    return make_record("dequantize", CPU, [*run(first, 3), *run(second, 3)], copy=10.0)


class Schema:
    """A stand-in for humming's: whole numbers from -8 to 7 with a scale."""

    def quant_tensor(self, dense: Tensor, schema: Schema, dtype: torch.dtype) -> dict[str, Tensor]:
        assert schema is self
        groups = dense.float().unflatten(1, (-1, 128))
        scale = (groups.abs().amax(2) / 7).clamp(min=1e-6).to(dtype)
        weight = (groups / scale.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1).int()
        return {"weight": weight, "weight_scale": scale}

    def dequant_tensors(self, tensors: dict[str, Tensor]) -> Tensor:
        groups = tensors["weight"].float().unflatten(-1, (-1, 128))
        return (groups * tensors["weight_scale"].float().unsqueeze(-1)).flatten(-2)


class Layer(torch.nn.Module):
    """A stand-in for HummingLayer, by its signature."""

    def __init__(
        self, shape_n: int, shape_k: int, weight_config: dict[str, Any], num_experts: int | None,
        torch_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        assert weight_config == {"dtype": "int4", "group_size": 128}
        assert shape_k % 128 == 0
        self.weight_schema = Schema()
        self.humming_config, self.locks = (num_experts, shape_n, shape_k), torch.zeros(1)

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.loaded = tensors

    def transform(self) -> None:
        for name, tensor in self.loaded.items():
            setattr(self, name, torch.nn.Parameter(tensor.clone(), requires_grad=False))


def forward(
    config: Any, x: Tensor, *, weight: Tensor, weight_scale: Tensor, locks: Tensor, compute_config: str,
    sorted_ids: Tensor | None = None, expert_ids: Tensor | None = None, num_tokens_padded: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:  # fmt: skip
    """A stand-in for humming_forward, by its signature, that multiplies what it is given, rows of experts by tiles."""
    experts, n, k = config
    assert x.shape[1] == k
    dense = Schema().dequant_tensors({"weight": weight, "weight_scale": weight_scale})
    if experts is None:
        assert json.loads(compute_config) == {"gemm_type": "dense"}
        return (x.float() @ dense.T).to(x.dtype)
    assert json.loads(compute_config) == {"gemm_type": "indexed"}
    assert sorted_ids is not None
    assert expert_ids is not None
    assert num_tokens_padded is not None
    assert int(num_tokens_padded) == len(sorted_ids) == 4 * len(expert_ids)
    y = x.new_full((len(x) * top_k, n), torch.nan)
    for rows, expert in zip(sorted_ids.view(-1, 4), expert_ids, strict=True):
        for row in rows[rows < len(y)].tolist():
            y[row] = (x[row // top_k].float() @ dense[expert].T).to(x.dtype)
    return y


def ways(config: Any, gemm_type: str) -> list[Any]:
    """A stand-in for get_heuristics_config."""
    assert gemm_type == "indexed"
    return [(0, 2, {"block_shape": [64, 0, 0]}), (2, 1 << 30, {"block_shape": [4, 0, 0]})]


@pytest.fixture
def _humming(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, on a CPU."""
    parts = {"layer": {"HummingLayer": Layer}, "forward": {"humming_forward": forward}}
    parts["tune"] = {"get_heuristics_config": ways}
    monkeypatch.setitem(sys.modules, "humming", ModuleType("humming"))
    for name, members in parts.items():
        monkeypatch.setitem(sys.modules, f"humming.{name}", SimpleNamespace(**members))  # type: ignore[arg-type]
    for kind in (humming.Humming, humming.HummingLinear):
        monkeypatch.setattr(kind, "is_here", lambda device: True)
