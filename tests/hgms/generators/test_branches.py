"""Branches against torch.optim run by hand on the same batches, and everything that may differ
between branches.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, KEY, assert_same, counted, network_problem, normal, rejects
from torch import Tensor

from hgms.generators.branches import Branches
from hgms.hypergradients import Unrolled
from hgms.outer import Adam
from hgms.runs import run
from hgms.selectors import First
from hgms_core import Candidates, Cost, Key, Pipeline, Problem, State, Tree

PROBLEM = network_problem()
THETA = PROBLEM.theta0
DATA = PROBLEM.lower_data


def propose(branches: Branches, key: Key = KEY, start: State | None = None) -> Candidates:
    return branches.propose(PROBLEM, THETA, start or branches.init(PROBLEM, KEY), key)


def batches(branches: Branches, member: int, key: Key = KEY) -> list[Tree]:
    label: tuple[str | int, ...] = (
        ("batches",) if branches.batches == "shared" else ("batches", member)
    )
    index = DATA.draw(key.fold(*label), branches.batch_size, branches.steps)
    return [DATA.batch(None if index is None else index[step]) for step in range(branches.steps)]


def by_hand(
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    drawn: list[Tree],
    start: Tree = PROBLEM.x0,
    clip: float | None = None,
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
) -> Tree:
    """The branch as anybody would write it: torch.optim, one step a batch."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    steps = optimizer(list(leaves.values()))
    rates = None if schedule is None else schedule(steps)
    for batch in drawn:
        steps.zero_grad()
        PROBLEM.g(THETA, leaves, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip)
        steps.step()
        if rates is not None:
            rates.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": ({"lr": 0.3}, lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": ({"lr": 0.2, "momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.8)),
    "adamw": (
        {"optimizer": "adamw", "lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@every_optimizer
@pytest.mark.parametrize("policy", ["independent", "shared"])
@pytest.mark.parametrize("batch_size", [5, None])
@pytest.mark.parametrize("mode", ["loop", "stacked"])
def test_each_branch_is_torch_optim(
    name: str, policy: str, batch_size: int | None, mode: str
) -> None:
    options, optimizer = OPTIMIZERS[name]
    branches = Branches(
        count=3,
        steps=7,
        batch_size=batch_size,
        batches=policy,
        mode=mode,
        whole_batch_noise=0.0,
        **options,
    )
    found = propose(branches)
    for i in range(3):
        assert_same(found.at(i), by_hand(optimizer, batches(branches, i)), rtol=1e-11, atol=1e-13)


def test_sgd_decay_is_decoupled() -> None:
    branches = Branches(count=1, steps=5, lr=0.3, weight_decay=0.2, batch_size=5)
    x = {name: leaf.clone() for name, leaf in PROBLEM.x0.items()}
    for batch in batches(branches, 0):
        leaves = {name: leaf.requires_grad_() for name, leaf in x.items()}
        grads = torch.autograd.grad(PROBLEM.g(THETA, leaves, batch), list(leaves.values()))
        x = {
            name: (1 - 0.3 * 0.2) * leaf.detach() - 0.3 * grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
    assert_same(propose(branches).at(0), x, rtol=1e-12)


@pytest.mark.parametrize("mode", ["loop", "stacked"])
def test_spreads_are_log_spaced_factors(mode: str) -> None:
    branches = Branches(
        count=3,
        steps=6,
        optimizer="adamw",
        lr=0.05,
        weight_decay=0.2,
        batch_size=5,
        lr_spread=(0.25, 4.0),
        decay_spread=(0.5, 2.0),
        mode=mode,
    )
    found = propose(branches)
    for i, (rate, decay) in enumerate([(0.25, 0.5), (1.0, 1.0), (4.0, 2.0)]):
        expected = by_hand(
            lambda p, rate=rate, decay=decay: torch.optim.AdamW(
                p, lr=0.05 * rate, weight_decay=0.2 * decay
            ),  # type: ignore[misc]
            batches(branches, i),
        )
        assert_same(found.at(i), expected, rtol=1e-10, atol=1e-13)


@every_optimizer
@pytest.mark.parametrize("clip", [0.02, 0.2, 1e3])
@pytest.mark.parametrize("mode", ["loop", "stacked"])
def test_clipping_is_that_of_torch(name: str, clip: float, mode: str) -> None:
    options, optimizer = OPTIMIZERS[name]
    branches = Branches(count=2, steps=5, batch_size=5, clip=clip, mode=mode, **options)
    found = propose(branches)
    for i in range(2):  # torch divides by the norm + 1e-6: that is the tolerance
        expected = by_hand(optimizer, batches(branches, i), clip=clip)
        assert_same(found.at(i), expected, rtol=1e-4, atol=1e-6)


def test_a_clipped_gradient_has_the_norm_of_the_bound() -> None:
    found = propose(Branches(count=1, steps=1, lr=1.0, clip=1e-3)).at(0)
    moved = torch.cat([(found[name] - PROBLEM.x0[name]).reshape(-1) for name in found])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-10)


def test_the_cosine_schedule_is_that_of_torch() -> None:
    branches = Branches(count=1, steps=9, lr=0.5, batch_size=5, schedule="cosine", floor=0.2)
    expected = by_hand(
        lambda p: torch.optim.SGD(p, lr=0.5),
        batches(branches, 0),
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=9, eta_min=0.1),
    )
    assert_same(propose(branches).at(0), expected, rtol=1e-11)


def test_warm_restarts_are_those_of_torch_over_outer_steps() -> None:
    # 7 lower steps an outer step and a period of 5: the restarts fall inside and across the outer
    # steps.
    branches = Branches(
        count=2,
        steps=7,
        lr=0.5,
        batch_size=5,
        schedule="cosine-restarts",
        floor=0.2,
        period=5,
        carry_rule="base",
    )
    state = branches.init(PROBLEM, KEY)
    drawn = []
    for outer in range(3):
        key = KEY.fold(outer)
        drawn += batches(branches, 0, key)
        found = propose(branches, key, state)
        state = branches.carry(state, found, torch.tensor(1), key, PROBLEM)
    with warnings.catch_warnings():
        expected = by_hand(
            lambda p: torch.optim.SGD(p, lr=0.5),
            drawn,
            schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
                o, T_0=5, eta_min=0.1
            ),
        )
    assert_same(
        {name: leaf[0] for name, leaf in state["x"].items()}, expected, rtol=1e-10, atol=1e-14
    )


def starts(branches: Branches) -> Tree:
    """Where the branches start: one step with a vanishing step size."""
    return propose(evolve(branches, steps=1, lr=1e-300, batch_size=None)).x


@pytest.mark.parametrize("scale", ["absolute", "relative"])
def test_noise_has_the_asked_size_and_spares_branch_zero(scale: str) -> None:
    problem = evolve(
        PROBLEM,
        x0={"w": 3 * torch.ones(400, 5, dtype=F64), "b": torch.zeros(300, dtype=F64)},
        g=lambda t, x, b: x["w"].sum(),
    )
    branches = Branches(count=3, steps=1, lr=1e-300, noise=0.1, noise_scale=scale)
    x = branches.propose(problem, THETA, branches.init(problem, KEY), KEY).x
    for name, unit in (
        ("w", 1.0 if scale == "absolute" else 3.0),
        ("b", 1.0 if scale == "absolute" else 0.0),
    ):
        noise = x[name] - problem.x0[name]
        assert not noise[0].any()
        size = noise[1:].reshape(2, -1)
        # four standard errors of a standard deviation
        error = 4 * 0.1 * unit / (2 * size.shape[1]) ** 0.5
        assert size.std(1).tolist() == pytest.approx([0.1 * unit] * 2, abs=error)
        assert (
            abs(float((size[0] * size[1]).mean())) <= 4 * (0.1 * unit) ** 2 / size.shape[1] ** 0.5
        )


@pytest.mark.parametrize(
    ("settings", "told_apart"),
    [
        ({}, False),
        ({"batch_size": 1000}, False),
        ({"decay_spread": (0.5, 2.0)}, False),  # of a decay of 0
        ({"batch_size": 5}, True),
        ({"lr_spread": (0.5, 2.0)}, True),
        ({"decay_spread": (0.5, 2.0), "weight_decay": 0.1}, True),
        ({"noise": 0.05}, True),
        ({"count": 1}, True),
    ],
)
def test_where_nothing_else_tells_the_branches_apart_noise_does(
    settings: dict[str, Any], told_apart: bool
) -> None:
    """And where something does, nothing has changed."""
    branches = Branches(**{"count": 3, "steps": 2, **settings})
    x = propose(branches).x["w"]
    plain = propose(evolve(branches, whole_batch_noise=0.0)).x["w"]
    assert torch.equal(x[0], plain[0])
    assert torch.equal(x, plain) is told_apart
    assert len(torch.unique(x, dim=0)) == branches.count
    assert told_apart or len(torch.unique(plain, dim=0)) == 1


def test_the_noise_on_whole_batches_is_relative_and_starts_what_is_zero() -> None:
    problem = evolve(
        PROBLEM,
        x0={"w": 3 * torch.ones(400, 5, dtype=F64), "b": torch.zeros(300, dtype=F64)},
        g=lambda t, x, b: x["w"].sum(),
    )
    branches = Branches(count=3, steps=1, lr=1e-300)
    x = branches.propose(problem, THETA, branches.init(problem, KEY), KEY).x
    for name, unit in (("w", 3.0), ("b", 1.0)):
        noise = (x[name] - problem.x0[name]).reshape(3, -1)
        assert not noise[0].any()
        # four standard errors of a standard deviation
        error = 4 * 0.1 * unit / (2 * noise.shape[1]) ** 0.5
        assert noise[1:].std(1).tolist() == pytest.approx([0.1 * unit] * 2, abs=error)


def test_noise_differs_between_branches_leaves_and_steps() -> None:
    branches = Branches(count=3, noise=0.1)
    x = starts(branches)
    assert not torch.equal(x["w"][1], x["w"][2])
    again = propose(evolve(branches, steps=1, lr=1e-300), KEY.fold("next")).x
    assert not torch.equal(x["w"][1], again["w"][1])
    assert_same(x["w"][0], PROBLEM.x0["w"])


@pytest.mark.parametrize(("policy", "expected"), [("shared", 1), ("independent", 3)])
def test_batches_are_shared_or_independent(policy: str, expected: int) -> None:
    seen: list[tuple[int, ...]] = []

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        seen.append(tuple(batch["index"].tolist()))
        return PROBLEM.g(theta, x, batch)

    branches = Branches(count=3, steps=2, batch_size=5, batches=policy, mode="loop")
    branches.propose(evolve(PROBLEM, g=g), THETA, branches.init(PROBLEM, KEY), KEY)
    assert len(set(seen)) == 2 * expected


CASES = {
    "sgd": Branches(count=3, steps=5, lr=0.3, batch_size=5, noise=0.05),
    "momentum-clip": Branches(
        count=3, steps=5, lr=0.3, momentum=0.7, clip=0.05, batch_size=5, lr_spread=(0.5, 2.0)
    ),
    "adamw": Branches(
        count=3,
        steps=5,
        optimizer="adamw",
        lr=0.05,
        weight_decay=0.1,
        batch_size=5,
        decay_spread=(0.5, 2.0),
    ),
    "adamw root": Branches(
        count=3,
        steps=5,
        optimizer="adamw",
        eps_root=1e-4,
        lr=0.05,
        weight_decay=0.1,
        batch_size=5,
        decay_spread=(0.5, 2.0),
    ),
    "shared-cosine": Branches(
        count=3, steps=5, lr=0.3, batch_size=5, batches="shared", noise=0.1, schedule="cosine"
    ),
    "full-restarts": Branches(
        count=3,
        steps=5,
        lr=0.3,
        noise=0.1,
        schedule="cosine-restarts",
        period=3,
        carry_rule="restart",
    ),
    "per-branch": Branches(
        count=3, steps=5, optimizer="adamw", lr=0.05, batch_size=5, carry_rule="per-branch"
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def replayed(
    branches: Branches, problem: Problem, start: State, index: Tensor, theta: Tree
) -> tuple[Tree, Cost]:
    """The candidate that ``branches`` proposes at THETA, run again at another θ."""
    candidates = branches.propose(problem, THETA, start, KEY)
    assert candidates.replay is not None
    return candidates.replay(index, theta, None)


def second_start(branches: Branches) -> State:
    """A start with history: what is carried after one outer step."""
    state = branches.init(PROBLEM, KEY)
    return branches.carry(
        state,
        propose(branches, KEY.fold("before"), state),
        torch.tensor(1),
        KEY.fold("carry"),
        PROBLEM,
    )


@every_case
def test_stacked_looped_and_chunked_agree(case: str) -> None:
    start = second_start(CASES[case])
    loop, stacked, chunked = (
        propose(evolve(CASES[case], mode=mode, chunk=chunk), start=start)
        for mode, chunk in [("loop", None), ("stacked", None), ("stacked", 2)]
    )
    for other in (stacked, chunked):
        assert_same(
            (other.x, other.aux, other.losses),
            (loop.x, loop.aux, loop.losses),
            rtol=1e-10,
            atol=1e-13,
        )
        assert other.cost == loop.cost


@every_case
@pytest.mark.parametrize("member", [0, 2])
def test_a_replayed_branch_is_the_proposed_one(case: str, member: int) -> None:
    start = second_start(CASES[case])
    proposed = propose(CASES[case], start=start)
    assert proposed.replay is not None
    for last in (None, 2, 100):
        theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
        replayed, cost = proposed.replay(torch.tensor(member), theta, last)
        assert_same(
            {name: leaf.detach() for name, leaf in replayed.items()},
            proposed.at(member),
            rtol=1e-10,
            atol=1e-13,
        )
        assert all(leaf.requires_grad for leaf in replayed.values())
        assert (cost.lower_gradients, cost.products) == (5, 2 if last == 2 else 5)


@pytest.mark.parametrize("last", [None, 2])
@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"batches": "shared"}, {"moments": "fresh", "schedule": "cosine"}],
)
def test_a_kept_graph_saves_the_second_run_and_changes_nothing(
    options: dict[str, Any], last: int | None
) -> None:
    ends = []
    calls = []
    for keep_graph in (False, True):
        problem, seen = counted(PROBLEM)
        generator = Branches(
            count=1,
            steps=4,
            optimizer="adamw",
            lr=0.05,
            batch_size=5,
            keep_graph=keep_graph,
            **options,
        )
        method = Pipeline(
            generator=generator,
            selector=First(),
            hypergradient=Unrolled(last=last),
            outer=Adam(lr=0.1),
        )
        state = method.init(problem, 0)
        for _ in range(3):
            state, record = method.step(problem, state)
        assert record["cost_lower_gradients"] == seen["g"]
        ends.append({name: part for name, part in state.items() if name != "cost"})
        calls.append(seen["g"])
    # the gradient itself may round differently with a graph
    assert_same(*ends, rtol=1e-12, atol=1e-15)
    assert calls == [24, 12 if last is None else 24]


@every_optimizer
def test_a_kept_graph_is_the_replay_also_for_several_branches(name: str) -> None:
    options, _ = OPTIMIZERS[name]
    for count in (1, 3):
        plain = Branches(count=count, steps=4, batch_size=5, clip=0.5, **options)
        kept = evolve(plain, keep_graph=True)
        one = propose(plain)
        other = propose(kept)
        assert_same(
            (one.x, one.aux, one.losses), (other.x, other.aux, other.losses), rtol=1e-10, atol=1e-13
        )
        for candidates, calls in ((one, 4), (other, 4 if count > 1 else 0)):
            assert candidates.replay is not None
            assert candidates.replay(torch.tensor(0), THETA, None)[1].lower_gradients == calls


def test_a_kept_graph_is_used_at_its_own_theta_only() -> None:
    plain = Branches(count=1, steps=4, optimizer="adamw", lr=0.05, batch_size=5)
    start = plain.init(PROBLEM, KEY)
    index = torch.tensor(0)
    problem, seen = counted(PROBLEM)
    other = {name: leaf + 0.3 for name, leaf in THETA.items()}
    # the same numbers elsewhere
    own = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
    held = evolve(plain, keep_graph=True).propose(problem, THETA, start, KEY)
    assert held.replay is not None
    for theta, calls in (
        (own, 0),
        (other, 4),
        ({name: leaf.requires_grad_() for name, leaf in other.items()}, 4),
    ):
        before = seen["g"]
        end, cost = held.replay(index, theta, None)
        assert seen["g"] - before == cost.lower_gradients == calls
        expected, run_again = replayed(plain, PROBLEM, start, index, theta)
        assert_same(end, expected, rtol=1e-12)
        assert (cost.products, cost.cross_products) == (
            run_again.products,
            run_again.cross_products,
        )
    at = {name: leaf.clone() for name, leaf in THETA.items()}
    held = evolve(plain, keep_graph=True).propose(PROBLEM, at, start, KEY)
    at["scale"].add_(0.5)  # θ itself changed in place: its values are other ones now
    assert held.replay is not None
    assert_same(held.replay(index, at, None)[0], replayed(plain, PROBLEM, start, index, at)[0])


@every_case
def test_a_replay_where_nothing_requires_a_gradient_is_a_run_forward(case: str) -> None:
    start, (problem, seen) = second_start(CASES[case]), counted(PROBLEM)
    proposed = CASES[case].propose(problem, THETA, start, KEY)
    assert proposed.replay is not None
    seen.clear()
    end, cost = proposed.replay(torch.tensor(1), THETA, None)
    assert_same(end, propose(CASES[case], start=start).at(1), rtol=1e-10, atol=1e-13)
    assert not any(leaf.requires_grad for leaf in end.values())
    assert cost.calls == cost.lower_gradients == seen["g"] == 5
    assert cost.rows == seen["g_rows"]


def test_the_ways_back_keep_no_other_candidate_alive() -> None:
    generator = Branches(count=3, steps=2, lr=0.1, batch_size=5)
    candidates = propose(generator)
    others = weakref.ref(candidates.x["w"])
    branch = candidates.branch(torch.tensor(1))
    del candidates
    gc.collect()
    assert others() is None
    assert branch.replay is not None
    assert_same(branch.replay(THETA, None)[0], branch.x, rtol=1e-10, atol=1e-13)


@every_case
def test_a_proposal_repeats_itself_and_touches_nothing_else(case: str) -> None:
    start = second_start(CASES[case])
    before = copy.deepcopy(start)
    rng = torch.get_rng_state()
    one = propose(CASES[case], start=start)
    two = propose(CASES[case], start=start)
    assert_same((one.x, one.aux, one.losses), (two.x, two.aux, two.losses))
    assert_same(start, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert (
        not torch.equal(one.x["w"], propose(CASES[case], KEY.fold("other"), start).x["w"])
        or CASES[case].batch_size is None
    )


@every_optimizer
@pytest.mark.parametrize("rule", ["selected", "base", "per-branch"])
def test_continuing_with_carried_moments_is_one_long_run(name: str, rule: str) -> None:
    options, optimizer = OPTIMIZERS[name]
    branches = Branches(count=3, steps=4, batch_size=5, carry_rule=rule, **options)
    # type: ignore[var-annotated]
    state = branches.init(PROBLEM, KEY)
    histories = [[], [], []]
    for outer, choice in enumerate([2, 1, 2]):
        key = KEY.fold(outer)
        histories = [[*history, *batches(branches, i, key)] for i, history in enumerate(histories)]
        found = propose(branches, key, state)
        for i in range(3):
            assert_same(found.at(i), by_hand(optimizer, histories[i]), rtol=1e-9, atol=1e-12)
        state = branches.carry(state, found, torch.tensor(choice), key, PROBLEM)
        parent = {"selected": choice, "base": 0}.get(rule)
        if parent is not None:
            histories = [list(histories[parent]) for _ in range(3)]


def test_fresh_moments_start_again() -> None:
    branches = Branches(count=2, steps=4, optimizer="adamw", lr=0.05, batch_size=5, moments="fresh")
    state = second_start(branches)
    assert state["optimizer_steps"] == 0
    assert not any(leaf.any() for leaf in state["moments"].values())
    start = {name: leaf[0] for name, leaf in state["x"].items()}
    expected = by_hand(
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0), batches(branches, 0), start
    )
    assert_same(propose(branches, start=state).at(0), expected, rtol=1e-10, atol=1e-13)


def test_restarts_draw_a_new_lower_state_each_time() -> None:
    branches = Branches(count=2, steps=2, optimizer="adamw", carry_rule="restart")
    state = branches.init(PROBLEM, KEY)
    found = propose(branches)
    one, two = (
        branches.carry(state, found, torch.tensor(0), KEY.fold(i), PROBLEM) for i in range(2)
    )
    assert PROBLEM.fresh is not None
    assert_same({name: leaf[0] for name, leaf in one["x"].items()}, PROBLEM.fresh(KEY.fold(0)))
    assert not torch.equal(one["x"]["w"], two["x"]["w"])
    assert one["lower_steps"] == 2
    assert one["optimizer_steps"] == 0
    assert not any(leaf.any() for leaf in one["moments"].values())


def test_the_losses_are_the_last_ones_seen_and_the_cost_is_counted() -> None:
    branches = Branches(count=2, steps=1, batch_size=5)
    found = propose(branches)
    assert found.losses is not None
    for i in range(2):
        assert_same(
            found.losses[i], PROBLEM.g(THETA, PROBLEM.x0, batches(branches, i)[0]), rtol=1e-13
        )
    assert (found.cost.lower_gradients, found.cost.rows) == (2, 10)
    assert found.count == 2


def test_a_state_of_another_count_is_refused() -> None:
    start = Branches(count=3, carry_rule="per-branch").init(PROBLEM, KEY)
    with rejects("wrong-length", "generator", "count"):
        propose(Branches(count=2, carry_rule="per-branch"), start=start)


def test_a_problem_without_data_and_without_theta_works() -> None:
    problem = Problem(
        theta0={},
        x0={"x": normal(3)},
        g=lambda t, x, _: (x["x"] ** 2).sum(),
        f=lambda t, x, _: x["x"].sum(),
    )
    for mode in ("loop", "stacked"):
        branches = Branches(count=2, steps=60, lr=0.2, batch_size=8, mode=mode)
        found = branches.propose(problem, {}, branches.init(problem, KEY), KEY)
        assert float(found.x["x"].abs().max()) < 1e-10


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"count": 0}, "out-of-range"),
        ({"steps": 3.9}, "wrong-type"),
        ({"lr": -1.0}, "out-of-range"),
        ({"momentum": 1.0}, "out-of-range"),
        ({"betas": (0.9, 1.0)}, "out-of-range"),
        ({"lr_spread": (2.0, 0.5)}, "wrong-value"),
        ({"optimizer": "rmsprop"}, "unknown-choice"),
        ({"floor": 1.5}, "out-of-range"),
    ],
)
def test_bad_fields_are_named(options: dict[str, Any], code: str) -> None:
    with rejects(code, *options):
        Branches(**options)


