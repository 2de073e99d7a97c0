"""Batches with prompts are captured once their size has come often; those of decoding requests at once."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from halfbyte.kernels.common.switched import no_collection
from halfbyte.models.batch_graphs import TIMES, capture_once_it_pays

pytest.importorskip("transformers")


class Runner:
    """As far as transformers' ModelRunner matters here."""

    def __init__(self) -> None:
        self.inputs_and_outputs: Any = SimpleNamespace(use_block_table=False, key=(64, 0))
        self.inputs_and_outputs._get_graph_key = lambda: self.inputs_and_outputs.key
        self.captured: list[Any] = []

    def _capture_graph(self, forward: Any, stream: Any, *arguments: Any) -> None:
        forward(*arguments)
        self.captured.append(self.inputs_and_outputs.key)


class Manager:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def _create_batch_processor(self) -> Any:
        return SimpleNamespace(model_runner=self.runner)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    made = Runner()
    manager = Manager(made)
    capture_once_it_pays(manager)
    assert manager._create_batch_processor().model_runner is made
    return made


def steps(runner: Runner, count: int) -> list[int]:
    """How many graphs there are after each step; every step is computed once."""
    computed: list[Any] = []
    found = []
    for number in range(count):
        runner._capture_graph(computed.append, None, number)
        found.append(len(runner.captured))
    assert computed == list(range(count))
    return found


def test_prompts_wait(runner: Runner) -> None:
    assert steps(runner, TIMES + 1) == [0] * TIMES + [1]
    runner.inputs_and_outputs.key = (128, 0)
    assert steps(runner, TIMES) == [1] * TIMES


def test_each_of_two_pairs_has_its_own(runner: Runner) -> None:
    pairs = [SimpleNamespace(device_io=SimpleNamespace(_get_graph_key=lambda: (64, 0))) for _ in range(2)]
    runner.inputs_and_outputs = SimpleNamespace(use_block_table=False, io_pairs=pairs, current_pair=0, key=(64, 0))
    assert steps(runner, TIMES)[-1] == 0
    runner.inputs_and_outputs.current_pair = 1
    assert steps(runner, TIMES + 1) == [0] * TIMES + [1]


def test_decoding_does_not(runner: Runner) -> None:
    runner.inputs_and_outputs.use_block_table = True
    assert steps(runner, 1) == [1]


def test_both_go_with_their_last_reference() -> None:
    """A GPU's memory does not wait for Python's garbage collector."""
    manager = Manager(Runner())
    capture_once_it_pays(manager)
    manager._create_batch_processor()
    manager.runner.inputs_and_outputs = None  # whose key, above, knows its owner
    watched = [ref(manager), ref(manager.runner)]
    with no_collection:
        del manager
        assert [one() for one in watched] == [None, None]


def test_where_sizes_are_not_told_all_is_theirs(runner: Runner) -> None:
    runner.inputs_and_outputs = SimpleNamespace(use_block_table=False, key=None)
    assert steps(runner, 1) == [1]


def test_transformers_has_what_is_replaced() -> None:
    api = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")  # of the version that is known
    from transformers.generation.continuous_batching import input_outputs, model_runner

    assert callable(api.ContinuousBatchingManager._create_batch_processor)
    assert callable(model_runner.ModelRunner._capture_graph)
    assert callable(input_outputs.ContinuousBatchingIOs._get_graph_key)
