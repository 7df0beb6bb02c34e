"""JAX implementations for the benchmarks, one jitted function each.

Loops are ``lax.scan``, Hessian products come from one ``jax.linearize`` of the gradient, branches
use ``vmap``, and a function runs without Python in between. CG makes a fixed number of steps,
without a residual, curvature or outcome. This is the maximal speed of JAX; a solver that reports
its accuracy does more work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = dict[str, Array]
Data = dict[str, Array]
Losses = Callable[[Tree, Data], Array]
"""Returns the losses of a lower state on every row of some data."""


def conjugate_gradients(product: Callable[[Tree], Tree], b: Tree, ridge: float, steps: int) -> Tree:
    """Make ``steps`` steps of CG on (H + ridge)·v = b from v = 0."""

    def dot(a: Tree, b: Tree) -> Array:
        return sum(jnp.vdot(a[name], b[name]) for name in a)

    def step(
        carry: tuple[Tree, Tree, Tree, Array], _: None
    ) -> tuple[tuple[Tree, Tree, Tree, Array], None]:
        v, r, p, rr = carry
        ap = jax.tree.map(lambda hp, p: hp + ridge * p, product(p), p)
        alpha = rr / dot(p, ap)
        v = jax.tree.map(lambda v, p: v + alpha * p, v, p)
        r = jax.tree.map(lambda r, ap: r - alpha * ap, r, ap)
        following = dot(r, r)
        p = jax.tree.map(lambda r, p: r + following / rr * p, r, p)
        return (v, r, p, following), None

    first = (jax.tree.map(jnp.zeros_like, b), b, b, dot(b, b))
    (v, *_), _ = lax.scan(step, first, None, length=steps)
    return v


def weighted(losses: Losses, decay: float, theta: Array, x: Tree, data: Data) -> Array:
    """Return the lower level of hyper-cleaning: mean σ(θ_i)·loss_i + decay·‖x‖²."""
    return (jax.nn.sigmoid(theta) * losses(x, data)).mean() + decay * sum(
        (leaf * leaf).sum() for leaf in x.values()
    )


def implicit(
    losses: Losses,
    decay: float,
    theta: Array,
    x: Tree,
    train: Data,
    validation: Data,
    ridge: float,
    steps: int,
) -> Array:
    """Return −∇²_θx g·v with (∇²_xx g + ridge)·v ≈ ∇_x f; f does not depend on θ."""
    g = partial(weighted, losses, decay)
    b = jax.grad(lambda x: losses(x, validation).mean())(x)
    _, product = jax.linearize(lambda x: jax.grad(g, argnums=1)(theta, x, train), x)
    v = conjugate_gradients(product, b, ridge, steps)

    def along(theta: Array) -> Array:
        return jax.jvp(lambda x: g(theta, x, train), (x,), (v,))[1]

    return -jax.grad(along)(theta)


# 1. A hypergradient of the cleaning network
#    ------------------------------------------------------------------------------


def network_losses(x: Tree, data: Data) -> Array:
    """Return the cross-entropy of the sigmoid network of hyper-cleaning."""
    hidden = jax.nn.sigmoid(data["pixels"] @ x["hidden.weight"].T + x["hidden.bias"])
    logs = jax.nn.log_softmax(hidden @ x["output.weight"].T + x["output.bias"])
    return -jnp.take_along_axis(logs, data["label"][:, None], 1)[:, 0]


def hypergradient(
    decay: float, ridge: float, steps: int
) -> Callable[[Array, Tree, Data, Data], Array]:
    """Return the CG hypergradient of the cleaning network as one function of (θ, x, train,
    validation).
    """

    @jax.jit
    def program(theta: Array, x: Tree, train: Data, validation: Data) -> Array:
        return implicit(network_losses, decay, theta, x, train, validation, ridge, steps)

    return program


def jaxopt_hypergradient(
    decay: float, ridge: float, steps: int
) -> Callable[[Array, Tree, Data, Data], Array]:
    """Return the same by ``jaxopt.implicit_diff.custom_root`` and its CG."""
    from jaxopt import implicit_diff, linear_solve

    solve = partial(linear_solve.solve_cg, tol=1e-12, maxiter=steps, ridge=ridge)

    def optimality(x: Tree, theta: Array, train: Data) -> Tree:
        return jax.grad(partial(weighted, network_losses, decay), argnums=1)(theta, x, train)

    @jax.jit
    def program(theta: Array, x: Tree, train: Data, validation: Data) -> Array:
        solver = implicit_diff.custom_root(optimality, solve=solve)(
            lambda _start, _theta, _train: x
        )
        return jax.grad(lambda theta: network_losses(solver(x, theta, train), validation).mean())(
            theta
        )

    return program


# 2. An outer step of HG-MS on a linear model
#    -----------------------------------------------------------------------------


def linear_losses(x: Tree, data: Data) -> Array:
    """The logistic losses of a linear classifier; labels are ±1."""
    return jax.nn.softplus(-data["y"] * (data["a"] @ x["x"]))


def outer_step(
    decay: float,
    lr_factors: Array,
    lr: float,
    steps: int,
    ridge: float,
    products: int,
    outer_lr: float,
) -> Callable[[Array, Tree, Data, Data], tuple[Array, Tree, dict[str, Any]]]:
    """Return one function (θ, x, train, validation) → (θ, x, record): N branches of gradient
    descent with separate rates, the best on validation, its CG hypergradient, a step of SGD.
    """

    def branch(theta: Array, x: Tree, train: Data, rate: Array) -> Tree:
        slope = jax.grad(partial(weighted, linear_losses, decay), argnums=1)

        def step(x: Tree, _: None) -> tuple[Tree, None]:
            return jax.tree.map(
                lambda leaf, grad: leaf - rate * grad, x, slope(theta, x, train)
            ), None

        return lax.scan(step, x, None, length=steps)[0]

    @jax.jit
    def program(
        theta: Array, x: Tree, train: Data, validation: Data
    ) -> tuple[Array, Tree, dict[str, Any]]:
        ends = jax.vmap(lambda rate: branch(theta, x, train, rate))(lr * lr_factors)
        scores = jax.vmap(lambda x: linear_losses(x, validation).mean())(ends)
        selected = scores.argmin()
        x = jax.tree.map(lambda leaf: leaf[selected], ends)
        h = implicit(linear_losses, decay, theta, x, train, validation, ridge, products)
        record = {
            "upper_loss": scores[selected],
            "selected": selected,
            "hypergradient_norm": jnp.linalg.norm(h),
        }
        return theta - outer_lr * h, x, record

    return program


# 3. An outer step of `hg-ms` on the cleaning network
#    -----------------------------------------------------------------------------


def adam(
    x: Tree,
    slopes: Tree,
    moments: tuple[Tree, Tree],
    corrected: tuple[Array, Array],
    betas: tuple[float, float],
    eps: float = 1e-8,
) -> tuple[Tree, tuple[Tree, Tree]]:
    """Return x and (m, v) after a step; ``corrected`` is (η/(1 − β₁ᵗ), √(1 − β₂ᵗ))."""
    scale, correction = corrected
    first, second = moments
    m = jax.tree.map(lambda m, g: m + (1 - betas[0]) * (g - m), first, slopes)
    v = jax.tree.map(lambda v, g: betas[1] * v + (1 - betas[1]) * g * g, second, slopes)
    moved = jax.tree.map(
        lambda x, m, v: x - scale * (m / (jnp.sqrt(v) / correction + eps)), x, m, v
    )
    return moved, (m, v)


def cleaning_step(
    decay: float,
    ridge: float,
    products: int,
    betas: tuple[float, float],
    outer_betas: tuple[float, float],
) -> Callable[..., tuple[Any, dict[str, Array]]]:
    """Return one function (state, rows, numbers, data) → (state, record): N branches of AdamW on
    the drawn ``rows`` ``[N, steps, batch]``, the best on the rows of ``select``, its CG
    hypergradient on all rows, a step of Adam, and the best state on the rows of ``stop``.

    The ``numbers`` are the corrections of both optimisers. The function draws no rows.
    """

    def branch(
        theta: Array, x: Tree, moments: tuple[Tree, Tree], train: Data, rows: Array, table: Array
    ) -> tuple[Tree, tuple[Tree, Tree]]:
        slope = jax.grad(partial(weighted, network_losses, decay), argnums=1)

        def step(carry: Any, drawn: tuple[Array, Array]) -> tuple[Any, None]:
            x, moments = carry
            rows, corrected = drawn
            batch = {name: leaf[rows] for name, leaf in train.items()}
            slopes = slope(theta[rows], x, batch)
            return adam(x, slopes, moments, (corrected[0], corrected[1]), betas), None

        return lax.scan(step, (x, moments), (rows, table))[0]

    @jax.jit
    def program(
        state: dict[str, Any], rows: Array, numbers: tuple[Array, Array], data: dict[str, Data]
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        theta = state["theta"]
        train = data["lower"]
        run = partial(branch, theta, state["x"], state["moments"], train, table=numbers[0])
        ends = jax.vmap(lambda rows: run(rows=rows))(rows)
        scores = jax.vmap(lambda x: network_losses(x, data["select"]).mean())(ends[0])
        selected = scores.argmin()
        x, moments = jax.tree.map(lambda leaf: leaf[selected], ends)
        above = data["differentiate"]
        h = implicit(network_losses, decay, theta, x, train, above, ridge, products)
        corrected = numbers[1][0], numbers[1][1]
        moved, outer = adam({"h": theta}, {"h": h}, state["outer"], corrected, outer_betas)
        stop = network_losses(x, data["stop"]).mean()
        better = stop < state["best"]["loss"]
        fresh = {"loss": stop, "theta": theta, "x": x}
        best = jax.tree.map(partial(jnp.where, better), fresh, state["best"])
        following = {"theta": moved["h"], "x": x, "moments": moments, "outer": outer, "best": best}
        record = {
            "upper_loss": network_losses(x, above).mean(),
            "selected": selected,
            "scores": scores,
            "stop_loss": stop,
            "hypergradient_norm": jnp.linalg.norm(h),
        }
        return following, record

    return program
