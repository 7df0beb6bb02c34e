"""`hg-ms-online` and its parts, against loops with torch's AdamW and numpy on the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, normal, rejects
from support.source_problems import (
    assert_goes_on,
    convex_sources,
    language_sources,
    network_sources,
    weights,
)

from hgms.hypergradients import Fixed
from hgms.outer import DualAveraging, Sgd
from hgms.selectors import BestOfN, First
from hgms_core import Candidates, ConfigError, Key, Pipeline, Problem, Selection, Tree
from hgms_mix.methods.online import AlignedMeans, MixtureBranches
from hgms_mix.methods.online.training import mixture_rows

THETA = {"logits": torch.tensor([0.6, -0.4, 0.1], dtype=F64)}
ADAMW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "batch_size": 7}
PROBLEM = network_sources()
SELECTED = Selection.of(torch.zeros(1))


def proposed(
    generator: MixtureBranches, problem: Problem = PROBLEM, theta: Tree = THETA
) -> Candidates:
    return generator.propose(problem, theta, generator.init(problem, Key(0)), Key(3))


def gradients(problem: Problem, x: Tree, numbers: torch.Tensor) -> Tree:
    """Σ_i ∇ℓ_i over rows."""
    assert problem.sources is not None
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in x.items()}
    total = problem.sources.examples(leaves, problem.lower_data.rows(numbers)).sum()
    return dict(zip(x, torch.autograd.grad(total, list(leaves.values())), strict=True))


@pytest.mark.parametrize("tilt", [0.0, 0.7])
def test_a_branch_is_adamw_on_rows_drawn_by_the_mixture_and_keeps_each_sources_gradients(
    tilt: float,
) -> None:
    generator = MixtureBranches(**ADAMW, count=2, steps=3, tilt=tilt, upper_batch_size=4)
    candidates = proposed(generator)
    assert PROBLEM.sources is not None
    for branch in range(2):
        key = Key(3).fold(branch)
        index = mixture_rows(
            PROBLEM.lower_data, PROBLEM.sources, THETA["logits"].softmax(0), key.fold("rows"), 7, 3
        )
        above = PROBLEM.upper_data["differentiate"]
        upper = above.draw(key.fold("validation"), 4, 3)
        assert upper is not None
        x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
        optimizer = torch.optim.AdamW(list(x.values()), lr=0.02, weight_decay=0.1)
        u = {name: torch.zeros(3, *leaf.shape, dtype=F64) for name, leaf in x.items()}
        f = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
        rows = torch.zeros(3, dtype=F64)
        losses = []
        loss = torch.empty(())
        for update in range(3):
            source = PROBLEM.lower_data.rows(index[update])["source"]
            for number in range(3):
                own = index[update][source == number]
                rows[number] += len(own)
                for name, leaf in gradients(PROBLEM, x, own).items() if len(own) else ():
                    u[name][number] += leaf
            loss = PROBLEM.sources.examples(x, PROBLEM.lower_data.rows(index[update])).mean()
            if tilt:
                value = PROBLEM.f({}, x, above.rows(upper[update]))
                losses.append(value.detach())
                for name, leaf in zip(
                    x, torch.autograd.grad(value, list(x.values()), retain_graph=True), strict=True
                ):
                    f[name] += leaf
                loss = loss + tilt * value
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_same(
            candidates.at(branch),
            {name: leaf.detach() for name, leaf in x.items()},
            rtol=1e-9,
            atol=1e-12,
        )
        for name in x:
            assert_same(candidates.aux[f"u.{name}"][branch], u[name], rtol=1e-9, atol=1e-12)
            if tilt:
                assert_same(candidates.aux[f"f.{name}"][branch], f[name], rtol=1e-9, atol=1e-12)
        assert_same(candidates.aux["rows"][branch], rows)
        assert candidates.losses is not None
        assert_same(candidates.losses[branch], loss.detach(), rtol=1e-9)
        assert not tilt or torch.allclose(
            candidates.aux["upper_loss"][branch], torch.stack(losses).mean()
        )
    assert ("f.w" in candidates.aux) == bool(tilt)
    assert candidates.cost.upper_gradients == (6 if tilt else 0)
    assert candidates.cost.rows == 2 * 3 * (7 + (4 if tilt else 0))


def test_the_rate_falls_to_nothing_over_the_budget() -> None:
    generator = MixtureBranches(**{**ADAMW, "weight_decay": 0.0}, steps=1, schedule="linear")
    start = generator.init(PROBLEM, Key(0))
    whole, quarter = (
        generator.propose(PROBLEM, THETA, {**start, "progress": progress}, Key(3)).at(0)
        for progress in (0.0, 0.75)
    )
    for name, leaf in PROBLEM.x0.items():
        assert_same(quarter[name] - leaf, 0.25 * (whole[name] - leaf), rtol=1e-9, atol=1e-12)


def test_alignments_are_those_of_running_means() -> None:
    generator = MixtureBranches(**ADAMW, count=2, steps=2, tilt=0.5, upper_batch_size=4)
    estimator = AlignedMeans(decay=0.8, eps=1e-3)
    state = estimator.init(PROBLEM)
    start = generator.init(PROBLEM, Key(0))
    d = sum(leaf.numel() for leaf in PROBLEM.x0.values())
    u = np.zeros((3, d))
    f = np.zeros(d)
    rows = np.zeros(3)
    squares = np.zeros(3)
    for step in range(4):
        candidates = generator.propose(PROBLEM, THETA, start, Key(step))
        selection = Selection.of(torch.tensor([1.0, 0.0]))
        before = state
        estimate, state = estimator.estimate_all(
            PROBLEM, THETA, candidates, selection, Key(9), before
        )
        start = generator.carry(start, candidates, selection.index, Key(1), PROBLEM)
        names = list(PROBLEM.x0)
        own = np.concatenate(
            [candidates.aux[f"u.{name}"].sum(0).reshape(3, -1).numpy() for name in names], 1
        )
        slope = np.concatenate(
            [candidates.aux[f"f.{name}"].sum(0).reshape(-1).numpy() for name in names]
        )
        v = np.concatenate([candidates.aux[f"v.{name}"][1].reshape(-1).numpy() for name in names])
        metric = np.sqrt(v.mean()) / (np.sqrt(v) + 1e-3)
        u = 0.8 * u + own
        f = 0.8 * f + slope
        rows = 0.8 * rows + candidates.aux["rows"].sum(0).numpy()
        squares = 0.8 * squares + (own * own * metric).sum(1)
        a = (u * f * metric).sum(1) / np.sqrt(rows * squares * (f * f * metric).sum())
        omega = THETA["logits"].softmax(0).numpy()
        assert_same(
            estimate.value["logits"], torch.tensor(-omega * (a - omega @ a)), rtol=1e-9, atol=1e-12
        )
        assert estimate.cost.calls == 0
        assert_same(estimate.upper_loss, candidates.aux["upper_loss"][1])


def test_a_source_without_a_row_so_far_does_not_move() -> None:
    estimator = AlignedMeans(decay=0.5)
    d = 4
    problem = evolve(PROBLEM, x0={"x": torch.zeros(d, dtype=F64)})
    rows = normal(4, d, seed=2)
    state = estimator.init(problem)
    seen = []
    for count in (
        torch.tensor([3.0, 0.0, 5.0], dtype=F64),
        torch.tensor([2.0, 4.0, 0.0], dtype=F64),
    ):
        u = rows[:3] * count.sign()[:, None]
        aux = {
            "u.x": u[None],
            "rows": count[None],
            "f.x": rows[3:],
            "upper_loss": torch.zeros(1, dtype=F64),
        }
        candidates = Candidates(x={"x": torch.zeros(1, d, dtype=F64)}, aux=aux)
        estimate, state = estimator.estimate_all(
            problem, THETA, candidates, SELECTED, Key(0), state
        )
        seen.append(estimate.value["logits"])
    omega = THETA["logits"].softmax(0)
    a = (
        rows[:3]
        @ rows[3]
        / (torch.tensor([3.0, 1.0, 5.0], dtype=F64).sqrt() * rows[:3].norm(dim=1) * rows[3].norm())
    )
    there = torch.tensor([0, 2])
    mean = omega[there] @ a[there] / omega[there].sum()
    assert_same(
        seen[0],
        -omega * torch.stack([a[0] - mean, torch.zeros((), dtype=F64), a[2] - mean]),
        rtol=1e-9,
        atol=1e-12,
    )
    assert (seen[1].abs() > 1e-3).all(), "what was seen once stays seen"


def test_another_generators_candidates_are_measured_on_fresh_rows() -> None:
    from hgms.generators.branches import Branches

    generator = Branches(count=1, steps=2, lr=0.1)
    estimator = AlignedMeans(upper_batch_size=4)
    candidates = generator.propose(PROBLEM, THETA, generator.init(PROBLEM, Key(0)), Key(1))
    estimate, state = estimator.estimate_all(
        PROBLEM, THETA, candidates, SELECTED, Key(2), estimator.init(PROBLEM)
    )
    everything = torch.arange(PROBLEM.lower_data.size)
    source = PROBLEM.lower_data.rows(everything)["source"]
    for number in range(3):
        for name, leaf in gradients(
            PROBLEM, candidates.at(0), everything[source == number]
        ).items():
            assert_same(state["sources"][name][number], leaf, rtol=1e-9, atol=1e-12)
    assert (estimate.cost.lower_gradients, estimate.cost.upper_gradients) == (3, 1)


def test_a_source_gains_nothing_by_having_more_rows_drawn() -> None:
    """Rows of one distribution as two sources, eight times as many of the second: a agrees,
    which a cosine does not.
    """
    estimator = AlignedMeans(decay=0.0)
    d = 60
    trials = 400
    problem = evolve(PROBLEM, x0={"x": torch.zeros(d, dtype=F64)})
    differences = []
    cosines = []
    for trial in range(trials):
        noise = normal(3 * 18 + 1, d, seed=trial).reshape(-1, d)
        rows = [0.3 + noise[:2], 0.3 + noise[2:18], 0.3 + noise[18:20]]
        u = torch.stack([own.sum(0) for own in rows])
        aux = {
            "u.x": u[None],
            "rows": torch.tensor([[2.0, 16.0, 2.0]], dtype=F64),
            "f.x": (0.3 + 0.5 * noise[-1])[None],
            "upper_loss": torch.zeros(1, dtype=F64),
        }
        candidates = Candidates(x={"x": torch.zeros(1, d, dtype=F64)}, aux=aux)
        theta = {"logits": torch.zeros(3, dtype=F64)}
        h = estimator.estimate_all(
            problem, theta, candidates, SELECTED, Key(0), estimator.init(problem)
        )[0].value["logits"]
        a = -3 * h
        differences.append(float(a[1] - a[0]))
        own = torch.nn.functional.cosine_similarity(u, aux["f.x"])
        cosines.append(float(own[1] - own[0]))
    error = np.std(differences) / np.sqrt(trials)
    assert abs(np.mean(cosines)) > 0.15
    assert abs(np.mean(differences)) < 0.25 * abs(np.mean(cosines)) + 3 * error


def method(**changes: Any) -> Pipeline:
    parts: dict[str, Any] = {
        "generator": MixtureBranches(lr=0.05, batch_size=9, steps=2, tilt=0.5, upper_batch_size=4),
        "selector": First(),
        "hypergradient": AlignedMeans(),
        "outer": DualAveraging(strength=30.0, prior_steps=2.0, decay=0.7),
    }
    return Pipeline(**{**parts, **changes})


def after(pipeline: Pipeline, problem: Problem, steps: int) -> dict[str, Any]:
    state = pipeline.init(problem, 0)
    for step in range(steps):
        state, _ = pipeline.step(problem, state, step / steps)
    return state


def test_the_source_that_validation_asks_for_ends_with_most_weight() -> None:
    problem = convex_sources({"a": 1.0, "b": 0.0, "c": 0.0})
    state = after(method(), problem, 20)
    assert weights(problem, state["theta"])[0] > 0.8


def test_it_is_uniform_online_where_nothing_is_learned() -> None:
    still = after(method(outer=DualAveraging(strength=1e-12)), PROBLEM, 4)
    fixed = after(method(hypergradient=Fixed(), outer=Sgd()), PROBLEM, 4)
    assert_same(still["x"], fixed["x"], rtol=1e-6, atol=1e-9)
    learned = after(method(), PROBLEM, 4)
    assert any((learned["x"][name] - leaf).abs().max() > 1e-4 for name, leaf in fixed["x"].items())


def test_several_branches_and_best_of_n() -> None:
    state = after(
        method(generator=MixtureBranches(count=3, batch_size=9, lr=0.05), selector=BestOfN()),
        PROBLEM,
        6,
    )
    near, turned, _ = weights(PROBLEM, state["theta"])
    assert near > turned


def test_it_goes_on_where_it_was() -> None:
    assert_goes_on(method(), PROBLEM, most=5)


def test_a_language_model_in_tokens() -> None:
    problem = language_sources(1)
    state = after(
        method(generator=MixtureBranches(lr=1e-2, batch_size=6, tilt=0.5, upper_batch_size=3)),
        problem,
        8,
    )
    assert weights(problem, state["theta"])[0] > 0.5


def test_a_problem_without_sources_is_refused() -> None:
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        MixtureBranches().init(evolve(PROBLEM, sources=None), Key(0))
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        AlignedMeans().init(evolve(PROBLEM, sources=None))


def test_dual_averaging_forgets() -> None:
    outer = DualAveraging(strength=2.0, prior_steps=1.0, decay=0.5)
    theta = {"t": torch.zeros(2, dtype=F64)}
    state = outer.init(theta)
    steps = [0.4, -0.2, 0.9]
    for slope in steps:
        omega = theta["t"].softmax(0)
        c = torch.tensor([slope, -slope], dtype=F64)
        theta, state = outer.step(theta, {"t": omega * (c - omega @ c)}, state, 0.0)
    # in differences of logits, which the centring of c leaves as they are
    expected = -2.0 * 2 * (0.25 * 0.4 - 0.5 * 0.2 + 0.9) / (0.25 + 0.5 + 1 + 1)
    assert float(theta["t"][0] - theta["t"][1]) == pytest.approx(expected)
