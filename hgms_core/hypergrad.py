"""Hypergradient calculus: products with the lower Hessian, the mixed derivative, and the implicit
hypergradient.

The implicit hypergradient at an optimistic lower solution x*(θ) is equation (3) of the HG-MS
paper. The Hessian may be singular along the manifold of minimisers, so a ridge-regularised solve
replaces the pseudoinverse::

    ∇F(θ) = ∇_θ f(θ, x*) − ∇²_θx g(θ, x*) v,      (∇²_xx g(θ, x*) + γI) v = ∇_x f(θ, x*)

All products are matrix-free, and only this module builds them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from hgms_core.errors import ConfigError, one_of
from hgms_core.linear import Inexact, as_solver
from hgms_core.records import Cost, Estimate
from hgms_core.torch_errors import (
    explain_errors,
    no_second_derivative,
    out_of_memory,
    with_forward_mode,
)
from hgms_core.trees import Ravel, Tree, detach, require_grad, slopes, summary

Strategy = Literal["vjp", "jvp", "difference"]
"""How products with the lower Hessian are computed; :func:`curvature` lists the costs."""
Bound = Callable[[Tree, Tree], Tensor]
"""A loss with a bound batch: ``loss(theta, x) -> scalar``."""
Lower = Callable[[Tree], Tensor]
"""A lower loss with bound θ and batch: ``g(x)``, or ``[N]`` values for a stacked x."""


@contextlib.contextmanager
def twice_differentiable_attention() -> Iterator[None]:
    """Enable second derivatives of attention and compiled functions inside the context.

    Scaled dot-product attention uses the math kernel, because flash and memory-efficient kernels
    have no second derivative. Functions of ``torch.compile`` run eagerly: the gradient of compiled
    code has no graph, so its second derivative would be treated as zero.
    """
    # If this module is not imported, there are no compiled functions. Its import takes seconds.
    can_compile = "torch._dynamo" in sys.modules and not torch.compiler.is_dynamo_compiling()
    eager = torch.compiler.set_stance("force_eager") if can_compile else contextlib.nullcontext()
    with explain_errors(), eager, sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def _second_derivative(first: Callable[[], object]) -> Iterator[None]:
    """Convert a RuntimeError inside the context to a ConfigError for a missing second derivative.

    The error is converted only if ``first()``, the first derivative, raises no error. torch reports
    missing derivatives with several types and messages, so the location of the error decides.
    """
    try:
        yield
        return
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        cause = error
    try:
        first()
    except Exception:
        raise cause from None
    raise no_second_derivative(cause) from cause


@frozen(eq=False)
class Curvature:
    """Hessian products of the lower loss at one point, or at N stacked points.

    ``matvec`` maps a flat v, ``[d]`` (``[N, d]``), to H·v. ``gradient`` is ∇_x g, flat. It is
    evaluated on access; with ``vjp`` it is already computed.
    """

    matvec: Callable[[Tensor], Tensor]
    slope: Callable[[], Tensor]
    spec: Ravel

    @property
    def gradient(self) -> Tensor:
        return self.slope()


def curvature(
    g: Lower,
    x: Tree,
    strategy: Strategy = "vjp",
    stacked: bool = False,
    precision: torch.dtype | None = None,
) -> Curvature:
    """Return products with ∇²_xx g at ``x``, by one of three strategies.

    With each strategy, one product costs about two gradients:

    - ``vjp``: the graph of the gradient is built once, and each product is one backward pass
      through it. Exact, the fastest for many products; keeps one graph of the gradient in memory.
    - ``jvp``: forward mode through the gradient, traced for each product. Exact and slower; keeps
      no graph. Without a forward-mode derivative, a product builds a graph and frees it.
    - ``difference``: (∇g(x + εv) − ∇g(x − εv)) / 2ε with ε scaled to v. It requires only
      first-order memory and supports kernels without second derivatives. The relative error is
      about the machine precision to the power 2/3. ``precision`` is the dtype in which g is
      computed, if it is coarser than the dtype of x (:attr:`Problem.precision`). ``matvec`` is an
      :class:`hgms_core.Inexact`, so that a solver does not treat this error as curvature.

    With ``stacked``, g maps a stacked tree to ``[N]`` losses that do not interact. The rows are N
    separate systems.

    Examples
    --------
    >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> at = curvature(lambda x: 0.5 * x["x"] @ A @ x["x"], {"x": torch.ones(2)})
    >>> at.matvec(torch.tensor([1.0, 0.0]))
    tensor([2., 1.])
    """
    one_of("strategy", strategy, get_args(Strategy))
    spec = Ravel.of(x, batch_dims=1 if stacked else 0)

    # torch.func computes zero as the second derivative of a function with @once_differentiable
    check = partial(_check_graph, wrong=frozenset()) if strategy == "jvp" else None

    def slope() -> Tensor:
        return spec.ravel_leaves(_gradient_at(g, x, check=check)[0])

    def through_graph(grads: list[Tensor], leaves: list[Tensor], v: Tensor, keep: bool) -> Tensor:
        # If g is linear in a leaf, its gradient is constant and has no graph: it contributes zero.
        curved = [i for i, grad in enumerate(grads) if grad.requires_grad]
        if not curved:
            return torch.zeros_like(v)
        parts = spec.unravel_leaves(v)
        with _second_derivative(slope):
            products = torch.autograd.grad(
                [grads[i] for i in curved],
                leaves,
                [parts[i] for i in curved],
                retain_graph=keep,
                materialize_grads=True,
            )
        return spec.ravel_leaves(products)

    if strategy == "vjp":
        with _second_derivative(slope):
            grads, leaves = _gradient_at(g, x, create_graph=True, check=_check_graph)
        flat_gradient = spec.ravel_leaves([grad.detach() for grad in grads])
        return Curvature(
            lambda v: through_graph(grads, leaves, v, keep=True), lambda: flat_gradient, spec
        )

    if strategy == "jvp":
        gradient_of = torch.func.grad(lambda point: g(point).sum())
        point = detach(x)

        def forward(v: Tensor) -> Tensor:
            direction = spec.unravel(v)
            with twice_differentiable_attention():
                product = torch.func.jvp(gradient_of, (point,), (direction,))[1]
            return spec.ravel(product)

        def backward(v: Tensor) -> Tensor:
            with _second_derivative(slope):
                graph = _gradient_at(g, x, create_graph=True, check=_check_graph)
            return through_graph(*graph, v, keep=False)

        return Curvature(
            lambda v: with_forward_mode(lambda: forward(v), lambda: backward(v)), slope, spec
        )

    flat = spec.ravel(detach(x))

    def central(v: Tensor) -> Tensor:
        step = difference_step(flat, v, precision)
        plus, _ = _gradient_at(g, spec.unravel(flat + step * v))
        minus, _ = _gradient_at(g, spec.unravel(flat - step * v))
        return (spec.ravel_leaves(plus) - spec.ravel_leaves(minus)) / (2 * step)

    return Curvature(Inexact.difference(central, precision or flat.dtype), slope, spec)


WRONG_TWICE = frozenset({"WeightNormInterfaceBackward0"})
"""Graph nodes with a wrong second derivative in torch: the fused weight_norm treats the norm of its
direction as a constant.
"""
_MARKED = once_differentiable(lambda *_: None).__code__
"""The code object of every backward function that torch marks as differentiable only once."""


def _nodes(value: Tensor) -> Iterator[Any]:
    """Yield all nodes of the graph of ``value``."""
    nodes: list[Any] = [value.grad_fn]
    seen = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(before for before, _ in node.next_functions)


def _check_graph(value: Tensor, wrong: frozenset[str] = WRONG_TWICE) -> None:
    """Raise ConfigError if torch would compute a wrong second derivative.

    The graph must not contain a node in ``wrong``, or a function that is marked as differentiable
    only once. For a marked function, torch raises no error if the incoming gradient is a constant,
    as for a loss. The second derivative is then silently zero.
    """
    for node in _nodes(value):
        own = isinstance(node, BackwardCFunction)  # of a torch.autograd.Function in Python
        marked = own and getattr(node._forward_cls.backward, "__code__", None) is _MARKED
        if marked or node.name() in wrong:
            reason = "is marked with @once_differentiable" if marked else "is wrong in torch"
            raise no_second_derivative(RuntimeError(f"{node.name()} {reason}"))


def _gradient_at(
    g: Lower, point: Tree, create_graph: bool = False, check: Callable[[Tensor], None] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return ∇_x g and the leaves. The gradient is zero for leaves that g does not use.

    Raises
    ------
    ConfigError
        If g uses no leaf.
    """
    leaves = require_grad(point)
    grads: Sequence[Tensor | None] = [None]
    with torch.enable_grad(), twice_differentiable_attention():
        value = g(leaves).sum()
        if check is not None:
            check(value)
        if value.requires_grad:
            grads = torch.autograd.grad(
                value, list(leaves.values()), create_graph=create_graph, allow_unused=True
            )
    if all(grad is None for grad in grads):
        raise lacks_gradient(leaves)
    check_dense("g", grads)
    slopes = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves.values(), grads, strict=True)
    ]
    return slopes, list(leaves.values())


