"""Results in a notebook: short, as data frames, as pictures, as reports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import rejects

from hgms.comparison import Comparison, compare
from hgms.runs import RunResult, run
from hgms_core import Budget, ConfigError, MissingExtra, Problem


class Halve:
    """Halves x in each step."""

    name = "halve"

    def init(self, problem: Problem, seed: int) -> dict[str, Any]:
        return {"x": dict(problem.x0)}

    def step(
        self, problem: Problem, state: dict[str, Any], progress: float
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        x = state["x"]["x"] / 2
        return {"x": {"x": x}}, {"upper_loss": x.sum(), "scores": x[:2]}

    def result(self, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        return {}, state["x"]


def result(**more: Any) -> RunResult:
    problem = Problem(
        theta0={},
        x0={"x": torch.ones(1000)},
        g=lambda t, x, b: x["x"].sum(),
        f=lambda t, x, b: x["x"].sum(),
        evaluate=lambda theta, x: {"test_accuracy": float(x["x"][0]) / 2},
    )
    return run(Halve(), problem, Budget(outer_steps=3), **more)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("shown") / "runs"
    return compare(
        ["quadratic"],
        ["uniform", "hg-baseline"],
        "2 steps",
        seeds=2,
        out=out,
        jobs=0,
        baselines=False,
        progress=False,
    )


def test_a_result_is_short() -> None:
    done = result()
    assert len(repr(done).splitlines()) < 10
    assert len(repr(done)) < 600
    assert "halve on problem, seed 0, 3 outer steps: done" in repr(done)
    assert "x [1000], float32" in repr(done)
    assert "500 at first, 125 at the end" in repr(done)
    assert "<table" in done._repr_html_()


def test_a_result_as_a_frame_a_picture_and_a_report(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    kept = result(folder=tmp_path / "kept")
    done = result()
    frame = done.to_frame()
    assert frame["step"].tolist() == [0, 1, 2, 3]
    assert frame["upper_loss"].tolist()[1:] == [500.0, 250.0, 125.0]
    assert frame["metric.test_accuracy"].tolist()[-1] == 0.0625
    for backend in ("matplotlib", "plotly"):
        assert done.plot(backend=backend)  # type: ignore[arg-type]
    png, size = done.plot()._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert size["width"] > 300
    texts = [
        shown.report(tmp_path / "out" / f"{number}.md").read_text()
        for number, shown in enumerate((kept, done))
    ]
    results = [text.partition("### Outer steps")[0] for text in texts]  # what follows has seconds
    assert "| halve | 6.25 |" in results[0]
    assert results[0] == results[1]


def test_a_comparison_is_short_and_shows_its_differences(comparison: Comparison) -> None:
    assert len(repr(comparison).splitlines()) < 10
    assert "quadratic  no winner is marked" in repr(comparison)
    page = comparison._repr_html_()
    assert page.index('class="hgms-forest"') < page.index("<thead>")
    assert all(line.split(":")[0] in page for line in comparison.remarks)


def test_a_comparison_as_a_frame_a_picture_and_a_report(
    comparison: Comparison, tmp_path: Path
) -> None:
    pytest.importorskip("pandas")
    frame = comparison.to_frame()
    assert len(frame) == 4
    assert frame.groupby("method")["value"].mean().to_dict() == pytest.approx(
        {row.method: row.metrics["value"].mean for row in comparison.tables[0].rows}
    )
    assert frame["status"].unique().tolist() == ["done"]
    for backend in ("matplotlib", "plotly"):
        for what in ("differences", "curves"):
            assert comparison.plot(what, backend=backend)  # type: ignore[arg-type]
    page = comparison.report(tmp_path / "report.html").read_text()
    assert 'class="hgms-forest"' in page
    assert "hg-baseline" in page


def test_other_runs_beside_them_are_no_part_of_it(comparison: Comparison, tmp_path: Path) -> None:
    more = compare(
        ["quadratic"],
        ["hg-baseline"],
        "3 steps",
        seeds=1,
        out=comparison.grid.out,
        jobs=0,
        progress=False,
    )
    assert "2 outer steps" not in more.report(tmp_path / "more.md").read_text()
    assert "3 outer steps" not in comparison.report(tmp_path / "report.md").read_text()


def test_a_comparison_of_own_problems_in_memory_shows_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pandas")

    def problem(seed: int) -> Problem:
        start = torch.full((4,), 1.0 + seed)
        return Problem(
            theta0={},
            x0={"x": start},
            g=lambda t, x, b: x["x"].sum(),
            f=lambda t, x, b: x["x"].sum(),
            evaluate=lambda theta, x: {"error": float(x["x"][0])},
        )

    shown = compare(
        {"mine": problem}, {"halve": Halve(), "again": Halve()}, "3 steps", seeds=2, baselines=False
    )
    assert "none" in repr(shown).splitlines()[-1]
    assert shown.to_frame()["error"].tolist() == [0.125, 0.25, 0.125, 0.25]
    assert shown.tables[0].forest is not None
    assert shown.plot("curves")
    page = shown.report(tmp_path / "report.html").read_text()
    assert str(shown.grid.out) not in page.partition("<main>")[0]
    with rejects("unknown-choice", "what", of=ConfigError):
        shown.plot("curve")  # type: ignore[arg-type]


def test_without_pandas_it_is_said(monkeypatch: pytest.MonkeyPatch, comparison: Comparison) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for shown in (comparison, result()):
        with rejects("missing-package", of=MissingExtra) as caught:
            shown.to_frame()
        assert caught.value.install == "pip install 'hgms[notebook]'"


def test_a_suffix_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with rejects("unknown-suffix", str(tmp_path / "report.docx"), of=ConfigError):
        result().report(tmp_path / "report.docx")
