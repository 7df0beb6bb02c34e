"""Problems and methods of a person's own, compared without a file, a task or a registration."""

from __future__ import annotations

import copy
import logging
import re
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from support.helpers import rejects
from support.own_problems import Follow, bowl

from hgms.comparison import compare
from hgms.config.fingerprinting import fingerprint
from hgms.report import build
from hgms.results import scan
from hgms.runs.loop import Run
from hgms.solvers import CG
from hgms_core import ConfigError, Data, Problem, State, Tree


def rows(comparison: Any, table: int = 0) -> dict[str, float]:
    results = comparison.tables[table]
    return {row.method: row.metrics[results.metric].mean for row in results.rows}


def test_a_function_of_the_seed_with_methods_by_name_and_of_ones_own(tmp_path: Path) -> None:
    """The exact method's distance to the optimum after n steps is (1 − 2·rate)ⁿ of that at the
    start.
    """
    methods = {"half": Follow(0.25), "whole": Follow(0.5), "floor": "uniform"}
    comparison = compare(bowl, methods, "3 steps", seeds=3)
    assert comparison.complete
    [results] = comparison.tables
    assert (results.task, results.metric, results.higher_is_better, results.reference) == (
        "bowl",
        "distance",
        False,
        "floor",
    )
    starts = [float((2 + bowl(seed).lower_data.whole["a"].mean()).abs()) for seed in range(3)]
    means = rows(comparison)
    assert means["half"] == pytest.approx(sum(starts) / 3 / 8)
    assert means["whole"] == pytest.approx(0.0, abs=1e-12)
    assert means["floor"] > means["half"]
    assert "paired by seed" in str(comparison)
    found = comparison.result("half", seed=1)
    torch.testing.assert_close(
        found.theta["t"], (2 + bowl(1).lower_data.whole["a"].mean()).reshape(1) * 7 / 8
    )
    assert comparison.as_dict()["out"] is None


def test_the_folder_lives_as_long_as_the_comparison() -> None:
    comparison = compare(bowl(), Follow(), "1 steps", seeds=1, baselines=False)
    out = comparison.grid.out
    assert len(scan(out)[0]) == 1
    del comparison
    assert not out.exists()


def test_several_problems_and_a_task_by_name_in_one_comparison() -> None:
    comparison = compare(
        {"mine": bowl(), "other": bowl(3), "ridge": "quadratic"}, ["uniform"], "1 steps", seeds=1
    )
    assert [results.task for results in comparison.tables] == ["mine", "other", "ridge"]
    assert [
        results.task for results in compare([bowl(), bowl(3)], [Follow()], "1 steps", 1).tables
    ] == ["problem", "problem-2"]


def test_without_metrics_the_upper_loss_on_held_out_rows_is_compared() -> None:
    """One row of six is held out; x is the mean of the other five, plus 2."""
    comparison = compare(bowl(metrics=False), {"whole": Follow(0.5)}, "1 steps", seeds=1)
    [results] = comparison.tables
    assert (results.metric, results.higher_is_better) == ("upper_loss", False)
    a = bowl().lower_data.whole["a"]
    of_each = [float(((a.sum() - row) / 5 - row).square()) for row in a]
    assert any(rows(comparison)["whole"] == pytest.approx(loss) for loss in of_each)
    by_loss = compare(bowl(), {"whole": Follow(0.5)}, "1 steps", seeds=1, metric="upper_loss")
    assert rows(by_loss) == pytest.approx(rows(comparison))
    said = "upper_loss is f on 1 of the 6 validation rows, which are held out from all methods"
    assert said in str(comparison)
    assert said not in str(compare(bowl(), {"whole": Follow(0.5)}, "1 steps", seeds=1))


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
    return Problem(
        theta0=torch.zeros(1, dtype=torch.float64),
        x0={"x": torch.zeros(count, dtype=torch.float64)},
        g=lambda theta, x, batch: (x["x"] - theta).square().sum(),
        f=lambda theta, x, batch: (x["x"][batch["index"]] - batch["a"]).square().mean(),
        lower_data={"a": a},
        upper_data={"a": a},
    )


