"""One mix out of a grid: the same cells as `hgms compare` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.helpers import rejects

from hgms.cli import main
from hgms.comparison.grid_file import load as load_grid
from hgms.config.tables import read_toml
from hgms_core import ConfigError
from hgms_mix.stages.config import load
from hgms_mix.stages.summary import _scores

GRID = """
budget = "2 steps"
seeds = [7, 8]

[task]
name = "source-mixture"
label = "tiny"
model = { config = { model_type = "gpt2", n_layer = 1 }, tokenizer = "bytes" }
sources = { one = { path = "one.jsonl" }, two = { path = "two.jsonl" } }
validation = { all = { path = "validation.jsonl" } }

[[method]]
name = "hg-ms"
on.tiny.outer.lr = 0.3

[[method]]
name = "hg-ms"
label = "hg-ms-8"
generator = { count = 8 }

[[method]]
name = "uniform"

[scale.long]
budget = "9h"
method.hg-ms-8 = { generator = { count = 9 } }

[sample]
size = 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.mark.parametrize("scale", [None, "long"])
@pytest.mark.parametrize("label", ["hg-ms", "hg-ms-8", "uniform"])
def test_a_mix_is_the_cell_of_the_comparison(file: Path, label: str, scale: str | None) -> None:
    grid = load_grid(read_toml(GRID, "grid.toml"), scale=scale)
    [cell] = [part for part in grid.cells() if part.method == label and part.config.seed == 7]
    mix = load(file, method=label, scale=scale)
    assert mix.reweight == cell.config
    assert (mix.sample.size, mix.seed) == (10, 7)


def test_labels_are_legal_in_a_file_of_one_mix_too(tmp_path: Path) -> None:
    """The label of a grid's task, kept when `[[method]]` becomes one method."""
    head, _, tail = GRID.partition("[[method]]")
    alone = tmp_path / "mix.toml"
    alone.write_text(
        f'method = {{ name = "hg-ms", label = "four" }}\n{head.replace("seeds = [7, 8]", "")}'
        + tail[tail.index("[sample]") :]
    )
    mix = load(alone)
    assert (mix.run.task_label, mix.run.label, mix.method_name) == ("tiny", "four", "hg-ms")


def test_flags_have_the_last_word(file: Path) -> None:
    mix: Any = load(file, ["method.outer.lr=0.7"], method="hg-ms-8", seed=1)
    assert (mix.seed, mix.method.outer.lr, mix.method.generator.count) == (1, 0.7, 8)


def test_a_grid_needs_a_method_and_a_mix_file_none(file: Path, tmp_path: Path) -> None:
    with rejects("wrong-length", "grid.toml", "method", of=ConfigError) as caught:
        load(file)
    assert "3 (hg-ms, hg-ms-8, uniform)" in caught.value.message
    with rejects("unknown-method", "grid.toml", "method", of=ConfigError) as caught:
        load(file, method="hg-ms-9")
    assert caught.value.did_you_mean == ("hg-ms-8",)
    with rejects("unknown-scale", of=ConfigError):
        load(file, method="hg-ms", scale="short")
    alone = tmp_path / "mix.toml"
    head, _, tail = GRID.partition("[[method]]")
    alone.write_text(
        'method = "hg-ms"\n' + head.replace("seeds = [7, 8]", "") + tail[tail.index("[sample]") :]
    )
    assert load(alone).method_name == "hg-ms"
    with rejects("not-supported", "mix.toml", "method", of=ConfigError):
        load(alone, method="hg-ms")


def test_values_for_a_method_in_a_file_of_one_are_refused(file: Path) -> None:
    head, _, tail = GRID.partition("[[method]]")
    file.write_text(
        'method = "hg-ms"\n'
        + head.replace("seeds = [7, 8]", "")
        + tail[tail.index("[sample]") :]
        + "[for.hg-ms]\n"
    )
    with rejects("not-supported", "grid.toml", "for", of=ConfigError):
        load(file)


def test_the_command_says_what_is_missing(file: Path) -> None:
    done = CliRunner().invoke(main, ["mix", "reweight", str(file)])
    assert done.exit_code == 2
    assert "--method LABEL" in done.stderr


def test_scores_for_reports_name_what_is_better() -> None:
    content = {
        "benchmarks": {
            "gsm8k": {"score": 75.0, "unit": "percent"},
            "mt-bench": {"score": 6.5, "unit": "points of 10"},
            "math": {"score": None, "unit": "percent"},
        },
        "test": {"held": {"token_loss": {"value": 1.25}}},
    }
    assert _scores(content) == {
        "metrics": {"gsm8k_accuracy": 0.75, "mt-bench_score": 6.5, "tuned_held_loss": 1.25},
        "higher_is_better": {
            "gsm8k_accuracy": True,
            "mt-bench_score": True,
            "tuned_held_loss": False,
        },
    }
