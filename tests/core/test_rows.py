"""The extension `Rows`: the lower loss is the weighted mean that it says, and stays so in problems
that are made of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import F64, normal, rejects

from hgms.adapters import as_data, from_losses, from_module
from hgms.methods.learned_start import with_learned_start
from hgms.methods.tilt import tilt_problem
from hgms.methods.validation_only import on_validation
from hgms.runs.own_problem import traits_of_problem
from hgms.tasks.cleaning import HyperCleaning
from hgms_core import ConfigError, Key, Problem, Rows, Tree


def cleaning() -> Problem:
    task = HyperCleaning(train_size=40, validation_size=20, test_size=10, hidden=3)
    return task.problem(0, torch.device("cpu"), F64)


def a_module() -> Problem:
    model = torch.nn.Linear(2, 1, dtype=F64)
    rows = {"a": normal(12, 2, seed=1)}
    return from_module(
        model, lambda model, batch: model(batch["a"]).square().squeeze(-1), rows, rows
    )


def nested() -> Problem:
    """θ and x are nested, and so are what `rows` gets of them."""

    def losses(x: Any, batch: Tree) -> torch.Tensor:
        return (batch["a"] @ x["layers"][0] - x["layers"][1]).square()

    def decay(theta: Any, x: Any, batch: Tree) -> torch.Tensor:
        return theta["more"]["decay"].exp() * x["layers"][0].square().sum()

    def lower(theta: Any, x: Any, batch: Tree) -> torch.Tensor:
        weights = theta["more"]["weights"][batch["index"]].sigmoid()
        return (weights * losses(x, batch)).mean() + decay(theta, x, batch)

    theta0 = {"more": {"weights": torch.zeros(12, dtype=F64), "decay": torch.zeros((), dtype=F64)}}
    x0 = {"layers": [normal(2, seed=2), normal(1, seed=3)[0]]}
    data = {"a": normal(12, 2, seed=1)}
    rows = Rows(leaf="more.weights", losses=losses, regulariser=decay)
    return from_losses(
        theta0=theta0,
        x0=x0,
        g=lower,
        f=lambda theta, x, batch: losses(x, batch).mean(),
        lower_data=data,
        upper_data=data,
        extensions=(rows,),
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cleaning": cleaning,
    "of-module": a_module,
    "nested": nested,
    "tilted": lambda: tilt_problem(cleaning(), 0.7),
    "tilted module": lambda: tilt_problem(a_module(), 0.7),
    "learned start": lambda: with_learned_start(nested()),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_lower_loss_is_the_weighted_mean_that_rows_say(name: str) -> None:
    problem = PROBLEMS[name]()
    weighted = problem.find(Rows)
    assert weighted is not None
    theta, x = (
        {
            name: leaf + normal(*leaf.shape, seed=7 + i)
            for i, (name, leaf) in enumerate(start.items())
        }
        for start in (problem.theta0, problem.x0)
    )
    for size in (5, None):
        batch, _ = problem.lower_data.sample(Key(4), size)
        losses = weighted.losses(x, batch)
        assert losses.shape == batch["index"].shape
        fit = (theta[weighted.leaf][batch["index"]].sigmoid() * losses).mean()
        expected = fit + weighted.regulariser(theta, x, batch)
        assert torch.isclose(problem.g(theta, x, batch), expected, rtol=1e-12)


def test_a_problem_that_weighs_no_lower_rows_says_so() -> None:
    assert on_validation(cleaning()).find(Rows) is None
    data = {"a": normal(3, seed=0)}
    own = from_module(
        torch.nn.Linear(1, 1, dtype=F64),
        lambda model, batch: model(batch["a"][:, None]).squeeze(1),
        data,
        data,
        theta0=torch.zeros((), dtype=F64),
        lower=lambda theta, model, batch: theta * model(batch["a"][:, None]).square().mean(),
    )
    assert own.find(Rows) is None
    assert {"row-weights", "per-example-losses"} <= traits_of_problem(a_module())
    assert "row-weights" not in traits_of_problem(own)


@pytest.mark.parametrize(("leaf", "size"), [("weights", 12), ("logits", 11)])
def test_rows_without_a_number_of_theta_for_each_are_refused(leaf: str, size: int) -> None:
    rows = Rows(leaf=leaf, losses=lambda x, batch: batch["a"])
    with rejects("wrong-size", "extensions", "rows", of=ConfigError):
        from_losses(
            theta0={"logits": torch.zeros(size)},
            x0={"x": torch.zeros(1)},
            g=lambda t, x, b: x["x"].sum(),
            f=lambda t, x, b: x["x"].sum(),
            lower_data=as_data({"a": torch.zeros(12)}),
            extensions=(rows,),
        )
