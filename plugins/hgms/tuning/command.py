"""The command ``hgms tune``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import hgms.hyper as hyper
from hgms.arguments import errors_at
from hgms.config.tables import tables_of
from hgms.tuning.tuner import TuneOptions, tune
from hgms_core import ConfigError
from hgms_core.errors import unknown_name

KINDS = {
    "initialisation": hyper.Initialisation,
    "learning-rate": hyper.LearningRate,
    "per-class": hyper.PerClass,
    "per-input": hyper.PerInput,
    "per-layer": hyper.PerLayer,
    "per-parameter": hyper.PerParameter,
    "per-row": hyper.PerRow,
    "scalar": hyper.Scalar,
}
"""Names of kinds in files; :class:`hgms.hyper.Values` needs a tensor, so only Python has it."""

NAMES = ("model", "loss", "train", "validation", "learn", "test")
REQUIRED = ("model", "loss", "train")
SETTINGS = ("problem", "budget", "engine", "batch_size", "folds", "seed", "clock", "learn")


@click.command("tune", short_help="Learn hyperparameters of a module by gradient.")
@click.argument("file", metavar="FILE.py|FILE.toml", type=click.Path(path_type=Path))
@click.option("--budget", help="Such as 60s or '500 steps' (default: the file, or 60s).")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the results and stages.")
@click.option("--seed", type=int, help="Seed of folds and batches.")
def tune_command(file: Path, budget: str | None, out: Path | None, seed: int | None) -> None:
    """Learn hyperparameters of the module in FILE, and train the module with them.

    FILE.py defines ``model``, ``loss`` and ``train``, and optionally ``validation``, ``test`` and
    ``learn``, as for ``hgms.tune``. FILE.toml names it (``problem = "FILE.py"``) and contains
    settings and the hyperparameters: ``[learn.decay]`` with ``name = "per-layer"``.

    With --out, an interrupted command resumes, and the folder gets model.pt, values.pt, table.txt
    and report.html.
    """
    settings: dict[str, Any] = _settings(file) if file.suffix == ".toml" else {"problem": str(file)}
    problem = _problem(Path(settings.pop("problem")))
    learn = settings.pop("learn", None) or problem.pop("learn", None)
    if learn is None:
        raise ConfigError(
            "missing-option",
            f"{file} defines no hyperparameters",
            place=(str(file), "learn"),
            hint='write learn = {"decay": hgms.hyper.PerLayer()}',
        )
    problem.pop("learn", None)
    chosen = {"budget": budget, "seed": seed}
    settings |= {name: value for name, value in chosen.items() if value is not None}
    limit = settings.pop("budget", "60s")
    if out is not None:
        settings["folder"] = out / "stages"
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), transient=True) as bars:
        task = bars.add_task("start", total=1.0)
        options: TuneOptions = {
            **settings,  # type: ignore[typeddict-item]
            "test": problem.pop("test", None),
            "progress": lambda stage, share: bars.update(task, description=stage, completed=share),
        }
        result = tune(**problem, learn=learn, budget=limit, **options)
    click.echo(str(result))
    if out is not None:
        result.save(out)
        click.echo(f"written: {result.report(out / 'report.html')}")


def _problem(path: Path) -> dict[str, Any]:
    """Run a Python file; return the arguments of ``tune`` that it defines."""
    if not path.is_file():
        raise ConfigError("no-such-file", f"there is no file {path}", place=(str(path),))
    sys.path.insert(0, str(path.parent))
    try:
        names = runpy.run_path(str(path))
    finally:
        sys.path.remove(str(path.parent))
    for name in REQUIRED:
        if name not in names:
            raise ConfigError(
                "missing-option", f"{path} defines no {name!r}", place=(str(path), name)
            )
    return {name: names[name] for name in NAMES if name in names}


def _settings(path: Path) -> dict[str, Any]:
    """Read a TOML file; return the settings, with kinds of hyperparameters as objects."""
    table = tables_of(path, "a tuning")
    for name in table:
        if name not in SETTINGS:
            raise unknown_name("option", name, SETTINGS, (str(path), name), "setting")
    if "problem" not in table:
        raise ConfigError(
            "missing-option",
            f"{path} names no Python file",
            place=(str(path), "problem"),
            hint='write problem = "my_problem.py"',
        )
    learn = {name: _kind(path, name, entry) for name, entry in table.get("learn", {}).items()}
    return {**table, "problem": str(path.parent / table["problem"]), "learn": learn}


def _kind(path: Path, name: str, entry: Any) -> Any:
    place = (str(path), "learn", name)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ConfigError(
            "wrong-type",
            f"learn.{name} must be a table with a name",
            place=place,
            hint='write name = "per-layer"',
        )
    if entry["name"] not in KINDS:
        raise unknown_name("hyperparameter", entry["name"], KINDS, (*place, "name"))
    fields = {key: value for key, value in entry.items() if key != "name"}
    with errors_at(*place):
        return KINDS[entry["name"]](**fields)
