"""Hypergradient calculus: products with the lower Hessian, the mixed derivative, and ``hypergradient`` itself.

For an optimistic lower solution x*(θ) with a Hessian that may be singular along the manifold of minimisers (equation (3) of
the HG-MS paper; the pseudoinverse becomes a ridge-regularised solve)::

    ∇F(θ) = ∇_θ f(θ, x*) − ∇²_θx g(θ, x*) v,      (∇²_xx g(θ, x*) + γI) v = ∇_x f(θ, x*)

All products are matrix-free. This file is the only one that builds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hgms_core.errors import DRAWS, ConfigError, explained, once_differentiable, one_of
from hgms_core.problem import check_floating
from hgms_core.records import Cost, Estimate, Outcome, Solution
from hgms_core.seeding import global_states
from hgms_core.trees import Ravel, Tree, detach, require_grad

Strategy = Literal["vjp", "jvp", "difference"]
"""How products with the lower Hessian are made; :func:`curvature` says which costs what."""
Lower = Callable[[Tree], Tensor]
"""A lower loss with θ and the batch already bound: ``g(x)``, or ``[N]`` values for a stacked x."""


@contextlib.contextmanager
def twice_differentiable_attention() -> Iterator[None]:
    """Inside, scaled dot-product attention has a second derivative: the math kernel has one, the flash and memory-efficient
    kernels have none. A loss that has none at all (batch normalisation in training mode, a compiled module) is refused with
    what to do.

    .. versionadded:: 0.2
    """
    with explained(), sdpa_kernel(SDPBackend.MATH):
        yield


@frozen(eq=False)
class Curvature:
    """The lower loss's gradient and Hessian products at one point (or at N stacked points, one Hessian each).

    ``matvec`` maps a flat ``[d]`` (``[N, d]``) vector to H·v; ``gradient`` is ∇_x g as a flat vector, evaluated when it is
    asked for (with ``vjp`` it is there already).
    """

    matvec: Callable[[Tensor], Tensor]
    slope: Callable[[], Tensor]
    spec: Ravel

    @property
    def gradient(self) -> Tensor:
        return self.slope()


def curvature(
    g: Lower, x: Tree, strategy: Strategy = "vjp", stacked: bool = False, precision: torch.dtype | None = None
) -> Curvature:
    """Products with ∇²_xx g at ``x``, three ways (one product each costs about two gradients):

    - ``vjp``: the gradient's graph is built once and each product is one backward pass through it. Exact, the fastest for
      many products; keeps one graph of the gradient in memory.
    - ``jvp``: forward-mode through the gradient, traced anew for each product. Exact, keeps no graph, slower.
    - ``difference``: (∇g(x + εv) − ∇g(x − εv)) / 2ε with ε scaled to v. First-order memory and works through kernels without
      second derivatives; relative error about the machine precision to the power 2/3. ``precision`` is the type g is computed
      in where that is coarser than x's (:attr:`Problem.precision`).

    With ``stacked``, g maps a stacked tree to ``[N]`` losses that do not interact, and rows are N separate systems.

    >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> at = curvature(lambda x: 0.5 * x["x"] @ A @ x["x"], {"x": torch.ones(2)})
    >>> at.matvec(torch.tensor([1.0, 0.0]))
    tensor([2., 1.])
    """
    one_of("strategy", strategy, get_args(Strategy))
    spec = Ravel.of(x, batch_dims=1 if stacked else 0)

    def gradient_at(point: Tree, create_graph: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        leaves = require_grad(point)
        with torch.enable_grad(), twice_differentiable_attention():
            grads = torch.autograd.grad(
                g(leaves).sum(), list(leaves.values()), create_graph=create_graph, materialize_grads=True
            )
        return list(grads), list(leaves.values())

    if strategy == "vjp":
        grads, leaves = gradient_at(x, create_graph=True)
        # A leaf in which g is linear has a constant gradient: it contributes nothing and has no graph.
        curved = [i for i, grad in enumerate(grads) if grad.requires_grad]

        def through_graph(v: Tensor) -> Tensor:
            if not curved:
                return torch.zeros_like(v)
            parts = spec.unravel_leaves(v)
            products = torch.autograd.grad(
                [grads[i] for i in curved], leaves, [parts[i] for i in curved], retain_graph=True, materialize_grads=True
            )
            return spec.ravel_leaves(products)

        flat_gradient = spec.ravel_leaves([grad.detach() for grad in grads])
        return Curvature(through_graph, lambda: flat_gradient, spec)

    def slope() -> Tensor:
        return spec.ravel_leaves(gradient_at(x)[0])

    if strategy == "jvp":
        gradient_of = torch.func.grad(lambda point: g(point).sum())
        point = detach(x)

        def forward(v: Tensor) -> Tensor:
            with twice_differentiable_attention():
                product = torch.func.jvp(gradient_of, (point,), (spec.unravel(v),))[1]
            return spec.ravel(product)

        return Curvature(forward, slope, spec)

    flat = spec.ravel(detach(x))

    def central(v: Tensor) -> Tensor:
        step = _step(flat, v, precision)
        plus, _ = gradient_at(spec.unravel(flat + step * v))
        minus, _ = gradient_at(spec.unravel(flat - step * v))
        return (spec.ravel_leaves(plus) - spec.ravel_leaves(minus)) / (2 * step)

    return Curvature(central, slope, spec)


def _passes(strategy: Strategy) -> int:
    """How often the rows of a batch go through the loss in one product."""
    return 2 if strategy == "difference" else 1


def _step(x: Tensor, v: Tensor, precision: torch.dtype | None = None) -> Tensor:
    """The central-difference step along v: ε^(1/3)·(1 + ‖x‖)/‖v‖, which balances truncation and rounding.

    Where the loss is computed in a coarser ``precision``, the rounding is that one's ε, and the step (3ε)^(1/3)/‖v‖, the least
    of ε/τ + τ²/6 (0.29/‖v‖ for bfloat16). A longer x has no longer step there: on adapters of norm 3 to 13 the errors were
    least at lengths of 0.2 to 0.4 alike, and ε^(1/3)·(1 + ‖x‖) is one of 1 to 3, where truncation is all there is.
    """
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    length = torch.where(length > 0, length, torch.ones_like(length))
    if precision is not None and torch.finfo(precision).eps > torch.finfo(x.dtype).eps:
        step: Tensor = (3 * torch.finfo(precision).eps) ** (1 / 3) / length
        return step
    scale = 1 + torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    step = torch.finfo(x.dtype).eps ** (1 / 3) * scale / length
    return step


def cross_product(
    g: Callable[[Tree, Tree], Tensor],
    theta: Tree,
    x: Tree,
    v: Tree,
    strategy: Strategy = "vjp",
    displacement: float | None = None,
    precision: torch.dtype | None = None,
) -> Tree:
    """∇²_θx g(θ, x)·v, with the shapes of θ, without a second backward pass through the lower model.

    It is ∂_θ of the directional derivative of g along v: forward mode in x, then reverse mode in θ alone. For
    g = Σ w_i(θ) ℓ_i(x) that is one forward pass of the losses with tangents. ``difference`` takes a central difference of
    ∇_θ g along v instead (two forward passes; needs no forward-mode derivative), ``displacement`` long in x to each side
    (None: the length that balances truncation and rounding at x's precision, or at the coarser ``precision`` that g is computed
    in, :attr:`Problem.precision`).

    >>> g = lambda theta, x: (theta["t"] * x["x"] ** 2).sum()
    >>> cross_product(g, {"t": torch.ones(1)}, {"x": torch.tensor([3.0])}, {"x": torch.ones(1)})
    {'t': tensor([6.])}
    """
    one_of("strategy", strategy, get_args(Strategy))
    leaves = require_grad(theta)
    names = list(leaves)
    if strategy == "difference":
        spec = Ravel.of(x)
        flat, direction = spec.ravel(detach(x)), spec.ravel(v)
        step = _step(flat, direction, precision)
        if displacement is not None:
            length = torch.linalg.vector_norm(direction)
            step = (displacement / torch.where(length > 0, length, torch.ones_like(length))).reshape(1)

        def upper_slope(point: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                value = g(leaves, spec.unravel(point))
                if not value.requires_grad:
                    return tuple(torch.zeros_like(leaf) for leaf in leaves.values())
                return torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)

        plus, minus = upper_slope(flat + step * direction), upper_slope(flat - step * direction)
        return {name: (p - m) / (2 * step.squeeze(-1)) for name, p, m in zip(names, plus, minus, strict=True)}
    with torch.enable_grad(), twice_differentiable_attention():
        slope: Tensor = torch.func.jvp(lambda point: g(leaves, point), (detach(x),), (detach(v),))[1]
        if not slope.requires_grad:  # θ does not enter g here
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        grads = torch.autograd.grad(slope, list(leaves.values()), materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def upper_gradients(f: Callable[[Tree, Tree], Tensor], theta: Tree, x: Tree) -> tuple[Tensor, Tree, Tree]:
    """(f, ∇_θ f, ∇_x f) in one backward pass; zeros where f does not depend on a variable."""
    upper, lower = require_grad(theta), require_grad(x)
    with torch.enable_grad():
        value = f(upper, lower)
        if value.requires_grad:
            grads = torch.autograd.grad(value, [*upper.values(), *lower.values()], materialize_grads=True)
        else:
            grads = tuple(torch.zeros_like(leaf) for leaf in [*upper.values(), *lower.values()])
    return (
        value.detach(),
        dict(zip(upper, grads[: len(upper)], strict=True)),
        dict(zip(lower, grads[len(upper) :], strict=True)),
    )


def as_solver(solver: Any) -> Any:
    """The solver itself, or a LinearSolver made of a plain callable ``solve(matvec, b) -> x``."""
    return solver if hasattr(solver, "solve") else CallableSolver(solver)


@frozen
class CallableSolver:
    """Any ``solve(matvec, b) -> x`` as a LinearSolver: the convention of TorchOpt, JAXopt and wrappers of SciPy.

    Such a callable cannot say how it ended, so its answer is checked with one more product: converged means a relative
    residual of at most ``rtol``.

    >>> solver = CallableSolver(lambda matvec, b: b / 2)
    >>> solver.solve(lambda v: 2 * v, torch.ones(3)).outcome.label
    'converged'
    """

    function: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    rtol: float = 1e-4
    name = "callable"

    def solve(self, matvec: Callable[[Tensor], Tensor], b: Tensor, x0: Tensor | None = None) -> Solution:
        products = 0

        def counted(v: Tensor) -> Tensor:
            nonlocal products
            products += 1
            return matvec(v)

        value = self.function(counted, b).detach()
        finite = torch.isfinite(value).all(-1)
        value = torch.where(finite[..., None], value, torch.zeros_like(value))
        size = torch.linalg.vector_norm(b, dim=-1)
        residual = torch.linalg.vector_norm(b - matvec(value), dim=-1) / torch.where(size > 0, size, torch.ones_like(size))
        codes = torch.where(
            finite,
            torch.where(residual <= self.rtol, Outcome.CONVERGED.code, Outcome.ITERATION_LIMIT.code),
            Outcome.NONFINITE.code,
        )
        return Solution(
            value=value,
            codes=codes,
            residual=residual,
            iterations=torch.full_like(codes, products),
            curvature=torch.full_like(residual, torch.inf),
            products=products + 1,
        )


@frozen(eq=False)
class Linearization:
    """Both levels at one (θ, x): f and its gradients, ∇_x g, and products with the second derivatives of g.

    ``rhs`` is ∇_x f and ``slope`` ∇_x g as flat vectors, ``direct`` is ∇_θ f, ``matvec`` maps a flat v to ∇²_xx g·v and
    ``mixed`` to ∇²_θx g·v, with the shapes of θ; ``passes`` says how often a batch goes through g in one product (twice with
    differences).

    .. versionadded:: 0.2
    """

    upper_loss: Tensor
    direct: Tree
    rhs: Tensor
    slope: Tensor
    matvec: Callable[[Tensor], Tensor]
    mixed: Callable[[Tensor], Tree]
    passes: int = 1

    @classmethod
    def of(
        cls,
        f: Callable[[Tree, Tree], Tensor],
        g: Callable[[Tree, Tree], Tensor],
        theta: Tree,
        x: Tree,
        strategy: Strategy = "vjp",
        precision: torch.dtype | None = None,
    ) -> Linearization:
        """Cost: 1 upper and 1 lower gradient."""
        theta, x = detach(theta), detach(x)
        spec = Ravel.of(x)
        upper_loss, direct, rhs = upper_gradients(f, theta, x)
        at_x = curvature(lambda point: g(theta, point), x, strategy, precision=precision)

        def mixed(v: Tensor) -> Tree:
            return cross_product(g, theta, x, spec.unravel(v), strategy, precision=precision)

        return cls(upper_loss, direct, spec.ravel(rhs), at_x.gradient, at_x.matvec, mixed, _passes(strategy))

    def hypergradient(self, solver: Any, v0: Tensor | None = None, rows: tuple[int, int] = (1, 1)) -> Estimate:
        """Equation (3) of the paper. ``rows`` are the examples in one call of (f, g), for the cost."""
        solution = as_solver(solver).solve(self.matvec, self.rhs, v0)
        return _estimate(self.upper_loss, self.direct, self.mixed(solution.value), self.slope, solution, rows, self.passes)


def _estimate(
    upper_loss: Tensor,
    direct: Tree,
    mixed: Tree,
    slope: Tensor,
    solution: Solution,
    rows: tuple[int, int],
    passes: int,
    lower_gradients: int = 1,
) -> Estimate:
    return Estimate(
        value={name: direct[name] - mixed[name] for name in direct},
        upper_loss=upper_loss,
        lower_gradient_norm=torch.linalg.vector_norm(slope),
        solution=solution,
        cost=Cost(
            upper_gradients=1,
            lower_gradients=lower_gradients,
            products=solution.products,
            cross_products=1,
            rows=rows[0] + rows[1] * (lower_gradients + passes * (solution.products + 1)),
        ),
    )


def implicit(
    f: Callable[[Tree, Tree], Tensor],
    g: Callable[[Tree, Tree], Tensor],
    theta: Tree,
    x: Tree,
    solver: Any,
    strategy: Strategy = "vjp",
    v0: Tensor | None = None,
    rows: tuple[int, int] = (1, 1),
    another: Iterator[Callable[[Tree, Tree], Tensor]] | None = None,
    precision: torch.dtype | None = None,
) -> Estimate:
    """The implicit hypergradient at a given lower state: equation (3) of the paper. ``rows`` are the examples in one call of
    (f, g), for the cost. With ``another``, every product and the mixed term take the next lower loss from it (g on another
    batch); how large ∇_x g is, the first of them says. A product with ``vjp`` then takes a gradient too, whose graph it goes
    back through, and the cost counts it. ``precision`` as in :func:`curvature`."""
    if another is None:
        return Linearization.of(f, g, theta, x, strategy, precision).hypergradient(solver, v0, rows)
    theta, x = detach(theta), detach(x)
    upper_loss, direct, rhs = upper_gradients(f, theta, x)
    spec = Ravel.of(x)
    slope: Tensor | None = None
    gradients = 0

    def product(v: Tensor) -> Tensor:
        nonlocal slope, gradients
        loss = next(another)
        here = curvature(lambda point: loss(theta, point), x, strategy, precision=precision)
        gradients += strategy == "vjp" or slope is None
        if slope is None:
            slope = here.gradient
        return here.matvec(v)

    solution = as_solver(solver).solve(product, spec.ravel(rhs), v0)
    if slope is None:  # nothing was multiplied
        slope, gradients = curvature(lambda point: g(theta, point), x, strategy).gradient, 1
    mixed = cross_product(next(another), theta, x, spec.unravel(solution.value), strategy, precision=precision)
    return _estimate(upper_loss, direct, mixed, slope, solution, rows, _passes(strategy), gradients)


def hypergradient(
    f: Callable[..., Tensor],
    g: Callable[..., Tensor],
    theta: Tree | Tensor,
    x: Tree | Tensor,
    *,
    solver: Any,
    strategy: Strategy = "vjp",
    v0: Tensor | None = None,
) -> Estimate:
    """∇F(θ) at the lower solution ``x`` for anybody's own two losses: no registry, no config, no Problem.

    ``∇F = ∇_θ f − ∇²_θx g·v`` with ``(∇²_xx g + γI) v = ∇_x f``, at fixed (θ, x).

    Arguments:
        f, g: the upper and lower loss, ``loss(theta, x) -> scalar``, pure functions of tensors.
        theta, x: a tensor or a dictionary of tensors each; the losses get back what was given. Of a module,
            :func:`trainable` gives x.
        solver: a LinearSolver (``hgms_solvers.CG(ridge=1e-3)``) or any callable ``solve(matvec, b) -> v``.
        strategy: how products with ∇²_xx g are made, see :func:`curvature`.
        v0: a starting vector for the solver, for example the ``solution.value`` of the last call.

    Returns:
        an :class:`Estimate`: ``value`` (like θ; a dictionary if θ was one, else under the name ``"theta"``), and how good
        it is: ``outcome``, ``residual``, ``iterations``, ``curvature`` and ``lower_gradient_norm`` (‖∇_x g‖: the formula
        assumes 0).

    Errors: ConfigError for a loss that is no pure function (dropout or batch normalisation in training mode), for one without
    the second derivative that ``strategy`` takes, for a θ that neither loss uses, and for leaves that are not floating-point.

    Cost: 1 upper gradient, 1 lower gradient, one Hessian product an iteration, 1 cross product. The solver never raises for
    non-convergence; read ``outcome``.

    >>> f = lambda theta, x: 0.5 * ((x - 1) ** 2).sum()
    >>> g = lambda theta, x: 0.5 * ((x - theta) ** 2).sum()         # x*(θ) = θ, so F(θ) = ½‖θ − 1‖²
    >>> theta = torch.tensor([3.0, 1.0])
    >>> hypergradient(f, g, theta, theta.clone(), solver=lambda matvec, b: b).value["theta"]
    tensor([2., 0.])

    Source: HG-MS paper, equation (3); for a unique lower solution, the implicit function theorem.
    """
    upper, lower = _named(theta, "theta"), _named(x, "x")

    def bound(loss: Callable[..., Tensor]) -> Callable[[Tree, Tree], Tensor]:
        return lambda a, b: loss(a if isinstance(theta, Mapping) else a["theta"], b if isinstance(x, Mapping) else b["x"])

    losses = bound(f), bound(g)
    with differences_named():
        estimate = implicit(pure(losses[0]), pure(losses[1]), upper, lower, solver, strategy, v0)
    if not any(bool(leaf.any()) for leaf in estimate.value.values()):
        check_used(losses, upper, lower)
    return estimate


@contextlib.contextmanager
def differences_named() -> Iterator[None]:
    """Inside, a second derivative that torch does not have is a :class:`ConfigError` that names the strategy without one."""
    try:
        yield
    except RuntimeError as error:
        if once_differentiable(error):
            raise ConfigError(
                f"a loss has no second derivative here: {str(error).splitlines()[0]}\n"
                '  take `strategy = "difference"`, which needs first derivatives alone'
            ) from error
        raise


def check_used(losses: Sequence[Callable[[Tree, Tree], Tensor]], theta: Tree, x: Tree) -> None:
    """ConfigError where no loss depends on θ. Cost: a value and a first-order gradient of each loss until one does; to be asked
    where h is zero, which alone says nothing: at an optimum it is zero too."""
    for loss in losses:
        leaves = require_grad(theta)
        with torch.enable_grad():
            value = loss(leaves, detach(x))
            if value.requires_grad and any(
                grad is not None for grad in torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            ):
                return
    raise ConfigError(
        f"neither loss depends on θ ({', '.join(theta)}), so there is nothing to learn\n"
        "  use its leaves in g or f; a copy of θ that was made before (`.detach()`, `.item()`) is no longer θ"
    )


def check_repeats(loss: Callable[[Tree, Tree], Tensor], theta: Tree, x: Tree) -> None:
    """ConfigError where a loss has another value the second time. Cost: two values."""
    with torch.no_grad():
        if not torch.allclose(loss(theta, x), loss(theta, x), rtol=1e-5, atol=0.0, equal_nan=True):
            raise ConfigError(DRAWS)


def pure(loss: Callable[[Tree, Tree], Tensor]) -> Callable[[Tree, Tree], Tensor]:
    """The loss, refused where its first call draws from torch's global generators and a second one has another value."""
    called = False

    def watched(theta: Tree, x: Tree) -> Tensor:
        nonlocal called
        if called:
            return loss(theta, x)
        called, device = True, next(iter(x.values())).device
        before = global_states(device)
        value = loss(theta, x)
        if any(not torch.equal(a, b) for a, b in zip(before, global_states(device), strict=True)):
            check_repeats(loss, theta, x)
        return value

    return watched


def _named(value: Tree | Tensor, name: str) -> Tree:
    tree = dict(value) if isinstance(value, Mapping) else {name: value}
    check_floating(f"'{name}'", tree)
    return tree


__all__ = [
    "CallableSolver",
    "Curvature",
    "Linearization",
    "Strategy",
    "as_solver",
    "cross_product",
    "curvature",
    "hypergradient",
    "implicit",
    "twice_differentiable_attention",
    "upper_gradients",
]