def check_dense(name: str, grads: Sequence[Tensor | None]) -> None:
    """Raise ConfigError if a gradient of a loss is sparse: solvers use dense vectors."""
    if any(grad is not None and grad.layout != torch.strided for grad in grads):
        raise ConfigError(
            "sparse-gradient",
            f"{name} has a sparse gradient",
            place=(name,),
            hint="use nn.Embedding(..., sparse=False)",
        )


def lacks_gradient(x: Tree) -> ConfigError:
    """Return the error for a lower loss that does not depend on x."""
    return ConfigError(
        "no-gradient",
        f"g has no gradient with respect to x ({summary(x)})",
        place=("g",),
        hint="use x in g, without .detach(), .item(), .data, NumPy or torch.no_grad()\n"
        "compute with the arguments of the loss, not with other modules or tensors",
    )


def difference_step(x: Tensor, v: Tensor, precision: torch.dtype | None = None) -> Tensor:
    """Return the step of a central difference at x along v, both flat.

    The step is ε^(1/3)·(1 + ‖x‖)/‖v‖, which balances truncation and rounding. At a coarser
    ``precision`` it is (3ε)^(1/3)/‖v‖, which minimises ε/τ + τ²/6, and at most 3 % of
    (1 + ‖x‖)/‖v‖.

    Good lengths were measured for adapters in bfloat16. For pretrained adapters of norm 13 they are
    0.1 to 0.4; for tiny, random adapters of norm 1 to 2 they are 0.03 to 0.1.

    Examples
    --------
    >>> difference_step(torch.zeros(2), torch.tensor([0.0, 10.0]))
    tensor([0.0005])
    """
    size: Tensor = 1 + torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    length = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    length = torch.where(length > 0, length, torch.ones_like(length))
    eps = torch.finfo(x.dtype).eps
    coarse = torch.finfo(precision or x.dtype).eps
    root: float = (3 * coarse if coarse > eps else eps) ** (1 / 3)
    return (size * 0.03).clamp_max(root) / length if coarse > eps else size * root / length


