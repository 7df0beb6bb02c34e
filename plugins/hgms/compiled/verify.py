"""Check that a compiled function and its graph return the same results up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Maximum difference between a compiled function and the original, relative to the largest number
of a leaf. It is added to the effect of rounding the arguments.
"""

ROUNDED = 8
"""Units of the last digit by which the inputs of a whole step change: sums over rows round more
than single numbers.
"""
SAMPLES = 3
"""Points at which the graph's rounding error is measured: at a single point it can be small by
chance.
"""
MARGIN = 10
"""Permitted difference in units of the measured rounding error. The residual at the end of a solve
differed by 4.4 units (float32, 30 products of a 784-300-10 network).
"""


def compare(
    actual: Sequence[Tensor], expected: Sequence[Tensor], rounding: Sequence[float] | None = None
) -> str:
    """Return how the actual values differ from the expected values; empty if they agree.

    Two ways to compute the same function round differently, and a step may amplify the difference
    (a difference of two nearly equal numbers, a residual that is nearly zero). ``rounding`` is the
    size of such a difference, per value.
    """
    shares = [0.0] * len(expected) if rounding is None else rounding
    for have, want, share in zip(actual, expected, shares, strict=True):
        if not want.is_floating_point():
            if not torch.equal(want, have) and share == 0:
                return "another whole number"
            continue
        size = _largest(want)
        if not torch.allclose(
            have, want, rtol=0.0, atol=CLOSE[want.dtype] * size + MARGIN * share, equal_nan=True
        ):
            return f"by {_largest(have - want):.1e} where the largest number is {size:.1e}"
    return ""


def difference_of(
    function: Callable[..., Sequence[Tensor]],
    actual: Sequence[Tensor],
    leaves: Sequence[Tensor],
    expected: Sequence[Tensor],
    rounding: Callable[..., list[float]] | None = None,
) -> str:
    """Return how the actual values differ from the expected values of a function at ``leaves``.

    The effect of rounding is allowed, see :func:`effect_of_rounding`. It is measured only for
    values that differ by more than the tolerance without it.
    """
    if not compare(actual, expected):
        return ""
    measure = effect_of_rounding if rounding is None else rounding
    return compare(actual, expected, measure(function, leaves))


def difference_at(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    leaves: Sequence[Tensor],
    expected: Sequence[Tensor] | None = None,
) -> str:
    """Return how a program differs from a function; empty if they agree.

    It is compared at values other than ``leaves``, in case the program contains the values of its
    trace, and at ``leaves``, where the results of the function are ``expected`` if given.
    """
    elsewhere = perturb(leaves, 0.01)
    difference = difference_of(function, run(elsewhere), elsewhere, function(elsewhere))
    wanted = function(leaves) if expected is None else expected
    return difference or difference_of(function, run(leaves), leaves, wanted)


def effect_of_rounding(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]], leaves: Sequence[Tensor]
) -> list[float]:
    """Return how much each output changes if the inputs change by some units of the last digit."""
    expected = function(leaves)
    largest = [0.0] * len(expected)
    for sample in range(SAMPLES - 1):
        nearby = function(perturb(leaves, None, sample, digits=ROUNDED))
        changes = [
            _largest(near.double() - want.double())
            for near, want in zip(nearby, expected, strict=True)
        ]
        largest = [max(pair) for pair in zip(largest, changes, strict=True)]
    return largest


def rounding_of(graph: GraphModule, leaves: Sequence[Tensor]) -> list[float]:
    """Return the largest error of each output; for integers 1 if rounding determines them.

    The error is measured at nearby points, in the original precision against float64.

    The error depends on the dtype, on the operations and on a strategy that divides by a small
    step. It is therefore measured: against float64, and for inputs in float64 by the effect of
    changing the last digits of the inputs.
    """
    largest: list[float] = []
    coarse = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.dtype != torch.float64]
    here = None if coarse else graph(*leaves)
    for sample in range(SAMPLES):
        nearby = perturb(leaves, None, sample)
        precise = here or _Precise(graph).run(
            *[leaf.double() if leaf.is_floating_point() else leaf for leaf in nearby]
        )
        errors = [
            _largest(near.double() - exact.double())
            for near, exact in zip(graph(*nearby), precise, strict=True)
        ]
        largest = [max(pair) for pair in zip(largest or errors, errors, strict=True)]
    return largest


class _Precise(Interpreter):
    """A graph in float64, independent of the floating-point types in its operations."""

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and "prims" not in str(n.target):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            target: Any = n.target
            return target(*map_aggregate(args, _double), **map_aggregate(kwargs, _double))
        return super().run_node(n)


def _double(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    return value


def perturb(
    leaves: Sequence[Tensor], share: float | None, sample: int = 0, digits: int = 1
) -> list[Tensor]:
    """Return the leaves with every floating-point number changed by ``share`` of itself.

    With None, it changes by ``digits`` units of its last digit. A seeded random draw selects the
    sign of each change.
    """
    generator = torch.Generator().manual_seed(sample)

    def displace(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        signs = (
            2.0 * torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.device, leaf.dtype)
            - 1
        )
        size = digits * torch.finfo(leaf.dtype).eps if share is None else share
        return leaf * (1 + size * signs)

    return [displace(leaf.detach()) for leaf in leaves]


def _largest(leaf: Tensor) -> float:
    finite = leaf[torch.isfinite(leaf)]
    return float(finite.abs().max()) if finite.numel() else 0.0
