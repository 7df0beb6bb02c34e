"""The outer loop: a method stepped on a problem until its budget is spent, recorded, observed and resumable."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import tomlkit
import torch
from attrs import define, field, frozen

from hgms_core import (
    Budget,
    CheckpointError,
    ConfigError,
    HgmsError,
    Method,
    NumericalError,
    OutOfMemory,
    Problem,
    Record,
    RunInfo,
    State,
    Tree,
    once_differentiable,
    out_of_memory,
    to_numbers,
)
from hgms_core.host import LOG
from hgms_run import convert as structure
from hgms_run.folder import RunFolder, plain
from hgms_run.provenance import digests, environment
from hgms_run.remarks import remarks, validation_loss

IDLE_STEPS = 1000
"""Outer steps without an oracle call after which a budget of calls is taken for one that never ends."""


@frozen(kw_only=True)
class RunResult:
    """The end of a run. ``records`` are the rows of ``steps.jsonl`` with ``seconds``; ``summary`` is ``summary.json``."""

    info: RunInfo
    theta: Tree
    x: Tree
    summary: dict[str, Any]
    records: list[Record]

    @property
    def seconds(self) -> float:
        return float(self.records[-1]["seconds"]) if self.records else 0.0


Watcher = Callable[[RunInfo, Record, float], None]
"""``watch(info, record, share of the budget spent)``, called after every step, outside the clock; its result is ignored."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the signal ``number``: the state is saved; the message says how to go on."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


class _Clock:
    """Seconds spent inside ``with clock``: evaluation, writing and observers are outside. A GPU is waited for at both edges."""

    def __init__(self, seconds: float, device: torch.device, kind: str = "wall") -> None:
        self.seconds = seconds
        self._now = time.perf_counter if kind == "wall" else time.process_time
        self._wait: Callable[[], None] = lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None
        self._started = 0.0

    def __enter__(self) -> None:
        self._wait()
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds += self._now() - self._started


STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a run to stop: Ctrl-C, a batch system whose time is up, a terminal that is closed."""


class Interrupts:
    """Lets the running step finish on the first Ctrl-C, SIGTERM or SIGHUP, so that what is written is whole; a second one stops
    at once. ``number`` is the signal that came (None: none so far)."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: list[tuple[int, Any]] = []

    @property
    def asked(self) -> bool:
        return self.number is not None

    def __enter__(self) -> Interrupts:
        self._before = _heard_by(self._hear, STOPS)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise Interrupted("interrupted", number)
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is inside as Ctrl-C does."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted("interrupted", number)

    before = _heard_by(stop, STOPS[1:])
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _heard_by(handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]) -> list[tuple[int, Any]]:
    """Sets the handler of these signals, which only the main thread may do; returns those before. What nohup told the process
    to ignore stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    before = [(number, signal.getsignal(number)) for number in numbers]
    kept = [(number, old) for number, old in before if number == signal.SIGINT or old is not signal.SIG_IGN]
    for number, _ in kept:
        signal.signal(number, handler)
    return [(number, signal.SIG_DFL if old is None else old) for number, old in kept]


def ignore(*_: Any, **__: Any) -> None:
    """For those who want to be told nothing."""


def run(
    method: Method,
    problem: Problem,
    budget: Budget,
    *,
    seed: int = 0,
    info: RunInfo | None = None,
    folder: RunFolder | str | Path | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    evaluations: int | None = None,
    clock: str = "wall",
    checkpoint_seconds: float = 30.0,
    watch: Watcher = ignore,
    notify: Callable[..., None] = ignore,
) -> RunResult:
    """Steps ``method`` on ``problem`` until the budget is spent; the last step may end a little after it.

    The clock runs during steps only; a budget in seconds starts after one discarded step that warms everything up.
    ``watch(info, record, share)`` is called after every step, outside the clock, with the newest row and the share of the
    budget spent; what it returns is ignored, and what it raises ends the run.

    With a ``folder`` (a path, or a :class:`RunFolder`) the run is kept there as ``hgms run`` keeps its own, for ``hgms report``
    to read. Every step is appended, and a checkpoint is written every ``checkpoint_seconds``, at the end, on Ctrl-C, SIGTERM
    and SIGHUP, and before an error leaves. ``resume`` goes on from there, and on the CPU ends with the very bytes an
    uninterrupted run under a budget of steps or calls would have written; a finished run is read back. Without ``resume`` the
    folder must hold no run. ``info`` names task and method in records and reports; by default they are "problem" and the
    method's name.

    Raises:
        NumericalError: θ, x, the upper loss or the hypergradient stopped being finite, or all candidates did; the last good
            state is on disk.
        OutOfMemory: with what to lower; the last good state is on disk.
        ConfigError: the hypergradient asks for a second derivative of a loss that has none.
        CheckpointError: the folder is damaged, or holds another run; nothing was changed.

    >>> from hgms_core import Budget, Problem
    >>> class Halve:                                   # anything with init, step and result is a Method
    ...     name = "halve"
    ...     def init(self, problem, seed): return {"x": dict(problem.x0)}
    ...     def step(self, problem, state, progress): return {"x": {"x": state["x"]["x"] / 2}}, {"size": state["x"]["x"].sum()}
    ...     def result(self, state): return {}, state["x"]
    >>> problem = Problem(theta0={}, x0={"x": torch.ones(1)}, g=lambda t, x, b: x["x"].sum(), f=lambda t, x, b: x["x"].sum())
    >>> result = run(Halve(), problem, Budget(outer_steps=3))
    >>> [record["size"] for record in result.records if record["step"]], result.x["x"]
    ([1.0, 0.5, 0.25], tensor([0.1250]))
    """
    device = next(iter(problem.x0.values())).device
    info = info or RunInfo(task="problem", method=method.name, seed=seed, budget=budget)
    settings = {
        "device": str(device),
        "evaluate_every": evaluate_every,
        "evaluations": structure.plain(evaluations),
        "clock": clock,
    }
    if folder is not None:
        folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        info = attrs.evolve(
            info, folder=folder.path, config=info.config or _described(info, method, {**settings, "clock": clock})
        )
    return Run(
        method=method, make=lambda: problem, budget=budget, info=info, device=device, folder=folder, resume=resume, seed=seed,
        evaluate_every=evaluate_every, evaluations=evaluations, clock_kind=clock, checkpoint_seconds=checkpoint_seconds,
        watch=watch, notify=notify,
    ).carry_out()  # fmt: skip


def _described(info: RunInfo, method: Method, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.toml`` can say of a run from Python: of its method all fields, if each has a word in TOML."""
    fields = {}
    with contextlib.suppress(ConfigError):
        fields = structure.plain(method)
    return {
        "seed": info.seed, "task": {"name": info.task}, "method": {**fields, "name": info.method},
        "budget": structure.plain(info.budget), "run": dict(settings),
    }  # fmt: skip


