"""RDS+: turns against a loop that takes rows one by one, and representations against
transformers on each row alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, normal
from support.source_problems import assert_shares, network_sources, through, with_looks

from hgms_core import Sources
from hgms_mix.methods.rds import Rds
from hgms_mix.methods.rds.rds import first_turns

PROBLEM = with_looks(network_sources())


def rds(**options: Any) -> Rds:
    return Rds(**({"chunk": 7, "keep": 0.2, "lr": 0.02, "batch_size": 3} | options))


def taken(likeness: list[list[float]]) -> list[int]:
    """Rows in the order in which takers take them, one after the other, each what it likes best
    of what it has not taken.
    """
    order: list[int] = []
    left = [sorted(range(len(likes)), key=lambda row: -likes[row]) for likes in likeness]
    while any(left):
        for rows in left:
            row = rows.pop(0)
            if row not in order:
                order.append(row)
    return order


@pytest.mark.parametrize("shape", [(1, 6), (3, 8), (7, 5), (4, 1)])
def test_turns_are_those_of_taking_one_by_one(shape: tuple[int, int]) -> None:
    for seed in range(10):
        likeness = normal(*shape, seed=seed)
        turns = first_turns(likeness)
        assert turns.argsort().tolist() == taken(likeness.tolist())
        assert len(turns.unique()) == shape[1]


@pytest.mark.parametrize("turns", ["rows", "sets"])
def test_rows_are_ranked_by_turns_of_validation_rows_or_sets(turns: str) -> None:
    method = rds(turns=turns)
    *_, (state, _) = through(method, PROBLEM)
    shift = PROBLEM.x0["b"].sum()
    validation = PROBLEM.upper_data["differentiate"].whole
    pool = PROBLEM.lower_data.whole
    cosines = torch.nn.functional.cosine_similarity(
        validation["a"][:, None] + shift, pool["a"][None] + shift, dim=-1
    )
    if turns == "sets":
        cosines = torch.stack([cosines[validation["source"] == part].amax(0) for part in (0, 1)])
    expected = taken(cosines.tolist())
    ranking = method.ranking(PROBLEM, state)
    assert ranking.argsort(descending=True).tolist() == expected
    assert state["kept"].tolist() == expected[:8]
    assert_shares(PROBLEM, method, state, torch.bincount(pool["source"][expected[:8]]))
    assert_same(method.result(state)[1], PROBLEM.x0)


@pytest.mark.parametrize("adapter", [False, True])
def test_representations_are_weighted_means_of_hidden_states(adapter: bool) -> None:
    pytest.importorskip("transformers")
    from hgms_mix.lm import Lora, SourceMixture

    lora = Lora(rank=2, targets=("c_attn",)) if adapter else None
    task = evolve(SourceMixture.testing_instance(), adapter=lora)
    problem = task.problem(0, torch.device("cpu"), F64)
    tokenizer = task.model.load_tokenizer()
    model = task.model.load(torch.device("cpu"), F64, len(tokenizer))
    examples: Any = problem.find(Sources).examples
    vectors = examples.representations(problem.x0, problem.lower_data.batch(None))
    tables = task.tables(tokenizer)
    rows = [
        tables[name].row(position)[0]
        for name in task.sources
        for position in range(tables[name].size)
    ]
    assert len({len(row) for row in rows}) > 1  # so some are padded
    for tokens, vector in zip(rows, vectors, strict=True):
        with torch.no_grad():
            states = model(input_ids=tokens[None].long(), output_hidden_states=True).hidden_states
        weights = torch.arange(1, len(tokens) + 1, dtype=F64)
        expected = (weights @ states[-1][0].double()) / weights.sum()
        assert_same(vector, expected, rtol=1e-5, atol=1e-5)
