"""`hg-ms-online` and its parts, against loops with torch's AdamW and numpy on the same rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, normal
from support.source_problems import (
    by_torch,
    convex_sources,
    network_sources,
    on_rows,
    stepped,
    weights,
)

from hgms.outer import DualAveraging
from hgms.selectors import First
from hgms_core import Candidates, Data, Key, Pipeline, Problem, Selection, Sources, Tree, stack
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


def gradients(problem: Problem, x: Tree, numbers: torch.Tensor, data: Data | None = None) -> Tree:
    """Σ_i ∇ℓ_i over rows, by default of the pool."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in x.items()}
    table = problem.lower_data if data is None else data
    total = problem.find(Sources).examples(leaves, table.rows(numbers)).sum()
    return dict(zip(x, torch.autograd.grad(total, list(leaves.values())), strict=True))


def total(trees: Iterable[Tree]) -> Tree:
    return {name: leaf.sum(0) for name, leaf in stack(list(trees)).items()}


@pytest.mark.parametrize("tilt", [0.0, 0.7])
def test_a_branch_is_adamw_on_rows_drawn_by_the_mixture_and_keeps_each_sources_gradients(
    tilt: float,
) -> None:
    generator = MixtureBranches(**ADAMW, count=2, steps=3, tilt=tilt, upper_batch_size=4)
    found = proposed(generator)
    above = PROBLEM.upper_data["differentiate"]
    omega = THETA["logits"].softmax(0)
    source = PROBLEM.lower_data.whole["source"]
    for branch in range(2):
        key = Key(3).fold(branch)
        index = mixture_rows(
            PROBLEM.lower_data, PROBLEM.find(Sources), omega, key.fold("rows"), 7, 3
        )
        upper = above.draw(key.fold("validation"), 4, 3)
        values = on_rows(PROBLEM, upper, above)
        losses = [
            lambda x, own=own, value=value: own(x) + (tilt * value(x) if tilt else 0)
            for own, value in zip(on_rows(PROBLEM, index), values, strict=True)
        ]
        states = by_torch(PROBLEM.x0, losses, weight_decay=0.1)
        assert_same(found.at(branch), states[-1], rtol=1e-9, atol=1e-12)
        assert_same(found.losses[branch], losses[-1](states[2]), rtol=1e-9)
        counts = torch.bincount(source[index].flatten(), minlength=3).double()
        assert_same(found.aux["rows"][branch], counts)
        own = stack(
            [
                total(
                    gradients(PROBLEM, x, rows[source[rows] == number])
                    for x, rows in zip(states, index, strict=False)
                )
                for number in range(3)
            ]
        )
        aux = {name: leaf[branch] for name, leaf in found.aux.items()}
        assert_same({name: aux[f"u.{name}"] for name in own}, own, rtol=1e-9, atol=1e-12)
        if tilt:
            pairs = zip(states, upper, strict=False)
            f = total(gradients(PROBLEM, x, rows, above) for x, rows in pairs)
            slopes = {name: 4 * aux[f"f.{name}"] for name in f}
            assert_same(slopes, f, rtol=1e-9, atol=4e-12)
            mean = sum(value(x) for value, x in zip(values, states, strict=False)) / 3
            assert_same(aux["upper_loss"], mean, rtol=1e-9)
    assert ("f.w" in found.aux) == bool(tilt)
    assert found.cost.upper_gradients == (6 if tilt else 0)
    assert found.cost.rows == 2 * 3 * (7 + (4 if tilt else 0))


def test_alignments_are_those_of_running_means() -> None:
    generator = MixtureBranches(**ADAMW, count=2, steps=2, tilt=0.5, upper_batch_size=4)
    estimator = AlignedMeans(decay=0.8, eps=1e-3)
    state = estimator.init(PROBLEM)
    start = generator.init(PROBLEM, Key(0))
    u = f = rows = squares = 0.0
    for step in range(4):
        candidates = generator.propose(PROBLEM, THETA, start, Key(step))
        selection = Selection.of(torch.tensor([1.0, 0.0]))
        estimate, state = estimator.estimate(PROBLEM, THETA, candidates, selection, Key(9), state)
        start = generator.carry(start, candidates, selection.index, Key(1), PROBLEM)
        own, slope, v = (
            np.concatenate(
                [pick(candidates.aux[f"{part}.{name}"]).flatten(first) for name in PROBLEM.x0], -1
            )
            for part, pick, first in (
                ("u", lambda leaf: leaf.sum(0), 1),
                ("f", lambda leaf: leaf.sum(0), 0),
                ("v", lambda leaf: leaf[1], 0),
            )
        )
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


