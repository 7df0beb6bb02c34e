"""Check that a compiled function and its graph return the same results up to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Outputs = Sequence[Tensor]
Function = Callable[[Sequence[Tensor]], Outputs]

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Maximum difference between a compiled function and the original, relative to the largest number
of a leaf. It is added to the effect of rounding the arguments.
"""

ROUNDED = 8
"""Units of the last digit by which the inputs change: sums over rows round more than single
numbers.
"""
PATTERN = 10_007
"""Signs that are drawn for a leaf; a prime, so that the rows of a leaf differ."""
SAMPLES = 2
"""Points at which the effect of rounding is measured: at a single point it can be small by chance.
"""
MARGIN = 10
"""Permitted difference in units of the measured effect of rounding. Without it, the residual at the
end of a solve differed (float32, 30 products of a 784-300-10 network).
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
    function: Function, run: Function, leaves: Sequence[Tensor], expected: Outputs | None = None
) -> str:
    """Return how a program differs from a function at ``leaves``; empty if they agree.

    ``expected`` are the results of the function, if they are known. The effect of rounding is
    allowed, see :func:`effect_of_rounding`. It is measured only if the results differ by more than
    the tolerance without it.
    """
    actual = run(leaves)
    wanted = function(leaves) if expected is None else expected
    if not compare(actual, wanted):
        return ""
    return compare(actual, wanted, effect_of_rounding(function, leaves, wanted))


def difference_nearby(function: Function, run: Function, leaves: Sequence[Tensor]) -> str:
    """Return :func:`difference_of` at values near ``leaves``.

    These values reveal a program that contains the values of its trace.
    """
    return difference_of(function, run, perturb(leaves, 0.01))


def effect_of_rounding(
    function: Function, leaves: Sequence[Tensor], expected: Outputs
) -> list[float]:
    """Return how much each output changes if the inputs change by some units of the last digit.

    The effect depends on the operations, and on a strategy that divides by a small step. It is
    therefore measured. ``expected`` are the results at ``leaves``.
    """
    largest = [0.0] * len(expected)
    for sample in range(SAMPLES):
        nearby = function(perturb(leaves, None, sample))
        changes = [
            _largest(near.double() - want.double())
            for near, want in zip(nearby, expected, strict=True)
        ]
        largest = [max(pair) for pair in zip(largest, changes, strict=True)]
    return largest


def perturb(leaves: Sequence[Tensor], share: float | None, sample: int = 0) -> list[Tensor]:
    """Return the leaves with every floating-point number changed by ``share`` of itself.

    With None, it changes by ``ROUNDED`` units of its last digit. A seeded random draw selects the
    sign of each change; large leaves repeat their signs, because draws are slow.
    """
    generator = torch.Generator().manual_seed(sample)

    def displace(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        count = leaf.numel()
        drawn = torch.randint(0, 2, (min(count, PATTERN),), generator=generator)
        drawn = 2.0 * drawn.to(leaf.device, leaf.dtype) - 1
        signs = drawn.repeat(count // PATTERN + 1)[:count].view(leaf.shape)
        size = ROUNDED * torch.finfo(leaf.dtype).eps if share is None else share
        return leaf * (1 + size * signs)

    return [displace(leaf.detach()) for leaf in leaves]


def _largest(leaf: Tensor) -> float:
    """Return the largest finite absolute value."""
    if not leaf.numel():
        return 0.0
    size = float(leaf.abs().max())
    return size if math.isfinite(size) else float(leaf.nan_to_num(0, 0, 0).abs().max())
