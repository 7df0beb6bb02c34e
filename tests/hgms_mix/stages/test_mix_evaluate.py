"""Which mix the losses of a tuned model are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from hgms_mix.stages.config import comparable, load
from hgms_mix.stages.evaluate import against_uniform

GRID = """
budget = "20 steps"
method = ["hg-ms", { name = "fixed", label = "uniform-not", mixture = { one = 1 } }, "uniform"]

[task]
name = "source-mixture"
model = { config = { model_type = "gpt2", n_layer = 1 }, tokenizer = "bytes" }
sources = { one = { path = "one.jsonl" }, two = { path = "two.jsonl" } }
validation = { all = { path = "validation.jsonl" } }
test = { all = { path = "test.jsonl" } }

[sample]
size = 10

[for.uniform]
budget = "1 step"
"""


def write_mix(folder: Path, method: str, losses: list[float], same: str = "same") -> Path:
    """The files of a finished mix that are read: the report, and the losses of two test rows."""
    (folder / "evaluate").mkdir(parents=True)
    report = {"method": method, "comparable": same}
    (folder / "report.json").write_text(json.dumps(report))
    table = {"digest": "rows", "total": losses, "tokens": [1, 1]}
    (folder / "evaluate" / "losses-all.json").write_text(json.dumps(table))
    return folder


def mix_at(folder: Path, method: str = "hg-ms") -> Any:
    return SimpleNamespace(folder=folder, config=SimpleNamespace(method_name=method, seed=0))


def test_a_mix_is_compared_with_the_method_uniform_whatever_labels_are(tmp_path: Path) -> None:
    """`fixed`, labelled uniform-not-at-all, is another mixture; uniform may have any label."""
    ours = write_mix(tmp_path / "hg-ms-0" / "seed-0", "hg-ms", [1.0, 1.0])
    write_mix(tmp_path / "uniform-not-at-all-1" / "seed-0", "fixed", [2.0, 2.0])
    write_mix(tmp_path / "uniform-tilt-2" / "seed-0", "uniform-online", [3.0, 3.0])
    assert against_uniform(mix_at(ours), "same", "all") is None
    write_mix(tmp_path / "even-3" / "seed-0", "uniform", [1.5, 1.5])
    gap = against_uniform(mix_at(ours), "same", "all")
    assert gap == {"value": -0.5, "low": -0.5, "high": -0.5}
    write_mix(tmp_path / "uniform-4" / "seed-0", "uniform", [1.25, 1.25])
    write_mix(tmp_path / "uniform-5" / "seed-0", "uniform", [9.0, 9.0], same="other")
    gap = against_uniform(mix_at(ours), "same", "all")
    assert gap is not None
    assert gap["value"] == -0.25
    assert against_uniform(mix_at(ours, "uniform"), "same", "all") is None


def test_a_budget_for_uniform_alone_leaves_it_comparable(tmp_path: Path) -> None:
    """`[for.uniform] budget = "1 step"`: fine-tuning is the same."""
    grid = tmp_path / "grid.toml"
    grid.write_text(GRID)
    ours, uniform = (load(grid, method=label) for label in ("hg-ms", "uniform"))
    assert comparable(ours) == comparable(uniform)
    both = (load(grid, ["sample.size=11"], method="uniform"), uniform)
    assert len({comparable(config) for config in both}) == 2
    kept = [
        comparable(attrs.evolve(config, finetune=attrs.evolve(config.finetune, start="reweighted")))
        for config in (ours, uniform)
    ]
    assert kept[0] != kept[1], "the model that learning ended with depends on the budget"