def test_no_method_sees_the_rows_that_it_is_ranked_on() -> None:
    """It has loss 0 on all rows that it sees, and a² on each of the two that it does not."""
    comparison = compare(of_rows(8), Memorise(), "1 steps", seeds=1, baselines=False)
    squares = [float(row) ** 2 for row in range(1, 9)]
    means = [(one + two) / 2 for one in squares for two in squares if one != two]
    loss = rows(comparison)["memorise"]
    assert loss in means
    again = compare(of_rows(8), Memorise(), "2 steps", seeds=[3], baselines=False)
    assert rows(again)["memorise"] == loss, "the same rows in every run"


def test_a_loss_without_rows_is_ranked_as_it_is() -> None:
    """f is no estimate of anything: 0.25 at x = θ0 = 1, in every seed."""
    one = torch.ones(1, dtype=torch.float64)
    problem = Problem(
        theta0=one,
        x0={"x": one},
        g=lambda theta, x, batch: (x["x"] - theta).square().sum(),
        f=lambda theta, x, batch: (x["x"] - 1.5).square().sum(),
    )
    comparison = compare(problem, "uniform", "1 steps", seeds=2)
    assert rows(comparison) == {"uniform": pytest.approx(0.25)}
    assert comparison.tables[0].unjudged == ""
    assert "held out" not in str(comparison)


def test_with_too_few_rows_to_hold_some_out_nothing_is_ranked(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    comparison = compare(of_rows(3), {"a": Memorise(), "b": "uniform"}, "1 steps", 10, out)
    [results] = comparison.tables
    assert (rows(comparison)["a"], results.winner, results.floor) == (0.0, None, None)
    assert "upper_loss is of validation rows" in results.remarks[0]
    assert build([out]).sections[0].unjudged == results.unjudged


def test_a_task_declares_the_rows_of_its_metrics() -> None:
    """`upper_loss` of the quadratic task is of its validation rows, `value` of θ alone."""
    methods = {"a": "hg-implicit", "b": "uniform"}
    seen = compare("quadratic", methods, "1 steps", 2, metric="upper_loss", baselines=False, jobs=0)
    assert "upper_loss is of validation rows" in seen.tables[0].unjudged
    assert seen.tables[0].floor is None
    other = compare("quadratic", methods, "1 steps", 2, baselines=False, jobs=0)
    assert (other.tables[0].metric, other.tables[0].unjudged) == ("value", "")
    assert other.tables[0].floor == "b"


def test_seconds_of_compilation_are_in_records_and_frames(tmp_path: Path) -> None:
    comparison = compare(bowl, Follow(), "2 steps", 1, tmp_path, baselines=False)
    found = comparison.result("follow")
    assert [row["compile_seconds"] for row in found.records] == [0.0, 0.0, 0.0]
    assert found.compile_seconds == comparison.runs[0].compile_seconds == 0.0
    pytest.importorskip("pandas")
    assert comparison.to_frame()["compile_seconds"].tolist() == [0.0]


def test_trivial_baselines_that_fit_are_added() -> None:
    own = compare(bowl, Follow(), "1 steps", seeds=1)
    assert list(rows(own)) == ["follow", "uniform", "validation-only", "uniform-tilted"]
    assert own.tables[0].reference == "uniform"
    named = compare(bowl, {"mine": Follow(), "floor": "theta0"}, "1 steps", seeds=1)
    assert list(rows(named)) == ["mine", "floor", "validation-only", "uniform-tilted"]
    without = attrs.evolve(bowl(), upper_data=Data.none(), f=lambda t, x, _: x["x"].sum())
    assert list(rows(compare(without, Follow(), "1 steps", seeds=1))) == ["follow", "uniform"]
    alone = compare(bowl, Follow(), "1 steps", seeds=1, baselines=False)
    assert list(rows(alone)) == ["follow"]


def test_a_line_per_run_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    compare(bowl, Follow(), "1 steps", seeds=2, baselines=False)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": done")[0] for line in lines] == [
        "[1/2] bowl, follow, seed 0",
        "[2/2] bowl, follow, seed 1",
    ]
    compare(bowl, Follow(), "1 steps", seeds=2, baselines=False, progress=False)
    assert capsys.readouterr().err == ""


