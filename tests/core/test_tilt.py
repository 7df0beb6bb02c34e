"""The tilted lower level g + εf: what it is, what it costs, and that it finds the optimistic solution as ε → 0."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import F64, network_problem

from hgms_branches import Branches
from hgms_cg import CG
from hgms_core import ConfigError, Pipeline
from hgms_hypergradients import Implicit, Unrolled
from hgms_outer import ProjectedGradient
from hgms_selectors import BestOfN, First
from hgms_task_sphere import Sphere

pytestmark = pytest.mark.plugins


def test_a_tilted_batch_carries_validation_rows_and_the_loss_is_the_sum() -> None:
    problem = network_problem()
    tilted = problem.tilted(0.25)
    index = torch.tensor([[0, 3], [5, 2]])
    batch = tilted.lower_data.rows(index)
    upper = problem.upper_data["differentiate"]
    above = upper.rows((index * 7919) % upper.size)
    for name, leaf in above.items():
        assert torch.equal(batch[f"upper.{name}"], leaf)
    one = {name: leaf[0] for name, leaf in batch.items()}
    expected = problem.g(problem.theta0, problem.x0, problem.lower_data.rows(index[0])) + 0.25 * problem.f(
        problem.theta0, problem.x0, {name: leaf[0] for name, leaf in above.items()}
    )
    assert torch.allclose(tilted.g(problem.theta0, problem.x0, one), expected, rtol=1e-12)
    whole = tilted.g(problem.theta0, problem.x0, tilted.lower_data.batch(None))
    parts = problem.g(problem.theta0, problem.x0, problem.lower_data.whole) + 0.25 * problem.f(
        problem.theta0, problem.x0, upper.whole
    )
    assert torch.allclose(whole, parts, rtol=1e-12)


def test_every_call_counts_for_both_losses() -> None:
    problem = network_problem()
    method = Pipeline(
        generator=Branches(count=1, steps=3, lr=0.1, mode="loop"),
        selector=First(),
        hypergradient=Unrolled(),
        outer=ProjectedGradient(lr=0.1),
        tilt=0.5,
    )
    state = method.init(problem, seed=0)
    _, record = method.step(problem, state)
    plain = Pipeline(**{name: getattr(method, name) for name in ("generator", "selector", "hypergradient", "outer")})
    _, reference = plain.step(problem, plain.init(problem, seed=0))
    assert record["cost_lower_gradients"] == reference["cost_lower_gradients"]
    assert record["cost_upper_gradients"] == reference["cost_upper_gradients"] + reference["cost_lower_gradients"]
    assert record["cost_products"] == 2 * reference["cost_products"]
    # the three whole lower passes of each kind bring the validation rows along; f's own pass has no more rows than before
    upper, lower = problem.upper_data["differentiate"].size, problem.lower_data.size
    passes = (reference["cost_rows"] - upper) // lower
    assert reference["cost_rows"] == passes * lower + upper
    assert record["cost_rows"] == passes * (lower + upper) + upper


def test_a_tilted_batch_counts_the_rows_it_brings_along() -> None:
    problem = network_problem()
    lower, upper = problem.lower_data, problem.upper_data["differentiate"]
    tilted = problem.tilted(0.5).lower_data
    assert tilted.count(3) == next(iter(tilted.rows(torch.arange(3)).values())).shape[0] * 2 == 6
    assert tilted.count(None) == tilted.count(10**6) == lower.size + upper.size
    assert lower.count(3) == 3


def test_the_hypergradient_is_that_of_the_tilted_path() -> None:
    """Unrolled through the tilted steps, against autograd through the same steps written out."""
    problem = network_problem()
    weight, lr = 0.3, 0.1
    method = Pipeline(
        generator=Branches(count=1, steps=2, lr=lr),
        selector=First(),
        hypergradient=Unrolled(),
        outer=ProjectedGradient(lr=1.0),
        tilt=weight,
    )
    state = method.init(problem, seed=0)
    following, _ = method.step(problem, state)

    theta = {name: leaf.clone().requires_grad_() for name, leaf in problem.theta0.items()}
    x = {name: leaf.clone().requires_grad_() for name, leaf in problem.x0.items()}
    above = problem.upper_data["differentiate"].whole
    for _ in range(2):
        loss = problem.g(theta, x, problem.lower_data.whole) + weight * problem.f(theta, x, above)
        grads = torch.autograd.grad(loss, list(x.values()), create_graph=True)
        x = {name: leaf - lr * grad for (name, leaf), grad in zip(x.items(), grads, strict=True)}
    expected = torch.autograd.grad(problem.f(theta, x, above), list(theta.values()), materialize_grads=True)
    for (name, leaf), grad in zip(problem.theta0.items(), expected, strict=True):
        assert torch.allclose(following["theta"][name], leaf - grad, rtol=1e-9, atol=1e-12)


def _gap(tilt: float) -> float:
    """F(θ) − F* that tilted candidates reach on the sphere, where descent on g alone stays at the worst minimiser."""
    task = Sphere(k=1, d=3)
    problem = task.problem(0, torch.device("cpu"), F64)
    method = Pipeline(
        generator=Branches(count=2, steps=100, lr=0.2, noise=0.05),
        selector=BestOfN(),
        hypergradient=Implicit(solver=CG(ridge=1e-9, rtol=1e-10, max_steps=50)),
        outer=ProjectedGradient(lr=0.3),
        tilt=tilt,
    )
    state = method.init(problem, seed=0)
    for _ in range(30):
        state, _ = method.step(problem, state)
    theta, _ = method.result(state)
    exact = task.closed_form(0, torch.device("cpu"), F64)
    return float(exact.value(theta) - exact.value(exact.theta_star))


def test_the_optimistic_optimum_is_reached_as_the_tilt_vanishes() -> None:
    """θ minimises F_ε = F + O(ε) with an error of O(ε) in θ, hence O(ε²) in F: halving the tilt quarters the gap."""
    gaps = [_gap(tilt) for tilt in (0.2, 0.1, 0.05)]
    assert _gap(0.0) > 10 * gaps[0]
    assert [after / before for before, after in itertools.pairwise(gaps)] == pytest.approx([0.25, 0.25], abs=0.05)


def test_a_negative_tilt_is_refused() -> None:
    parts = {
        "generator": Branches(),
        "selector": First(),
        "hypergradient": Unrolled(),
        "outer": ProjectedGradient(lr=0.1),
    }
    with pytest.raises((ValueError, ConfigError), match="tilt"):
        Pipeline(**parts, tilt=-1.0)
