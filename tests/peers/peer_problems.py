"""A bilevel problem, written once in torch and once in jax, with the lower level solved to
rounding: logistic regression with one ridge exp(θ_j) per weight.

``dense`` computes the hypergradient from full Hessians, independently of every library compared
here.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from support.helpers import F64, normal
from torch import Tensor
from torch.nn import functional

from hgms_core import Ravel, Tree

Loss = Callable[[Tree, Tree], Tensor]


@attrs.frozen(eq=False)
class Peer:
    """Lower loss g, upper loss f (both of dictionaries θ, x), θ, and the solved x."""

    g: Loss
    f: Loss
    jax_g: Callable
    jax_f: Callable
    theta: Tree
    x: Tree


def _solve(g: Callable[[Tree], Tensor], x: Tree, newton: int) -> Tree:
    """Newton steps with the dense Hessian: the gradient ends at rounding level."""
    spec = Ravel.of(x)
    flat = spec.ravel(x)
    loss = lambda vector: g(spec.unravel(vector))  # noqa: E731
    for _ in range(newton):
        step = torch.linalg.solve(torch.func.hessian(loss)(flat), torch.func.grad(loss)(flat))
        flat = flat - step
    assert torch.func.grad(loss)(flat).norm() < 1e-12
    return spec.unravel(flat)


def dense(problem: Peer) -> Tensor:
    """∇F from dense derivatives: ∇_θ f − ∂_θ(∇_x g)ᵀ H⁻¹ ∇_x f, for problems with θ = t."""
    theta, spec = problem.theta["t"], Ravel.of(problem.x)
    flat = spec.ravel(problem.x)
    g, f = (
        lambda t, vector, loss=loss: loss({"t": t}, spec.unravel(vector))
        for loss in (problem.g, problem.f)
    )
    hessian = torch.func.hessian(g, argnums=1)(theta, flat)
    direct, rhs = torch.func.grad(f, argnums=(0, 1))(theta, flat)
    _, pull = torch.func.vjp(lambda t: torch.func.grad(g, argnums=1)(t, flat), theta)
    return direct - pull(torch.linalg.solve(hessian, rhs))[0]


def logistic(n: int = 500, d: int = 100) -> Peer:
    import jax
    import jax.numpy as jnp

    rows, noise = normal(2 * n, d, seed=1), normal(2 * n, seed=2)
    signed = rows * torch.where(rows @ normal(d, seed=3) + noise > 0, 1.0, -1.0)[:, None]
    below, above = signed[:n], signed[n:]

    def g(theta: Tree, x: Tree) -> Tensor:
        ridge = 0.5 * (theta["t"].exp() * x["w"] ** 2).sum()
        return functional.softplus(-(below @ x["w"])).mean() + ridge

    ja, jb = (jnp.asarray(array.numpy()) for array in (below, above))

    def jax_g(x, theta):
        ridge = 0.5 * (jnp.exp(theta) * x["w"] ** 2).sum()
        return jax.nn.softplus(-(ja @ x["w"])).mean() + ridge

    theta = {"t": -1 + 0.3 * normal(d, seed=4)}
    return Peer(
        g,
        lambda theta, x: functional.softplus(-(above @ x["w"])).mean(),
        jax_g,
        lambda x, theta: jax.nn.softplus(-(jb @ x["w"])).mean(),
        theta,
        _solve(lambda at: g(theta, at), {"w": torch.zeros(d, dtype=F64)}, newton=15),
    )
