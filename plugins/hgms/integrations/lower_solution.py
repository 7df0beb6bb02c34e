"""The lower solution as a node of an autograd graph.

Call ``x = lower_solution(g, theta, x, solver=…)`` and continue with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hgms.adapters import Nested, Shape, check_floating, pure
from hgms.config import check_arguments
from hgms.integrations.autograd_nodes import Minimiser
from hgms.integrations.level import Level, LevelStrategy
from hgms_core import Solution, Tree, as_solver, detach
from hgms_core.arguments import check_function
from hgms_core.errors import one_of

Lower = TypeVar("Lower")


@check_arguments("g", "theta", "x", "solver", "v0")
def lower_solution(
    g: Callable[..., Tensor],
    theta: Nested,
    x: Lower | Callable[..., Lower],
    *,
    solver: Any,
    strategy: LevelStrategy = "vjp",
    v0: Tensor | None = None,
    report: Callable[[Solution, Tensor], None] | None = None,
) -> Lower:
    """Return x*(θ), the minimiser of g(θ, ·), as a differentiable function of ``theta``.

    The forward pass returns ``x`` unchanged, or the result of ``x(theta)``: any method can solve
    the lower level. The backward pass uses the implicit function theorem. For any ∂L/∂x from the
    graph above x::

        ∂L/∂θ = −∇²_θx g(θ, x)·v,      (∇²_xx g(θ, x) + γI) v = ∂L/∂x

    Use when x* is one part of a larger graph. If the problem has only f and g,
    :func:`hypergradient` gives the same numbers with a report of their quality. The result can be
    differentiated repeatedly, as often as g, backward and forward. Levels can therefore be nested,
    and the loss of a level may contain solutions of others. In that case pass x as a function, and
    include every tensor of the levels above in θ. Avoid if x is far from a minimiser: the formula
    assumes ∇_x g = 0, whereas differentiation through the steps does not.

    A run that compiles its steps runs steps with such a level eagerly.

    Parameters
    ----------
    g
        The lower loss, ``g(theta, x) -> scalar``, a pure function of tensors.
    theta
        a tensor, or dictionaries, lists and tuples of tensors in any depth. Tensors that do not
        require a gradient are constants. If all are, the result is x without a graph.
    x
        a state in any nesting, too; it is detached from its graph. Or a function of θ for the
        state, called with plain tensors inside all transforms: an optimiser's steps, a Newton
        iteration, a formula.
    solver
        a LinearSolver (``hgms.solvers.CG(ridge=1e-3)``) or any callable ``solve(matvec, b) -> v``.
    strategy
        How products with ∇²_xx g are computed, see :func:`curvature`.
    v0
        a starting vector for the solver, for example the ``value`` of the last :class:`Solution`.
    report
        Called after every solve with the :class:`Solution` and ‖∇_x g(θ, x)‖. These are the only
        signs of a solver that did not converge, and of an x that is not a minimiser.

    Returns
    -------
    Lower
        x in its original form, sharing its memory: an in-place change of ``x`` or ``theta`` before
        the backward pass is an error.

    Raises
    ------
    ConfigError
        For a loss that is not a pure function, lacks the derivatives that ``strategy`` needs, or
        uses a tensor that requires a gradient and is not in θ. The derivative of such a tensor
        would be missing; parameters of modules count as constants.

    Notes
    -----
    Cost: the forward pass costs ``x(theta)``, and one value of g if no leaf of θ requires a
    gradient. A backward pass takes one lower gradient, one Hessian product per iteration and one
    cross product. Inside another level's loss: one such solve for that level's gradient, two for
    each of its Hessian products, one to three for its cross product.

    Source: the implicit function theorem; HG-MS paper, equation (3), for its ridge.

    Examples
    --------
    >>> g = lambda theta, x: 0.5 * ((x - theta**2) ** 2).sum()  # x*(θ) = θ²
    >>> theta = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> x = lower_solution(g, theta, theta.detach() ** 2, solver=lambda matvec, b: b)
    >>> (x.sum() + x.prod()).backward()
    >>> theta.grad  # 2θ(1 + the other x)
    tensor([20., 12.])

    Three levels, z*(θ, y) = θy in the loss of y*(θ) = 1/θ:

    >>> def middle(theta, y):
    ...     below = lambda upper, z: 0.5 * (z - upper["theta"] * upper["y"]).square().sum()
    ...     exact = lambda upper: upper["theta"] * upper["y"]
    ...     z = lower_solution(below, {"theta": theta, "y": y}, exact, solver=lambda matvec, b: b)
    ...     return 0.5 * (z - 1).square().sum()
    >>> theta = torch.tensor([2.0, 4.0], requires_grad=True)
    >>> y = lower_solution(
    ...     middle, theta, lambda theta: 1 / theta, solver=lambda matvec, b: b / theta.detach() ** 2
    ... )
    >>> torch.autograd.grad(y.sum(), theta)[0]  # −1/θ²
    tensor([-0.2500, -0.0625])
    """
    # During a trace of hgms.compiled or make_fx, the outcome of one solve would become part of the
    # compiled function.
    if get_proxy_mode() is not None:
        raise RuntimeError("a lower_solution is solved at every call, which no program holds")
    one_of("strategy", strategy, get_args(LevelStrategy))
    check_function("g", g, "theta", "x")
    searched = callable(x) and not isinstance(x, torch.nn.Module)
    (above, upper), below = Shape.of(theta, "theta", "theta"), list[Shape]()

    def leaves(x: Any) -> Tree:
        shape, tree = Shape.of(x, "x", "x")
        check_floating("x", tree)
        below[:] = [shape]
        return detach(tree)

    def loss(a: Tree, b: Tree) -> Tensor:
        return g(above.restore(a), below[0].restore(b))

    find = (lambda a: leaves(x(above.restore(a)))) if callable(x) and searched else None
    lower = {} if searched else leaves(x)
    level = Level(
        pure(loss), tuple(upper), find, as_solver(solver), strategy, v0, report, tuple(lower)
    )
    values: tuple[Tensor, ...] = Minimiser.apply(level, *upper.values(), *lower.values())
    tree = dict(zip(level.lower, values, strict=True))
    if torch.is_grad_enabled() and not any(leaf.requires_grad for leaf in upper.values()):
        level.check(detach(upper), detach(tree))
    return cast("Lower", below[0].restore(tree))


__all__ = ["lower_solution"]
