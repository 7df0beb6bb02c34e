"""``component``: what a type checker and a call report about wrong arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from attrs import field
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import rejects

from hgms_core import ConfigError, LinearSolver, component
from hgms_core.components import evolve
from hgms_core.validators import not_negative


@component
class Step:
    """A component with an argument of each kind of annotation."""

    name = "step"
    lr: float = field(default=0.1, validator=not_negative)
    count: int | None = None
    rule: Literal["sgd", "adam"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    weights: Mapping[str, float] = {}
    seeds: Sequence[int] | int = 0
    solver: LinearSolver | None = None
    fallbacks: Mapping[str, LinearSolver] = {}
    function: Callable[..., Any] | None = None
    nested: bool = False


@component
class Longer(Step):
    """A class that inherits arguments."""

    name = "longer"
    steps: int = 1


def zero(matvec: Callable[[Any], Any], b: torch.Tensor) -> torch.Tensor:
    return 0 * b


@pytest.mark.parametrize(
    ("arguments", "code", "place"),
    [
        ({"lr": "0.1"}, "wrong-type", ("lr",)),
        ({"lr": True}, "wrong-type", ("lr",)),
        ({"lr": float("nan")}, "not-finite", ("lr",)),
        ({"lr": 10**400}, "out-of-range", ("lr",)),
        ({"lr": -1}, "out-of-range", ("lr",)),
        ({"count": 2.0}, "wrong-type", ("count",)),
        ({"count": 2**63}, "out-of-range", ("count",)),
        ({"rule": "adm"}, "unknown-choice", ("rule",)),
        ({"rule": 3}, "wrong-type", ("rule",)),
        ({"betas": 0.9}, "wrong-type", ("betas",)),
        ({"betas": [0.9]}, "wrong-length", ("betas",)),
        ({"betas": [0.9, "x"]}, "wrong-type", ("betas", 1)),
        ({"weights": {"a": "x"}}, "wrong-type", ("weights", "a")),
        ({"seeds": [1, 2.5]}, "wrong-type", ("seeds", 1)),
        ({"solver": "cg"}, "wrong-part", ("solver",)),
        ({"fallbacks": {"large": "cg"}}, "wrong-part", ("fallbacks", "large")),
        ({"solver": Step}, "wrong-part", ("solver",)),
        ({"function": 3}, "wrong-type", ("function",)),
        ({"nested": 1}, "wrong-type", ("nested",)),
        ({"rat": 0.1}, "unknown-option", ("rat",)),
    ],
)
def test_a_wrong_argument_is_an_error_also_of_a_subclass(
    arguments: dict[str, Any], code: str, place: tuple[str | int, ...]
) -> None:
    for cls in (Step, Longer):
        with rejects(code, *place, of=ConfigError):
            cls(**arguments)


def test_all_wrong_arguments_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Step(rat=1, lr=-1.0, rule="adm")  # type: ignore
    found = [(error.code, error.place) for error in caught.value.errors]
    assert found == [
        ("unknown-option", ("rat",)),
        ("out-of-range", ("lr",)),
        ("unknown-choice", ("rule",)),
    ]


def test_values_of_numpy_torch_and_lists_are_plain_values() -> None:
    weights: Any = {"a": np.float32(0.5)}
    made = Step(lr=np.float64(1), count=torch.tensor(3), betas=np.ones(2), weights=weights)  # type: ignore
    assert repr(made) == repr(Step(lr=1.0, count=3, betas=(1.0, 1.0), weights={"a": 0.5}))
    assert evolve(made, lr=0.5).lr == 0.5


def test_a_function_is_a_linear_solver() -> None:
    solver = Step(solver=zero).solver  # type: ignore
    assert solver is not None
    assert solver.solve(lambda v: v, torch.ones(2)).value.tolist() == [0, 0]


INTEGERS = st.integers(-(2**100), 2**100)


@given(st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), st.text()))
def test_a_value_of_any_type_is_a_number_or_an_error(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value < float("inf"):
        assert Step(lr=value).lr == float(value)
    else:
        with pytest.raises(ConfigError, match="lr"):
            Step(lr=value)


def test_a_default_may_be_infinite() -> None:
    @component
    class Clipped:
        name = "clipped"
        radius: float = float("inf")

    assert Clipped().radius == float("inf")
    with rejects("out-of-range", "radius", of=ConfigError):
        Clipped(radius=10**400)


def test_the_name_is_checked_where_the_class_is_defined() -> None:
    with rejects("bad-name", of=ConfigError):
        component(type("Wrong", (), {"name": "Not Kebab", "__annotations__": {}}))


@pytest.mark.extended
def test_type_checkers_report_misspelt_arguments_and_wrong_parts(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "script.py"
    script.write_text(
        "from hgms.outer import Adam\n"
        "from hgms.solvers import CG\n"
        "from hgms.hypergradients import Implicit\n"
        "Implicit(solver=CG(ridge=0.1))\n"
        "CG(rigde=0.1)\n"
        "Implicit(solver=Adam())\n"
        'CG(ridge="0.1")\n'
    )
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(script)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line.split(": error: ")[0] for line in told.splitlines() if ": error: " in line]
    assert [line.rpartition(":")[2] for line in lines] == ["5", "6", "7"], told
