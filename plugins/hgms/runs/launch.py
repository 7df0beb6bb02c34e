"""Start of runs, from Python or from a configuration.

A configuration defines the device, the problem and the folder of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from hgms import facts
from hgms.arguments import errors_at, require
from hgms.config import Budget, check_arguments
from hgms.config.as_table import describe_component, plain
from hgms.config.convert import role_of, structure
from hgms.distributed import OnRanks, device_of
from hgms.plugins import LOG, Host, Registry
from hgms.runs.config import RunConfig, RunSettings
from hgms.runs.execution import Execution
from hgms.runs.folder import RunFolder
from hgms.runs.loop import Run
from hgms.runs.observers import Observers, ignore
from hgms.runs.own_problem import OwnProblem
from hgms.runs.plan import Plan
from hgms.runs.provenance import digests, ensure_same_inputs, undeclared_plugins
from hgms.runs.rank import follow_launched, objects_on_ranks, on_ranks
from hgms.runs.recorder import Recorder
from hgms.runs.result import RunResult, summarise
from hgms.runs.signals import nothing_saved
from hgms.runs.traits import ensure_fits
from hgms.runs.watchers import Watcher
from hgms.store import hold_lease, replace_file
from hgms_core import ConfigError, Method, Problem, RunInfo
from hgms_core.arguments import brief, check_part
from hgms_core.errors import CheckpointError


@check_arguments("method", "problem", "watch")
def run(
    method: Method | str | Mapping[str, Any],
    problem: Problem,
    budget: Budget | str,
    *,
    seed: int = 0,
    folder: RunFolder | str | Path | None = None,
    resume: bool = False,
    settings: RunSettings | Mapping[str, Any] = RunSettings(),
    watch: Watcher | Host | Sequence[Watcher | Host] = (),
) -> RunResult:
    """Run ``method`` on ``problem`` until the budget is spent.

    The last step may end slightly after the budget. ``method`` is an object, the name of a
    registered method (``"hg-ms"``) or a table with its name. ``budget`` may be a text (``"60s"``,
    ``"25 steps"``, ``"1e5 calls"``). θ and x of the result have the form of the user's problem. The
    clock runs only during steps. A budget in seconds starts after one discarded step, which loads
    modules and compiles kernels.

    ``watch(info, record, share of the budget)``, or a list of such functions, is called after every
    step, outside the clock. A watcher that returns ``True`` or raises :class:`StopRun` ends the
    run. The run is then done, and ``summary["stopped_by"]`` gives the reason. Any other exception
    is raised, and a run in a folder can resume later. A plugin host among the watchers calls the
    hooks of its plugins, and provides registered methods.

    With a ``folder`` (a path, or a :class:`RunFolder`), the run is stored there in the format of
    ``hgms run``, which ``hgms report`` reads. Every step is appended. A checkpoint is written every
    ``settings.checkpoint_seconds``, at the end, on Ctrl-C, SIGTERM and SIGHUP, and before an error
    is raised.

    ``resume`` continues from the checkpoint. On the CPU, the files of a resumed run with a budget
    of steps or calls are identical to the files of an uninterrupted run. A finished run is read
    back. Without ``resume`` the folder must not contain a run. A run resumes only with the problem
    and the method that it started with. Digests of their values and code, as far as these are
    readable, are in its ``config.toml``.

    ``settings`` define when to evaluate, the clock, the route of matrix products, and whether steps
    are compiled. The problem defines device and dtype. ``label`` and ``task_label`` in ``settings``
    name the method and the task in reports; the defaults are the method's name and "problem".

    Raises
    ------
    NumericalError
        θ, x, the upper loss or the hypergradient is not finite, or no candidate is finite; the last
        good state is on disk.
    OutOfMemory
        The error contains memory hints; the last good state is on disk.
    ConfigError
        The method's name or table is wrong, or the problem lacks a trait that the method requires,
        or the hypergradient requires a second derivative that a loss does not have.
    CheckpointError
        The folder is damaged, or contains another run; no file was changed.

    Examples
    --------
    >>> from hgms_core import Problem
    >>> class Halve:  # anything with init, step and result is a Method
    ...     name = "halve"
    ...
    ...     def init(self, problem, seed):
    ...         return {"x": dict(problem.x0)}
    ...
    ...     def step(self, problem, state, progress):
    ...         return {"x": {"x": state["x"]["x"] / 2}}, {"size": state["x"]["x"].sum()}
    ...
    ...     def result(self, state):
    ...         return {}, state["x"]
    >>> problem = Problem(
    ...     theta0={},
    ...     x0={"x": torch.ones(1)},
    ...     g=lambda t, x, b: x["x"].sum(),
    ...     f=lambda t, x, b: x["x"].sum(),
    ... )
    >>> result = run(Halve(), problem, "3 steps")
    >>> [record["size"] for record in result.records if record["step"]], result.x["x"]
    ([1.0, 0.5, 0.25], tensor([0.1250]))
    """
    if not isinstance(problem, Problem):
        raise ConfigError(
            "wrong-type",
            f"problem={brief(problem)} must be a Problem",
            place=("problem",),
            hint="use hgms.comparison.compare for a registered task or a function seed -> Problem",
        )
    require(seed >= 0, "out-of-range", f"seed={seed} must be at least 0", place=("seed",))
    with errors_at("budget"):
        budget = Budget(budget)
    with errors_at("settings"):
        settings = RunSettings(**settings) if isinstance(settings, Mapping) else settings
    if settings.ranks > 1:
        raise objects_on_ranks(settings.ranks)
    observers = Observers.of(watch)
    with nothing_saved():
        named = isinstance(method, str | Mapping)
        own = OwnProblem.of(problem) if folder is not None or named else None
        called, role, method = named_method(method, own, observers.host)
    device = next(iter(problem.x0.values())).device
    info = RunInfo(task=OwnProblem.name, method=called, seed=seed, budget=budget)
    if folder is not None:
        folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        info = attrs.evolve(
            info, folder=folder.path, config=_config_table(info, method, own, device, settings)
        )
    plan = Plan(
        method=method,
        make=lambda: problem,
        info=info,
        device=device,
        settings=settings,
        task=own,
        role=role,
        restore=problem.restore,
    )
    result = Run(
        plan=plan, recorder=Recorder(folder=folder, resume=resume), observers=observers
    ).carry_out()
    for remark in result.summary.get("remarks") or []:
        LOG.warning("%s", remark)
    return result


def named_method(
    method: Method | str | Mapping[str, Any], problem: OwnProblem | None, host: Host | None
) -> tuple[str, str, Method]:
    """Return the name of a method, its role, and the method.

    A name or a table is converted to a method with its defaults for this problem.

    Raises
    ------
    ConfigError
        For an invalid name or table, for an object that is not a method, and if the problem lacks a
        trait that the method requires.
    """
    if isinstance(method, str | Mapping):
        registry = Registry.load() if host is None else Registry(host)
        traits = problem.traits if problem is not None else ()
        with errors_at("method"):
            built: Method = structure(method, Method, registry, frozenset(traits))
        name = method if isinstance(method, str) else str(method["name"])
        if problem is not None:
            ensure_fits(built, problem, name)
        return name, role_of(registry, name), built
    check_part(("method",), method, "a method", ("init", "step", "result"))
    return facts.name_of(method), facts.role_of(method), method


def _config_table(
    info: RunInfo,
    method: Method,
    problem: OwnProblem | None,
    device: torch.device,
    settings: RunSettings,
) -> dict[str, Any]:
    """Return the table in ``config.toml`` for a run from Python.

    It contains fields, and digests of values that TOML cannot express.
    """
    table = plain(settings)
    code = digests(method)
    fields = describe_component(method, info.method)
    return {
        "seed": info.seed,
        "task": {"name": info.task}
        | ({} if problem is None else {"identity": dict(problem.identity)}),
        "method": fields | ({"code": code} if code and "identity" not in fields else {}),
        "budget": plain(info.budget),
        "run": {"device": str(device)}
        | {key: table[key] for key in ("evaluate_every", "evaluations", "clock")}
        | {key: table[key] for key in ("matmul", "compile") if table[key] != "auto"}
        | {key: table[key] for key in ("label", "task_label") if table[key] is not None},
    }


def run_config(
    config: RunConfig,
    *,
    resume: bool = False,
    watch: Watcher = ignore,
    path: Path | None = None,
    patience: float | None = None,
    execution: Execution | None = None,
) -> RunResult:
    """Run a configuration in the folder ``path`` (``None``: the folder of the configuration).

    ``watch`` is called after every step, for example to display the progress. If another process
    writes to the folder, wait for ``patience`` seconds (``None``: until that process is
    known to be alive).

    A finished run that is resumed is read back, not run again. ``execution`` defines how steps are
    computed, unless the run has recorded it (``None``: the run decides). Runs of a comparison use
    the execution of the first run, ``result.execution``.
    """
    ensure_fits(config.method, config.task, config.method_name)
    settings = config.run
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = device_called(settings.device)
    follow_launched(config, device)
    folder = RunFolder(path or config.path)
    if resume and folder.has_begun:
        ensure_same_inputs(folder.read_environment(), config.task, config.method, str(folder.path))
    elif resume and path is None:
        _look_for_others(folder, config)

    def build() -> Problem:
        return config.task.problem(config.seed, here, getattr(torch, settings.dtype))

    host = config.host or Host.load()
    here = device if settings.ranks == 1 else device_of(device, 0)
    with on_ranks(config, device, undeclared_plugins(host)) as (method, settings):
        plan = Plan(
            method=method,
            make=partial(method.build, build) if isinstance(method, OnRanks) else build,
            info=attrs.evolve(config.info, folder=folder.path),
            device=here,
            settings=settings,
            task=config.task,
            execution=execution,
            role=config.role,
        )
        recorder = Recorder(folder=folder, resume=resume, patience=patience, word="--resume")
        observers = Observers(watch=[watch], host=host)
        return Run(plan=plan, recorder=recorder, observers=observers).carry_out()


def _look_for_others(folder: RunFolder, config: RunConfig) -> None:
    """Reject resuming if the run of this configuration belongs to other data or code.

    If there is no such run, warn that a new run starts.
    """
    label = config.run.label or config.method_name
    runs = folder.path.parent.parent.glob(f"{label}-*/{folder.path.name}")
    text = config.to_toml()
    for other in map(RunFolder, sorted(runs)):
        if other.config.exists() and other.holds(text):
            before = other.read_environment()
            ensure_same_inputs(before, config.task, config.method, str(other.path))
    LOG.warning("there is nothing to resume in %s; a new run begins", folder.path)


def device_called(name: str) -> torch.device:
    """Return a device by name.

    Raises
    ------
    ConfigError
        If this machine does not have it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            "unknown-device",
            f"unknown device {name!r}",
            place=("run", "device"),
            hint='use "cpu", "cuda" or "cuda:0"',
        ) from None
    if device.type not in ("cuda", "mps"):
        return device
    is_cuda = device.type == "cuda"
    count = torch.cuda.device_count() if is_cuda else int(torch.backends.mps.is_available())
    require(
        (device.index or 0) < count,
        "device-not-available",
        f"device={name!r} is not available: torch finds {count} {device.type} devices",
        hint='use device = "cpu"' if not count else f'use at most "{device.type}:{count - 1}"',
        place=("run", "device"),
    )
    return device


def record_failure(folder: RunFolder, config: RunConfig, error: str) -> None:
    """Write the summary of a run that failed by an exception or a killed process.

    With a summary, the run is repeated only on request.

    Raises
    ------
    FolderInUse
        If another process now executes the run.
    """
    with hold_lease(folder.path):
        try:
            records = folder.records()
        except CheckpointError:
            records = []
        step = int(records[-1]["step"]) if records else 0
        if not folder.config.exists():  # it ended before its first step
            replace_file(folder.config, config.to_toml().encode())
        folder.write_summary(summarise(config.info, "failed", step, records, error, config.role))
