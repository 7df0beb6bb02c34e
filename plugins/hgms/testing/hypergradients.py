"""Checks of hypergradient estimators: exact values, finite differences and oracle counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hgms.runs import needs
from hgms.testing import oracle, problems
from hgms.testing.kit import (
    F64,
    ask_if,
    demand,
    demand_saved,
    differences,
    fail,
    place,
    shapes,
    show,
    unsound,
)
from hgms_core import Estimate, Key, Ravel, detach, upper_gradients

KEY = Key(5)
TOLERANCE = 1e-3


def exercise(estimator: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    known = _usual(estimator, dtype, variant)
    branch = known.branch(steps=20)
    state = estimator.init(known.problem)
    data = [known.problem.lower_data.whole, known.problem.upper_data["differentiate"].whole]
    inputs = {"theta": known.theta, "x": branch.x, "aux": branch.aux, "state": state, "data": data}

    def call() -> Any:
        estimate, memory = estimator.estimate(
            known.problem, known.theta, *branch.as_candidates(), KEY, state
        )
        return {
            "value": estimate.value,
            "upper_loss": estimate.upper_loss,
            "cost": estimate.cost,
            "state": memory,
        }

    return inputs, call


def _usual(estimator: Any, dtype: torch.dtype = F64, variant: int = 0) -> problems.Known:
    """Return the problem of the checks: a ridge regression, or a mixture if sources are needed."""
    make = problems.blend if _of_sources(estimator) else problems.ridge
    return make(dtype, variant)


def _of_sources(estimator: Any) -> bool:
    return "sources" in needs(estimator)


def run_estimator(estimator: Any, known: problems.Known) -> Estimate:
    problem = known.problem
    estimate, _ = estimator.estimate(
        problem, known.theta, *known.branch().as_candidates(), KEY, estimator.init(problem)
    )
    demand(
        isinstance(estimate, Estimate),
        f"estimate returns {type(estimate).__name__} first; return an Estimate and a state",
    )
    return estimate


def _close(estimator: Any, known: problems.Known) -> None:
    exact = known.gradient()
    spec = Ravel.of(known.theta)
    value = run_estimator(estimator, known).value
    demand(set(value) == set(exact), f"it has the leaves {sorted(value)}, θ has {sorted(exact)}")
    wanted = spec.ravel(exact)
    came = spec.ravel(value)
    error = float((wanted - came).norm() / wanted.norm())
    if error > TOLERANCE:
        off = f"off by {error:.1e} of its length (allowed {TOLERANCE:g})"
        fail(f"h = {show(came)}, ∇F = {show(wanted)}: {off}{_likely(known, wanted, came)}")


def _likely(known: problems.Known, exact: Tensor, came: Tensor) -> str:
    """Return the likely cause of a wrong hypergradient.

    ∇F is the sum of ∂f/∂θ and the part that comes through x*(θ).
    """
    upper = known.problem.upper_data["differentiate"].whole
    x = detach(known.solution(known.theta))
    direct = Ravel.of(known.theta).ravel(
        upper_gradients(lambda t, y: known.problem.f(t, y, upper), known.theta, x)[1]
    )
    neighbours = {
        "it is −∇F: the sign is wrong": -exact,
        "the part that comes through x*(θ) has the wrong sign": 2 * direct - exact,
        "it is ∂f/∂θ alone: the part that comes through x*(θ) is missing": direct,
        "∂f/∂θ is missing": exact - direct,
    }
    size = TOLERANCE * exact.norm()
    return next(
        (f"; {what}" for what, value in neighbours.items() if (came - value).norm() <= size), ""
    )


def check_structure(estimator: Any) -> None:
    """h has the names, shapes and dtype of θ, is finite and has no graph. `upper_loss` is f at
    the state at which h was computed.
    """
    known = _usual(estimator)
    estimate = run_estimator(estimator, known)
    wanted = shapes(known.theta)
    came = shapes(estimate.value)
    demand(wanted == came, f"θ has {wanted}, h has {came}")
    bad = unsound(estimate.value)
    demand(not bad, f"h: {', '.join(bad)}")
    exact = float(known.value(known.theta))
    loss = float(estimate.upper_loss)
    demand(
        abs(exact - loss) <= 1e-2 * (1 + abs(exact)), f"upper_loss is {loss:.6g}, f is {exact:.6g}"
    )


def check_closed_form_bowl(estimator: Any) -> None:
    """At the bottom of a round bowl (H = I), where one lower step of rate 1 is exact, h is ∇F.
    An estimator that needs named sources runs `closed-form-sources` instead.
    """
    ask_if(not _of_sources(estimator), "it needs sources")
    _close(estimator, problems.bowl())


def check_closed_form_ridge(estimator: Any) -> None:
    """At the solution of a ridge regression, h is ∇F from the normal equations: sign, ridge and
    mixed term. An estimator that needs named sources runs `closed-form-sources` instead.
    """
    ask_if(not _of_sources(estimator), "it needs sources")
    _close(estimator, problems.ridge())


def check_closed_form_sources(estimator: Any) -> None:
    """At the solution of a mixture of three named sources with round losses (H = I), h is ∇F."""
    _close(estimator, problems.blend())


def check_closed_form_sphere(estimator: Any) -> None:
    """At the best point of a sphere of lower minimisers, where H is singular, h is ∇F of the
    optimistic problem. An estimator that needs named sources runs `closed-form-sources` instead.
    """
    ask_if(not _of_sources(estimator), "it needs sources")
    _close(estimator, problems.sphere())


def check_central_difference(estimator: Any) -> None:
    """If the lower level is not quadratic, h equals central differences of F(θ) = f(θ, x*(θ)) in
    every direction. An estimator that needs named sources runs `closed-form-sources` instead.
    """
    ask_if(not _of_sources(estimator), "it needs sources")
    known = problems.curved_level()
    spec = Ravel.of(known.theta)
    h = spec.ravel(run_estimator(estimator, known).value)
    flat = spec.ravel(known.theta)

    def slope(row: Tensor) -> Tensor:
        return differences(lambda step: known.value(spec.unravel(flat + step * row)))

    slopes = torch.stack(
        [slope(row) for row in torch.eye(len(flat), dtype=flat.dtype, device=place())]
    )
    error = float((h - slopes).norm() / slopes.norm())
    demand(
        error <= TOLERANCE, f"h = {show(h)}, differences give {show(slopes)}: off by {error:.1e}"
    )


def check_oracle_counts(estimator: Any) -> None:
    """The declared cost is correct: every call of f or g is declared, and no other call."""
    known = _usual(estimator)
    problem, tally = oracle.watch(known.problem)
    branch = evolve(known, problem=problem).branch(steps=7)
    state = estimator.init(problem)
    estimator.estimate(
        problem, known.theta, *branch.as_candidates(), KEY, state
    )  # the first call is not counted
    tally.clear()
    estimate, _ = estimator.estimate(problem, known.theta, *branch.as_candidates(), KEY, state)
    calls = tally.calls
    cost = estimate.cost
    solution = estimate.solution
    upper = cost.upper_values + cost.upper_gradients
    lower = cost.lower_gradients + cost.products + cost.cross_products
    demand(upper == calls["f"], f"f was called {calls['f']} times, {upper} calls are declared")
    demand(
        bool(lower) == bool(calls["g"]),
        f"g was called {calls['g']} times, {lower} calls are declared",
    )
    two = (
        f"g was called {calls['g']} times, {lower} gradients and products are declared (two a "
        "call at most)"
    )
    demand(calls["g"] <= 2 * lower, two)
    demand(cost.rows >= upper, f"{cost.rows} rows in {upper + lower} calls")
    if solution is not None:
        products = f"the solver made {solution.products} products, {cost.products} are declared"
        demand(cost.products >= solution.products, products)


def check_state(estimator: Any) -> None:
    """The state can be saved, and the next estimate is bit for bit the same as without saving."""
    known = _usual(estimator)
    branch = known.branch(steps=7)
    _, state = estimator.estimate(
        known.problem, known.theta, *branch.as_candidates(), KEY, estimator.init(known.problem)
    )
    moved = {name: leaf + 0.1 for name, leaf in known.theta.items()}
    demand_saved(
        state,
        lambda memory: (
            estimator.estimate(known.problem, moved, *branch.as_candidates(), KEY, memory)[0].value
        ),
    )
