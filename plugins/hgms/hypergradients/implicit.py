"""The implicit hypergradient: one linear solve with the lower Hessian at the selected state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import ClassVar, Literal, final

from attrs import define, evolve, field
from torch import Tensor

from hgms.compiled import Levels, linearized
from hgms.config import lowering
from hgms.gauss_newton import Product, by_difference, gauss_newton
from hgms.hypergradients.fresh_batches import Batches, on_fresh_batches
from hgms.hypergradients.operator import with_operator
from hgms_core import (
    Batch,
    Candidates,
    ConfigError,
    Estimate,
    Key,
    Linearization,
    LinearSolver,
    Loss,
    MatVec,
    Problem,
    Selection,
    Solution,
    State,
    Strategy,
    Tree,
    component,
    detach,
)
from hgms_core.capabilities import (
    Capabilities,
    Fixed,
    JoinsStep,
    Randomized,
    Recycles,
    SolvesInProgram,
    UsesLoss,
    find,
)
from hgms_core.validators import optional_positive


@final
@component
class Implicit:
    """Equation (3) of the paper at the selected lower state x̂, with any linear solver::

        ĥ = ∇_θ f(θ, x̂) − ∇²_θx g(θ, x̂) v,        (∇²_xx g(θ, x̂) + γI) v ≈ ∇_x f(θ, x̂)

    Use when x̂ nearly minimises g, or when its path is too long to unroll. Avoid when x̂ is far
    from stationary: the formula assumes ∇_x g(θ, x̂) = 0 (recorded as ``lower_gradient_norm``).

    Parameters
    ----------
    solver
        Any LinearSolver; it defines the ridge γ, tolerances and iteration limit. Three capabilities
        are supported: a solver that ``Recycles`` (``recycled-cg``) keeps a memory across outer
        steps, in the state; one that ``UsesLoss`` (``kfac``) receives g at x̂; a ``Randomized`` one
        draws from the step's key.
    strategy
        How to compute products with the Hessian: ``vjp`` (retained graph), ``jvp`` (forward over
        reverse) or ``difference`` (central difference of gradients).
    operator
        Matrix of the linear system: ∇²_xx g (``hessian``) or the generalised Gauss–Newton matrix
        (``ggn``). ``ggn`` is positive semidefinite if g's criterion is convex in (x, outputs), so
        no solve ends at negative curvature. It equals the Hessian if the outputs are linear in x.
        Otherwise h is biased by the neglected term, which vanishes with the residuals of the fit.
        ∇²_θx g is still the mixed derivative of g. ``ggn`` requires losses that define their
        outputs (:class:`hgms.gauss_newton.Composite`). Its products are exact; with ``difference``
        they are central differences of the outputs, which need no second derivative of a network.
    batch_size
        Lower rows for the Hessian and the mixed term, drawn freshly in each outer step (None: all).
    upper_batch_size
        Validation rows of the role ``differentiate`` for ∇f (None: all).
    batches
        ``one`` lower batch for the whole system, or a ``fresh`` batch for every Hessian product and
        for the mixed term, for stochastic approximation (stocBiO, AmIGO). With ``fresh``, the
        solver sees a noisy operator: use ``neumann`` or ``fixed-point``. A residual then refers to
        one batch, and conjugate gradients do not work.
    warm_start
        Start the solver from the last outer step's v.

    Raises
    ------
    ConfigError
        With ``ggn`` if the lower loss does not define its outputs.

    Notes
    -----
    Cost: 1 upper gradient, 1 lower gradient, one Hessian product per iteration, 1 cross product.
    With fresh batches, a ``vjp`` product recomputes its batch's gradient, so there are as many
    lower gradients as products.

    Source: HG-MS paper, equation (3) and Algorithm 1. ``ggn``: Schraudolph (2002).

    Examples
    --------
    >>> import torch
    >>> problem = Problem(
    ...     theta0={"t": torch.tensor([3.0])},
    ...     x0={"x": torch.tensor([3.0])},
    ...     g=lambda t, x, _: ((x["x"] - t["t"]) ** 2).sum(),
    ...     f=lambda t, x, _: (x["x"] ** 2).sum(),
    ... )
    >>> class Half:
    ...     name = "half"
    ...
    ...     def solve(self, matvec, b, x0=None):
    ...         from hgms_core import CallableSolver
    ...
    ...         return CallableSolver(lambda matvec, b: b / 2).solve(matvec, b)
    >>> from hgms_core import Branch
    >>> branch = Branch(x=problem.x0)
    >>> estimate, _ = Implicit(solver=Half()).estimate(
    ...     problem, problem.theta0, *branch.as_candidates(), Key(0), {"v": None}
    ... )
    >>> estimate.value["t"]  # x*(θ) = θ, F = θ², F' = 2θ
    tensor([6.])
    """

    name: ClassVar[str] = "implicit"
    capabilities: ClassVar[Capabilities] = frozenset({JoinsStep})
    solver: LinearSolver
    strategy: Strategy = "vjp"
    operator: Literal["hessian", "ggn"] = "hessian"
    batch_size: int | None = field(default=None, validator=optional_positive)
    upper_batch_size: int | None = field(default=None, validator=optional_positive)
    batches: Literal["one", "fresh"] = "one"
    warm_start: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.strategy == "difference" else frozenset({"smooth-lower"})

    memory_hints = lowering(other=["batch_size"])

    def __attrs_post_init__(self) -> None:
        if self.operator == "ggn" and self.batches == "fresh":
            raise ConfigError(
                "conflicting-options",
                "operator='ggn' does not support batches='fresh'",
                place=("operator",),
            )

    def init(self, problem: Problem) -> State:
        return {"v": None}

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
        lower = problem.lower_data
        below, batch, upper_batch = self._rows(problem, key)
        rows = self._counts(problem)
        x = branch.x
        v0 = state["v"] if self.warm_start else None
        solver = prepare(self.solver, problem.g, theta, x, lambda: batch, state, key.fold("solve"))
        if (here := self._compile(problem, theta, x, batch, upper_batch)) is not None:
            estimate = here.hypergradient(solver, v0, rows)
        elif self.operator == "ggn":
            mixed: Strategy = "difference" if self.strategy == "difference" else "jvp"
            levels = evolve(self._levels(problem), strategy=mixed)
            estimate = with_operator(levels, batch, upper_batch, theta, x, solver, v0, rows)
        elif self.batches == "fresh" and below is not None:
            more = (lower.sample(key.fold("lower", i), self.batch_size)[0] for i in count(1))
            estimate = on_fresh_batches(
                self._levels(problem),
                Batches(upper_batch, batch, more),
                theta,
                x,
                solver,
                v0,
                rows,
                problem.compiler,
            )
        else:
            here = self._levels(problem).linearization(theta, x, batch, upper_batch)
            estimate = here.hypergradient(solver, v0, rows)
        assert estimate.solution is not None
        return estimate, {"v": estimate.solution.value if self.warm_start else None} | memory_of(
            solver
        )

    def operands(
        self, problem: Problem, key: Key, state: State
    ) -> tuple[Tree, Tree] | Fixed | None:
        joins = self.batches == "one" and self.operator == "hessian"
        if not joins or find(self.solver, SolvesInProgram) is None:
            return None
        batches = self._rows(problem, key)[1:]
        whole = self.batch_size is None and self.upper_batch_size is None
        return Fixed(batches) if whole else batches

    def compute(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        state: State,
        operands: tuple[Tree, Tree],
    ) -> tuple[Estimate, State]:
        x = candidates.at(selection.index)
        here = self._levels(problem).linearization(theta, x, *operands)
        v0 = state["v"] if self.warm_start else None
        estimate = here.hypergradient(self.solver, v0, self._counts(problem))
        assert estimate.solution is not None
        return estimate, {"v": estimate.solution.value if self.warm_start else None}

    def _rows(self, problem: Problem, key: Key) -> tuple[Tensor | None, Tree, Tree]:
        """Return the numbers of the lower rows, and both batches."""
        lower = problem.lower_data
        upper = problem.upper_data["differentiate"]
        below = _single(lower.draw(key.fold("lower"), self.batch_size, 1))
        above = _single(upper.draw(key.fold("upper"), self.upper_batch_size, 1))
        return below, lower.batch(below), upper.batch(above)

    def _counts(self, problem: Problem) -> tuple[int, int]:
        """Return the numbers of rows of the upper and of the lower batch."""
        upper = problem.upper_data["differentiate"]
        return upper.count(self.upper_batch_size), problem.lower_data.count(self.batch_size)

    def _product(self, problem: Problem) -> Product:
        if self.strategy == "difference":
            return by_difference(problem.g, precision=problem.precision)
        return gauss_newton(problem.g)

    def _levels(self, problem: Problem) -> Levels:
        return Levels(
            f=problem.f,
            g=problem.g,
            strategy=self.strategy,
            precision=problem.precision,
            operator=self._product(problem) if self.operator == "ggn" else None,
        )

    def _compile(
        self, problem: Problem, theta: Tree, x: Tree, below: Tree, above: Tree
    ) -> Linearization | None:
        if self.operator == "ggn" and self.strategy == "difference":
            return None
        programs = problem.compiler if self.batches == "one" else None
        if programs is None:
            return None
        key = (self.name, problem.f, problem.g)
        levels = self._levels(problem)
        return linearized(programs, key, levels, detach(theta), detach(x), below, above)


def _single(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers[0]


@define
class Remembering:
    """Wrap a solver that ``Recycles`` as a LinearSolver, and store its new memory.

    A solver's memory is a state: ``{}`` before the first system, and never changed in place.
    """

    name: ClassVar[str] = "remembering"
    solver: Recycles
    memory: State

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        solution, self.memory = self.solver.solve_from(matvec, b, x0, self.memory)
        return solution


def prepare(
    solver: LinearSolver,
    g: Loss,
    theta: Tree,
    x: Tree,
    batch: Callable[[], Batch],
    state: State,
    key: Key,
) -> LinearSolver:
    """Prepare the solver for one solve.

    Pass the key to a ``Randomized`` solver, then g on the lower ``batch()`` to one that
    ``UsesLoss``. Wrap a solver that ``Recycles`` with the memory in ``state``. Return other solvers
    unchanged.
    """
    if randomized := find(solver, Randomized):
        solver = randomized.with_key(key)
    if uses_loss := find(solver, UsesLoss):
        solver = uses_loss.for_loss(g, theta, x, batch())
    recycles = find(solver, Recycles)
    return solver if recycles is None else Remembering(recycles, state.get("memory", {}))


def memory_of(solver: LinearSolver) -> State:
    """Return the entries to add to the state after the solve."""
    return {"memory": solver.memory} if isinstance(solver, Remembering) else {}
