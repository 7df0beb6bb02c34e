"""The same problem in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from hgms_core import Batch, ConfigError, HgmsError, Problem, Tree
from hgms_core.torch_errors import first_line

AGREE = 1e-3
"""By how much of their size the losses of the two problems may differ at one point."""

FORMS = ("outputs", "criterion", "stacked")
"""Further forms that a loss may have."""


def doubled(value: Any) -> Any:
    """A tree or a state with every floating-point tensor in float64; all else as it is.

    >>> doubled({"x": torch.ones(1), "step": 3, "index": torch.tensor([1])})
    {'x': tensor([1.], dtype=torch.float64), 'step': 3, 'index': tensor([1])}
    """
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return (
        {key: doubled(item) for key, item in value.items()} if isinstance(value, Mapping) else value
    )


class Double:
    """A loss of float64 arguments; its rows are cast as well. What the loss has besides (FORMS),
    it has too.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(self, theta: Tree, x: Tree, batch: Batch) -> Tensor:
        value: Tensor = self._loss(doubled(theta), doubled(x), doubled(batch))
        return value

    def __getattr__(self, name: str) -> Any:
        if name not in FORMS:
            raise AttributeError(name)
        function = getattr(self._loss, name)
        return (
            None
            if function is None
            else lambda *arguments: function(*(doubled(argument) for argument in arguments))
        )


def in_double(
    problem: Problem, theta: Tree, x: Tree, build: Callable[[], Problem] | None
) -> tuple[Problem, str]:
    """The problem in float64, and how it was had: ``already`` in it, its losses ``cast``, or
    ``built`` anew by its task where the losses hold tensors of their own.

    Errors: ConfigError where neither gives losses that agree with those of the problem at (θ, x).
        Cost: four values.
    """
    if all(leaf.dtype == torch.float64 for leaf in (*theta.values(), *x.values())):
        return problem, "already"
    start = {"theta0": doubled(problem.theta0), "x0": doubled(problem.x0)}
    cast = attrs.evolve(
        problem, **start, g=Double(problem.g), f=Double(problem.f), precision=None, compiler=None
    )
    try:
        _check(problem, cast, theta, x)
        return cast, "cast"
    except (ConfigError, RuntimeError, TypeError) as error:
        reason = error.message if isinstance(error, HgmsError) else first_line(error)
    if build is None:
        raise ConfigError(
            "not-supported",
            f"the losses cannot be cast to float64 ({reason}), and there is no task to create the "
            "problem in float64",
        )
    built = build()
    _check(problem, built, theta, x)
    return built, "built"


def _check(problem: Problem, other: Problem, theta: Tree, x: Tree) -> None:
    """ConfigError where the losses of the two differ by more than rounding."""
    with torch.no_grad():
        for name in ("g", "f"):
            values = []
            for one, cast in ((problem, False), (other, True)):
                data = one.lower_data if name == "g" else next(iter(one.upper_data.values()))
                rows = torch.arange(min(data.size, 64), device=data.device) if data.size else None
                point = (doubled(theta), doubled(x)) if cast else (theta, x)
                value = getattr(one, name)(*point, data.batch(rows))
                if cast and value.dtype != torch.float64:
                    raise ConfigError(
                        "wrong-result",
                        f"{name} returns {str(value.dtype).removeprefix('torch.')} although its "
                        "arguments are float64",
                        place=(name,),
                    )
                values.append(float(value))
            if not math.isclose(*values, rel_tol=AGREE, abs_tol=AGREE):
                raise ConfigError(
                    "wrong-result",
                    f"{name} is {values[1]:.4g} in float64, but {values[0]:.4g} in the precision "
                    "of the problem",
                    place=(name,),
                )
