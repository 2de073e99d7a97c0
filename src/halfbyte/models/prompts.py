"""The attention of prompts: torch's own, but not cuDNN's where that costs more than it gains.

cuDNN makes a plan for every shape that it has not seen: on an H100 40 ms for a prompt of a new length, and about a
second where texts are padded, since they come with a mask. torch asks it first on Hopper GPUs. FlashAttention, and
torch's memory-efficient kernel where there is a mask, begin at once, and lose as much only in prompts of many thousand
tokens.
"""

from __future__ import annotations

import torch

from halfbyte.kernels.common.switched import SwitchedOff

# Tokens of a prompt whose attention cuDNN computes faster by about what a plan takes, in 32 layers with 32 heads.
LONG = 12288


# Torch leaves cuDNN's attention out while any thread is inside.
without_cudnn = SwitchedOff(torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp)


def begins_at_once(ids: torch.Tensor) -> bool:
    """True for prompts [texts, tokens] whose attention should not wait for a plan."""
    return ids.is_cuda and ids.shape[-1] < LONG
