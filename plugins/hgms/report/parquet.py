"""The Parquet table of a report: one row per run.

The table contains texts, whole numbers, ``seconds``, ``compile_seconds`` and
``metric.<name>``. If a run has them, it also contains ``weight.<source>`` of the result.
``setting.<dotted key>`` contains every value of config.toml except the seed and the folder, in TOML
format.

``task`` and ``method`` are the names in the report. Null marks a value that a run lacks, and
NaN a metric that was not finite.
"""

from __future__ import annotations

import io
import json
from typing import Any

from hgms.config.tables import flatten
from hgms.packages import optional_module
from hgms.report.mixture import PREFIX
from hgms.report.study import Entry, Study
from hgms.results import StoredRun

_TEXTS = (
    "task",
    "task_name",
    "method",
    "method_name",
    "role",
    "hash",
    "status",
    "error",
    "budget",
    "task_version",
    "folder",
)
_COUNTS = ("seed", "outer_steps", "oracle_calls", "peak_memory_bytes")


def runs_file(study: Study) -> bytes:
    """Return a file with one row per run. Raises MissingExtra without PyArrow."""
    pa = optional_module("pyarrow", "a Parquet report", "report")
    parquet = optional_module("pyarrow.parquet", "a Parquet report", "report")
    rows = [
        _row(section.title, entry, run)
        for section in study.sections
        for entry in section.entries
        for run in entry.runs + entry.failed
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    metrics = [name for name in names if name.startswith(("metric.", PREFIX))]
    settings = [name for name in names if name.startswith("setting.")]
    table = pa.Table.from_pylist(
        rows,
        schema=pa.schema(
            [(name, pa.string()) for name in _TEXTS]
            + [(name, pa.int64()) for name in _COUNTS]
            + [(name, pa.float64()) for name in ("seconds", "compile_seconds", *metrics)]
            + [(name, pa.string()) for name in settings]
        ),
    )
    stream = io.BytesIO()
    parquet.write_table(table, stream)
    return stream.getvalue()


def _row(task: str, entry: Entry, run: StoredRun) -> dict[str, Any]:
    config = {key: value for key, value in run.config.items() if key != "seed"}
    config["run"] = {key: value for key, value in run.settings.items() if key != "out"}
    own = (
        "task_name",
        "method_name",
        "role",
        "status",
        "error",
        "budget",
        "task_version",
        "seed",
        "seconds",
        "compile_seconds",
    )
    row = {
        "task": task,
        "method": entry.label,
        **{name: getattr(run, name) for name in own},
        "hash": run.hash or None,
        "folder": _utf8(str(run.path)),
        "outer_steps": run.summary.get("outer_steps"),
        "oracle_calls": run.summary.get("oracle_calls"),
        "peak_memory_bytes": run.resources.get("peak_memory_bytes"),
        **{f"metric.{name}": value for name, value in run.metrics.items()},
        **{
            f"setting.{key}": value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in flatten(config).items()
        },
    }
    mixture = entry.mixture
    if mixture is not None and run in mixture.finals:
        row |= {
            _utf8(PREFIX + source): weight
            for source, weight in zip(mixture.sources, mixture.finals[run], strict=True)
        }
    return row


def _utf8(value: str) -> str:
    """Replace characters without an encoding, which paths and untrusted rows can contain."""
    return value.encode(errors="backslashreplace").decode()
