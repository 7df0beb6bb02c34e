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
from torch import Tensor
from torch.nn import functional

Loss = Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]


@attrs.frozen(eq=False)
class Peer:
    """Lower loss g, upper loss f (both of dictionaries θ, x), θ, and the solved x."""

    g: Loss
    f: Loss
    jax_g: Callable
    jax_f: Callable
    theta: dict[str, Tensor]
    x: dict[str, Tensor]


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _solve(
    g: Callable[[dict[str, Tensor]], Tensor], x: dict[str, Tensor], newton: int
) -> dict[str, Tensor]:
    """Damped Newton steps with the dense Hessian (after L-BFGS, for the network): the gradient
    ends at rounding level.
    """
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    optimiser = torch.optim.LBFGS(
        leaves.values(),
        max_iter=2000,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = g(leaves)
        loss.backward()
        return loss

    optimiser.step(closure)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    sizes = [leaf.numel() for leaf in leaves.values()]
    flat = torch.cat([leaf.detach().reshape(-1) for leaf in leaves.values()])

    def tree(vector: Tensor) -> dict[str, Tensor]:
        return {
            name: part.reshape(shapes[name])
            for name, part in zip(shapes, vector.split(sizes), strict=True)
        }

    loss = lambda vector: g(tree(vector))  # noqa: E731
    slope = torch.func.grad(lambda vector: g(tree(vector)))
    for _ in range(newton):
        flat = flat - torch.linalg.solve(torch.func.hessian(loss)(flat), slope(flat))
    assert slope(flat).norm() < 1e-12
    return tree(flat)


def dense(problem: Peer) -> Tensor:
    """∇F from dense derivatives: ∇_θ f − ∂_θ(∇_x g)ᵀ H⁻¹ ∇_x f, for problems with one leaf θ."""
    (name, theta), names = next(iter(problem.theta.items())), list(problem.x)
    shapes = [problem.x[n].shape for n in names]
    sizes = [problem.x[n].numel() for n in names]
    flat = torch.cat([problem.x[n].reshape(-1) for n in names])

    def tree(vector: Tensor) -> dict[str, Tensor]:
        return {
            n: part.reshape(s)
            for n, part, s in zip(names, vector.split(sizes), shapes, strict=True)
        }

    def g(t: Tensor, vector: Tensor) -> Tensor:
        return problem.g({name: t}, tree(vector))

    hessian = torch.func.hessian(g, argnums=1)(theta, flat)
    rhs = torch.func.grad(lambda vector: problem.f({name: theta}, tree(vector)))(flat)
    v = torch.linalg.solve(hessian, rhs)
    slope = torch.func.grad(g, argnums=1)
    _, pull = torch.func.vjp(lambda t: slope(t, flat), theta)
    direct = torch.func.grad(lambda t: problem.f({name: t}, tree(flat)))(theta)
    return direct - pull(v)[0]


def logistic(n: int = 500, d: int = 100) -> Peer:
    import jax
    import jax.numpy as jnp

    generator = torch.Generator().manual_seed(0)
    rows = _normal(2 * n, d, generator=generator)
    truth = _normal(d, generator=generator)
    labels = (rows @ truth + _normal(2 * n, generator=generator) > 0).double() * 2 - 1
    a = rows[:n]
    y = labels[:n]
    b = rows[n:]
    z = labels[n:]

    def g(theta: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        return (
            functional.softplus(-y * (a @ x["w"])).mean()
            + 0.5 * (theta["t"].exp() * x["w"] ** 2).sum()
        )

    def f(theta: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        return functional.softplus(-z * (b @ x["w"])).mean()

    ja, jy, jb, jz = (jnp.asarray(array.numpy()) for array in (a, y, b, z))

    def jax_g(x, theta):
        return (
            jax.nn.softplus(-jy * (ja @ x["w"])).mean() + 0.5 * (jnp.exp(theta) * x["w"] ** 2).sum()
        )

    def jax_f(x, theta):
        return jax.nn.softplus(-jz * (jb @ x["w"])).mean()

    theta = {"t": -1 + 0.3 * _normal(d, generator=generator)}
    x = _solve(lambda at: g(theta, at), {"w": torch.zeros(d, dtype=torch.float64)}, newton=3)
    return Peer(g, f, jax_g, jax_f, theta, x)


def cleaning(n: int = 200, inputs: int = 12, hidden: int = 8, classes: int = 4) -> Peer:
    import jax
    import jax.numpy as jnp

    generator = torch.Generator().manual_seed(1)
    rows = _normal(2 * n, inputs, generator=generator)
    truth = _normal(inputs, classes, generator=generator)
    labels = (rows @ truth).argmax(-1)
    a = rows[:n]
    y = labels[:n].clone()
    b = rows[n:]
    z = labels[n:]
    y[: n // 2] = torch.randint(classes, (n // 2,), generator=generator)

    def logits(x: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ x["w1"] + x["b1"]) @ x["w2"] + x["b2"]

    def g(theta: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        losses = functional.cross_entropy(logits(x, a), y, reduction="none")
        return (theta["t"].sigmoid() * losses).mean() + 0.01 * sum(
            (leaf**2).sum() for leaf in x.values()
        )

    def f(theta: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(logits(x, b), z)

    ja, jb, jy, jz = (jnp.asarray(array.numpy()) for array in (a, b, y, z))

    def jax_losses(x, inputs, labels):
        scores = jnp.tanh(inputs @ x["w1"] + x["b1"]) @ x["w2"] + x["b2"]
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], 1)[:, 0]

    def jax_g(x, theta):
        decay = sum((leaf**2).sum() for leaf in x.values())
        return (jax.nn.sigmoid(theta) * jax_losses(x, ja, jy)).mean() + 0.01 * decay

    def jax_f(x, theta):
        return jax_losses(x, jb, jz).mean()

    theta = {"t": 0.5 * _normal(n, generator=generator)}
    x0 = {
        "w1": _normal(inputs, hidden, generator=generator) / inputs**0.5,
        "b1": torch.zeros(hidden, dtype=torch.float64),
        "w2": _normal(hidden, classes, generator=generator) / hidden**0.5,
        "b2": torch.zeros(classes, dtype=torch.float64),
    }
    return Peer(g, f, jax_g, jax_f, theta, _solve(lambda at: g(theta, at), x0, newton=5))
