"""The loop of a run: stepper, recorder, evaluator and observers until the budget is spent.

Algorithm 1 of the paper is ``hgms_core.Pipeline.step``; this module calls it and handles
everything around it: resuming, budgets, signals, compilation, and errors that end a run.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import attrs
import tomlkit
import torch
from attrs import define, field

from hgms.adapters import check_losses
from hgms.diagnosis import Diagnosing, Diagnosis
from hgms.distributed import RankLost
from hgms.lazy import avoid_compiler_import
from hgms.plugins import LOG
from hgms.runs.advice import STILL, explain_error, still_leaves, still_note
from hgms.runs.clock import Clock
from hgms.runs.compiling import StepCompiler
from hgms.runs.config import RunSettings
from hgms.runs.evaluator import Evaluator
from hgms.runs.execution import Execution
from hgms.runs.folder import RunFolder
from hgms.runs.observers import Observers
from hgms.runs.plan import Plan
from hgms.runs.recorder import Recorder
from hgms.runs.result import RunResult, judge_result, metrics_of, summarise
from hgms.runs.signals import Interrupted, Interrupts, counted_suspensions, nothing_saved
from hgms.runs.stepper import Position, Stepper
from hgms.store import finite
from hgms_core import HgmsError, Key, NumericalError, Problem, Record, RunInfo, State, Tree
from hgms_core.capabilities import HasPlaceholder, find
from hgms_core.torch_errors import out_of_memory

FIRST_STEP = "the first step failed: `hgms check` tests what each component returns"


@define(eq=False, kw_only=True)
class Run:
    """A run in progress: a plan, its recorder, its observers and its position.

    ``still`` are the leaves of θ without a gradient that a warning has named.
    """

    plan: Plan
    recorder: Recorder = field(factory=Recorder)
    observers: Observers = field(factory=Observers)
    info: RunInfo = field(init=False)
    stepper: Stepper = field(init=False)
    position: Position = field(factory=lambda: Position(state={}), init=False)
    clock: Clock = field(init=False)
    compiler: StepCompiler = field(init=False)
    diagnosing: Diagnosing | None = field(default=None, init=False)
    still: set[str] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.info = self.plan.info
        self.clock = Clock(0.0, self.plan.device, self.settings.clock)

    @property
    def settings(self) -> RunSettings:
        return self.plan.settings

    @property
    def folder(self) -> RunFolder | None:
        return self.recorder.folder

    # --- the whole run

    def carry_out(self) -> RunResult:
        """Run to the end of the budget, or read back a finished run from the folder."""
        config = "" if self.folder is None else tomlkit.dumps(self.info.config)
        with self.recorder.claim(config):
            return self.read_back() or self.run_to_end(config)

    def read_back(self) -> RunResult | None:
        """Return the result of a finished run, as its folder contains it."""
        finished = self.recorder.read_finished(self.plan.device)
        if finished is None or self.folder is None:
            return None
        summary, state = finished
        theta, x = self.plan.method.result(state)
        self.recorder.reread()
        execution = Execution.from_environment(self.folder.read_environment())
        return self.result(theta, x, summary, execution)

    def result(
        self, theta: Tree, x: Tree, summary: dict[str, Any], execution: Execution | None
    ) -> RunResult:
        theta, x = self.plan.restore(theta, x)
        return RunResult(
            info=self.info,
            theta=theta,
            x=x,
            summary=summary,
            records=self.recorder.rows,
            execution=execution,
            diagnosis=Diagnosis(self.recorder.diagnoses),
        )

    def run_to_end(self, config: str) -> RunResult:
        """Run until the budget is spent or an error ends the run.

        A summary records the end, unless the run can be resumed.
        """
        with contextlib.ExitStack() as in_force:
            try:
                with nothing_saved():
                    self.begin(config, in_force)
            except (RuntimeError, MemoryError) as error:
                if out_of_memory(error) and (failure := self.explain(error)):
                    raise failure from error
                raise
            return self.take_steps()

    def take_steps(self) -> RunResult:
        """Run from the current position to the end; record how the run ended."""
        summary: dict[str, Any] | None = None
        ending: BaseException | None = None
        avoid_compiler_import()
        try:
            self.loop()
            summary = self.end("done")
        except KeyboardInterrupt as error:
            ending = error
            raise self.interruption(Interrupted.number_of(error)) from None
        except RankLost as error:  # the run itself has no error
            ending = error
            self.save()
            raise
        except BaseException as error:
            failure = self.explain(error)
            ending = failure or error
            if failure is None:
                if self.position.step == 0 and isinstance(error, Exception):
                    error.add_note(FIRST_STEP)
                raise
            self.save()
            summary = self.end("failed", failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            self.observers.notify("hgms_run_finished", self.info, summary=summary, error=ending)
        theta, x = self.plan.method.result(self.position.state)
        return self.result(theta, x, summary, self.compiler.execution)

    def interruption(self, number: int) -> Interrupted:
        saved = self.recorder.saved_step
        if self.folder is None or saved < 0:
            return Interrupted("interrupted", number)
        return Interrupted(
            f"interrupted; the state after step {saved} is saved in {self.folder.path}",
            number,
            hint=f"add {self.recorder.word} to resume",
        )

    # --- errors that end a run

    def explain(self, error: BaseException) -> HgmsError | None:
        """Return the error that the summary records.

        The result is ``None`` for an unexpected error, and if the run can be resumed after the
        error.
        """
        if out_of_memory(error) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        step = self.position.step
        kept = (
            f"the state after step {step} is kept" if self.position.state else "no step was taken"
        )
        return explain_error(error, step + 1, kept, method=self.plan.method, task=self.plan.task)

    # --- the beginning

    def begin(self, config: str, in_force: contextlib.ExitStack) -> None:
        """Start at the first position, or at the saved position with its rows and its clock.

        All checks precede all changes. The settings of torch for the steps are ``in_force`` from
        here on.
        """
        plan, recorder = self.plan, self.recorder
        loaded = recorder.load(plan.device)
        problem = plan.make()
        self.stepper = Stepper(
            method=plan.method,
            problem=problem,
            name=self.info.method,
            in_calls=self.info.budget.oracle_calls is not None,
        )
        if loaded is not None and self.folder is not None:
            state, step = loaded
            self.position = Position(state=state, step=step)
            self.info = attrs.evolve(self.info, resumed_from=step)
        if loaded is None and problem.counters is None:  # the check would count as well
            check_losses(problem, problem.theta0, problem.x0, Key(self.info.seed))
        before = recorder.environment()
        execution = plan.decide(problem, before, resumed=loaded is not None)
        in_force.enter_context(execution.in_force(plan.device))
        self.compiler = StepCompiler(plan, recorder, execution)
        if self.folder is not None:
            table = plan.environment(self.folder, before, execution, self.observers.host)
            self.clock.seconds = recorder.begin(config, table)
            calls = int(recorder.rows[-1].get("oracle_calls") or 0) if recorder.rows else 0
            losses = (row["upper_loss"] for row in recorder.rows if row.get("upper_loss"))
            first = next(losses, 0.0)
            self.position = attrs.evolve(self.position, calls=calls, first_loss=first)
        if loaded is None:
            self.position = attrs.evolve(
                self.stepper.begin(self.info.seed), calls=self.position.calls
            )
            recorder.check_storable(self.position.state)
        if self.settings.diagnose is not None:
            self.diagnosing = Diagnosing(method=plan.method, problem=problem, seed=self.info.seed)
        self.observers.notify("hgms_run_started", self.info)

    # --- the steps

    @property
    def share(self) -> float:
        """The spent part of the budget, from 0 to 1."""
        position = self.position
        return self.info.budget.spent_share(self.clock.seconds, position.step, position.calls)

    @property
    def over(self) -> bool:
        """Whether the budget is spent, or the method or an observer has ended the run."""
        stopped = self.observers.stopped is not None
        return self.share >= 1 or stopped or self.stepper.is_finished(self.position)

    def loop(self) -> None:
        """Advance until the run is over; save at intervals and at a signal."""
        with Interrupts(lambda: self.compiler.busy) as interrupts, counted_suspensions() as count:
            self.clock.suspensions = count
            self.prepare(interrupts)
            if not self.recorder.rows:
                self.record({"step": 0, **self.stepper.start(self.position), **self.evaluation()})
            if self.info.budget.seconds is not None and not self.over:
                # A step has no side effects. A discarded step only loads modules and compiles
                # kernels, so that the first method of a comparison does not pay for this time.
                self.stepper.method.step(self.stepper.problem, self.position.state, self.share)
            while not self.over:
                self.advance()
                unfinished = self.share < 1
                if unfinished and not self.observers.stopped:
                    self.stop_after(interrupts)
                if unfinished and self.recorder.is_due(self.settings.checkpoint_seconds):
                    self.save()

    def advance(self) -> None:
        """Run one outer step. The position changes after its numbers are checked."""
        before = self.share
        previous = self.position
        self.stepper.check_budget(previous)
        counted = self.stepper.counters()
        with self.clock:
            outcome = self.stepper.step(previous, before)
        self.position, row = self.stepper.read(previous, outcome, counted)
        step = self.position.step
        if self.over or Evaluator(self.settings).is_due(step, before, self.share):
            row.update(self.evaluation())
        self.record({**row, "step": step}, **self.diagnose(previous.state, before))
        self.warn_of_still_leaves()

    def evaluation(self) -> Record:
        metrics: Record = {}
        with self.observers.may_stop("evaluate"):
            theta, x = self.stepper.result(self.position.state, self.position.step)
            metrics = Evaluator(self.settings).metrics(self.stepper.problem, theta, x)
        return metrics

    def record(self, row: Record, **durations: float) -> None:
        """Record the row of a step, and show it to the observers."""
        timing = {"seconds": self.clock.seconds, "compile_seconds": self.compiler.seconds}
        self.recorder.record(row, timing, **durations)
        self.observers.see(self.info, self.recorder.rows[-1], self.share)

    def warn_of_still_leaves(self) -> None:
        """Log a warning once for each leaf of θ without a gradient for some steps."""
        if self.plan.role:  # a reference does not learn θ
            return
        leaves = list(self.stepper.problem.theta0)
        since = still_leaves(self.recorder.rows[-STILL:], leaves)
        if new := {name: step for name, step in since.items() if name not in self.still}:
            self.still |= set(new)
            LOG.warning("%s", still_note(new))

    def diagnose(self, previous: State, share: float) -> Record:
        """Diagnose this step if it is due; return the seconds, which no budget counts."""
        position, every = self.position, self.settings.diagnose
        if self.diagnosing is None or every is None or position.step % every:
            return {}
        began = time.perf_counter()
        row = finite(self.diagnosing.row(previous, position.state, position.step, share))
        seconds = time.perf_counter() - began
        self.recorder.record_diagnosis(row, seconds)
        return {"diagnosis_seconds": seconds}

    # --- compilation

    def prepare(self, interrupts: Interrupts) -> None:
        """Compile the functions of the steps if this is expected to save time."""
        compiled = self.compiler.prepare(
            self.stepper.problem,
            self.clock,
            step=None if self.over else self.discarded_step,
            before=lambda _name: self.stop_after(interrupts),
        )
        self.stepper = attrs.evolve(self.stepper, problem=compiled)

    def stop_after(self, interrupts: Interrupts) -> None:
        """Save the position and end the run after a signal."""
        if interrupts.number is not None:
            self.save()
            raise Interrupted("interrupted", interrupts.number)

    def discarded_step(self, problem: Problem) -> tuple[float, float]:
        """Return the seconds of a step on ``problem``, and the part of the budget that it spends.

        A step has no side effects, so its result can be discarded.
        """
        position, stepper = self.position, self.stepper
        with Clock(0.0, self.plan.device, self.settings.clock) as clock:
            _, row = stepper.method.step(problem, position.state, self.share)
        calls = int(row.get("oracle_calls", position.calls)) - position.calls
        return clock.seconds, self.info.budget.spent_share(0.0, 1, calls)

    # --- the end

    def save(self) -> None:
        """Save the position and the list of compiled functions."""
        self.recorder.save(self.position)
        self.compiler.save()

    def end(self, status: str, error: HgmsError | None = None) -> dict[str, Any]:
        """Save the position with its summary, in one atomic step; return the summary."""
        try:
            summary = self.summary(status, error)
        except KeyboardInterrupt:
            self.save()
            raise
        self.compiler.save()
        self.recorder.finish(self.position, summary)
        return summary

    def summary(self, status: str, error: HgmsError | None) -> dict[str, Any]:
        """Return the summary of the run.

        It contains the validation loss if the run is done, or if a NumericalError ended it.
        """
        rows = self.recorder.rows
        summary = summarise(
            self.info, status, self.position.step, rows, str(error or ""), self.plan.role
        )
        if self.observers.stopped is not None:
            summary["stopped_by"] = self.observers.stopped
            has_metrics = any(name.startswith("metric.") for name in rows[-1])
            if status == "done" and not has_metrics:  # the last evaluated row is an earlier one
                summary["metrics"] |= metrics_of(finite(self.evaluation()))
        untrained = find(self.plan.method, HasPlaceholder)
        if untrained is not None and untrained.placeholder_reason:
            summary["untrained"] = untrained.placeholder_reason
        if error is None or isinstance(error, NumericalError):
            theta, x = self.plan.method.result(self.position.state)
            summary = judge_result(summary, self.stepper.problem, theta, x, rows)
        return summary
