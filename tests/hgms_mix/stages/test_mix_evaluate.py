"""Which mix the losses of a tuned model are compared with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hgms_mix.stages.config import comparable, load
from hgms_mix.stages.evaluate import against_uniform, summary

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


def test_a_mix_is_compared_with_the_method_uniform_whatever_labels_are(tmp_path: Path) -> None:
    """`fixed`, labelled uniform-not-at-all, is another mixture; uniform may have any label."""

    def finish(label: str, method: str, loss: float, same: str = "same") -> Path:
        """The files of a finished mix that are read: its report, and two test rows' losses."""
        folder = tmp_path / label / "seed-0"
        losses = folder / "evaluate-1" / "losses"
        losses.mkdir(parents=True)
        table = {"digest": "rows", "total": [loss, loss], "tokens": [1, 1]}
        stages = {"evaluate": {"folder": f"elsewhere/{label}/evaluate-1"}}
        report = {"method": method, "comparable": same, "stages": stages}
        (folder / "report.json").write_text(json.dumps(report))
        (losses / "all.json").write_text(json.dumps(table))
        return folder

    def gap() -> Any:
        return against_uniform(ours, ours / "evaluate-1" / "losses", "all", "same", 0)

    ours = finish("hg-ms-0", "hg-ms", 1.0)
    finish("uniform-not-at-all-1", "fixed", 2.0)
    finish("uniform-tilt-2", "uniform-online", 3.0)
    assert gap() is None
    finish("even-3", "uniform", 1.5)
    assert gap() == {"value": -0.5, "low": -0.5, "high": -0.5}
    finish("uniform-4", "uniform", 1.25)
    finish("uniform-5", "uniform", 9.0, same="other")
    assert gap()["value"] == -0.25
    config: Any = SimpleNamespace(method_name="uniform", seed=0)
    facts = {"test": {"all": {"rows": 2}}, "benchmarks": {}}
    same = summary(config, ours, ours / "evaluate-1" / "losses", facts, "same")
    assert same["test"] == {"all": {"rows": 2, "against_uniform": None}}


def test_a_budget_for_uniform_alone_leaves_it_comparable(tmp_path: Path) -> None:
    """`[for.uniform] budget = "1 step"`: fine-tuning is the same."""
    grid = tmp_path / "grid.toml"
    grid.write_text(GRID)
    ours, uniform = (load(grid, method=label) for label in ("hg-ms", "uniform"))
    other = load(grid, ["sample.size=11"], method="uniform")
    assert comparable(ours) == comparable(uniform) != comparable(other)
