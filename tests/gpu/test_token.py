"""From one token to the next in four launches, as plain torch does it."""

from __future__ import annotations

import pytest
import torch
from rotations import rotation

from halfbyte.kernels.common import slow
from halfbyte.models.loop import BROKEN, TokenBuffers
from halfbyte.models.rotation import FULL, SLIDING

GPU = torch.device("cuda")


@pytest.mark.parametrize("ends", [None, [5], [3, 80, 11]], ids=str)
@pytest.mark.parametrize("columns", [1, 90, 4097, 151936, 262208])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_the_likeliest_token(rows: int, columns: int, ends: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = torch.randint(-3, 4, (rows, columns + 5), device=GPU).to(dtype)[:, :columns]
        for row, value in enumerate((float("nan"), float("inf"), -0.0)[:rows]):
            scores[row, columns // 2 :: 2] = value
        right, found = TokenBuffers(rows, 12, GPU), TokenBuffers(rows, 12, GPU)
        for made in (right, found):
            made.length.fill_(6)
            made.unfinished.copy_(torch.arange(rows, device=GPU) % 3 != 1)
            made.pad.fill_(7)
        stops = None if ends is None else torch.tensor(ends, device=GPU)
        for _ in range(2):
            found.go_on(scores, False, stops)
            with monkeypatch.context() as patch:
                patch.setattr(slow, "has_triton", lambda: False)
                right.go_on(scores.float(), False, stops)
            for name, value in vars(right).items():
                assert torch.equal(getattr(found, name), value), name


@pytest.mark.parametrize("columns", [90, 4097, 151936])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_drawn_token(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same seed it is the one that torch's operations draw."""
    for broken in (None, 0, rows - 1):
        scores = 4 * torch.randn((rows, columns), device=GPU)
        if broken is not None:
            scores[broken] = float("nan")
        right, found = TokenBuffers(rows, 12, GPU), TokenBuffers(rows, 12, GPU)
        for made in (right, found):
            made.length.fill_(6)
            made.unfinished.fill_(True)
            made.real[: max(1, rows - 1)] = True
        for seed in range(3):
            torch.manual_seed(seed)
            found.go_on(scores, True, None)
            torch.manual_seed(seed)
            with monkeypatch.context() as patch:
                patch.setattr(slow, "has_triton", lambda: False)
                right.go_on(scores, True, None)
            for name, value in vars(right).items():
                assert torch.equal(getattr(found, name), value), (name, seed)
        assert (found.report[-1] == BROKEN) == (broken == 0)


@pytest.mark.parametrize("names", [FULL, SLIDING, (FULL, SLIDING)], ids=str)
@pytest.mark.parametrize(("tokens", "window"), [(40, 9), (40, 64), (5000, 300), (9, 1), (70000, 4096)])
@pytest.mark.parametrize(("rows", "layers"), [(1, 5), (3, 64)])
def test_masks_and_slots(
    names: tuple[str, ...] | str, rows: int, layers: int, tokens: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = rotation(names, tokens, window, layers, GPU)
    slots, visible = turned.slots.tensor, torch.rand((rows, tokens), device=GPU) < 0.7
    for prompt in (1, tokens // 3, tokens - 1):
        turned.begin(max(prompt, 1))
        for length in (max(prompt, 1) + 1, tokens):
            at = torch.tensor(length, device=GPU)
            found = turned.turn(at, visible)
            places = slots.clone()
            with monkeypatch.context() as patch:
                patch.setattr(slow, "has_triton", lambda: False)
                right = turned.turn(at, visible)
            assert torch.equal(places, slots)
            if isinstance(names, str):
                found, right = {names: found}, {names: right}
            assert found.keys() == right.keys()
            assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_angles_have_the_bits_of_torch(dtype: torch.dtype, width: int) -> None:
    kernels = pytest.importorskip("halfbyte.kernels.token.triton")
    for texts, new in ((1, 1), (3, 8), (40, 1)):
        positions = torch.randint(0, 1 << 17, (texts, new), device=GPU)
        frequencies = 1e6 ** -(torch.arange(64, device=GPU) / 64)
        angles = (positions[..., None].float() * frequencies).repeat(1, 1, width // 64)
        found = kernels.angles(positions, frequencies, 1.25, width, dtype)
        for ours, right in zip(found, (angles.cos() * 1.25, angles.sin() * 1.25), strict=True):
            assert torch.equal(ours, right.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_embedding_is_that_of_torch(dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("halfbyte.kernels.token.triton")
    weight = torch.randn(1000, 2880, device=GPU).to(dtype)
    for shape in ((1, 1), (3, 8), (40, 1)):
        ids = torch.randint(0, 1000, shape, device=GPU)
        assert torch.equal(kernels.embedding(ids, weight), torch.nn.functional.embedding(ids, weight))
