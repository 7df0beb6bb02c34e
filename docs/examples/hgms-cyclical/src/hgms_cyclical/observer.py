"""Record the selected cycle of each outer step in the run folder: ``cycles.jsonl``.

The first line describes the run, every other line is an outer step::

    {"cycles": 4, "task": "sphere", "method": "hg-ms", "seed": 0}
    {"step": 1, "cycle": 3, "gap": 0.0121}

``cycle`` counts from 1 (candidate ``selected`` of the record, plus 1); ``gap`` is null if it is not
finite. An observer receives copies, outside the budget's clock, and does not change the run. If it
raises an error, the run continues without it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from hgms_core import RunInfo, hookimpl
from hgms_cyclical.langevin import CyclicalLangevin

FILE = "cycles.jsonl"


# start: observers
@hookimpl
def hgms_run_started(run: RunInfo) -> None:
    generator = run.config.get("method", {}).get("generator", {})
    if run.folder is None or generator.get("name") != CyclicalLangevin.name:
        return
    path = run.folder / FILE
    rows = kept(path, run.resumed_from)
    settings = run.config.get("run", {})
    head = {
        "cycles": generator["count"],
        "task": _announced(settings.get("task_label")) or run.task,
        "method": _announced(settings.get("label")) or run.method,
        "seed": run.seed,
    }
    path.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)), encoding="utf-8")
    # each line is flushed
    run.state["cyclical"] = path.open("a", encoding="utf-8", buffering=1)


@hookimpl
def hgms_step_finished(run: RunInfo, record: dict[str, Any]) -> None:
    stream: TextIO | None = run.state.get("cyclical")
    if stream is not None and record.get("selected") is not None:  # step 0 has no selection
        row = {"step": record["step"], "cycle": record["selected"] + 1, "gap": record["gap"]}
        stream.write(json.dumps(row) + "\n")


@hookimpl
def hgms_run_finished(run: RunInfo) -> None:
    if "cyclical" in run.state:
        run.state.pop("cyclical").close()


# end: observers


def kept(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of ``path`` before the step from which a run resumes.

    The kill lost later steps, and the run repeats them. A last line without an end is incomplete.
    """
    if step == 0 or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[1:-1]
    return [row for line in lines if (row := json.loads(line))["step"] <= step]


def _announced(label: str | None) -> str | None:
    return None if label == "none" else label