def test_which_way_is_better_is_said_where_the_name_does_not() -> None:
    with rejects("missing-option", "problem", "higher_is_better", of=ConfigError) as caught:
        compare(bowl(), Follow(), "1 steps", 1, metric="curious")
    assert "curious" in caught.value.message
    assert (
        compare(bowl(), Follow(), "1 steps", 1, metric="curious", higher_is_better=True)
        .tables[0]
        .higher_is_better
    )
    with rejects("unknown-metric", of=ConfigError):
        compare(bowl, Follow(), "1 steps", 1, metric="accuracy")


# --- with a folder
# --------------------------------------------------------------------------------------------------


class Counted:
    """How many steps were carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        advance = Run.advance

        def counted(run: Run) -> None:
            self.steps += 1
            advance(run)

        monkeypatch.setattr(Run, "advance", counted)

    def of(self, call: Callable[[], Any]) -> tuple[Any, int]:
        before = self.steps
        return call(), self.steps - before


def test_a_second_call_reads_what_is_finished_and_runs_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted = Counted(monkeypatch)

    def again(scale: float = 1.0, rate: float = 0.25, seeds: int = 2) -> Any:
        return compare(
            {"mine": lambda seed: bowl(seed, scale=scale)},
            Follow(rate),
            "2 steps",
            seeds,
            tmp_path,
            baselines=False,
        )

    first, steps = counted.of(again)
    assert steps == 4
    same, steps = counted.of(again)
    assert (steps, str(same)) == (0, str(first)), "read back"
    assert counted.of(lambda: again(seeds=3))[1] == 2
    assert not caplog.records
    _, steps = counted.of(lambda: again(scale=3.0))
    assert steps == 4, "another f: nothing of it may be used again"
    [warning] = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert "holds runs of another task.make: they are not used, follow runs anew" in warning
    assert counted.of(lambda: again(rate=0.5))[1] == 4
    runs, skipped = scan(tmp_path)
    assert (len(runs), skipped) == (7, []), "nothing was lost"


def test_a_function_that_makes_another_problem_of_the_same_seed_is_found_out(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"

    def make(seed: int) -> Problem:
        return bowl(seed, rows=6 + len(data.read_text()))

    data.write_text("")
    assert compare(make, [Follow(), "uniform"], "1 steps", 2, tmp_path / "out").complete
    assert compare(make, [Follow(), "uniform"], "1 steps", 2, tmp_path / "out").complete
    data.write_text("x")
    again = compare(make, Follow(), "1 steps", 3, tmp_path / "out", baselines=False)
    assert [(failure.seed, failure.status) for failure in again.failures] == [
        (0, "damaged"),
        (1, "damaged"),
    ]
    assert "(lower_data, upper_data, evaluate)" in again.failures[0].reason
    assert again.tables[0].rows[0].metrics["distance"].count == 1, "that of the new seed"


@pytest.mark.extended
def test_a_difference_of_zero_in_every_seed_is_explained_where_it_is_printed() -> None:
    methods = {"a": "uniform", "b": "uniform", "other": "hg-implicit"}
    first = compare("quadratic", methods, "2 steps", 2, reference="a", baselines=False)
    assert "b       floor" in str(first)
    assert "(exact): the same difference in every seed" in str(first)
    other = compare("quadratic", methods, "2 steps", 2, reference="other", baselines=False)
    # not in the table, which has differences to `other` alone
    assert other.tables[0].pairs["a", "b"].half_width == 0
    assert "(exact): the same difference in every seed" not in str(other)


def test_one_problem_for_all_seeds_is_remarked() -> None:
    line = (
        "problem: the same problem for every seed, so intervals are over the methods' own "
        "chance alone"
    )
    assert line in str(compare(bowl(), Follow(), "1 steps", seeds=2))
    assert line not in str(compare(bowl, Follow(), "1 steps", seeds=2))
    assert line not in str(compare(bowl(), Follow(), "1 steps", seeds=1))


def test_what_was_broken_off_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    for name in ("whole", "broken"):
        compare(bowl, Follow(), "4 steps", 2, tmp_path / name, baselines=False)
    [folder] = (tmp_path / "broken").glob("bowl/*/seed-1")
    (folder / "summary.json").unlink()
    compare(bowl, Follow(), "4 steps", 2, tmp_path / "broken", baselines=False)
    names = ("bowl/*/*/steps.jsonl", "bowl/*/*/summary.json")
    kept = [
        [
            (path.relative_to(out), path.read_bytes())
            for name in names
            for path in sorted(out.glob(name))
        ]
        for out in (tmp_path / "whole", tmp_path / "broken")
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 4


def test_a_run_that_fails_is_a_failure_and_the_others_go_on(tmp_path: Path) -> None:
    comparison = compare(
        bowl,
        {"sound": Follow(), "breaks": Follow(breaks=1)},
        "2 steps",
        3,
        tmp_path,
        baselines=False,
    )
    assert "retry_failed=True runs them once more" in str(comparison)
    [failure] = comparison.failures
    assert (failure.method, failure.seed, failure.status) == ("breaks", 1, "failed")
    assert failure.reason.startswith("RuntimeError: as it was told (own_problems.py:")
    assert [row.failed for row in comparison.tables[0].rows] == [0, 1]
    with rejects("no-result", str(failure.path), of=ConfigError):
        comparison.result("breaks", 1)
    with rejects("unknown-method", "method", of=ConfigError):
        comparison.result("soundd", 1)
    with rejects("missing-option", "seed", of=ConfigError):
        comparison.result("sound")


# --- what is refused before anything runs
# --------------------------------------------------------------------------------------------------


def test_methods_that_cannot_fit_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)
    whole = bowl()
    partly = attrs.evolve(
        whole, upper_data={role: whole.upper_data[role] for role in ("differentiate", "select")}
    )
    with rejects("several-errors", of=ConfigError) as caught:
        compare({"mine": partly}, [Follow(), "uniform", "oracle-clean"], "1 steps", seeds=1)
    uniform, clean = caught.value.errors
    assert (uniform.code, uniform.place) == ("not-supported", ("methods", "uniform"))
    assert 'keep = "last"' in str(uniform.hint)
    assert (clean.code, clean.place) == ("not-supported", ("methods", "oracle-clean"))
    assert "`clean`" in clean.message
    assert counted.steps == 0
    assert compare(whole, ["uniform", "validation-only"], "1 steps", seeds=1).complete


class Once(torch.autograd.Function):
    """A square with one derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def test_a_loss_without_a_second_derivative_is_known_before_it_runs() -> None:
    problem = attrs.evolve(bowl(), g=lambda theta, x, _: Once.apply(x["x"] - theta["t"]).sum())
    with rejects("not-supported", "methods", "hg-ms", of=ConfigError) as caught:
        compare(problem, "hg-ms", "1 steps", seeds=1)
    assert "twice differentiable" in caught.value.message
    table = {"name": "hg-implicit", "hypergradient": {"strategy": "difference"}}
    assert compare(problem, table, "1 steps", seeds=1).complete


