"""``hgms demo`` is the comparison that the README shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hgms.demo.demo import CALLS, FIRST_SEED, run_demo
from hgms.demo.example import METHODS, make_problem

README = (Path(__file__).resolve().parents[3] / "README.md").read_text(encoding="utf-8")


def test_its_problem_is_that_of_the_readme() -> None:
    block = next(re.finditer(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE))[1]
    shown: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), shown)
    own, other = make_problem(3), shown["make_problem"](3)
    rows = own.lower_data.whole
    assert {name: leaf.tolist() for name, leaf in rows.items()} == {
        name: leaf.tolist() for name, leaf in other.lower_data.whole.items()
    }
    for name, data in (("g", own.lower_data), ("f", own.upper_data["stop"])):
        losses = [getattr(p, name)(p.theta0, p.x0, data.whole) for p in (own, other)]
        assert torch.equal(*losses)


def test_its_comparison_is_that_of_the_readme() -> None:
    methods = re.search(r"^methods = (\[.*?\])$", README, re.MULTILINE)
    assert methods is not None
    assert ast.literal_eval(methods[1]) == list(METHODS)
    assert f'"{CALLS} calls", seeds=range({FIRST_SEED}, {FIRST_SEED + 10}))' in README


@pytest.mark.extended
def test_it_writes_pictures_and_runs(tmp_path: Path) -> None:
    made = run_demo(tmp_path, seeds=1, calls=65, progress=False)
    assert {row.method for row in made.table.rows} == set(METHODS)
    assert [path.name for path in made.pictures] == [
        "differences.png",
        "differences.svg",
        "accuracy.png",
        "accuracy.svg",
    ]
    contents = [path.read_bytes() for path in made.pictures]
    assert all(contents)
    assert len(set(contents)) == len(contents)  # differences and curves are separate pictures
    assert len(list((tmp_path / "runs").rglob("summary.json"))) == len(METHODS)
