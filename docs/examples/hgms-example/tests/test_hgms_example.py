"""The conformance checks, and what a Chebyshev iteration is known to do."""

from __future__ import annotations

import math

import pytest
import torch
from hgms_example import ChebyshevSolver

from hgms.testing import parametrize_with_checks
from hgms_core import ConfigError, Outcome

SPECTRUM = torch.logspace(-1, 1, 40, dtype=torch.float64)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)


@parametrize_with_checks([ChebyshevSolver(), ChebyshevSolver(low=0.4, high=2.0, ridge=0.4)])
def test_conformance(component, check):
    check(component)


def test_the_solution_is_that_of_the_system():
    solution = ChebyshevSolver(low=0.1, high=10.0, rtol=1e-10).solve(
        lambda v: SPECTRUM * v, ones(40)
    )
    assert solution.outcome is Outcome.CONVERGED
    torch.testing.assert_close(solution.value, 1 / SPECTRUM, rtol=1e-8, atol=0)
    assert solution.products == int(solution.iterations)


def test_the_residual_stays_below_chebyshevs_bound():
    for steps in (1, 5, 20):
        solution = ChebyshevSolver(low=0.1, high=10.0, max_steps=steps).solve(
            lambda v: SPECTRUM * v, ones(40)
        )
        assert solution.residual <= 1 / math.cosh(steps * math.acosh(10.1 / 9.9)) * (1 + 1e-12)


def test_the_ridge_is_added():
    solution = ChebyshevSolver(low=0.5, high=11.0, ridge=0.5, rtol=1e-10).solve(
        lambda v: SPECTRUM * v, ones(40)
    )
    torch.testing.assert_close(solution.value, 1 / (SPECTRUM + 0.5), rtol=1e-8, atol=0)


def test_systems_of_a_batch_stop_by_themselves():
    scale = torch.tensor([[1.0], [0.2], [1.0]], dtype=torch.float64)
    b = torch.stack([ones(40), ones(40), torch.zeros(40, dtype=torch.float64)])
    solver = ChebyshevSolver(low=0.02, high=10.0, max_steps=500)
    together = solver.solve(lambda v: scale * SPECTRUM * v, b)
    alone = [
        solver.solve(lambda v, s=s: s * SPECTRUM * v, row) for s, row in zip(scale, b, strict=True)
    ]
    assert together.iterations.tolist() == [int(solution.iterations) for solution in alone]
    torch.testing.assert_close(
        together.value, torch.stack([solution.value for solution in alone]), rtol=1e-12, atol=0
    )
    assert together.iterations[2] == 0


def test_a_spectrum_outside_the_bounds_is_an_outcome():
    solution = ChebyshevSolver(low=0.1, high=1.0).solve(lambda v: SPECTRUM * v, ones(40))
    assert solution.outcome is Outcome.DIVERGED
    assert solution.residual <= 1
    assert torch.isfinite(solution.value).all()


def test_a_warm_start_at_the_solution_takes_no_step():
    solution = ChebyshevSolver().solve(lambda v: SPECTRUM * v, ones(40), 1 / SPECTRUM)
    assert (int(solution.iterations), solution.products) == (0, 1)


def test_an_operator_that_is_not_finite_is_an_outcome():
    solution = ChebyshevSolver().solve(lambda v: v * math.nan, ones(4))
    assert solution.outcome is Outcome.NONFINITE
    assert torch.isfinite(solution.value).all()


def test_wrong_bounds_are_named():
    with pytest.raises(ConfigError) as caught:
        ChebyshevSolver(low=2.0, high=1.0)
    assert (caught.value.code, caught.value.place) == ("out-of-range", ("high",))
