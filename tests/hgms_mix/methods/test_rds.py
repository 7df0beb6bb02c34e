"""RDS+: turns against a loop that takes rows one by one, and representations against
transformers on each row alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import define, evolve
from support.helpers import F64, assert_same, counted, network_problem, normal, rejects
from support.source_problems import assert_goes_on, language_sources, network_sources, through
from torch import Tensor

from hgms_core import ConfigError, Data, Key, NumericalError, Problem, Tree
from hgms_mix.lm import epoch_rows
from hgms_mix.methods.rds import Rds
from hgms_mix.methods.rds.rds import first_turns


@define
class Examples:
    """Losses of rows, and their features as what they look like; how many rows were looked at."""

    losses: Any
    seen: int = 0

    def __call__(self, x: Tree, batch: Tree) -> Tensor:
        return torch.as_tensor(self.losses(x, batch))

    def representations(self, x: Tree, batch: Tree) -> Tensor:
        self.seen += len(batch["a"])
        return batch["a"] + x["b"].sum()


def with_looks(problem: Problem) -> Problem:
    assert problem.sources is not None
    return evolve(
        problem, sources=evolve(problem.sources, examples=Examples(problem.sources.examples))
    )


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
    *_, (state, row) = through(method, PROBLEM)
    shift = PROBLEM.x0["b"].sum()
    validation, pool = (
        data.whole for data in (PROBLEM.upper_data["differentiate"], PROBLEM.lower_data)
    )
    cosines = [
        [
            float(torch.nn.functional.cosine_similarity(own + shift, a + shift, dim=0))
            for a in pool["a"]
        ]
        for own in validation["a"]
    ]
    if turns == "sets":
        of = [
            [row for row, part in zip(cosines, validation["source"], strict=True) if part == number]
            for number in (0, 1)
        ]
        cosines = [[max(column) for column in zip(*rows, strict=True)] for rows in of]
    expected = taken(cosines)
    ranking = method.ranking(PROBLEM, state)
    assert ranking.argsort(descending=True).tolist() == expected
    assert state["kept"].tolist() == expected[:8]
    assert PROBLEM.sources is not None
    counts = torch.bincount(pool["source"][expected[:8]], minlength=3).to(F64)
    assert_same(PROBLEM.sources.weights(method.result(state)[0]), counts / 8, atol=1e-9)
    assert_same(method.result(state)[1], PROBLEM.x0)
    assert (row["phase"], method.untrained) == ("pool", "x is where it starts (train_steps = 0)")


@pytest.mark.parametrize("adapter", [False, True])
def test_representations_are_weighted_means_of_hidden_states(adapter: bool) -> None:
    pytest.importorskip("transformers")
    from hgms_mix.lm import Lora, SourceMixture

    task = evolve(
        SourceMixture.testing_instance(),
        adapter=Lora(rank=2, targets=("c_attn",)) if adapter else None,
    )
    problem = task.problem(0, torch.device("cpu"), F64)
    tokenizer = task.model.load_tokenizer()
    model = task.model.load(torch.device("cpu"), F64, len(tokenizer))
    assert problem.sources is not None
    examples: Any = problem.sources.examples
    batch = problem.lower_data.rows(torch.arange(problem.lower_data.size))
    vectors = examples.representations(problem.x0, batch)
    tables = task.tables(tokenizer)
    rows = [
        tables[name].row(position)[0]
        for name in task.sources
        for position in range(tables[name].size)
    ]
    assert len({len(row) for row in rows}) > 1  # so some are padded
    for tokens, vector in zip(rows, vectors, strict=True):
        with torch.no_grad():
            states = model(input_ids=tokens[None].long(), output_hidden_states=True).hidden_states[
                -1
            ][0]
        weights = torch.arange(1, len(tokens) + 1, dtype=F64)
        assert_same(vector, (weights @ states.double()) / weights.sum(), rtol=1e-5, atol=1e-5)


def test_places_are_counted_exactly_where_states_are_coarse() -> None:
    from types import SimpleNamespace

    from hgms_mix.lm.losses import Examples, Rows

    states = normal(2, 400, 3).to(torch.bfloat16)
    model: Any = SimpleNamespace(hidden=lambda x, tokens: states)
    mask = torch.zeros(2, 400, dtype=torch.bool)
    mask[0, 350:], mask[1, [20, 29]] = True, True
    examples = Examples(Rows(model, "example", torch.ones(0)), {})
    vectors = examples.representations({}, {"tokens": mask.long(), "mask": mask})
    for vector, row, length in zip(vectors, states.double(), (400, 30), strict=True):
        weights = torch.arange(1, length + 1, dtype=F64)
        assert_same(vector.double(), weights @ row[:length] / weights.sum(), rtol=1e-4, atol=1e-6)


def test_rows_of_a_language_model_that_look_like_the_validation_rows() -> None:
    problem = language_sources(2)
    *_, (state, row) = through(rds(size=6, turns="sets"), problem)
    assert problem.sources is not None
    counts = 6 * problem.sources.weights(state["theta"])
    # the one set is like the one source, and the other
    assert_same(counts, torch.tensor([3.0, 3.0], dtype=F64), atol=1e-9)
    assert row["cost_upper_values"] == 3 + 4  # 20 and 24 rows, 7 at a time


def test_copies_in_two_sources_are_taken_alike() -> None:
    whole = PROBLEM.lower_data.whole
    near = {
        name: leaf[:20].repeat(2, *[1] * (leaf.dim() - 1))
        for name, leaf in whole.items()
        if name not in ("index", "source")
    }
    pool = {**near, "source": torch.arange(2).repeat_interleave(20)}
    data = evolve(Data.of(pool), strata=(("near", 20), ("turned", 20)))
    first = []
    for seed in range(40):
        *_, (state, _) = through(rds(chunk=40, size=9), evolve(PROBLEM, lower_data=data), seed)
        first.append(int((state["kept"] < 20).sum()))
    # Nine rows take in turns, some the same: the first copy as often as the second.
    assert sum(first) == pytest.approx(40 * 4.5, abs=3 * (40 * 9) ** 0.5 / 2)


def test_training_on_the_kept_rows() -> None:
    problem, calls = counted(PROBLEM)
    method = rds(train_steps=5, size=7)
    steps = list(through(method, problem))
    kept = steps[-1][0]["kept"]
    x = {name: leaf.clone().requires_grad_() for name, leaf in PROBLEM.x0.items()}
    optimizer = torch.optim.AdamW(list(x.values()), lr=0.02, weight_decay=0.0)
    for update in range(5):
        rows = kept[epoch_rows(Key(3).fold("train"), 7, update, 3)]
        optimizer.zero_grad()
        PROBLEM.f({}, x, PROBLEM.lower_data.rows(rows)).backward()
        optimizer.step()
    assert_same(
        method.result(steps[-1][0])[1],
        {name: leaf.detach() for name, leaf in x.items()},
        rtol=1e-9,
        atol=1e-11,
    )
    assert (calls["pooled"], calls["f"], calls["g"]) == (5, 0, 0)
    row = steps[-1][1]
    # 9 and 40 rows, 7 at a time
    assert (row["cost_lower_gradients"], row["cost_upper_values"]) == (5, 2 + 6)
    assert row["cost_rows"] == 9 + 40 + 3 + 3 + 1 + 3 + 3


@pytest.mark.parametrize("options", [{"train_steps": 3}, {"turns": "sets", "chunk": 100}])
def test_a_state_read_back_goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    method = rds(**options)
    assert method.finished(assert_goes_on(method, PROBLEM))


def test_before_all_rows_are_compared() -> None:
    method = rds()
    states = [method.init(PROBLEM, 3), *(state for state, _ in through(method, PROBLEM))]
    assert PROBLEM.sources is not None
    for state in states[:-1]:
        assert bool(method.ranking(PROBLEM, state).isnan().all())
        assert_same(
            PROBLEM.sources.weights(state["theta"]), torch.full((3,), 1 / 3, dtype=F64), rtol=1e-12
        )
    assert not method.ranking(PROBLEM, states[-1]).isnan().any()


def test_bad_settings() -> None:
    with rejects("not-supported", "problem", "sources", of=ConfigError):
        rds().init(network_problem(), 0)
    with rejects("not-supported", "method", of=ConfigError):  # no representations
        rds().init(network_sources(), 0)
    with rejects("no-rows-for-role", "problem", "upper_data", "differentiate", of=ConfigError):
        rds().init(
            evolve(PROBLEM, upper_data={**PROBLEM.upper_data, "differentiate": Data.none()}), 0
        )
    with rejects("out-of-range", "method", "size", of=ConfigError):
        rds(size=41).init(PROBLEM, 0)
    for code, options in (
        ("unknown-choice", {"turns": "tasks"}),
        ("out-of-range", {"keep": 0.0}),
        ("out-of-range", {"chunk": 0}),
    ):
        with rejects(code, *options, of=ConfigError):
            Rds(**options)
    broken = evolve(PROBLEM, x0={**PROBLEM.x0, "b": PROBLEM.x0["b"] * torch.nan})
    with rejects("not-finite", "representations", of=NumericalError) as caught:
        list(through(rds(), broken))
    assert "step 1" in caught.value.message
