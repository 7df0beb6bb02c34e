"""What `run.diagnose` measures, against closed forms; and that a run does not know that it is
measured.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen
from support.own_problems import Halve

from hgms.adapters import from_losses
from hgms.diagnosis import Diagnosing, spectrum
from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Implicit, Unrolled
from hgms.optim import SGD
from hgms.outer import Sgd
from hgms.runs import run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms.tasks.quadratic import Quadratic
from hgms.tasks.sphere import Sphere
from hgms_core import (
    Candidates,
    Cost,
    Data,
    Estimate,
    Key,
    Method,
    Pipeline,
    Problem,
    Record,
    Selection,
    State,
    Tree,
    upper_gradients,
)

CPU = torch.device("cpu")
DOUBLE = torch.float64


def method(**parts: Any) -> Pipeline:
    own: dict[str, Any] = {
        "generator": Branches(
            count=3, steps=4, optimizer=SGD(lr=0.3), diversity=Diversity(noise=0.3)
        ),
        "selector": BestOfN(),
        "hypergradient": Implicit(solver=CG(ridge=0.0, rtol=1e-12)),
        "outer": Sgd(lr=0.1),
    }
    return Pipeline(**own | parts)


def diagnosed(method: Method, problem: Problem) -> tuple[dict[str, Any], State, Record]:
    """The diagnosis of a first step, the state after it and its record."""
    before = method.init(problem, 0)
    after, record = method.step(problem, before, 0.0)
    return (
        Diagnosing(method=method, problem=problem, seed=0).row(before, after, 1, 0.0),
        after,
        record,
    )


RIDGE = Quadratic(features=6, rows=30, validation_rows=20)


def cosine_and_ratio(here: torch.Tensor, there: torch.Tensor) -> tuple[float, float]:
    return float(here @ there / here.norm() / there.norm()), float(here.norm() / there.norm())


def test_bias_and_spectrum_of_an_unsolved_quadratic_are_exact() -> None:
    row, after, _ = diagnosed(method(), RIDGE.problem(0, CPU, DOUBLE))
    exact = RIDGE.closed_form(0, CPU, DOUBLE)
    theta = {"log_penalty": torch.zeros(6, dtype=DOUBLE)}
    x = after["x"]["x"]
    hessian = exact.a.T @ exact.a / 30 + torch.eye(6, dtype=DOUBLE)
    slope = hessian @ x - exact.a.T @ exact.b / 30
    assert row["lower_gradient"] == pytest.approx(float(slope.norm()), rel=1e-10)
    away = float((x - exact.solution(theta)["x"]).norm())
    assert row["newton_step"] == pytest.approx(away, rel=1e-8)
    above = exact.validation_a.T @ (exact.validation_a @ x - exact.validation_b) / 20
    here = -x * torch.linalg.solve(hessian, above)
    there = exact.hypergradient(theta)["log_penalty"]
    assert row["bias"] == pytest.approx(float((here - there).norm() / there.norm()), rel=1e-7)
    assert row["bias_cosine"] == pytest.approx(cosine_and_ratio(here, there)[0], rel=1e-9)
    values = torch.linalg.eigvalsh(hessian)
    expected = {"flat_dimension": 0, "negative_dimension": 0, "size": 6, "spectrum": "all"}
    assert {name: row[name] for name in expected} == expected
    found = [row["largest"], row["normal_curvature"], row["normal_inverses"]]
    known = [float(values[-1]), float(values[0]), float((1 / values).sum())]
    assert found == pytest.approx(known, rel=1e-10)


def test_a_lower_run_four_times_as_long_is_the_same_branch_going_on() -> None:
    problem = RIDGE.problem(0, CPU, DOUBLE)
    own = method()
    row, _, _ = diagnosed(own, problem)
    before = own.init(problem, 0)
    key = Key(0).fold("step", 0)
    found = []
    for steps in (4, 16):
        candidates = evolve(own.generator, steps=steps).propose(
            problem, problem.theta0, before["start"], key.fold("propose")
        )
        at = candidates.branch(torch.tensor(row["selected"]))
        known = before["hypergradient"]
        estimate, _ = own.hypergradient.estimate(
            problem, problem.theta0, *at.as_candidates(), key.fold("differentiate"), known
        )
        found.append(estimate.value["log_penalty"])
    longer = (row["longer_cosine"], row["longer_ratio"])
    assert longer == pytest.approx(cosine_and_ratio(*found), rel=1e-12)


@pytest.mark.parametrize("estimator", [Implicit(solver=CG(rtol=1e-9)), Unrolled()])
def test_rounding_is_measured_against_the_problem_in_float64(estimator: Any) -> None:
    own = method(
        hypergradient=estimator, generator=Branches(count=1, steps=4, optimizer=SGD(lr=0.1))
    )
    row, _, _ = diagnosed(own, RIDGE.problem(0, CPU, torch.float32))
    assert row["double"] == "cast"
    assert 0 < 1 - row["double_cosine"] < 1e-5 or row["double_ratio"] != 1
    assert row["double_ratio"] == pytest.approx(1, abs=1e-4)


def test_losses_that_contain_tensors_are_not_cast() -> None:
    row, _, _ = diagnosed(method(), Sphere(k=1, d=5).problem(0, CPU, torch.float32))
    assert "double_cosine" not in row
    assert "double" in row["skipped"]


@pytest.mark.extended
@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.extended)])
def test_the_flat_directions_of_a_sphere_are_its_dimension(k: int) -> None:
    task = Sphere(k=k, d=8)
    problem = task.problem(0, CPU, DOUBLE)
    radius = float(task.closed_form(0, CPU, DOUBLE).radius(problem.theta0))
    row, _, _ = diagnosed(
        method(
            generator=Branches(
                count=4, steps=80, optimizer=SGD(lr=0.3), diversity=Diversity(noise=0.1)
            )
        ),
        problem,
    )
    assert row["flat_dimension"] == k
    # radially g'' = 2r²
    assert row["normal_curvature"] == pytest.approx(min(1.0, 2 * radius**2), rel=1e-3)
    assert row["log10_candidates_to_halve"] == pytest.approx(math.log10(4.0 * 2**k))
    # the bound taken as tight: the mean score is C₁ above the best there is, the chosen one
    # C₁N^(−1/k)
    lead = row["score_mean"] - row["score_chosen"]
    assert row["selection_constant"] - row["selection_error"] == pytest.approx(lead)
    assert row["selection_error"] == pytest.approx(row["selection_constant"] * 4 ** (-1 / k))


def test_the_spectrum_of_a_large_operator_is_estimated() -> None:
    values = torch.cat(
        [torch.zeros(300), torch.full((5,), -1.0), torch.linspace(0.5, 2, 695)]
    ).double()
    row, products = spectrum(lambda v: values * v, values, 0.0, Key(0))
    assert (row["spectrum"], products) == ("lanczos", 160)
    assert abs(row["flat_dimension"] - 300) < 4 * row["flat_error"] < 120
    assert 0 < row["negative_dimension"] < 20
    ends = (row["largest"], row["smallest"])
    assert ends == (pytest.approx(2, rel=1e-3), pytest.approx(-1, rel=1e-6))
    assert row["normal_curvature"] == pytest.approx(0.5, rel=0.05)
    inverses = float((1 / values[305:]).sum())
    assert row["normal_inverses"] == pytest.approx(inverses, rel=0.15)


@frozen
class Shifted:
    """Candidates at 2θ + 3 and 2θ + 1, whatever the lower loss."""

    name: ClassVar[str] = "shifted"

    def init(self, problem: Problem, key: Key) -> State:
        return {}

    def propose(
        self, problem: Problem, theta: Tree, start: State, key: Key, progress: float = 0.0
    ) -> Candidates:
        x = 2 * theta["t"] + torch.tensor([[3.0], [1.0]], dtype=DOUBLE)
        return Candidates(x={"x": x.detach()}, cost=Cost(lower_gradients=2))

    def carry(
        self, start: State, candidates: Candidates, index: torch.Tensor, key: Key, problem: Problem
    ) -> State:
        return {}


@frozen
class Handed:
    """h = 0.5, whatever x is."""

    name: ClassVar[str] = "handed"

    def init(self, problem: Problem) -> State:
        return {}

    def estimate(
        self,
        problem: Problem,
        theta: Tree,
        candidates: Candidates,
        selection: Selection,
        key: Key,
        state: State,
    ) -> tuple[Estimate, State]:
        branch = candidates.branch(selection.index)
        batch = problem.upper_data["differentiate"].batch(None)
        loss, _, _ = upper_gradients(lambda t, x: problem.f(t, x, batch), theta, branch.x)
        return Estimate(
            value={"t": torch.full((1,), 0.5, dtype=DOUBLE)},
            upper_loss=loss,
            cost=Cost(upper_gradients=1),
        ), state


def by_hand() -> Problem:
    rows = {
        name: torch.tensor(values, dtype=DOUBLE)
        for name, values in {"select": [1.0, 2.0, 6.0], "stop": [1.0]}.items()
    }
    return from_losses(
        theta0={"t": torch.zeros(1, dtype=DOUBLE)},
        x0={"x": torch.zeros(1, dtype=DOUBLE)},
        g=lambda t, x, _: (x["x"] - t["t"]).square().sum(),
        f=lambda t, x, rows: (rows["a"] * x["x"]).mean(),
        upper_data={
            role: {"a": values} for role, values in {**rows, "differentiate": rows["stop"]}.items()
        },
    )


def test_the_gain_is_split_and_a_choice_is_measured_against_the_noise_of_its_rows() -> None:
    own = method(generator=Shifted(), hypergradient=Handed(), outer=Sgd(lr=1.0))
    row, after, _ = diagnosed(own, by_hand())
    assert float(after["theta"]["t"]) == -0.5
    # on the row of role `stop`, f = x: candidates 3 and 1, the second of which is 0 after θ went
    # from 0 to −0.5
    expected = {"value_first": 3, "value_mean": 2, "value_selected": 1, "value_after": 0}
    expected |= {"gain_selection": 1, "gain_differentiation": 1, "selection_share": 0.5}
    assert {name: row[name] for name in expected} == expected
    # f of a row is a·x, so the gap of a row is 2a: 2, 4, 12, of mean 6 and standard error √(28 / 3)
    choice = [row["choice_gap"], row["choice_error"], row["choice_ratio"]]
    error = (28 / 3) ** 0.5
    assert choice == pytest.approx([6, error, 6 / error])


def test_a_loss_that_is_no_mean_over_rows_is_taken_by_batches() -> None:
    def per_batch(theta: Tree, x: Tree, rows: Tree) -> torch.Tensor:
        if len(rows["a"]) == 1:
            raise ValueError("not of one row")
        return (rows["a"] * x["x"]).mean()

    many = {"a": torch.linspace(0, 1, 100, dtype=DOUBLE)}
    own = method(generator=Shifted(), hypergradient=Handed())
    row, _, _ = diagnosed(own, evolve(by_hand(), f=per_batch, upper_data=Data.of(many)))
    assert (row["choice_per"], row["choice_gap"]) == ("batch", pytest.approx(1.0))


def flat(f: Any, **start: float) -> Problem:
    """θ = 1 with (x − θ)² below f."""
    return from_losses(
        theta0={"t": torch.ones(1)},
        x0={name: torch.full((1,), value) for name, value in start.items()},
        g=lambda t, x, _: (x["x"] - t["t"]).square().sum(),
        f=f,
    )


def test_of_another_method_theta_and_x_are_looked_at_with_a_warning() -> None:
    problem = flat(lambda t, x, _: x["x"].square().sum(), x=8.0)
    result = run(Halve(), problem, "4 steps", settings={"diagnose": 2})
    rows = result.diagnosis.rows
    assert [(row["step"], row["of"], row["lower_gradient"]) for row in rows] == [
        (2, "result", 2.0),
        (4, "result", 1.0),
    ]
    # x = 2, θ = 1; the ridge is 0.001 of H = 2
    assert rows[0]["newton_step"] == pytest.approx(1 / (1 + 1e-3), rel=1e-6)


@pytest.mark.parametrize(("good", "skipped"), [(0, {"step"}), (7, {"double", "gain"})])
def test_no_failure_of_a_measure_ends_a_run(good: int, skipped: set[str]) -> None:
    calls = iter(range(good))

    def f(theta: Tree, x: Tree, rows: Tree) -> torch.Tensor:
        if next(calls, None) is None:
            raise RuntimeError("only so often")
        return x["x"].square().sum()

    problem = flat(f, x=1.0)
    own = method(generator=Branches(count=1, steps=1, optimizer=SGD(lr=0.1)))
    row = Diagnosing(method=own, problem=problem, seed=0).row(own.init(problem, 0), {}, 1, 0.0)
    assert skipped <= row["skipped"].keys()
    assert all("only so often" in reason for reason in row["skipped"].values())
