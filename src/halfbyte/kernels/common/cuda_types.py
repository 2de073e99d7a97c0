"""How CUDA C++ names dtypes: Type, in linear/device/numeric.cuh. Scales in bytes are nested."""

from __future__ import annotations

import torch

TYPES = {
    torch.float32: "Type::fp32", torch.float16: "Type::fp16", torch.bfloat16: "Type::bf16", torch.uint8: "Type::nested",
}  # fmt: skip
