"""The lower solution as a node of an autograd graph: ``x = lower_solution(g, theta, x, solver=…)`` and then plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args

import torch
from attrs import frozen
from torch import Tensor

from hgms_core import (
    ConfigError,
    Nested,
    Ravel,
    Shape,
    Solution,
    Strategy,
    Tree,
    as_solver,
    check_floating,
    cross_product,
    curvature,
    detach,
    differences_named,
    one_of,
    pure,
)

Lower = TypeVar("Lower")

ONCE = (
    "lower_solution can be differentiated once, and this is the second derivative of it\n"
    '  inside another level\'s loss give that level `strategy = "difference"`; elsewhere leave create_graph out,\n'
    "  or unroll the lower level's steps in the graph instead"
)


def lower_solution(
    g: Callable[..., Tensor],
    theta: Nested,
    x: Lower,
    *,
    solver: Any,
    strategy: Strategy = "vjp",
    v0: Tensor | None = None,
    report: Callable[[Solution, Tensor], None] | None = None,
) -> Lower:
    """x*(θ), the state ``x`` that minimises g(θ, ·), as a differentiable function of ``theta``.

    The way forward returns ``x`` as it is: solve the lower level however you like. The way back takes the implicit function
    theorem. For ∂L/∂x, whatever the graph above made of x::

        ∂L/∂θ = −∇²_θx g(θ, x)·v,      (∇²_xx g(θ, x) + γI) v = ∂L/∂x

    Use when x* is one part of a larger graph; where f and g are all there is, :func:`hypergradient` gives the same numbers with
    a report of their quality. Inside another level's loss it nests where that level takes ``strategy="difference"``. Avoid
    where x is far from a minimiser: the formula assumes ∇_x g = 0, and differentiating through the steps does not.

    Arguments:
        g: the lower loss, ``g(theta, x) -> scalar``, a pure function of tensors.
        theta: a tensor, or dictionaries, lists and tuples of tensors in any depth; those that do not require a gradient are
            constants. Where none does, the result is x without a graph.
        x: in any shape, too. A graph that it carries is cut off.
        solver: a LinearSolver (``hgms_solvers.CG(ridge=1e-3)``) or any callable ``solve(matvec, b) -> v``.
        strategy: how products with ∇²_xx g are made, see :func:`curvature`.
        v0: a starting vector for the solver, for example the ``value`` of the last :class:`Solution`.
        report: called after every solve with the :class:`Solution` and ‖∇_x g(θ, x)‖: the only signs of a solver that did not
            converge, and of an x that is no minimiser.

    Returns:
        x in the shape of the argument, whose memory it shares: changing ``x`` or ``theta`` in place before the way back is an
        error.

    Errors: ConfigError where the gradient itself is differentiated, and within the transforms of ``torch.func``; for a loss
    that is no pure function, or without the second derivative that ``strategy`` takes.

    Cost: nothing forward; a backward pass takes one lower gradient, one Hessian product an iteration and one cross product.

    >>> g = lambda theta, x: 0.5 * ((x - theta**2) ** 2).sum()          # x*(θ) = θ²
    >>> theta = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> x = lower_solution(g, theta, theta.detach() ** 2, solver=lambda matvec, b: b)
    >>> (x.sum() + x.prod()).backward()
    >>> theta.grad                                                      # 2θ(1 + the other x)
    tensor([20., 12.])

    Source: the implicit function theorem; HG-MS paper, equation (3), for its ridge.

    .. versionadded:: 0.2
    """
    one_of("strategy", strategy, get_args(Strategy))
    (above, upper), (below, lower) = Shape.of(theta, "'theta'", "theta"), Shape.of(x, "'x'", "x")
    check_floating("'x'", lower)

    def loss(a: Tree, b: Tree) -> Tensor:
        return g(above.restore(a), below.restore(b))

    level = _Level(pure(loss), tuple(upper), detach(lower), as_solver(solver), strategy, v0, report)
    try:
        values: tuple[Tensor, ...] = _Minimiser.apply(level, *upper.values())
    except RuntimeError as error:
        if "setup_context" in str(error):  # within torch.func, as in a level around this one with strategy = "jvp"
            raise ConfigError(ONCE) from error
        raise
    return cast("Lower", below.restore(dict(zip(lower, values, strict=True))))


@frozen(eq=False)
class _Level:
    """What the way back needs and autograd does not have to know about."""

    loss: Callable[[Tree, Tree], Tensor]
    names: tuple[str, ...]
    x: Tree
    solver: Any
    strategy: Strategy
    v0: Tensor | None
    report: Callable[[Solution, Tensor], None] | None


class _Minimiser(torch.autograd.Function):
    """θ's leaves to x's leaves."""

    @staticmethod
    def forward(ctx: Any, level: _Level, *theta: Tensor) -> tuple[Tensor, ...]:
        ctx.level = level
        # Saved although `level` has it: autograd then notices a change in place.
        ctx.save_for_backward(*theta, *level.x.values())
        # Each a tensor of its own: autograd writes on what is returned.
        return tuple(leaf.detach() for leaf in level.x.values())

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        level: _Level = ctx.level
        leaves = ctx.saved_tensors[: len(level.names)]
        theta = detach(dict(zip(level.names, leaves, strict=True)))
        wanted = {name: theta[name] for name, needed in zip(level.names, ctx.needs_input_grad[1:], strict=True) if needed}
        spec = Ravel.of(level.x)
        with torch.no_grad(), differences_named():
            here = curvature(lambda x: level.loss(theta, x), level.x, level.strategy)
            solution = level.solver.solve(here.matvec, spec.ravel_leaves(slopes), level.v0)
            if level.report is not None:
                level.report(solution, torch.linalg.vector_norm(here.gradient))
            v = spec.unravel(solution.value)
            mixed = cross_product(lambda some, x: level.loss({**theta, **some}, x), wanted, level.x, v, level.strategy)
        parts: list[Tensor] = [-slope for slope in mixed.values()]
        if torch.is_grad_enabled():  # create_graph: these depend on θ and on ∂L/∂x, and no graph says how
            parts = list(_Once.apply(len(parts), *parts, *leaves, *slopes))
        gradients = dict(zip(wanted, parts, strict=True))
        return (None, *(gradients.get(name) for name in level.names))


class _Once(torch.autograd.Function):
    """The first ``count`` tensors, depending on all the others: an error instead of a second derivative that lacks terms."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise ConfigError(ONCE)


__all__ = ["lower_solution"]
