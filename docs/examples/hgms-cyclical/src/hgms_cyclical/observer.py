"""Which cycle won at each outer step, beside the run's own files: ``cycles.jsonl``.

Its first line says what the run is, every other one is an outer step::

    {"cycles": 4, "task": "sphere", "method": "hg-ms", "seed": 0}
    {"step": 1, "cycle": 3, "gap": 0.0121}

``cycle`` counts from 1 (candidate ``selected`` of the record, plus 1); ``gap`` is null where it is
not finite. An observer gets copies, outside the budget's clock, and changes nothing of the run.
Where it raises, the run goes on without it.
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
    # a line is out when it is written
    run.state["cyclical"] = path.open("a", encoding="utf-8", buffering=1)


@hookimpl
def hgms_step_finished(run: RunInfo, record: dict[str, Any]) -> None:
    stream: TextIO | None = run.state.get("cyclical")
    if stream is not None and record.get("selected") is not None:  # step 0 has chosen nothing yet
        row = {"step": record["step"], "cycle": record["selected"] + 1, "gap": record["gap"]}
        stream.write(json.dumps(row) + "\n")


@hookimpl
def hgms_run_finished(run: RunInfo) -> None:
    if "cyclical" in run.state:
        run.state.pop("cyclical").close()


# end: observers


def kept(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of ``path`` that a run resumed from ``step`` goes on from. The steps after it were
    lost with the kill and come again; a last line without an end was being written then."""
    if step == 0 or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[1:-1]
    return [row for line in lines if (row := json.loads(line))["step"] <= step]


def _announced(label: str | None) -> str | None:
    return None if label == "none" else label
