"""Random rows: how often each row comes, and that x is AdamW on those very rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, assert_same, counted
from support.source_files import source_of
from support.source_problems import assert_shares, by_torch, network_sources, on_rows, stepped

from hgms_core import Key
from hgms_mix.lm import prior_shares
from hgms_mix.methods.random_rows import RandomRows
from hgms_mix.methods.random_rows.random_rows import draw_rows

PROBLEM = network_sources()


def random_rows(**options: Any) -> RandomRows:
    return RandomRows(**({"lr": 0.02, "batch_size": 6} | options))


def test_every_row_comes_equally_often() -> None:
    assert prior_shares(PROBLEM, "rows") == {"near": 0.5, "turned": 0.3, "noise": 0.2}
    counts = torch.bincount(draw_rows(PROBLEM, Key(0), 80_000), minlength=40)
    # 2,000 each; the deviation of such a count is 44.
    assert (len(counts), int((counts - 2000).abs().max()) < 200) == (40, True)


def test_sizes_are_those_of_the_files_where_fewer_rows_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hgms_mix.lm import SourceMixture

    sizes = {"many": 18, "few": 6}
    sources = {
        name: source_of(tmp_path / f"{name}.jsonl", [(f"{i} {name}", str(i)) for i in range(size)])
        for name, size in sizes.items()
    }
    task = evolve(SourceMixture.testing_instance(), sources=sources, cache=5, reference=None)
    problem = task.problem(0, torch.device("cpu"), F64)
    assert dict(problem.lower_data.strata or ()) == {"many": 5, "few": 5}
    method = random_rows(train_steps=2)
    state, row = stepped(method, problem, 2)[-1]
    assert_shares(problem, method, state, [3, 1])
    counts = torch.bincount(draw_rows(problem, Key(1), 20_000), minlength=10)
    assert int((counts[:5] - 3000).abs().max()) < 300
    assert int((counts[5:] - 1000).abs().max()) < 200
    assert (method.is_finished(state), row["cost_rows"]) == (True, 12)


def test_x_is_adamw_on_the_rows_drawn() -> None:
    method = random_rows(updates=2, train_steps=5, weight_decay=0.1)
    problem, calls = counted(PROBLEM)
    state, row = stepped(method, problem, 3)[-1]
    assert method.is_finished(state)
    rows = [draw_rows(PROBLEM, Key(3).fold("rows", update), 6) for update in range(5)]
    x = by_torch(PROBLEM.x0, on_rows(PROBLEM, rows), weight_decay=0.1)[-1]
    assert_same(method.result(state)[1], x, rtol=1e-9, atol=1e-12)
    assert_shares(PROBLEM, method, state, [5, 3, 2])
    assert (
        (row["cost_lower_gradients"], row["cost_rows"])
        == (5, 30)
        == (calls["pooled"], calls["pooled_rows"])
    )
