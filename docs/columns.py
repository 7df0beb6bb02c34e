"""Describe the columns that `hgms report` writes to Parquet, from files of real runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet
from click.testing import CliRunner

from hgms.cli import group as cli
from hgms.report import mixture

FAMILIES = ("metric.", "setting.", "weight.")
"""Prefixes of columns that share a description; the name of a metric, setting or source follows."""

MEANING = {
    "task": (
        "what the report calls the task; two tasks that differ in settings are distinguished by "
        "what differs"
    ),
    "task_name": "what the task is registered as",
    "method": "what the report calls the method: its label, or its name",
    "method_name": "what the method is registered as",
    "role": "of a reference: `floor` or `ceiling`; else empty",
    "hash": "of the configuration, as in the folder's name; runs with equal ones may be averaged",
    "status": "`done` or `failed`",
    "error": "why a run failed",
    "budget": "in words",
    "task_version": "runs of different versions are not comparable",
    "folder": "where the run is",
    "seed": "",
    "outer_steps": "outer steps done",
    "oracle_calls": "all calls of the oracles, as a budget in calls counts them",
    "peak_memory_bytes": (
        "of the process, libraries included, in bytes; runs of `hgms compare` only"
    ),
    "seconds": ("spent in steps, on the budget's clock"),
    "compile_seconds": "spent on compilation, which is part of no budget",
    "metric.": ("what the task's `evaluate` returned for the result"),
    "weight.": ("weight of a data source in the result; between 0 and 1, they add up to 1"),
    "setting.": (
        "each value of `config.toml` but the seed and the folder, as TOML writes it, "
        "under its dotted key"
    ),
}


def tables() -> str:
    """Return the table of columns with the types in the file."""
    names = _named(_schema())
    sources = [(f"{mixture.PREFIX}<source>", "double")]
    settings = [setting for setting in names if setting[0].startswith("setting.")]
    others = [setting for setting in names if not setting[0].startswith("setting.")]
    return _table([*others, *sources, *settings])


def _schema() -> pa.Schema:
    """Read the schema from the file of two short runs."""
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for arguments in (
                [
                    "compare",
                    "--task",
                    "quadratic",
                    "--methods",
                    "uniform,hg-ms",
                    "--budget",
                    "2 steps",
                    "--jobs",
                    "0",
                ],
                ["report", "runs", "--out", "report.parquet"],
            ):
                result = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
                assert result.exit_code == 0, result.output
            return pa.parquet.read_schema("report.parquet")
        finally:
            os.chdir(before)


def _named(schema: pa.Schema) -> list[tuple[str, str]]:
    """Return (name, type) of the columns, with one entry per family."""
    names: dict[str, str] = {}
    for field in schema:
        family = next((prefix for prefix in FAMILIES if field.name.startswith(prefix)), None)
        names.setdefault(field.name if family is None else f"{family}<name>", str(field.type))
    return list(names.items())


def _table(columns: Iterable[tuple[str, str]]) -> str:
    rows = []
    for name, kind in columns:
        family = next((prefix for prefix in FAMILIES if name.startswith(prefix)), name)
        if family not in MEANING:
            raise KeyError(f"docs/columns.py has no meaning of the column {name!r}")
        rows.append(f"| `{name}` | {kind} | {MEANING[family]} |")
    return "| column | type | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
