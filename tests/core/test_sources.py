"""Named data sources: stratified batches, whole batches made when asked for, weights and counters
in the records, methods that end before their budget, and θ from a given mixture."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, field, frozen
from support.helpers import F64, assert_same, run_files
from support.source_problems import convex_sources

from hgms.compiled import Programs
from hgms.config import Budget
from hgms.generators.branches import Branches
from hgms.hypergradients import Fixed, Unrolled
from hgms.optim import SGD
from hgms.outer import Sgd
from hgms.runs import Interrupted, RunFolder, RunResult, RunSettings, run
from hgms.selectors import First
from hgms_core import ConfigError, Data, Key, Pipeline, Problem, Sources, State, Tree
from hgms_core.capabilities import Capabilities, Finishes

# --- stratified draws
# --------------------------------------------------------------------------------------------------

SIZES = {"a": 40, "b": 25, "c": 33}


def stratified(sizes: dict[str, int]) -> Data:
    return Data(size=sum(sizes.values()), strata=tuple(sizes.items()))


def drawn(
    sizes: dict[str, int], batch_size: int, steps: int, key: Key = Key(3)
) -> list[list[tuple[str, int]]]:
    """Each step's rows as (source, row within it), in order."""
    index = stratified(sizes).draw(key, batch_size, steps)
    assert index is not None
    assert index.shape == (steps, batch_size)
    rows = [(name, row) for name, size in sizes.items() for row in range(size)]
    return [sorted(rows[i] for i in step) for step in index.tolist()]


@pytest.mark.parametrize("batch_size", [2, 6, 8, 10])
def test_a_batch_holds_as_many_rows_of_each_source_up_to_one(batch_size: int) -> None:
    counts = [Counter(name for name, _ in step) for step in drawn(SIZES, batch_size, 200)]
    each, odd = divmod(batch_size, 3)
    found = {tuple(sorted(count[name] - each for name in SIZES)) for count in counts}
    assert found == {(0,) * (3 - odd) + (1,) * odd}
    # whichever got the odd ones is drawn at each use: each source as often, up to five standard
    # deviations
    share = odd / 3
    extra = [sum(count[name] - each for count in counts) for name in SIZES]
    assert extra == pytest.approx([200 * share] * 3, abs=5 * (200 * share * (1 - share)) ** 0.5)


def test_no_row_comes_twice_before_every_row_of_its_source_could_have_come() -> None:
    steps = drawn(SIZES, 9, 8)  # 24 rows of each, and 25 are in the smallest
    assert max(Counter(row for step in steps for row in step).values()) == 1
    # 12 of the 4 rows of a
    again = Counter(row for step in drawn({"a": 4, "b": 40}, 4, 6) for row in step)
    assert [again["a", row] for row in range(4)] == [3] * 4


def test_rows_are_drawn_by_name_in_whichever_order_the_sources_stand() -> None:
    turned = dict(reversed(SIZES.items()))
    for batch_size in (2, 6, 8):
        assert drawn(SIZES, batch_size, 20) == drawn(turned, batch_size, 20)
    # and what a source draws does not hang on which others there are
    alone = {row for step in drawn({"b": 25, "z": 50}, 6, 5) for row in step if row[0] == "b"}
    assert alone == {row for step in drawn(SIZES, 9, 5) for row in step if row[0] == "b"}


