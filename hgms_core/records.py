"""The values that pass between components: candidates, selections, solutions, hypergradients and
their costs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import Factory, fields, frozen
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hgms_core.seeding import Key
from hgms_core.trees import Tree, take


class Outcome(enum.Enum):
    """How a linear solve ended. The value is the sentence to show; ``code`` is what a tensor
    holds.
    """

    CONVERGED = "the residual reached the tolerance"
    ITERATION_LIMIT = (
        "the iteration limit was reached first; raise max_steps or the ridge, or "
        "loosen the tolerance"
    )
    NEGATIVE_CURVATURE = (
        "a direction of non-positive curvature was met (the lower Hessian plus ridge is not "
        "positive definite here) and the "
        "iterate before it is returned; raise the ridge, use minres, or let the lower level run "
        "longer"
    )
    STAGNATED = (
        "the residual stopped falling at the precision of the numbers: the system is singular "
        "and inconsistent or the "
        "tolerance is too tight; raise the ridge, loosen the tolerance, or use float64"
    )
    DIVERGED = "the iteration grew instead of shrinking; lower the step size or use cg"
    NONFINITE = (
        "a derivative of a loss is not finite; a solver returns its last finite iterate "
        "(check the losses for overflow)"
    )
    NOT_SOLVED = "no system was solved: this estimator does not use one"

    @property
    def code(self) -> int:
        return list(Outcome).index(self)

    @property
    def label(self) -> str:
        """Short kebab-case name, as records hold it."""
        return self.name.lower().replace("_", "-")


@frozen(kw_only=True)
class Cost:
    """Oracle calls. A call on a batch counts one; ``rows`` adds up the examples that went through
    all the calls.

    >>> (Cost(lower_gradients=20) + Cost(upper_values=1)).calls
    21
    """

    lower_gradients: int = 0
    upper_values: int = 0
    upper_gradients: int = 0
    products: int = 0
    cross_products: int = 0
    rows: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})

    def numbers(self) -> dict[str, int]:
        """The six counts by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    @property
    def calls(self) -> int:
        """All oracle calls together: what a budget in oracle calls counts."""
        return sum(self.numbers().values()) - self.rows


_COUNTS = tuple(count.name for count in fields(Cost))


@frozen(kw_only=True)
class LastStep:
    """How a branch came to where it is: x⁺ = a − rate·∇_x g(θ, x; batch), where a (x after decay,
    less what momentum adds) does not depend on this step's gradient. Or the plain step it would
    take next, where a is x.

    ``x`` is the state before that step, ``batch`` the lower batch it is taken on, ``rows`` how many
    rows that holds, ``cost`` what it took to compute all this again.
    """

    x: Tree
    batch: Tree
    rows: int
    rate: float
    cost: Cost = Cost()


@frozen(kw_only=True)
class Branch:
    """The selected candidate, its baggage, and the ways back through it, where its generator knows
    some (else None).

    ``x`` is the selected lower state (detached), ``aux`` what its generator sent along with it
    (optimiser moments, ScaleBiO's u, an upper gradient that came out of the same pass).
    ``replay(theta, last)`` runs the branch again at any θ. It returns where the branch then ends,
    differentiable in that θ through its ``last`` steps (None: all of them), and the cost of this
    run and of going back through it. Where no leaf of θ requires a gradient there is no graph, and
    the run alone is counted. ``last_step()`` is the branch's last step, from generators whose last
    step is linear in ∇_x g; ``next_step(key)`` is one plain step more from ``x``, on a batch drawn
    by ``key``.

    >>> branch = Branch(
    ...     x={"x": torch.ones(2)}, replay=lambda theta, last: ({"x": theta["a"] + 1}, Cost())
    ... )
    >>> branch.replay({"a": torch.zeros(2)}, None)[0]["x"]
    tensor([1., 1.])
    """

    x: Tree
    replay: Callable[[Tree, int | None], tuple[Tree, Cost]] | None = None
    aux: Tree = Factory(dict)
    last_step: Callable[[], LastStep] | None = None
    next_step: Callable[[Key], LastStep] | None = None


@frozen(kw_only=True)
class Candidates:
    """N lower states as one stacked tree, their baggage, and the ways back to θ.

    ``x`` is scored, differentiated at, evaluated and carried; ``aux`` (optimiser moments and the
    like) only travels along. ``losses`` holds the last lower loss each candidate saw, ``[N]``. What
    leads back through a candidate are functions of its number; None where there is no such way:

    - ``replay(index, theta, last)``: the candidate as a differentiable function of any θ
      (:class:`Branch`), and its cost.
    - ``last_step(index)``: its last step, where that is linear in ∇_x g (ConfigError where the
      settings make it another).
    - ``next_step(index, x, key)``: one plain step x − rate·∇_x g(θ, x; batch) more from its ``x``,
      at its last rate, on a lower batch that ``key`` draws anew. No selection has looked at this
      batch.

    They hold what they need to run a candidate again (problem, θ, start, key), and not the other
    candidates: a :class:`Branch` would keep these alive.
    """

    x: Tree
    aux: Tree = Factory(dict)
    losses: Tensor | None = None
    cost: Cost = Cost()
    replay: Callable[[Tensor, Tree, int | None], tuple[Tree, Cost]] | None = None
    last_step: Callable[[Tensor], LastStep] | None = None
    next_step: Callable[[Tensor, Tree, Key], LastStep] | None = None

    @property
    def count(self) -> int:
        return next(iter(self.x.values())).shape[0]

    def at(self, index: int | Tensor) -> Tree:
        return take(self.x, index)

    def branch(self, index: Tensor) -> Branch:
        """Candidate ``index`` alone, with its ways back.

        >>> branch = Candidates(x={"x": torch.tensor([1.0, 2.0])}).branch(torch.tensor(1))
        >>> branch.x, branch.replay is None
        ({'x': tensor(2.)}, True)
        """
        x = self.at(index)
        replay = self.replay
        last_step = self.last_step
        next_step = self.next_step
        return Branch(
            x=x,
            aux=take(self.aux, index),
            replay=None if replay is None else partial(replay, index),
            last_step=None if last_step is None else partial(last_step, index),
            next_step=None if next_step is None else partial(next_step, index, x),
        )

    @property
    def finite(self) -> Tensor:
        """Which candidates hold only finite numbers, ``[N]``."""
        # A number that is not finite makes its row's sum so: one fast pass; testing every number
        # takes twenty times as long.
        rows = [leaf.reshape(self.count, -1) for leaf in self.x.values()]
        sums = [row.sum(1, dtype=torch.promote_types(row.dtype, torch.float32)) for row in rows]
        return torch.isfinite(torch.stack(sums)).all(0)


