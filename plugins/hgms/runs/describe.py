"""Description of one component for ``hgms describe``.

The description is printed as a JSON table or as text for a terminal.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import click
import tomlkit
from attrs import validators

from hgms.cli import component_row, print_table, strip_markup, terminal_width, wrap_paragraph
from hgms.config.as_table import AT_REST, plain
from hgms.config.convert import structure
from hgms.config.invalid import init_fields, spell, type_hints
from hgms.config.tables import overridden
from hgms.facts import metrics_of, needs_of, traits_of
from hgms.plugins import Component, Registry, inside
from hgms.runs.traits import TRAITS, needs
from hgms_core import Composition, HgmsError, Method, Pipeline
from hgms_core.capabilities import capabilities_of
from hgms_core.validators import at_least, each


def description(component: Component, registry: Registry) -> dict[str, Any]:
    """Return the table that ``hgms describe --json`` prints."""
    row = component_row(component) | {"class": component.where}
    target = component.target
    row |= {"needs": _needs(component, registry)} if component.kind.name == "method" else {}
    if isinstance(target, Composition):
        return row | {
            "doc": f"{target.summary}\n\nSource: {target.source}",
            "parts": plain(target.parts),
            "on": {trait: plain(overridden(target, {}, [trait])) for trait in target.on},
        }
    row |= {"capabilities": sorted(known.__name__ for known in capabilities_of(target))}
    fields = _fields(target)
    if target is Pipeline:  # its table may contain the fields of wrappers
        wrapped = [
            field
            for wrapper in registry.wrappers
            for field in _fields(wrapper)
            if field["name"] != inside(wrapper)
        ]
        fields += [
            field | {"required": False, "default": AT_REST.get(field["name"])} for field in wrapped
        ]
    row |= {"doc": inspect.cleandoc(target.__doc__ or ""), "fields": fields}
    if component.kind.name == "task":
        traits = traits_of(target)
        row["metrics"] = dict(metrics_of(target))
        row["traits"] = None if traits is None else sorted(traits)
    return row


def show(component: Component, known: Mapping[str, Any]) -> None:
    """Print the description; lists are wrapped to the width of the terminal."""
    columns = terminal_width()
    owner = f"{component.plugin.owner}, plugin {component.plugin.name!r}, {component.where}"
    click.echo(wrap_paragraph(f"{component.kind.label} {component.name}  ({owner})", columns))
    click.echo("\n" + strip_markup(known["doc"]) + "\n")
    for trait, part in (known.get("needs") or {}).items():
        whose = "" if part == component.name else f" (its part {part!r})"
        click.echo(
            wrap_paragraph(f"Needs {trait}: {TRAITS.get(trait, 'a task trait')}{whose}", columns)
        )
    if known.get("needs"):
        click.echo()
    if known.get("capabilities"):
        click.echo(
            wrap_paragraph(f"Capabilities: {', '.join(known['capabilities'])}", columns) + "\n"
        )
    if "metrics" in known:
        for line in _task_lines(known):
            click.echo(wrap_paragraph(line, columns))
        click.echo()
    if "parts" in known:
        click.echo(tomlkit.dumps({"method": {"name": component.name, **known["parts"]}}))
        for trait, parts in known["on"].items():
            click.echo(f"On a task with the trait {trait!r} its defaults are\n")
            click.echo(tomlkit.dumps({"method": {"name": component.name, **parts}}))
    elif known["fields"]:
        print_table(
            ("field", "default", "takes"), [_cells(field) for field in known["fields"]], columns
        )
    else:
        click.echo("It has no fields.")


def _needs(component: Component, registry: Registry) -> dict[str, str]:
    """Return the traits that a method requires with its defaults.

    The values are the names of the parts that require them.
    """
    try:
        return needs(structure({"name": component.name}, Method, registry))
    except HgmsError:  # without defaults: use the declaration of the class
        return dict.fromkeys(sorted(needs_of(component.target)), component.name)


# --- fields
# --------------------------------------------------------------------------------------------------


def _fields(target: type) -> list[dict[str, Any]]:
    hints = type_hints(target)
    fields = []
    for key, attribute in init_fields(target).items():
        required = attribute.default is attrs.NOTHING
        value: Any = None if required else attribute.default
        if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
            value = None if value.takes_self else value.factory()
        try:
            default = None if required else plain(value, hints[attribute.name])
        except HgmsError:
            default = f"{value!r}, from Python only"
        fields.append(
            {
                "name": key,
                "type": spell(hints[attribute.name]),
                "required": required,
                "default": default,
                "range": range_of(attribute.validator),
            }
        )
    return fields


def _cells(field: Mapping[str, Any]) -> dict[str, str]:
    kind, none, _ = field["type"].partition(' or "none"')
    limits = field["range"]
    between = " " if limits.startswith(("<", ">", "≥", "≤", "in ")) else ": " if limits else ""
    default = json.dumps(field["default"], ensure_ascii=False)
    return {
        "field": field["name"],
        "default": "(required)" if field["required"] else default,
        "takes": f"{kind}{between}{limits}{none}",
    }


BOUNDS: Any = type(at_least(0)), type(validators.ge(0))
CHOICES: Any = type(validators.in_(()))
MEMBERS: Any = type(each(at_least(0))), type(validators.deep_iterable(validators.ge(0)))


def range_of(validator: Any) -> str:
    """Return a text for the values that a validator allows.

    The text is empty if the validator does not restrict the type further.

    Examples
    --------
    >>> from attrs import validators
    >>> from hgms_core.validators import all_of, at_least, each, greater_than, less_than
    >>> range_of(at_least(1)), range_of(all_of(at_least(0), less_than(1)))
    ('≥ 1', 'in [0, 1)')
    >>> range_of(each(greater_than(0))), range_of(validators.in_(["a", "b"]))
    ('each > 0', "one of 'a', 'b'")
    """
    bounds: dict[str, Any] = {}
    words: list[str] = []
    for part in _parts(validator):
        if isinstance(part, BOUNDS):
            bounds[part.compare_op] = part.bound
        elif isinstance(part, CHOICES):
            words.append("one of " + ", ".join(map(repr, part.options)))
        elif isinstance(part, MEMBERS):
            inner = range_of(part.member_validator)
            words += [f"each {inner}"] * bool(inner)
        elif inspect.isfunction(part) and part.__doc__:
            sentence = re.split(r"[.:](?:\s|$)", strip_markup(" ".join(part.__doc__.split())))[0]
            sentence = sentence.removeprefix("Require ")
            words += [sentence[0].lower() + sentence[1:]] * ("validator" not in sentence)
    low = [f"{'[' if op == '>=' else '('}{bounds[op]}" for op in (">=", ">") if op in bounds]
    high = [f"{bounds[op]}{']' if op == '<=' else ')'}" for op in ("<=", "<") if op in bounds]
    if low and high:
        return ", ".join([f"in {low[0]}, {high[0]}", *words])
    signs = {">=": "≥", "<=": "≤"}
    return ", ".join([*(f"{signs.get(op, op)} {bound}" for op, bound in bounds.items()), *words])


def _parts(validator: Any) -> Iterator[Any]:
    """Yield the single validators that a combined validator contains.

    These are the items of a list, and the validator inside an optional validator.
    """
    names = ("_validators", "validators", "validator")
    inner = next((part for name in names if (part := getattr(validator, name, None))), None)
    if isinstance(validator, list | tuple):
        inner = validator
    if inner is None:
        yield validator
        return
    for part in inner if isinstance(inner, list | tuple) else [inner]:
        yield from _parts(part)


# --- tasks
# --------------------------------------------------------------------------------------------------


def _task_lines(known: Mapping[str, Any]) -> Iterator[str]:
    for up, better in ((False, "lower"), (True, "higher")):
        if names := [name for name, higher in known["metrics"].items() if higher is up]:
            yield f"Metrics, {better} is better: {', '.join(names)}"
    if known["traits"] is None:
        yield "Traits: not declared, so comparisons add no baselines to it"
        return
    yield "Traits: " + ("none" if not known["traits"] else "")
    for trait in known["traits"]:
        yield f"  {trait}: {TRAITS.get(trait, 'a task trait')}"
