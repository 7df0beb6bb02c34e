"""Scales: what is laid over a grid file, and what is said about a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison.scale import apply_scale
from hgms_core.errors import ConfigError

GRID: dict[str, Any] = {
    "budget": "60s",
    "run": {"device": "cuda", "threads": 1},
    "task": [{"name": "a", "label": "one", "size": 3}, {"name": "a", "label": "two", "size": 4}],
    "method": ["m", {"name": "m", "label": "m-2", "generator": {"count": 8, "steps": 20}}],
    "scale": {
        "cpu": {
            "budget": "9s",
            "run": {"device": "cpu"},
            "task": {"*": {"size": 1}, "two": {"size": 2}},
            "method": {"m-2": {"generator": {"count": 2}}},
        }
    },
}


def test_a_scale_is_laid_over_all_or_over_one() -> None:
    assert apply_scale(GRID, None) == {key: value for key, value in GRID.items() if key != "scale"}
    table = apply_scale(GRID, "cpu")
    assert (table["budget"], table["run"]) == ("9s", {"device": "cpu", "threads": 1})
    assert [task["size"] for task in table["task"]] == [1, 2]
    assert table["method"] == [
        {"name": "m"},
        {"name": "m", "label": "m-2", "generator": {"count": 2, "steps": 20}},
    ]
    assert GRID["method"][1]["generator"]["count"] == 8, "the given table stays as it is"


@pytest.mark.parametrize(
    ("change", "name", "code", "place"),
    [
        ({}, "cpus", "unknown-scale", ()),
        ({"cpu": {"method": {"n": {}}}}, "cpu", "unknown-method", ("cpu", "method", "n")),
        ({"cpu": 3}, "cpu", "wrong-type", ()),
        *(
            ({"x": {kind: wrong}}, "x", "wrong-type", ("x", kind))
            for kind in ("task", "method")
            for wrong in ("…", ["m"], {"m": "…"}, {"*": 3})
        ),
    ],
)
def test_a_wrong_scale_is_named(
    change: dict[str, Any], name: str, code: str, place: tuple[str, ...]
) -> None:
    with rejects(code, "grid.toml", "scale", *place, of=ConfigError):
        apply_scale({**GRID, "scale": {**GRID["scale"], **change}}, name, "grid.toml")


def compared(folder: Path, scales: str, *flags: str) -> Any:
    file = folder / "grid.toml"
    table = 'budget = "60s"\nseeds = 1\ntask = "quadratic"\nmethod = "uniform"\n'
    out = f"run.out = {json.dumps(str(folder / 'runs'))}\n"
    file.write_text(table + out + scales, encoding="utf-8")
    return CliRunner().invoke(main, ["compare", str(file), "--scale", "cpu", *flags])


def test_flags_have_the_last_word(tmp_path: Path) -> None:
    """The file says 60 s, its scale 9 s, the flag 3 steps."""
    scales = '[scale.cpu]\nbudget = "9s"\n[scale.cpu.method.uniform]\nkeep = "last"\n'
    flags = ["--budget", "3 steps", "--jobs", "0", "--json", "--no-baselines"]
    done = compared(tmp_path, scales, *flags)
    assert done.exit_code == 0, done.output
    (summary,) = [json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")]
    assert (summary["budget"], summary["outer_steps"]) == ("3 outer steps", 3)
