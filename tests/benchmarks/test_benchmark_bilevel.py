"""The comparison with benchopt's bilevel benchmark: the page is what was measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hgms.tasks.regression import LogisticCv

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "bilevel")
    return importlib.import_module("comparison")


def test_the_tables_of_the_page_are_what_the_records_make(comparison: Any) -> None:
    text = comparison.PAGE.read_text(encoding="utf-8")
    assert comparison.MARKED.findall(text)
    assert comparison.page(text) == text


def test_an_exported_problem_has_its_point_back(comparison: Any) -> None:
    task = LogisticCv(dataset="sklearn:iris", penalties="classes")
    problem = task.problem(1, torch.device("cpu"), torch.float64)
    arrays = comparison.exported(problem, 1)
    point = arrays["theta0"] + 1, arrays["x0"] + 1
    nested = comparison.nested(arrays["kind"], problem, *point)
    assert all(map(np.array_equal, point, comparison.flat(arrays["kind"], *nested)))
