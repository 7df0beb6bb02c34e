"""Candidates along one trajectory, the learned start and IAPTT-GM: by hand, by differences and
against closed forms.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attrs import evolve
from support.field_problems import pipeline, run, sphere_gap, tuned_penalty
from support.helpers import F64, KEY, assert_same, counted, network_problem, normal, rejects
from torch import Tensor

from hgms.generators.branches import Branches, Trajectory
from hgms.hypergradients import Implicit, Unrolled
from hgms.methods import LearnedStart
from hgms.methods.learned_start import with_learned_start, without_start
from hgms.outer import Adam, Schedule, Sgd, Split
from hgms.runs import RunConfig
from hgms.selectors import BestOfN, First, Worst
from hgms.solvers import CG
from hgms_core import Key, Problem, Tree

PROBLEM = network_problem()
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"lr": 0.3}, lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": ({"lr": 0.2, "momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.8)),
    "adamw": (
        {"optimizer": "adamw", "lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
graph_or_not = pytest.mark.parametrize("keep_graph", [False, True])


@every_optimizer
@graph_or_not
@pytest.mark.parametrize("every", [1, 4])
def test_candidates_are_the_iterates_of_torch_optim(
    name: str, keep_graph: bool, every: int
) -> None:
    options, optimizer = OPTIMIZERS[name]
    trajectory = Trajectory(steps=6, every=every, batch_size=5, keep_graph=keep_graph, **options)
    found = trajectory.propose(PROBLEM, PROBLEM.theta0, trajectory.init(PROBLEM, KEY), KEY)
    kept = list(range(1, 7)) if every == 1 else [4, 6]
    assert found.count == len(kept)
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in PROBLEM.x0.items()}
    steps = optimizer(list(leaves.values()))
    index = PROBLEM.lower_data.draw(KEY.fold("batches"), 5, 6)
    assert index is not None
    assert found.losses is not None
    for step in range(6):
        steps.zero_grad()
        loss = PROBLEM.g(PROBLEM.theta0, leaves, PROBLEM.lower_data.batch(index[step]))
        loss.backward()
        steps.step()
        if step + 1 in kept:
            row = kept.index(step + 1)
            assert_same(
                found.at(row),
                {key: leaf.detach() for key, leaf in leaves.items()},
                rtol=1e-11,
                atol=1e-13,
            )
            assert float(found.losses[row]) == pytest.approx(float(loss.detach()), rel=1e-11)
    assert not any(leaf.requires_grad for leaf in found.x.values())


def slope(
    trajectory: Trajectory, problem: Problem, theta: Tree, index: int, last: int | None
) -> Tree:
    """∂/∂θ of a fixed linear function of candidate ``index``."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
    candidates = trajectory.propose(problem, theta, trajectory.init(problem, KEY), KEY)
    assert candidates.replay is not None
    x, _ = candidates.replay(torch.tensor(index), leaves, last)
    weights = {name: normal(*leaf.shape, seed=40 + i) for i, (name, leaf) in enumerate(x.items())}
    value = torch.stack([(weights[name] * leaf).sum() for name, leaf in x.items()]).sum()
    grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


@every_optimizer
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("keep_graph", [False, True])
def test_a_candidate_is_differentiated_through_its_own_steps_and_to_its_start(
    name: str, index: int, keep_graph: bool
) -> None:
    problem = with_learned_start(PROBLEM)
    trajectory = Trajectory(
        steps=4, batch_size=6, clip=0.5, keep_graph=keep_graph, **OPTIMIZERS[name][0]
    )
    found = slope(trajectory, problem, problem.theta0, index, None)
    start = trajectory.init(problem, KEY)
    plain = evolve(trajectory, keep_graph=False)

    def value(theta: Tree) -> Tensor:
        x = plain.propose(problem, theta, start, KEY).at(index)
        weights = {key: normal(*leaf.shape, seed=40 + i) for i, (key, leaf) in enumerate(x.items())}
        return torch.stack([(weights[key] * leaf).sum() for key, leaf in x.items()]).sum()

    direction = {
        key: normal(*leaf.shape, seed=60 + i)
        for i, (key, leaf) in enumerate(problem.theta0.items())
    }
    step = 1e-5
    ahead, behind = (
        value({key: leaf + sign * step * direction[key] for key, leaf in problem.theta0.items()})
        for sign in (1, -1)
    )
    along = sum(float((found[key] * direction[key]).sum()) for key in found)
    assert along == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-5)
    assert all(float(found[key].abs().max()) > 0 for key in found)


