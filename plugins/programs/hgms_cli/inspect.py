"""``hgms list`` and ``hgms plugins``: what there is. Parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence

import click

from hgms_cli.terminal import json_option, plugin_option, print_json, print_table
from hgms_core import PLUGIN_API, __version__, registry
from hgms_core import host as plugins


@click.command("list")
@click.argument("kind", required=False)
@plugin_option
@json_option
def list_components(kind: str | None, files: Sequence[str], as_json: bool) -> None:
    """What there is to choose from: all components, or those of one KIND.

    Kinds: generator, selector, solver, hypergradient, outer, task, method.
    """
    plugins.host(files)
    wanted = registry.kind_called(kind).name if kind else None
    found = registry.default()
    rows = [item.row() for item in found.components(wanted)] + [item.row() for item in found.absent(wanted)]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        if row["status"] != "available":
            row["summary"] = f"[not loaded: {row['install'] or 'see `hgms plugins -v`'}] {row['summary']}"
    print_table(("kind", "name", "plugin", "summary"), rows)


@click.command("plugins")
@click.option("-v", "--verbose", is_flag=True, help="Show errors with their tracebacks.")
@plugin_option
@json_option
def list_plugins(verbose: bool, files: Sequence[str], as_json: bool) -> None:
    """Every plugin found: where it is from, whether it loaded, what it does."""
    host = plugins.Host.load(files, tolerant=True)
    for entries in plugins.programs().values():
        for entry in entries:
            host.add_program(entry)
    registry.Registry(host)  # what is wrong with components shows only when they are collected
    rows = [info.row() for info in host.infos.values()]
    if as_json:
        print_json(
            [
                row | {"traceback": info.traceback} if verbose else row
                for row, info in zip(rows, host.infos.values(), strict=True)
            ]
        )
        return
    click.echo(f"hgms {__version__}, plugin API {PLUGIN_API}")
    for row in rows:
        row["hooks"] = ", ".join(hook.removeprefix("hgms_") for hook in row["hooks"])
        row["remarks"] = row["install"] or (row["error"] or "").partition("\n")[0] or "; ".join(row["notes"])
    print_table(("name", "distribution", "version", "status", "hooks", "remarks"), rows)
    if verbose:
        for info in host.infos.values():
            said = [*filter(None, [info.error]), *info.notes]
            if said or info.seconds >= 0.1:
                shown = "\n".join(said)
                click.echo(f"\n{info.name} ({info.owner}): {info.status}, imported in {info.seconds:.2f} s")
                click.echo(f"{shown}\n{info.traceback or ''}".strip())
