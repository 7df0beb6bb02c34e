"""Values that components exchange: candidates, selections, solutions, hypergradients, costs."""

from __future__ import annotations

import enum
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
    """The outcome of a linear solve. The value is the message for users, and ``code`` is the
    number in ``Solution.codes``.
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
        """Return the short kebab-case name, as records store it."""
        return self.name.lower().replace("_", "-")


@frozen(kw_only=True)
class Cost:
    """Numbers of oracle calls. A call on a batch counts as one; ``rows`` is the total number of
    examples in all calls.

    A count that an accelerator computes is a tensor, to avoid a wait.

    Examples
    --------
    >>> (Cost(lower_gradients=20) + Cost(upper_values=1)).calls
    21
    """

    lower_gradients: int = 0
    upper_values: int = 0
    upper_gradients: int = 0
    products: int | Tensor = 0
    cross_products: int = 0
    rows: int | Tensor = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})

    def numbers(self) -> dict[str, Any]:
        """Return the six counts by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    @property
    def calls(self) -> Any:
        """Return the total number of oracle calls, which a budget in oracle calls limits."""
        return sum(self.numbers().values()) - self.rows


_COUNTS = tuple(count.name for count in fields(Cost))


@frozen(kw_only=True)
class LastStep:
    """The last lower step of a branch, or the next plain step:
    x⁺ = a − rate·∇_x g(θ, x; batch).

    In the last step, a is x after weight decay, minus the momentum term. It does not depend on the
    gradient of this step. In the next plain step, a is x.

    ``x`` is the state before the step. ``batch`` is the lower batch of the step, and ``rows`` is
    its number of rows. ``cost`` is the cost of recomputing these values.
    """

    x: Tree
    batch: Tree
    rows: int
    rate: float
    cost: Cost = Cost()


@frozen(kw_only=True)
class Branch:
    """The selected candidate, its auxiliary values, and functions for the backward pass through the
    branch. A function is None if the generator does not provide it.

    - ``x``: the selected lower state (detached).
    - ``aux``: auxiliary values from the generator (optimiser moments, ScaleBiO's u, an upper
      gradient from the same pass).
    - ``replay(theta, last)``: runs the branch at any θ. It returns the final state of the branch
      and the cost. The state is differentiable in θ through the ``last`` steps (None: all steps).
      The cost includes the run and the backward pass through it. If no leaf of θ requires a
      gradient, there is no graph, and the cost includes only the run.
    - ``replay_mixed(theta, last)``: the same with a backward pass step by step, by mixed-mode
      differentiation: it keeps states instead of graphs.
    - ``last_step()``: the last step of the branch. Generators provide it if this step is linear in
      ∇_x g.
    - ``next_step(key)``: one more plain step from ``x``, on a batch drawn by ``key``.

    Examples
    --------
    >>> branch = Branch(
    ...     x={"x": torch.ones(2)}, replay=lambda theta, last: ({"x": theta["a"] + 1}, Cost())
    ... )
    >>> branch.replay({"a": torch.zeros(2)}, None)[0]["x"]
    tensor([1., 1.])
    """

    x: Tree
    replay: Callable[[Tree, int | None], tuple[Tree, Cost]] | None = None
    replay_mixed: Callable[[Tree, int | None], tuple[Tree, Cost]] | None = None
    aux: Tree = Factory(dict)
    last_step: Callable[[], LastStep] | None = None
    next_step: Callable[[Key], LastStep] | None = None

    def as_candidates(self) -> tuple[Candidates, Selection]:
        """Return this branch as the only candidate, and its selection, to estimate at this branch.

        Examples
        --------
        >>> candidates, selection = Branch(x={"x": torch.ones(2)}).as_candidates()
        >>> candidates.count, candidates.branch(selection.index).x
        (1, {'x': tensor([1., 1.])})
        """
        candidates = Candidates(
            x={name: leaf[None] for name, leaf in self.x.items()},
            aux={name: leaf[None] for name, leaf in self.aux.items()},
            replay=self.replay and (lambda index, *inputs: self.replay(*inputs)),
            replay_mixed=self.replay_mixed and (lambda index, *inputs: self.replay_mixed(*inputs)),
            last_step=self.last_step and (lambda index: self.last_step()),
            next_step=self.next_step and (lambda index, x, key: self.next_step(key)),
        )
        return candidates, Selection.of(next(iter(candidates.x.values())).new_zeros(1))