@pytest.mark.parametrize(
    ("call", "code", "place"),
    [
        (lambda: compare(3, "uniform", "1 steps"), "wrong-type", ("problems",)),
        (lambda: compare(bowl, Follow, "1 steps"), "wrong-type", ("methods",)),
        (
            lambda: compare(bowl, "uniformm", "1 steps"),
            "unknown-method",
            ("methods", "uniformm", "name"),
        ),
        (lambda: compare(bowl, [Follow(), Follow()], "1 steps"), "duplicate-label", ("methods",)),
        (lambda: compare(lambda seed: 3, Follow(), "1 steps"), "wrong-result", ("problem",)),
        (lambda: compare(bowl, Follow(), "1 steps", jobs=2), "not-supported", ("jobs",)),
        (
            lambda: compare(bowl, Follow(), "1 steps", run={"device": "cuda"}),
            "conflicting-options",
            ("run", "device"),
        ),
        (lambda: compare(bowl, Follow(), 3), "wrong-type", ("budget",)),
        (lambda: compare(bowl, Follow(), "1 steps", "3"), "wrong-type", ("seeds",)),
        (lambda: compare(bowl, [], "1 steps"), "missing-option", ("methods",)),
        (lambda: compare(bowl, Follow(), "1 steps", run=3), "wrong-type", ("run",)),
        (
            lambda: compare(bowl, Follow(), "1 steps", higher_is_better="yes"),
            "wrong-type",
            ("higher_is_better",),
        ),
        (lambda: compare(lambda: bowl(), Follow(), "1 steps"), "wrong-signature", ("problem",)),
        (lambda: compare(torch.nn.Linear(1, 1), "uniform", "1 s"), "wrong-type", ("problem",)),
        (
            lambda: compare(bowl, {"name": "hg-ms", "hypergradient": {"solver": CG}}, "1 steps"),
            "wrong-part",
            ("methods", "hg-ms", "hypergradient", "solver"),
        ),
        (
            lambda: compare(
                attrs.evolve(bowl(), evaluate=lambda model, _: model(1)), Follow(), "1 steps"
            ),
            "function-failed",
            ("problem", "evaluate"),
        ),
        (
            lambda: compare({"a b": bowl}, Follow(), "1 steps"),
            "wrong-value",
            ("problems", 0, "label"),
        ),
        (
            lambda: compare(
                attrs.evolve(bowl(), evaluate=lambda theta, x: 3.0), Follow(), "1 steps"
            ),
            "wrong-metric",
            ("problem", "evaluate"),
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    call: Callable[[], Any], code: str, place: tuple[str | int, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert (code, place) in [(error.code, error.place) for error in caught.value.errors]


def test_a_sweep_over_the_fields_of_an_object() -> None:
    @attrs.frozen(kw_only=True)
    class Rated:
        rate: float = 0.01
        name = "rated"

        def init(self, problem: Problem, seed: int) -> State:
            return Follow().init(problem, seed)

        def step(
            self, problem: Problem, state: State, progress: float
        ) -> tuple[State, dict[str, Any]]:
            return Follow(self.rate).step(problem, state, progress)

        def result(self, state: State) -> tuple[Tree, Tree]:
            return Follow().result(state)

    sweep = {"trials": 3, "sampler": "grid", "space": {"rated": {"rate": [0.01, 0.5, 0.1]}}}
    comparison = compare(bowl, Rated(), "2 steps", seeds=1, sweep=sweep)
    assert comparison.sweeps[0]["chosen_values"] == {"rate": 0.5}
    assert rows(comparison)["rated"] == pytest.approx(0.0, abs=1e-12)


# --- fingerprints
# --------------------------------------------------------------------------------------------------

SCALE = 2.0


def scaled(x: float) -> float:
    return SCALE * x


def test_a_fingerprint_knows_values_code_closures_and_globals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_closure(power: int) -> Callable[[float], float]:
        return lambda x: x**power

    assert fingerprint(with_closure(2)) == fingerprint(with_closure(2))
    model = torch.nn.Linear(2, 1)
    before = fingerprint(scaled)
    monkeypatch.setitem(scaled.__globals__, "SCALE", 3.0)
    distinct = [
        before,
        fingerprint(scaled),
        fingerprint(with_closure(2)),
        fingerprint(with_closure(3)),
        fingerprint(model),
        fingerprint(Follow()),
        fingerprint(Follow(0.5)),
        fingerprint(torch.zeros(2)),
        fingerprint(torch.zeros(2).double()),
        fingerprint(torch.zeros(1, 2)),
        fingerprint({"a": 1}),
        fingerprint({"a": 1.0}),
        fingerprint(Follow),
    ]
    assert len(set(distinct)) == len(distinct)
    with torch.no_grad():
        model.weight.add_(1)
    assert fingerprint(model) != distinct[4]
    alike = [
        re.compile("a"),
        Decimal(1),
        range(3),
        deque([1]),
        torch.nn.Dropout(0.1),
        lambda: "x",
        partial(scaled, 1),
    ]
    other = [
        re.compile("b"),
        Decimal(2),
        range(4),
        deque([2]),
        torch.nn.Dropout(0.2),
        lambda: "y",
        partial(scaled, 2),
    ]
    assert [fingerprint(value) for value in alike] == [
        fingerprint(copy.deepcopy(value)) for value in alike
    ]
    assert all(fingerprint(a) != fingerprint(b) for a, b in zip(alike, other, strict=True))
    loop: list[Any] = []
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)
