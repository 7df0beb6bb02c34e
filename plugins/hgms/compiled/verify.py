"""Whether a program gives what the graph gives that it was made of, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""How far a program may be from the function, of the largest number of a leaf, beyond what
rounding the arguments does.
"""

SAMPLES = 3
"""Places at which it is measured how much the graph rounds: at one of them it may be little by
luck.
"""


def compared(
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    graph: GraphModule | None = None,
    leaves: Sequence[Tensor] = (),
) -> str:
    """What is wrong with the actual values; empty where they are the expected ones.

    Two ways to compute the same round differently, and a step may blow that up (a difference of two
    nearly equal numbers, a residual that is nearly zero). How much, the ``graph`` says that was
    computed at ``leaves``: nearby, in its own precision against float64.
    """
    rounding = [0.0] * len(expected) if graph is None else _rounding(graph, leaves)
    for have, want, share in zip(actual, expected, rounding, strict=True):
        if not want.is_floating_point():
            if not torch.equal(want, have) and share == 0:
                return "another whole number"
            continue
        size = _largest(want)
        if not torch.allclose(
            have, want, rtol=0.0, atol=CLOSE[want.dtype] * size + 4 * share, equal_nan=True
        ):
            return f"by {_largest(have - want):.1e} where the largest number is {size:.1e}"
    return ""


def _rounding(graph: GraphModule, leaves: Sequence[Tensor]) -> list[float]:
    """The largest error of each output; of whole numbers 1 where rounding decides them.

    It depends on the dtype, on the operations and on a strategy that divides by a small step, so it
    is measured: against float64, and for inputs in float64 by the change that the last digits of
    the inputs make.
    """
    largest: list[float] = []
    coarse = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.dtype != torch.float64]
    here = None if coarse else graph(*leaves)
    for sample in range(SAMPLES):
        nearby = moved(leaves, None, sample)
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
    """A graph in float64, whatever floating-point types it names."""

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


def moved(leaves: Sequence[Tensor], share: float | None, sample: int = 0) -> list[Tensor]:
    """Every floating-point number a share of itself larger or smaller (None: by its last digit),
    as a seeded coin says.
    """
    generator = torch.Generator().manual_seed(sample)

    def displaced(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        signs = (
            2.0 * torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.device, leaf.dtype)
            - 1
        )
        return leaf * (1 + (torch.finfo(leaf.dtype).eps if share is None else share) * signs)

    return [displaced(leaf.detach()) for leaf in leaves]


def _largest(leaf: Tensor) -> float:
    finite = leaf[torch.isfinite(leaf)]
    return float(finite.abs().max()) if finite.numel() else 0.0
