"""What a CUDA kernel of this folder is to all others: the module `launch` of its own folder, with these functions.

`plan` is a pure function of sizes and device: whether the kernel supports a problem, by which constants it is compiled,
and how long it will take. `bind` turns a plan into a product that is ready: compiled, loaded, and with its arguments in
place but for x, bias and out. To plan and to bind takes several times as long as a launch, and is the same every time;
cache.py keeps both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from halfbyte.formats.weight import QuantizedWeight
from halfbyte.kernels.common.device import DeviceProperties, properties_of
from halfbyte.kernels.common.nvrtc import Variant
from halfbyte.kernels.linear.fusion import Fusion
from halfbyte.kernels.linear.problem import Addresses, Problem, addresses, problem_of

# The stream, the addresses of x, bias (0: none) and out, and how many rows x has.
Product = Callable[[int, int, int, int, int], None]
# The stream, the address of x, how many rows it has, and for each weight the addresses of bias (0: none) and out.
GroupProduct = Callable[[int, int, int, Iterable[int]], None]

# The stream, the addresses of x, of the weights of its norm and of the residual (0: none), how many rows x has, and for
# each weight the addresses of bias (0: none) and out; with an activation the second out is not written.
FusedProduct = Callable[[int, int, int, int, int, Iterable[int]], None]

# The stream, the addresses of x, of the weights of its norm (0: none) and of the residual, how many rows x has, the
# addresses of the biases of gate, up and down (0: none), and of out.
MlpProduct = Callable[[int, int, int, int, int, Sequence[int], int], None]

# The stream, the addresses of x, of the experts' ids, of bias (0: none) and out, and
# how many pairs of a token and an expert there are.
RoutedProduct = Callable[[int, int, int, int, int, int], None]

# The same; and how the results of a token are added up.
CombinedProduct = Callable[[int, int, int, int, int, int, Any], None]

# The stream, the addresses of x, of the routes of sorted pairs, of bias (0: none) and out, how many rows x has, and how
# many pairs share one, or 0 where its rows are sorted.
GroupedProduct = Callable[[int, int, int, int, int, int, int], None]


class Plan(Protocol):
    """A frozen dataclass: the constants of a kernel, and the estimate."""

    @property
    def microseconds(self) -> float:
        """How long the product takes on the device, W being read from memory: an estimate, which compares kernels."""

    def x_tiles(self, m: int) -> int:
        """Tiles of x [m, K] that launches are made for; a bound product is for all m that give the same number."""


P = TypeVar("P", bound=Plan)


class Kernel(Protocol[P]):
    NAME: str

    def plan(self, m: int, problem: Problem, properties: DeviceProperties, batch_invariant: bool) -> P | None:
        """The plan for x [m, K], m and no side of W being 0, or None where this kernel does not support the problem.
        With batch_invariant a row's sums are made in one order, whatever m is, and so whether there is a plan."""

    def variant(self, problem: Problem, plan: P, properties: DeviceProperties) -> Variant:
        """What is compiled."""

    def bind(self, device: torch.device, m: int, problem: Problem, weight: Addresses, plan: P) -> Product:
        """The product with a weight on the current device."""


class BackKernel(Kernel[P], Protocol[P]):
    """A kernel of the product with W itself, which gradients are."""

    def plan_back(self, m: int, problem: Problem, properties: DeviceProperties) -> P | None:
        """The plan for dy [m, N] @ W, m and no side of W being 0, or None where this kernel does not support it;
        `bind` then gives that product."""


class GroupKernel(Kernel[P], Protocol[P]):
    """A kernel that has something to gain from several weights that are given the same x."""

    def plan_group(self, m: int, group: Sequence[Problem], properties: DeviceProperties) -> Plan | None:
        """The plan for x [m, K] and several weights, or None where this kernel does not support them together."""

    def group_variant(self, group: Sequence[Problem], plan: Any, properties: DeviceProperties) -> Variant | None:
        """What is compiled for them together, or None where each takes what it takes alone."""

    def bind_group(
        self, device: torch.device, m: int, group: Sequence[Problem], weights: Sequence[Addresses], plan: Any
    ) -> GroupProduct:
        """The products with several weights on the current device."""


class FusedKernel(GroupKernel[P], Protocol[P]):
    """A kernel that can do what stands beside a product in the same launch; `group_variant` is for its plans, too."""

    def plan_fused(self, m: int, group: Sequence[Problem], fusion: Fusion, properties: DeviceProperties) -> Plan | None:
        """The plan for x [m, K] and one or several weights, or None where this kernel does not support it."""

    def bind_fused(
        self,
        device: torch.device,
        m: int,
        group: Sequence[Problem],
        weights: Sequence[Addresses],
        fusion: Fusion,
        plan: Any,
    ) -> FusedProduct:
        """The products on the current device."""


def plan_for(
    kernel: Kernel[P], x: Tensor, q: QuantizedWeight, bias: Tensor | None = None, batch_invariant: bool = False
) -> P | None:
    """A kernel's plan for these very tensors: for tuners and tests."""
    return kernel.plan(len(x), problem_of(x, q, bias), properties_of(x.get_device()), batch_invariant)


def run(kernel: Kernel[P], x: Tensor, q: QuantizedWeight, bias: Tensor | None, out: Tensor, plan: P) -> None:
    """out = x @ W.T + bias by one kernel under a plan of the caller's: for tuners and tests.

    x [M, K], bias [N] or None and out [M, N] of one dtype, contiguous, aligned to 16 bytes, on the current device.
    """
    product = kernel.bind(x.device, len(x), problem_of(x, q, bias), addresses(q), plan)
    stream = torch._C._cuda_getCurrentRawStream(x.get_device())
    product(stream, x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), len(x))
