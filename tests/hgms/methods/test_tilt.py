"""The tilted lower level g + εf: what it is, what it costs, and that it finds the optimistic
solution as ε → 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.helpers import F64, assert_same, network_problem

from hgms.generators.branches import Branches, Diversity
from hgms.hypergradients import Implicit, Unrolled
from hgms.methods import Tilted
from hgms.methods.tilt import tilt_problem
from hgms.optim import SGD
from hgms.outer import ProjectedGradient
from hgms.runs import pack, unpack
from hgms.selectors import BestOfN, First
from hgms.solvers import CG
from hgms.tasks.sphere import Sphere
from hgms_core import Data, Key, Pipeline, Problem, Tree
from hgms_core.trees import take

PROBLEM = network_problem()
ABOVE = PROBLEM.upper_data["differentiate"]


def tilting(tilt: float, generator: Any, selector: Any, hypergradient: Any, lr: float) -> Tilted:
    outer = ProjectedGradient(lr=lr)
    parts = {"generator": generator, "selector": selector, "hypergradient": hypergradient}
    return Tilted(method=Pipeline(**parts, outer=outer), tilt=tilt)


def test_a_tilted_batch_carries_validation_rows_and_the_loss_is_the_sum() -> None:
    seen = tilt_problem(PROBLEM, 0.25)
    index, beside = torch.tensor([[0, 3], [5, 2]]), torch.tensor([[14, 3], [0, 14]])
    batch = seen.lower_data.rows(index + PROBLEM.lower_data.size * beside)
    above = ABOVE.rows(beside)
    assert_same({name: batch[f"upper.{name}"] for name in above}, above)
    expected = PROBLEM.g(PROBLEM.theta0, PROBLEM.x0, PROBLEM.lower_data.rows(index[0]))
    expected = expected + 0.25 * PROBLEM.f(PROBLEM.theta0, PROBLEM.x0, take(above, 0))
    found = seen.g(PROBLEM.theta0, PROBLEM.x0, take(batch, 0))
    assert_same(found, expected, rtol=1e-12)


def rows_of(lower: int, upper: int) -> Problem:
    """g and f are the means of two columns; a batch says by ``index`` and ``upper.index`` which
    rows it holds.
    """
    return Problem(
        theta0={},
        x0={"x": torch.zeros(1, dtype=F64)},
        g=lambda theta, x, batch: (batch["a"] * x["x"]).mean(),
        f=lambda theta, x, batch: (batch["a"] * x["x"]).mean(),
        lower_data=Data.of({"a": torch.arange(lower, dtype=F64)}),
        upper_data={"differentiate": Data.of({"a": torch.arange(upper, dtype=F64) ** 2})},
    )


def pairs(problem: Problem, key: Key, steps: int) -> list[list[int]]:
    """The lower rows and the validation rows of batches of ten."""
    data = tilt_problem(problem, 1.0).lower_data
    batch = data.batch(data.draw(key, 10, steps))
    return [batch[name].flatten().tolist() for name in ("index", "upper.index")]


@pytest.mark.parametrize(("lower", "upper"), [(50, 500), (1000, 13)])
def test_every_validation_row_comes_along_and_none_again_before_all_have(
    lower: int, upper: int
) -> None:
    problem = rows_of(lower, upper)
    _, seen = pairs(problem, Key(0), -(-max(lower, upper) // 10))
    assert set(seen) == set(seen[:upper]) == set(range(upper))
    # One draw of 10 rows a step, as an outer step with its own key makes them
    several = {beside for step in range(10) for beside in pairs(problem, Key(0).fold(step), 1)[1]}
    assert len(several) > min(upper - 1, 40)


def test_the_tilted_gradient_of_a_batch_is_unbiased() -> None:
    seen = tilt_problem(rows_of(12, 30), 0.25)
    data = seen.lower_data

    def slope(batch: Tree) -> float:
        grad = torch.func.grad(lambda x: seen.g({}, {"x": x}, batch))
        return float(grad(torch.ones(1, dtype=F64)))

    # Within one draw of whole epochs every row comes equally often: the mean over them is exact.
    whole = slope(data.batch(None))
    slopes = [slope(data.batch(index)) for index in data.draw(Key(0), 6, 10)]
    assert sum(slopes) / len(slopes) == pytest.approx(whole, rel=1e-12)
    # and over keys each batch has that mean
    single = torch.tensor([slope(data.batch(data.draw(Key(seed), 6, 1)[0])) for seed in range(300)])
    assert abs(float(single.mean()) - whole) < 4 * float(single.std()) / 300**0.5


@pytest.mark.parametrize("batches", ["shared", "independent"])
def test_branches_take_steps_on_drawn_validation_rows(batches: Any) -> None:
    seen = tilt_problem(rows_of(50, 500), 1.0)
    diversity = Diversity(batches=batches)
    branches = Branches(count=2, steps=3, optimizer=SGD(lr=1.0), batch_size=10, diversity=diversity)
    found = branches.propose(seen, {}, branches.init(seen, Key(0)), Key(1))
    for member in range(2):
        key = Key(1).fold("batches")
        key = key if batches == "shared" else key.fold(member)
        rows = seen.lower_data.batch(seen.lower_data.draw(key, 10, 3))
        assert len(rows["upper.index"].unique()) > 20
        steps = rows["a"].mean(1) + rows["upper.a"].mean(1)
        assert_same(found.x["x"][member], -steps.sum()[None], rtol=1e-12)


def test_a_tilted_branch_on_batches_is_replayed_and_a_resumed_run_is_the_uninterrupted_one() -> (
    None
):
    branches = Branches(count=2, steps=4, optimizer=SGD(lr=0.1), batch_size=5)
    method = tilting(0.5, branches, BestOfN(), Unrolled(), lr=0.1)
    seen = tilt_problem(PROBLEM, 0.5)
    found = branches.propose(seen, PROBLEM.theta0, branches.init(seen, Key(0)), Key(1))
    for member in range(2):
        replayed, _ = found.replay(torch.tensor(member), PROBLEM.theta0, None)
        assert_same(replayed, found.at(member), rtol=1e-12)
    state = through = method.init(PROBLEM, 0)
    for _ in range(3):
        state, _ = method.step(PROBLEM, unpack(*pack(state)))
        through, _ = method.step(PROBLEM, through)
    assert_same([state["theta"], state["x"]], [through["theta"], through["x"]])


def test_the_hypergradient_is_that_of_the_tilted_path() -> None:
    """Unrolled through the tilted steps, against autograd through the same steps written out."""
    method = tilting(
        0.3, Branches(count=1, steps=2, optimizer=SGD(lr=0.1)), First(), Unrolled(), lr=1.0
    )
    following, _ = method.step(PROBLEM, method.init(PROBLEM, seed=0))

    def after(theta: Tree) -> torch.Tensor:
        def loss(x: Tree) -> torch.Tensor:
            below = PROBLEM.g(theta, x, PROBLEM.lower_data.whole)
            return below + 0.3 * PROBLEM.f(theta, x, ABOVE.whole)

        x = PROBLEM.x0
        for _ in range(2):
            grads = torch.func.grad(loss)(x)
            x = {name: leaf - 0.1 * grads[name] for name, leaf in x.items()}
        return PROBLEM.f(theta, x, ABOVE.whole)

    h = torch.func.grad(after)(PROBLEM.theta0)
    expected = {name: leaf - h[name] for name, leaf in PROBLEM.theta0.items()}
    assert_same(following["theta"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.extended
def test_the_optimistic_optimum_is_reached_as_the_tilt_vanishes() -> None:
    """θ minimises F_ε = F + O(ε) with an error of O(ε) in θ, hence O(ε²) in F: halving the tilt
    quarters the gap F(θ) − F*. Descent on g alone stays at the worst minimiser.
    """
    task = Sphere(k=1, d=3)
    problem, exact = (of(0, torch.device("cpu"), F64) for of in (task.problem, task.closed_form))
    gaps = []
    for tilt in (0.0, 0.2, 0.1):
        branches = Branches(
            count=2, steps=100, optimizer=SGD(lr=0.2), diversity=Diversity(noise=0.05)
        )
        implicit = Implicit(solver=CG(ridge=1e-9, rtol=1e-10, max_steps=50))
        method = tilting(tilt, branches, BestOfN(), implicit, lr=0.3)
        state = method.init(problem, seed=0)
        for _ in range(30):
            state, _ = method.step(problem, state)
        gaps.append(float(exact.value(method.result(state)[0]) - exact.value(exact.theta_star)))
    assert gaps[0] > 10 * gaps[1]
    assert gaps[2] / gaps[1] == pytest.approx(0.25, abs=0.05)
