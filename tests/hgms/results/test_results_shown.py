"""Results in a notebook: short, as data frames, as pictures, as reports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects
from support.own_problems import Halve

from hgms.comparison import Comparison, compare
from hgms.runs import RunResult, run
from hgms_core import Budget, ConfigError, MissingExtra, Problem

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


def test_a_result_as_text_a_frame_a_picture_and_a_report(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    kept, done = result(folder=tmp_path / "kept"), result()
    assert "500 at first, 125 at the end" in repr(done)
    assert (len(repr(done).splitlines()) < 10, "<table" in done._repr_html_()) == (True, True)
    frame = done.to_frame()
    assert frame["step"].tolist() == [0, 1, 2, 3]
    assert frame["upper_loss"].tolist()[1:] == [500.0, 250.0, 125.0]
    assert frame["metric.test_accuracy"].tolist()[-1] == 0.0625
    assert done.plot(backend="plotly")
    png, size = done.plot()._repr_png_()
    assert (png[:4], size["width"] > 300) == (b"\x89PNG", True)
    texts = [shown.report(tmp_path / "r.md").read_text() for shown in (kept, done)]
    results = [text.partition("### Outer steps")[0] for text in texts]  # what follows has seconds
    assert "| halve | 6.25 |" in results[0]
    assert results[0] == results[1]
    with rejects("unknown-suffix", str(tmp_path / "report.docx"), of=ConfigError):
        done.report(tmp_path / "report.docx")


def test_a_comparison_as_text_a_frame_a_picture_and_a_report_of_its_own_runs(
    comparison: Comparison, tmp_path: Path
) -> None:
    pytest.importorskip("pandas")
    assert len(repr(comparison).splitlines()) < 10
    page = comparison._repr_html_()
    assert page.index('class="hgms-forest"') < page.index("<thead>")
    frame = comparison.to_frame()
    assert (len(frame), frame["status"].unique().tolist()) == (4, ["done"])
    assert frame.groupby("method")["value"].mean().to_dict() == pytest.approx(
        {row.method: row.metrics["value"].mean for row in comparison.tables[0].rows}
    )
    assert all(comparison.plot(what, backend="plotly") for what in ("differences", "curves"))
    with rejects("unknown-choice", "what", of=ConfigError):
        comparison.plot("curve")  # type: ignore[arg-type]
    out = comparison.grid.out
    settings: dict[str, Any] = {"jobs": 0, "baselines": False, "progress": False}
    more = compare("quadratic", "hg-baseline", "3 steps", 1, out, **settings)
    assert "2 outer steps" not in more.report(tmp_path / "more.md").read_text()
    text = comparison.report(tmp_path / "report.md").read_text()
    assert ("hg-baseline" in text, "3 outer steps" in text) == (True, False)


def test_a_comparison_of_own_problems_in_memory_shows_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    methods = {"halve": Halve(), "again": Halve()}
    shown = compare({"mine": problem}, methods, "3 steps", seeds=2, baselines=False)
    assert shown.to_frame()["test_accuracy"].tolist() == [0.0625, 0.125, 0.0625, 0.125]
    assert shown.tables[0].forest is not None
    assert shown.plot("curves", backend="plotly")
    page = shown.report(tmp_path / "report.html").read_text()
    assert str(shown.grid.out) not in page.partition("<main>")[0]


def test_without_pandas_it_is_said(monkeypatch: pytest.MonkeyPatch, comparison: Comparison) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for shown in (comparison, result()):
        with rejects("missing-package", of=MissingExtra) as caught:
            shown.to_frame()
        assert caught.value.install == "pip install 'hgms[notebook]'"
