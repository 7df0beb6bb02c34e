"""The tilted lower level g + εf: what it is, what it costs, and that it finds the optimistic
solution as ε → 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, network_problem
from support.source_problems import convex_sources

from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit, Unrolled
from hgms.methods import Tilted
from hgms.methods.tilted import tilted
from hgms.outer import ProjectedGradient
from hgms.runs import pack, unpack
from hgms.selectors import BestOfN, First
from hgms.solvers import CG
from hgms.tasks.sphere import Sphere
from hgms_core import Data, Key, Pipeline, Problem, Tree


def test_a_tilted_batch_carries_validation_rows_and_the_loss_is_the_sum() -> None:
    problem = network_problem()
    seen = tilted(problem, 0.25)
    index = torch.tensor([[0, 3], [5, 2]])
    beside = torch.tensor([[14, 3], [0, 14]])
    batch = seen.lower_data.rows(index + problem.lower_data.size * beside)
    upper = problem.upper_data["differentiate"]
    above = upper.rows(beside)
    for name, leaf in above.items():
        assert torch.equal(batch[f"upper.{name}"], leaf)
    one = {name: leaf[0] for name, leaf in batch.items()}
    expected = problem.g(
        problem.theta0, problem.x0, problem.lower_data.rows(index[0])
    ) + 0.25 * problem.f(
        problem.theta0, problem.x0, {name: leaf[0] for name, leaf in above.items()}
    )
    assert torch.allclose(seen.g(problem.theta0, problem.x0, one), expected, rtol=1e-12)
    whole = seen.g(problem.theta0, problem.x0, seen.lower_data.batch(None))
    parts = problem.g(problem.theta0, problem.x0, problem.lower_data.whole) + 0.25 * problem.f(
        problem.theta0, problem.x0, upper.whole
    )
    assert torch.allclose(whole, parts, rtol=1e-12)


def tilting(tilt: float, **parts: Any) -> Tilted:
    return Tilted(method=Pipeline(**parts), tilt=tilt)


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


def pairs(problem: Problem, key: Key, batch_size: int, steps: int) -> list[tuple[int, int]]:
    data = tilted(problem, 1.0).lower_data
    batch = data.batch(data.draw(key, batch_size, steps))
    return list(
        zip(batch["index"].flatten().tolist(), batch["upper.index"].flatten().tolist(), strict=True)
    )


@pytest.mark.parametrize(("lower", "upper"), [(50, 500), (1000, 13)])
def test_every_validation_row_comes_along_and_none_again_before_all_have(
    lower: int, upper: int
) -> None:
    steps = -(-max(lower, upper) // 10)
    found = pairs(rows_of(lower, upper), Key(0), 10, steps)
    seen = [beside for _, beside in found]
    assert set(seen) == set(range(upper))
    assert len(set(seen[:upper])) == upper
    # One draw of 10 rows a step, as an outer step with its own key makes them
    several = [
        beside
        for step in range(10)
        for _, beside in pairs(rows_of(lower, upper), Key(0).fold(step), 10, 1)
    ]
    assert len(set(several)) > min(upper - 1, 40)


def test_a_lower_row_does_not_always_bring_the_same_validation_row() -> None:
    found = pairs(rows_of(20, 500), Key(0), 10, 200)
    for row in range(20):
        assert len({beside for own, beside in found if own == row}) > 50
    assert [own for own, _ in found] == rows_of(20, 500).lower_data.draw(
        Key(0), 10, 200
    ).flatten().tolist()


def test_the_tilted_gradient_of_a_batch_is_unbiased() -> None:
    problem = rows_of(12, 30)
    weight = 0.25
    seen = tilted(problem, weight)

    def slope(batch: Tree) -> float:
        x = {"x": torch.ones(1, dtype=F64, requires_grad=True)}
        return float(torch.autograd.grad(seen.g({}, x, batch), x["x"])[0])

    # Within one draw of whole epochs every row comes equally often: the mean over them is exact.
    data = seen.lower_data
    drawn = data.draw(Key(0), 6, 10)
    slopes = [slope(data.batch(index)) for index in drawn]
    assert sum(slopes) / len(slopes) == pytest.approx(slope(data.batch(None)), rel=1e-12)
    # and over keys each batch has that mean
    single = torch.tensor([slope(data.batch(data.draw(Key(seed), 6, 1)[0])) for seed in range(500)])
    error = float(single.std()) / len(single) ** 0.5
    assert abs(float(single.mean()) - slope(data.batch(None))) < 4 * error


def test_a_tilted_branch_on_batches_is_replayed_and_a_resumed_run_is_the_uninterrupted_one() -> (
    None
):
    problem = network_problem()
    method = tilting(
        0.5,
        generator=Branches(count=2, steps=4, lr=0.1, batch_size=5),
        selector=BestOfN(),
        hypergradient=Unrolled(),
        outer=ProjectedGradient(lr=0.1),
    )
    seen = tilted(problem, 0.5)
    generator = method.method.generator
    start = generator.init(seen, Key(0))
    found = generator.propose(seen, problem.theta0, start, Key(1))
    assert found.replay is not None
    for member in range(2):
        replayed, _ = found.replay(torch.tensor(member), problem.theta0, None)
        assert_same(replayed, {name: leaf[member] for name, leaf in found.x.items()}, rtol=1e-12)
    state = method.init(problem, 0)
    for step in range(4):
        state, _ = method.step(problem, unpack(*pack(state)) if step == 2 else state)
    through = method.init(problem, 0)
    for _ in range(4):
        through, _ = method.step(problem, through)
    assert_same([state["theta"], state["x"]], [through["theta"], through["x"]])


def test_the_hypergradient_is_that_of_the_tilted_path() -> None:
    """Unrolled through the tilted steps, against autograd through the same steps written out."""
    problem = network_problem()
    weight = 0.3
    lr = 0.1
    method = tilting(
        weight,
        generator=Branches(count=1, steps=2, lr=lr),
        selector=First(),
        hypergradient=Unrolled(),
        outer=ProjectedGradient(lr=1.0),
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
    expected = torch.autograd.grad(
        problem.f(theta, x, above), list(theta.values()), materialize_grads=True
    )
    for (name, leaf), grad in zip(problem.theta0.items(), expected, strict=True):
        assert torch.allclose(following["theta"][name], leaf - grad, rtol=1e-9, atol=1e-12)


def _gap(tilt: float) -> float:
    """F(θ) − F* that tilted candidates reach on the sphere, where descent on g alone stays at
    the worst minimiser.
    """
    task = Sphere(k=1, d=3)
    problem = task.problem(0, torch.device("cpu"), F64)
    method = tilting(
        tilt,
        generator=Branches(count=2, steps=100, lr=0.2, noise=0.05),
        selector=BestOfN(),
        hypergradient=Implicit(solver=CG(ridge=1e-9, rtol=1e-10, max_steps=50)),
        outer=ProjectedGradient(lr=0.3),
    )
    state = method.init(problem, seed=0)
    for _ in range(30):
        state, _ = method.step(problem, state)
    theta, _ = method.result(state)
    exact = task.closed_form(0, torch.device("cpu"), F64)
    return float(exact.value(theta) - exact.value(exact.theta_star))


@pytest.mark.extended
def test_the_optimistic_optimum_is_reached_as_the_tilt_vanishes() -> None:
    """θ minimises F_ε = F + O(ε) with an error of O(ε) in θ, hence O(ε²) in F: halving the tilt
    quarters the gap.
    """
    before, after = (_gap(tilt) for tilt in (0.2, 0.1))
    assert _gap(0.0) > 10 * before
    assert after / before == pytest.approx(0.25, abs=0.05)


# --- with batches made when asked for
# --------------------------------------------------------------------------------------------------

SOURCES = convex_sources({"a": 0.5, "b": 0.3, "c": 0.2}, rows=10)
LOGITS = {"logits": torch.tensor([0.2, -0.1, 0.5], dtype=F64)}


def lazily(data: Data, gathered: list[int]) -> Data:
    """The same rows, gathered only when asked for."""

    def rows(index: torch.Tensor) -> Tree:
        gathered.append(index.numel())
        return data.rows(index)

    return Data(data.size, {}, rows, strata=data.strata)


def test_a_tilted_whole_batch_has_every_row_once_made_late() -> None:
    gathered: list[int] = []
    upper = SOURCES.upper_data
    problem = evolve(
        SOURCES,
        lower_data=lazily(SOURCES.lower_data, gathered),
        upper_data={**upper, "differentiate": lazily(upper["differentiate"], gathered)},
    )
    seen = tilted(problem, 0.25)
    assert gathered == []
    found = seen.g(LOGITS, SOURCES.x0, seen.lower_data.batch(None))
    expected = SOURCES.g(LOGITS, SOURCES.x0, SOURCES.lower_data.whole)
    expected = expected + 0.25 * SOURCES.f(
        LOGITS, SOURCES.x0, SOURCES.upper_data["differentiate"].whole
    )
    assert_same(found, expected, rtol=1e-14)
    assert gathered == [30, 20]
    assert seen.lower_data.count(None) == 50
    assert seen.lower_data.strata == SOURCES.lower_data.strata


def test_a_tilted_loss_without_data_of_its_own_still_sees_the_validation_rows() -> None:
    problem = evolve(SOURCES, g=lambda t, x, b: x["x"].sum(), lower_data=Data.none())
    seen = tilted(problem, 0.5)
    expected = SOURCES.x0["x"].sum() + 0.5 * SOURCES.f(
        LOGITS, SOURCES.x0, SOURCES.upper_data["differentiate"].whole
    )
    assert_same(seen.g(LOGITS, SOURCES.x0, seen.lower_data.batch(None)), expected, rtol=1e-14)
