"""Problems and methods of a person's own, compared without a file, a task or a registration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.helpers import rejects
from support.own_problems import Follow, bowl

from hgms.adapters import from_losses
from hgms.comparison import Comparison, compare
from hgms.report import build
from hgms.results import scan
from hgms.runs.loop import Run
from hgms.solvers import CG
from hgms_core import ConfigError, Data, Problem, State, Tree

pytestmark = pytest.mark.usefixtures("one_registry")


def alone(problem: Any, methods: Any = None, budget: str = "1 steps", seeds: Any = 1, **more: Any):
    """Without baselines."""
    return compare(problem, methods or Follow(), budget, seeds, **{"baselines": False, **more})


def rows(comparison: Comparison, table: int = 0) -> dict[str, float]:
    results = comparison.tables[table]
    return {row.method: row.metrics[results.metric].mean for row in results.rows}


def test_a_function_of_the_seed_with_methods_by_name_and_of_ones_own() -> None:
    """The exact method's distance to the optimum after n steps is (1 − 2·rate)ⁿ of that at the
    start.
    """
    methods = {"half": Follow(0.25), "whole": Follow(0.5), "floor": "uniform"}
    comparison = alone(bowl, methods, "3 steps", seeds=2)
    [results] = comparison.tables
    assert (comparison.complete, comparison.as_dict()["out"]) == (True, None)
    assert (results.task, results.metric, results.reference) == ("bowl", "distance", "floor")
    ends = [2 + bowl(seed).lower_data.whole["a"].mean() for seed in range(2)]
    means = rows(comparison)
    assert means["half"] == pytest.approx(float(sum(map(abs, ends))) / 2 / 8)
    assert means["whole"] == pytest.approx(0.0, abs=1e-12)
    assert means["floor"] > means["half"]
    found = comparison.result("half", seed=1)
    torch.testing.assert_close(found.theta["t"], ends[1].reshape(1) * 7 / 8)
    with rejects("unknown-method", "method", of=ConfigError):
        comparison.result("hafl", 1)


def test_several_problems_in_a_folder_that_lives_as_long_as_the_comparison() -> None:
    comparison = alone({"mine": bowl(), "ridge": "quadratic"}, ["uniform"])
    assert [results.task for results in comparison.tables] == ["mine", "ridge"]
    out = comparison.grid.out
    assert len(scan(out)[0]) == 2
    del comparison
    assert not out.exists()


def test_trivial_baselines_that_fit_are_added() -> None:
    own = compare(bowl, Follow(), "1 steps", seeds=1)
    assert list(rows(own)) == ["follow", "uniform", "validation-only", "uniform-tilted"]
    assert own.tables[0].reference == "uniform"
    without = attrs.evolve(bowl(), upper_data=Data(), f=lambda t, x, _: x["x"].sum())
    named = compare(without, {"mine": Follow(), "floor": "theta0"}, "1 steps", seeds=1)
    assert list(rows(named)) == ["mine", "floor"]


def test_a_script_prints_a_line_for_each_run_and_is_told_of_one_problem_for_all_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its intervals are over the methods' own chance alone."""
    shown = [str(alone(problem, seeds=2)) for problem in (bowl, bowl())]
    assert ["the same problem for every seed" in text for text in shown] == [False, True]
    printed = capsys.readouterr()
    titles = [line.partition(": ")[0] for line in printed.err.splitlines()]
    assert titles[:2] == [f"[{n + 1}/2] bowl, follow, seed {n}" for n in range(2)]
    assert (len(titles), printed.out) == (4, "")


@pytest.mark.extended
def test_a_second_call_reads_what_is_finished_and_runs_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    advance = Run.advance
    monkeypatch.setattr(Run, "advance", lambda run: (taken.append(run), advance(run))[1])

    def steps(scale: float = 1.0, rate: float = 0.25, seeds: int = 2) -> int:
        """How many steps a call carries out."""
        taken.clear()
        problem = {"mine": lambda seed: bowl(seed, scale=scale)}
        alone(problem, Follow(rate), "2 steps", seeds, out=tmp_path)
        return len(taken)

    assert (steps(), steps(), steps(seeds=3)) == (4, 0, 2)
    # another f: nothing of it may be used again
    assert steps(scale=3.0) == 4
    assert steps(rate=0.5) == 4
    runs, skipped = scan(tmp_path)
    assert (len(runs), skipped) == (7, []), "nothing was lost"


