"""A random initial θ: a baseline without learning."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from attrs import evolve, field

from hgms.facts import around_a_pipeline
from hgms.methods.inner_pipeline import Wrapper
from hgms_core import Key, Method, Problem, State, Tree, component
from hgms_core.validators import at_least


@final
@component
class RandomTheta(Wrapper):
    """Run a pipeline from a θ that is drawn once with the run's seed::

        θ = Proj_Θ(θ0 + s ξ),      ξ ~ N(0, I),      s = theta_deviation

    If θ contains logits of weights, the logits are random: with s = 1 and θ0 = 0, two thirds of the
    weights σ(θ_i) are between 0.27 and 0.73. With a method that keeps θ constant (hypergradient
    ``fixed``), x is trained at this θ: the reference ``random-theta``. In a configuration, the
    field is next to the fields of the wrapped pipeline: ``theta_deviation = 1.0``.

    Use as a baseline for methods that learn θ: a method that does not outperform it has not learned
    a useful θ. Avoid a deviation that is large relative to the numbers of θ0, since the baseline
    would be unreasonably weak. For a logarithm of a penalty, a deviation of 1 is a factor of 2.7.

    Parameters
    ----------
    method
        a pipeline, or a wrapper around one.
    theta_deviation
        s ≥ 0, in units of θ.

    Notes
    -----
    Cost: equal to the cost of the method.

    Source: no bilevel optimisation; a floor of comparisons.

    Examples
    --------
    >>> problem = Problem(
    ...     theta0={"t": torch.zeros(3)},
    ...     x0={},
    ...     g=lambda t, x, _: t["t"].sum(),
    ...     f=lambda t, x, _: t["t"].sum(),
    ... )
    >>> (
    ...     torch.equal(draw_theta(problem, 0, 1.0)["t"], draw_theta(problem, 0, 2.0)["t"] / 2),
    ...     draw_theta(problem, 0, 0.0)["t"],
    ... )
    (True, tensor([0., 0., 0.]))
    """

    name: ClassVar[str] = "random-theta"

    method: Method = field(metadata={"flat": True}, validator=around_a_pipeline)
    theta_deviation: float = field(default=1.0, validator=at_least(0))

    def init(self, problem: Problem, seed: int) -> State:
        return self.method.init(
            evolve(problem, theta0=draw_theta(problem, seed, self.theta_deviation)), seed
        )


def draw_theta(problem: Problem, seed: int, deviation: float) -> Tree:
    """Add a normal draw to every leaf of θ0 and project onto Θ.

    The draw is computed on the CPU, so that every device gets the same values.
    """
    theta = {}
    for name, leaf in problem.theta0.items():
        generator = Key(seed).fold("random-theta", name).generator()
        noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        theta[name] = leaf + deviation * noise.to(leaf.device)
    return problem.project(theta)
