"""Shared parts of all commands: common options, JSON, and tables."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import click

from hgms.config.control_characters import printable
from hgms.plugins import Host, Registry
from hgms.store import finite

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
"""The option ``--json`` of a command, as its argument ``as_json``."""


def host_of(ctx: click.Context) -> Host:
    """The host of this invocation, which is click's ``ctx.obj``."""
    root = ctx.find_root()
    root.obj = ctx.obj = root.obj or Host()
    return ctx.obj


def _registry(ctx: click.Context, _option: click.Parameter, files: Sequence[str]) -> Registry:
    return Registry(host_of(ctx).complete(files))


def _plugin(name: str, callback: Any = None) -> Any:
    text = "Load a plugin from a single .py file. Repeatable."
    return click.option(
        "--plugin", name, multiple=True, metavar="FILE", callback=callback, help=text
    )


files_option = _plugin("files")
"""The option ``--plugin`` of a command, as its argument ``files``."""

set_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the file. Repeatable.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), help="Replace the seed of the file."
)
device_option = click.option(
    "--device", metavar="NAME", help="cpu, cuda or cuda:N. The same as --set run.device=NAME."
)

plugin_option = _plugin("registry", _registry)
"""The option ``--plugin`` of a command, as its argument ``registry``: the components of
installed plugins and of the files.
"""


def _track(_ctx: click.Context, _option: click.Parameter, value: str | None) -> list[str]:
    names = [name.strip() for name in (value or "").split(",") if name.strip()]
    return [f"run.track={json.dumps(names)}"] if names else []


def _trust(_ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if value:
        os.environ["HGMS_TRUST_REMOTE_CODE"] = (
            "1"  # tasks read it, in this process and in its child processes
        )


trust_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="Allow Python code of a model, if the file requests it. Read this code first.",
)
"""Option ``--trust-remote-code`` of commands that execute runs; a file cannot enable code
execution.
"""

track_option = click.option(
    "--track",
    metavar="NAMES",
    envvar="HGMS_TRACK",
    callback=_track,
    help="Also follow the run in tensorboard, wandb or trackio (comma-separated).",
)
"""Option ``--track`` of commands that execute runs, as the argument ``track``: settings to merge
over the file, as with --set.
"""


def words(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> list[str]:
    """Split comma-separated values of an option that may be repeated: a callback."""
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def print_json(value: object) -> None:
    """Strict JSON; an infinite or undefined number is null."""
    plain = getattr(sys.stdout, "encoding", None) in ("utf-8", "UTF-8")
    click.echo(
        json.dumps(finite(value), indent=2, ensure_ascii=not plain, allow_nan=False, default=str)
    )


def print_table(
    columns: Iterable[str],
    rows: Sequence[Mapping[str, Any]],
    width: int | None = None,
    groups: Container[int] = (),
) -> None:
    """Print a table of these columns on stdout.

    The width is ``width`` columns if given, else the terminal's width. Output to a pipe has one
    line per row. A line is drawn before each row in ``groups``.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    folds = sys.stdout.isatty() or width is not None
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=not folds)
    for number, row in enumerate(rows):
        if number in groups:
            table.add_section()
        table.add_row(
            *[Text(printable(row[column] if row[column] is not None else "")) for column in columns]
        )
    # Output to a pipe has one line per row, so that it can be searched.
    Console(file=sys.stdout, width=width if folds else 10_000).print(table)


def terminal_width() -> int:
    """Return the width for output: the terminal's columns, at most 100; 80 without a terminal."""
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, 100))


def wrap_paragraph(text: str, columns: int) -> str:
    """Wrap a paragraph at its spaces, and indent all lines except the first."""
    return textwrap.fill(
        text, columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
