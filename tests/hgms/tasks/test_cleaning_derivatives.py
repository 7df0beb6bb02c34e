"""The cleaning task's implicit hypergradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hgms_core
from hgms.tasks.cleaning import HyperCleaning

CPU = torch.device("cpu")


DOUBLE = torch.float64


def small(tmp_path: Path, **fields: object) -> HyperCleaning:
    """A task on 60 random 4 × 3 images in an .npz file: fast, and small enough for dense linear
    algebra.
    """
    generator = np.random.default_rng(0)
    path = tmp_path / "small.npz"
    np.savez(
        path, images=generator.integers(0, 256, (60, 4, 3), np.uint8), labels=np.arange(60) % 3
    )
    usual = {"train_size": 30, "validation_size": 10, "test_size": 20, "hidden": 4, "classes": 3}
    return HyperCleaning(dataset=f"npz:{path}", **(usual | fields))


@pytest.mark.parametrize("strategy", ["vjp", "jvp", "difference"])
def test_the_implicit_hypergradient_is_one_product_with_each_example_gradient(
    tmp_path: Path, strategy: str
) -> None:
    problem = small(tmp_path).problem(0, CPU, DOUBLE)
    theta = {"logits": torch.linspace(-1, 1, 30, dtype=DOUBLE)}
    spec = hgms_core.Ravel.of(problem.x0)
    ridge = 0.5
    at = spec.ravel(problem.x0)
    hessian = torch.func.hessian(
        lambda y: problem.g(theta, spec.unravel(y), problem.lower_data.whole)
    )(at)
    validation = problem.upper_data["differentiate"].whole
    slope = torch.func.grad(lambda y: problem.f(theta, spec.unravel(y), validation))(at)
    v = torch.linalg.solve(hessian + ridge * torch.eye(len(at), dtype=DOUBLE), slope)

    def example_loss(y: torch.Tensor, i: int) -> torch.Tensor:
        flat = {"logits": torch.full((30,), 40.0, dtype=DOUBLE)}  # weight 1
        decay = problem.lower_data.batch(torch.tensor([i]))
        return problem.g(flat, spec.unravel(y), decay)

    decay = 2e-4 * at @ v
    weight = torch.sigmoid(theta["logits"])
    expected = [
        -weight[i] * (1 - weight[i]) / 30 * (torch.func.grad(example_loss)(at, i) @ v - decay)
        for i in range(30)
    ]
    found = hgms_core.hypergradient(
        lambda t, x: problem.f(t, x, validation),
        lambda t, x: problem.g(t, x, problem.lower_data.whole),
        theta,
        problem.x0,
        solver=lambda matvec, b: v,
        strategy=strategy,
    )
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-9} if strategy == "difference" else {"rtol": 1e-10, "atol": 1e-14}
    )
    assert torch.allclose(found.value["logits"], torch.stack(expected), **tolerance)
