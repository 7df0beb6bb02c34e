"""Runs of configurations: the device, the problem and the run's own folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hgms_core import CheckpointError, ConfigError, Problem, RunInfo, Task, ensure_fits
from hgms_core.host import Host
from hgms_run.config import RunConfig
from hgms_run.ended import RunResult, summarise
from hgms_run.files import replace_file
from hgms_run.folder import RunFolder
from hgms_run.loop import Run, Watcher, ignore
from hgms_run.provenance import digests

if TYPE_CHECKING:
    from hgms_run.progress import Progress


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
    ensure_fits(config.method, config.task, config.method_name)
    settings = config.run
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = device_called(settings.device)
    folder = RunFolder(path or run_path(config))

    def build() -> Problem:
        problem = config.task.problem(config.seed, device, getattr(torch, settings.dtype))
        ready(problem)
        return problem

    return Run(
        method=config.method, make=build, device=device, folder=folder, resume=resume,
        info=RunInfo(
            task=config.task.name, method=config.method_name, seed=config.seed, budget=config.budget, folder=folder.path,
            config=config.resolved(),
        ),
        patience=patience, word="--resume",
        about=lambda: {"task": _about(config.task), "code": digests([config.task, config.method])},
        settings=settings, watch=watch or (view.watch if view is not None else ignore), host=config.host or Host.load(),
    ).carry_out()  # fmt: skip


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
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device {name!r} asked for, but torch sees no Apple GPU; use 'cpu' @ run.device")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        last = f"cuda:{torch.cuda.device_count() - 1}"
        raise ConfigError(f"device {name!r} asked for, but the last that torch sees is {last!r}; use one it sees @ run.device")
    return device


def _about(task: Task) -> dict[str, Any]:
    """What a reader of the run has to know of the task and its configuration does not say: version, which way is better, and
    what stood in its files, where it says so (``made_of``)."""
    known = {"version": str(getattr(task, "version", "")), "metrics": dict(getattr(task, "metrics", {}))}
    made_of = getattr(task, "made_of", None)
    return known if made_of is None else {**known, "made_of": made_of()}


def record_failure(folder: RunFolder, config: RunConfig, error: str) -> None:
    """Writes the summary of a run that an exception or a killed process ended, so that it is not tried again unasked."""
    try:
        records = folder.records()
    except CheckpointError:
        records = []
    info = RunInfo(task=config.task.name, method=config.method_name, seed=config.seed, budget=config.budget)
    step = int(records[-1]["step"]) if records else 0
    if not folder.config.exists():  # it ended before its first step
        replace_file(folder.config, config.to_toml().encode())
    folder.write_summary({**summarise(info, "failed", step, records, error), "validation_loss": None})
