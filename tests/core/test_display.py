"""How values show themselves: short, without numbers of tensors, and as text in HTML."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from attrs import field, frozen

from hgms_core import (
    CallableSolver,
    Cost,
    Data,
    Estimate,
    Outcome,
    Problem,
    Solution,
    as_html,
    hypergradient,
    sizes,
)


def lower(theta: Any, x: Any, *_: Any) -> torch.Tensor:
    return 0.5 * ((x - theta) ** 2).sum()


def upper(theta: Any, x: Any, *_: Any) -> torch.Tensor:
    return 0.5 * ((x - 1) ** 2).sum()


def problem(**more: Any) -> Problem:
    rows = Data.of({"image": torch.rand(40, 8, 8), "label": torch.zeros(40, dtype=torch.long)})
    return Problem(
        theta0={"w": torch.rand(40)},
        x0={"x": torch.rand(1000)},
        g=lower,
        f=upper,
        lower_data=rows,
        **more,
    )


def shown(value: Any) -> dict[str, str]:
    """The rows of a repr by their labels."""
    lines = repr(value).splitlines()
    assert lines[0] == type(value).__name__
    start = len(lines[1]) - len(lines[1].split("  ", 2)[2].lstrip())
    return {line[:start].strip(): line[start:] for line in lines[1:]}


def test_an_estimate_says_what_it_is_worth() -> None:
    theta = torch.tensor([3.0, 1.0, 1.0])
    estimate = hypergradient(upper, lower, theta, theta.clone(), solver=lambda matvec, b: b)
    rows = shown(estimate)
    assert len(rows) < 10
    assert "norm 2" in rows["value"]
    assert "[3]" in rows["value"]
    assert rows["outcome"] == f"converged: {Outcome.CONVERGED.value}"
    assert (rows["residual"], rows["lower gradient norm"]) == ("0", "0")
    assert rows["cost"] == f"{estimate.cost.calls} oracle calls"
    none = shown(Estimate(value={"t": theta}, upper_loss=theta.sum()))
    assert none.keys() == {"value", "outcome", "upper loss", "cost"}
    assert none["outcome"].startswith("not-solved: no system was solved")


def test_of_many_systems_the_worst_and_the_range_are_shown() -> None:
    codes = torch.tensor([Outcome.CONVERGED.code, Outcome.ITERATION_LIMIT.code])
    numbers = {
        "residual": torch.tensor([0.0, 0.5]),
        "iterations": torch.tensor([3, 9]),
        "curvature": torch.tensor([1.0, 2.0]),
    }
    rows = shown(Solution(value=torch.ones(2, 9), codes=codes, products=9, **numbers))
    assert rows["outcome"].startswith("1 of 2 systems converged, the worst: iteration-limit: ")
    assert (rows["residual"], rows["iterations"], rows["curvature"]) == (
        "0 to 0.5",
        "3 to 9",
        "1 to 2",
    )


def test_a_problem_and_its_data_hold_no_numbers() -> None:
    rows = shown(problem(evaluate=lambda theta, x: {}, fresh=lambda key: {}))
    assert rows["θ"] == "w [40], float32"
    assert rows["x"] == "x [1000], float32"
    assert rows["lower rows"] == "40"
    assert rows["also has"] == "evaluate, fresh"
    assert shown(problem())["also has"] == "nothing"
    assert shown(problem().lower_data) == {
        "rows": "40",
        "columns": "image float32 [8, 8], label int64, index int64",
    }
    many = Data.of({f"c{number}": torch.zeros(2) for number in range(99)})
    assert len(repr(many)) < 300


def test_many_tensors_are_counted() -> None:
    tree = {f"layer-{number}": torch.zeros(2, 3) for number in range(9)}
    assert sizes(tree) == "9 tensors, 54 numbers, float32"
    assert sizes(torch.zeros(3)) == "[3], float32"
    assert sizes([{"a": torch.zeros(3)}]) == "0.a [3], float32"
    assert (
        sizes({"a": torch.zeros(1), "b": torch.zeros(2, dtype=torch.float64)})
        == "a [1], b [2], float32 and float64"
    )


def test_inside_a_transform_nothing_fails() -> None:
    texts = []

    def inside(v: torch.Tensor) -> torch.Tensor:
        texts.append(repr(Estimate(value={"t": v}, upper_loss=v.sum())))
        return v

    torch.func.vmap(inside)(torch.ones(2, 3))
    assert "Estimate" in texts[0]


@frozen(kw_only=True)
class Part:
    name: ClassVar[str] = "part"
    rate: float = 0.1
    steps: int = 3
    notes: list[str] = field(factory=list)


@frozen(kw_only=True)
class Whole:
    part: Part
    word: str = "<b>plain & simple</b>"

    _repr_html_ = as_html


def test_a_component_shows_first_what_is_not_as_by_default() -> None:
    text = Whole(part=Part(steps=5))._repr_html_()
    assert ">Part(steps=5)<" in text
    assert text.index("Part(steps=5)") < text.index("by default")
    assert "&lt;b&gt;plain &amp; simple" in text
    assert "<b>" not in text
    assert "http" not in text


@pytest.mark.parametrize(
    "value", [Cost(), CallableSolver(lambda matvec, b: b)], ids=["all by default", "a function"]
)
def test_any_class_made_with_attrs_can_show_itself(value: Any) -> None:
    assert as_html(value).startswith(
        f'<strong>{type(value).__name__}</strong><table style="margin: 0"><tr>'
    )