def test_restart_every_draws_a_new_state_and_forgets_the_moments() -> None:
    def fresh(key: Key) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(2, generator=key.generator(), dtype=torch.float64)}

    problem = Problem(
        theta0={},
        x0={"x": torch.ones(2, dtype=torch.float64)},
        g=lambda theta, x, batch: (x["x"] ** 2).sum(),
        f=lambda theta, x, batch: x["x"].sum(),
        fresh=fresh,
    )
    branches = Branches(
        count=2, steps=3, lr=0.1, momentum=0.5, restart_every=2, carry_rule="per-branch"
    )
    start = branches.init(problem, Key(0))
    rows = []
    restarted = []
    for outer in range(4):
        key = Key(0).fold(outer)
        found = branches.propose(problem, {}, start, key)
        start = branches.carry(start, found, torch.tensor(1), key, problem)
        rows.append(start["x"]["x"].shape[0])
        restarted.append(torch.equal(start["x"]["x"][0], fresh(key)["x"]))
        moments = start["moments"]["m.x"]
        assert bool((moments == 0).all()) is restarted[-1]
        assert start["optimizer_steps"] == (0 if restarted[-1] else 3)
        # schedules over the whole run go on counting
        assert start["lower_steps"] == 3 * (outer + 1)
    assert restarted == [False, True, False, True]
    assert rows == [2, 1, 2, 1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4, "clip": 0.1},
        {"batch_size": 4, "batches": "shared", "optimizer": "adamw", "weight_decay": 0.1},
        {"batch_size": 4, "accumulate": 2},
        {"batch_size": 4, "optimizer": lambda leaves: torch.optim.RMSprop(leaves, lr=0.01)},
    ],
    ids=["whole", "own", "shared", "accumulated", "torch"],
)
def test_branches_of_a_loss_that_vmap_cannot_evaluate_are_those_of_the_loop(
    options: dict[str, Any],
) -> None:
    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        calls.append(1)
        bound = max(1.0, x["w"].abs().max().item())
        return network.g(theta, x, batch) / bound

    calls: list[int] = []
    network = network_problem()
    p = evolve(network, g=g)
    ends = {}
    count = {}
    branches = Branches(count=3, steps=4, **options)
    for mode in ("auto", "loop"):
        calls.clear()
        generator = evolve(branches, mode=mode)
        ends[mode] = generator.propose(p, p.theta0, generator.init(p, KEY), KEY)
        count[mode] = len(calls)
    assert count["auto"] - count["loop"] == 2, "tried once, not per step"
    for name, leaf in ends["auto"].x.items():
        assert torch.equal(leaf, ends["loop"].x[name])
    assert torch.equal(ends["auto"].losses, ends["loop"].losses)


