"""How values show themselves: short, without numbers of tensors, and in HTML."""

from __future__ import annotations

from typing import Any

import torch

from hgms.adapters import as_data, from_losses


def shown(value: Any) -> dict[str, str]:
    """The rows of a repr by their labels."""
    lines = repr(value).splitlines()
    assert lines[0] == type(value).__name__
    start = len(lines[1]) - len(lines[1].split("  ", 2)[2].lstrip())
    return {line[:start].strip(): line[start:] for line in lines[1:]}


def test_a_problem_and_its_data_hold_no_numbers() -> None:
    data = as_data({"image": torch.rand(40, 8, 8), "label": torch.zeros(40, dtype=torch.long)})
    problem = from_losses(
        theta0={"w": torch.rand(40)},
        x0={"x": torch.rand(1000)},
        g=lambda theta, x, batch: x.sum(),
        f=lambda theta, x, batch: x.sum(),
        lower_data=data,
        evaluate=lambda theta, x: {},
    )
    assert "theta0=w [40], float32, x0=x [1000], float32, lower_data=Data(size=40" in repr(problem)
    columns = "image [40, 8, 8], label [40], index [40], float32 and int64"
    assert f"whole={columns}" in repr(data)
    assert len(repr(as_data({f"c{number}": torch.zeros(2) for number in range(99)}))) < 300
