"""The upper gradient that a generator computed in its pass, without further evaluations."""

from __future__ import annotations

from typing import ClassVar, final

from hgms_core import (
    Candidates,
    ConfigError,
    Estimate,
    Key,
    Problem,
    Selection,
    State,
    Tree,
    component,
)


@final
@component
class Carried:
    """h = the upper gradient that the selected candidate carries.

    Single-loop methods move θ and the lower variables at once, along gradients of one function.
    Their generators store the upper part in ``Candidates.aux``: ``theta.<leaf>`` for every leaf of
    θ, ``upper_loss``, and, if available, ``lower_gradient_norm`` (both at the state before the
    step).

    Use when the generator is ``value-gap``, ``gradient-norm``, ``minimax``, ``dynamic-barrier``,
    ``soba`` or similar. Other generators store no upper gradient.

    Raises
    ------
    ConfigError
        If the generator stored no upper gradient.

    Notes
    -----
    Cost: 0; the generator has counted its pass.

    Source: the simultaneous updates of penalty and minimax methods (V-PBGD, G-PBGD, ScaleBiO,
    BOME).

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.ones(1)},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, _: x["x"].sum(),
    ...     f=lambda t, x, _: x["x"].sum(),
    ... )
    >>> from hgms_core import Branch
    >>> branch = Branch(
    ...     x=problem.x0, aux={"theta.t": torch.tensor([2.0]), "upper_loss": torch.tensor(0.5)}
    ... )
    >>> Carried().estimate(problem, problem.theta0, *branch.as_candidates(), Key(0), {})[0].value
    {'t': tensor([2.])}
    """

    name: ClassVar[str] = "carried"

    def init(self, problem: Problem) -> State:
        return {}

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        branch = candidates.branch(selection.index)
        aux = branch.aux
        try:
            value = {name: aux[f"theta.{name}"] for name in theta}
            return Estimate(
                value=value,
                upper_loss=aux["upper_loss"],
                lower_gradient_norm=aux.get("lower_gradient_norm"),
            ), state
        except KeyError as absent:
            raise ConfigError(
                "not-supported",
                f"hypergradient 'carried' requires {absent} from the generator, which does not "
                "compute it",
                place=("hypergradient",),
                hint="use the generator value-gap, gradient-norm, minimax, dynamic-barrier or "
                "soba, or the hypergradient implicit, unrolled or one-step",
            ) from None
