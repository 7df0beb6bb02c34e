"""Scales: what is laid over a grid file, and what is said about a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison.scale import scaled
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


def test_without_a_scale_only_the_scales_go() -> None:
    assert scaled(GRID, None) == {key: value for key, value in GRID.items() if key != "scale"}


def test_a_scale_is_laid_over_all_or_over_one() -> None:
    table = scaled(GRID, "cpu")
    assert table["budget"] == "9s"
    assert table["run"] == {"device": "cpu", "threads": 1}
    assert [task["size"] for task in table["task"]] == [1, 2]
    assert table["method"] == [
        {"name": "m"},
        {"name": "m", "label": "m-2", "generator": {"count": 2, "steps": 20}},
    ]
    assert GRID["method"][1]["generator"]["count"] == 8, "the given table stays as it is"


@pytest.mark.parametrize("wrong", ["…", 3, ["m"], {"m": "…"}, {"*": 3}])
def test_what_is_no_table_of_settings_is_told(wrong: Any) -> None:
    for kind in ("task", "method"):
        with rejects("wrong-type", "grid.toml", "scale", "x", kind, of=ConfigError):
            scaled({**GRID, "scale": {"x": {kind: wrong}}}, "x", "grid.toml")


def test_flags_have_the_last_word(tmp_path: Path) -> None:
    """The file says 60 s, its scale 9 s, the flag 3 steps."""
    file = tmp_path / "grid.toml"
    file.write_text(
        'budget = "60s"\nseeds = 1\ntask = "quadratic"\nmethod = "uniform"\n'
        f'run.out = {json.dumps(str(tmp_path / "runs"))}\n[scale.cpu]\nbudget = "9s"\n'
        '[scale.cpu.method.uniform]\nkeep = "last"\n',
        encoding="utf-8",
    )
    flags = ["--scale", "cpu", "--budget", "3 steps", "--jobs", "0", "--json", "--no-baselines"]
    done = CliRunner().invoke(main, ["compare", str(file), *flags])
    assert done.exit_code == 0, done.output
    (summary,) = [json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")]
    assert (summary["budget"], summary["outer_steps"]) == ("3 outer steps", 3)


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ('[scale.big]\nbudgett = "9s"', "scale.big.budgett"),
        ("[scale.big.method.uniform]\ngenerator.stepz = 3", "scale.big.method.uniform.generator"),
        ("[scale.big.method.unifrom]\nkeep = 1", "scale.big.method.unifrom"),
        ('[scale.big.method.uniform]\nname = "soba"', "scale.big.method.uniform.name"),
    ],
)
def test_a_mistake_in_a_scale_that_is_not_chosen_is_found(
    tmp_path: Path, lines: str, place: str
) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'budget = "1 step"\nseeds = 1\ntask = "quadratic"\nmethod = "uniform"\n'
        f'run.out = {json.dumps(str(tmp_path / "runs"))}\n[scale.cpu]\nbudget = "2 steps"\n'
        '[scale.gpu]\nrun.device = "cuda:999"\n' + lines + "\n",
        encoding="utf-8",
    )
    done = CliRunner().invoke(main, ["compare", str(file), "--scale", "cpu", "--dry-run"])
    assert done.exit_code == 2, done.output
    assert f"grid.toml: {place}" in done.output
    file.write_text(file.read_text().removesuffix(lines + "\n"), encoding="utf-8")
    done = CliRunner().invoke(main, ["compare", str(file), "--scale", "cpu", "--dry-run"])
    assert done.exit_code == 0, "no GPU here is no mistake"


@pytest.mark.parametrize(
    ("change", "name", "code", "place"),
    [
        ({}, "cpus", "unknown-scale", ("scale",)),
        (
            {"scale": {"cpu": {"method": {"n": {}}}}},
            "cpu",
            "unknown-method",
            ("scale", "cpu", "method", "n"),
        ),
        ({"scale": {"cpu": 3}}, "cpu", "wrong-type", ("scale",)),
    ],
)
def test_a_wrong_scale_is_named(
    change: dict[str, Any], name: str, code: str, place: tuple[str, ...]
) -> None:
    with rejects(code, *place, of=ConfigError):
        scaled({**GRID, **change}, name)
