"""The outer loop: a method stepped on a problem until its budget is spent, recorded, observed
and resumable.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import click
import tomlkit
import torch
from attrs import define, field

from hgms.adapters import check_losses, measured
from hgms.compiled import Programs
from hgms.config.json_values import finite
from hgms.diagnosis import Diagnosing, Diagnosis
from hgms.distributed import RankLost
from hgms.runs.advice import STILL, check_growth, check_numbers, explained, still_leaves, still_note
from hgms.runs.checkpoint import ensure_of, pack, result_of
from hgms.runs.config import RunSettings
from hgms.runs.execution import KEY, Compilation, Execution, device_of
from hgms.runs.folder import RunFolder
from hgms.runs.own_problem import OwnProblem
from hgms.runs.parts import WrongPart, wrong_part
from hgms.runs.provenance import about_task, digests, environment, goes_on
from hgms.runs.result import RunResult, judged, summarise
from hgms.runs.signals import Interrupted, Interrupts, counted_suspensions, nothing_saved
from hgms.runs.watchers import StopRun, Watcher, watchers
from hgms_core import (
    ConfigError,
    HgmsError,
    Key,
    Method,
    NumericalError,
    Problem,
    Record,
    RunInfo,
    Sources,
    State,
    Task,
    Tree,
    norm,
)
from hgms_core.errors import CheckpointError, raise_all
from hgms_core.host import LOG, Host
from hgms_core.torch_errors import out_of_memory

MANY = 4096
"""Rows that the losses are looked at on where the first step has failed."""
ANNOUNCEMENT = "compiling the steps, once for this run; Ctrl-C interrupts it"
IDLE_STEPS = 1000
"""Outer steps without an oracle call after which a budget of calls is taken for one that never
ends.
"""


def pair_of(what: str, expected: str, outcome: Any) -> tuple[Any, Any]:
    """What a method's function returned; a dictionary of two keys would be taken apart without a
    word.
    """
    if (
        isinstance(outcome, tuple | list)
        and len(outcome) == 2
        and all(isinstance(item, Mapping) for item in outcome)
    ):
        return outcome[0], outcome[1]
    kinds = (
        ", ".join(type(item).__name__ for item in outcome)
        if isinstance(outcome, tuple)
        else type(outcome).__name__
    )
    raise ConfigError(
        "wrong-result",
        f"`{what}` of a method returns ({kinds}), but must return two dictionaries, {expected}",
        place=("method", what),
    )


def leaves_of(tree: Tree) -> str:
    """The leaves with their shapes; of what is no tensor its type: ``{w [3], b float}``."""
    shapes = (
        f"{name} {list(leaf.shape) if hasattr(leaf, 'shape') else type(leaf).__name__}"
        for name, leaf in tree.items()
    )
    return f"{{{', '.join(shapes)}}}"


@contextlib.contextmanager
def named_step(method: str, step: int) -> Iterator[None]:
    """Add the method and the step to errors about numbers that are not finite."""
    try:
        yield
    except ConfigError as error:
        if all(cause.code != "not-finite" for cause in error.errors):
            raise
        raise_all(
            [
                ConfigError(
                    cause.code,
                    f"step {step} of method {method!r}: {cause.message}",
                    place=cause.place,
                    hint=cause.hint,
                )
                for cause in error.errors
            ]
        )


def ignore(*_: Any, **__: Any) -> None:
    """For those who want to be told nothing."""


class Clock:
    """Seconds spent inside ``with clock``: evaluation, writing and observers are outside. What
    ``apart()`` grows by inside is taken off. A GPU is waited for at both edges. If
    ``suspensions()`` grows inside, the process was stopped for an unknown time: at most its
    processor time counts."""

    def __init__(self, seconds: float, device: torch.device, kind: str = "wall") -> None:
        self.seconds = seconds
        self.apart: Callable[[], float] = lambda: 0.0
        self.suspensions: Callable[[], int] = lambda: 0
        self._time = time.perf_counter if kind == "wall" else time.process_time
        self._wait: Callable[[], None] = lambda: (
            torch.cuda.synchronize(device) if device.type == "cuda" else None
        )
        self._started = 0.0
        self._worked = 0.0
        self._suspended = 0

    def now(self) -> float:
        self._wait()
        return self._time()

    def __enter__(self) -> Clock:
        self._suspended = self.suspensions()
        self._worked = time.process_time()
        self._started = self.now() - self.apart()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = self.now() - self.apart() - self._started
        if self.suspensions() > self._suspended:
            seconds = min(seconds, time.process_time() - self._worked)
            LOG.warning("the process was suspended during a step, which counts %.3g s", seconds)
        self.seconds += seconds


@define(eq=False, kw_only=True)
class Run:
    """A run under way: its folder, its state, its rows, its clock. ``make`` builds the problem, of
    ``task`` if it has one. ``execution`` is how its steps are to be carried out, if that is decided
    already; what a resumed run recorded comes first. ``restore`` gives θ and x of the result the
    shapes of a person's own problem. ``compiler`` makes programs of the steps, beyond what was
    compiled ``before``, if they are to be compiled. ``stopped`` says who ended the run before its
    budget, and why. ``role`` is the method's in comparisons.
    """

    method: Method
    make: Callable[[], Problem]
    info: RunInfo
    device: torch.device
    settings: RunSettings
    folder: RunFolder | None = None
    resume: bool = False
    patience: float | None = None
    word: str = "resume=True"
    task: Task | OwnProblem | None = None
    watch: list[Watcher] = field(default=ignore, converter=watchers)
    host: Host | None = None
    execution: Execution | None = None
    role: str = ""
    restore: Callable[[Tree, Tree], tuple[Any, Any]] = lambda theta, x: (theta, x)
    problem: Problem = field(init=False)
    clock: Clock = field(init=False)
    compiler: Programs | None = field(default=None, init=False)
    before: Compilation | None = field(default=None, init=False)
    state: State = field(factory=dict)
    step: int = 0
    calls: int = 0
    idle: int = 0
    records: list[Record] = field(factory=list)
    saved_at: float = field(factory=time.monotonic)
    saved_step: int = -1
    stopped: str | None = field(default=None, init=False)
    diagnosing: Diagnosing | None = field(default=None, init=False)
    diagnoses: list[Record] = field(factory=list, init=False)
    still: set[str] = field(factory=set, init=False)

    # --- the whole run

    def carry_out(self) -> RunResult:
        """The whole run, or what is left of it, in its folder if it has one."""
        if self.folder is None:
            return self.ended("")
        text = tomlkit.dumps(self.info.config)
        with self.folder.claimed(text, resume=self.resume, patience=self.patience, word=self.word):
            return (self.read_back(self.folder) if self.resume else None) or self.ended(text)

    def notify(self, hook: str, **arguments: Any) -> None:
        """Calls the observers of ``hook``, if the run has any."""
        if self.host is not None:
            self.host.notify(hook, run=self.info, **arguments)

    def read_back(self, folder: RunFolder) -> RunResult | None:
        """The run as its folder holds it, if it is finished."""
        summary = folder.read_summary()
        if summary is None or summary.get("status") != "done":
            return None
        loaded = folder.load(self.device)
        if loaded is None:
            raise CheckpointError(
                "missing-file",
                "the folder has a summary, but no checkpoint",
                place=(str(folder.checkpoint),),
                hint="remove the folder, then run again",
            )
        theta, x = self.restore(
            *result_of(self.method, loaded[0], folder.checkpoint, self.info.method)
        )
        folder.rewind(loaded[1])  # to what the checkpoint speaks for, should more stand there
        execution = Execution.recorded(folder.read_environment())
        return RunResult(
            info=self.info,
            theta=theta,
            x=x,
            summary=summary,
            records=folder.records(),
            execution=execution,
            diagnosis=Diagnosis(folder.diagnoses()),
        )

    def ended(self, text: str) -> RunResult:
        """Runs until the budget is spent or something ends the run; a summary says how, unless
        it is to go on.
        """
        with contextlib.ExitStack() as in_force:
            return self._ended(text, in_force)

    def _ended(self, text: str, in_force: contextlib.ExitStack) -> RunResult:
        try:
            with nothing_saved():
                self.begin(text, in_force)
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
        except RankLost as error:  # nothing is wrong with the run
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
            with self.stopped_by("observer"):
                self.notify("hgms_run_finished", summary=summary, error=ending)
        theta, x = self.restore(*self.method.result(self.state))
        return RunResult(
            info=self.info,
            theta=theta,
            x=x,
            summary=summary,
            records=self.records,
            execution=self.execution,
            diagnosis=Diagnosis(self.diagnoses),
        )

    def explained(self, error: BaseException) -> HgmsError | None:
        """The error that a run ends with on record; None for one that it can be resumed after,
        or that nobody expected.
        """
        if out_of_memory(error) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        kept = f"the state after step {self.step} is kept" if self.state else "nothing was begun"
        cause = self.wrong_losses(error) or self.wrong_part(error)
        return cause or explained(error, self.step + 1, kept, method=self.method, task=self.task)

    def wrong_losses(self, error: BaseException) -> HgmsError | None:
        """What is wrong with the losses where the first step fails, looked for on more rows than
        the check before it sees.
        """
        known = isinstance(error, HgmsError) and not isinstance(error, NumericalError)
        if known or not isinstance(error, Exception) or out_of_memory(error):
            return None
        if self.step or not self.state or self.problem.counters is not None:
            return None
        try:
            check_losses(
                self.problem, self.problem.theta0, self.problem.x0, Key(self.info.seed), MANY
            )
        except Exception as cause:
            return cause if isinstance(cause, HgmsError) else None
        return None

    def wrong_part(self, error: BaseException) -> WrongPart | None:
        """Which part of the method has returned what it must not, where the first step fails."""
        other = not isinstance(error, Exception) or (
            isinstance(error, HgmsError) and not isinstance(error, ConfigError)
        )
        if other or self.step or not self.state or self.settings.ranks > 1 or out_of_memory(error):
            return None
        return wrong_part(self.method, self.problem, self.state)

    def interrupted(self, number: int) -> Interrupted:
        if self.folder is None or self.saved_step < 0:
            return Interrupted("interrupted", number)
        message = (
            f"interrupted; the state after step {self.saved_step} is saved in {self.folder.path}"
        )
        return Interrupted(message, number, hint=f"add {self.word} to resume")

    # --- its beginning

    def begin(self, text: str, in_force: contextlib.ExitStack) -> None:
        """The first state, or the checkpoint's, with the rows and the clock that belong to it.
        Everything is checked before anything is changed. How steps are carried out is ``in_force``
        from here on.
        """
        self.clock = Clock(0.0, self.device, self.settings.clock)
        loaded = self.folder.load(self.device) if self.folder is not None and self.resume else None
        self.problem = self.make()
        if loaded is not None and self.folder is not None:
            self.state, self.step = loaded
            self.saved_step = self.step
            theta, x = result_of(self.method, self.state, self.folder.checkpoint, self.info.method)
            ensure_of(self.problem, theta, x, self.folder.checkpoint)
            self.info = attrs.evolve(self.info, resumed_from=self.step)
        if loaded is None and self.problem.counters is None:  # which would count these calls, too
            check_losses(self.problem, self.problem.theta0, self.problem.x0, Key(self.info.seed))
        before = self.folder.read_environment() if self.folder is not None and self.resume else {}
        self.execution = self.how(before, resumed=loaded is not None)
        in_force.enter_context(self.execution.in_force(self.device))
        if self.folder is not None:
            self.folder.reopen()
            self.folder.create(text, self.environment(self.folder, before))
            if self.resume:  # killed before its first checkpoint, it starts again
                self.clock.seconds = self.folder.rewind(-1 if loaded is None else self.step)
                self.records, self.diagnoses = self.folder.records(), self.folder.diagnoses()
                self.calls = int(self.records[-1].get("oracle_calls") or 0) if self.records else 0
        if loaded is None:
            self.state = self.method.init(self.problem, self.info.seed)
            with self.writable():
                pack(self.state if self.folder is not None else {})
        if self.settings.diagnose is not None:
            self.diagnosing = Diagnosing(
                method=self.method,
                problem=self.problem,
                seed=self.info.seed,
                build=self.in_double(),
            )
        for watch in self.watch:
            if (recall := getattr(watch, "recall", None)) is not None:
                recall(self.records)
        with self.stopped_by("observer"):
            self.notify("hgms_run_started")

    def how(self, before: Mapping[str, Any], resumed: bool) -> Execution:
        """How steps are carried out: as the run's environment records it, as whoever asked says,
        else as is best. On ranks the settings alone decide: they are all that the others know."""
        decided = partial(Execution.decided, self.settings, self.info.budget, self.problem)
        if self.settings.ranks > 1:
            return decided()
        recorded = Execution.recorded(before)
        handed = None if self.execution is None else self.execution.anew
        if resumed and recorded is None:
            LOG.warning(
                "env.json no longer tells how this run was carried out; its last digits may "
                "differ from here on"
            )
        return recorded or handed or decided()

    def in_double(self) -> Callable[[], Problem] | None:
        """What makes the problem in float64; None where no task makes it."""
        task = self.task
        if task is None or isinstance(task, OwnProblem):
            return None
        return lambda: task.problem(self.info.seed, self.device, torch.float64)

    def environment(self, folder: RunFolder, before: dict[str, Any]) -> dict[str, Any]:
        """What ``env.json`` is to hold; a run that goes on elsewhere keeps where it was
        ``before``, and says so.
        """
        assert self.execution is not None
        about = {} if self.task is None else {"task": about_task(self.task)}
        if isinstance(self.task, OwnProblem) and self.task.varies:
            about["task"]["instance"] = self.task.instance(self.info.seed)
        own = {"code": digests([self.task, self.method]), KEY: self.execution.as_table()}
        table, changes = goes_on(before, {**environment(self.device, self.host), **own, **about})
        if changes:
            kept = "".join(f"; as recorded, {remark}" for remark in self.execution.remarks())
            LOG.warning(
                "%s goes on under other conditions (%s); env.json keeps both%s",
                folder.path,
                ", ".join(changes),
                kept,
            )
        return table

    # --- its steps

    @property
    def share(self) -> float:
        return self.info.budget.spent(self.clock.seconds, self.step, self.calls)

    @property
    def over(self) -> bool:
        """Whether the budget is spent, or the method or a watcher says that it is done before."""
        finished = getattr(self.method, "finished", None)
        return (
            self.share >= 1
            or self.stopped is not None
            or (finished is not None and bool(finished(self.state)))
        )

    @contextlib.contextmanager
    def stopped_by(self, who: str) -> Iterator[None]:
        """What :class:`StopRun` or a StopIteration says inside ends the run after this step."""
        try:
            yield
        except (StopRun, StopIteration) as stop:
            self.stopped = self.stopped or f"{who}: {stop}".removesuffix(": ")

    def loop(self) -> None:
        with (
            Interrupts(lambda: self.compiler is not None and self.compiler.busy) as interrupts,
            counted_suspensions() as count,
        ):
            self.clock.suspensions = count
            self.prepare(partial(self.stop_compiling, interrupts))
            if not self.records:
                self.commit({"step": 0, **self.start(), **self.evaluation()})
            if self.info.budget.seconds is not None and not self.over:
                # A step changes nothing but what it returns, so a discarded one only loads modules
                # and compiles kernels: seconds that would otherwise be charged to whichever method
                # runs first.
                self.method.step(self.problem, self.state, self.share)
            while not self.over:
                self.advance()
                if interrupts.number is not None and self.share < 1 and self.stopped is None:
                    self.save()
                    raise Interrupted("interrupted", interrupts.number)
                if (
                    self.share < 1
                    and time.monotonic() - self.saved_at >= self.settings.checkpoint_seconds
                ):
                    self.save()
            self.save()

    def stop_compiling(self, interrupts: Interrupts, name: str) -> None:
        """Before each program: end the run after a signal, and announce the first program."""
        if interrupts.number is not None:
            self.save()
            raise Interrupted("interrupted", interrupts.number)
        assert self.compiler is not None
        # a worker of a comparison has no terminal of its own
        if self.compiler.waited == 0 and multiprocessing.parent_process() is None:
            with contextlib.suppress(OSError, ValueError):
                click.echo(ANNOUNCEMENT, err=True)

    def prepare(self, before: Callable[[str], None]) -> None:
        """Lets functions of the steps be compiled, if they are to be, and calls ``before`` each
        program. Where the budget does not tell whether it pays, the time of a step does."""
        assert self.execution is not None
        if self.execution.compile is None and not self.over:
            settled = Compilation.settled(self.settings.compile, self.info.budget, self.problem)
            decided = settled or Compilation.timed(self.discarded_step, device_of(self.problem))
            self.keep(attrs.evolve(self.execution, compile=decided))
        self.before = self.execution.compile
        if self.before is not None and self.before.wanted:
            self.compiler = compiler = self.before.programs(self.clock.now)
            compiler.before = before
            self.clock.apart = lambda: compiler.seconds
            self.problem = attrs.evolve(self.problem, compiler=compiler)

    def discarded_step(self) -> tuple[float, float]:
        """Seconds of a step, which changes nothing but what it returns, and the share of the
        budget that it would spend.
        """
        with Clock(0.0, self.device, self.settings.clock) as clock:
            _, record = self.method.step(self.problem, self.state, self.share)
        return clock.seconds, self.info.budget.spent(
            0.0, 1, int(record.get("oracle_calls", self.calls)) - self.calls
        )

    def advance(self) -> None:
        """One outer step. The state changes only once its numbers are known to be sound."""
        if self.info.budget.oracle_calls is not None and self.idle >= IDLE_STEPS:
            raise ConfigError(
                "budget-cannot-end",
                f"the method recorded 0 oracle calls in {IDLE_STEPS:,} steps, up to step "
                f"{self.step}, so a budget in calls cannot end",
                place=("budget",),
                hint="use steps or seconds, or record oracle_calls in each step",
            )
        before = self.share
        counted = self.counters()
        with self.clock, named_step(self.info.method, self.step + 1):
            outcome = self.method.step(self.problem, self.state, self.share)
        following, raw = pair_of("step", "(state, record)", outcome)
        self.check_calls(raw)
        grown = {
            f"step_{name}": value - counted.get(name, 0) for name, value in self.counters().items()
        }
        theta, x = self.result(following)
        leaves = [*theta.values(), *x.values()]
        sizes = {"total": _total(leaves), "norm of theta": norm(theta)}
        record = named_zeros(_to_numbers({**raw, **grown, **self.weights(theta), **sizes}), theta)
        if not math.isfinite(record.pop("total")):  # or it overflowed
            names = [
                name
                for name, leaf in zip([*theta, *x], leaves, strict=True)
                if not torch.isfinite(leaf).all()
            ]
            record |= {"broken": names} if names else {}
        size = record.pop("norm of theta")
        check_numbers(record, self.step + 1)
        first = next((row["upper_loss"] for row in self.records if row.get("upper_loss")), 0.0)
        check_growth(record, self.step + 1, first, size, float(norm(self.problem.theta0)))
        previous = self.state
        self.state = following
        self.step = self.step + 1
        calls = int(record.get("oracle_calls", self.calls))
        self.idle = self.idle + 1 if calls <= self.calls else 0
        self.calls = calls
        if self.over or self.due(before):
            record.update(self.evaluation())
        self.commit({**record, "step": self.step}, **self.diagnosed(previous, before))
        self.warn_of_still_leaves()

    def warn_of_still_leaves(self) -> None:
        """Log the leaves of θ that have had no gradient for some steps; each once."""
        if self.role:  # a reference, which learns no θ
            return
        since = still_leaves(self.records[-STILL:], list(self.problem.theta0))
        if new := {name: step for name, step in since.items() if name not in self.still}:
            self.still |= set(new)
            LOG.warning("%s", still_note(new))

    def check_calls(self, record: Record) -> None:
        """ConfigError where nobody can tell what a step has spent."""
        if self.info.budget.oracle_calls is not None and "oracle_calls" not in record:
            raise ConfigError(
                "wrong-result",
                f"the records of method {self.info.method!r} have no oracle_calls, which a budget "
                "in calls requires",
                place=("method", "step", "oracle_calls"),
                hint="record the calls of all steps so far, or use a budget in steps or seconds",
            )

    def result(self, state: State) -> tuple[Tree, Tree]:
        """(θ, x) of a state; ConfigError where those of the first are not like the problem's. A
        method may leave θ empty.
        """
        theta, x = pair_of("result", "(theta, x)", self.method.result(state))
        pairs = (("theta", theta, self.problem.theta0), ("x", x, self.problem.x0))
        for name, own, start in () if self.step else pairs:
            kinds = [
                {key: getattr(leaf, "shape", None) for key, leaf in tree.items()}
                for tree in (own, start)
            ]
            if own and kinds[0] != kinds[1]:
                raise ConfigError(
                    "wrong-result",
                    f"{name} of method {self.info.method!r} has the leaves {leaves_of(own)}, but "
                    f"the problem has {leaves_of(start)}",
                    place=("method", "result", name),
                )
        return theta, x

    def diagnosed(self, previous: State, share: float) -> Record:
        """The seconds that it took to look at this step, if that was its turn; outside the clock
        and the budget.
        """
        if (
            self.diagnosing is None
            or self.settings.diagnose is None
            or self.step % self.settings.diagnose
        ):
            return {}
        began = time.perf_counter()
        row = finite(self.diagnosing.row(previous, self.state, self.step, share))
        seconds = time.perf_counter() - began
        if self.folder is not None:
            self.folder.append_diagnosis(row)
        self.diagnoses.append({**row, "seconds": seconds})
        return {"diagnosis_seconds": seconds}

    def due(self, before: float) -> bool:
        """Whether this step is to be evaluated, given the share of the budget spent before it."""
        if self.settings.evaluations is None:
            return self.step % self.settings.evaluate_every == 0
        return int(self.share * self.settings.evaluations) > int(before * self.settings.evaluations)

    def counters(self) -> Mapping[str, int]:
        return {} if self.problem.counters is None else dict(self.problem.counters())

    def start(self) -> Record:
        """The weights before the first step."""
        return (
            {}
            if self.problem.find(Sources) is None
            else _to_numbers(self.weights(self.result(self.state)[0]))
        )

    def weights(self, theta: Tree) -> Record:
        """The weight of every data source, under its name."""
        sources = self.problem.find(Sources)
        if sources is None:
            return {}
        omega = sources.weights(theta).detach()
        return {f"weight.{name}": weight for name, weight in zip(sources.names, omega, strict=True)}

    def evaluation(self) -> Record:
        metrics: Mapping[str, float] = {}
        with self.stopped_by("evaluate"):
            metrics = measured(self.problem, *self.result(self.state))
        return {f"metric.{name}": value for name, value in metrics.items()}

    # --- what is kept of it

    @property
    def compile_seconds(self) -> float:
        """The seconds of compilation so far, which no budget contains."""
        before = 0.0 if self.before is None else self.before.seconds
        return before + (0.0 if self.compiler is None else self.compiler.waited)

    def commit(self, record: Record, **beside: float) -> None:
        """Keeps the row of a step; ``beside`` are further numbers of its time."""
        record = finite(record)
        clock = {"seconds": self.clock.seconds, "compile_seconds": self.compile_seconds}
        if self.folder is not None:
            self.folder.append(record, {"step": record["step"], **clock, **beside})
        self.records.append({**record, **clock})
        with self.stopped_by("observer"):
            self.notify("hgms_step_finished", record=self.records[-1])
        for watch in self.watch:
            with self.stopped_by("watch"):
                if watch(self.info, self.records[-1], self.share) is True:
                    raise StopRun

    def keep(self, execution: Execution) -> None:
        """How steps are carried out, also for ``env.json``."""
        if self.folder is not None and execution != self.execution:
            self.folder.note(KEY, execution.as_table())
        self.execution = execution

    def save(self) -> None:
        if self.folder is not None and self.saved_step != self.step:
            with self.writable():
                self.folder.save(self.state, self.step)
        if self.execution is not None and self.before is not None and self.compiler is not None:
            self.keep(
                attrs.evolve(self.execution, compile=self.before.with_those_of(self.compiler))
            )
        self.saved_at = time.monotonic()
        self.saved_step = self.step

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Name the method in the error for a state that no file can contain."""
        try:
            yield
        except ConfigError as error:
            raise error.at("method") from None

    def end(self, status: str, error: HgmsError | None = None) -> dict[str, Any]:
        """The summary, with the validation loss where the numbers at the end are what ended the
        run, or are its result.
        """
        summary = summarise(self.info, status, self.step, self.records, str(error or ""))
        if self.stopped is not None:
            summary["stopped_by"] = self.stopped
            if status == "done" and not any(
                name.startswith("metric.") for name in self.records[-1]
            ):
                # the last evaluated row is not that of the result
                numbers = finite(self.evaluation())
                summary["metrics"] |= {
                    name.removeprefix("metric."): value for name, value in numbers.items()
                }
        if why := getattr(self.method, "untrained", ""):
            summary["untrained"] = why
        if self.role:
            summary["role"] = self.role
        if error is None or isinstance(error, NumericalError):
            summary = judged(summary, self.problem, *self.method.result(self.state), self.records)
        else:
            summary["validation_loss"] = None
        if self.folder is not None:
            self.folder.write_summary(summary)
        return summary


