"""Runs of configurations: the device, the problem and the run's own folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch

from hgms_core import CheckpointError, ConfigError, HgmsError, Problem, ensure_fits
from hgms_core.host import LOG, Host
from hgms_run.config import UNCOMPARED, RunConfig
from hgms_run.ended import RunResult, summarise
from hgms_run.files import read_file, replace_file
from hgms_run.folder import RunFolder
from hgms_run.loop import Run, Watcher, ignore
from hgms_run.tables import difference, parse_toml

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
    """One run from a configuration, in its own folder (``path``, or its own); ``view`` shows how it goes, or ``watch``
    is called after every step, ``ready`` before the first one. Another process that writes to the folder is waited for
    ``patience`` seconds.

    A finished run that is resumed is read back, not run again.
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
