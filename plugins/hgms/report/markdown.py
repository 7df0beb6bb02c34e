"""The report as GitHub-flavoured Markdown."""

from __future__ import annotations

import re

from hgms.config.control_characters import printable
from hgms.report.study import Study
from hgms.report.tables import (
    Cell,
    Table,
    about,
    failures,
    ledgers,
    left_out,
    overview,
    ranks,
    summary,
    sweeps,
    tables,
)
from hgms.report.trust import Trust
from hgms.report.trust import table as trust_table


def markdown(study: Study) -> str:
    """Format the complete report as GitHub-flavoured Markdown."""
    parts = [f"# {_md(study.title)}", summary(study)]
    if len(study.sections) > 1:
        parts.append(_md_table(overview(study), 2))
    for section in study.sections:
        parts.append(f"## {_md(section.title)}")
        parts.append(
            _md(about(section)) + (f"\n\n{_md(section.verdict)}" if section.verdict else "")
        )
        parts += [_md_table(table, 3) for table in tables(section)]
        if (measured := Trust.of(section)) is not None:
            lines = [
                f"{label}: {sentence}" if label else sentence
                for label, sentence in measured.sentences
            ]
            parts += [
                _md_table(trust_table(measured), 3),
                "\n".join(f"- {_md(line)}" for line in lines),
            ]
    parts += [
        _md_table(table, 2)
        for table in (ranks(study), *ledgers(study), failures(study), left_out(study))
    ]
    if study.sweeps:
        parts += ["## Pilot sweeps", *(_md_table(table, 3) for table in sweeps(study))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _md(value: str) -> str:
    """Escape text for Markdown, on one line.

    A label can therefore not change the rest of the page.
    """
    text = re.sub(
        r"([\\`*_\[\]<>|#&~$])", r"\\\1", printable(value.replace("\r", "")).strip()
    ).replace("\n", "<br>")
    return re.sub(r"^([-+=]|\d+[.)])(?=\s)", lambda match: f"{match[0][:-1]}\\{match[0][-1]}", text)


def _md_table(table: Table, level: int) -> str:
    if not table.rows:
        return ""

    def spell_cell(cell: Cell) -> str:
        shown = f"**{_md(cell.text)}**" if cell.strong else _md(cell.text)
        return shown + (f" ({_md(cell.note)})" if cell.note else "")

    lines = [f"{'#' * level} {_md(table.title)}", ""]
    lines.append("| " + " | ".join(map(_md, table.columns)) + " |")
    lines.append(
        "|" + "|".join(" --- " if not cell.number else " ---: " for cell in table.rows[0]) + "|"
    )
    lines += ["| " + " | ".join(map(spell_cell, row)) + " |" for row in table.rows]
    if table.caption:
        lines += ["", _md(table.caption)]
    return "\n".join(lines)
