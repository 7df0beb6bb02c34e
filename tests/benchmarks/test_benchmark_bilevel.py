"""The comparison with benchopt's bilevel benchmark: the page is what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hgms.tasks.regression import LogisticCv

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "bilevel")
    import compared

    return compared


def test_the_tables_of_the_page_are_what_the_records_make(compared: Any) -> None:
    text = compared.PAGE.read_text(encoding="utf-8")
    assert compared.MARKED.findall(text)
    assert compared.page(text) == text


def test_an_exported_problem_has_its_point_back(compared: Any) -> None:
    task = LogisticCv(dataset="sklearn:iris", penalties="classes")
    problem = task.problem(1, torch.device("cpu"), torch.float64)
    arrays = compared.exported(problem, 1)
    point = arrays["theta0"] + 1, arrays["x0"] + 1
    nested = compared.nested(arrays["kind"], problem, *point)
    assert all(map(np.array_equal, point, compared.flat(arrays["kind"], *nested)))