def aux(u: torch.Tensor, counts: list[float], f: torch.Tensor) -> Candidates:
    """One candidate with the sums of gradients of its sources, of so many rows each."""
    return Candidates(
        x={"x": torch.zeros(1, u.shape[1], dtype=F64)},
        aux={
            "u.x": u[None],
            "rows": torch.tensor([counts], dtype=F64),
            "f.x": f[None],
            "upper_loss": torch.zeros(1, dtype=F64),
        },
    )


def test_a_source_without_a_row_so_far_does_not_move() -> None:
    estimator = AlignedMeans(decay=0.5)
    problem = evolve(PROBLEM, x0={"x": torch.zeros(4, dtype=F64)})
    rows, f = normal(4, 4, seed=2).split([3, 1])
    state = estimator.init(problem)
    seen = []
    for counts in ([3.0, 0.0, 5.0], [2.0, 4.0, 0.0]):
        candidates = aux(rows * torch.tensor(counts).sign()[:, None], counts, f[0])
        estimate, state = estimator.estimate(problem, THETA, candidates, SELECTED, Key(0), state)
        seen.append(estimate.value["logits"])
    omega = THETA["logits"].softmax(0)
    lengths = torch.tensor([3.0, 1.0, 5.0], dtype=F64).sqrt() * rows.norm(dim=1) * f.norm()
    a = rows @ f[0] / lengths
    mean = (omega[0] * a[0] + omega[2] * a[2]) / (omega[0] + omega[2])
    expected = -omega * (a - mean) * torch.tensor([1.0, 0.0, 1.0])
    assert_same(seen[0], expected, rtol=1e-9, atol=1e-12)
    assert (seen[1].abs() > 1e-3).all(), "what was seen once stays seen"


def test_a_source_gains_nothing_by_having_more_rows_drawn() -> None:
    """Rows of one distribution as two sources, eight times as many of the second: a agrees,
    which a cosine does not.
    """
    estimator = AlignedMeans(decay=0.0)
    trials = 300
    problem = evolve(PROBLEM, x0={"x": torch.zeros(60, dtype=F64)})
    theta = {"logits": torch.zeros(3, dtype=F64)}
    apart = np.zeros((trials, 2))
    for trial in range(trials):
        noise = 0.3 + normal(20, 60, seed=trial)
        u = torch.stack([rows.sum(0) for rows in noise.split([2, 16, 2])])
        f = 0.3 + 0.5 * normal(60, seed=1000 + trial)
        estimate, _ = estimator.estimate(
            problem, theta, aux(u, [2.0, 16.0, 2.0], f), SELECTED, Key(0), estimator.init(problem)
        )
        h = estimate.value["logits"]
        cosines = torch.nn.functional.cosine_similarity(u, f[None])
        apart[trial] = float(3 * (h[0] - h[1])), float(cosines[1] - cosines[0])
    difference, cosine = np.abs(apart.mean(0))
    assert cosine > 0.15
    assert difference < 0.25 * cosine + 3 * apart[:, 0].std() / np.sqrt(trials)


def test_the_source_that_validation_asks_for_ends_with_most_weight() -> None:
    problem = convex_sources({"a": 1.0, "b": 0.0, "c": 0.0})
    method = Pipeline(
        generator=MixtureBranches(lr=0.05, batch_size=9, steps=2, tilt=0.5, upper_batch_size=4),
        selector=First(),
        hypergradient=AlignedMeans(),
        outer=DualAveraging(strength=30.0, prior_steps=2.0, decay=0.7),
    )
    assert weights(problem, stepped(method, problem, 20)[-1][0]["theta"])[0] > 0.8


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
