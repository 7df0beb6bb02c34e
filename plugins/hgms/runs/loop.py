"""The loop of a run: stepper, recorder, evaluator and observers until the budget is spent.

Algorithm 1 of the paper is ``hgms_core.Pipeline.step``; this module calls it and handles
everything around it: resuming, budgets, signals, compilation, and errors that end a run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import click
import tomlkit
import torch
from attrs import define, field, frozen

from hgms.adapters import check_losses
from hgms.compiled import Programs
from hgms.diagnosis import Diagnosing, Diagnosis
from hgms.distributed import RankLost
from hgms.plugins import LOG
from hgms.runs.advice import STILL, explained, still_leaves, still_note
from hgms.runs.checkpoint import ensure_of, result_of
from hgms.runs.clock import Clock
from hgms.runs.config import RunSettings
from hgms.runs.evaluator import Evaluator
from hgms.runs.execution import KEY, Compilation, Execution, device_of
from hgms.runs.folder import RunFolder
from hgms.runs.observers import Observers
from hgms.runs.own_problem import OwnProblem
from hgms.runs.parts import WrongPart, wrong_part
from hgms.runs.provenance import about_task, digests, environment, goes_on
from hgms.runs.recorder import Recorder
from hgms.runs.result import RunResult, judged, summarise
from hgms.runs.signals import Interrupted, Interrupts, counted_suspensions, nothing_saved
from hgms.runs.stepper import Position, Stepper
from hgms.store import finite
from hgms_core import (
    ConfigError,
    HgmsError,
    Key,
    Method,
    NumericalError,
    Problem,
    Record,
    RunInfo,
    State,
    Task,
    Tree,
)
from hgms_core.capabilities import HasPlaceholder, find
from hgms_core.torch_errors import out_of_memory

MANY = 4096
"""Rows on which the losses are checked after the first step has failed."""
ANNOUNCEMENT = "compiling the steps, once for this run; Ctrl-C interrupts it"


@frozen(kw_only=True)
class Plan:
    """The definition of a run.

    ``make`` builds the problem, of ``task`` if it has one. ``execution`` defines how the steps are
    computed, if another run has decided it. The recorded decision of a resumed run takes
    precedence. ``restore`` gives θ and x of the result the form of the user's problem. ``role`` is
    the role of the method in comparisons.
    """

    method: Method
    make: Callable[[], Problem]
    info: RunInfo
    device: torch.device
    settings: RunSettings
    task: Task | OwnProblem | None = None
    execution: Execution | None = None
    role: str = ""
    restore: Callable[[Tree, Tree], tuple[Any, Any]] = lambda theta, x: (theta, x)

    def in_double(self) -> Callable[[], Problem] | None:
        """Return a function that builds the problem in float64; ``None`` without a task."""
        task = self.task
        if task is None or isinstance(task, OwnProblem):
            return None
        return lambda: task.problem(self.info.seed, self.device, torch.float64)

    def decide(self, problem: Problem, before: Mapping[str, Any], resumed: bool) -> Execution:
        """Decide how the steps are computed.

        The recorded decision of a resumed run takes precedence, then :attr:`execution`. On several
        ranks the settings decide, because the other ranks only have the settings.
        """
        decided = partial(Execution.decided, self.settings, self.info.budget, problem)
        if self.settings.ranks > 1:
            return decided()
        recorded = Execution.recorded(before)
        handed = None if self.execution is None else self.execution.anew
        if resumed and recorded is None:
            LOG.warning(
                "env.json no longer contains how this run was computed; its last digits may "
                "differ from here on"
            )
        return recorded or handed or decided()

    def environment(
        self, folder: RunFolder, before: Mapping[str, Any], execution: Execution, host: Any
    ) -> dict[str, Any]:
        """Return the contents of ``env.json``.

        A run that resumes in another environment keeps its environment of ``before``, and a warning
        lists the differences.
        """
        about = {} if self.task is None else {"task": about_task(self.task)}
        if isinstance(self.task, OwnProblem) and self.task.varies:
            about["task"]["instance"] = self.task.instance(self.info.seed)
        own = {"code": digests([self.task, self.method]), KEY: execution.as_table()}
        table, changes = goes_on(dict(before), {**environment(self.device, host), **own, **about})
        if changes:
            kept = "".join(f"; as recorded, {remark}" for remark in execution.remarks())
            LOG.warning(
                "%s goes on under other conditions (%s); env.json keeps both%s",
                folder.path,
                ", ".join(changes),
                kept,
            )
        return table


@define(eq=False, kw_only=True)
class Run:
    """A run in progress: a plan, its recorder, its observers and its position.

    ``programs`` compiles functions of the steps, in addition to the functions that were compiled
    ``before``.
    """

    plan: Plan
    recorder: Recorder = field(factory=Recorder)
    observers: Observers = field(factory=Observers)
    info: RunInfo = field(init=False)
    stepper: Stepper = field(init=False)
    position: Position = field(factory=lambda: Position(state={}), init=False)
    clock: Clock = field(init=False)
    execution: Execution | None = field(default=None, init=False)
    programs: Programs | None = field(default=None, init=False)
    before: Compilation | None = field(default=None, init=False)
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
        with self.recorder.claimed(config):
            return self.read_back() or self.ended(config)

    def read_back(self) -> RunResult | None:
        """Return the result of a finished run, as its folder contains it."""
        finished = self.recorder.finished(self.plan.device)
        if finished is None or self.folder is None:
            return None
        summary, state = finished
        theta, x = result_of(self.plan.method, state, self.folder.manifest, self.info.method)
        self.recorder.reread()
        self.execution = Execution.recorded(self.folder.read_environment())
        return self.result(theta, x, summary)

    def result(self, theta: Tree, x: Tree, summary: dict[str, Any]) -> RunResult:
        theta, x = self.plan.restore(theta, x)
        return RunResult(
            info=self.info,
            theta=theta,
            x=x,
            summary=summary,
            records=self.recorder.rows,
            execution=self.execution,
            diagnosis=Diagnosis(self.recorder.diagnoses),
        )

    def ended(self, config: str) -> RunResult:
        """Run until the budget is spent or an error ends the run.

        A summary records the end, unless the run can be resumed.
        """
        with contextlib.ExitStack() as in_force:
            return self._ended(config, in_force)

    def _ended(self, config: str, in_force: contextlib.ExitStack) -> RunResult:
        try:
            with nothing_saved():
                self.begin(config, in_force)
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error) and (failure := self.explained(error)):
                raise failure from error
            raise
        summary: dict[str, Any] | None = None
        ending: BaseException | None = None
        try:
            self.loop()
            summary = self.end("done")
        except KeyboardInterrupt as error:
            ending = error
            number = getattr(error, "number", signal.SIGINT)
            raise self.interrupted(number) from None
        except RankLost as error:  # the run itself has no error
            ending = error
            self.save()
            raise
        except BaseException as error:
            failure = self.explained(error)
            ending = failure or error
            if failure is None:
                raise
            self.save()
            summary = self.end("failed", failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            self.observers.notify("hgms_run_finished", self.info, summary=summary, error=ending)
        return self.result(*self.plan.method.result(self.position.state), summary)

    def interrupted(self, number: int) -> Interrupted:
        saved = self.recorder.saved_step
        if self.folder is None or saved < 0:
            return Interrupted("interrupted", number)
        message = f"interrupted; the state after step {saved} is saved in {self.folder.path}"
        return Interrupted(message, number, hint=f"add {self.recorder.word} to resume")

    # --- errors that end a run

    def explained(self, error: BaseException) -> HgmsError | None:
        """Return the error that the summary records.

        The result is ``None`` for an unexpected error, and if the run can be resumed after the
        error.
        """
        if out_of_memory(error) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        step, state = self.position.step, self.position.state
        kept = f"the state after step {step} is kept" if state else "nothing was begun"
        cause = self.wrong_losses(error) or self.wrong_part(error)
        plan = self.plan
        return cause or explained(error, step + 1, kept, method=plan.method, task=plan.task)

    def in_first_step(self, error: BaseException) -> bool:
        failed_early = not self.position.step and bool(self.position.state)
        return failed_early and isinstance(error, Exception) and not out_of_memory(error)

    def wrong_losses(self, error: BaseException) -> HgmsError | None:
        """Return the error in the losses if the first step fails.

        They are checked on more rows than before the step.
        """
        known = isinstance(error, HgmsError) and not isinstance(error, NumericalError)
        if known or not self.in_first_step(error) or self.stepper.problem.counters is not None:
            return None
        problem = self.stepper.problem
        try:
            check_losses(problem, problem.theta0, problem.x0, Key(self.info.seed), MANY)
        except Exception as cause:
            return cause if isinstance(cause, HgmsError) else None
        return None

    def wrong_part(self, error: BaseException) -> WrongPart | None:
        """Return the error of the part that returned a wrong value if the first step fails."""
        known = isinstance(error, HgmsError) and not isinstance(error, ConfigError)
        if known or not self.in_first_step(error) or self.settings.ranks > 1:
            return None
        return wrong_part(self.plan.method, self.stepper.problem, self.position.state)

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
            theta, x = result_of(plan.method, state, self.folder.manifest, self.info.method)
            ensure_of(problem, theta, x, self.folder.manifest)
            self.info = attrs.evolve(self.info, resumed_from=step)
        if loaded is None and problem.counters is None:  # the check would count as well
            check_losses(problem, problem.theta0, problem.x0, Key(self.info.seed))
        before = recorder.environment()
        self.execution = plan.decide(problem, before, resumed=loaded is not None)
        in_force.enter_context(self.execution.in_force(plan.device))
        if self.folder is not None:
            host = self.observers.host
            table = plan.environment(self.folder, before, self.execution, host)
            self.clock.seconds = recorder.begin(config, table)
            calls = int(recorder.rows[-1].get("oracle_calls") or 0) if recorder.rows else 0
            self.position = attrs.evolve(self.position, calls=calls)
        if loaded is None:
            self.position = attrs.evolve(
                self.stepper.begin(self.info.seed), calls=self.position.calls
            )
            recorder.check_storable(self.position.state)
        if self.settings.diagnose is not None:
            self.diagnosing = Diagnosing(
                method=plan.method, problem=problem, seed=self.info.seed, build=plan.in_double()
            )
        self.observers.begin(self.info, recorder.rows)

    # --- the steps

    @property
    def share(self) -> float:
        """The spent part of the budget, from 0 to 1."""
        position = self.position
        return self.info.budget.spent(self.clock.seconds, position.step, position.calls)

    @property
    def over(self) -> bool:
        """Whether the budget is spent, or the method or an observer has ended the run."""
        stopped = self.observers.stopped is not None
        return self.share >= 1 or stopped or self.stepper.is_finished(self.position)

    def loop(self) -> None:
        """Advance until the run is over; save at intervals and at a signal."""
        with (
            Interrupts(lambda: self.programs is not None and self.programs.busy) as interrupts,
            counted_suspensions() as count,
        ):
            self.clock.suspensions = count
            self.prepare(partial(self.stop_compiling, interrupts))
            if not self.recorder.rows:
                self.record({"step": 0, **self.stepper.start(self.position), **self.evaluation()})
            if self.info.budget.seconds is not None and not self.over:
                # A step has no side effects. A discarded step only loads modules and compiles
                # kernels, so that the first method of a comparison does not pay for this time.
                self.stepper.method.step(self.stepper.problem, self.position.state, self.share)
            while not self.over:
                self.advance()
                unfinished = self.share < 1
                if interrupts.number is not None and unfinished and not self.observers.stopped:
                    self.save()
                    raise Interrupted("interrupted", interrupts.number)
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
        losses = (row["upper_loss"] for row in self.recorder.rows if row.get("upper_loss"))
        self.position, row = self.stepper.read(previous, outcome, counted, next(losses, 0.0))
        step = self.position.step
        if self.over or Evaluator(self.settings).is_due(step, before, self.share):
            row.update(self.evaluation())
        self.record({**row, "step": step}, **self.diagnosed(previous.state, before))
        self.warn_of_still_leaves()

    def evaluation(self) -> Record:
        position = self.position
        metrics: Record = {}
        with self.observers.may_stop("evaluate"):
            theta, x = self.stepper.result(position.state, position.step)
            metrics = Evaluator(self.settings).metrics(self.stepper.problem, theta, x)
        return metrics

    def record(self, row: Record, **beside: float) -> None:
        """Record the row of a step, and show it to the observers."""
        timing = {"seconds": self.clock.seconds, "compile_seconds": self.compile_seconds}
        self.recorder.record(row, timing, **beside)
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

    def diagnosed(self, previous: State, share: float) -> Record:
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

    def prepare(self, before: Callable[[str], None]) -> None:
        """Set up the compilation of the steps; ``before`` is called before each compilation.

        If the budget does not determine whether compilation saves time, the duration of a step
        does.
        """
        assert self.execution is not None
        problem = self.stepper.problem
        if self.execution.compile is None and not self.over:
            settled = Compilation.settled(self.settings.compile, self.info.budget, problem)
            decided = settled or Compilation.timed(self.discarded_step, device_of(problem))
            self.keep(attrs.evolve(self.execution, compile=decided))
        self.before = self.execution.compile
        if self.before is not None and self.before.wanted:
            self.programs = programs = self.before.programs(self.clock.now)
            programs.before = before
            self.clock.apart = lambda: programs.seconds
            compiled = attrs.evolve(problem, compiler=programs)
            self.stepper = attrs.evolve(self.stepper, problem=compiled)

    def stop_compiling(self, interrupts: Interrupts, name: str) -> None:
        """End the run after a signal, and announce the first compilation.

        This method is called before each compilation.
        """
        if interrupts.number is not None:
            self.save()
            raise Interrupted("interrupted", interrupts.number)
        assert self.programs is not None
        # a worker of a comparison has no separate terminal
        if self.programs.waited == 0 and multiprocessing.parent_process() is None:
            with contextlib.suppress(OSError, ValueError):
                click.echo(ANNOUNCEMENT, err=True)

    def discarded_step(self) -> tuple[float, float]:
        """Return the seconds of a step, and the part of the budget that it would spend.

        A step has no side effects, so its result can be discarded.
        """
        position, stepper = self.position, self.stepper
        with Clock(0.0, self.plan.device, self.settings.clock) as clock:
            _, row = stepper.method.step(stepper.problem, position.state, self.share)
        calls = int(row.get("oracle_calls", position.calls)) - position.calls
        return clock.seconds, self.info.budget.spent(0.0, 1, calls)

    @property
    def compile_seconds(self) -> float:
        """The seconds of compilation so far, which no budget counts."""
        before = 0.0 if self.before is None else self.before.seconds
        return before + (0.0 if self.programs is None else self.programs.waited)

    def keep(self, execution: Execution) -> None:
        """Record how the steps are computed."""
        if execution != self.execution:
            self.recorder.note(KEY, execution.as_table())
        self.execution = execution

    # --- the end

    def save(self) -> None:
        """Save the position and the list of compiled functions."""
        self.recorder.save(self.position)
        self.keep_programs()

    def keep_programs(self) -> None:
        """Record the list of compiled functions."""
        if self.execution is not None and self.before is not None and self.programs is not None:
            compiled = self.before.with_those_of(self.programs)
            self.keep(attrs.evolve(self.execution, compile=compiled))

    def end(self, status: str, error: HgmsError | None = None) -> dict[str, Any]:
        """Save the position with its summary, in one atomic step; return the summary."""
        try:
            summary = self.summary(status, error)
        except KeyboardInterrupt:
            self.save()
            raise
        self.keep_programs()
        self.recorder.finish(self.position, summary)
        return summary

    def summary(self, status: str, error: HgmsError | None) -> dict[str, Any]:
        """Return the summary of the run.

        It contains the validation loss if the run is done, or if a NumericalError ended it.
        """
        rows = self.recorder.rows
        summary = summarise(self.info, status, self.position.step, rows, str(error or ""))
        if self.observers.stopped is not None:
            summary["stopped_by"] = self.observers.stopped
            has_metrics = any(name.startswith("metric.") for name in rows[-1])
            if status == "done" and not has_metrics:  # the last evaluated row is an earlier one
                numbers = finite(self.evaluation())
                summary["metrics"] |= {
                    name.removeprefix("metric."): value for name, value in numbers.items()
                }
        untrained = find(self.plan.method, HasPlaceholder)
        if untrained is not None and untrained.placeholder_reason:
            summary["untrained"] = untrained.placeholder_reason
        if self.plan.role:
            summary["role"] = self.plan.role
        if error is None or isinstance(error, NumericalError):
            theta, x = self.plan.method.result(self.position.state)
            summary = judged(summary, self.stepper.problem, theta, x, rows)
        else:
            summary["validation_loss"] = None
        return summary
