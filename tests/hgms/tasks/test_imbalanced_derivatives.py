"""The imbalanced task's products and its implicit hypergradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.helpers import finite_differences
from torch import Tensor

import hgms_core
from hgms.tasks.imbalanced import ImbalancedLoss
from hgms_core import Ravel, Tree

CPU = torch.device("cpu")


DOUBLE = torch.float64


def tiny(tmp_path: Path) -> ImbalancedLoss:
    """118 parameters and 58 rows: small enough for dense Hessians."""
    pixels = np.random.default_rng(0).integers(0, 256, (120, 4, 4), np.uint8)
    np.savez(tmp_path / "tiny.npz", images=pixels, labels=np.arange(120) % 10)
    return ImbalancedLoss(
        dataset=f"npz:{tmp_path / 'tiny.npz'}",
        channels=(1, 2),
        hidden=2,
        least=2,
        views=2,
        validation_size=25,
        test_size=20,
        validation_split=(1, 1, 1),
        smooth=True,
        omega=0.02,
    )


@pytest.mark.parametrize("smooth", [False, True])
def test_products_with_the_hessian_agree_three_ways(smooth: bool) -> None:
    problem = ImbalancedLoss(channels=(2, 3), hidden=4, smooth=smooth).problem(0, CPU, DOUBLE)
    batch = problem.lower_data.batch(torch.arange(40))
    found = []
    for strategy in ("vjp", "jvp", "difference"):
        at = hgms_core.curvature(
            lambda x: problem.g(problem.theta0, x, batch), problem.x0, strategy
        )
        found.append(at.matvec(torch.cos(torch.arange(at.spec.size, dtype=DOUBLE))))
    assert torch.allclose(found[0], found[1], rtol=1e-10, atol=1e-13)
    assert torch.allclose(found[0], found[2], rtol=1e-4, atol=1e-6)


def newton(problem: hgms_core.Problem, theta: Tree, x: Tree) -> Tree:
    """The stationary point next to ``x``, by Newton's method on the dense Hessian; damped while
    far away.
    """
    spec = Ravel.of(x)
    loss = lambda y: problem.g(theta, spec.unravel(y), problem.lower_data.whole)  # noqa: E731
    y = spec.ravel(x)
    for _ in range(60):
        slope = torch.func.grad(loss)(y)
        if slope.norm() < 1e-12:
            return spec.unravel(y)
        damping = 0.0 if slope.norm() < 1e-5 else 0.3 * float(slope.norm()) ** 0.5
        hessian = torch.func.hessian(loss)(y)
        y = y - torch.linalg.solve(hessian + damping * torch.eye(len(y), dtype=DOUBLE), slope)
    raise AssertionError(f"not solved: {float(slope.norm())}")


def test_the_implicit_hypergradient_is_the_slope_of_the_re_solved_upper_loss(
    tmp_path: Path,
) -> None:
    problem = tiny(tmp_path).problem(0, CPU, DOUBLE)
    generator = torch.Generator().manual_seed(0)
    theta = {
        name: 0.3 * torch.randn(10, generator=generator, dtype=DOUBLE) for name in problem.theta0
    }
    x = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    optimiser = torch.optim.LBFGS(
        x.values(),
        max_iter=300,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-6,
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = problem.g(theta, x, problem.lower_data.whole)
        loss.backward()
        return loss

    optimiser.step(closure)
    solution = newton(problem, theta, hgms_core.detach(x))
    above = problem.upper_data["differentiate"].whole

    def dense(matvec: hgms_core.MatVec, b: Tensor) -> Tensor:
        hessian = torch.stack([matvec(column) for column in torch.eye(len(b), dtype=DOUBLE)], dim=1)
        assert float(torch.linalg.eigvalsh(hessian).min()) > 0
        return torch.linalg.solve(hessian, b)

    found = hgms_core.hypergradient(
        lambda t, y: problem.f(t, y, above),
        lambda t, y: problem.g(t, y, problem.lower_data.whole),
        theta,
        solution,
        solver=dense,
    )
    direction = {name: torch.randn(10, generator=generator, dtype=DOUBLE) for name in theta}

    def along(shift: Tree) -> Tensor:
        moved = {name: theta[name] + shift["s"] * direction[name] for name in theta}
        return problem.f(moved, newton(problem, moved, solution), above)

    slope = finite_differences(along, {"s": torch.zeros((), dtype=DOUBLE)}, step=1e-4)["s"]
    expected = sum(float((found.value[name] * direction[name]).sum()) for name in theta)
    assert float(slope) == pytest.approx(expected, rel=1e-5)
    direct = hgms_core.upper_gradients(lambda t, y: problem.f(t, y, above), theta, solution)[1]
    assert all(float(leaf.norm()) > 1e-4 for leaf in direct.values())  # θ enters f directly
