"""The grids on real weights build, and what reads their runs reads them right. Nothing is run
here.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "benchmarks" / "llm" / "weights"


@pytest.mark.parametrize("name", ["denoising", "german", "mathematics", "ranking", "rate"])
def test_a_grid_builds_and_each_method_has_the_tables_that_are_meant_for_it(name: str) -> None:
    from hgms_mix.stages.compare.mixes import Contest

    contest = Contest.of(WEIGHTS / f"{name}.toml")
    assert contest.reference == "uniform-long"
    assert contest.roles[contest.reference] == "floor"
    assert {seed for _, seed in contest.mixes} == set(range(5))
    for (label, _), config in contest.mixes.items():
        trained = config.sample.size * config.finetune.epochs
        if config.finetune.start == "reweighted":
            allowed = range(1)  # its model is the one that was trained while it learned
        elif label in ("uniform-long", "random-long", "validation-rows", "oracle"):
            allowed = range(320, 323)  # it learns nothing, so all its passes train
        else:
            allowed = range(1, 201)  # it has spent passes on learning
        assert trained in allowed, label


def report(folder: Path, label: str, seed: int, weights: dict[str, float]) -> None:
    place = folder / "denoising" / f"{label}-0123abcd" / f"seed-{seed}"
    place.mkdir(parents=True)
    facts = {
        "seed": seed,
        "sources": [{"source": name, "weight": weight} for name, weight in weights.items()],
        "test": {"german": {"token_loss": {"value": 2.5 + seed}}},
        "stages": {
            "reweight": {"processor_seconds": 80.0},
            "sample": {"processor_seconds": 1.0},
            # seed 0 has none of its fine-tuning
            "finetune": {"processor_seconds": 2.0} if seed else {},
        },
    }
    (place / "report.json").write_text(json.dumps(facts), encoding="utf-8")


def test_halves_are_compared_in_log_odds_over_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(WEIGHTS)
    import halves

    for seed, (first, second) in enumerate([(0.4, 0.2), (0.2, 0.2), (0.1, 0.2)]):
        report(tmp_path, "hg-ms", seed, {"a-1": first, "a-2": second, "b": 1 - first - second})
    report(tmp_path, "rank", 0, {"a-1": 0.5, "a-2": 0.0, "b": 0.5})
    report(tmp_path, "validation", 0, {"b": 1.0})
    written = tmp_path / "halves.json"
    monkeypatch.setattr(
        sys, "argv", ["halves.py", str(tmp_path), "a-1", "a-2", "--json", str(written)]
    )
    halves.main()
    rows = json.loads(written.read_text(encoding="utf-8"))
    found = [(row["method"][:-9], row["seed"], row["processor_seconds"]) for row in rows]
    assert found == [
        ("hg-ms", 0, None),
        ("hg-ms", 1, 83.0),
        ("hg-ms", 2, 83.0),
        ("rank", 0, None),
        ("validation", 0, None),
    ]
    odds = [math.log(2), 0.0, -math.log(2), math.log(0.5 / halves.LEAST)]
    assert [row["z"] for row in rows[:4]] == pytest.approx(odds)
    assert rows[4]["z"] is None, "a mix without both halves says nothing of them"
    assert rows[2]["test_losses"] == {"german": 4.5}
    half_width = 4.302653 * math.log(2) / math.sqrt(3)
    told = f"+0.00 ± {half_width:.2f}, of one run {math.log(2):.2f}   seeds: 3"
    first, _ = capsys.readouterr().out.splitlines()
    assert first.endswith(f" {told}")
