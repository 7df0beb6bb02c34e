"""The task many-minima: its rows, and that its minima differ in upper value exactly where labels
are ambiguous.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from hgms.tasks.minima import ManyMinima
from hgms_core import Key, Problem, Tree

CPU = torch.device("cpu")
DOUBLE = torch.float64


def explained(rows: Tree) -> torch.Tensor:
    """The share of rows that each view's signs explain; noise turns a sign now and then."""
    return ((rows["views"].prod(-1) * rows["label"][:, None]) > 0).double().mean(0)


def trained(problem: Problem, theta: Tree, starts: int, steps: int = 180) -> Tree:
    draws = [problem.fresh(Key(5).fold(i)) for i in range(starts)]  # type: ignore[misc]
    x = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    optimizer = torch.optim.Adam(list(x.values()), lr=0.05)
    slope = vmap(grad(lambda y: problem.g(theta, y, problem.lower_data.whole)))
    for _ in range(steps):
        for name, value in slope(x).items():
            x[name].grad = value
        optimizer.step()
    return x


def test_views_explain_the_rows_that_they_should() -> None:
    for ambiguous, expected in ((1.0, 1.0), (0.5, 0.75), (0.0, 0.5)):
        problem = ManyMinima(ambiguous=ambiguous, train_size=4000, noise=0.0).problem(
            3, CPU, DOUBLE
        )
        shares = explained(problem.lower_data.whole)
        assert float(shares[0]) == 1
        assert torch.allclose(shares[1:], torch.full((3,), expected, dtype=DOUBLE), atol=0.03)
        upper = problem.upper_data["differentiate"].whole
        assert float(explained(upper)[0]) == 1
        assert float(explained(upper)[1:].max()) < 0.75


def test_g_is_its_equation_and_does_not_depend_on_the_precision_of_the_draw() -> None:
    task = ManyMinima(train_size=7, hidden=3, views=2)
    problem = task.problem(1, CPU, DOUBLE)
    single = task.problem(1, CPU, torch.float32)
    theta = {"penalty": torch.tensor([-1.0, -3.0], dtype=DOUBLE)}
    x = problem.x0
    rows = problem.lower_data.whole
    total = 0.0
    for views, label in zip(rows["views"], rows["label"], strict=True):
        inside = [
            sum(x["views.weight"][h].flatten() * views.flatten()) + x["views.bias"][h]
            for h in range(3)
        ]
        score = (
            sum(x["output.weight"][h] * torch.tanh(inside[h]) for h in range(3)) + x["output.bias"]
        )
        total += float(torch.log(1 + torch.exp(-label * score))) / 7
    total += sum(
        float(theta["penalty"][j].exp() * x["views.weight"][:, j].square().sum()) for j in range(2)
    )
    total += 1e-3 * float(x["output.weight"].square().sum())
    assert float(problem.g(theta, x, rows)) == pytest.approx(total, rel=1e-12)
    assert torch.equal(single.lower_data.whole["views"], rows["views"].float())


def test_the_set_of_theta_is_a_box_or_its_diagonal() -> None:
    theta = {"penalty": torch.tensor([2.0, -20.0, -4.0, -6.0], dtype=DOUBLE)}
    free, tied = (
        ManyMinima(tied=tied).problem(0, CPU, DOUBLE).project(theta)["penalty"]
        for tied in (False, True)
    )
    assert free.tolist() == pytest.approx([0.0, -11.512925, -4.0, -6.0])
    assert tied.tolist() == pytest.approx([-7.0] * 4)


@pytest.mark.extended
def test_minima_differ_in_upper_value_where_labels_are_ambiguous_and_hardly_elsewhere() -> None:
    spread = {}
    level = {}
    accuracy = {}
    for ambiguous in (1.0, 0.0):
        problem = ManyMinima(ambiguous=ambiguous).problem(0, CPU, torch.float32)
        x = trained(problem, problem.theta0, starts=8)
        found = [
            problem.evaluate(problem.theta0, {name: leaf[i] for name, leaf in x.items()})
            for i in range(8)
        ]
        level[ambiguous] = vmap(lambda y, p=problem: p.g(p.theta0, y, p.lower_data.whole))(x).std()
        spread[ambiguous] = torch.tensor([numbers["validation_loss"] for numbers in found]).std()
        accuracy[ambiguous] = [numbers["test_accuracy"] for numbers in found]
        assert min(numbers["train_accuracy"] for numbers in found) > 0.97
    assert spread[1.0] > 20 * level[1.0]  # they fit alike, and differ on other rows
    assert spread[1.0] > 20 * spread[0.0]
    assert min(accuracy[0.0]) > 0.95 > min(accuracy[1.0]) + 0.2
    truth = problem.references["clean"]
    x = trained(ManyMinima().problem(0, CPU, torch.float32), truth, starts=2)
    for i in range(2):
        numbers = problem.evaluate(truth, {name: leaf[i] for name, leaf in x.items()})
        assert numbers["test_accuracy"] > 0.98
        assert numbers["true_share"] > 0.99
