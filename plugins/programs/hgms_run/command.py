"""``hgms run``, ``hgms describe`` and ``hgms compat``: what runs, and what there is to run. Parse, call, print."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import tomlkit

from hgms_cli import component_row, json_option, kind_called, plugin_option, print_json, print_table, track_option, trust_option
from hgms_core import Budget, Composition, ConfigError, HgmsError, Method, Pipeline, UnknownComponent, unknown
from hgms_core.registry import Component, Registry, inside
from hgms_run.as_table import AT_REST, plain
from hgms_run.config import RunConfig
from hgms_run.convert import structured
from hgms_run.invalid import PROTOCOLS, Invalid, init_fields, spell, type_hints
from hgms_run.launch import run_config
from hgms_run.progress import Progress
from hgms_run.tables import lay, lay_options, tables_of
from hgms_run.traits import missing_traits, wanted_traits

FITS = {True: "ok", False: "no", None: "?"}


@click.command()
@click.argument("words", metavar="[KIND] NAME", nargs=-1, required=True)
@plugin_option
@json_option
def describe(words: Sequence[str], registry: Registry, as_json: bool) -> None:
    """Everything about one component: its fields with types and defaults, and its documentation.

    KIND may be left out where only one component has the NAME.
    """
    if len(words) > 2:
        raise click.UsageError(f"one KIND and one NAME, not {len(words)} words")
    *kind, name = words
    component = registry.get(kind_called(kind[0]).name, name) if kind else _component(registry, name)
    description = _description(component, registry)
    if as_json:
        print_json(description)
        return
    owner = f"{component.plugin.owner}, plugin {component.plugin.name!r}, {component.where}"
    click.echo(f"{component.kind.label} {component.name}  ({owner})\n")
    click.echo(description["doc"] + "\n")
    if "parts" in description:
        click.echo(tomlkit.dumps({"method": {"name": component.name, **description["parts"]}}))
        for trait, parts in description["on"].items():
            click.echo(f"On a task with the trait {trait!r} its defaults are\n")
            click.echo(tomlkit.dumps({"method": {"name": component.name, **parts}}))
    elif description["fields"]:
        for row in description["fields"]:
            row["default"] = "(required)" if row["required"] else json.dumps(row["default"])
        print_table(("name", "type", "default"), description["fields"])
    else:
        click.echo("It has no fields.")


def _component(registry: Registry, name: str) -> Component:
    """The one component of that name, whatever its kind."""
    known = [item for item in registry.components() if item.kind.label]
    hits = [item for item in known if item.name == name]
    if not hits:
        raise UnknownComponent(unknown("component", name, {item.name for item in known}))
    if len(hits) > 1:
        kinds = " or ".join(f"`hgms describe {item.kind.name} {name}`" for item in hits)
        raise UnknownComponent(f"{len(hits)} components are called {name!r}\n  write {kinds}")
    return hits[0]


def _description(component: Component, registry: Registry) -> dict[str, Any]:
    row = component_row(component) | {"class": component.where}
    target = component.target
    if isinstance(target, Composition):
        on = {trait: plain(target.with_overrides({}, [trait])) for trait in target.on}
        doc = f"{target.summary}\n\nSource: {target.source}"
        return row | {"doc": doc, "parts": plain(target.parts), "on": on}
    fields = _fields(target)
    if target is Pipeline:  # in whose table those of wrappers may stand
        wrapped = [field for wrapper in registry.wrappers for field in _fields(wrapper) if field["name"] != inside(wrapper)]
        fields += [field | {"required": False, "default": AT_REST.get(field["name"])} for field in wrapped]
    return row | {"doc": inspect.cleandoc(target.__doc__ or ""), "fields": fields}


def _fields(target: type) -> list[dict[str, Any]]:
    hints = type_hints(target)
    fields = []
    for key, attribute in init_fields(target).items():
        required = attribute.default is attrs.NOTHING
        default = None
        if not required:
            factory = attribute.default if isinstance(attribute.default, attrs.Factory) else None  # type: ignore[arg-type]
            value = attribute.default if factory is None else (None if factory.takes_self else factory.factory())
            try:
                default = plain(value, hints[attribute.name])
            except HgmsError:
                default = f"{value!r}, from Python only"
        fields.append({"name": key, "type": spell(hints[attribute.name]), "required": required, "default": default})
    return fields


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Lay a value over the file's. Repeatable.")
@click.option("--seed", type=int, help="Another seed than the file's.")
@click.option("--out", help="Where run folders go.")
@click.option("--resume", is_flag=True, help="Go on from the run's checkpoint.")
@track_option
@trust_option
@plugin_option
@json_option
def run(
    config: Path, sets: Sequence[str], seed: int | None, out: str | None, resume: bool, track: Sequence[str],
    registry: Registry, as_json: bool,
) -> None:  # fmt: skip
    """Run what a CONFIG file describes, into a run folder of its own."""
    loaded = load(config, [*sets, *track], seed=seed, out=out, registry=registry)
    with Progress(enabled=not as_json) as view:
        result = run_config(loaded, resume=resume, view=view)
    summary = {**result.summary, "seconds": result.seconds, "folder": str(result.info.folder)}
    if as_json:
        print_json(summary)
        return
    click.echo(f"{summary['task']}, {summary['method']}, seed {summary['seed']}: {summary['status']}")
    for name, value in (summary.get("metrics") or {}).items():
        click.echo(f"  {name}: " + ("not finite" if value is None else f"{value:.6g}"))
    for remark in summary.get("remarks") or []:
        click.echo(f"  note: {remark}")
    calls, steps = summary.get("oracle_calls"), Budget(outer_steps=max(1, summary["outer_steps"]))
    click.echo(f"  {steps}, {result.seconds:.1f} s" + (f", {calls} oracle calls" if calls else ""))
    for remark in result.execution.remarks() if result.execution is not None else []:
        click.echo(f"  {remark}")
    click.echo(f"  {summary['folder']}")


def load(
    path: str | Path,
    sets: Sequence[str] = (),
    *,
    seed: int | None = None,
    out: str | None = None,
    registry: Registry | None = None,
) -> RunConfig:
    """The configuration in a TOML file, with ``--set key.of.it=value``, ``--seed`` and ``--out`` laid over it."""
    table = tables_of(Path(path), "configuration")
    places = lay_options(table, sets, seed, out=out)
    return RunConfig.from_dict(table, source=Path(path).name, registry=registry, sets=places)


@click.command()
@plugin_option
@json_option
def compat(registry: Registry, as_json: bool) -> None:
    """Which methods fit which tasks, known before anything runs.

    ok: the task has all that the method and its parts need. no: it lacks what is listed below the table. ?: the task makes no
    promise, or the method cannot be built without a configuration.
    """
    tasks = {item.name: item.target for item in registry.components("task")}
    rows = [row for item in registry.components("method") for row in _cells(registry, item.name, tasks)]
    if as_json:
        print_json(rows)
        return
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        table.setdefault(row["method"], {"method": row["method"]})[row["task"]] = FITS[row["fits"]]
    print_table(("method", *tasks), list(table.values()))
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["why"]:
            reasons.setdefault(f"{row['method']}: {row['why']}", []).append(row["task"])
    for why, names in reasons.items():
        click.echo(f"  {why} ({'every task' if len(names) == len(tasks) else ', '.join(names)})")


def _cells(registry: Registry, name: str, tasks: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One method against every task: whether it ``fits`` (null: not known) and ``why`` not."""
    for task, target in tasks.items():
        try:
            method = built(name, Method, traits=frozenset(getattr(target, "traits", ())), registry=registry)
        except HgmsError:
            method = None
        lacking = missing_traits(method, target) if method is not None else None
        if lacking is not None:
            why = wanted_traits(lacking) if lacking else ""
        else:
            nothing = method is None
            why = "it cannot be built from its defaults alone" if nothing else "the task says nothing about its problems"
        yield {"method": name, "task": task, "fits": None if lacking is None else not lacking, "why": why}


def built(
    name: str, protocol: Any, fields: Sequence[str] = (), traits: frozenset[str] = frozenset(), registry: Registry | None = None
) -> Any:
    """The task or method called ``name``, with ``task.FIELD=VALUE`` or ``method.FIELD=VALUE`` laid over its defaults (a
    method's on a task with ``traits``)."""

    kind = PROTOCOLS[protocol].name
    table: dict[str, Any] = {kind: {"name": name}}
    places = [lay(table, assignment) for assignment in fields]
    try:
        return structured(table[kind], protocol, registry or Registry.load(), traits)
    except Invalid as invalid:
        raise ConfigError(Invalid(*invalid.below(kind)).render("the command line", tuple(places))) from None
