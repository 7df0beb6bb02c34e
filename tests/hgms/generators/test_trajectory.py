"""Candidates along one trajectory, the learned start and IAPTT-GM: by hand, by differences and
against closed forms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.branch_steps import PROBLEM, THETA, ByHand, propose
from support.field_problems import pipeline, run, tuned_penalty
from support.helpers import F64, KEY, assert_same, finite_differences, normal, rejects
from torch import optim
from torch.optim import NAdam

from hgms.generators.branches import Branches, Trajectory
from hgms.hypergradients import Unrolled
from hgms.methods import LearnedStart
from hgms.methods.learned_start import with_learned_start
from hgms.optim import SGD, AdamW, Clip, LowerOptimizer, Torch
from hgms.outer import Adam, Schedule, Sgd, Split
from hgms.runs import RunConfig
from hgms.selectors import First, Worst
from hgms_core import Problem, Tree


def nadam(parameters: Any) -> torch.optim.Optimizer:
    return NAdam(parameters, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True)


OPTIMIZERS: dict[str, tuple[LowerOptimizer, Any]] = {
    "sgd": (SGD(lr=0.3), lambda p: optim.SGD(p, lr=0.3)),
    "momentum": (SGD(lr=0.2, momentum=0.8), lambda p: optim.SGD(p, lr=0.2, momentum=0.8)),
    "adamw": (
        AdamW(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
        lambda p: optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
    "torch": (Torch(build=nadam), nadam),
}
DIFFERENTIABLE = [name for name in OPTIMIZERS if name != "torch"]
graph_or_not = pytest.mark.parametrize("keep_path", ["none", "graph"])


@pytest.mark.parametrize(
    ("name", "every", "keep_path"),
    [
        *(
            (name, every, keep)
            for name in DIFFERENTIABLE
            for every, keep in ((1, "graph"), (4, "none"))
        ),
        ("torch", 4, "none"),
    ],
)
def test_candidates_are_the_iterates_of_torch_optim(name: str, keep_path: Any, every: int) -> None:
    optimizer, build = OPTIMIZERS[name]
    found: Any = propose(
        Trajectory(steps=6, every=every, batch_size=5, keep_path=keep_path, optimizer=optimizer)
    )
    rows: Any = PROBLEM.lower_data.draw(KEY.fold("batches"), 5, 6)
    batches = [PROBLEM.lower_data.batch(row) for row in rows]
    kept = range(1, 7) if every == 1 else [4, 6]  # the last one is a candidate in any case
    assert found.count == len(kept)
    hand = ByHand(build)
    done = 0
    for row, step in enumerate(kept):
        before = hand.run(batches[done : step - 1])
        done = step
        assert_same(found.losses[row], PROBLEM.g(THETA, before, batches[step - 1]), rtol=1e-11)
        assert_same(found.at(row), hand.run(batches[step - 1 : step]), rtol=1e-11, atol=1e-13)
        if name == "torch":
            continue
        again = found.replay(torch.tensor(row), THETA, None)[0]
        end = {key: leaf.detach() for key, leaf in again.items()}
        assert_same(end, found.at(row), rtol=1e-12, atol=1e-15)
    assert not any(leaf.requires_grad for leaf in found.x.values())


def value(x: Tree) -> torch.Tensor:
    """A fixed linear function of the lower variables."""
    parts = [(normal(*leaf.shape, seed=40 + i) * leaf).sum() for i, leaf in enumerate(x.values())]
    return torch.stack(parts).sum()


def slope(trajectory: Any, problem: Problem, index: int, last: int | None) -> Tree:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.theta0.items()}
    x, _ = propose(trajectory, problem).replay(torch.tensor(index), leaves, last)  # type: ignore[misc]
    grads = torch.autograd.grad(value(x), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@graph_or_not
def test_a_candidate_is_differentiated_through_its_own_steps_and_to_its_start(
    name: str, keep_path: Any
) -> None:
    problem = with_learned_start(PROBLEM)
    clipped = Clip(optimizer=OPTIMIZERS[name][0], clip=0.5)
    plain = Trajectory(steps=4, batch_size=6, optimizer=clipped)
    start = plain.init(problem, KEY)
    direction = {
        key: normal(*leaf.shape, seed=60 + i)
        for i, (key, leaf) in enumerate(problem.theta0.items())
    }

    def along(at: Tree, index: int) -> torch.Tensor:
        moved = {key: leaf + at["t"] * direction[key] for key, leaf in problem.theta0.items()}
        return value(plain.propose(problem, moved, start, KEY).at(index))

    for index in (0, 2):
        found = slope(evolve(plain, keep_path=keep_path), problem, index, None)
        zero = {"t": torch.zeros(1, dtype=F64)}
        expected = finite_differences(lambda at, index=index: along(at, index), zero)["t"]  # type: ignore[misc]
        assert sum(float((found[k] * direction[k]).sum()) for k in found) == pytest.approx(
            float(expected), rel=1e-5
        )
        assert all(float(leaf.abs().max()) > 0 for leaf in found.values())


@pytest.mark.parametrize("last", [1, 2, 9, None])
def test_the_kept_graph_and_the_replay_are_one_derivative(last: int | None) -> None:
    plain = Trajectory(steps=4, optimizer=SGD(lr=0.3), batch_size=6)
    for index in (1, 3):
        kept, replayed = (
            slope(evolve(plain, keep_path=keep), PROBLEM, index, last) for keep in ("graph", "none")
        )
        assert_same(kept, replayed, rtol=1e-11, atol=1e-14)


# --- the learned start


def iaptt(
    generator: Trajectory, upper: Any = None, start: Any = None, **options: Any
) -> LearnedStart:
    outer = Split(upper=upper or Sgd(lr=0.1), start=start or Sgd(lr=0.1))
    whole = pipeline(generator, Worst(), Unrolled(), outer, answer="last", **options)
    return LearnedStart(method=whole)


@graph_or_not
def test_two_steps_of_iaptt_by_hand(keep_path: Any) -> None:
    # From z = 4 with step ½ towards θ = 0 the iterates are 2, 1, ½, with f = ½, 0, ⅛: the first is
    # the worst. y_1 = z/2 + θ/2, so ∂f = (y_1 − 1)/2 = ½ for z, and ½ + 1 (the direct term) for θ.
    one = torch.ones(1, dtype=F64)
    problem = Problem(
        theta0={"t": 0 * one},
        x0={"x": 4 * one},
        g=lambda t, x, _: 0.5 * (x["x"] - t["t"]).square().sum(),
        f=lambda t, x, _: 0.5 * (x["x"] - 1).square().sum() + t["t"].sum(),
        project=lambda theta: {"t": theta["t"].clamp(-0.17, 0.17)},
        evaluate=lambda theta, x: {"names": float(len(theta))},
    )
    method = iaptt(
        Trajectory(steps=3, optimizer=SGD(lr=0.5), keep_path=keep_path), Sgd(lr=0.1), Sgd(lr=2.0)
    )
    state, record = method.step(problem, method.init(problem, 0))
    assert (int(record["selected"]), record["scores"].tolist()) == (0, [0.5, 0.0, 0.125])
    assert float(record["hypergradient_norm"]) == pytest.approx((1.5**2 + 0.5**2) ** 0.5)
    assert float(record["update_norm"]) == pytest.approx((0.15**2 + 1) ** 0.5)
    moved = [float(state["theta"][name]) for name in ("t", "start.x")]
    assert moved == pytest.approx([-0.15, 3.0])
    assert_same(method.result(state), ({"t": state["theta"]["t"]}, {"x": 0.5 * one}))
    # The next run starts from z = 3 whatever was carried. Its third iterate z/8 + 7θ/8 = 0.24375 is
    # the worst: ∂f is ⅞·(0.24375 − 1) + 1 for θ, which the projection stops, and ⅛·(0.24375 − 1)
    # for z, which it does not touch.
    state, record = method.step(problem, state)
    assert int(record["selected"]) == 2
    assert float(record["scores"][0]) == pytest.approx(0.5 * ((3 - 0.15) / 2 - 1) ** 2 - 0.15)
    moved = [float(state["theta"][name]) for name in ("t", "start.x")]
    assert moved == pytest.approx([-0.17, 3 + 2 * 0.75625 / 8])
    assert with_learned_start(problem).evaluate(state["theta"], state["x"]) == {"names": 1.0}


def test_a_learned_start_wants_a_generator_that_knows_it() -> None:
    with rejects("not-supported", "learn_start"):
        LearnedStart(method=pipeline(Branches(), First(), Unrolled(), Sgd()))
    table = {"name": "iaptt-gm", "generator": {"name": "branches"}}
    with rejects("not-supported", "method", "learn_start"):
        RunConfig.from_dict({"budget": "1 steps", "task": {"name": "quadratic"}, "method": table})


def test_a_kept_graph_of_a_learned_start_is_used_at_its_own_theta_only() -> None:
    lifted = with_learned_start(PROBLEM)
    plain = Trajectory(steps=4, optimizer=SGD(lr=0.3), batch_size=6)
    held, again = (
        propose(evolve(plain, keep_path=keep), lifted).replay for keep in ("graph", "none")
    )
    index = torch.tensor(2)
    for name, calls in ((None, 0), ("scale", 3), ("start.w", 3)):
        moved = {key: leaf + 0.3 * (key == name) for key, leaf in lifted.theta0.items()}
        end, cost = held(index, moved, None)  # type: ignore[misc]
        assert_same(end, again(index, moved, None)[0], rtol=1e-13)  # type: ignore[misc]
        assert cost.calls == cost.lower_gradients == calls


# --- where it goes

COSINE = Schedule(kind="cosine")


@pytest.mark.extended
def test_iaptt_reaches_the_closed_form_optimum() -> None:
    # At θ* a start z = x*(θ*) makes every iterate optimal, so the pessimistic value there is F*,
    # and it is never below F* where the run reaches the lower solution.
    problem, exact, best = tuned_penalty()
    generator = Trajectory(steps=25, optimizer=SGD(lr=0.8), keep_path="graph")
    theta, x, _ = run(iaptt(generator, Adam(lr=0.1, schedule=COSINE), Sgd(lr=1.0)), problem, 120)
    assert float(theta["log_penalty"]) == pytest.approx(best, abs=0.05)
    wanted = exact.value({"log_penalty": torch.tensor([best], dtype=F64)})
    assert float(exact.value(theta)) == pytest.approx(float(wanted), abs=1e-5)
    assert_same(x, exact.solution(theta), rtol=1e-2, atol=1e-2)
