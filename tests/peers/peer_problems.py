"""Two bilevel problems, written once in torch and once in jax, with the lower level solved to
rounding.

P1: logistic regression with one ridge exp(θ_j) per weight. P2: hyper-cleaning of a tanh MLP with
weights σ(θ_i) and weight decay. ``dense`` computes the hypergradient from full Hessians,
independently of every library compared here.
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
    """Damped Newton steps with the dense Hessian (after L-BFGS, for the network): the gradient
    ends at rounding level.
    """
    spec = Ravel.of(x)
    flat = spec.ravel(x).requires_grad_()
    optimiser = torch.optim.LBFGS(
        [flat],
        max_iter=2000,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = g(spec.unravel(flat))
        loss.backward()
        return loss

    optimiser.step(closure)
    flat = flat.detach()
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
        _solve(lambda at: g(theta, at), {"w": torch.zeros(d, dtype=F64)}, newton=3),
    )


def cleaning(n: int = 200, inputs: int = 12, hidden: int = 8, classes: int = 4) -> Peer:
    import jax
    import jax.numpy as jnp

    rows = normal(2 * n, inputs, seed=11)
    labels = (rows @ normal(inputs, classes, seed=12)).argmax(-1)
    labels[: n // 2] = normal(n // 2, classes, seed=13).argmax(-1)

    def losses(x: Tree, part: slice) -> Tensor:
        scores = torch.tanh(rows[part] @ x["w1"] + x["b1"]) @ x["w2"] + x["b2"]
        return functional.cross_entropy(scores, labels[part], reduction="none")

    def g(theta: Tree, x: Tree) -> Tensor:
        decay = sum((leaf**2).sum() for leaf in x.values())
        return (theta["t"].sigmoid() * losses(x, slice(n))).mean() + 0.01 * decay

    jrows, jlabels = (jnp.asarray(array.numpy()) for array in (rows, labels))

    def jax_losses(x, part):
        scores = jnp.tanh(jrows[part] @ x["w1"] + x["b1"]) @ x["w2"] + x["b2"]
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), jlabels[part][:, None], 1)[:, 0]

    def jax_g(x, theta):
        decay = sum((leaf**2).sum() for leaf in x.values())
        return (jax.nn.sigmoid(theta) * jax_losses(x, slice(n))).mean() + 0.01 * decay

    theta = {"t": 0.5 * normal(n, seed=14)}
    x0 = {
        "w1": normal(inputs, hidden, seed=15) / inputs**0.5,
        "b1": torch.zeros(hidden, dtype=F64),
        "w2": normal(hidden, classes, seed=16) / hidden**0.5,
        "b2": torch.zeros(classes, dtype=F64),
    }
    return Peer(
        g,
        lambda theta, x: losses(x, slice(n, None)).mean(),
        jax_g,
        lambda x, theta: jax_losses(x, slice(n, None)).mean(),
        theta,
        _solve(lambda at: g(theta, at), x0, newton=5),
    )
