"""Features of LESS on disk: the same scores again without a gradient, and never those of something
else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve
from support.helpers import assert_same, counted, rejects
from support.less_runs import PROBLEM, less, ranked
from support.source_problems import through

from hgms_core import Problem
from hgms_core.errors import CheckpointError
from hgms_mix.methods.less import GradientProjection, Less

SHORT = GradientProjection(dims=16)


def stored(folder: Path, **options: Any) -> Less:
    return less(**({"epochs": 2, "store": str(folder / "store"), "projection": SHORT} | options))


def test_scores_come_from_the_stored_features(tmp_path: Path) -> None:
    problem, calls = counted(PROBLEM)
    first = ranked(stored(tmp_path), problem)
    spent = calls["pooled"]
    plain = ranked(less(epochs=2, projection=SHORT), PROBLEM)
    assert_same(first, plain, atol=1e-3)  # half precision
    assert_same(ranked(stored(tmp_path), problem), first)
    assert calls["pooled"] - spent == spent - 2 * 6  # no pass over the pool
    features = np.load(tmp_path / "store" / "epoch-2" / "features.npy", mmap_mode="r")
    assert (features.shape, features.dtype) == ((40, 16), np.float16)


def test_an_interrupted_store_is_completed(tmp_path: Path) -> None:
    expected = ranked(stored(tmp_path / "whole"), PROBLEM)
    method = stored(tmp_path / "part")
    for state, row in through(method, PROBLEM):
        if row["phase"] == "pool" and state["at"] == 14:
            break
    again = [row for _, row in through(method, PROBLEM) if row["phase"] == "pool"]
    assert [row["lower_loss"] is None for row in again] == [True] * 2 + [False] * 10
    assert_same(ranked(method, PROBLEM), expected)


def with_another_row(method: Less) -> Problem:
    """A row that the warm-up does not see is another: only the rows themselves tell."""
    warm = set(method.init(PROBLEM, 3)["warmup"].tolist())
    y = PROBLEM.lower_data.whole["y"].clone()
    y[next(row for row in range(40) if row not in warm)] += 1
    rows = lambda index: {**PROBLEM.lower_data.rows(index), "y": y[index]}  # noqa: E731
    return evolve(PROBLEM, lower_data=evolve(PROBLEM.lower_data, rows=rows))


def test_a_store_of_something_else_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    method = stored(tmp_path, epochs=1)
    folder = tmp_path / "store" / "epoch-1"
    ranked(method, PROBLEM)
    changes: list[tuple[dict[str, Any], Problem]] = [
        ({"lr": 0.03}, PROBLEM),
        ({"eps": 1e-3}, PROBLEM),
        ({"projection": GradientProjection(dims=16, seed=1)}, PROBLEM),
        ({"projection": GradientProjection(dims=16, kind="gaussian")}, PROBLEM),
        ({}, with_another_row(method)),
    ]
    for change, problem in changes:
        with rejects("other-settings", str(folder / "manifest.json"), of=CheckpointError):
            ranked(evolve(method, **change), problem)
    features = folder / "features.npy"
    data = features.read_bytes()
    for damaged in (b"", data[:-1] + bytes([data[-1] ^ 1])):
        features.write_bytes(damaged)
        with rejects("damaged-file", str(features), of=CheckpointError):
            ranked(method, PROBLEM)


def test_an_incomplete_store_without_its_features_is_rejected(tmp_path: Path) -> None:
    method = stored(tmp_path, epochs=1)
    for state, row in through(method, PROBLEM):
        if row["phase"] == "pool" and state["at"] == 14:
            break
    features = tmp_path / "store" / "epoch-1" / "features.npy"
    features.write_bytes(b"")
    with rejects("damaged-file", str(features), of=CheckpointError):
        ranked(method, PROBLEM)
