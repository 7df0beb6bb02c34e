"""``hgms mix --demo`` on real weights: some five minutes of processor time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hgms.cli import main

pytestmark = pytest.mark.nightly


def test_the_demo_on_real_weights_leaves_out_the_blank_answers(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["mix", "--demo", "--model", "smollm2-135m", "--out", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    [mix] = result["methods"]["hg-ms-mixture"]["mixes"]
    weights = {row["source"]: row["weight"] for row in mix["sources"]}
    assert max(weights, key=weights.__getitem__) == "word-problems"
    assert weights["blank-answers"] < 1 / 3
    assert mix["test"]["word-problems"]["against_uniform"]["high"] < 0
