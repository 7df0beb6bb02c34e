"""The null test of a mixture: its level by simulation, and its figures by hand."""

from __future__ import annotations

import doctest
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support.helpers import load_script

pytestmark = pytest.mark.extended

script = load_script(
    "hgms_llm_halves", Path(__file__).parents[2] / "benchmarks" / "llm" / "halves.py"
)
halves_test = script.halves_test


def test_its_examples_run() -> None:
    assert doctest.testmod(script) == (0, 4)


def test_it_reads_the_reports_of_a_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [[[0.45, 0.4], [0.05, 0.1]], [[0.5, 0.4], [0.05, 0.05]], [[0.35, 0.5], [0.1, 0.05]]]
    for seed, run in enumerate(runs):
        rows = [
            {"source": f"{name}-{half + 1}", "weight": weight}
            for name, pair in zip("ab", run, strict=True)
            for half, weight in enumerate(pair)
        ]
        folder = tmp_path / "task" / "method-0" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps({"sources": rows}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["halves.py", str(tmp_path), "a", "b"])
    script.main()
    assert capsys.readouterr().out.startswith("different sources part 4.5 times as far as")
    monkeypatch.setattr(sys, "argv", ["halves.py", str(tmp_path), "a", "b", "--json"])
    script.main()
    assert json.loads(capsys.readouterr().out) == halves_test(runs, "ab").as_dict()
    with pytest.raises(SystemExit, match=r"no weight of c-1, c-2 in"):
        script.read_weights(tmp_path, "ac")
    with pytest.raises(SystemExit, match=r"no seed-\*/report.json in"):
        script.read_weights(tmp_path / "task" / "method-0" / "seed-0", "ab")


def halves(runs: int, rows: float, run: float, seed: int) -> np.ndarray:
    """Weights of halves of three equal sources, drawn anew in every run from rows that stay:
    ``rows`` is the standard deviation that the luck of rows puts into a half, ``run`` that of the
    run.
    """
    rng = np.random.default_rng(seed)
    # a half is the mean of 25 of 50 rows
    table = np.tile(rows * math.sqrt(25) * rng.standard_normal((3, 50)), (runs, 1, 1))
    luck = rng.permuted(table, axis=2).reshape(runs, 3, 2, 25).mean(3)
    raised = np.exp(luck + run * rng.standard_normal((runs, 3, 2)))
    return raised / raised.sum((1, 2), keepdims=True)


@pytest.mark.parametrize(("rows", "run", "runs"), [(0.4, 0.0, 8), (0.3, 0.3, 2), (0.0, 0.5, 8)])
def test_the_halves_test_is_wrong_at_its_level_whether_rows_or_runs_are_what_varies(
    rows: float, run: float, runs: int
) -> None:
    """400 A/A experiments. More runs do not make the luck of the rows significant: every run has
    the same.
    """
    tests = [halves_test(halves(runs, rows, run, seed), "abc") for seed in range(400)]
    assert sum(test.evidence for test in tests) / 400 < 0.08
    assert sum(any(part.sign for part in test.sources) for test in tests) / 400 < 0.08
    covered = [part.apart_low <= 0 <= part.apart_high for test in tests for part in test.sources]
    assert np.mean(covered) > 0.93
    if run == 0.0:  # then nothing is conservative
        assert np.mean(covered) == pytest.approx(0.95, abs=0.02)
    assert np.median([test.ratio for test in tests]) == pytest.approx(1.0, abs=0.15)


def test_of_two_sources_the_test_is_a_t_test_of_their_distance_in_halves() -> None:
    """By hand: ℓ_a − ℓ_b has the variance of two sources' means, σ²/4 each."""
    weights = np.array([[[0.4, 0.3], [0.2, 0.1]], [[0.5, 0.2], [0.1, 0.2]]])
    logs = np.log(weights)
    squares = np.square(logs[..., 0] - logs[..., 1]).mean()
    distance = logs[:, 0].mean() - logs[:, 1].mean()
    expected = 2 * stats.t.sf(abs(distance) / math.sqrt(squares / 4 * 2), 4)
    test = halves_test(weights, "ab")
    assert test.p == pytest.approx(expected)
    assert [part.p for part in test.sources] == pytest.approx([expected, expected])
    assert test.sources[0].apart == pytest.approx(distance)


def test_the_ratio_is_that_of_root_mean_squares() -> None:
    logs = np.log([[[0.4, 0.3], [0.2, 0.1]]])[0]
    signal = [logs[0, i] - logs[1, j] for i in (0, 1) for j in (0, 1)]
    null = [logs[0, 0] - logs[0, 1], logs[1, 0] - logs[1, 1]]
    expected = math.sqrt(np.square(signal).mean() / np.square(null).mean())
    assert halves_test(np.exp(logs)[None], "ab").ratio == pytest.approx(expected)
