"""A captured function that goes on elsewhere: where its graphs end, what is copied between them, and in which order."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from halfbyte.models.captured import Captured
from halfbyte.models.carrying import Copies, Mirrored, carried_at_once, carrier, carrying

from .recorded import Recording, recordings

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def made() -> Iterator[list[Recording]]:
    with recordings() as found:
        yield found


def cut(value: Tensor) -> Tensor:
    moved: Tensor = carrier().carry(value, CPU, cuts=True)
    return moved


def test_a_function_that_stays_is_one_graph(made: list[Recording]) -> None:
    x, calls = torch.zeros(3), []
    step = Captured(lambda: (calls.append(1), x.add_(1).mul(2))[1], CPU)
    assert not x.any()
    first = step.replay()
    assert torch.equal(first, torch.full((3,), 2.0))
    x.fill_(10)
    assert step.replay() is first
    assert torch.equal(first, torch.full((3,), 22.0))
    assert len(made) == len(calls) == 1
    assert step.is_graph


def test_stages_and_copies_in_their_order(made: list[Recording]) -> None:
    x = torch.arange(4.0)

    def function() -> Tensor:
        first = x * 2
        second = cut(first) + 1
        return cut(second) * x

    step = Captured(function, CPU)
    assert len(made) == 3
    assert [len(copies) for copies, _ in step.stages] == [0, 1, 1]
    assert step.nbytes == 2 * x.nbytes
    for start in (3.0, -1.0):
        x.copy_(torch.arange(4.0) + start)
        assert torch.equal(step.replay(), (2 * x + 1) * x)


def test_a_tensor_is_carried_once_until_it_is_written_to(made: list[Recording]) -> None:
    mask = torch.ones(2)
    seen: list[Tensor] = []

    def function() -> None:
        for _ in range(3):
            seen.append(carrier().carry({"mask": (mask, 7)}, OTHER)["mask"][0])
        carrier().carry([], CPU)
        mask.add_(1)
        seen.append(carrier().carry(mask, OTHER))

    step = Captured(function, CPU)
    assert seen[0] is seen[1] is seen[2]
    assert seen[3] is not seen[0]
    assert [graph.device.type for _, graph in step.stages] == ["cpu", "meta", "cpu", "meta"]
    assert [len(copies) for copies, _ in step.stages] == [0, 1, 0, 1]


def test_what_is_asked_for_late_ends_a_graph_on_the_same_device(made: list[Recording]) -> None:
    x, late = torch.ones(2), torch.ones(3)

    def function() -> Tensor:
        there = carrier().carry(x, OTHER) + 1
        mixed: Tensor = carrier().carry(late, OTHER)[:2] + there
        return mixed

    step = Captured(function, CPU)
    assert [graph.device.type for _, graph in step.stages] == ["cpu", "meta", "meta"]
    assert step.outputs.device == OTHER


def test_an_operation_on_another_device_is_seen(made: list[Recording]) -> None:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="in a stage on meta"):
        Captured(lambda: (carrier().carry(x, OTHER), x + 1), CPU)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert carrier() is not carrier()  # of no step


def test_a_step_that_asks_for_a_number_is_refused_in_any_stage(made: list[Recording]) -> None:
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="not permitted"):
        Captured(lambda: cut(x).sum().item(), CPU)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_mirrored(made: list[Recording]) -> None:
    slots = Mirrored(torch.zeros((3, 2), dtype=torch.int64)[:, 0], [OTHER, CPU, OTHER])
    assert slots.on(CPU) is slots.tensor
    assert slots.on(OTHER).device == OTHER
    assert slots.on(OTHER).stride() == slots.tensor.stride() == (2,)

    def function() -> None:
        slots.tensor.add_(1)
        slots.send()
        carrier().carry(slots.tensor + 1, OTHER)

    step = Captured(function, CPU)
    (first, _), (second, graph) = step.stages
    assert not first
    assert second[0][0] is slots.tensor
    assert second[0][1] is slots.on(OTHER)
    assert graph.device == OTHER
    with pytest.raises(RuntimeError, match="did not go there"):
        Captured(slots.send, CPU)


def test_sent_as_the_next_stage_begins(made: list[Recording]) -> None:
    """Also to memory of the same device: the copy has what was written before the graph ended."""
    mine, theirs = torch.zeros(2), torch.zeros(2)

    def function() -> Tensor:
        mine.add_(1)
        carrier().send(mine, theirs)
        cut(torch.ones(1))
        return theirs * 10

    step = Captured(function, CPU)
    mine.fill_(4)
    assert torch.equal(step.replay(), torch.full((2,), 50.0))


def test_copies_as_a_step_runs() -> None:
    x = torch.ones(2)
    with carried_at_once():
        mine = carrier()
        assert isinstance(mine, Copies)
        with carried_at_once():
            assert carrier() is mine
        moved = mine.carry((x, "text"), OTHER)
        assert moved[0].device == OTHER
        assert moved[1] == "text"
        assert mine.carry(x, OTHER) is moved[0]
        assert mine.carry(x, CPU) is x
        copied = mine.carry(x, CPU, cuts=True)
        assert copied is not x
        assert torch.equal(copied, x)
        here = torch.zeros(2)
        mine.send(x, here)
        assert torch.equal(here, x)
    with torch.inference_mode():
        inference = torch.ones(2)
        with carrying(Copies()):
            assert carrier().carry(inference, OTHER) is carrier().carry(inference, OTHER)
