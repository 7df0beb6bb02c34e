"""θ and x in any shape: the losses see the shape that was given, results come back in it, and
everything inside is flat.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from support.helpers import F64, assert_same, normal, rejects
from torch import Tensor, nn

from hgms.adapters import Shape, as_data, from_losses, hypergradient
from hgms.config import Budget
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.integrations.lower_solution import lower_solution
from hgms.optim import SGD
from hgms.outer import Sgd
from hgms.runs import run
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import ConfigError, Pipeline, Problem

pytestmark = pytest.mark.plugins

A = normal(3, 3, seed=5) + 3 * torch.eye(3, dtype=F64)
DIAGONAL = torch.tensor([1.0, 2.0, 4.0], dtype=F64)


class Layer(NamedTuple):
    weight: Any
    bias: Any


SHAPES: list[tuple[Any, list[str]]] = [
    (normal(3), ["v"]),
    ({"a": normal(3)}, ["a"]),
    ([normal(3)], ["0"]),
    ((normal(2), [normal(1, seed=2)]), ["0", "1.0"]),
    ({"net": {"w": normal(2), "b": normal(1, seed=2)}}, ["net.w", "net.b"]),
    (Layer(normal(2), {"in": normal(1, seed=2)}), ["weight", "bias.in"]),
    ({0: normal(2), "z": (normal(1, seed=2), [], {})}, ["0", "z.0"]),
    (OrderedDict([("b", normal(1)), ("a", normal(2, seed=2))]), ["b", "a"]),
]


def leaves(value: Any) -> list[Tensor]:
    return list(Shape.of(value, "it", "v")[1].values())


def flat(value: Any) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves(value)])


@pytest.mark.parametrize(("value", "names"), SHAPES)
def test_a_shape_is_kept_whole(value: Any, names: list[str]) -> None:
    shape, tree = Shape.of(value, "it", "v")
    assert list(tree) == names
    back = shape.restore(tree)
    assert Shape.of(back, "it", "v")[0] == shape
    assert type(back) in (type(value), dict)
    assert all(a is b for a, b in zip(leaves(back), leaves(value), strict=True))
    assert list(shape.flatten(back, "it")) == names
    assert shape.flat == (
        isinstance(value, dict) and all(isinstance(leaf, Tensor) for leaf in value.values())
    )


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_a_hypergradient_and_a_lower_solution_have_the_shape_of_their_argument(number: int) -> None:
    # g = ½xᵀDx − xᵀAθ, so x*(θ) = D⁻¹Aθ; f = ½‖x‖² gives F'(θ) = AᵀD⁻²Aθ.
    theta = SHAPES[number - 1][0]
    like, names = SHAPES[number]
    shape = Shape.of(like, "x", "v")[0]
    start = DIAGONAL**-1 * (A @ flat(theta))
    sizes = [leaf.numel() for leaf in leaves(like)]
    x = shape.restore(dict(zip(names, torch.split(start, sizes), strict=True)))

    def f(t: Any, at: Any) -> Tensor:
        return 0.5 * flat(at).square().sum()

    def g(t: Any, at: Any) -> Tensor:
        assert Shape.of(t, "θ", "v")[0] == Shape.of(theta, "θ", "v")[0]
        assert Shape.of(at, "x", "v")[0] == shape
        return 0.5 * (DIAGONAL * flat(at).square()).sum() - flat(at) @ (A @ flat(t))

    found = hypergradient(f, g, theta, x, solver=CG(rtol=1e-12))
    expected = A.T @ (DIAGONAL**-2 * (A @ flat(theta)))
    assert Shape.of(found.value, "h", "v")[0] == Shape.of(theta, "θ", "v")[0]
    assert_same(flat(found.value), expected, rtol=1e-9)
    live = copy.deepcopy(theta)
    for leaf in leaves(live):
        leaf.requires_grad_()
    node = lower_solution(g, live, x, solver=CG(rtol=1e-12))
    assert Shape.of(node, "x", "v")[0] == shape
    slopes = torch.autograd.grad(f(live, node), leaves(live))
    assert_same(torch.cat(slopes), expected, rtol=1e-9)


class Half(NamedTuple):
    w: Any


def own_lower(theta: Tensor, x: Any, batch: Any) -> Tensor:
    return 0.5 * ((x["net"][0] - theta).square().sum() + (x["net"][1].w - theta).square().sum())


def own_upper(theta: Tensor, x: Any, batch: Any) -> Tensor:
    return 0.5 * (x["net"][0] - batch["t"].mean()).square().sum() + 0.05 * theta.square().sum()


def nested_problem(**changes: Any) -> Problem:
    """θ is a tensor, x a dictionary with a list in it; the minimiser is x = θ in both halves."""
    zeros = torch.zeros(2, dtype=F64)
    rows = as_data({"t": torch.full((4,), 3.0, dtype=F64)})
    parts: dict[str, Any] = {
        "theta0": torch.ones(2, dtype=F64),
        "x0": {"net": [zeros, Half(zeros)]},
        "g": own_lower,
        "f": own_upper,
        "upper_data": dict.fromkeys(("differentiate", "select", "stop"), rows),
        "project": lambda theta: theta.clamp(max=2.5),
        "evaluate": lambda theta, x: {"theta": float(theta.sum()), "w": float(x["net"][1].w.sum())},
        "fresh": lambda key: {"net": [torch.ones(2, dtype=F64), Half(zeros)]},
        "references": {"right": torch.full((2,), 2.0, dtype=F64)},
    }
    return from_losses(**{**parts, **changes})


METHOD = Pipeline(
    generator=Branches(count=2, steps=60, optimizer=SGD(lr=0.3)),
    selector=BestOfN(),
    hypergradient=Implicit(solver=CG()),
    outer=Sgd(lr=0.5),
)


def test_a_problem_is_flat_inside_and_nested_outside() -> None:
    problem = nested_problem()
    names = ["net.0", "net.1.w"]
    assert [list(tree) for tree in (problem.theta0, problem.x0)] == [["theta"], names]
    assert list(problem.fresh(None)) == names  # type: ignore[misc, arg-type]
    assert_same(problem.references["right"]["theta"], torch.full((2,), 2.0, dtype=F64))
    assert problem.project({"theta": torch.full((2,), 9.0)})["theta"].tolist() == [2.5, 2.5]
    result = run(METHOD, problem, Budget(outer_steps=12))
    assert result.theta.tolist() == pytest.approx([2.5, 2.5])  # 3/1.1 = 2.73 is outside Θ
    assert isinstance(result.x["net"][1], Half)
    metrics = [result.records[-1][f"metric.{name}"] for name in ("theta", "w")]
    assert metrics == pytest.approx([5.0, 5.0], rel=1e-5)
    state = METHOD.init(problem, 0)
    assert list(METHOD.step(problem, state)[0]["x"]) == names


def test_a_nested_problem_computes_what_the_flat_one_does() -> None:
    def inside(x: Any) -> Any:
        return {"net": [x["net.0"], Half(x["net.1.w"])]}

    nested = nested_problem(fresh=None)
    plain = from_losses(
        theta0=nested.theta0,
        x0=nested.x0,
        upper_data=nested.upper_data,
        g=lambda t, x, b: own_lower(t["theta"], inside(x), b),
        f=lambda t, x, b: own_upper(t["theta"], inside(x), b),
        project=lambda t: {"theta": t["theta"].clamp(max=2.5)},
    )
    assert_same(*(METHOD.step(made, METHOD.init(made, 3))[0] for made in (nested, plain)))


def test_a_flat_problem_keeps_its_own_functions() -> None:
    g = lambda t, x, _: (x["x"] - t["t"]).square().sum()  # noqa: E731
    theta0 = {"t": 2 * torch.zeros(1, requires_grad=True)}
    problem = from_losses(theta0=theta0, x0={"x": torch.zeros(1)}, g=g, f=g)
    assert not problem.theta0["t"].requires_grad  # the graph that it came with is not kept
    assert problem.g is g
    assert problem.restore(problem.theta0, problem.x0) == (problem.theta0, problem.x0)


def test_a_hypergradient_shows_its_value_its_outcome_and_its_cost() -> None:
    found = hypergradient(
        lambda theta, x: own_upper(theta, x, {"t": torch.full((4,), 3.0, dtype=F64)}),
        lambda theta, x: own_lower(theta, x, {}),
        torch.ones(2, dtype=F64),
        {"net": [torch.ones(2, dtype=F64), Half(torch.ones(2, dtype=F64))]},
        solver=CG(),
    )
    lines = dict(found._rows())
    assert {"value", "outcome", "residual", "cost"} <= set(lines)
    assert str(found.cost.calls) in lines["cost"]
    assert all(value in repr(found) for value in lines.values())


# x0, then the code and the place of the error, and values that it shows
WRONG: list[tuple[Any, ...]] = [
    ({"a": 3}, "wrong-type", ("x0", "a"), "torch.as_tensor"),
    ([1.0, 2.0], "wrong-type", ("x0", "0"), "torch.as_tensor"),
    ({"a": {"b": None}}, "wrong-type", ("x0", "a", "b"), "None"),
    (None, "wrong-type", ("x0",), "None"),
    ({"a": normal(2).numpy()}, "wrong-type", ("x0", "a"), "ndarray", "torch.as_tensor"),
    ({"a": torch.arange(3)}, "wrong-dtype", ("x0", "a"), "int64", ".float()"),
    ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "duplicate-name", ("x0", "a.b")),
    (nn.Linear(1, 1), "wrong-type", ("x0",), "Linear", "trainable(module)", "from_module"),
    (nn.Linear(1, 1).parameters(), "wrong-type", ("x0",), "generator", "trainable(module)"),
    ({"net": nn.Linear(1, 1)}, "wrong-type", ("x0", "net"), "Linear"),
    ("weights", "wrong-type", ("x0",), "a str"),
]


@pytest.mark.parametrize("row", WRONG, ids=[f"{code} {place}" for _, code, place, *_ in WRONG])
def test_what_is_no_tree_of_floating_tensors_is_refused(row: tuple[Any, ...]) -> None:
    x0, code, place, *shown = row
    with rejects(code, *place, of=ConfigError) as caught:
        nested_problem(x0=x0)
    assert all(part in str(caught.value) for part in shown)
    with rejects(code, "x", *place[1:], of=ConfigError):
        hypergradient(lambda t, x: t.sum(), lambda t, x: t.sum(), torch.ones(1), x0, solver=CG())
