"""Write the results of a surface: surface.json, the tables, the picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hgms.store import finite, replace_file
from hgms_core.errors import MissingExtra
from hgms_mix.surface.learn import Findings
from hgms_mix.surface.picture import draw
from hgms_mix.surface.tables import write_runs


def write(
    findings: Findings,
    folder: Path,
    *,
    say: Callable[[Findings, dict[str, Any]], None] | None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the results into ``folder``, and return the report.

    The files are ``surface.json``, ``ratios.csv``, ``metrics.csv`` and ``surface.png``. ``say``
    receives the findings and the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = (folder / "ratios.csv", folder / "metrics.csv")
    write_runs(findings.every, *tables)
    written = [str(path) for path in tables]
    try:
        written.insert(0, str(draw(findings, folder / "surface.png")))
    except MissingExtra as missing:
        written.insert(0, f"no picture: {'; '.join(missing.lines())}")
    report = {
        **findings.as_dict(),
        **(more or {}),
        "files": [*written, str(folder / "surface.json")],
    }
    replace_file(
        folder / "surface.json", json.dumps(finite(report), indent=2, ensure_ascii=False).encode()
    )
    if say is not None:
        say(findings, report)
    return report