def test_a_function_that_makes_another_problem_of_the_same_seed_is_found_out(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"

    def make(seed: int) -> Problem:
        return bowl(seed, rows=6 + len(data.read_text()))

    data.write_text("")
    assert alone(make, seeds=2, out=tmp_path / "out").complete
    data.write_text("x")
    again = alone(make, seeds=3, out=tmp_path / "out")
    found = [(failure.seed, failure.status) for failure in again.failures]
    assert found == [(0, "damaged"), (1, "damaged")]
    assert "(lower_data, upper_data, evaluate)" in again.failures[0].reason
    assert again.tables[0].rows[0].metrics["distance"].count == 1, "that of the new seed"


SOLVER = {"name": "hg-ms", "hypergradient": {"solver": CG}}


@pytest.mark.parametrize(
    ("arguments", "code", "place"),
    [
        ({"problem": 3}, "wrong-part", ("problems",)),
        ({"problem": lambda seed: 3}, "wrong-result", ("problem",)),
        ({"problem": lambda: bowl()}, "wrong-signature", ("problem",)),
        ({"problem": torch.nn.Linear(1, 1)}, "wrong-type", ("problem",)),
        ({"problem": {"a b": bowl}}, "wrong-value", ("problems", 0, "label")),
        (
            {"problem": attrs.evolve(bowl(), evaluate=lambda m, _: m(1))},
            "function-failed",
            ("problem", "evaluate"),
        ),
        (
            {"problem": attrs.evolve(bowl(), evaluate=lambda theta, x: 3.0)},
            "wrong-metric",
            ("problem", "evaluate"),
        ),
        ({"methods": Follow}, "wrong-part", ("methods",)),
        ({"methods": "uniformm"}, "unknown-method", ("methods", "uniformm", "name")),
        ({"methods": [Follow(), Follow()]}, "duplicate-label", ("methods",)),
        ({"methods": [()][:0]}, "missing-option", ("methods",)),
        ({"methods": SOLVER}, "wrong-part", ("methods", "hg-ms", "hypergradient", "solver")),
        ({"jobs": 2}, "not-supported", ("jobs",)),
        ({"run": {"device": "cuda"}}, "conflicting-options", ("run", "device")),
        ({"budget": 3}, "wrong-type", ("budget",)),
        ({"higher_is_better": "yes"}, "wrong-type", ("higher_is_better",)),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: dict[str, Any], code: str, place: tuple[str | int, ...]
) -> None:
    given = {"problem": bowl, "methods": Follow(), "budget": "1 steps", **arguments}
    with pytest.raises(ConfigError) as caught:
        compare(given.pop("problem"), given.pop("methods"), given.pop("budget"), **given)
    assert (code, place) in [(error.code, error.place) for error in caught.value.errors]


def test_without_metrics_the_upper_loss_on_held_out_rows_is_compared() -> None:
    """One row of six is held out; x is the mean of the other five, plus 2."""
    comparison = alone(bowl(metrics=False), {"whole": Follow(0.5)})
    [results] = comparison.tables
    assert (results.metric, results.higher_is_better) == ("upper_loss", False)
    a = bowl().lower_data.whole["a"]
    of_each = [float(((a.sum() - row) / 5 - row).square()) for row in a]
    assert any(rows(comparison)["whole"] == pytest.approx(loss) for loss in of_each)


class Memorise:
    """No more than a table: x is right on each validation row that it is shown."""

    name = "memorise"

    def init(self, problem: Problem, seed: int) -> State:
        x = problem.x0["x"].clone()
        for part in problem.upper_data.values():
            batch = part.batch(None)
            x[batch["index"]] = batch["a"]
        return {"theta": dict(problem.theta0), "x": {"x": x}}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        return state, {"upper_loss": 0.0, "oracle_calls": 1}

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]


def of_rows(count: int) -> Problem:
    """Each number of x is for one row, so no row says anything of another."""
    a = torch.arange(1.0, count + 1.0, dtype=torch.float64)
    return from_losses(
        theta0=torch.zeros(1, dtype=torch.float64),
        x0={"x": torch.zeros(count, dtype=torch.float64)},
        g=lambda theta, x, batch: (x["x"] - theta).square().sum(),
        f=lambda theta, x, batch: (x["x"][batch["index"]] - batch["a"]).square().mean(),
        lower_data={"a": a},
        upper_data={"a": a},
    )


def test_no_method_sees_the_rows_that_it_is_ranked_on() -> None:
    """It has loss 0 on all rows that it sees, and a² on each of the two that it does not."""
    loss = rows(alone(of_rows(8), Memorise()))["memorise"]
    squares = [float(row) ** 2 for row in range(1, 9)]
    assert loss in [(one + two) / 2 for one in squares for two in squares if one != two]
    again = alone(of_rows(8), Memorise(), "2 steps", seeds=[3])
    assert rows(again)["memorise"] == loss, "the same rows in every run"


@pytest.mark.extended
def test_with_too_few_rows_to_hold_some_out_nothing_is_ranked(tmp_path: Path) -> None:
    [results] = alone(
        of_rows(3), {"a": Memorise(), "b": Follow()}, seeds=10, out=tmp_path / "runs"
    ).tables
    assert (results.winner, results.floor) == (None, None)
    assert "upper_loss is of validation rows" in results.remarks[0]
    assert build([tmp_path / "runs"]).sections[0].compared.unjudged == results.unjudged


@pytest.mark.parametrize(("metric", "judged"), [("upper_loss", False), ("value", True)])
def test_a_task_declares_the_rows_of_its_metrics(metric: str, judged: bool) -> None:
    """`upper_loss` of the quadratic task is of its validation rows, `value` of θ alone."""
    found = alone("quadratic", ["theta0", "uniform"], metric=metric, jobs=0)
    [results] = found.tables
    assert (results.unjudged == "", results.floor is not None) == (judged, judged)


def test_which_way_is_better_is_said_where_the_name_does_not() -> None:
    with rejects("missing-option", "problem", "higher_is_better", of=ConfigError):
        alone(bowl(), metric="curious")
    assert alone(bowl(), metric="curious", higher_is_better=True).tables[0].higher_is_better