@define(eq=False, kw_only=True)
class Run:
    """A run under way: its folder, its state, its rows, its clock. ``make`` builds the problem, ``about`` says what else
    ``env.json`` is to hold."""

    method: Method
    make: Callable[[], Problem]
    budget: Budget
    info: RunInfo
    device: torch.device
    folder: RunFolder | None = None
    resume: bool = False
    seed: int = 0
    patience: float = 0.0
    word: str = "resume=True"
    about: Callable[[], Mapping[str, Any]] = dict
    evaluate_every: int = 1
    evaluations: int | None = None
    clock_kind: str = "wall"
    checkpoint_seconds: float = 30.0
    watch: Watcher = ignore
    notify: Callable[..., None] = ignore
    problem: Problem = field(init=False)
    text: str = field(init=False)
    state: State = field(factory=dict)
    step: int = 0
    calls: int = 0
    idle: int = 0
    records: list[Record] = field(factory=list)
    clock: _Clock = field(init=False)
    saved_at: float = field(factory=time.monotonic)
    saved_step: int = -1

    def carry_out(self) -> RunResult:
        """The whole run, or what is left of it, in its folder if it has one."""
        if self.folder is None:
            return self.ended()
        self.text = tomlkit.dumps(self.info.config)
        with self.folder.claimed(self.text, resume=self.resume, patience=self.patience, word=self.word):
            return (self.read_back() if self.resume else None) or self.ended()

    def read_back(self) -> RunResult | None:
        """The run as its folder holds it, if it is finished."""
        assert self.folder is not None
        summary = self.folder.read_summary()
        if summary is None or summary.get("status") != "done":
            return None
        loaded = self.folder.load(self.device)
        if loaded is None:
            raise CheckpointError(f"{self.folder.path} has a summary but no checkpoint; remove the folder and run again")
        theta, x = self.result_of(loaded[0])
        self.folder.rewind(loaded[1])  # to what the checkpoint speaks for, should more stand there
        return RunResult(info=self.info, theta=theta, x=x, summary=summary, records=self.folder.records())

    def ended(self) -> RunResult:
        """Runs until the budget is spent or something ends the run; a summary says how, unless it is to go on."""
        try:
            self.begin()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise OutOfMemory(self.memory_short(error)) from error
        summary: dict[str, Any] | None = None
        failure: BaseException | None = None
        try:
            self.loop()
            summary = self.end("done")
        except KeyboardInterrupt as error:
            failure = error
            raise Interrupted(f"interrupted{self.how_to_resume()}", getattr(error, "number", signal.SIGINT)) from None
        except BaseException as error:
            failure = self.explained(error)
            if failure is None:
                failure = error
                raise
            self.save()
            summary = self.end("failed", str(failure), validate=isinstance(failure, NumericalError))
            if failure is error:
                raise
            raise failure from error
        finally:
            self.notify("hgms_run_finished", run=self.info, summary=summary, error=failure)
        theta, x = self.method.result(self.state)
        return RunResult(info=self.info, theta=theta, x=x, summary=summary, records=self.records)

    def explained(self, error: BaseException) -> HgmsError | None:
        """The error that a run ends with on record; None for one that it can be resumed after, or that nobody expected."""
        if isinstance(error, NumericalError | ConfigError):
            return error
        if once_differentiable(error):
            return ConfigError(self.no_second_derivative(error))
        if isinstance(error, RuntimeError) and "cannot be converted to type" in str(error) and "overflow" in str(error):
            return NumericalError(
                f"step {self.step + 1}: a number of the method is too large for the run's dtype ({_first_line(error)})\n"
                f"  the state after step {self.step} is kept; lower the lr, or whichever number is so large"
            )
        return OutOfMemory(self.memory_short(error)) if out_of_memory(error) else None

    def begin(self) -> None:
        """The first state, or the checkpoint's, with the rows and the clock that belong to it. Everything is checked before
        anything is changed."""
        self.clock = _Clock(0.0, self.device, self.clock_kind)
        loaded = self.folder.load(self.device) if self.folder is not None and self.resume else None
        self.problem = self.make()
        if loaded is not None and self.folder is not None:
            self.state, self.step = loaded
            self.saved_step = self.step
            self.ensure_of_problem(self.folder)
            self.info = attrs.evolve(self.info, resumed_from=self.step)
        if self.folder is not None:
            self.folder.create(self.text, self.environment(self.folder))
            if self.resume:  # killed before its first checkpoint, it starts again
                self.clock.seconds = self.folder.rewind(-1 if loaded is None else self.step)
                self.records = self.folder.records()
                self.calls = int(self.records[-1].get("oracle_calls") or 0) if self.records else 0
        if loaded is None:
            self.state = self.method.init(self.problem, self.seed)
        self.notify("hgms_run_started", run=self.info)

    def environment(self, folder: RunFolder) -> dict[str, Any]:
        """What ``env.json`` is to hold; a run that goes on elsewhere keeps where it was ``before``, and says so."""
        now = {**environment(self.device), "code": digests(self.method), **self.about()}
        before = folder.read_environment() if self.resume else {}
        earlier = before.pop("before", [])
        if not before or before == json.loads(json.dumps(now)):
            return now | ({"before": earlier} if earlier else {})
        flat = []
        for table in (before, now):
            versions = table.get("versions")
            flat.append({key: table.get(key) for key in ("python", "device", "threads")})
            flat[-1] |= versions if isinstance(versions, dict) else {}
        changes = [f"{key} {flat[0].get(key)} → {value}" for key, value in flat[1].items() if flat[0].get(key) != value]
        if changes:
            LOG.warning("%s goes on under other conditions (%s); env.json keeps both", folder.path, ", ".join(changes))
        return now | {"before": [*(earlier if isinstance(earlier, list) else []), before]}

    def result_of(self, state: State) -> tuple[Tree, Tree]:
        """(θ, x) of a state that was read from the folder."""
        assert self.folder is not None
        try:
            theta, x = self.method.result(state)
            _ = [leaf.shape for leaf in (*theta.values(), *x.values())]
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{self.folder.checkpoint} holds no state of {self.info.method} ({type(error).__name__}: {error})\n"
                f"  nothing was changed; remove the folder {self.folder.path}, or choose another"
            ) from None
        return theta, x

    def ensure_of_problem(self, folder: RunFolder) -> None:
        """The checkpoint's x has the names of the problem's, and all leaves their shapes."""
        theta, x = self.result_of(self.state)
        starts = {**self.problem.theta0, **self.problem.x0}
        wrong = [name for name, leaf in {**theta, **x}.items() if name in starts and leaf.shape != starts[name].shape]
        wrong = wrong or sorted(set(x) ^ set(self.problem.x0))
        if wrong:
            raise CheckpointError(
                f"{folder.checkpoint} is of a problem with another {', '.join(wrong)}\n"
                f"  nothing was changed; remove the folder {folder.path}, or choose another"
            )

    @property
    def share(self) -> float:
        return self.budget.spent(self.clock.seconds, self.step, self.calls)

    def loop(self) -> None:
        with Interrupts() as interrupts:
            if not self.records:
                self.commit({"step": 0, **to_numbers(self.weights(self.state)), **self.evaluation()})
            if self.budget.seconds is not None and self.share < 1 and not self.finished():
                # A step changes nothing but what it returns, so a discarded one only loads modules and compiles kernels:
                # seconds that would otherwise be charged to whichever method runs first.
                self.method.step(self.problem, self.state, self.share)
            while self.share < 1 and not self.finished():
                self.advance()
                if interrupts.number is not None and self.share < 1:
                    self.save()
                    raise Interrupted("interrupted", interrupts.number)
                if self.share < 1 and time.monotonic() - self.saved_at >= self.checkpoint_seconds:
                    self.save()
            self.save()

    def finished(self) -> bool:
        """Whether the method says that it is done before its budget is."""
        done = getattr(self.method, "finished", None)
        return done is not None and bool(done(self.state))

    def advance(self) -> None:
        """One outer step. The state changes only once its numbers are known to be sound."""
        if self.budget.oracle_calls is not None and self.idle >= IDLE_STEPS:
            raise ConfigError(
                f"step {self.step}: no oracle call in the last {IDLE_STEPS:,} steps, so a budget of calls never ends\n"
                "  give the budget in steps or seconds, or let the method record its calls so far as `oracle_calls`"
            )
        before, counted = self.share, self.counters()
        with self.clock:
            following, raw = self.method.step(self.problem, self.state, self.share)
        grown = {f"step_{name}": value - counted.get(name, 0) for name, value in self.counters().items()}
        theta, x = self.method.result(following)
        leaves = [*theta.values(), *x.values()]
        record = to_numbers({**raw, **grown, **self.weights(following), "total": _total(leaves)})
        if not math.isfinite(record.pop("total")):  # or it overflowed
            names = [name for name, leaf in zip([*theta, *x], leaves, strict=True) if not torch.isfinite(leaf).all()]
            record |= {"broken": names} if names else {}
        _check(record, self.step + 1)
        self.state, self.step = following, self.step + 1
        calls = int(record.get("oracle_calls", self.calls))
        self.idle, self.calls = self.idle + 1 if calls <= self.calls else 0, calls
        if self.share >= 1 or self.finished() or self.due(before):
            record.update(self.evaluation())
        self.commit({**record, "step": self.step})

    def due(self, before: float) -> bool:
        """Whether this step is to be evaluated, given the share of the budget spent before it."""
        if self.evaluations is None:
            return self.step % self.evaluate_every == 0
        return int(self.share * self.evaluations) > int(before * self.evaluations)

    def counters(self) -> Mapping[str, int]:
        return {} if self.problem.counters is None else dict(self.problem.counters())

    def weights(self, state: State) -> Record:
        """The weight of every data source, under its name."""
        sources = self.problem.sources
        if sources is None:
            return {}
        omega = sources.weights(self.method.result(state)[0]).detach()
        return {f"weight.{name}": weight for name, weight in zip(sources.names, omega, strict=True)}

    def evaluation(self) -> Record:
        metrics = self.problem.evaluate(*self.method.result(self.state))
        return {f"metric.{name}": float(value) for name, value in metrics.items()}

    def commit(self, record: Record) -> None:
        record = plain(record)
        if self.folder is not None:
            self.folder.append(record, {"step": record["step"], "seconds": self.clock.seconds})
        self.records.append({**record, "seconds": self.clock.seconds})
        self.notify("hgms_step_finished", run=self.info, record=self.records[-1])
        self.watch(self.info, self.records[-1], self.share)

    def save(self) -> None:
        if self.folder is not None and self.saved_step != self.step:
            self.folder.save(self.state, self.step)
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def end(self, status: str, error: str | None = None, *, validate: bool = True) -> dict[str, Any]:
        summary = summarise(self.info, status, self.step, self.records, error)
        if why := getattr(self.method, "untrained", ""):
            summary["untrained"] = why
        theta, x = self.method.result(self.state) if validate else ({}, {})
        loss = validation_loss(self.problem, theta, x) if validate else None
        losses = [row["upper_loss"] for row in self.records if "upper_loss" in row]
        unsound = _broken(loss) or (bool(losses) and all(value is None for value in losses))
        if status == "done" and unsound:
            what = f"the upper loss at the result is {loss}" if _broken(loss) else "the upper loss was not finite in any step"
            raise NumericalError(
                f"step {self.step}: {what}\n  look for rows that are empty or hold numbers that are not finite"
            )
        if loss is not None and not why and (said := remarks(self.problem, x, loss)):
            summary["remarks"] = said
        summary["validation_loss"] = plain(loss)
        if self.folder is not None:
            self.folder.write_summary(summary)
        return summary

    def memory_short(self, error: BaseException) -> str:
        """What to tell of a step that did not fit: which knobs of this configuration bound its memory, and what they are at."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        kept = f"the state after step {self.step} is kept" if self.state else "nothing was begun"
        advice = _memory_knobs(self.info.config) or ["let the method and the problem take fewer rows or candidates at a time"]
        return "\n  ".join([f"step {self.step + 1}: out of memory: {_first_line(error)}", kept, *advice])

    def no_second_derivative(self, error: BaseException) -> str:
        """What to tell of a hypergradient that differentiates twice what can be differentiated once."""
        return (
            f"step {self.step + 1}: a loss has no second derivative here: {_first_line(error)}\n"
            "  take a hypergradient of first order (through-step, carried, one-step with derivative = 'difference'), or\n"
            "  products by differences (implicit with strategy = 'difference'); or let the model do without what stops it:\n"
            "  eager attention, no activation checkpointing, no micro-batches"
        )

    def how_to_resume(self) -> str:
        if self.folder is None or self.saved_step < 0:
            return ""
        return f"; the state after step {self.saved_step} is saved in {self.folder.path}\n  add {self.word} to go on"


def _total(leaves: Iterable[torch.Tensor]) -> float | torch.Tensor:
    """The sum of all numbers, which is not finite if one of them is not: one fast pass, and nothing waits for a GPU."""
    sums = [leaf.sum() for leaf in leaves]
    if any(part.is_cuda for part in sums):
        return torch.stack([part.double() for part in sums]).sum()
    return sum(part.item() for part in sums)


def _check(record: Record, step: int) -> None:
    """Stops a run whose numbers broke down, before the broken state replaces the good one."""
    kept = f"the state after step {step - 1} is kept"
    if record.get("finite_candidates", 1) == 0:
        raise NumericalError(
            f"step {step}: none of the candidates is finite (scores: {record.get('scores')})\n"
            f"  {kept}; lower the generator's lr, or set its clip"
        )
    if _broken(record.get("hypergradient_norm")):
        raise NumericalError(
            f"step {step}: the hypergradient is not finite "
            f"(norm {record['hypergradient_norm']}, linear solve: {record.get('outcome', 'none')})\n"
            f"  {kept}; raise the solver's ridge, or lower the generator's lr"
        )
    if _broken(record.get("upper_loss")):
        raise NumericalError(
            f"step {step}: the upper loss is {record['upper_loss']}\n"
            f"  {kept}; look for upper rows that are empty or not finite, or lower the learning rates"
        )
    if _broken(record.get("update_norm")) or "broken" in record:
        names = ", ".join(record.get("broken", ["θ"])[:8])
        raise NumericalError(
            f"step {step}: {names} stopped being finite (θ moved by {record.get('update_norm', 'an unknown distance')})\n"
            f"  {kept}; lower the outer optimiser's lr, or the lower level's"
        )


def _broken(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _memory_knobs(config: Mapping[str, Any]) -> list[str]:
    """What a configuration has to bound the memory of a step, with what it is at: first what changes no result."""
    same, other = [], []
    for place, key, value, beside in _leaves({kind: config[kind] for kind in ("method", "task") if kind in config}):
        now = f"{place} (now {'all' if value in (None, 'none') else value})"
        if key in ("chunk", "micro_batch") and value != 1:
            same.append(f"lower {now}")
        elif key == "checkpointing" and value is False:
            same.append(f"set {place} = true")
        elif key == "batch_size" and value != 1:
            other.append(f"lower {now}")
        elif key == "quantize" and value in (None, "none") and beside.get("path") not in (None, "none"):
            other.append(f'set {place} = "4bit"')
    told = (("the same result with less", same), ("otherwise", other))
    return [f"{what}: {', '.join(knobs)}" for what, knobs in told if knobs]


def _leaves(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, Any, Mapping[str, Any]]]:
    """(place, key, value, the table it stands in) of everything in nested tables."""
    for key, value in table.items():
        here = f"{place}.{key}" if place else key
        if isinstance(value, Mapping):
            yield from _leaves(value, here)
        else:
            yield here, key, value, table


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def summarise(info: RunInfo, status: str, step: int, records: list[Record], error: str | None = None) -> dict[str, Any]:
    """The result of a run without its clock, so that it is the same for every run of one seed."""
    last = records[-1] if records else {}
    evaluated = next((row for row in reversed(records) if any(key.startswith("metric.") for key in row)), {})
    return {
        "status": status,
        **({"error": error} if error else {}),
        "task": info.task,
        "method": info.method,
        "seed": info.seed,
        "budget": str(info.budget),
        "outer_steps": step,
        "upper_loss": last.get("upper_loss"),
        "metrics": {key.removeprefix("metric."): value for key, value in evaluated.items() if key.startswith("metric.")},
        "oracle_calls": last.get("oracle_calls"),
        "cost": {key.removeprefix("cost_"): value for key, value in last.items() if key.startswith("cost_")},
    }


__all__ = ["Interrupted", "Interrupts", "Run", "RunResult", "Watcher", "ignore", "run", "stoppable", "summarise"]
