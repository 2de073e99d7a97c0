"""What a kernel is for, from its name and from the module within which it was launched.

The module decides where it can: all that a projection launches is its product, whatever the kernels are called. Names
decide where a module does several things, and for kernels of which nobody saw the launch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

# In the order of reports. Products stand for one class each role.
GROUPS = ("products", "attention", "norms", "elementwise", "dequantize", "sampling", "copies", "other", "gaps")


@dataclass(frozen=True, order=True)
class Label:
    """A class of kernels. group: one of GROUPS. role: of a product, such as "q", and of the weight that was
    dequantized; empty elsewhere."""

    group: str
    role: str = ""

    @property
    def name(self) -> str:
        return self.role if self.group == "products" else self.group


def group_of(name: str) -> str:
    """The group of a class by its name: every name that is none of a group is a product's role."""
    return name if name in GROUPS else "products"


ATTENTION, NORMS, ELEMENTWISE, DEQUANTIZE, SAMPLING, COPIES, OTHER, GAPS = map(Label, GROUPS[1:])
UNNAMED = Label("products", "unnamed")  # a product outside of every projection

# What the kernels of kernels/linear, those of experts, and that of heads are called.
OURS = (
    "decode", "exact", "multiply", "lay_out", "product", "combine", "sort_pairs", "combine_kernel", "linear_sum_kernel",
    "linear_product_kernel", "linear_finish_kernel", "choose", "head",
)  # fmt: skip

# What torch's compiler fuses; such a kernel's name lists what it computes, what it takes up, and no product of its own.
FUSED = ("triton_poi", "triton_red", "triton_per")
NORM_WORDS = "norm rsqrt meanops aten::mean aten::pow aten::var"

# Words in kernels' names, and what they mean; the first that fits decides.
WORDS: tuple[tuple[Label, str], ...] = (
    (DEQUANTIZE, "dequant"),
    (ATTENTION, "flash fmha sdpa attention attend softmax"),
    (UNNAMED, "gemm gemv nvjet cutlass xmma splitk cublas dot_kernel 4bit halfbyte::linear"),
    (SAMPLING, "argmax argmin multinomial topk sort radix"),
    (NORMS, NORM_WORDS),
    (
        COPIES,
        "memcpy memset copy index_put catarray scatter gather index_select indexselect embedding repeat aten::cat",
    ),
    (COPIES, "append_kernel aten::clone aten::_to_copy"),
    (ELEMENTWISE, "elementwise pointwise functor silu gelu rotary aten::add aten::mul aten::sub aten::div aten::neg"),
    (ELEMENTWISE, "step_masks angles_kernel"),
    (ELEMENTWISE, "aten::sin aten::cos aten::exp aten::tanh aten::where aten::fill aten::zero aten::ones aten::arange"),
    (ELEMENTWISE, "aten::le aten::lt aten::ge aten::gt aten::eq aten::ne aten::bitwise aten::logical aten::all"),
    (ELEMENTWISE, "aten::any aten::index aten::sum aten::max aten::min aten::clamp"),
)
MULTIPLIES = re.compile(r"aten::(mm|addmm|_addmm\w*|bmm|baddbmm|linear|matmul|mv|addmv|dot|mkldnn_linear)$")

# Operators of a CPU that only make a view or memory: host time that no kernel mends.
FREE = re.compile(
    r"aten::(view|_?reshape\w*|_unsafe_view|transpose|t|permute|slice|select|narrow|unsqueeze|squeeze|expand|expand_as|"
    r"as_strided|alias|detach|detach_|empty|empty_like|empty_strided|new_empty|resize_|unbind|split|chunk|item|is_nonzero|"
    r"_local_scalar_dense|scalar_tensor|lift_fresh|result_type|contiguous|to|set_|resolve_conj|resolve_neg|numpy_T|type_as)$"
    r"|detach$"
)


@cache
def by_name(name: str) -> Label:
    """The class of a kernel of which nothing else is known."""
    if base(name) in OURS:
        return UNNAMED
    low = name.lower()
    if low.startswith(FUSED):
        return NORMS if any(word in low for word in NORM_WORDS.split()) else ELEMENTWISE
    # "aten::add" must not take "aten::addmm" for its own.
    if MULTIPLIES.match(low):
        return UNNAMED
    return next((label for label, words in WORDS if any(word in low for word in words.split())), OTHER)


def classify(name: str, within: Label | None) -> Label:
    """The class of a kernel that was launched within a module of class `within`, or within none that has one."""
    kind = by_name(name)
    if within is None:
        return kind
    if within.group == "products":
        return Label("dequantize", within.role) if kind == DEQUANTIZE else within
    if within == ATTENTION:  # the module rotates, writes the cache and attends
        return ATTENTION if kind in (UNNAMED, ATTENTION) else kind
    return within


def base(name: str) -> str:
    """A kernel's bare name: no return type, namespaces, template arguments or parameters."""
    text = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "").removeprefix("void ")
    return re.split(r"[<(]", text, maxsplit=1)[0].rsplit("::", 1)[-1].strip()