def test_draws_are_the_keys_alone_and_of_each_source_its_own() -> None:
    before = torch.get_rng_state()
    assert drawn(SIZES, 8, 5) == drawn(SIZES, 8, 5) != drawn(SIZES, 8, 5, Key(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert [stratified(SIZES).draw(Key(0), size, 2) for size in (98, None)] == [None, None]
    rows = [row for step in drawn({"a": 40, "b": 40}, 4, 5) for row in step]
    assert {row for name, row in rows if name == "a"} != {row for name, row in rows if name == "b"}


# --- whole batches made when asked for
# --------------------------------------------------------------------------------------------------

PROBLEM = convex_sources({"a": 0.5, "b": 0.3, "c": 0.2}, rows=10)


# --- weights and counters in the records
# --------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Mixer:
    """Moves θ towards source ``b`` and evaluates f on two rows a step, three on every second step.
    ``ends_at``: it is done then; ``interrupts_at``: Ctrl-C comes in that step."""

    name = "mixer"
    capabilities: ClassVar[Capabilities] = frozenset({Finishes})
    ends_at: int | None = None
    interrupts_at: int | None = field(default=None, metadata={"toml": False})

    def init(self, problem: Problem, seed: int) -> State:
        return {"seed": seed, "step": 0, "theta": dict(problem.theta0), "x": dict(problem.x0)}

    def step(self, problem: Problem, state: State, progress: float) -> tuple[State, dict[str, Any]]:
        step = state["step"]
        assert not self.is_finished(state), "a finished method was asked for another step"
        if self.interrupts_at == step:
            os.kill(os.getpid(), signal.SIGINT)
        rows = problem.upper_data["differentiate"].rows(torch.arange(2 + step % 2) + step)
        loss = problem.f(state["theta"], state["x"], rows)
        theta = {"logits": state["theta"]["logits"] + torch.tensor([0.0, 0.5, 0.0], dtype=F64)}
        return {**state, "step": step + 1, "theta": theta}, {
            "upper_loss": loss,
            "oracle_calls": 2 * (step + 1),
        }

    def is_finished(self, state: State) -> bool:
        return self.ends_at is not None and state["step"] >= self.ends_at

    def result(self, state: State) -> tuple[Tree, Tree]:
        return state["theta"], state["x"]


def counting() -> Problem:
    """:data:`PROBLEM`, which counts the rows that f sees, those of evaluation among them; from
    zero in each process.
    """
    rows: Counter[str] = Counter()

    def f(theta: Tree, x: Tree, batch: Tree) -> torch.Tensor:
        rows["rows"] += batch["a"].shape[0]
        return PROBLEM.f(theta, x, batch)

    def evaluate(theta: Tree, x: Tree) -> dict[str, float]:
        return {"test_loss": float(f(theta, x, PROBLEM.upper_data["select"].whole))}

    return evolve(PROBLEM, f=f, evaluate=evaluate, counters=lambda: rows)


def test_every_row_tells_the_weight_of_each_source_by_name() -> None:
    records = run(Mixer(), PROBLEM, Budget(outer_steps=4)).records
    for step, row in enumerate(records):
        odds = torch.softmax(torch.tensor([0.0, 0.5 * step, 0.0], dtype=F64), 0).tolist()
        assert [row[f"weight.{name}"] for name in "abc"] == pytest.approx(odds, rel=1e-14)
    plain = run(Mixer(), PROBLEM.without(Sources), Budget(outer_steps=1)).records
    assert not [key for row in plain for key in row if key.startswith(("weight.", "step_"))]


def test_a_step_tells_how_much_the_counters_grew_in_it_alone() -> None:
    """What evaluation, a discarded first step and an earlier run on the same problem counted is
    not a step's.
    """
    problem = counting()
    every_second = RunSettings(evaluate_every=2)
    for _ in range(2):
        records = run(Mixer(), problem, Budget(outer_steps=5), settings=every_second).records
        assert [row.get("step_rows") for row in records] == [None, 2, 3, 2, 3, 2]
    timed = run(Mixer(), problem, Budget(seconds=1e-6)).records
    assert [row.get("step_rows") for row in timed] == [None, 2]


def test_losses_that_count_their_calls_are_not_compiled() -> None:
    with pytest.raises(ConfigError, match="cannot be compiled") as error:
        evolve(counting(), compiler=Programs())
    assert (error.value.code, error.value.place) == ("conflicting-options", ("compiler",))


@pytest.mark.parametrize(
    ("stop", "ends_at", "every"), [(0, None, 2), (3, None, 2), (4, 5, 4)], ids=str
)
def test_a_resumed_run_with_sources_and_counters_writes_the_same_bytes(
    tmp_path: Path, stop: int, ends_at: int | None, every: int
) -> None:
    """Also where it is broken off just before its method is finished."""
    whole = RunFolder(tmp_path / "whole")
    broken = RunFolder(tmp_path / "broken")

    def go(method: Mixer, folder: RunFolder, resume: bool = False) -> RunResult:
        settings = RunSettings(evaluate_every=every)
        budget = Budget(outer_steps=7)
        return run(method, counting(), budget, folder=folder, settings=settings, resume=resume)

    go(Mixer(ends_at=ends_at), whole)
    with pytest.raises(Interrupted):
        go(Mixer(ends_at=ends_at, interrupts_at=stop), broken)
    go(Mixer(ends_at=ends_at), broken, resume=True)
    assert run_files(whole.path) == run_files(broken.path)
    assert b"weight.b" in run_files(whole.path)["steps.jsonl"]


# --- a method that ends before its budget
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends_at", [5, 0])
@pytest.mark.parametrize(
    ("budget", "when"),
    [
        (Budget(oracle_calls=1000), {"evaluations": 2}),
        (Budget(seconds=600.0), {"evaluate_every": 3}),
    ],
)
def test_a_finished_method_ends_its_run_and_is_evaluated(
    tmp_path: Path, budget: Budget, when: dict[str, int], ends_at: int
) -> None:
    made = RunFolder(tmp_path / "run")
    options: dict[str, Any] = {"folder": made, "settings": RunSettings(**when)}
    done = run(Mixer(ends_at=ends_at), counting(), budget, **options)
    assert (done.summary["status"], done.summary["outer_steps"]) == ("done", ends_at)
    assert done.summary["metrics"] == {"test_loss": done.records[-1]["metric.test_loss"]}
    before = run_files(made.path)
    # takes no step: Mixer asserts it
    again = run(Mixer(ends_at=ends_at), counting(), budget, resume=True, **options)
    assert run_files(made.path) == before
    assert_same((again.theta, again.x), (done.theta, done.x))


# --- what is said of a run whose lower level did not learn
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hypergradient", "lr", "words"),
    [
        (Unrolled(), 0.3, None),
        (Fixed(), 1e-5, None),  # whose weights are not learned
        (Unrolled(), 1e-5, "the validation loss hardly changed, from {start:.4g} to {end:.4g}"),
        (Unrolled(), 2.2, "the validation loss rose from {start:.4g} to {end:.4g}"),
        (Fixed(), 2.2, "the validation loss rose from {start:.4g} to {end:.4g}"),
    ],
)
def test_a_run_says_where_x_did_not_learn(hypergradient: Any, lr: float, words: str | None) -> None:
    problem = evolve(
        convex_sources({"a": 0.9, "b": 0.1}), x0={"x": torch.tensor([-1.0, 0.5], dtype=F64)}
    )
    method = Pipeline(
        generator=Branches(count=1, steps=1, optimizer=SGD(lr=lr)),
        selector=First(),
        hypergradient=hypergradient,
        outer=Sgd(lr=1e-3),
    )
    result = run(method, problem, Budget(outer_steps=20))
    data = problem.upper_data["stop"].whole["a"]
    start, end = (
        float(0.5 * (x["x"] - data).square().sum(-1).mean()) for x in (problem.x0, result.x)
    )
    assert result.summary["validation_loss"] == pytest.approx(end)
    moved = float((result.x["x"] - problem.x0["x"]).norm() / problem.x0["x"].norm())
    shown = f"{words} (x moved by {{moved:.2g}} of its length)" if words else ""
    said = result.summary.get("remarks", [])
    assert len(said) == (words is not None)
    assert "".join(said).startswith(shown.format(start=start, end=end, moved=moved))
