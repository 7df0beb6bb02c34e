"""The outer loop: a method stepped on a problem until its budget is spent, recorded, observed and resumable."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import attrs
import torch
from attrs import define, field, frozen

from hgms_core.budget import Budget
from hgms_core.errors import CheckpointError, ConfigError, NumericalError, OutOfMemory, once_differentiable, out_of_memory
from hgms_core.folder import RunFolder, plain
from hgms_core.hookspecs import RunInfo
from hgms_core.problem import Data, Problem
from hgms_core.protocols import Method, State
from hgms_core.records import Record, to_numbers
from hgms_core.trees import Tree

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
"""``watch(info, record, share of the budget spent)``, called after every step, outside the clock."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the state is saved; the message says how to go on."""


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


class Interrupts:
    """Lets the running step finish on the first Ctrl-C, so that what is written is whole; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def ignore(*_: Any, **__: Any) -> None:
    """For those who want to be told nothing."""


def run(
    method: Method,
    problem: Problem,
    budget: Budget,
    *,
    seed: int = 0,
    info: RunInfo | None = None,
    folder: RunFolder | None = None,
    resume: bool = False,
    evaluate_every: int = 1,
    evaluations: int | None = None,
    clock: str = "wall",
    checkpoint_seconds: float = 30.0,
    watch: Watcher = ignore,
    notify: Callable[..., None] = ignore,
) -> RunResult:
    """Steps ``method`` on ``problem`` until the budget is spent; the last step may end a little after it.

    The clock runs during steps only; a budget in seconds starts after one discarded step that warms everything up. With a
    ``folder`` every step is appended to it and a checkpoint is written every ``checkpoint_seconds``, at the end, on Ctrl-C and
    before an error leaves; ``resume`` goes on from there, and on the CPU ends with the very bytes an uninterrupted run under a
    budget of steps or calls would have written.

    Raises:
        NumericalError: all candidates or the hypergradient were not finite; the last good state is on disk.
        OutOfMemory: with what to lower; the last good state is on disk.
        ConfigError: the hypergradient asks for a second derivative of a loss that has none.
        CheckpointError: the folder is damaged, or holds another run.

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
    info = info or RunInfo(task="problem", method=method.name, seed=seed, budget=budget)
    current = _Run(method, problem, budget, info, folder, evaluate_every, evaluations, clock, checkpoint_seconds, watch, notify)
    try:
        current.begin(seed, resume)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemory(current.memory_short(error)) from error
    summary: dict[str, Any] | None = None
    failure: BaseException | None = None
    try:
        current.loop()
        summary = current.end("done")
    except KeyboardInterrupt as error:
        failure = error
        raise Interrupted(f"interrupted{current.how_to_resume()}") from None
    except NumericalError as error:
        failure = error
        current.save()
        summary = current.end("failed", str(error))
        raise
    except ConfigError as error:
        failure = error
        current.save()
        summary = current.end("failed", str(error), validate=False)
        raise
    except BaseException as error:
        failure = error
        if once_differentiable(error):
            failure = ConfigError(current.no_second_derivative(error))
            summary = current.end("failed", str(failure), validate=False)
            raise failure from error
        if not out_of_memory(error):
            raise
        current.save()
        failure = OutOfMemory(current.memory_short(error))
        summary = current.end("failed", str(failure), validate=False)
        raise failure from error
    finally:
        notify("hgms_run_finished", run=current.info, summary=summary, error=failure)
    theta, x = method.result(current.state)
    return RunResult(info=current.info, theta=theta, x=x, summary=summary, records=current.records)


@define(eq=False)
class _Run:
    """A run under way: its state, its rows, its clock."""

    method: Method
    problem: Problem
    budget: Budget
    info: RunInfo
    folder: RunFolder | None
    evaluate_every: int
    evaluations: int | None
    clock_kind: str
    checkpoint_seconds: float
    watch: Watcher
    notify: Callable[..., None]
    state: State = field(factory=dict)
    step: int = 0
    calls: int = 0
    idle: int = 0
    records: list[Record] = field(factory=list)
    clock: _Clock = field(init=False)
    saved_at: float = field(factory=time.monotonic)
    saved_step: int = -1

    def begin(self, seed: int, resume: bool) -> None:
        """The first state, or the checkpoint's, with the rows and the clock that belong to it."""
        device = next(iter(self.problem.x0.values())).device
        self.clock = _Clock(0.0, device, self.clock_kind)
        found = self.folder.load(device) if self.folder is not None and resume else None
        if self.folder is None or found is None:
            self.state = self.method.init(self.problem, seed)
            if self.folder is not None and resume:
                self.folder.rewind(-1)  # killed before its first checkpoint: start again
        else:
            self.state, self.step = found
            self.saved_step = self.step
            self.clock.seconds = self.folder.rewind(self.step)
            self.records = self.folder.records()
            if not self.records or self.records[-1]["step"] != self.step:
                raise CheckpointError(
                    f"damaged run file {self.folder.steps}: it ends before step {self.step} of the checkpoint"
                )
            self.calls = int(self.records[-1].get("oracle_calls", 0))
            self.info = attrs.evolve(self.info, resumed_from=self.step)
        self.notify("hgms_run_started", run=self.info)

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
                if interrupts.asked and self.share < 1:
                    self.save()
                    raise KeyboardInterrupt
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
        record = to_numbers({**raw, **grown, **self.weights(following)})
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

    def validation_loss(self) -> float:
        """f at the returned (θ, x) on the validation rows of role ``stop`` (of ``differentiate`` where there are none): what
        settings may be chosen by, since it sees no test row."""
        parts = [self.problem.upper_data.get(role, Data.none()) for role in ("stop", "differentiate")]
        rows = next((part for part in parts if part.size), parts[-1])
        with torch.no_grad():
            return float(self.problem.f(*self.method.result(self.state), rows.batch(None)))

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
        summary["validation_loss"] = plain(self.validation_loss()) if validate else None
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
        return f"; the state after step {self.saved_step} is saved in {self.folder.path}\n  add --resume to go on"


def _check(record: Record, step: int) -> None:
    """Stops a run whose numbers broke down, before the broken state replaces the good one."""
    if record.get("finite_candidates", 1) == 0:
        raise NumericalError(
            f"step {step}: none of the candidates is finite (scores: {record.get('scores')})\n"
            f"  the state after step {step - 1} is kept; lower the generator's lr, or set its clip"
        )
    size = record.get("hypergradient_norm")
    if size is not None and not abs(size) < float("inf"):
        raise NumericalError(
            f"step {step}: the hypergradient is not finite (norm {size}, linear solve: {record.get('outcome', 'none')})\n"
            f"  the state after step {step - 1} is kept; raise the solver's ridge, or lower the generator's lr"
        )


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


__all__ = ["Interrupted", "Interrupts", "RunResult", "Watcher", "ignore", "run", "summarise"]