def cross_product(
    g: Bound,
    theta: Tree,
    x: Tree,
    v: Tree,
    strategy: Strategy = "vjp",
    displacement: float | None = None,
    precision: torch.dtype | None = None,
) -> Tree:
    """Return ∇²_θx g(θ, x)·v, with the shapes of θ, without a second backward pass through the
    lower model.

    The result is ∂_θ of the directional derivative of g along v: forward mode in x, then reverse
    mode only in θ. For g = Σ w_i(θ) ℓ_i(x) this is one forward pass of the losses with tangents. If
    torch has no forward-mode derivative, it is two backward passes: ∂_θ ⟨∇_x g, v⟩.

    ``difference`` instead computes a central difference of ∇_θ g along v (two forward passes; no
    forward-mode derivative is required). ``displacement`` is the length of its step in x to each
    side. By default (None), this length balances truncation and rounding at the precision of x, or
    at the coarser ``precision`` in which g is computed (:attr:`Problem.precision`).

    Examples
    --------
    >>> g = lambda theta, x: (theta["t"] * x["x"] ** 2).sum()
    >>> cross_product(g, {"t": torch.ones(1)}, {"x": torch.tensor([3.0])}, {"x": torch.ones(1)})
    {'t': tensor([6.])}
    """
    one_of("strategy", strategy, get_args(Strategy))
    leaves = require_grad(theta)
    names = list(leaves)
    if strategy == "difference":
        spec = Ravel.of(x)
        flat = spec.ravel(detach(x))
        direction = spec.ravel(v)
        step = difference_step(flat, direction, precision)
        if displacement is not None:
            length = torch.linalg.vector_norm(direction)
            step = (
                displacement / torch.where(length > 0, length, torch.ones_like(length))
            ).reshape(1)

        def upper_slope(point: Tensor) -> list[Tensor]:
            with torch.enable_grad():
                return slopes(g(leaves, spec.unravel(point)), list(leaves.values()))

        plus = upper_slope(flat + step * direction)
        minus = upper_slope(flat - step * direction)
        return {
            name: (p - m) / (2 * step.squeeze(-1))
            for name, p, m in zip(names, plus, minus, strict=True)
        }

    def forward() -> list[Tensor]:
        derivative = torch.func.jvp(lambda point: g(leaves, point), (detach(x),), (detach(v),))
        slope: Tensor = derivative[1]
        return slopes(slope, list(leaves.values()))

    def backward() -> list[Tensor]:
        with _second_derivative(lambda: upper_gradients(g, theta, x)):
            lower = require_grad(x)
            value = g(leaves, lower)
            if not value.requires_grad:
                return [torch.zeros_like(leaf) for leaf in leaves.values()]
            _check_graph(value)
            grads = torch.autograd.grad(
                value, list(lower.values()), create_graph=True, materialize_grads=True
            )
            parts = [
                (grad * part).sum() for grad, part in zip(grads, detach(v).values(), strict=True)
            ]
            return slopes(torch.stack(parts).sum(), list(leaves.values()))

    with torch.enable_grad(), twice_differentiable_attention():
        return dict(zip(names, with_forward_mode(forward, backward), strict=True))


