"""RHO-LOSS by hand on four rows, against its definition on a network, and that the reference
sees no row it should not.
"""

from __future__ import annotations

from typing import Any

import torch
from support.helpers import F64, assert_same
from support.source_problems import (
    assert_shares,
    by_torch,
    network_sources,
    on_rows,
    through,
    watched,
)
from torch import Tensor

from hgms_core import Data, Sources, Tree
from hgms_mix.methods.rho_loss import Reference, RhoLoss

PROBLEM = network_sources()
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rho(**options: Any) -> RhoLoss:
    settings = {
        "reference": Reference(rows="validation", epochs=3, lr=0.02),
        "lr": 0.02,
        "batch_size": 4,
        "chunk": 7,
        "keep": 0.2,
        "target_steps": 0,
    }
    return RhoLoss(**(settings | options))


def losses(x: Tree, data: Data = PROBLEM.lower_data) -> Tensor:
    rows = [data.rows(torch.tensor([row])) for row in range(data.size)]
    return torch.stack([PROBLEM.find(Sources).examples(x, row)[0] for row in rows])


def trained(batches: list[Tensor], data: Data = PROBLEM.lower_data) -> list[Tree]:
    return by_torch(PROBLEM.x0, on_rows(PROBLEM, batches, data), weight_decay=0.01)


def best(states: list[Tree]) -> Tree:
    """With the lowest held-out loss."""
    return min(states, key=lambda x: float(losses(x, PROBLEM.upper_data["stop"]).mean()))


def test_scores_are_the_difference_of_two_models_losses() -> None:
    problem, seen = watched(PROBLEM)
    method = rho(target_steps=6)
    *_, (state, _) = through(method, problem)
    batches = seen["differentiate"]
    assert [len(batch) for batch in batches] == [4, 4, 1] * 3
    reference = best(trained(batches, PROBLEM.upper_data["differentiate"])[::3])
    target = trained([batch for batch in seen["pool"] if len(batch) == 4])
    assert len(target) == 1 + 6
    expected = losses(target[-1]) - losses(reference)
    assert_same(method.ranking(PROBLEM, state), expected, **CLOSE)
    assert_same(method.result(state)[1], target[-1], **CLOSE)
    assert sorted(expected[state["kept"]].tolist()) == sorted(expected.tolist())[-8:]
    assert seen["select"] == []


def test_by_default_a_reference_of_one_half_scores_the_other_at_a_trained_x() -> None:
    problem, seen = watched(PROBLEM)
    method = RhoLoss(
        reference=Reference(epochs=2, lr=0.02), lr=0.02, batch_size=4, chunk=7, keep=0.2
    )
    *_, (state, row) = through(method, problem)
    halves = torch.tensor_split(state["order"], 2)
    assert sorted(torch.cat(halves).tolist()) == list(range(40))
    # Two halves of 20 rows, two epochs of five updates each; then ten updates of x: a pass over the
    # pool.
    updates = [batch for batch in seen["pool"] if len(batch) == 4]
    assert len(updates) == 2 * 10 + 10
    expected = torch.full((40,), torch.nan, dtype=F64)
    for number, (own, other) in enumerate((halves, halves[::-1])):
        batches = updates[10 * number : 10 * number + 10]
        for epoch in (batches[:5], batches[5:]):
            assert sorted(torch.cat(epoch).tolist()) == sorted(own.tolist())
        expected[other] = losses(best(trained(batches)[::5]))[other]
    assert sorted(torch.cat(updates[20:]).tolist()) == list(range(40))
    target = trained(updates[20:])[-1]
    assert_same(method.ranking(PROBLEM, state), losses(target) - expected, **CLOSE)
    assert_same(method.result(state)[1], target, **CLOSE)
    assert (seen["differentiate"], seen["select"]) == ([], [])
    assert (row["cost_lower_gradients"], row["cost_upper_gradients"]) == (30, 0)


def test_online_updates_are_those_of_the_definition() -> None:
    problem, seen = watched(PROBLEM)
    method = rho(mode="online", big_batch=10, top=0.3, train_steps=5)
    rows = [(state, row) for state, row in through(method, problem) if row["phase"] == "online"]
    assert rows[1][1]["cost_rows"] - rows[0][1]["cost_rows"] == 10 + 3
    # chunks of 7 + 3 rows, then the 3 that are used
    reads = seen["pool"][-3 * len(rows) :]
    used = reads[2::3]
    drawn = [torch.cat(pair) for pair in zip(reads[::3], reads[1::3], strict=True)]
    states = trained(used)
    for at, (state, _) in enumerate(rows):
        scores = (losses(states[at]) - state["irreducible"])[drawn[at]]
        highest = drawn[at][scores.argsort(descending=True)[:3]]
        assert sorted(used[at].tolist()) == sorted(highest.tolist())
        assert_same(method.ranking(PROBLEM, state)[drawn[at]], scores, **CLOSE)
        assert_same(method.result(state)[1], states[at + 1], **CLOSE)
    assert sorted(torch.cat(drawn[:4]).tolist()) == list(range(40))  # an epoch of big batches
    sources = PROBLEM.lower_data.whole["source"][torch.cat(used)]
    assert_shares(PROBLEM, method, rows[-1][0], torch.bincount(sources, minlength=3))
