from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from halfbyte.models import prompts
from halfbyte.models.prompts import begins_at_once, without_cudnn


def test_torch_leaves_cudnn_out() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with without_cudnn:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


def test_which_prompts() -> None:
    def ids(tokens: int, is_cuda: bool) -> torch.Tensor:
        return cast(Any, SimpleNamespace(shape=(2, tokens), is_cuda=is_cuda))

    assert begins_at_once(ids(300, True))
    assert not begins_at_once(ids(300, False))
    assert not begins_at_once(ids(prompts.LONG, True))
