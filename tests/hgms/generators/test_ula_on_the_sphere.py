"""Langevin chains near a manifold of minimisers: how near, and what Best-of-N makes of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.helpers import F64, KEY

from hgms.generators.ula import Ula
from hgms.selectors import BestOfN
from hgms.tasks.sphere import Sphere
from hgms_core import Candidates, Key

pytestmark = [pytest.mark.nightly, pytest.mark.parametrize("k", [1, 2, 3])]


def slope(x: torch.Tensor, y: torch.Tensor) -> float:
    """The least-squares exponent of y ∝ x^p."""
    x, y = x.log() - x.log().mean(), y.log() - y.log().mean()
    return float((x * y).sum() / x.square().sum())


def chains(k: int, count: int, temperature: float, seed: int) -> torch.Tensor:
    """ULA from points spread evenly over S(θ), where the Gibbs measure already is to first
    order; 400 steps relax the rest.
    """
    exact = Sphere(k=k, d=k + 3).closed_form(0, torch.device("cpu"), F64)
    problem = Sphere(k=k, d=k + 3).problem(0, torch.device("cpu"), F64)
    ula = Ula(
        count=count,
        steps=400,
        lr=0.05,
        temperature=temperature,
        spread=0.0,
        carry_rule="per-branch",
        mode="stacked",
        chunk=5000,
    )
    size = exact.inside.shape[1]
    direction = torch.randn(count, size, generator=Key(seed).generator(), dtype=F64)
    direction = direction / direction.norm(dim=1, keepdim=True)
    start = {"x": torch.func.vmap(lambda u: exact.point(problem.theta0, u)["x"])(direction)}
    key = Key(seed).fold("chains")
    return ula.propose(problem, problem.theta0, {"x": start}, key).x["x"]


def test_the_distance_to_the_manifold_scales_with_the_root_of_the_temperature(k: int) -> None:
    task = Sphere(k=k, d=k + 3)
    exact = task.closed_form(0, torch.device("cpu"), F64)
    theta = task.problem(0, torch.device("cpu"), F64).theta0
    temperatures = torch.tensor([1e-4, 4e-4, 1.6e-3, 6.4e-3], dtype=F64)
    distances = []
    for i, temperature in enumerate(temperatures.tolist()):
        x = chains(k, 4000, temperature, seed=i)
        off = torch.func.vmap(lambda point: exact.off_manifold(theta, {"x": point}))(x)
        distances.append(off.square().mean().sqrt())
    # 4000 chains give the RMS to about 1 %, so the slope over a factor 64 to about 0.005; curvature
    # terms are O(λ).
    assert slope(temperatures, torch.stack(distances)) == pytest.approx(0.5, abs=0.03)


def test_best_of_n_falls_with_n_at_least_as_the_bound_says(k: int) -> None:
    # The bound is E‖x̃ − x*‖² ≤ C₀ √(λ log(1 + N)) + C₁ N^(−1/k). λ is so small that its first term
    # does not matter here; the optimum is non-degenerate, so exact samples would give N^(−2/k): the
    # fitted exponent must be at most −1/k.
    task = Sphere(k=k, d=k + 3)
    problem = task.problem(0, torch.device("cpu"), F64)
    theta = problem.theta0
    best = task.closed_form(0, torch.device("cpu"), F64).solution(theta)["x"]
    pool = chains(k, 40_000, 1e-6 if k == 1 else 1e-5, seed=7)
    scores = torch.func.vmap(lambda point: problem.f(theta, {"x": point}, {}))(pool)
    sizes = [2, 4, 8, 16, 32, 64]
    errors = []
    for n in sizes:
        groups = pool.shape[0] // n
        chosen = scores[: groups * n].reshape(groups, n).argmin(1) + n * torch.arange(groups)
        errors.append((pool[chosen] - best).square().sum(1).mean())
    first = BestOfN().select(problem, theta, Candidates(x={"x": pool[:64]}), KEY)
    assert int(first.index) == int(scores[:64].argmin())
    assert slope(torch.tensor(sizes, dtype=F64), torch.stack(errors)) <= -1 / k
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
