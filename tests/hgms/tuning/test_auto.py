"""The method ``auto`` by name: where it applies, its state, and its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hgms
from hgms.tuning.auto import Auto
from hgms_core import ConfigError, Problem, Rows, Tree

TASK = hgms.tasks.HyperCleaning(corruption=0.4, train_size=200, validation_size=90, hidden=0)


def squares(x: Tree, batch: Tree) -> Tensor:
    return (batch["a"] @ x["w"] - batch["y"]).square()


def line_problem(f: Any = None, **changes: Any) -> Problem:
    """Least squares with a weight per row; a quarter of the rows has another sign."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(90, 6, generator=draw)
    y = a.sum(1) + 0.3 * torch.randn(90, generator=draw)
    y[:60:4] = -3 * y[:60:4]

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        return (theta["logits"][batch["index"]].sigmoid() * squares(x, batch)).mean()

    arguments = {
        "theta0": {"logits": torch.zeros(60)},
        "x0": {"w": torch.zeros(6)},
        "g": g,
        "f": f or (lambda theta, x, batch: squares(x, batch).mean()),
        "lower_data": {"a": a[:60], "y": y[:60]},
        "upper_data": {"a": a[60:], "y": y[60:]},
        "extensions": (Rows(losses=squares),),
    }
    return hgms.from_losses(**{**arguments, **changes})


def run_search(problem: Problem, method: Auto) -> tuple[Any, list[Any]]:
    state = method.init(problem, 0)
    records = []
    while not method.is_finished(state):
        state, record = method.step(problem, state)
        records.append(record)
    return state, records


def test_rows_with_another_sign_get_small_weights() -> None:
    method = Auto(budget="200 steps")
    state, records = run_search(line_problem(), method)
    theta, x = method.result(state)
    weights = theta["logits"].sigmoid()
    wrong = torch.arange(60) % 4 == 0
    assert float(weights[wrong].mean()) < 0.5 * float(weights[~wrong].mean())
    torch.testing.assert_close(x["w"], torch.ones(6), atol=0.1, rtol=0)
    assert records[-1]["stage"] == "final"
    losses = [record["held_out_loss"] for record in records if "held_out_loss" in record]
    assert losses[-1] < 0.2 * losses[0]


def test_a_run_by_name_ends_before_its_budget() -> None:
    problem = TASK.problem(0, torch.device("cpu"), torch.float32)
    auto = hgms.run("auto", problem, "30 steps", seed=0)
    uniform = hgms.run("uniform", problem, "10 steps", seed=0)
    assert auto.summary["outer_steps"] < 30
    learned, equal = (problem.evaluate(result.theta, result.x) for result in (auto, uniform))
    assert learned["test_accuracy"] > equal["test_accuracy"]
    assert learned["weight_corrupted"] < learned["weight_clean"]


def test_tune_returns_the_result_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    step = Auto.step

    def watched(self: Auto, problem: Problem, state: Any, progress: float = 0.0) -> Any:
        outcome = step(self, problem, state, progress)
        states.append(outcome[0])
        return outcome

    monkeypatch.setattr(Auto, "step", watched)
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(40, 5, generator=draw)
    result = hgms.tune(
        torch.nn.Linear(5, 1),
        lambda model, batch: (model(batch["a"]) - batch["y"]).square().squeeze(1),
        {"a": a, "y": a[:, :1]},
        learn={"decay": hgms.hyper.PerInput(init=0.1)},
        budget="60 steps",
    )
    assert [state["step"] for state in states] == list(range(1, len(states) + 1))
    theta, x = states[-1]["theta"], states[-1]["x"]
    torch.testing.assert_close(theta["decay"].exp(), result.values["decay"])
    assert torch.equal(x["weight"], result.model.weight)


def of_theta(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return squares(x, batch).sum()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"extensions": ()}, "requires one weight per lower row"),
        ({"theta0": {"logits": torch.zeros(60), "b": torch.zeros(1)}}, "the leaf 'logits' of θ"),
        ({"f": of_theta}, "an upper loss that is the mean of the losses"),
        ({"upper_data": {"a": torch.ones(9, 3), "z": torch.ones(9)}, "f": of_theta}, "columns"),
    ],
)
def test_other_problems_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Auto().init(line_problem(**changes), 0)
    assert caught.value.code == "not-supported"
    assert caught.value.place == ("method",)


def test_a_misspelt_budget_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        Auto(budget="60 sheep")
    assert caught.value.place[0] == "budget"
