"""Compile a Triton kernel for a GPU that is not there: what the tests do for every target."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

CUDA_TARGETS = (75, 80, 86, 89, 90, 100, 120)
HIP_TARGETS = ("gfx942", "gfx1100")

_TYPES = {
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "bool": "*i1",
    "float32": "*fp32",
    "uint8": "*u8",
    "int32": "*i32",
    "int64": "*i64",
    "float64": "*fp64",
}


def pointer(dtype: Any) -> str:
    """Triton's name of a pointer to a torch dtype."""
    return _TYPES[str(dtype).removeprefix("torch.")]


def compile_for(
    kernel: Any,
    target: int | str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    unaligned: Collection[str] = (),
    **options: Any,
) -> Any:
    """Compile `kernel` for sm_<target> or an AMD target.

    signature: argument to type ("*u8", "i64", ...). constants: the constexpr arguments. unaligned: the pointers and
    integers that are not taken as multiples of 16. Returns Triton's CompiledKernel, whose `asm` holds "ttgir", "ptx"
    and "cubin" (or "amdgcn" and "hsaco").
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    source = ASTSource(
        kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in signature if name not in unaligned},
    )
    gpu = (
        GPUTarget("cuda", target, 32)
        if isinstance(target, int)
        else GPUTarget("hip", target, 64 if target < "gfx10" else 32)
    )
    return triton.compile(source, target=gpu, options=options)
