"""What a run reports of its own numbers: that it diverged, learned nothing, or ended worse than it
began.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from support.descent import Descent, descend, problem
from support.helpers import F64, normal, rejects
from torch import Tensor
from torch.nn.functional import softplus

from hgms.adapters import from_losses
from hgms.runs import RunFolder, run
from hgms_core import NumericalError, Problem, Tree

PENALTIES = ("v-pbgd", "g-pbgd", "scalebio", "bome", "f2sa", "meha")


def scalar(**changes: Any) -> Problem:
    """f = (x − 1.5)², x*(θ) = θ: the solution is θ = 1.5."""
    usual: dict[str, Any] = {
        "theta0": torch.tensor(1.0, dtype=F64),
        "x0": torch.tensor(0.5, dtype=F64),
        "f": lambda t, x, b: (x - 1.5) ** 2,
        "g": lambda t, x, b: 0.5 * (x - t) ** 2,
    }
    return from_losses(**(usual | changes))


def decays() -> Problem:
    """Logistic regression with a log weight decay for the useful columns and one for the others,
    whose best value is infinite.
    """
    a = normal(80, 6)
    y = torch.sign(a[:, 0] + 0.3 * a[:, 1] + 0.5 * normal(80, seed=1))

    def fit(x: Tensor, batch: Tree) -> Tensor:
        return softplus(-batch["y"] * (batch["a"] @ x)).mean()

    def lower(theta: Tensor, x: Tensor, batch: Tree) -> Tensor:
        squares = x.square()
        penalty = theta[0].exp() * squares[:3].sum() + theta[1].exp() * squares[3:].sum()
        return fit(x, batch) + 0.5 * penalty

    return from_losses(
        theta0=torch.zeros(2, dtype=F64),
        x0=torch.zeros(6, dtype=F64),
        f=lambda theta, x, batch: fit(x, batch),
        g=lower,
        lower_data={"a": a[:40], "y": y[:40]},
        upper_data={"a": a[40:], "y": y[40:]},
    )


# --- divergence


@pytest.mark.extended
@pytest.mark.parametrize(
    "method",
    [
        "bome",
        *(pytest.param(name, marks=pytest.mark.extended) for name in PENALTIES if name != "bome"),
    ],
)
def test_penalty_methods_do_not_diverge_at_their_defaults(method: str) -> None:
    result = run(method, decays(), "60 steps")
    assert result.theta[0] < -1
    assert result.theta.abs().max() < 15
    assert float(result.summary["validation_loss"]) < 0.5  # ln 2 at the start
    assert "remarks" not in result.summary


def test_a_run_that_grows_beyond_all_bounds_is_stopped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    table = {"name": "v-pbgd", "outer": {"name": "sgd", "lr": 1e4}}  # a rate for means over n rows
    with rejects("diverged", "method", of=NumericalError):
        run(table, scalar(), "20 steps", folder=folder, settings={"checkpoint_seconds": 0})
    state, step = folder.load() or ({}, -1)
    assert step == (folder.read_summary() or {})["outer_steps"] >= 1
    assert abs(float(state["theta"]["theta"])) < 1e8


BAD = torch.tensor([0.0, math.nan])


@pytest.mark.parametrize(
    ("named", "value", "code", "place"),
    [
        ("upper_loss", math.nan, "not-finite", ("upper_loss",)),
        ("hypergradient_norm", math.inf, "not-finite", ("method", "hypergradient")),
        ("update_norm", math.nan, "diverged", ("method", "outer")),
        ("finite_candidates", 0.0, "no-finite-candidate", ("method", "generator")),
        ("t", {"theta": {"t": BAD.half()}}, "diverged", ("method", "outer")),
        ("x", {"x": {"x": 1 / BAD}}, "diverged", ("method", "outer")),
    ],
)
def test_a_number_that_is_not_finite_ends_the_run_and_the_last_good_state_is_kept(
    tmp_path: Path, named: str, value: Any, code: str, place: tuple[str, ...]
) -> None:
    of_state = isinstance(value, dict)
    bad = value if of_state else {named: torch.tensor(value)}
    disturbs: Any = {"state" if of_state else "record": lambda step: bad if step == 3 else {}}
    folder = RunFolder(tmp_path / "run")
    with rejects(code, *place, of=NumericalError) as caught:
        descend(Descent(**disturbs), folder=folder)
    assert not of_state or f" {named} " in caught.value.message
    kept, step = folder.load() or ({}, -1)
    assert (step, bool(torch.isfinite(kept["x"]["x"]).all())) == (2, True)
    assert [row["step"] for row in folder.records()] == [0, 1, 2]
    summary = folder.read_summary() or {}
    assert (summary["status"], summary["error"]) == ("failed", f"{caught.value}")


def test_an_upper_loss_that_is_not_finite_at_the_end_is_no_result(tmp_path: Path) -> None:
    """Whatever the method recorded: a mean over no rows is NaN."""
    start = problem().x0["x"]
    empty = evolve(
        problem(), f=lambda t, x, b: x["x"][: len(start) * torch.equal(x["x"], start)].mean()
    )
    for method in (Descent(), Descent(record=lambda step: {"upper_loss": None})):
        with rejects("not-finite", "upper_loss", of=NumericalError):
            descend(method, steps=3, problem=empty, folder=tmp_path / str(id(method)))
        assert (RunFolder(tmp_path / str(id(method))).read_summary() or {})["status"] == "failed"


# --- learning


def test_a_leaf_without_a_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    start = torch.ones(2, dtype=F64)
    made = scalar(
        theta0={"good": start[0], "off": -200 * start},
        g=lambda t, x, b: 0.5 * (x - t["good"]) ** 2 + t["off"].float().sigmoid().sum() * x**2,
    )
    assert "remarks" not in run("uniform", made, "5 steps").summary
    with caplog.at_level(logging.WARNING):
        result = run("hg-implicit", made, "6 steps")
    assert [row.get("zero_gradient") for row in result.records] == [None, *["off"] * 6]
    (remark,) = result.summary["remarks"]
    assert "good" not in remark
    assert all("off (since step 1)" in text for text in (remark, caplog.text, str(result)))


def test_a_run_that_ends_worse_than_it_began_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = scalar(x0=torch.tensor(1.4, dtype=F64), g=lambda t, x, b: 0.5 * (x + 5 * t) ** 2)
    with caplog.at_level(logging.WARNING):
        result = run("uniform", made, "3 steps")
    (remark,) = result.summary["remarks"]
    assert "rose from 0.01 at the start to " in remark
    assert remark in caplog.text
