"""A learned lower start: an additional upper variable for the lower level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from attrs import Attribute, evolve, field, validators

from hgms.facts import around_a_pipeline, innermost
from hgms.methods.inner_pipeline import Wrapper, another
from hgms_core import ConfigError, Loss, Method, Problem, Rows, State, Tree, component, hookimpl
from hgms_core.capabilities import LearnsStart, find

START = "start."
"""The prefix of the names of a learned start's leaves in θ."""


def _starts_from_theta(_wrapper: object, _attribute: Attribute[Any], value: Any) -> None:
    generator = innermost(value).generator
    if find(generator, LearnsStart) is None:
        raise ConfigError(
            "not-supported",
            "learn_start requires a generator that starts from θ, but generator "
            f"{generator.name!r} does not",
            place=("learn_start",),
            hint="use the generator trajectory",
        )


@final
@component
class LearnedStart(Wrapper):
    """A pipeline that learns its lower start z as an additional upper variable::

        min_{θ, z} f(θ, x_K(θ, z)),      x_0 = z,  z initialised at x0

    The leaves ``start.<name>`` of z are in the hypergradient and the outer update (and in their
    norms). ``result`` removes them from θ. The generator reads z through ``Problem.start``. Losses,
    projection and evaluation receive only the other variables. In a configuration, set the field in
    the table of the pipeline: ``learn_start = true``.

    Use with generator ``trajectory`` and outer optimiser ``split``, which updates z separately
    (IAPTT-GM). Avoid if many lower minimisers should be compared: all candidates start from one
    point.

    Parameters
    ----------
    method
        a pipeline with a generator that declares ``LearnsStart``, or a wrapper around one.
    learn_start
        True; the key of a configuration.

    Notes
    -----
    Cost: the cost of the method.

    Source: Liu, Liu, Zeng, Zhang, NeurIPS 2021 (arXiv 2110.00455), initialisation auxiliary.

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: (x["x"] - t["t"]).square().sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> lifted = with_learned_start(problem)
    >>> lifted.theta0, lifted.start(lifted.theta0)
    ({'t': tensor([0.]), 'start.x': tensor([1.])}, {'x': tensor([1.])})
    """

    name: ClassVar[str] = "learned-start"

    method: Method = field(
        metadata={"flat": True}, validator=[around_a_pipeline, _starts_from_theta]
    )
    learn_start: bool = field(default=True, validator=validators.in_([True]))

    def changed_problem(self, problem: Problem) -> Problem:
        return with_learned_start(problem)

    def result(self, state: State) -> tuple[Tree, Tree]:
        theta, x = self.method.result(state)
        return without_start(theta), x


def with_learned_start(problem: Problem) -> Problem:
    """Return the problem with the lower start as additional upper variables.

    These variables start at x0.
    """
    losses = problem.g, problem.f, problem.project, problem.evaluate
    return another(problem, "learned-start", lambda: _with_start(problem, *losses))


def _with_start(
    problem: Problem,
    g: Loss,
    f: Loss,
    project: Callable[[Tree], Tree],
    evaluate: Callable[[Tree, Tree], Mapping[str, float]],
) -> Problem:
    rows = problem.find(Rows)
    others = problem.without(Rows).extensions
    weighted = rows and evolve(
        rows, regulariser=lambda theta, x, batch: rows.regulariser(without_start(theta), x, batch)
    )
    start = {START + name: leaf for name, leaf in problem.x0.items()}
    return evolve(
        problem,
        theta0={**problem.theta0, **start},
        references={name: {**theta, **start} for name, theta in problem.references.items()},
        g=lambda theta, x, batch: g(without_start(theta), x, batch),
        f=lambda theta, x, batch: f(without_start(theta), x, batch),
        project=lambda theta: {**theta, **project(without_start(theta))},
        evaluate=lambda theta, x: evaluate(without_start(theta), x),
        extensions=(*others, weighted) if weighted else others,
        start=lambda theta: {
            name.removeprefix(START): leaf for name, leaf in theta.items() if name.startswith(START)
        },
    )


def without_start(theta: Tree) -> Tree:
    """Return the upper variables of the original problem."""
    return {name: leaf for name, leaf in theta.items() if not name.startswith(START)}


@hookimpl
def hgms_register_methods() -> list[type]:
    return [LearnedStart]
