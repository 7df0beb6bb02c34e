"""How runs begin: from Python, and from a configuration with its device, its problem and its own folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from hgms_core import Budget, CheckpointError, ConfigError, HgmsError, Method, Problem, RunInfo
from hgms_core.host import LOG, Host
from hgms_run.as_table import plain
from hgms_run.config import UNCOMPARED, RunConfig, RunSettings
from hgms_run.ended import RunResult, summarise
from hgms_run.execution import Execution
from hgms_run.files import read_file, replace_file
from hgms_run.folder import RunFolder
from hgms_run.loop import Run, Watcher, ignore
from hgms_run.tables import difference, parse_toml
from hgms_run.traits import ensure_fits

if TYPE_CHECKING:
    from hgms_run.progress import Progress


def run(
    method: Method,
    problem: Problem,
    budget: Budget,
    *,
    seed: int = 0,
    info: RunInfo | None = None,
    folder: RunFolder | str | Path | None = None,
    resume: bool = False,
    settings: RunSettings = RunSettings(),
    watch: Watcher = ignore,
    host: Host | None = None,
) -> RunResult:
    """Steps ``method`` on ``problem`` until the budget is spent; the last step may end a little after it.

    The clock runs during steps only; a budget in seconds starts after one discarded step that warms everything up.
    ``watch(info, record, share of the budget)`` is called after every step, outside the clock; what it raises ends the run.

    With a ``folder`` (a path, or a :class:`RunFolder`) the run is kept there as ``hgms run`` keeps its own, for ``hgms report``
    to read. Every step is appended, and a checkpoint is written every ``settings.checkpoint_seconds``, at the end, on Ctrl-C,
    SIGTERM and SIGHUP, and before an error leaves. ``resume`` goes on from there, and on the CPU ends with the very bytes an
    uninterrupted run under a budget of steps or calls would have written; a finished run is read back. Without ``resume`` the
    folder must hold no run. ``settings`` say when to evaluate, what the clock counts, how matrix products are computed and
    whether steps are compiled (device and dtype are the problem's). ``info`` names task, method and seed in records and
    reports; by default they are "problem", the method's name and ``seed``.

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
    if folder is not None:
        folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        config = info.config or _described(info, method, device, settings)
        info = attrs.evolve(info, folder=folder.path, config=config)
    return Run(
        method=method, make=lambda: problem, info=info, device=device, folder=folder, resume=resume, settings=settings,
        watch=watch, host=host, restore=problem.restore,
    ).carry_out()  # fmt: skip


def _described(info: RunInfo, method: Method, device: torch.device, settings: RunSettings) -> dict[str, Any]:
    """What ``config.toml`` can say of a run from Python: of its method all fields, if each has a word in TOML."""
    fields = {}
    with contextlib.suppress(ConfigError):
        fields = plain(method)
    table = plain(settings)
    return {
        "seed": info.seed, "task": {"name": info.task}, "method": {**fields, "name": info.method},
        "budget": plain(info.budget),
        "run": {"device": str(device)} | {key: table[key] for key in ("evaluate_every", "evaluations", "clock")}
        | {key: table[key] for key in ("matmul", "compile") if table[key] != "auto"},
    }  # fmt: skip


def run_config(
    config: RunConfig,
    *,
    resume: bool = False,
    view: Progress | None = None,
    watch: Watcher | None = None,
    path: Path | None = None,
    patience: float = 0.0,
    ready: Callable[[Problem], None] = ignore,
    execution: Execution | None = None,
) -> RunResult:
    """One run from a configuration, in the folder ``path`` (None: its own); ``view`` shows how it goes, or ``watch`` is called
    after every step, ``ready`` before the first one. Another process that writes to the folder is waited for ``patience``
    seconds.

    A finished run that is resumed is read back, not run again. ``execution`` is how steps are to be carried out where the run
    itself has not recorded it (None: it decides): runs to be compared take that of the first, ``result.execution``.
    """
    ensure_fits(config.method, config.task, config.method_name)
    settings = config.run
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = device_called(settings.device)
    folder = RunFolder(path or config.path)
    if resume and path is None and not folder.begun:
        _warn(folder, config)

    def build() -> Problem:
        problem = config.task.problem(config.seed, device, getattr(torch, settings.dtype))
        ready(problem)
        return problem

    return Run(
        method=config.method, make=build, device=device, folder=folder, resume=resume,
        info=attrs.evolve(config.info, folder=folder.path),
        patience=patience, word="--resume", task=config.task,
        settings=settings, watch=watch or (view.watch if view is not None else ignore), host=config.host or Host.load(),
        execution=execution,
    ).carry_out()  # fmt: skip


def _warn(folder: RunFolder, config: RunConfig) -> None:
    """Who asks to go on has a run in mind: if this configuration has none, which ones there are."""
    lines = [f"there is nothing to resume in {folder.path}; a new run begins"]
    label = config.run.label or config.method_name
    for path in sorted(folder.path.parent.parent.glob(f"{label}-*/{folder.path.name}/config.toml"))[:5]:
        with contextlib.suppress(HgmsError, UnicodeDecodeError, OSError):
            keys = difference([parse_toml(read_file(path).decode(), path.name), config.info.config])
            keys = [key for key in keys if key.removeprefix("run.") not in UNCOMPARED]
            what = f"another {', '.join(keys[:5])}" if keys else "another version of the task, or of a plugin's code"
            lines.append(f"  {path.parent} holds a run with {what}")
    LOG.warning("%s", "\n".join(lines))


def device_called(name: str) -> torch.device:
    """The device of that name; ConfigError where torch has none such."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use 'cpu', 'cuda' or 'cuda:0' @ run.device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} asked for, but torch sees no CUDA device; use 'cpu' @ run.device")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device {name!r} asked for, but torch sees no Apple GPU; use 'cpu' @ run.device")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        last = f"cuda:{torch.cuda.device_count() - 1}"
        raise ConfigError(f"device {name!r} asked for, but the last that torch sees is {last!r}; use one it sees @ run.device")
    return device


def record_failure(folder: RunFolder, config: RunConfig, error: str) -> None:
    """Writes the summary of a run that an exception or a killed process ended, so that it is not tried again unasked."""
    try:
        records = folder.records()
    except CheckpointError:
        records = []
    step = int(records[-1]["step"]) if records else 0
    if not folder.config.exists():  # it ended before its first step
        replace_file(folder.config, config.to_toml().encode())
    folder.write_summary({**summarise(config.info, "failed", step, records, error), "validation_loss": None})
