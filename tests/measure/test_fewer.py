"""What holds multiprocessors compiles for every GPU. That it holds them is in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.common import compiler, nvrtc
from halfbyte.kernels.common.device import properties_like
from halfbyte.kernels.common.gpus import COMMON, H200
from halfbyte.measure import fewer


@pytest.mark.skipif(compiler.find() is None, reason="no NVRTC here")
@pytest.mark.parametrize("capability", COMMON)
def test_it_compiles(capability: int) -> None:
    assert nvrtc.cubin(fewer.variant(capability))


@pytest.mark.parametrize("sms", [-1, 0, 133])
def test_a_number_that_the_gpu_does_not_have(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewer, "properties_of", lambda index: properties_like(H200))
    with (
        pytest.raises(ValueError, match=f"has 132 multiprocessors: it cannot be kept to {sms}"),
        fewer.only(sms, torch.device("cuda", 0)),
    ):
        pass