def test_a_gradient_through_adamw_at_a_stationary_point_is_bounded() -> None:
    """Ridge regression whose run begins at its solution: F'(0) = 0.29, and was 9e4."""
    a = normal(40, 3)
    y = a @ torch.tensor([1.0, -1.0, 0.5], dtype=F64) + normal(40, seed=1)
    a, y = a.float(), y.float()

    def fit(x: Tensor, batch: Tree) -> Tensor:
        return 0.5 * (batch["a"] @ x - batch["y"]).square().mean()

    matrix = a[:20].T @ a[:20] / 20 + torch.eye(3)
    problem = Problem(
        theta0=torch.tensor(0.0),
        x0=torch.linalg.solve(matrix, a[:20].T @ y[:20] / 20),
        f=lambda theta, x, batch: fit(x, batch),
        g=lambda theta, x, batch: fit(x, batch) + 0.5 * theta.exp() * x.square().sum(),
        lower_data={"a": a[:20], "y": y[:20]},
        upper_data={"a": a[20:], "y": y[20:]},
    )
    result = run("hg-baseline", problem, "5 steps")
    first, *_ = [row["hypergradient_norm"] for row in result.records if row["step"]]
    assert first < 10
    assert "remarks" not in result.summary
    plain = run({"name": "hg-baseline", "generator": {"eps_root": 0.0}}, problem, "5 steps")
    first, *_ = [row["hypergradient_norm"] for row in plain.records if row["step"]]
    assert first > 1e3
