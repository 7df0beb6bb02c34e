"""Where the penalty methods end: penalised optima, limits in their multipliers, the sphere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from scipy.optimize import minimize_scalar
from support.field_problems import CPU, pipeline, run
from support.helpers import F64, assert_same

from hgms.generators.penalty import (
    DynamicBarrier,
    FullyFirstOrder,
    GradientNorm,
    Minimax,
    MoreauEnvelope,
    PairOptimizer,
    Ramp,
    ValueGap,
)
from hgms.hypergradients import Carried
from hgms.outer import Sgd
from hgms.selectors import BestOfN, First
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.sphere import Sphere
from hgms_core import Key, Tree

TASK = Quadratic(
    features=6, rows=12, validation_rows=100, penalty="shared", noise=2.0, condition=3.0
)
RIDGE = TASK.problem(1, CPU, F64)
EXACT = TASK.closed_form(1, CPU, F64)
EYE = torch.eye(TASK.features, dtype=F64)


def ended(generator: Any, rate: float, steps: int, problem: Any = RIDGE) -> tuple[Tree, Tree]:
    method = pipeline(generator, First(), Carried(), Sgd(lr=rate))
    theta, x, _ = run(method, problem, steps)
    return theta, x


def hessian(theta: Tree) -> torch.Tensor:
    return EXACT.a.T @ EXACT.a / EXACT.a.shape[0] + theta["log_penalty"].exp() * EYE


def penalised_minimiser(kind: str, gamma: float | None) -> float:
    """argmin_θ min_x f + γ·penalty by dense algebra in x and a scalar search in θ; F itself for
    γ = None.
    """
    rows = EXACT.validation_a.shape[0]
    above = EXACT.validation_a.T @ EXACT.validation_a / rows
    above_b = EXACT.validation_a.T @ EXACT.validation_b / rows

    def value(log_penalty: float) -> float:
        theta = {"log_penalty": torch.tensor([log_penalty], dtype=F64)}
        best = EXACT.solution(theta)
        if gamma is None:
            return float(EXACT.value(theta))
        h = hessian(theta)
        weight = h if kind == "gap" else h @ h
        x = {"x": torch.linalg.solve(above + gamma * weight, above_b + gamma * weight @ best["x"])}
        error = x["x"] - best["x"]
        penalty = 0.5 * error @ weight @ error  # g − min g = ½ eᵀHe, and ½‖∇g‖² = ½ eᵀH²e
        return float(RIDGE.f(theta, x, RIDGE.upper_data["select"].whole) + gamma * penalty)

    options = {"xatol": 1e-10}
    return float(minimize_scalar(value, bounds=(-5, 3), method="bounded", options=options).x)


def log_penalty(generator: Any, rate: float, steps: int) -> float:
    return float(ended(generator, rate, steps)[0]["log_penalty"])


@pytest.mark.extended
@pytest.mark.parametrize("gamma", [4.0, 10.0])
def test_fixed_penalties_converge_to_the_penalised_optimum(gamma: float) -> None:
    """Five times nearer to it than it is to the true optimum, so the two cannot be confused."""
    settings: dict[str, Any] = {"gamma": gamma, "ramp": Ramp(start=4.0, steps=100), "lr": 0.3}
    steps, rate = (400, 0.25) if gamma == 4 else (500, 0.1)
    best = penalised_minimiser("gap", None)
    game = Minimax(optimizer=PairOptimizer(lr=0.3 / gamma, lr_u=0.7 / gamma), alpha=gamma)
    for generator, scale, kind in (
        (ValueGap(inner_lr=0.7, **settings), rate * gamma, "gap"),
        (game, rate, "gap"),
        (GradientNorm(**settings), rate * gamma, "norm"),
    ):
        expected = penalised_minimiser(kind, gamma)
        reached = log_penalty(generator, scale, steps)
        assert abs(reached - expected) < abs(expected - best) / 5, generator


@pytest.mark.extended
def test_a_growing_penalty_and_a_barrier_come_near_the_true_optimum() -> None:
    best, small = (penalised_minimiser("gap", gamma) for gamma in (None, 4.0))
    growing = ValueGap(lr=0.3, inner_lr=0.7, gamma=40.0, ramp=Ramp(start=4.0, steps=1000))
    assert abs(log_penalty(growing, 1.0, 1000) - best) < abs(small - best) / 4
    barrier = DynamicBarrier(steps=5, inner_lr=0.5, lr=0.03, eta=0.5)
    assert abs(log_penalty(barrier, 0.15, 400) - best) < 0.05


@pytest.mark.extended
def test_f2sa_s_upper_gradient_tends_to_the_hypergradient_as_one_over_its_multiplier() -> None:
    """At a θ that stays, with the whole data and many steps."""
    theta = {"log_penalty": torch.tensor([0.3], dtype=F64)}
    wanted = EXACT.hypergradient(theta)["log_penalty"]
    errors = []
    for penalty in (10.0, 100.0, 1000.0):
        generator = FullyFirstOrder(steps=150, lr=0.5, inner_lr=0.5, penalty=penalty, growth=0.0)
        found = generator.propose(RIDGE, theta, generator.init(RIDGE, Key(0)), Key(0))
        errors.append(float((found.aux["theta.log_penalty"][0] - wanted).abs().max()))
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.3)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.1)


def test_the_proximal_point_of_meha_is_that_of_the_envelope() -> None:
    """With θ and y held, z tends to argmin_z g + ‖z − y‖²/(2γ), by dense algebra."""
    y = {name: leaf + 1 for name, leaf in RIDGE.x0.items()}
    held = evolve(RIDGE, x0=y)
    generator = MoreauEnvelope(inner_lr=0.3, lr=1e-300, gamma=0.8)
    start = generator.init(held, Key(0))
    for _ in range(200):
        candidates = generator.propose(held, held.theta0, start, Key(0))
        start = generator.carry(start, candidates, torch.tensor(0), Key(0), held)
    h, shift = hessian(held.theta0), EYE / 0.8
    right = h @ EXACT.solution(held.theta0)["x"] + shift @ y["x"]
    assert_same(start["aux"]["z.x"][0], torch.linalg.solve(h + shift, right), rtol=1e-8)


# --- a manifold of minima

SPHERE = Sphere(k=2, d=6).problem(0, CPU, F64)
FIVE: dict[str, Any] = {"count": 5, "noise": 0.5, "carry_rule": "per-branch"}


def on_sphere(generator: Any, rate: float, seed: int = 0, selector: Any = None) -> dict[str, float]:
    method = pipeline(generator, selector or First(), Carried(), Sgd(lr=rate))
    theta, x, _ = run(method, SPHERE, 150, seed)
    return dict(SPHERE.evaluate(theta, x))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("generator", "rate"),
    [
        (ValueGap(gamma=20.0, ramp=Ramp(steps=0), lr=0.2, inner_lr=0.2), 0.2),
        (Minimax(alpha=20.0, optimizer=PairOptimizer(lr=0.01)), 0.01),
    ],
)
def test_on_a_manifold_of_minima_selection_makes_up_for_the_slow_drift_along_it(
    generator: Any, rate: float
) -> None:
    """A penalty moves y along the manifold by f alone, γ times slower than g moves it onto it: one
    run that starts at the worst minimiser works with a wrong x meanwhile, and of several runs the
    best one is less wrong.
    """
    alone = on_sphere(generator, rate)
    # a lower minimiser up to the penalty's bias of order 1/γ, and not the optimistic one
    assert alone["manifold_distance"] < 0.05
    assert alone["solution_distance"] > 0.5
    for seed in (0, 1):
        best = on_sphere(evolve(generator, **FIVE), rate, seed, BestOfN())
        assert best["manifold_distance"] < 0.05
        assert 0 < best["upper_gap"] < 0.75 * alone["upper_gap"]
        assert best["solution_distance"] < alone["solution_distance"]