@pytest.mark.parametrize("last", [1, 2, 9])
def test_the_kept_graph_and_the_replay_are_one_derivative(last: int) -> None:
    for index in (1, 3):
        for through in (None, last):
            kept, replayed = (
                slope(
                    Trajectory(steps=4, lr=0.3, batch_size=6, keep_graph=keep),
                    PROBLEM,
                    PROBLEM.theta0,
                    index,
                    through,
                )
                for keep in (True, False)
            )
            assert_same(kept, replayed, rtol=1e-11, atol=1e-14)


def test_a_kept_graph_can_be_gone_through_twice() -> None:
    trajectory = Trajectory(steps=3, keep_graph=True)
    found = trajectory.propose(PROBLEM, PROBLEM.theta0, trajectory.init(PROBLEM, KEY), KEY)
    assert found.replay is not None
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.theta0.items()}
    x, _ = found.replay(torch.tensor(2), leaves, None)
    first, second = (
        torch.autograd.grad(x["w"].sum(), leaves["weights"], retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


def test_a_kept_graph_is_used_at_its_own_theta_only() -> None:
    plain = Trajectory(steps=4, lr=0.3, batch_size=6)
    start = plain.init(PROBLEM, KEY)
    problem = with_learned_start(PROBLEM)
    held = evolve(plain, keep_graph=True).propose(problem, problem.theta0, start, KEY)
    again = plain.propose(problem, problem.theta0, start, KEY).replay
    assert held.replay is not None
    assert again is not None
    for name in ("scale", "start.w"):
        theta = {key: leaf.detach().requires_grad_() for key, leaf in problem.theta0.items()}
        assert held.replay(torch.tensor(2), theta, None)[1].lower_gradients == 0
        assert held.replay(torch.tensor(2), problem.theta0, None)[1].calls == 0
        theta = {**problem.theta0, name: problem.theta0[name] + 0.3}
        (end, cost), (expected, _) = (
            held.replay(torch.tensor(2), theta, None),
            again(torch.tensor(2), theta, None),
        )
        assert_same(end, expected, rtol=1e-13)
        assert cost.calls == cost.lower_gradients == 3


@graph_or_not
def test_the_counts_are_the_calls_that_happened(keep_graph: bool) -> None:
    problem, calls = counted(PROBLEM)
    method = iaptt(Trajectory(steps=5, lr=0.3, keep_graph=keep_graph))
    state = method.init(problem, 0)
    state, record = method.step(problem, state)
    through = int(record["selected"]) + 1
    assert calls["g"] == record["cost_lower_gradients"] == 5 + (0 if keep_graph else through)
    assert record["cost_products"] == record["cost_cross_products"] == through


def test_carry_rules() -> None:
    for rule in ("selected", "last", "restart"):
        trajectory = Trajectory(steps=4, lr=0.3, carry_rule=rule)
        found = trajectory.propose(PROBLEM, PROBLEM.theta0, trajectory.init(PROBLEM, KEY), KEY)
        carried = trajectory.carry({}, found, torch.tensor(1), Key(7), PROBLEM)
        expected = {
            "selected": found.at(1),
            "last": found.at(3),
            "restart": PROBLEM.initial(Key(7)),
        }[rule]
        assert_same(carried["x"], expected)


def test_thinning_keeps_the_end() -> None:
    thin, full = (Trajectory(steps=5, every=every, lr=0.3) for every in (2, 1))
    kept, whole = (
        each.propose(PROBLEM, PROBLEM.theta0, each.init(PROBLEM, KEY), KEY) for each in (thin, full)
    )
    for row, step in enumerate((2, 4, 5)):
        assert_same(kept.at(row), whole.at(step - 1))
    assert kept.replay is not None
    x, _ = kept.replay(torch.tensor(2), PROBLEM.theta0, None)
    assert_same(
        {name: leaf.detach() for name, leaf in x.items()}, kept.at(2), rtol=1e-13, atol=1e-15
    )


# --- the learned start
# --------------------------------------------------------------------------------------------------


def iaptt(
    generator: Trajectory, upper: Any = None, start: Any = None, **options: Any
) -> LearnedStart:
    outer = Split(upper=upper or Sgd(lr=0.1), start=start or Sgd(lr=0.1))
    return LearnedStart(
        method=pipeline(generator, Worst(), Unrolled(), outer, answer="last", **options)
    )


def by_hand_problem() -> Problem:
    one = torch.ones(1, dtype=F64)
    return Problem(
        theta0={"t": 0 * one},
        x0={"x": 4 * one},
        g=lambda t, x, _: 0.5 * (x["x"] - t["t"]).square().sum(),
        f=lambda t, x, _: 0.5 * (x["x"] - 1).square().sum() + t["t"].sum(),
        project=lambda theta: {"t": theta["t"].clamp(-0.17, 0.17)},
        evaluate=lambda theta, x: {"names": float(len(theta))},
    )


@graph_or_not
def test_one_step_of_iaptt_by_hand(keep_graph: bool) -> None:
    # From z = 4 with step ½ towards θ = 0 the iterates are 2, 1, ½, with f = ½, 0, ⅛: the first is
    # the worst. y_1 = z/2 + θ/2, so ∂f = (y_1 − 1)/2 = ½ for z, and ½ + 1 (the direct term) for θ.
    problem = by_hand_problem()
    method = iaptt(Trajectory(steps=3, lr=0.5, keep_graph=keep_graph), Sgd(lr=0.1), Sgd(lr=2.0))
    state, record = method.step(problem, method.init(problem, 0))
    assert int(record["selected"]) == 0
    assert record["scores"].tolist() == [0.5, 0.0, 0.125]
    assert float(record["hypergradient_norm"]) == pytest.approx((1.5**2 + 0.5**2) ** 0.5)
    assert float(record["update_norm"]) == pytest.approx((0.15**2 + 1) ** 0.5)
    assert float(state["theta"]["t"]) == pytest.approx(-0.15)
    assert float(state["theta"]["start.x"]) == pytest.approx(3.0)
    theta, x = method.result(state)
    assert list(theta) == ["t"]
    assert x == {"x": torch.tensor([0.5], dtype=F64)}
    # The next run starts from z = 3 whatever was carried. Its third iterate z/8 + 7θ/8 = 0.24375 is
    # the worst: ∂f is ⅞·(0.24375 − 1) + 1 for θ, which the projection stops, and ⅛·(0.24375 − 1)
    # for z, which it does not touch.
    state, record = method.step(problem, state)
    assert int(record["selected"]) == 2
    assert float(record["scores"][0]) == pytest.approx(0.5 * ((3 - 0.15) / 2 - 1) ** 2 - 0.15)
    assert float(state["theta"]["t"]) == -0.17
    assert float(state["theta"]["start.x"]) == pytest.approx(3 + 2 * 0.75625 / 8)
    assert with_learned_start(problem).evaluate(state["theta"], state["x"]) == {"names": 1.0}


def test_a_learned_start_wants_a_generator_that_knows_it() -> None:
    with rejects("not-supported", "learn_start"):
        LearnedStart(method=pipeline(Branches(), First(), Unrolled(), Sgd()))
    table = {"name": "iaptt-gm", "generator": {"name": "branches"}}
    with rejects("not-supported", "method", "learn_start"):
        RunConfig.from_dict({"budget": "1 steps", "task": {"name": "quadratic"}, "method": table})


def test_references_and_names_of_a_learned_start() -> None:
    lifted = with_learned_start(PROBLEM)
    assert lifted.start is not None
    assert_same(lifted.start(lifted.references["even"]), PROBLEM.x0)
    assert without_start(lifted.references["even"]) == PROBLEM.references["even"]
    assert lifted.theta0.keys() == {"weights", "scale", "start.w", "start.b", "start.v"}


@pytest.mark.parametrize("keep", ["last", "best"])
def test_two_runs_are_equal_and_a_saved_state_continues(keep: str) -> None:
    method = iaptt(
        Trajectory(steps=4, lr=0.3, batch_size=6, keep_graph=True),
        Adam(lr=0.05),
        Sgd(lr=0.3),
        keep=keep,
    )

    def steps(state: Any, count: int) -> tuple[Any, list[Any]]:
        rows = []
        for _ in range(count):
            state, row = method.step(PROBLEM, state)
            rows.append(row)
        return state, rows

    whole, rows = steps(method.init(PROBLEM, 3), 5)
    half, _ = steps(method.init(PROBLEM, 3), 2)
    again, tail = steps(copy.deepcopy(half), 3)
    for one, other in zip(method.result(whole), method.result(again), strict=True):
        assert_same(one, other)
    assert [float(row["upper_loss"]) for row in rows[2:]] == [
        float(row["upper_loss"]) for row in tail
    ]
    assert method.result(whole)[0].keys() == {"weights", "scale"}


def test_split_is_its_two_optimisers() -> None:
    theta = {"a": normal(3), "start.x": normal(4, seed=1)}
    slopes = {"a": normal(3, seed=2), "start.x": normal(4, seed=3)}
    outer = Split(upper=Adam(lr=0.1), start=Sgd(lr=0.3, momentum=0.5))
    state = None
    state = outer.init(theta)
    adam = outer.upper.init({"a": theta["a"]})
    sgd = outer.start.init({"start.x": theta["start.x"]})
    one = {"a": theta["a"]}
    other = {"start.x": theta["start.x"]}
    for _ in range(3):
        theta, state = outer.step(theta, slopes, state, 0.0)
        one, adam = outer.upper.step(one, {"a": slopes["a"]}, adam, 0.0)
        other, sgd = outer.start.step(other, {"start.x": slopes["start.x"]}, sgd, 0.0)
    assert_same(theta, {**one, **other})
    alone = {"a": normal(3)}
    assert_same(
        outer.step(alone, {"a": slopes["a"]}, outer.init(alone), 0.0)[0],
        Adam(lr=0.1).step(alone, {"a": slopes["a"]}, Adam(lr=0.1).init(alone), 0.0)[0],
    )


def test_a_power_schedule_falls_like_one_over_the_root() -> None:
    schedule = Schedule(kind="inverse", decay_steps=1, power=0.5)
    assert [schedule.factor(step, 0.0) for step in (0, 3, 99)] == pytest.approx([1, 0.5, 0.1])


# --- where it goes
# --------------------------------------------------------------------------------------------------


def test_iaptt_reaches_the_closed_form_optimum() -> None:
    # At θ* a start z = x*(θ*) makes every iterate optimal, so the pessimistic value there is F*,
    # and it is never below F* where the run reaches the lower solution.
    problem, exact, best = tuned_penalty()
    method = iaptt(
        Trajectory(steps=25, lr=0.8, keep_graph=True), Adam(lr=0.1, schedule=COSINE), Sgd(lr=1.0)
    )
    theta, x, _ = run(method, problem, 120)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=0.05)
    assert float(exact.value(theta)) == pytest.approx(
        float(exact.value({"log_penalty": torch.tensor([best], dtype=F64)})), abs=1e-5
    )
    assert_same(x, exact.solution(theta), rtol=1e-2, atol=1e-2)


def test_hg_ms_along_a_trajectory_reaches_the_closed_form_optimum() -> None:
    problem, _, best = tuned_penalty()
    trajectory = Trajectory(steps=20, every=5, lr=0.8, carry_rule="last")
    method = pipeline(
        trajectory, BestOfN(), Implicit(solver=CG(rtol=1e-10)), Adam(lr=0.1, schedule=COSINE)
    )
    theta, _, record = run(method, problem, 80)
    assert record["scores"].shape == (4,)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=0.02)


COSINE = Schedule(kind="cosine")


@pytest.mark.extended
def test_pessimism_does_no_better_than_optimism_where_minimisers_are_many() -> None:
    selecting = sphere_gap(
        pipeline(
            Branches(count=12, steps=20, lr=0.1, noise=0.3),
            BestOfN(),
            Implicit(solver=CG(ridge=1e-2)),
            Sgd(lr=0.2),
        ),
        60,
    )
    pessimistic = sphere_gap(
        iaptt(Trajectory(steps=20, lr=0.1, keep_graph=True), Sgd(lr=0.1), Sgd(lr=0.1)), 60
    )
    assert selecting < 0.01
    assert pessimistic > 3 * selecting
