"""One mix out of a grid: the same cells as `hgms compare` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects

from hgms.comparison.grid_file import load as load_grid
from hgms.config.tables import read_toml
from hgms_core import ConfigError
from hgms_mix.stages.config import load

HEAD = """
budget = "2 steps"
[task]
name = "source-mixture"
label = "tiny"
model = { config = { model_type = "gpt2", n_layer = 1 }, tokenizer = "bytes" }
sources = { one = { path = "one.jsonl" }, two = { path = "two.jsonl" } }
validation = { all = { path = "validation.jsonl" } }
[sample]
size = 10
"""
GRID = f"""
seeds = [7, 8]
{HEAD}
[[method]]
name = "hg-ms"
on.tiny.outer.lr = 0.3

[[method]]
name = "hg-ms"
label = "hg-ms-8"
generator = {{ count = 8 }}

[[method]]
name = "uniform"

[scale.long]
budget = "9h"
method.hg-ms-8 = {{ generator = {{ count = 9 }} }}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.mark.parametrize(("label", "scale"), [("hg-ms", None), ("hg-ms-8", "long")])
def test_a_mix_is_the_cell_of_the_comparison(file: Path, label: str, scale: str | None) -> None:
    grid = load_grid(read_toml(GRID, "grid.toml"), scale=scale)
    [cell] = [part for part in grid.cells() if part.method == label and part.config.seed == 7]
    mix = load(file, method=label, scale=scale)
    assert mix.reweight == cell.config
    assert (mix.sample.size, mix.seed) == (10, 7)


def test_flags_have_the_last_word_and_a_grid_needs_a_method(file: Path) -> None:
    mix: Any = load(file, ["method.outer.lr=0.7"], method="hg-ms-8", seed=1)
    assert (mix.seed, mix.method.outer.lr, mix.method.generator.count) == (1, 0.7, 8)
    with rejects("wrong-length", "grid.toml", "method", of=ConfigError):
        load(file)


def test_a_file_of_one_mix_may_have_labels_but_needs_no_method(file: Path) -> None:
    file.write_text(f'method = {{ name = "hg-ms", label = "four" }}\n{HEAD}')
    mix = load(file)
    assert (mix.run.task_label, mix.run.label, mix.method_name) == ("tiny", "four", "hg-ms")
