"""Tables and pictures of a comparison, and the live view."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from hgms_core.budget import Budget
from hgms_core.compare import draw, table
from hgms_core.plots import accuracy, weights
from hgms_core.progress import Progress
from hgms_core.runner import RunInfo, RunResult

METRICS = {"metric.weight_clean_q10": 0.4, "metric.weight_clean_q50": 0.6, "metric.weight_clean_q90": 0.8} | {
    "metric.weight_corrupted_q10": 0.1, "metric.weight_corrupted_q50": 0.2, "metric.weight_corrupted_q90": 0.3
}  # fmt: skip


def result(method: str, seed: int, final: float, cleans: bool = True) -> RunResult:
    rows: list[dict[str, Any]] = [
        {"step": step, "seconds": 0.5 * step, "oracle_calls": 10 * step, "metric.test_accuracy": final * step / 4}
        for step in range(5)
    ]
    if cleans:
        rows = [{**row, **METRICS} for row in rows]
    summary = {"metrics": {"test_accuracy": final}, "outer_steps": 4, "oracle_calls": 40}
    info = RunInfo(task="t", method=method, seed=seed, budget=Budget(outer_steps=4))
    return RunResult(info=info, theta={}, x={"x": torch.zeros(1)}, summary=summary, records=rows)


RESULTS = {
    "a": [result("a", 0, 0.8), result("a", 1, 0.9)],
    "b": [result("b", 0, 0.7, cleans=False), result("b", 1, 0.78, cleans=False)],
}


def test_differences_are_paired_by_seed() -> None:
    best, base = table(RESULTS, "test_accuracy", reference="b")
    assert best.metrics["test_accuracy"].mean == pytest.approx(0.85)
    assert best.difference is not None
    assert best.difference.mean == pytest.approx(0.11)
    # The two seeds differ by 0.10 and 0.12: far less than the methods' own spread over seeds.
    assert best.difference.half_width == pytest.approx(12.706 * 0.01, rel=1e-3)
    assert base.difference is None
    assert best.seconds.mean == 2.0
    plain = best.as_dict()
    assert plain["outer_steps"] == {"mean": 4.0, "half_width": 0.0, "n": 2}


def test_single_seed_has_no_half_width() -> None:
    [row] = table({"a": RESULTS["a"][:1]}, "test_accuracy")
    assert row.as_dict()["metrics"]["test_accuracy"]["half_width"] is None


def test_pictures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    written = draw(RESULTS, tmp_path / "new" / "folder", "test_accuracy")
    assert [path.name for path in written] == ["accuracy.png", "accuracy.svg", "weights.png", "weights.svg"]
    for path in written:
        head = path.read_bytes()[:200]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in path.read_bytes()[:2000]


def test_what_is_not_recorded_is_not_drawn(tmp_path: Path) -> None:
    assert weights({"b": [RESULTS["b"][0].records]}, tmp_path / "weights") == []
    assert len(accuracy({"none": [[{"step": 0}]]}, tmp_path / "accuracy")) == 2


def test_view_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as view:
        view.watch(RESULTS["a"][0].info, {"step": 3, "upper_loss": 0.5}, 0.5)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_view_shows_the_numbers_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    written = io.StringIO()
    original = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **_: original(file=written, force_terminal=True, width=250, color_system=None)
    )
    record = {
        "step": 3, "upper_loss": 0.25, "lower_loss": 1.5, "gap": 0.01, "hypergradient_norm": 2.0,
        "outcome": "negative-curvature", "iterations": 7, "metric.test_accuracy": 0.875,
    }  # fmt: skip
    with Progress() as view:
        view.watch(RESULTS["a"][0].info, {**record, "step": 0}, 0.0)
        view.watch(RESULTS["a"][0].info, record, 0.5)
    shown = written.getvalue()
    for part in (
        "a seed 0",
        "50%",
        "f 0.25",
        "g 1.5",
        "gap 0.01",
        "negative-curvature in 7",
        "test 87.5 %",
        "steps/s",
        "s left",
    ):
        assert part in shown
