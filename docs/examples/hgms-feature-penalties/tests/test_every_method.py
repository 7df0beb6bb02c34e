"""Every method that is installed runs on the task, or is rejected before it runs, for a reason that
is true.

The distribution has to be installed for this (``pip install -e .``): methods find the task by its
name.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys

import pytest
import torch
from hgms_feature_penalties import FeaturePenalties

from hgms.plugins import Registry
from hgms.runs.describe import description
from hgms_core import Rows, Sources


def hgms(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hgms", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def missing() -> dict[str, set[str] | None]:
    """Of each method: the traits that it needs and the task lacks; None for a method without
    defaults.
    """
    registry = Registry.load()
    found: dict[str, set[str] | None] = {}
    for component in registry.components("method"):
        known = description(component, registry)
        if any(field["required"] for field in known.get("fields", ())):
            found[component.name] = None
        else:
            found[component.name] = set(known["needs"]) - FeaturePenalties.traits
    return found


def test_only_methods_that_need_what_this_task_has_not_are_refused(missing):
    assert len(missing) > 20
    lacking = {name: traits for name, traits in missing.items() if traits}
    mixing = {
        "fixed",
        "less",
        "regmix",
        "rho-loss",
        "rds",
        "fastmix",
        "op-mix",
        "random-rows",
        "doremi",
        "doge",
        "skill-it",
        "aioli",
        "hg-ms-online",
        "uniform-online",
    }
    assert set(lacking) >= mixing
    reasons = set().union(*lacking.values())
    assert reasons == {"sources", "representations", "row-weights", "direct-upper"}
    # and it is true: all training rows are of one kind, none has a separate weight, and f does
    # not see θ
    problem = FeaturePenalties().problem(0, torch.device("cpu"), torch.float64)
    assert problem.find(Sources) is None
    assert problem.find(Rows) is None
    twice = {name: 2 * leaf + 1 for name, leaf in problem.theta0.items()}
    batch = problem.upper_data["differentiate"].batch(None)
    assert problem.f(twice, problem.x0, batch) == problem.f(problem.theta0, problem.x0, batch)


def test_a_refused_method_does_not_begin(tmp_path):
    flags = [
        "--task",
        "feature-penalties",
        "--methods",
        "less",
        "--budget",
        "2 steps",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
    ]
    message = hgms("compare", *flags, code=2).stderr
    assert "(method.less)" in message
    assert "data sources" in message
    assert not list(tmp_path.rglob("steps.jsonl"))


def test_every_other_method_runs(missing, tmp_path):
    names = [name for name, traits in missing.items() if traits == set()]
    for name, package in {"tpe": "optuna", "kfac": "curvlinops"}.items():
        if importlib.util.find_spec(package) is None:
            names.remove(name)  # it is listed without its extra, and asks for it when it runs
    parts = 'generator = { name = "branches", steps = 5 }\nselector = { name = "best-of-n" }\n'
    blocks = [f'[[method]]\nname = "{name}"\n' for name in names]
    # these have no separate parts
    blocks.append(f'[[method]]\nname = "search"\n{parts}')
    blocks.append(
        f'[[method]]\nname = "pipeline"\n{parts}'
        'hypergradient = { name = "implicit", solver = { name = "cg" } }\n'
        'outer = { name = "adam" }\n'
    )
    wrappers = {"crossfit", "keep-best", "learned-start", "starting-at", "tilted"}
    without_defaults = {name for name, traits in missing.items() if traits is None}
    assert without_defaults == {"search", "pipeline", *wrappers}
    grid = tmp_path / "grid.toml"
    task = '[[task]]\nname = "feature-penalties"\ndataset = "wine"\nnoise_features = 7\n'
    grid.write_text(f'budget = "2 steps"\nseeds = 1\n[run]\nout = "runs"\n{task}{"".join(blocks)}')
    hgms("compare", str(grid), "--jobs", "0", "--out", str(tmp_path / "runs"))
    ended = {
        path.parents[1].name: json.loads(path.read_text())
        for path in tmp_path.rglob("summary.json")
    }
    assert len(ended) == len(names) + 2
    assert {summary["status"] for summary in ended.values()} == {"done"}
    for label, summary in ended.items():
        metrics = summary["metrics"]
        assert set(metrics) == {"test_loss", "test_score", "noise_auc"}, label
        assert all(math.isfinite(value) for value in metrics.values()), label
        assert 1 <= summary["outer_steps"] <= 2, label


def test_its_hypergradient_agrees_with_differences_of_the_solved_lower_level():
    small = ["--set", "task.noise_features=5", "--points", "2", "--directions", "3"]
    report = json.loads(hgms("check-gradient", "feature-penalties", *small, "--json").stdout)
    assert report["agrees"]
    assert max(row["error"] for row in report["rows"]) < 1e-6
