"""How values show themselves: short, without numbers of tensors, and as text in HTML."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import frozen

from hgms_core import CallableSolver, Cost, Data, Estimate, Outcome, Problem, as_html, hypergradient


def shown(value: Any) -> dict[str, str]:
    """The rows of a repr by their labels."""
    lines = repr(value).splitlines()
    assert lines[0] == type(value).__name__
    start = len(lines[1]) - len(lines[1].split("  ", 2)[2].lstrip())
    return {line[:start].strip(): line[start:] for line in lines[1:]}


def test_an_estimate_says_what_it_is_worth() -> None:
    theta = torch.tensor([3.0, 1.0, 1.0])
    estimate = hypergradient(
        lambda theta, x: 0.5 * ((x - 1) ** 2).sum(),
        lambda theta, x: 0.5 * ((x - theta) ** 2).sum(),
        theta,
        theta.clone(),
        solver=lambda matvec, b: b,
    )
    rows = shown(estimate)
    assert ("norm 2" in rows["value"], "[3]" in rows["value"]) == (True, True)
    assert rows["outcome"] == f"converged: {Outcome.CONVERGED.value}"
    assert (rows["residual"], rows["lower gradient norm"]) == ("0", "0")
    assert rows["cost"] == f"{estimate.cost.calls} oracle calls"
    # also inside a transform
    texts: list[str] = []
    torch.func.vmap(
        lambda v: texts.append(repr(Estimate(value={"t": v}, upper_loss=v.sum()))) or v
    )(torch.ones(2, 3))
    assert "Estimate" in texts[0]


def test_a_problem_and_its_data_hold_no_numbers() -> None:
    data = Data.of({"image": torch.rand(40, 8, 8), "label": torch.zeros(40, dtype=torch.long)})
    problem = Problem(
        theta0={"w": torch.rand(40)},
        x0={"x": torch.rand(1000)},
        g=lambda theta, x, batch: x.sum(),
        f=lambda theta, x, batch: x.sum(),
        lower_data=data,
        evaluate=lambda theta, x: {},
    )
    rows = shown(problem)
    assert (rows["θ"], rows["x"]) == ("w [40], float32", "x [1000], float32")
    assert (rows["lower rows"], rows["also has"]) == ("40", "evaluate")
    columns = "image float32 [8, 8], label int64, index int64"
    assert shown(data) == {"rows": "40", "columns": columns}
    assert len(repr(Data.of({f"c{number}": torch.zeros(2) for number in range(99)}))) < 300


@frozen(kw_only=True)
class Part:
    name: ClassVar[str] = "part"
    word: str = "<b>plain & simple</b>"
    steps: int = 3


def test_a_component_shows_first_what_is_not_as_by_default_and_its_text_as_text() -> None:
    text = as_html(Part(steps=5))
    assert 0 < text.index("steps") < text.index("by default")
    assert "<b>" not in text
    for value in (Cost(), CallableSolver(lambda matvec, b: b)):
        assert as_html(value).startswith(f"<strong>{type(value).__name__}</strong><table")
