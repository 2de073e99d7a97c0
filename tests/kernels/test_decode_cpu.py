"""4 bits into numbers on a CPU, whatever it looks up with: by permutations, by shuffles of bytes, and one by one."""

from __future__ import annotations

from typing import Any

import pytest

numba = pytest.importorskip("numba")

import numpy as np  # noqa: E402

from halfbyte.formats.spec import FORMATS  # noqa: E402
from halfbyte.kernels.common import decode, llvm  # noqa: E402


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.uint32])
@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_every_way_looks_up_the_same(format: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole steps of every byte there is; a way that the CPU lacks is left out."""
    packed = np.random.default_rng(0).permutation(np.arange(256, dtype=np.uint8))
    codebook = np.array(FORMATS[format].codebook, np.float32)
    spec, look_up = FORMATS[format], decode.decode
    mine = llvm.has_feature
    found = []
    for features in (("avx512bw",), ("ssse3",), ()):

        def known(context: Any, feature: str, features: tuple[str, ...] = features) -> bool:
            return feature in features and mine(context, feature)

        for module in (decode, llvm):
            monkeypatch.setattr(module, "has_feature", known)

        @numba.njit
        def decoded(packed, scale, codebook, low_first, out):  # type: ignore[no-untyped-def]
            look_up(packed, 0, len(packed) // 16, scale, codebook, low_first, out, 0)

        out = np.zeros(2 * packed.size, dtype)
        decoded(packed, np.float32(0.37), codebook, spec.low_first, out)
        found.append(out)
    nibbles = np.stack((packed & 15, packed >> 4) if spec.low_first else (packed >> 4, packed & 15), 1).reshape(-1)
    assert len(set(zip(nibbles.tolist(), found[0].tolist(), strict=True))) == 16
    if dtype is np.uint32:
        assert np.array_equal(found[0].view(np.float32), codebook[nibbles] * np.float32(0.37))
    assert all(np.array_equal(one, found[0]) for one in found)
