"""INT4 groups with the keys and layout of compressed-tensors, against a packer written from its specification."""

from __future__ import annotations

import pytest
import torch

from halfbyte import ops
from halfbyte.formats.compressed_tensors import from_compressed_tensors, from_tensors, to_tensors

N, K = 24, 256


def make(group_size: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed words, scales, and the dense weight they stand for; integers over the whole of -8 to 7."""
    torch.manual_seed(0)
    integers = torch.randint(-8, 8, (N, K))
    scale = (torch.rand(N, K // group_size) + 0.1).to(dtype)
    words = torch.zeros(N, K // 8, dtype=torch.int64)
    for i in range(8):
        words |= (integers[:, i::8] + 8) << (4 * i)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    dense = (integers.float() * scale.float().repeat_interleave(group_size, dim=1)).to(dtype)
    return packed, scale, dense


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(N, K), [N, K], torch.tensor([N, K]), torch.Size((N, K))])
def test_view(group_size: int, dtype: torch.dtype, shape: object) -> None:
    packed, scale, dense = make(group_size, dtype)
    q = from_compressed_tensors(packed, scale, shape)  # type: ignore[arg-type]
    assert (q.block_size, q.dtype, q.shape) == (group_size, dtype, (N, K))
    assert q.packed.data_ptr() == packed.data_ptr()
    assert torch.equal(ops.dequantize(q), dense)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_keys_both_ways(group_size: int) -> None:
    q = ops.quantize(torch.randn(N, K).bfloat16(), "int4", group_size=group_size)
    tensors = to_tensors("m.weight", q)
    assert {k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()} == {
        "m.weight_packed": (torch.int32, (N, K // 8)),
        "m.weight_scale": (torch.bfloat16, (N, K // group_size)),
        "m.weight_shape": (torch.int64, (2,)),
    }
    assert tensors["m.weight_shape"].tolist() == [N, K]
    for source in (tensors, tensors.get, tensors.__getitem__):
        assert torch.equal(ops.dequantize(from_tensors("m.weight", source)), ops.dequantize(q))


def test_what_is_refused() -> None:
    packed, scale, _ = make()
    with pytest.raises(ValueError, match=r"packed has .* needs"):
        from_compressed_tensors(packed[:, :-1].contiguous(), scale, (N, K))
    with pytest.raises(ValueError, match="strategy 'channel'"):
        from_compressed_tensors(packed, scale[:, :1].contiguous(), (N, K))
    with pytest.raises(ValueError, match="0 columns"):
        from_compressed_tensors(packed, scale[:, :0], (N, K))
    with pytest.raises(ValueError, match="two dimensions"):
        from_compressed_tensors(packed, scale, (N, K, 1))
    with pytest.raises(ValueError, match="two dimensions"):
        from_compressed_tensors(packed, scale.view(-1), (N, K))
    with pytest.raises(TypeError, match="weight_packed is a list"):
        from_compressed_tensors([1], scale, (N, K))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="packed has dtype"):
        from_compressed_tensors(packed.long(), scale, (N, K))
    with pytest.raises(ValueError, match="scale has"):
        from_compressed_tensors(packed, scale[:-1], (N, K))


def test_keys_that_are_missing_or_not_understood() -> None:
    tensors = to_tensors("w", ops.quantize(torch.randn(N, K), "int4"))
    for key in tensors:
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            from_tensors("w", {k: v for k, v in tensors.items() if k != key})
    for key in ("w_zero_point", "w_g_idx"):
        with pytest.raises(ValueError, match="only symmetric groups"):
            from_tensors("w", {**tensors, key: torch.zeros(1)})
    with pytest.raises(ValueError, match="does not fit together"):
        from_tensors("w", {**tensors, "w_shape": torch.tensor([N, K + 128])})
    with pytest.raises(ValueError, match="compressed-tensors has 'int4'"):
        to_tensors("w", ops.quantize(torch.randn(N, K), "nf4"))