@frozen(kw_only=True)
class Candidates:
    """N lower states as one stacked tree, their auxiliary values, and functions for the backward
    pass to θ.

    ``x`` contains the states: selectors score them, estimators differentiate at them, and
    generators carry them to the next step. Runs also evaluate them. ``aux`` contains auxiliary
    values such as optimiser moments, which only accompany the states. ``losses`` is the last lower
    loss that each candidate computed, ``[N]``.

    The functions for the backward pass take the number of a candidate. A function is None if the
    generator does not provide it:

    - ``replay(index, theta, last)``: the candidate as a differentiable function of any θ
      (:class:`Branch`), and its cost. ``replay_mixed`` is the same in mixed mode.
    - ``last_step(index)``: the last step of the candidate, if this step is linear in ∇_x g.
      It raises ConfigError if the settings make the step nonlinear.
    - ``next_step(index, x, key)``: one more plain step x − rate·∇_x g(θ, x; batch) from the
      candidate's ``x``, at its last rate. ``key`` draws a new lower batch, which no selection has
      used.

    These functions store the inputs of a replay (problem, θ, start, key). They do not store the
    other candidates, because a :class:`Branch` would then keep them in memory.
    """

    x: Tree
    aux: Tree = Factory(dict)
    losses: Tensor | None = None
    cost: Cost = Cost()
    replay: Callable[[Tensor, Tree, int | None], tuple[Tree, Cost]] | None = None
    replay_mixed: Callable[[Tensor, Tree, int | None], tuple[Tree, Cost]] | None = None
    last_step: Callable[[Tensor], LastStep] | None = None
    next_step: Callable[[Tensor, Tree, Key], LastStep] | None = None

    @property
    def count(self) -> int:
        return next(iter(self.x.values())).shape[0]

    def at(self, index: int | Tensor) -> Tree:
        return take(self.x, index)

    def branch(self, index: Tensor) -> Branch:
        """Return candidate ``index`` as a :class:`Branch`, with its backward functions.

        Examples
        --------
        >>> branch = Candidates(x={"x": torch.tensor([1.0, 2.0])}).branch(torch.tensor(1))
        >>> branch.x, branch.replay is None
        ({'x': tensor(2.)}, True)
        """

        def bind(function: Callable[..., Any] | None, *arguments: object) -> Any:
            return None if function is None else partial(function, index, *arguments)

        x = self.at(index)
        return Branch(
            x=x,
            aux=take(self.aux, index),
            replay=bind(self.replay),
            replay_mixed=bind(self.replay_mixed),
            last_step=bind(self.last_step),
            next_step=bind(self.next_step, x),
        )

    @property
    def finite(self) -> Tensor:
        """Return a mask of the candidates with only finite numbers, ``[N]``."""
        # A non-finite number makes the sum of its row non-finite. A test of every number takes
        # twenty times as long as these sums.
        rows = [leaf.reshape(self.count, -1) for leaf in self.x.values()]
        sums = [row.sum(1, dtype=torch.promote_types(row.dtype, torch.float32)) for row in rows]
        return torch.isfinite(torch.stack(sums)).all(0)


@frozen(kw_only=True)
class Selection:
    """The selected candidate, ``index``, and the scores of all candidates.

    ``gap`` is the distance between the best two finite scores (inf if there is only one finite
    score). ``finite`` is the number of finite scores, as a tensor, to avoid a wait for the GPU.
    ``cost`` counts the calls of the losses; the default is a selector that calls none.
    """

    index: Tensor
    scores: Tensor
    gap: Tensor
    finite: Tensor
    cost: Cost = Cost()

    @classmethod
    def of(cls, scores: Tensor, *, highest: bool = False, cost: Cost | None = None) -> Selection:
        """Select the lowest (``highest``: the highest) finite score of ``[N]``.

        For equal scores, the lowest index is selected. All numbers stay on the device.

        Examples
        --------
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
    """The result of a linear solver for (H + ridge·I) v = b: one system ``[d]`` or a batch
    ``[N, d]``.

    - ``residual``: ‖b − (H + ridge·I) v‖ / ‖b‖ of the returned value *before clipping* (0 if
      b = 0).
    - ``curvature``: the smallest Rayleigh quotient pᵀ(H + ridge·I)p / pᵀp that the solver computed
      (inf if it computed no quotient).
    - ``iterations``: the iterations per system.
    - ``products``: the number of calls of the operator. Calls for finished systems do not count.
    """

    value: Tensor
    codes: Tensor
    residual: Tensor
    iterations: Tensor
    curvature: Tensor
    products: int | Tensor

    @property
    def outcome(self) -> Outcome:
        """Return the outcome of a single system, or the worst outcome of a batch."""
        return list(Outcome)[int(self.codes.max())]

    @property
    def converged(self) -> Tensor:
        return self.codes == Outcome.CONVERGED.code


@frozen(kw_only=True)
class Estimate:
    """An estimate of ∇F(θ) and measures of its quality.

    - ``value``: the estimate, with the shapes of θ. ``hgms.hypergradient`` nests it like θ.
    - ``solution``: the linear solve of the estimate (None for estimators without a linear solve).
    - ``lower_gradient_norm``: ‖∇_x g‖ at the lower state of the estimate (0 at an exact lower
      solution).
    """

    value: Any
    upper_loss: Tensor
    lower_gradient_norm: Tensor | None = None
    solution: Solution | None = None
    cost: Cost = Cost()

    @property
    def outcome(self) -> Outcome:
        """Return the outcome of the linear solve.

        It is also NONFINITE if the mixed term, the direct term or ∇_x g is not finite.
        """
        return list(Outcome)[int(self.code)]

    @property
    def code(self) -> Tensor:
        """Return ``outcome.code`` as a tensor, which does not wait for a GPU."""
        if self.solution is None:
            return torch.tensor(Outcome.NOT_SOLVED.code)
        code = self.solution.codes.max()
        total = sum(
            (
                leaf.sum(dtype=torch.promote_types(leaf.dtype, torch.float32))
                for leaf in tree_leaves((self.value, self.lower_gradient_norm))
                if leaf is not None
            ),
            torch.zeros_like(code, dtype=torch.float32),
        )
        return code.masked_fill(~torch.isfinite(total), Outcome.NONFINITE.code)


Record = dict[str, Any]
"""One outer step as a flat row. The runner converts its tensors to numbers in one transfer, and an
``outcome`` that is a tensor of codes to its label.
"""
