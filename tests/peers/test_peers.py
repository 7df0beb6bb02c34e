"""The implicit hypergradient is the one that jaxopt, torchopt, lineax and dense linear algebra
compute, to 1e-8.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
import torch
import torchopt
from peer_problems import Peer, dense, logistic
from torch import Tensor

from hgms.adapters import hypergradient
from hgms.solvers import CG, MINRES, NystromCG
from hgms_core import LinearSolver

with warnings.catch_warnings():
    # jaxopt says on import that it is no longer maintained
    warnings.simplefilter("ignore", DeprecationWarning)
    from jaxopt import implicit_diff, linear_solve

pytestmark = [
    pytest.mark.nightly,
    # torchopt uses the old names
    pytest.mark.filterwarnings("ignore:We've integrated functorch:FutureWarning"),
]
STEPS = 3000


@pytest.fixture(scope="module")
def problem() -> Iterator[Peer]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield logistic()
    jax.config.update("jax_enable_x64", before)


def to_jax(problem: Peer) -> tuple[dict, jax.Array]:
    x = {name: jnp.asarray(leaf.numpy()) for name, leaf in problem.x.items()}
    return x, jnp.asarray(problem.theta["t"].numpy())


def with_jaxopt(problem: Peer) -> Tensor:
    x, theta = to_jax(problem)

    def solve(matvec: Callable, b: dict) -> dict:
        return linear_solve.solve_cg(matvec, b, tol=1e-13, maxiter=STEPS)

    @implicit_diff.custom_root(jax.grad(problem.jax_g), solve=solve)
    def solver(_init: dict, _theta: jax.Array) -> dict:
        return x

    return as_tensor(jax.jit(jax.grad(lambda t: problem.jax_f(solver(x, t), t)))(theta))


def with_lineax(problem: Peer) -> Tensor:
    x, theta = to_jax(problem)
    slope = jax.grad(problem.jax_g)
    operator = lineax.JacobianLinearOperator(
        lambda at, _: slope(at, theta), x, tags=lineax.positive_semidefinite_tag
    )
    solver = lineax.CG(rtol=1e-13, atol=0.0, max_steps=STEPS)
    v = lineax.linear_solve(operator, jax.grad(problem.jax_f)(x, theta), solver).value
    return as_tensor(-jax.vjp(lambda t: slope(x, t), theta)[1](v)[0])


def with_torchopt(problem: Peer) -> Tensor:
    names = list(problem.x)
    theta = problem.theta["t"].clone().requires_grad_()

    def stationary(leaves: tuple[Tensor, ...], t: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda at: problem.g({"t": t}, dict(zip(names, at, strict=True))))(
            leaves
        )

    @torchopt.diff.implicit.custom_root(
        stationary,
        argnums=1,
        solve=torchopt.linear_solve.solve_cg(rtol=1e-13, atol=0.0, maxiter=STEPS),
    )
    def solver(_init: tuple[Tensor, ...], _theta: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.detach().clone() for leaf in problem.x.values())

    leaves = solver(tuple(problem.x.values()), theta)
    return torch.autograd.grad(
        problem.f({"t": theta}, dict(zip(names, leaves, strict=True))), theta
    )[0]


def as_tensor(array: jax.Array) -> Tensor:
    return torch.from_numpy(np.array(array))


@functools.cache
def reference(peer: Callable[[Peer], Tensor], problem: Peer) -> Tensor:
    return peer(problem)


@pytest.mark.parametrize("peer", [with_jaxopt, with_lineax, with_torchopt, dense])
@pytest.mark.parametrize(
    "solver",
    [
        CG(rtol=1e-13, max_steps=STEPS),
        NystromCG(rank=30, rtol=1e-13, max_steps=STEPS),
        MINRES(rtol=1e-13, max_steps=STEPS),
    ],
    ids=lambda solver: solver.name,
)
def test_hypergradients_agree(
    problem: Peer, solver: LinearSolver, peer: Callable[[Peer], Tensor]
) -> None:
    ours = hypergradient(problem.f, problem.g, problem.theta, problem.x, solver=solver)
    theirs = reference(peer, problem)
    assert ours.residual < 1e-11
    assert theirs.norm() > 1e-4
    assert (ours.value["t"] - theirs).norm() <= 1e-8 * theirs.norm()
