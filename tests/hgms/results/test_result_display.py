"""Results in a notebook: short, as data frames, as pictures, as reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects
from support.own_problems import Halve

from hgms.comparison import Comparison, compare
from hgms.config import Budget
from hgms.runs import RunResult, run
from hgms_core import ConfigError, Problem

pytestmark = pytest.mark.usefixtures("one_registry")


def problem(seed: int = 0) -> Problem:
    return Problem(
        theta0={"t": torch.ones(1)},
        x0={"x": torch.full((1000,), 1.0 + seed)},
        g=lambda t, x, b: (t["t"] * x["x"]).sum(),
        f=lambda t, x, b: x["x"].sum(),
        evaluate=lambda theta, x: {"test_accuracy": float(x["x"][0]) / 2},
    )


def result(**more: Any) -> RunResult:
    return run(Halve(), problem(), Budget(outer_steps=3), **more)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("shown") / "runs"
    methods = ["uniform", "hg-baseline"]
    return compare("quadratic", methods, "2 steps", 2, out, jobs=0, baselines=False, progress=False)


@pytest.mark.extended
def test_a_result_as_text_a_frame_and_a_report(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    kept, done = result(folder=tmp_path / "kept"), result()
    assert "500 at first, 125 at the end" in repr(done)
    frame = done.to_frame()
    assert frame["upper_loss"].tolist()[1:] == [500.0, 250.0, 125.0]
    assert frame["metric.test_accuracy"].tolist()[-1] == 0.0625
    for shown in (kept, done):
        assert "halve" in shown.report(tmp_path / "r.html").read_text()
    with rejects("unknown-suffix", str(tmp_path / "report.docx"), of=ConfigError):
        done.report(tmp_path / "report.docx")


def test_a_comparison_as_text_a_frame_a_picture_and_a_report_of_its_own_runs(
    comparison: Comparison, tmp_path: Path
) -> None:
    pytest.importorskip("pandas")
    assert "hg-baseline" in repr(comparison)
    frame = comparison.to_frame()
    assert (len(frame), frame["status"].unique().tolist()) == (4, ["done"])
    assert frame.groupby("method")["value"].mean().to_dict() == pytest.approx(
        {row.method: row.metrics["value"].mean for row in comparison.tables[0].rows}
    )
    pictures = [comparison.plot(what)._repr_png_()[0] for what in ("differences", "curves")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
    settings: dict[str, Any] = {"jobs": 0, "baselines": False, "progress": False}
    compare("quadratic", "hg-baseline", "3 steps", 1, comparison.grid.out, **settings)
    text = comparison.report(tmp_path / "report.tex").read_text()
    assert ("hg-baseline" in text, "3 outer steps" in text) == (True, False)
