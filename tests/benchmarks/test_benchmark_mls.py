"""The table of MLS-Bench's protocol: which step counts, and which published figure stands beside
it.
"""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
from support.helpers import load_script
from support.made_runs import write_run

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "mls" / "table.py"


def test_the_table_has_both_choices_of_the_step_and_the_published_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = load_script("mls_table", SCRIPT)
    assert doctest.testmod(table) == (0, 2)
    figures = table.published()
    assert {
        (task, method) for task in ("mls-linear", "mls-mlp") for method in ("v-pbgd", "g-pbgd")
    } <= set(figures)
    assert figures["mls-linear", "v-pbgd"].count == 3
    assert figures["mls-linear", "v-pbgd"].mean == pytest.approx(90.10, abs=0.005)

    for seed, best in enumerate((0.95, 0.93)):
        rows = [
            {"step": step, "metric.test_accuracy": accuracy, "metric.cleaning_f1_redrawn": f1}
            for step, accuracy, f1 in (
                (0, 0.1, 0.6),
                (1, best, 0.8),
                (2, None, None),
                (3, 0.9, 0.85),
            )
        ]
        summary = {
            "status": "done",
            "outer_steps": 3,
            "metrics": {"test_accuracy": 0.9, "cleaning_f1_redrawn": 0.85},
        }
        files = {
            "steps.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
            "summary.json": json.dumps(summary),
        }
        made = {"task": "mls-linear", "method": "v-pbgd", "metric": "test_accuracy", "files": files}
        write_run(tmp_path, seed=seed, **made)
    table.main([str(tmp_path)])
    *_, line = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["mls-linear", "`v-pbgd`", "90.00 ± 0.00 / 85.00 ± 0.00"]
    assert cells[3] == "94.00 ± 12.71 / 80.00 ± 0.00"  # t = 12.71 for two seeds that are 2 apart
    assert cells[4] == "90.10: within its interval"