def named_zeros(record: Record, theta: Tree) -> Record:
    """The record with the names of the leaves of θ whose hypergradient is 0 in place of the length
    of each, if that is so of some leaves and not of all.
    """
    lengths: Any = record.pop("hypergradient_norms", None) or []
    zeros = [name for name, length in zip(theta, lengths, strict=False) if length == 0]
    return (
        {**record, "zero_gradient": ", ".join(zeros)} if 0 < len(zeros) < len(lengths) else record
    )


def _total(leaves: Iterable[torch.Tensor]) -> float | torch.Tensor:
    """The sum of all numbers, which is not finite if one of them is not: one fast pass, and
    nothing waits for a GPU.
    """
    sums = [leaf.sum() for leaf in leaves]
    if any(part.is_cuda for part in sums):
        return torch.stack([part.double() for part in sums]).sum()
    return sum(part.item() for part in sums)


def _to_numbers(record: Mapping[str, Any]) -> Record:
    """The record with every tensor as a Python number, list or string, moved off the device at
    once.
    """
    tensors = {name: value for name, value in record.items() if isinstance(value, torch.Tensor)}
    moved = {name: value.detach().to("cpu", non_blocking=True) for name, value in tensors.items()}
    for device in {value.device for value in tensors.values() if value.is_cuda}:
        torch.cuda.synchronize(device)
    return {
        name: moved[name].tolist() if name in moved else value for name, value in record.items()
    }
