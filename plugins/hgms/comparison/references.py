"""References: the baselines of a comparison. By default a comparison adds trivial baselines to its
methods; on request it adds all references in both forms.

A reference is a registered method with a role, "floor" or "ceiling". It has two forms. One uses its
best stopping time (``keep = "best"``, on held-out rows) and has the name of the reference. The
other uses the end of the same budget (``keep = "last"``) and is called ``NAME-last``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from hgms.comparison.grid import Entry
from hgms.config.convert import role_of, structure
from hgms.facts import inner_method, settings_of
from hgms.plugins import Registry, inside
from hgms_core import HgmsError, Method, Pipeline

LEFT_OUT = {
    "theta0": "it is uniform by another name",
    "fixed": "nobody but a person knows its mixture",
}
"""References that are added only if the user names them, and the reasons."""

ON_VALIDATION = frozenset({"validation-rows"})
BASELINES: Mapping[str, frozenset[str]] = {
    "uniform": frozenset(),
    "validation-only": ON_VALIDATION,
    "uniform-tilted": ON_VALIDATION,
}
"""The trivial baselines of every comparison, with the traits that each requires of a task. Without
validation rows a tilted lower level minimises f itself, so its x is no lower minimiser.
"""


def with_baselines(methods: Sequence[Entry], registry: Registry) -> list[Entry]:
    """Return ``methods`` and each baseline that they do not include under any label."""
    known = {entry.name for entry in methods} | {entry.label for entry in methods}
    known |= {"uniform"} if "theta0" in known else set()
    return [
        *methods,
        *(
            Entry(kind="method", label=name, table={"name": name}, added=True)
            for name in BASELINES
            if name not in known and registry.find("method", name) is not None
        ),
    ]


def with_references(
    methods: Sequence[Entry], registry: Registry, traits: Iterable[frozenset[str]]
) -> list[Entry]:
    """Return ``methods``, the other form of each reference in it, and all other references in both
    forms.

    If the user has configured a reference, its other form has the same settings. There may be two
    other forms, since the default form depends on the ``traits`` of the task. On a task, a form is
    excluded if it does not fit, or if the user's reference already has this form there.
    """
    kinds = list(dict.fromkeys(traits)) or [frozenset()]
    entries = list(methods)
    named = {entry.name for entry in methods} | {entry.label for entry in methods}
    for component in registry.components("method"):
        name = component.name
        if (
            role_of(registry, name)
            and name not in named | LEFT_OUT.keys()
            and not (name == "uniform" and "theta0" in named)
        ):
            entries += _forms(
                Entry(kind="method", label=name, table={"name": name}, stated=True, added=True),
                registry,
                kinds[0],
            )
    known = {entry.label for entry in entries}
    for entry in methods:
        if (
            role_of(registry, entry.name)
            and entry.label == entry.name
            and entry.component is None
            and not entry.added
        ):
            forms = {
                form.label: form for kind in kinds for form in _forms(entry, registry, kind)[1:]
            }
            entries += [form for label, form in forms.items() if label not in known]
    return entries


def _forms(entry: Entry, registry: Registry, traits: frozenset[str]) -> list[Entry]:
    """Return the forms of a reference.

    For an added reference: ``keep = "best"``, then ``keep = "last"``. For a reference of the user:
    its form on a task with ``traits``, then the other form.
    """
    try:
        method = structure(entry.at(""), Method, registry, traits)
    except HgmsError:  # the grid reports it when it builds the entry itself
        return [entry]
    path, kept = _keep(method)
    if not path:
        return [entry]
    first = "best" if entry.added else kept
    other = "last" if first == "best" else "best"
    forms = [(entry.label, first)] if entry.added else []
    made = [
        attrs.evolve(
            entry, label=label, table=entry.at("", {".".join(path): keep}), stated=True, added=True
        )
        for label, keep in [*forms, (f"{entry.label}-{other}", other)]
    ]
    return made if entry.added else [entry, *made]


def _keep(method: Any) -> tuple[list[str], str]:
    """Return the path to ``keep`` in a method's table, through wrapped methods, and its value. The
    path is empty if no method has this field.
    """
    path: list[str] = []
    while "keep" not in settings_of(method):
        if isinstance(method, Pipeline):
            return [*path, "keep"], "last"
        inner = inner_method(method)
        if inner is None:
            return [], ""
        path += [] if inside(type(method)) == "method" else ["method"]
        method = inner
    return [*path, "keep"], method.keep


def lines_of(left_out: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Format the excluded references; the argument maps each to its reasons and their tasks.

    >>> lines_of({"a": {"it needs rows": ["t", "u"]}, "b": {"it needs rows": ["t", "u"]}})
    ['references left out on t, u: a, b (it needs rows)']
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for label, tasks in left_out.items():
        for why, where in tasks.items():
            alike.setdefault((", ".join(where), why), []).append(label)
    return [
        f"references left out on {where}: {', '.join(labels)} ({why})"
        for (where, why), labels in alike.items()
    ]
