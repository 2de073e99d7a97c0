"""From one token to the next in four launches, as plain torch does it."""

from __future__ import annotations

import pytest
import torch
from pairs import every_pair
from rotations import rotation
from torch import Tensor

from halfbyte.kernels.token import triton as kernels
from halfbyte.models.loop import BROKEN, TokenBuffers, choose, drawn
from halfbyte.models.rotation import FULL, SLIDING

CPU, BF16 = torch.device("cpu"), torch.bfloat16
NAN, INF = float("nan"), float("inf")


def buffers(rows: int, tokens: int, length: int) -> TokenBuffers:
    found = TokenBuffers(rows, tokens, CPU)
    found.ids.random_(0, 90)
    found.length.fill_(length)
    found.positions.random_(0, 9)
    found.unfinished.copy_(torch.arange(rows) % 3 != 1)
    found.pad.fill_(7)
    return found


@every_pair(
    {
        "rows": [1, 3, 40],
        "columns": [1, 90, 4097, 9001],
        "dtype": [BF16, torch.float16, torch.float32],
        "ends": [None, [5], [3, 80, 11]],
        "room": [0, 5],
    }
)
def test_the_likeliest_token(rows: int, columns: int, dtype: torch.dtype, ends: list[int] | None, room: int) -> None:
    generator = torch.Generator().manual_seed(rows + columns)
    # Of so few values that many are the largest.
    scores = torch.randint(-3, 4, (rows, columns + room), generator=generator).to(dtype)[:, :columns]
    for row, value in enumerate((NAN, INF, -INF, -0.0)[:rows]):
        if value == -INF or value == 0:
            scores[row] = value
            scores[row, columns // 2 :] = 0.0 if value == 0 else value
        else:
            scores[row, columns // 3] = scores[row, -1] = value
    stops = None if ends is None else torch.tensor(ends)
    right, found = buffers(rows, 12, 6), buffers(rows, 12, 6)
    for name, value in vars(right).items():
        getattr(found, name).copy_(value)
    assert kernels.supports(scores)
    for _ in range(2):
        right.put(scores.float().argmax(-1), None, stops)
        right.positions.add_(1)
        kernels.put_argmax(scores, found, stops)
        for name, value in vars(right).items():
            assert torch.equal(getattr(found, name), value), name


@pytest.mark.parametrize("ends", [None, [5]], ids=str)
@pytest.mark.parametrize("broken", [(), (1,), (39,)], ids=str)
def test_a_drawn_token(broken: tuple[int, ...], ends: list[int] | None) -> None:
    """Of the last rows no text is real."""
    scores = torch.randn((40, 4097), generator=torch.Generator().manual_seed(0))
    for row in broken:
        scores[row] = NAN
    torch.manual_seed(1)
    chances, noise, flags = drawn(scores)
    torch.manual_seed(1)
    tokens, of_torch = choose(scores, samples=True)
    assert of_torch is not None
    assert torch.equal(flags, of_torch)
    stops = None if ends is None else torch.tensor(ends)
    right, found = buffers(40, 12, 6), buffers(40, 12, 6)
    for name, value in vars(right).items():
        getattr(found, name).copy_(value)
    for made in (right, found):
        made.real.copy_(torch.arange(40) < 30)
    right.put(tokens, flags, stops)
    right.positions.add_(1)
    kernels.put_argmax(chances, found, stops, noise, (flags, BROKEN))
    for name, value in vars(right).items():
        assert torch.equal(getattr(found, name), value), name
    assert (found.report[-1] == BROKEN) == (broken == (1,))


def test_nothing_is_written_beyond_the_last_place() -> None:
    found = buffers(2, 11, 12)
    before = found.ids.clone()
    kernels.put_argmax(torch.randn(2, 90), found, None)
    assert torch.equal(found.ids, before)


def test_all_are_done_at_last() -> None:
    found = buffers(2, 12, 6)
    found.unfinished.fill_(True)
    for token in (3, 4):
        scores = torch.zeros(2, 90)
        scores[:, token] = 1
        kernels.put_argmax(scores, found, torch.tensor([4]))
        assert found.report.tolist() == [token, token, int(token != 4)]


@pytest.mark.parametrize("names", [FULL, SLIDING, (FULL, SLIDING)], ids=str)
@every_pair({"rows": [1, 3], "tokens, window": [(40, 9), (40, 64), (5000, 300), (9, 1)], "layers": [1, 5]})
def test_masks_and_slots(names: tuple[str, ...] | str, rows: int, tokens: int, window: int, layers: int) -> None:
    ours, theirs = (rotation(names, tokens, window, layers, CPU) for _ in range(2))
    visible = torch.rand((rows, tokens), generator=torch.Generator().manual_seed(tokens)) < 0.7
    for prompt in {1, tokens // 3, tokens - 1}:
        for turned in (ours, theirs):
            turned.begin(max(prompt, 1))
        for length in {max(prompt, 1) + 1, min(prompt + 7, tokens), tokens}:
            at = torch.tensor(length)
            right = theirs.turn(at, visible)
            each = (names,) if isinstance(names, str) else names
            found = ours._in_one_launch(each, at, visible)
            assert torch.equal(ours.slots.tensor, theirs.slots.tensor)
            wanted: dict[str, Tensor] = {names: right} if isinstance(names, str) else dict(right)
            assert found.keys() == wanted.keys()
            for name, mask in wanted.items():
                assert torch.equal(found[name], mask), (name, prompt, length)


@every_pair(
    {"texts": [1, 3], "new": [1, 8], "half": [1, 20, 64], "twice": [False, True], "dtype": [BF16, torch.float32]}
)
def test_angles(texts: int, new: int, half: int, twice: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(half)
    positions = torch.randint(0, 9000, (texts, new), generator=generator)
    frequencies = 500000.0 ** -(torch.arange(half) / half)
    angles = (positions[..., None].float() * frequencies).repeat(1, 1, 1 + twice)
    found = kernels.angles(positions, frequencies, 1.25, angles.shape[-1], dtype)
    for ours, right in zip(found, (angles.cos() * 1.25, angles.sin() * 1.25), strict=True):
        torch.testing.assert_close(ours, right.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_embedding(dtype: torch.dtype) -> None:
    for rows, width, shape in ((7, 20, (1, 1)), (3, 2500, (2, 3))):
        weight = torch.randn(rows, width).to(dtype)
        ids = torch.randint(0, rows, shape)
        assert torch.equal(kernels.embedding(ids, weight), weight[ids])
        assert torch.equal(kernels.embedding(ids.int(), weight), weight[ids])


def test_embedding_of_no_token() -> None:
    found = kernels.embedding(torch.tensor([[-1, 1, 2]]), torch.zeros(2, 5))
    assert found.isnan().all(dim=2).tolist() == [[True, False, True]]
