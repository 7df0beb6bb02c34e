"""The same problem in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from hgms.arguments import require
from hgms_core import Batch, Problem, Tree
from hgms_core.capabilities import HasOutputs, NotStackable, StacksCandidates, find

AGREE = 1e-3
"""Maximum relative difference between the losses of the two problems at one point."""


def to_double(value: Any) -> Any:
    """Convert every floating-point tensor of a tree or state to float64, and nothing else.

    Examples
    --------
    >>> to_double({"x": torch.ones(1), "step": 3, "index": torch.tensor([1])})
    {'x': tensor([1.], dtype=torch.float64), 'step': 3, 'index': tensor([1])}
    """
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return (
        {key: to_double(item) for key, item in value.items()}
        if isinstance(value, Mapping)
        else value
    )


class Double:
    """A loss of float64 arguments; its rows are converted as well."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        forms = (HasOutputs, StacksCandidates, NotStackable)
        self.capabilities = frozenset(form for form in forms if find(loss, form))

    def __call__(self, theta: Tree, x: Tree, batch: Batch) -> Tensor:
        return self._loss(to_double(theta), to_double(x), to_double(batch))

    def outputs(self, x: Tree, batch: Batch) -> Any:
        return self._loss.outputs(to_double(x), to_double(batch))

    def criterion(self, theta: Tree, x: Tree, z: Any, batch: Batch) -> Any:
        return self._loss.criterion(to_double(theta), to_double(x), to_double(z), to_double(batch))

    def stacked_losses(self, theta: Tree, x: Tree, batch: Batch, own_batch: bool) -> Any:
        return self._loss.stacked_losses(
            to_double(theta), to_double(x), to_double(batch), own_batch
        )


def in_double(problem: Problem, theta: Tree, x: Tree) -> Problem:
    """Return the problem with its losses and rows in float64, or the problem itself if it is.

    Raises
    ------
    ConfigError
        If the losses do not agree with the losses of the problem at (θ, x), for example because
        they contain tensors of another dtype. Some losses raise errors of torch instead.

    Notes
    -----
    Cost: four values.
    """
    if all(leaf.dtype == torch.float64 for leaf in (*theta.values(), *x.values())):
        return problem
    start = {"theta0": to_double(problem.theta0), "x0": to_double(problem.x0)}
    cast = attrs.evolve(
        problem, **start, g=Double(problem.g), f=Double(problem.f), precision=None, compiler=None
    )
    _check(problem, cast, theta, x)
    return cast


def _check(problem: Problem, other: Problem, theta: Tree, x: Tree) -> None:
    """Raise ConfigError if the losses of the two problems differ by more than rounding."""
    with torch.no_grad():
        for name in ("g", "f"):
            values = []
            for one, cast in ((problem, False), (other, True)):
                data = one.lower_data if name == "g" else next(iter(one.upper_data.values()))
                rows = torch.arange(min(data.size, 64), device=data.device) if data.size else None
                point = (to_double(theta), to_double(x)) if cast else (theta, x)
                value = getattr(one, name)(*point, data.batch(rows))
                require(
                    not cast or value.dtype == torch.float64,
                    "wrong-result",
                    f"{name} returns {str(value.dtype).removeprefix('torch.')} although its "
                    "arguments are float64",
                    place=(name,),
                )
                values.append(float(value))
            require(
                math.isclose(*values, rel_tol=AGREE, abs_tol=AGREE),
                "wrong-result",
                f"{name} is {values[1]:.4g} in float64, but {values[0]:.4g} in the precision "
                "of the problem",
                place=(name,),
            )