def upper_gradients(f: Bound, theta: Tree, x: Tree) -> tuple[Tensor, Tree, Tree]:
    """Return (f, ∇_θ f, ∇_x f) from one backward pass.

    A gradient is zero if f does not depend on the variable.
    """
    upper = require_grad(theta)
    lower = require_grad(x)
    with torch.enable_grad():
        value = f(upper, lower)
        grads = slopes(value, [*upper.values(), *lower.values()])
    check_dense("f", grads)
    count = len(upper)
    return (
        value.detach(),
        dict(zip(upper, grads[:count], strict=True)),
        dict(zip(lower, grads[count:], strict=True)),
    )


@frozen(eq=False)
class Linearization:
    """The derivatives of both levels at one (θ, x).

    - ``direct``: ∇_θ f.
    - ``rhs`` and ``slope``: ∇_x f and ∇_x g, flat.
    - ``matvec``: maps a flat v to ∇²_xx g·v.
    - ``mixed``: maps a flat v to ∇²_θx g·v, with the shapes of θ.
    - ``passes``: how often one product evaluates g on a batch.
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
        f: Bound,
        g: Bound,
        theta: Tree,
        x: Tree,
        strategy: Strategy = "vjp",
        precision: torch.dtype | None = None,
    ) -> Linearization:
        """Compute the derivatives at (θ, x). Cost: 1 upper and 1 lower gradient."""
        theta = detach(theta)
        x = detach(x)
        spec = Ravel.of(x)
        upper_loss, direct, rhs = upper_gradients(f, theta, x)
        at_x = curvature(lambda point: g(theta, point), x, strategy, precision=precision)

        def cross(v: Tensor) -> Tree:
            return cross_product(g, theta, x, spec.unravel(v), strategy, precision=precision)

        passes = 2 if strategy == "difference" else 1
        return cls(upper_loss, direct, spec.ravel(rhs), at_x.gradient, at_x.matvec, cross, passes)

    def hypergradient(
        self, solver: Any, v0: Tensor | None = None, rows: tuple[int, int] = (1, 1)
    ) -> Estimate:
        """Return the hypergradient, equation (3) of the paper.

        ``rows`` contains the numbers of examples in one call of (f, g), for the cost.
        """
        solution = as_solver(solver).solve(self.matvec, self.rhs, v0)
        mixed = self.mixed(solution.value)
        value = {name: self.direct[name] - mixed[name] for name in self.direct}
        through = rows[0] + rows[1] * (1 + self.passes * (solution.products + 1))
        cost = Cost(
            upper_gradients=1,
            lower_gradients=1,
            products=solution.products,
            cross_products=1,
            rows=through,
        )
        size = torch.linalg.vector_norm(self.slope)
        return Estimate(
            value=value,
            upper_loss=self.upper_loss,
            lower_gradient_norm=size,
            solution=solution,
            cost=cost,
        )
