"""Source reweighting as a task: losses without bias, priors, methods by name, what is recorded."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, rejects
from support.language_models import CPU, SMALL, problem_of, task_of, text_files
from torch import Tensor

import hgms_mix.lm.task
from hgms.config import Budget
from hgms.runs import RunConfig, run
from hgms_core import ConfigError, Key, Problem, Sources
from hgms_mix.lm import Lora, Source
from hgms_mix.lm.store import warn

pytest.importorskip("transformers")
pytest.importorskip("peft")

CLOSE = {"rtol": 1e-7, "atol": 1e-7}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    return text_files(tmp_path_factory.mktemp("texts"))


def by_hand(problem: Problem, average: str) -> Tensor:
    """g on all rows, from the mean loss of each row."""
    batch = problem.lower_data.batch(None)
    tokens = batch["mask"][:, 1:].sum(1).double()
    rows = problem.find(Sources).examples(problem.x0, batch)
    of = [batch["source"] == number for number in range(len(problem.find(Sources).names))]
    mean = torch.stack([tokens[own].mean() for own in of]).mean()
    means = {
        "example": [rows[own].mean() for own in of],
        "token": [(rows * tokens)[own].sum() / tokens[own].sum() for own in of],
        "all-tokens": [(rows * tokens)[own].mean() / mean for own in of],
    }
    return problem.find(Sources).weights(problem.theta0) @ torch.stack(means[average])


@pytest.mark.parametrize(
    ("average", "sizes"),
    [
        ("example", (5, 2)),
        ("all-tokens", (4,)),
        pytest.param("token", (4,), marks=pytest.mark.extended),
    ],
)
def test_the_mixture_loss_has_no_bias(
    files: dict[str, Source], average: str, sizes: tuple[int, ...]
) -> None:
    """The mean of g over batches is g over all rows, with batches that hold every source and
    with ones that do not.
    """
    problem = problem_of(files, adapter=Lora(rank=2), average=average)
    data = problem.lower_data
    whole = by_hand(problem, average)
    assert_same(problem.g(problem.theta0, problem.x0, data.batch(None)), whole, **CLOSE)
    for size in sizes:
        batches = map(data.batch, data.draw(Key(size), size, 60))
        with torch.no_grad():
            draws = [problem.g(problem.theta0, problem.x0, batch) for batch in batches]
        assert abs(np.mean(draws) - whole) < 4 * np.std(draws, ddof=1) / 60**0.5


@pytest.mark.parametrize(
    ("prior", "expected"),
    [("uniform", [1, 1, 1]), ("size", [16, 10, 5]), ({"sums": 3.0, "words": 1.0}, [3, 0, 1])],
)
def test_a_prior_is_where_the_weights_begin(
    files: dict[str, Source], prior: Any, expected: list[float]
) -> None:
    problem = task_of(files, prior=prior, cache=4).problem(0, CPU, F64)
    shares = torch.tensor(expected, dtype=F64)
    omega = problem.find(Sources).weights(problem.theta0)
    assert_same(omega, shares / shares.sum(), atol=1e-12, rtol=1e-6)


def test_a_given_mixture_is_by_name(files: dict[str, Source]) -> None:
    sources = task_of(files).problem(0, CPU, F64).find(Sources)
    omega = sources.weights(sources.theta({"words": 3, "sums": 1}))
    assert omega.tolist() == pytest.approx([0.25, 0, 0.75])
    with rejects("unknown-source", "mixture", "word", of=ConfigError):
        sources.theta({"word": 1})


def test_metrics_are_of_the_test_set_and_the_reference_and_every_table_is_made_once(
    files: dict[str, Source], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=hgms_mix.lm.task.token_table)
    monkeypatch.setattr(hgms_mix.lm.task, "token_table", made)
    built = task_of(
        files,
        test={"sums": evolve(files["sums"], skip=10, rows=6)},
        reference={"sums": 1.0},
        validation_split=(0.5, 0.25, 0.25),
    )
    warn.cache_clear()
    problem = built.problem(0, CPU, F64)
    assert made.call_count == 3 + 1 + 1
    built.problem(0, CPU, F64)
    (text,) = caplog.messages  # once, however often the problem is built
    assert "6 of 6 (100.0%)" in text
    results = problem.evaluate({"logits": torch.zeros(3, dtype=F64)}, problem.x0)
    assert set(results) == set(built.metrics)
    assert results["recovery_error"] == pytest.approx(4 / 3)
    assert results["test_loss"] == pytest.approx(5.5, abs=0.3)  # log 259: nothing is learned yet


@pytest.mark.parametrize(
    ("method", "moves"),
    [
        ("hg-ms", True),
        ("hg-ms-mixture", True),
        *(
            pytest.param(name, moves, marks=pytest.mark.extended)
            for name, moves in (("scalebio", True), ("uniform", False))
        ),
        ({"name": "fixed", "mixture": {"sums": 3.0, "words": 1.0}}, False),
    ],
)
def test_every_method_by_its_name(files: dict[str, Source], method: Any, moves: bool) -> None:
    task = {
        "name": "source-mixture",
        "sources": {name: {"path": source.path} for name, source in files.items()},
        "validation": {"sums": {"path": files["sums"].path}},
        "model": {"config": {"model_type": "gpt2", **SMALL["gpt2"]}, "tokenizer": "bytes"},
        "adapter": {"rank": 2},
        "template": "plain",
    }
    config = RunConfig.from_dict({"task": task, "method": method, "budget": "2 steps"})
    problem = config.task.problem(0, CPU, torch.float32)
    records = run(config.method, problem, Budget(outer_steps=2)).records
    first, *_, last = ([float(row[f"weight.{name}"]) for name in files] for row in records)
    assert (first != last) == moves
    expected = [0.75, 0.0, 0.25] if isinstance(method, dict) else last
    assert (sum(last), last) == (pytest.approx(1), pytest.approx(expected))
    assert records[-1]["step_forward_tokens"] >= records[-1]["step_backward_tokens"] > 0


def test_rows_by_number_are_of_the_sources_that_are_named(files: dict[str, Source]) -> None:
    """Without those that are too long."""
    task = task_of(files, max_length=9)
    tokenizer = task.model.load_tokenizer()
    assert task.tables_at(tokenizer, "sources", {"sums": torch.arange(4)}) == {}


def test_a_mixture_is_of_two_sources_and_a_base_in_parts_has_an_adapter(
    files: dict[str, Source],
) -> None:
    task = task_of(files)
    with rejects("wrong-length", "sources", of=ConfigError):
        evolve(task, sources={"sums": files["sums"]})
    with rejects("missing-option", "adapter", of=ConfigError):
        evolve(task, adapter=None, model=evolve(task.model, shard=True))
