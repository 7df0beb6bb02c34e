"""The command ``hgms tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from hgms.cli import main

PROBLEM = """
import torch
from torch import nn

import hgms

draw = torch.Generator().manual_seed(0)
a = torch.randn(40, 4, generator=draw)
train = {"a": a, "y": a[:, :1] + torch.randn(40, 1, generator=draw)}
model = nn.Linear(4, 1)
nn.init.zeros_(model.weight)
nn.init.zeros_(model.bias)
learn = {"decay": hgms.hyper.PerInput(init=0.01)}


def loss(model, batch):
    return (model(batch["a"]) - batch["y"]).square().squeeze(1)
"""


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    return path


def call(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def test_a_file_is_tuned_and_its_results_are_written(problem: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = call(problem, "--budget", "40 steps", "--out", out)
    assert shown.exit_code == 0, shown.output
    assert "recommendation" in shown.output
    assert torch.load(out / "values.pt")["decay"].shape == (4,)
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "shared level" in page
    again = call(problem, "--budget", "40 steps", "--out", out)
    assert again.exit_code == 0, again.output
    same = [line for line in shown.output.splitlines() if "prior" in line]
    assert same == [line for line in again.output.splitlines() if "prior" in line]


def test_a_toml_file_names_the_problem_and_the_hyperparameters(
    problem: Path, tmp_path: Path
) -> None:
    table = tmp_path / "tune.toml"
    table.write_text(
        'problem = "problem.py"\nbudget = "30 steps"\nseed = 3\n'
        '[learn.layers]\nname = "per-layer"\ninit = 0.1\n'
    )
    shown = call(table)
    assert shown.exit_code == 0, shown.output
    assert "layers" in shown.output


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('budget = "30 steps"\n', "problem"),
        ('problem = "none.py"\n', "none.py"),
        ('problem = "problem.py"\nbudgit = "3 steps"\n', "budgit"),
        ('problem = "problem.py"\n[learn.a]\nname = "per-leyer"\n', "learn.a.name"),
        ('problem = "problem.py"\n[learn.a]\nname = "per-layer"\ninit = -1\n', "learn.a.init"),
        ('problem = "problem.py"\nengine = "newton"\n', "engine"),
    ],
)
def test_wrong_files_are_errors_with_their_place(
    problem: Path, tmp_path: Path, text: str, place: str
) -> None:
    table = tmp_path / "tune.toml"
    table.write_text(text)
    shown = call(table)
    assert shown.exit_code == 2, shown.output
    assert place in shown.output
    assert "Traceback" not in shown.output
