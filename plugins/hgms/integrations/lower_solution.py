"""The lower solution as a node of an autograd graph: ``x = lower_solution(g, theta, x,
solver=…)`` and then plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hgms.adapters import Nested, Shape, check_floating, pure
from hgms.config import checked
from hgms.integrations.autograd_nodes import Minimiser
from hgms.integrations.level import Level
from hgms_core import Solution, Strategy, Tree, as_solver, detach
from hgms_core.arguments import check_function
from hgms_core.errors import one_of

Lower = TypeVar("Lower")


@checked("g", "theta", "x", "solver", "v0")
def lower_solution(
    g: Callable[..., Tensor],
    theta: Nested,
    x: Lower | Callable[..., Lower],
    *,
    solver: Any,
    strategy: Strategy = "vjp",
    v0: Tensor | None = None,
    report: Callable[[Solution, Tensor], None] | None = None,
) -> Lower:
    """x*(θ), the state ``x`` that minimises g(θ, ·), as a differentiable function of ``theta``.

    The way forward returns ``x`` as it is, or what ``x(theta)`` finds: solve the lower level
    however you like. The way back takes the implicit function theorem. For ∂L/∂x, whatever the
    graph above made of x::

        ∂L/∂θ = −∇²_θx g(θ, x)·v,      (∇²_xx g(θ, x) + γI) v = ∂L/∂x

    Use when x* is one part of a larger graph; where f and g are all there is, :func:`hypergradient`
    gives the same numbers with a report of their quality. It can be differentiated again, as often
    as g, backward and forward: so levels nest, and the loss of a level may hold solutions of
    others. There give x as a function, and every tensor of the levels above in θ. Avoid where x is
    far from a minimiser: the formula assumes ∇_x g = 0, and differentiating through the steps does
    not.

    Arguments:
        g: the lower loss, ``g(theta, x) -> scalar``, a pure function of tensors.
        theta: a tensor, or dictionaries, lists and tuples of tensors in any depth; those that do
            not require a gradient are constants. Where none does, the result is x without a graph.
        x: in any shape, too. A graph that it carries is cut off. Or a function of θ that finds it,
            called with plain tensors whatever transforms are around: an optimiser's steps, a Newton
            iteration, a formula.
        solver: a LinearSolver (``hgms.solvers.CG(ridge=1e-3)``) or any callable ``solve(matvec, b)
            -> v``.
        strategy: how products with ∇²_xx g are made, see :func:`curvature`. With ``difference`` the
            result can be differentiated once only.
        v0: a starting vector for the solver, for example the ``value`` of the last
            :class:`Solution`.
        report: called after every solve with the :class:`Solution` and ‖∇_x g(θ, x)‖: the only
            signs of a solver that did not converge, and of an x that is no minimiser.

    Returns:
        x in its own shape, whose memory it shares: changing ``x`` or ``theta`` in place before the
        way back is an error.

    Errors: ConfigError for a loss that is no pure function, without the derivatives that
    ``strategy`` takes, or with a tensor that requires a gradient and is not in θ (its derivative
    would be missing; parameters of modules count as constants); and where the gradient of
    ``difference`` is differentiated.

    A run that compiles its steps leaves those with such a level as they are.

    Cost: forward that of ``x(theta)``, and one value of g where no leaf of θ requires a gradient. A
    backward pass takes one lower gradient, one Hessian product an iteration and one cross product.
    Inside another level's loss: one such solve for that level's gradient, two for each of its
    Hessian products, one to three for its cross product.

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

    Source: the implicit function theorem; HG-MS paper, equation (3), for its ridge.
    """
    # of hgms.compiled, or of make_fx: how a solve went once would become part of a program
    if get_proxy_mode() is not None:
        raise RuntimeError("a lower_solution is solved anew at every call, which no program holds")
    one_of("strategy", strategy, get_args(Strategy))
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