@frozen(kw_only=True)
class Selection:
    """Which candidate was chosen. ``gap`` is the distance between the best two finite scores (inf
    if there is only one); ``finite`` how many scores were finite, as a tensor, so that nothing
    waits for the GPU.
    """

    index: Tensor
    scores: Tensor
    gap: Tensor
    finite: Tensor
    cost: Cost = Cost()

    @classmethod
    def of(cls, scores: Tensor, *, highest: bool = False, cost: Cost | None = None) -> Selection:
        """The lowest (``highest``: the highest) finite score of ``[N]``; ties go to the lowest
        index. No number leaves the device.

        >>> chosen = Selection.of(torch.tensor([3.0, 1.0, torch.nan]))
        >>> int(chosen.index), float(chosen.gap), int(chosen.finite)
        (1, 2.0, 2)
        """
        signed = -scores if highest else scores
        finite = torch.isfinite(signed)
        ranked = torch.where(finite, signed, torch.full_like(signed, torch.inf))
        count = ranked.shape[0]
        positions = torch.arange(count, device=ranked.device)
        ties = (ranked == ranked.min()) & finite
        index = positions.masked_fill(~ties, count - 1).min() if count > 1 else positions[0]
        ordered = ranked.sort().values
        gap = ordered[1] - ordered[0] if count > 1 else torch.full_like(ordered[0], torch.inf)
        gap = gap.masked_fill(gap.isnan(), torch.inf)
        return cls(index=index, scores=scores, gap=gap, finite=finite.sum(), cost=cost or Cost())


@frozen(kw_only=True)
class Solution:
    """What a linear solver returns for (H + ridge·I) v = b, one system ``[d]`` or a batch ``[N,
    d]``.

    ``residual`` is ‖b − (H + ridge·I) v‖ / ‖b‖ of the returned value *before clipping* (0 where b =
    0), ``curvature`` the smallest Rayleigh quotient pᵀ(H + ridge·I)p / pᵀp met (inf if none),
    ``iterations`` per system, ``products`` the number of calls of the operator.
    """

    value: Tensor
    codes: Tensor
    residual: Tensor
    iterations: Tensor
    curvature: Tensor
    products: int

    @property
    def outcome(self) -> Outcome:
        """The outcome of a single system; of a batch the worst (``outcomes`` holds all)."""
        return list(Outcome)[int(self.codes.max())]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        members = list(Outcome)
        return tuple(members[code] for code in self.codes.reshape(-1).tolist())

    @property
    def converged(self) -> Tensor:
        return self.codes == Outcome.CONVERGED.code


@frozen(kw_only=True)
class Estimate:
    """An estimate of ∇F(θ), and how good it is.

    ``value`` has the shapes of θ; ``hgms.hypergradient`` returns it nested as θ is.
    ``solution`` is the linear solve behind it (None for estimators without one),
    ``lower_gradient_norm`` is ‖∇_x g‖ at the state differentiated at (0 at an exact lower
    solution).
    """

    value: Any
    upper_loss: Tensor
    lower_gradient_norm: Tensor | None = None
    solution: Solution | None = None
    cost: Cost = Cost()

    @property
    def outcome(self) -> Outcome:
        """How the linear solve ended; NONFINITE also where the mixed term, the direct one or ∇_x
        g is not finite.
        """
        if self.solution is None:
            return Outcome.NOT_SOLVED
        code = total = self.solution.codes.max().to(torch.float32)
        for leaf in (
            *tree_leaves(self.value),
            *([] if self.lower_gradient_norm is None else [self.lower_gradient_norm]),
        ):
            total = total + leaf.sum(dtype=torch.promote_types(leaf.dtype, torch.float32))
        # at once, so that a GPU is waited for once
        worst, total = torch.stack([code.to(total), total]).tolist()
        return list(Outcome)[int(worst)] if math.isfinite(total) else Outcome.NONFINITE

    @property
    def residual(self) -> Tensor | None:
        return self.solution.residual if self.solution is not None else None

    @property
    def iterations(self) -> Tensor | None:
        return self.solution.iterations if self.solution is not None else None

    @property
    def curvature(self) -> Tensor | None:
        return self.solution.curvature if self.solution is not None else None


Record = dict[str, Any]
"""One outer step as a flat row: tensors until the runner turns them into numbers, all in one
transfer.
"""
