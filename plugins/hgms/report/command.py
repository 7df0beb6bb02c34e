"""``hgms report`` and ``hgms plot``: parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from hgms.cli import json_option, print_json
from hgms.config.control_characters import printable

if TYPE_CHECKING:
    from hgms.report.study import Entry, Study

_FOLDER = click.Path(path_type=Path)


_runs_argument = click.argument("runs", nargs=-1, required=True, type=_FOLDER)
_metric_option = click.option(
    "--metric",
    "metrics",
    multiple=True,
    help="Main metric instead of the task's first; more get curves too.",
)


@click.command(short_help="Write tables and curves of finished runs on one page.")
@_runs_argument
@_metric_option
@click.option(
    "--reference",
    metavar="METHOD",
    help="The reference of differences (default: uniform, if it ran).",
)
@click.option("--title", help="Heading of the report.")
@click.option(
    "--out",
    type=_FOLDER,
    default=Path("report.html"),
    show_default=True,
    help="The suffix determines the format: .html .tex .parquet",
)
@json_option
def report(
    runs: Sequence[Path],
    metrics: Sequence[str],
    reference: str | None,
    title: str | None,
    out: Path,
    as_json: bool,
) -> None:
    """Write tables, curves and diagnostics of the runs below RUNS.

    The formats are a page that needs no network, LaTeX and Parquet. Runs that are not
    readable are listed, skipped and counted.
    """
    from hgms.report.compute import build
    from hgms.report.formats import SUFFIXES, suffix, write
    from hgms.report.tables import summary

    suffix(out, SUFFIXES, "a report")  # checked before the work starts
    study = build(runs, metrics=metrics, reference=reference, title=title)
    write(study, out)
    if as_json:
        print_json(_as_dict(study, out))
        return
    _print_skipped(study)
    click.echo(summary(study))
    for section in study.sections:
        click.echo(
            printable(
                f"  {section.title}: {section.verdict}" if section.verdict else f"  {section.title}"
            )
        )
    click.echo(printable(f"  {out}"))


@click.command(short_help="Draw curves of finished runs for a paper.")
@_runs_argument
@_metric_option
@click.option(
    "--mixture",
    is_flag=True,
    help="Draw the learned weights of data sources over time, one panel per method.",
)
@click.option(
    "--out",
    type=_FOLDER,
    default=Path("curves.svg"),
    show_default=True,
    help="The suffix determines the format: .svg .pdf .png",
)
@json_option
def plot(
    runs: Sequence[Path], metrics: Sequence[str], mixture: bool, out: Path, as_json: bool
) -> None:
    """Draw the main metric against seconds and oracle calls, for a paper.

    The plot shows the mean over seeds with its 95 % band.
    """
    from hgms.report import paper
    from hgms.report.compute import build
    from hgms.report.formats import suffix

    suffix(out, paper.SUFFIXES, "a picture")
    study = build(runs, metrics=metrics)
    (paper.draw_mixtures if mixture else paper.draw_curves)(study, out)
    if as_json:
        print_json(_as_dict(study, out))
        return
    _print_skipped(study)
    click.echo(printable(f"  {out}"))


def _print_skipped(study: Study) -> None:
    for folder in study.skipped:
        click.echo(printable(f"skipped: {folder.path}: {folder.reason}"), err=True)


def _as_dict(study: Study, written: Path) -> dict[str, Any]:
    sections = [
        {
            **section.compared.as_dict(),
            **{key: getattr(section, key) for key in ("title", "version", "budget")},
            "task": section.runs[0].task_name,
            "verdict": section.verdict,
            "few_seeds": section.compared.few_seeds,
            "methods": [_method(entry) for entry in section.entries],
        }
        for section in study.sections
    ]
    return {
        "written": [str(written)],
        "runs": len(study.runs),
        "failed": [{"folder": str(run.path), "reason": run.error} for run in study.failed_runs],
        "skipped": [
            {"folder": str(folder.path), "reason": folder.reason} for folder in study.skipped
        ],
        "tasks": sections,
    }


def _method(entry: Entry) -> dict[str, Any]:
    table = {**entry.row.as_dict(), "seeds": [run.seed for run in entry.runs]}
    if entry.mixture is not None:
        table["mixture"] = {
            source: attrs.asdict(weight) for source, weight in entry.mixture.weights.items()
        }
    return table
