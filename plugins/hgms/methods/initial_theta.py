"""A method with another initial θ: a named reference or a mixture of sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from attrs import evolve, field

from hgms.facts import around_a_pipeline, needs_of
from hgms.methods.inner_pipeline import Wrapper
from hgms_core import ConfigError, Method, Problem, Sources, State, Tree, component, hookimpl
from hgms_core.errors import unknown_name


@final
@component
class StartingAt(Wrapper):
    """A pipeline that starts θ at a reference of the task, or at a source mixture.

    This θ replaces the start of the task. A method that does not change θ (hypergradient ``fixed``)
    trains at this θ and does not learn: ``oracle-clean``, ``fixed``. In a configuration, set the
    fields in the table of the pipeline: ``reference = "clean"``,
    ``mixture = { code = 3.0, chat = 1.0 }``.

    Parameters
    ----------
    method
        a pipeline, or a wrapper around one.
    reference
        The name of one of the problem's ``references``.
    mixture
        Weights of the problem's data sources by name; sources without a name here have no weight.

    Raises
    ------
    ConfigError
        If the problem has no such reference, or no sources.

    Notes
    -----
    Cost: the cost of the method.

    Source: no bilevel optimisation; floors and ceilings of comparisons.

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(1)},
    ...     x0={},
    ...     references={"clean": {"t": torch.ones(1)}},
    ...     g=lambda t, x, _: t["t"].sum(),
    ...     f=lambda t, x, _: t["t"].sum(),
    ... )
    >>> first(problem, reference="clean", mixture=None)
    {'t': tensor([1.])}
    """

    name: ClassVar[str] = "starting-at"

    method: Method = field(metadata={"flat": True}, validator=around_a_pipeline)
    reference: str | None = None
    mixture: Mapping[str, float] | None = field(default=None, hash=False)

    @property
    def needs(self) -> frozenset[str]:
        """The requirements of the initial θ and of the method."""
        reference = {f"reference:{self.reference}"} if self.reference is not None else set()
        mixture = {"sources"} if self.mixture is not None else set()
        return frozenset(reference | mixture) | needs_of(self.method)

    def init(self, problem: Problem, seed: int) -> State:
        return self.method.init(
            evolve(problem, theta0=first(problem, self.reference, self.mixture)), seed
        )


def first(problem: Problem, reference: str | None, mixture: Mapping[str, float] | None) -> Tree:
    """Return the θ of a reference, overlaid with the weights of a mixture.

    Without ``reference``, θ is the start of the problem.
    """
    if reference is not None and reference not in problem.references:
        raise unknown_name(
            "reference",
            reference,
            problem.references,
            ("method", "reference"),
            label="reference upper variable",
        )
    theta = problem.theta0 if reference is None else problem.references[reference]
    if mixture is None:
        return theta
    sources = problem.find(Sources)
    if sources is None:
        raise ConfigError(
            "not-supported",
            "mixture sets weights of data sources, but the problem has no sources",
            place=("method", "mixture"),
            hint="remove mixture",
        )
    return {**theta, **sources.theta(mixture)}


@hookimpl
def hgms_register_methods() -> list[type]:
    return [StartingAt]
