"""Losses are tried before the first step, and a correct problem costs no budget for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import assert_same, rejects
from support.weighted_rows import A, Y, g, h, pipeline, problem, started

from hgms.adapters import check_losses
from hgms.config import Budget
from hgms.runs import run
from hgms_core import Key, NumericalError

pytestmark = pytest.mark.plugins


def squares(theta: Any, x: Any) -> Any:
    return (x["w"] - theta["t"].sum()).square().sum()


@pytest.mark.parametrize(
    ("change", "place", "shown"),
    [
        ({"f": lambda t, x, b: x["w"].sum().log()}, ("f",), ("-inf", "log(0)")),
        (
            {
                "g": lambda t, x, b: squares(t, x) * b["late"].sum(),
                "lower_data": {"late": [1.0] * 499 + [float("nan")]},
            },
            ("lower_data", "late"),
            ("nan", "1 of 500 training rows", "row 499"),
        ),
        ({"lower_data": {"a": A, "y": Y / 0}}, ("lower_data", "y"), ("nan", "6 of 6")),
        (
            {
                "g": lambda t, x, b: squares(t, x) + ((x["w"] + 1) * b["far"].sum()).tanh().sum(),
                "lower_data": {"far": [1.0] * 300 + [float("-inf")] * 2 + [1.0] * 10},
            },
            ("lower_data", "far"),
            ("its gradient", "2 of 312 training rows", "row 300"),
        ),
        (
            {
                "f": lambda t, x, b: squares(t, x) * b["s"].mean(),
                "upper_data": {
                    "differentiate": {"s": [1.0] * 20},
                    "select": {"s": [1.0] * 20},
                    "stop": {"s": [1.0] * 19 + [float("inf")]},
                },
            },
            ("upper_data", "stop", "s"),
            ("1 of 20 validation rows", "row 19"),
        ),
        (
            {"g": lambda t, x, b: squares(t, x) + x["w"].square().sum().sqrt()},
            ("g",),
            ("g is 0 ", "its gradient", "x: w", "sqrt"),
        ),
        (
            {"f": lambda t, x, b: squares(t, x) + x["w"].square().sum().sqrt()},
            ("f",),
            ("its gradient", "x: w"),
        ),
    ],
)
def test_a_loss_that_is_no_number_at_the_start_ends_the_run_there(
    change: Any, place: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    with rejects("not-finite", *place, of=NumericalError) as caught:
        started(**change)
    assert all(part in str(caught.value) for part in shown)


def test_inside_inference_mode_a_run_is_rejected_with_the_cause() -> None:
    made = problem()
    with torch.inference_mode(), rejects("inference-mode"):
        run(pipeline(), made, Budget(outer_steps=1))


def test_a_single_validation_row_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    started()
    assert not caplog.records
    started(upper_data={"a": A[:1], "y": Y[:1]})
    assert "1 validation row" in caplog.text


def test_what_is_right_is_not_refused_and_costs_the_budget_nothing() -> None:
    seen = []

    def counted(theta: Any, x: Any, batch: Any) -> Any:
        seen.append(len(batch["index"]))
        return g(theta, x, batch)

    made = problem(g=counted, evaluate=lambda t, x: {"w": x["w"].sum(), "n": np.float64(2)})
    result = run(pipeline(), made, Budget(oracle_calls=1))
    assert result.records[0]["metric.n"] == 2.0
    assert seen[:2] == [6, 6]  # before the first step
    record = result.records[-1]
    assert len(seen) - 2 <= record["cost_lower_gradients"] + record["cost_cross_products"]
    check_losses(made, made.theta0, made.x0, Key(0))
    assert h().outcome.label == "converged"


def test_an_evaluate_that_works_in_place_changes_nothing() -> None:
    def in_place(theta: Any, x: Any) -> Any:
        x["w"].data.add_(1.0)
        return {"mean": theta["t"].sigmoid_().mean()}

    made = problem(evaluate=in_place)
    ends = [run(pipeline(), own, Budget(outer_steps=3)) for own in (made, problem())]
    assert_same(*([end.theta, end.x] for end in ends))
    assert not torch.cat([made.theta0["t"], made.x0["w"]]).any()
