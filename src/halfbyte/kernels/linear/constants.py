"""What kernels are compiled with: how Python and CUDA C++ number the same things."""

from __future__ import annotations

import torch

# X_TYPE and SCALE_TYPE in device/numeric.cuh. Scales in bytes are nested.
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
