"""The task many-minima: its rows, and that its minima differ in upper value exactly where labels
are ambiguous.
"""

from __future__ import annotations

import pytest
import torch
from support.helpers import F64
from torch.func import grad, vmap

from hgms.tasks.minima import ManyMinima
from hgms_core import Key, Problem, Tree, stack
from hgms_core.trees import take

CPU = torch.device("cpu")


def test_g_is_its_equation_and_does_not_depend_on_the_precision_of_the_draw() -> None:
    task = ManyMinima(train_size=7, hidden=3, views=2)
    problem, single = (task.problem(1, CPU, dtype) for dtype in (F64, torch.float32))
    theta = {"penalty": torch.tensor([-1.0, -3.0], dtype=F64)}
    x, rows = problem.x0, problem.lower_data.whole
    total = 1e-3 * x["output.weight"].square().sum()
    for views, label in zip(rows["views"], rows["label"], strict=True):
        inside = [(x["views.weight"][h].flatten() * views.flatten()).sum() for h in range(3)]
        hidden = torch.tanh(torch.stack(inside) + x["views.bias"])
        score = (x["output.weight"].flatten() * hidden).sum() + x["output.bias"]
        total = total + torch.log(1 + torch.exp(-label * score)) / 7
    for j in range(2):
        total = total + theta["penalty"][j].exp() * x["views.weight"][:, j].square().sum()
    assert float(problem.g(theta, x, rows)) == pytest.approx(float(total), rel=1e-12)
    assert torch.equal(single.lower_data.whole["views"], rows["views"].float())


def trained(problem: Problem, theta: Tree, starts: int) -> tuple[Tree, list[dict[str, float]]]:
    """The ends of Adam from several starts, and the metrics of each."""
    x = stack([problem.initial(Key(5).fold(i)) for i in range(starts)])
    optimizer = torch.optim.Adam(list(x.values()), lr=0.05)
    slope = vmap(grad(lambda y: problem.g(theta, y, problem.lower_data.whole)))
    for _ in range(180):
        for name, value in slope(x).items():
            x[name].grad = value
        optimizer.step()
    return x, [problem.evaluate(theta, take(x, i)) for i in range(starts)]


@pytest.mark.extended
def test_minima_differ_in_upper_value_where_labels_are_ambiguous_and_hardly_elsewhere() -> None:
    spread, accuracy = {}, {}
    for ambiguous in (0.0, 1.0):
        problem = ManyMinima(ambiguous=ambiguous).problem(0, CPU, torch.float32)
        x, found = trained(problem, problem.theta0, starts=8)
        level = vmap(lambda y, p=problem: p.g(p.theta0, y, p.lower_data.whole))(x).std()
        spread[ambiguous] = torch.tensor([numbers["validation_loss"] for numbers in found]).std()
        accuracy[ambiguous] = [numbers["test_accuracy"] for numbers in found]
        assert min(numbers["train_accuracy"] for numbers in found) > 0.97
    # they fit alike, and differ on other rows
    assert spread[1.0] > 20 * max(level, spread[0.0])
    assert min(accuracy[0.0]) > 0.95 > min(accuracy[1.0]) + 0.2
    truth = problem.references["clean"]
    for numbers in trained(ManyMinima().problem(0, CPU, torch.float32), truth, starts=2)[1]:
        assert numbers["test_accuracy"] > 0.98
        assert numbers["true_share"] > 0.99
