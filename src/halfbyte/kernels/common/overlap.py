"""A kernel that begins before the one ahead of it in its stream is done: programmatic dependent launch, from sm_90 on.

The kernel behind is launched with the constant OVERLAPS (launch.py) and waits by itself, before its first load. The one
ahead says when there is room for it. Both are free where no kernel overlaps; older targets do not know the words.
"""

from __future__ import annotations

import triton
import triton.language as tl

SINCE = 90


@triton.jit
def wait_for_the_one_ahead():
    """Until it is done, and all that it wrote can be read."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def let_the_next_begin():
    """It begins when every program of this kernel has said so, or has ended."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
