"""The derivative of one SGD step: an additional step, or the last step of the branch.

It is exact and of first order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, final

from attrs import field

from hgms.hypergradients.step import through
from hgms_core import (
    Branch,
    Candidates,
    ConfigError,
    Estimate,
    Key,
    LastStep,
    Problem,
    Selection,
    State,
    Tree,
    component,
)
from hgms_core.validators import optional_positive


@final
@component
class ThroughStep:
    """∇_θ of f(θ, x⁺(θ)), with x⁺ one additional SGD step from the selected state x̂.

    Its batch B is fresh: the selection has not used it. The step and the hypergradient are::

        x⁺ = x̂ − η ∇_x g(θ, x̂; B)
        h = ∇_θ f(θ, x⁺) − η ∇²_θx g(θ, x̂; B) v,      v = ∇_x f(θ, x⁺)

    η is the rate of the branch's last step, and B is as large as its batch. This is the exact
    derivative of that step: it equals double backward. For g = Σ_s ω_s(θ) ℓ_s it reads ∂F/∂ω_s =
    −η⟨v, ∇ℓ_s(x̂; B)⟩, and no second derivative of the model appears.

    ``batch = "own"`` is the derivative through the branch's last step: B is the batch of that step
    and x̂ the state before it. With one lower step per branch, it is the hypergradient of the
    actual computation (the HG-MS paper's, "through the selected branch"). With K > 1 steps, it is
    truncation to one step. With a selection among branches it is biased. The winner is the branch
    whose batch helped validation, so the source that is heaviest in every batch seems to help most.
    Of two equal sources, one ends with all the weight. Use it with one branch.

    Use for language models: it works with flash attention, activation checkpointing and quantised
    bases. Avoid when many lower steps lie between θ and the state that is scored.

    Parameters
    ----------
    batch
        ``fresh``, drawn with the step's key, or the branch's ``own``.
    derivative
        How to compute ∇²_θx g·v. ``difference`` takes two forward passes of the batch, at x ± τv,
        for all sources at once. ``exact`` takes one forward pass with tangents (not through flash
        attention or a quantised base). ``per-source`` takes one backward pass per source, ⟨v, ∇ℓ_s⟩
        (only if g mixes named sources).
    displacement
        τ‖v‖ of ``difference`` (None: from the precision of the losses).
    upper_batch_size
        Validation rows of the role ``differentiate`` for f (None: all).

    Raises
    ------
    ConfigError
        If the generator's step is not linear in ∇g, and for ``per-source`` without sources.

    Notes
    -----
    Cost: 1 lower gradient, 1 upper gradient, 1 cross product (``per-source``: S lower gradients
    instead of the cross product). With ``batch = "own"``, the first lower gradient is the branch's
    and is not recomputed, but K − 1 others are.

    Source: HG-MS paper, experiments on language models (the hypergradient "through the selected
    branch"; its form and the fresh batch are this project's, since the paper specifies neither);
    additional step: Liu, Simonyan, Yang, *DARTS* (2019).

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.tensor([1.0])},
    ...     x0={"x": torch.tensor([3.0])},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 2).sum(),
    ... )
    >>> def next_step(key):  # from x = 3 with η = 1/4: x⁺ = 3 − ¼·2·(3 − 1) = 2
    ...     return LastStep(x=problem.x0, batch={}, rows=1, rate=0.25)
    >>> branch = Branch(x=problem.x0, next_step=next_step)
    >>> h = (
    ...     ThroughStep(derivative="exact")
    ...     .estimate(problem, problem.theta0, *branch.as_candidates(), Key(0), {})[0]
    ...     .value["t"]
    ... )
    >>> h  # dF/dt = 2x⁺ · ∂x⁺/∂t = 4 · ½
    tensor([2.])
    """

    name: ClassVar[str] = "through-step"
    testing_failures: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("closed-form-ridge", "central-difference"),
        "one lower step stands for the solution: η·I for the inverse Hessian, exact where H = I/η",
    )
    batch: Literal["fresh", "own"] = "fresh"
    derivative: Literal["difference", "exact", "per-source"] = "difference"
    displacement: float | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"sources"} if self.derivative == "per-source" else ())

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
        step = self._step(branch, key.fold("lower"))
        above, rows = problem.upper_data["differentiate"].sample(
            key.fold("upper"), self.upper_batch_size
        )
        end = None if self.batch == "fresh" else branch.x
        return through(
            problem, theta, step, above, rows, self.derivative, self.displacement, end
        ), state

    def _step(self, branch: Branch, key: Key) -> LastStep:
        if self.batch == "fresh" and branch.next_step is not None:
            return branch.next_step(key)
        if self.batch == "own" and branch.last_step is not None:
            return branch.last_step()
        which = "next" if self.batch == "fresh" else "last"
        raise ConfigError(
            "not-supported",
            f"hypergradient 'through-step' with batch={self.batch!r} requires the {which} step of "
            "a branch, which this generator does not return",
            place=("hypergradient", "batch"),
            hint="use the generator 'branches' with optimizer = \"sgd\", or the hypergradient "
            "'one-step'",
        )
