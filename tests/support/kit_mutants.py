"""Components of every kind and solvers that each fail one check of the kit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from hgms_core import LinearSystem, Outcome
from hgms_core.capabilities import Recycles
from support.kit_parts import DOC, Exact, Keyed, MinimalResidual, changed, exact, like

# --- components of every kind
# --------------------------------------------------------------------------------------------------


def exactly_but(change: Callable[..., Any]) -> Any:
    """The exact solver with another answer: ``change(plain, m, b)``."""
    return changed(Exact(), solve=lambda own, plain, m, b, x0=None: change(plain, m, b))


def named_otherwise(bases: tuple[type, ...] = (Exact,), **body: Any) -> Any:
    return type("Changed", bases, {"__doc__": DOC, **body})()


def with_fields(bases: tuple[type, ...] = (Exact,), options: Any = None, **fields: Any) -> Any:
    """The exact solver with more fields, or as a class of other options."""
    body = {"__doc__": DOC, "name": "changed", "solve": Exact.solve}
    kind = {"frozen": True, "kw_only": True, **(options or {})}
    return attrs.make_class("Changed", fields, bases, body, **kind)()


@attrs.frozen(kw_only=True)
class Local(Exact):
    __doc__ = DOC
    rule: Any = lambda rate: rate


LAST: list[Tensor] = []
FLOAT = attrs.field(type=float, default=1.0)
UNSOUND: list[tuple[str, Any]] = [
    ("registration", named_otherwise(name="Exact_Solver")),
    ("registration", named_otherwise(solve=lambda own, operator, b: exact(operator, b))),
    ("capabilities", named_otherwise(with_key=lambda own, key: own)),
    ("capabilities", named_otherwise(capabilities=frozenset({Recycles}))),
    ("docstring", named_otherwise(__doc__=None)),
    ("docstring", named_otherwise(__doc__="An exact solver.")),
    ("source", named_otherwise(__doc__="An exact solver.\n\n>>> 1 + 1\n2")),
    ("types", with_fields(rtol=attrs.field(type="Nowhere", default=1.0))),
    ("frozen", with_fields((), {"frozen": False}, rtol=FLOAT)),
    ("hashable", with_fields(rates=attrs.field(type=list[float], factory=lambda: [1.0]))),
    ("hashable", with_fields((), {"eq": False})),
    ("pickle", Local()),
    (
        "toml",
        with_fields(rtol=attrs.field(type=float, default=1.0, converter=lambda value: value + 1.0)),
    ),
    ("inputs", exactly_but(lambda plain, m, b: plain(m, b.mul_(1.0 + 1e-12)))),
    ("global-rng", exactly_but(lambda plain, m, b: (torch.randn(1), plain(m, b))[1])),
    ("global-rng", exactly_but(lambda plain, m, b: (np.random.rand(), plain(m, b))[1])),  # noqa: NPY002
    ("global-rng", exactly_but(lambda plain, m, b: (random.random(), plain(m, b))[1])),
    (
        "repeatable",
        exactly_but(lambda plain, m, b: LAST.append(b) or plain(m, b + 1e-9 * len(LAST))),
    ),
    (
        "precision",
        exactly_but(lambda plain, m, b: evolve(plain(m, b), value=plain(m, b).value.float())),
    ),
]


# --- solvers
# --------------------------------------------------------------------------------------------------


def answers(change: Callable[..., Any]) -> Any:
    """A solver whose answer is changed on its way out."""
    return changed(
        MinimalResidual(), solve=lambda own, plain, m, b, x0=None: change(plain(m, b, x0), b, x0, m)
    )


def asks(solve: Callable[..., Any]) -> Any:
    """A solver that calls the sound one with something else: ``solve(own, plain, m, b, x0)``."""
    return changed(
        MinimalResidual(), solve=lambda own, plain, m, b, x0=None: solve(own, plain, m, b, x0)
    )


def other(own: Any, **more: Any) -> MinimalResidual:
    return like(own, MinimalResidual, **more)


def ends_with_a_division_by_zero(answer: Any, *_: object) -> Any:
    """As a solver that divides 0 by 0 once its residual is 0 and keeps the last value."""
    is_exact = answer.residual < 1e-12
    codes = torch.full_like(answer.codes, Outcome.NONFINITE.code)
    return evolve(answer, codes=torch.where(is_exact, codes, answer.codes))


def invented(**numbers: float) -> Any:
    return answers(
        lambda answer, *_: evolve(
            answer,
            **{
                name: torch.full_like(getattr(answer, name), value)
                for name, value in numbers.items()
            },
        )
    )


def along_ones(m: Any, b: Tensor) -> Tensor:
    """The best along what a singular H does not see all of."""
    image = m(torch.ones_like(b))
    return (LinearSystem.dot(b, image) / LinearSystem.dot(image, image))[..., None].expand_as(b)


def strict(own: Any, plain: Any, m: Any, b: Tensor, x0: Any) -> Any:
    if (b * m(b)).sum() < 0 or (answer := plain(m, b, x0)).residual.max() > 0.05:
        raise ValueError("H is not positive definite")
    return answer


COUNT = itertools.count(1)
SOLVERS: list[tuple[str, Any]] = [
    ("key", changed(Keyed(), with_key=lambda own, plain, key: evolve(own, seed=1))),
    (
        "key",
        changed(
            Keyed(),
            solve=lambda own, plain, m, b, x0=None: Keyed(seed=own.seed + next(COUNT)).solve(
                m, b, x0
            ),
        ),
    ),
    ("key", changed(Keyed(), with_key=lambda own, plain, key: key)),
    ("residual", answers(lambda answer, *_: evolve(answer, residual=0.1 * answer.residual))),
    ("residual", invented(codes=Outcome.CONVERGED.code)),
    ("residual", answers(lambda answer, *_: answer.value)),
    ("dense-solve", answers(lambda answer, *_: evolve(answer, value=-answer.value))),
    ("dense-solve", MinimalResidual(max_steps=2)),
    ("ridge", asks(lambda own, plain, m, b, x0: other(own, ridge=0.0).solve(m, b, x0))),
    ("identity", answers(lambda answer, *_: evolve(answer, value=-answer.value))),
    ("identity", answers(ends_with_a_division_by_zero)),
    ("zero-rhs", answers(ends_with_a_division_by_zero)),
    (
        "zero-rhs",
        answers(lambda answer, b, *_: evolve(answer, value=answer.value / b.norm() * b.norm())),
    ),
    (
        "singular",
        asks(lambda own, plain, m, b, x0: plain(m, b, along_ones(m, b) if x0 is None else x0)),
    ),
    ("indefinite", asks(strict)),
    ("nonfinite", answers(lambda answer, b, x0, m: evolve(answer, value=answer.value + 0 * m(b)))),
    (
        "nonfinite",  # in batches alone
        asks(
            lambda own, plain, m, b, x0: (
                plain(m, b, x0)
                if b.dim() == 1
                else plain(lambda v: m(v).nan_to_num(), b.nan_to_num(), x0)
            )
        ),
    ),
    (
        "iteration-limit",
        asks(lambda own, plain, m, b, x0: other(own, max_steps=1000).solve(m, b, x0)),
    ),
    (
        "warm-start",
        answers(
            lambda answer, b, x0, m: (
                answer if x0 is None else evolve(answer, value=answer.value + x0)
            )
        ),
    ),
    (
        "warm-start",  # a start makes it slower
        asks(
            lambda own, plain, m, b, x0: evolve(
                plain(m, b), iterations=plain(m, b).iterations + (x0 is not None)
            )
        ),
    ),
    (
        "batch",
        answers(
            lambda answer, b, *_: (
                evolve(answer, residual=answer.residual.max()) if b.dim() == 2 else answer
            )
        ),
    ),
    (
        "batch",
        answers(
            lambda answer, b, *_: (
                evolve(answer, value=answer.value[-1].expand_as(b)) if b.dim() == 2 else answer
            )
        ),
    ),
    (
        "scaling",  # takes small numbers for 0
        answers(
            lambda answer, b, *_: evolve(
                answer, value=answer.value * (b.abs().amax(-1, keepdim=True) > 1e-12)
            )
        ),
    ),
    ("products", answers(lambda answer, *_: evolve(answer, products=answer.products - 1))),
    ("iterations", invented(iterations=1000)),
    ("iterations", invented(iterations=0)),
    ("curvature", invented(curvature=0.0)),
    ("curvature", invented(curvature=1.0)),
    ("clip", asks(lambda own, plain, m, b, x0: other(own, clip=None).solve(m, b, x0))),
]
