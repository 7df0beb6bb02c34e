"""The table of MLS-Bench's protocol: which step counts, and which published figure stands beside it."""

from __future__ import annotations

import doctest
import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.plugins

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "mls" / "table.py"


def test_the_best_step_by_test_accuracy_and_the_verdict() -> None:
    spec = importlib.util.spec_from_file_location("mls_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    found = doctest.testmod(table)
    assert found.attempted == 2
    assert not found.failed
    figures = table.published()
    assert {(task, method) for task in ("mls-linear", "mls-mlp") for method in ("v-pbgd", "g-pbgd")} <= set(figures)
    assert figures["mls-linear", "v-pbgd"].count == 3
    assert figures["mls-linear", "v-pbgd"].mean == pytest.approx(90.10, abs=0.005)
