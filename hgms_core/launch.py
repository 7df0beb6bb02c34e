"""Runs of configurations: the device, the problem and the run's own folder, with a record of what the numbers depend on.

:func:`run_config` makes all that :func:`hgms_core.runner.run` needs, and refuses a folder that holds something else.
"""

from __future__ import annotations

import functools
import platform
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from hgms_core import compat
from hgms_core.code import digests
from hgms_core.config import RunConfig
from hgms_core.errors import CheckpointError, ConfigError
from hgms_core.folder import RunFolder
from hgms_core.hookspecs import RunInfo
from hgms_core.plugins import host, notify
from hgms_core.problem import Problem
from hgms_core.protocols import Task
from hgms_core.runner import RunResult, Watcher, ignore, run, summarise

if TYPE_CHECKING:
    from hgms_core.progress import Progress


def run_config(
    config: RunConfig,
    *,
    resume: bool = False,
    view: Progress | None = None,
    watch: Watcher | None = None,
    path: Path | None = None,
    patience: float = 0.0,
    ready: Callable[[Problem], None] = ignore,
) -> RunResult:
    """One run from a configuration, in its own folder (``path``, or :func:`run_path`); ``view`` shows how it goes, or ``watch``
    is called after every step, ``ready`` before the first one. Another process that writes to the folder is waited for
    ``patience`` seconds.

    A finished run that is resumed is read back, not run again.
    """
    compat.ensure(config.method, config.task, config.method_name)
    settings = config.run
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = device_called(settings.device)
    folder = RunFolder(path or run_path(config))
    info = RunInfo(
        task=config.task.name, method=config.method_name, seed=config.seed, budget=config.budget, folder=folder.path,
        config=config.resolved(),
    )  # fmt: skip
    _prepare(folder, config.to_toml(), resume)
    try:
        with FileLock(folder.path / ".lock", timeout=patience):
            finished = folder.read_summary() if resume else None
            if finished is not None and finished["status"] == "done":
                found = folder.load(device)
                if found is None:
                    raise CheckpointError(f"{folder.path} has a summary but no checkpoint; remove the folder and run again")
                theta, x = config.method.result(found[0])
                return RunResult(info=info, theta=theta, x=x, summary=finished, records=folder.records())
            problem = config.task.problem(config.seed, device, getattr(torch, settings.dtype))
            ready(problem)
            code = digests([config.task, config.method])
            folder.create(config.to_toml(), {**environment(device), "task": _about(config.task), "code": code})
            return run(
                config.method, problem, config.budget, seed=config.seed, info=info, folder=folder, resume=resume,
                evaluate_every=settings.evaluate_every, evaluations=settings.evaluations, clock=settings.clock,
                checkpoint_seconds=settings.checkpoint_seconds,
                watch=watch or (view.watch if view is not None else ignore), notify=notify,
            )  # fmt: skip
    except Timeout:
        raise CheckpointError(f"another process is writing to {folder.path}; wait for it, or choose another --out") from None


def run_path(config: RunConfig) -> Path:
    """Where a configuration's run lives: ``<out>/<task>/<method>-<hash>/seed-<n>``, with labels in place of names."""
    task, method = config.run.task_label or config.task.name, config.run.label or config.method_name
    return Path(config.run.out, task, f"{method}-{config.config_hash}", f"seed-{config.seed}")


def device_called(name: str) -> torch.device:
    """The device of that name; ConfigError where torch has none such."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {name!r}; use 'cpu', 'cuda' or 'cuda:0' @ run.device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} asked for, but torch sees no CUDA device; use 'cpu' @ run.device")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        last = f"cuda:{torch.cuda.device_count() - 1}"
        raise ConfigError(f"device {name!r} asked for, but the last that torch sees is {last!r}; use one it sees @ run.device")
    return device


# --- the folder --------------------------------------------------------------------------------------------------------


def _prepare(folder: RunFolder, config: str, resume: bool) -> None:
    """The folder may be new, or hold this very run and be resumed. Anything else is refused with what to do."""
    if folder.config.exists():
        if not holds(folder, config):
            raise CheckpointError(
                f"{folder.path} holds a run of another configuration\n"
                f"  compare {folder.config} with yours; choose another --out, or remove the folder"
            )
        if not resume:
            state = "finished" if folder.summary.exists() else "begun"
            raise CheckpointError(
                f"{folder.path} holds this run already ({state})\n"
                "  add --resume to go on from its checkpoint, choose another --out or --seed, or remove the folder"
            )
    folder.path.mkdir(parents=True, exist_ok=True)


def holds(folder: RunFolder, config: str) -> bool:
    """Whether the folder was made for this configuration. It may have moved or have got a label: ``run.out`` and the labels are
    not looked at."""

    def told(text: str) -> dict[str, Any]:
        table = tomllib.loads(text)
        settings = {key: value for key, value in table.get("run", {}).items() if key not in ("out", "label", "task_label")}
        return {**table, "run": settings}

    text = folder.config.read_text(encoding="utf-8", errors="replace")
    try:
        return text == config or told(text) == told(config)
    except (tomllib.TOMLDecodeError, AttributeError):
        return False


def record_failure(folder: RunFolder, config: RunConfig, error: str) -> None:
    """Writes the summary of a run that an exception or a killed process ended, so that it is not tried again unasked."""
    try:
        records = folder.records()
    except CheckpointError:
        records = []
    info = RunInfo(task=config.task.name, method=config.method_name, seed=config.seed, budget=config.budget)
    step = int(records[-1]["step"]) if records else 0
    folder.write_summary({**summarise(info, "failed", step, records, error), "validation_loss": None})


# --- what its numbers depend on ----------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, Any]:
    """What a number depends on besides its configuration."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "versions": dict(_versions()),
        "plugins": [f"{info.name} ({info.owner})" for info in host().infos.values() if info.status == "loaded"],
        "git": _git(Path.cwd()),
    }


def _about(task: Task) -> dict[str, Any]:
    """What a reader of the run has to know of the task and its configuration does not say: version, which way is better, and
    what stood in its files, where it says so (``made_of``)."""
    known = {"version": str(getattr(task, "version", "")), "metrics": dict(getattr(task, "metrics", {}))}
    made_of = getattr(task, "made_of", None)
    return known if made_of is None else {**known, "made_of": made_of()}


@functools.cache
def _versions() -> Mapping[str, str]:
    found = {}
    for name in ("hgms", "torch", "numpy", "scipy", "attrs", "cattrs", "pluggy", "safetensors", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def _git(directory: Path) -> str | None:
    """The commit of the working directory's repository, with a + where it is changed; None outside one. Asked once: what this
    process has imported does not change when the files do."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        found = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


__all__ = ["device_called", "environment", "holds", "record_failure", "run_config", "run_path"]
