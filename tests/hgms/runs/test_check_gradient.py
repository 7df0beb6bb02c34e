"""`hgms check-gradient`: the formula for the hypergradient against differences of the re-solved
lower level.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.fakes import call, json_of
from support.helpers import F64, normal, spd

from hgms.adapters import from_losses
from hgms.testing.gradient_check import check_problem
from hgms_core import Problem, Tree

A = spd(4, seed=1)
B = normal(4, 3, seed=2)
C = normal(4, seed=3)


def quadratic(**fields: Any) -> Problem:
    """g = ½xᵀAx − xᵀBθ, f = ½‖x − c‖² + sin θ₀: x* = A⁻¹Bθ."""
    usual: dict[str, Any] = {
        "theta0": {"t": normal(3, seed=4)},
        "x0": {"x": torch.zeros(4, dtype=F64)},
        "g": lambda t, x, _: 0.5 * x["x"] @ A @ x["x"] - x["x"] @ B @ t["t"],
        "f": lambda t, x, _: 0.5 * (x["x"] - C).square().sum() + torch.sin(t["t"][0]),
    }
    return from_losses(**(usual | fields))


class Exact:
    """The closed form of :func:`quadratic`; wrong by a factor in the hypergradient, or in the
    solution, if asked.
    """

    def __init__(self, factor: float = 1.0, shift: float = 0.0) -> None:
        self.factor = factor
        self.shift = shift

    def solution(self, theta: Tree) -> Tree:
        return {"x": torch.linalg.solve(A, B @ theta["t"]) + self.shift}

    def hypergradient(self, theta: Tree) -> Tree:
        direct = torch.zeros(3, dtype=F64)
        direct[0] = torch.cos(theta["t"][0])
        return {
            "t": self.factor * (direct + B.T @ torch.linalg.solve(A, self.solution(theta)["x"] - C))
        }


def test_the_formula_agrees_with_differences_of_the_re_solved_lower_level() -> None:
    report = check_problem(quadratic(), points=2)
    assert report.agrees
    assert [(row.point, row.direction) for row in report.rows] == [
        (p, f"θ[{i}]") for p in range(2) for i in range(3)
    ]
    assert max(row.error for row in report.rows) < 1e-8
    expected = Exact().hypergradient(quadratic().theta0)["t"]
    assert [row.hypergradient for row in report.rows[:3]] == pytest.approx(
        expected.tolist(), rel=1e-9
    )
    assert "closed form ok" in check_problem(quadratic(), Exact(), points=1).notes[0]


def test_a_wrong_hypergradient_is_a_mismatch() -> None:
    report = check_problem(quadratic(), Exact(factor=1.001), points=1)
    assert not report.agrees
    assert "relative error 1.0e-03" in report.notes[0]

    # of θ₀ as it is, with a derivative that is 10 % too large
    wrong = quadratic(
        f=lambda t, x, _: (
            0.5 * (x["x"] - C).square().sum()
            + torch.sin(1.1 * t["t"][0] - 0.1 * t["t"][0].detach())
        )
    )
    report = check_problem(wrong, points=1)
    assert not report.agrees
    assert [row.verdict for row in report.rows] == ["MISMATCH", "ok", "ok"]
    shifted = check_problem(quadratic(), Exact(shift=0.1), points=1)
    assert shifted.verdict == "nothing could be checked", "it does not solve the lower level"


@pytest.mark.parametrize(
    ("g", "reason"),
    [
        (lambda t, x, _: 0.5 * (x["x"][:2] - t["t"][:2]).square().sum(), "2 flat directions of 4"),
        (
            lambda t, x, _: (x["x"] - t["t"][0]).abs().sum() + 0.5 * x["x"].square().sum(),
            "was not solved",
        ),
        (
            lambda t, x, _: (
                x["x"][0] ** 2 - x["x"][1] ** 2 + x["x"][1] ** 4 + x["x"][2:].square().sum()
            ),
            "saddle",
        ),
    ],
)
def test_what_cannot_be_compared_is_said(g: Any, reason: str) -> None:
    assert reason in check_problem(quadratic(g=g, theta0={"t": 0.3 * A[0, :3]}), points=1).notes[0]


def test_a_lower_level_with_many_minimisers_is_checked_where_the_best_one_is_known() -> None:
    report = json_of("check-gradient", "sphere", "--points", "2")
    assert (report["agrees"], len(report["rows"])) == (True, 6)
    assert max(row["error"] for row in report["rows"]) < 1e-6


@pytest.mark.parametrize(("tolerance", "code"), [("1e-4", 0), ("1e-300", 1)])
def test_the_table_has_the_rows_of_the_report_and_the_exit_code_its_verdict(
    tolerance: str, code: int
) -> None:
    words = ("check-gradient", "sphere", "--points", "2", "--directions", "1")
    words += ("--tolerance", tolerance)
    done = call(*words)
    report = json.loads(call(*words, "--json").stdout)
    assert done.exit_code == code
    assert report["agrees"] == (code == 0)
    lines = done.stdout.splitlines()
    assert lines[-1] == report["verdict"]
    for row in report["rows"]:
        numbers = f"{row['hypergradient']:.9g}", f"{row['difference']:.9g}"
        assert any(all(part in line for part in numbers) for line in lines)


@pytest.mark.parametrize("assignment", ["budget=3", "method.outer.lr=1"])
def test_a_setting_that_is_not_of_the_task_is_refused(assignment: str) -> None:
    done = call("check-gradient", "sphere", "--set", assignment)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"--set {assignment}" in done.stderr
