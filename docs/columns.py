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

FAMILIES = ("metric.", "setting.", "weight.", "cost_")
"""Prefixes of columns that share a description; the name of a metric, setting, source or oracle
call follows.
"""

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
    "seconds": (
        "spent in steps, on the budget's clock (to the end of the run; in a row of a "
        "step, up to it)"
    ),
    "compile_seconds": "spent on compilation, which is part of no budget",
    "metric.": (
        "what the task's `evaluate` returned: of the result, or at that step (null where "
        "it was not evaluated)"
    ),
    "weight.": (
        "weight of a data source: of what was returned, or at that step; between 0 and 1, "
        "they add up to 1"
    ),
    "seconds_per_step": "seconds over steps, of runs on language models",
    "step_forward_tokens": (
        "tokens, padding included, that went forward through the language "
        "model in a step (runs: the mean)"
    ),
    "step_backward_tokens": "the same, backward",
    "setting.": (
        "each value of `config.toml` but the seed and the folder, as TOML writes it, "
        "under its dotted key"
    ),
    "step": "outer steps done",
    "cost_": "oracle calls of a kind so far; `cost_rows` examples",
    "upper_loss": "f at the selected state",
    "lower_loss": "the last lower loss the selected branch saw",
    "stop_loss": "f on the rows of the role `stop`",
    "selected": "number of the selected candidate",
    "scores": "upper values of the candidates: the largest of them",
    "gap": "distance between the best two upper values",
    "finite_candidates": "how many scores were finite",
    "hypergradient_norm": "‖h‖",
    "update_norm": "how far θ moved",
    "lower_gradient_norm": "‖∇ₓg‖ where the hypergradient was taken",
    "residual": "relative residual of the linear solve",
    "iterations": "of the linear solve",
    "curvature": "smallest Rayleigh quotient it met",
    "outcome": "how the linear solve ended",
}


def tables() -> str:
    """Return both tables with the types in the files."""
    runs, steps = _schemas()
    sources = [(f"{mixture.PREFIX}<source>", "double")]
    tokens = [(name, "double") for name in mixture.TOKENS]
    more = [*sources, ("seconds_per_step", "double"), *tokens]
    settings = [setting for setting in _named(runs) if setting[0].startswith("setting.")]
    others = [setting for setting in _named(runs) if not setting[0].startswith("setting.")]
    return (
        f"## `report.parquet`: a row a run\n\n{_table([*others, *more, *settings])}\n"
        f"## `report.steps.parquet`: a row a step\n\n{_table([*_named(steps), *sources, *tokens])}"
    )


def _schemas() -> tuple[pa.Schema, pa.Schema]:
    """Read the schemas from the files of two short runs."""
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
                ["report", "runs", "--out", "report.parquet", "--steps"],
            ):
                result = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
                assert result.exit_code == 0, result.output
            return pa.parquet.read_schema("report.parquet"), pa.parquet.read_schema(
                "report.steps.parquet"
            )
        finally:
            os.chdir(before)


def _named(schema: pa.Schema) -> list[tuple[str, str]]:
    """Return (name, type) of the columns, with one entry per family."""
    names: dict[str, str] = {}
    for field in schema:
        family = next((prefix for prefix in FAMILIES if field.name.startswith(prefix)), None)
        kind = "string (dictionary)" if pa.types.is_dictionary(field.type) else str(field.type)
        names.setdefault(field.name if family is None else f"{family}<name>", kind)
    return list(names.items())


def _table(columns: Iterable[tuple[str, str]]) -> str:
    rows = []
    for name, kind in columns:
        family = next((prefix for prefix in FAMILIES if name.startswith(prefix)), name)
        if family not in MEANING:
            raise KeyError(f"docs/columns.py has no meaning of the column {name!r}")
        rows.append(f"| `{name}` | {kind} | {MEANING[family]} |")
    return "| column | type | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
