"""The report as one HTML file that opens without a network.

The pictures are SVG images inside the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hgms.config.tables import difference
from hgms.diagnosis import Diagnosis
from hgms.report import tables
from hgms.report.figures import source_colours
from hgms.report.paper import as_source, curve_panels, mixture_panels
from hgms.report.pictures import forest_panels
from hgms.report.study import Section, Study
from hgms.results import DARK, DASHES, LIGHT, Look, StoredRun, looks
from hgms.runs import RunFolder
from hgms.store import read_file
from hgms_core import __version__
from hgms_core.errors import CheckpointError, MissingExtra
from hgms_core.torch_errors import first_line

_DASH_ARRAYS = dict(zip(DASHES, ("none", "7 4", "2 3", "7 3 2 3", "11 4"), strict=True))


def html(study: Study) -> str:
    """Build the page, which requests nothing from the network."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "missing-package",
            f"an HTML report requires {error.name}",
            hint="use --out report.tex for LaTeX, which requires no package",
            install="pip install 'hgms[report]'",
        ) from None
    style = looks(study.labels)
    colours = source_colours(study)
    sections = [
        _section(section, number, _pictures(section, style, colours))
        for number, section in enumerate(study.sections)
    ]
    environment = Environment(
        loader=PackageLoader("hgms.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html").render(
        study=study,
        version=__version__,
        tables=tables,
        sections=sections,
        environments=_environments(study),
        style=style,
        light=LIGHT,
        dark=DARK,
        dashes=_DASH_ARRAYS,
    )


def _pictures(
    section: Section,
    style: Mapping[str, Look],
    colours: Mapping[tuple[str, ...], Mapping[str, int]],
) -> list[dict[str, str]]:
    """Return the section's pictures that have content: title, text and source."""
    shown = []
    drawn = [metric for metric in section.drawn if section.curves("seconds", metric)]
    if drawn:
        panels = curve_panels([(section, metric) for metric in drawn], style)
        many = any(len(entry.runs) > 1 for entry in section.entries)
        text = (
            "mean over seeds, band: 95 % t-interval"
            if many
            else "one seed each, so there is no band"
        )
        title = "Curves against seconds and oracle calls"
        shown.append({"title": title, "text": text, "source": as_source(panels)})
    if section.moving:
        panels = mixture_panels([section], colours)
        text = "weights of the sources, stacked: mean over seeds"
        shown.append({"title": "Mixture over time", "text": text, "source": as_source(panels)})
    return shown


def _section(section: Section, number: int, shown: list[dict[str, str]]) -> dict[str, Any]:
    """Return the template's values for a section."""
    results, *rest = tables.tables(section)
    return {
        "id": f"task-{number}",
        "title": section.title,
        "about": tables.about(section),
        "verdict": section.verdict,
        "winner": section.winner,
        "forest": "" if section.forest is None else as_source(forest_panels([section.forest])),
        "results": results,
        "tables": {table.ident: table for table in rest},
        "figures": shown,
        "trust": _trust(section),
        "configurations": [
            _configuration(entry.label, entry.runs + entry.failed) for entry in section.entries
        ],
        "note": _environment_note(section),
    }


def _trust(section: Section) -> list[tuple[str, str]]:
    """Return (method, sentence) pairs about the hypergradients of runs with ``run.diagnose``."""
    sentences: list[tuple[str, str]] = []
    for entry in section.entries:
        rows: list[dict[str, Any]] = []
        for run in entry.runs:
            try:
                rows += RunFolder(run.path).diagnoses()
            except (CheckpointError, OSError) as error:
                sentences.append((entry.label, f"seed {run.seed}: {first_line(error)}"))
        diagnosis = Diagnosis(rows)
        known = [f"not measured: {phrase}" for phrase in diagnosis.missing_measures]
        known = [*diagnosis.warnings, *known]
        if rows and not known:
            known = ["no warning"]
        sentences += [(entry.label, sentence) for sentence in known]
    return sentences


def _configuration(label: str, runs: Sequence[StoredRun]) -> dict[str, str]:
    return {
        "label": label,
        "path": str(runs[0].path),
        "text": read_file(runs[0].path / "config.toml").decode(errors="replace"),
        "seeds": ", ".join(str(run.seed) for run in runs),
    }


def _by_environment(runs: Sequence[StoredRun]) -> list[tuple[dict[str, Any], list[StoredRun]]]:
    """Return each distinct environment with its runs, largest group first."""
    groups: dict[str, tuple[dict[str, Any], list[StoredRun]]] = {}
    for run in runs:
        # the task and the code describe the run, not the machine; measurements always differ
        other = ("task", "code", "execution", "before")
        table = {key: run.environment[key] for key in run.environment if key not in other}
        table |= run.execution
        before = run.environment.get("before")
        if isinstance(before, list) and before:
            table["earlier environments"] = len(before)
        key = json.dumps(table, sort_keys=True, default=str)
        groups.setdefault(key, (table, []))[1].append(run)
    return sorted(groups.values(), key=lambda group: -len(group[1]))


def _environments(study: Study) -> list[dict[str, Any]]:
    return [
        {"runs": len(runs), "text": json.dumps(table, indent=2, default=str, ensure_ascii=False)}
        for table, runs in _by_environment(study.runs)
    ]


def _environment_note(section: Section) -> str:
    groups = _by_environment(section.runs)
    if len(groups) < 2:
        return ""
    differing = difference([table for table, _ in groups])
    named = ", ".join(differing[:6]) + (" and more" if len(differing) > 6 else "")
    return (
        f"These runs were made in {len(groups)} different environments (they differ in {named}): "
        "seconds may not be comparable."
    )
