"""``hgms list`` and ``hgms plugins``: list components and plugins. Parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import click

from hgms.cli.docstrings import strip_markup
from hgms.cli.terminal import files_option, json_option, plugin_option, print_json, print_table
from hgms.config.tables import group_values
from hgms.plugins import KINDS, Component, Host, Kind, PluginInfo, Registry
from hgms_core import PLUGIN_API, __version__
from hgms_core.errors import unknown_name


def kind_called(word: str, place: tuple[str, ...] = ("KIND",)) -> Kind:
    """Return a kind by its name, singular or plural."""
    name = word.casefold().removesuffix("s")
    if name in KINDS:
        return KINDS[name]
    raise unknown_name("kind", word, KINDS, place, label="kind of component")


def component_row(component: Component) -> dict[str, Any]:
    """Return a component's row in the table."""
    return {
        "kind": component.kind.name,
        "name": component.name,
        "maturity": component.maturity,
        **_owner(component.plugin),
        "summary": component.summary,
        "status": "available",
        "install": None,
    }


def component_rows(registry: Registry, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the available components, then the plugins that failed to load.

    The components of such plugins are unknown.
    """
    rows = [component_row(component) for component in registry.components(kind)]
    for info in registry.host.failures():
        if info.status != "incomplete" and not info.program:
            state = {"summary": info.error, "status": info.status, "install": info.install}
            rows.append(
                {"kind": "plugin", "name": info.name, "maturity": None, **_owner(info), **state}
            )
    return rows


def _owner(plugin: PluginInfo) -> dict[str, Any]:
    return {"plugin": plugin.name, "distribution": plugin.distribution, "version": plugin.version}


def plugin_row(info: PluginInfo) -> dict[str, Any]:
    """Return a plugin's row in the table."""
    return {
        **attrs.asdict(
            info, filter=lambda field, _: field.name not in ("traceback", "program", "load")
        ),
        "hooks": list(info.hooks),
        "notes": list(info.notes),
        "seconds": round(info.seconds, 3),
    }


@click.command("list", short_help="List the components by kind.")
@click.argument("kind", required=False)
@plugin_option
@json_option
def list_components(kind: str | None, registry: Registry, as_json: bool) -> None:
    """List the available components, or the components of one KIND.

    Kinds: generator, selector, solver, hypergradient, outer, task, method.
    """
    rows = component_rows(registry, kind_called(kind).name if kind else None)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["summary"] = strip_markup(row["summary"] or "")
        if row["status"] != "available":
            row["summary"] = (
                f"[not loaded: {row['install'] or 'see `hgms plugins -v`'}] {row['summary']}"
            )
    print_table(("kind", "name", "maturity", "summary"), rows)


@click.command("plugins", short_help="List the plugins and their status.")
@click.option("-v", "--verbose", is_flag=True, help="Show errors with their tracebacks.")
@files_option
@json_option
def list_plugins(verbose: bool, files: Sequence[str], as_json: bool) -> None:
    """List the plugins with their origin, status and hooks."""
    host = Host.load(files, tolerant=True)
    commands = group_values(
        (host.add_program(entry).name, f"`hgms {entry.name}`")
        for entries in host.programs.values()
        for entry in entries
    )
    Registry(host)  # errors of components appear only when the registry collects them
    infos = host.infos.values()
    rows = [plugin_row(info) for info in infos]
    if as_json:
        print_json(
            [
                {**row, "traceback": info.traceback} if verbose else row
                for row, info in zip(rows, infos, strict=True)
            ]
        )
        return
    click.echo(f"hgms {__version__}, plugin API {PLUGIN_API}")
    for row in rows:
        hooks = [hook.removeprefix("hgms_") for hook in row["hooks"]]
        row["hooks"] = ", ".join(commands.get(row["name"], hooks))
        row["remarks"] = (
            row["install"] or (row["error"] or "").partition("\n")[0] or "; ".join(row["notes"])
        )
    print_table(("name", "distribution", "version", "status", "hooks", "remarks"), rows)
    if verbose:
        for info in infos:
            remarks = "\n".join([*filter(None, [info.error]), *info.notes])
            if remarks or info.seconds >= 0.1:
                click.echo(
                    f"\n{info.name} ({info.owner}): {info.status}, imported in {info.seconds:.2f} s"
                )
                click.echo(f"{remarks}\n{info.traceback or ''}".strip())
