"""Compatibility of methods and tasks, known before a run starts.

A component may declare the properties of a problem that it requires (``needs``). A task may declare
the properties of its problems (``traits``). Both are sets of names from :data:`TRAITS`, or of names
that users define.

A method requires the properties that any of its parts requires. A task without ``traits`` is
accepted without a check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgms.arguments import require
from hgms.facts import name_of, needs_of, traits_of, walk_parts
from hgms_core.errors import closest

TRAITS: Mapping[str, str] = {
    "smooth-lower": "a lower loss that is twice differentiable in x (almost everywhere is enough)",
    "direct-upper": "an upper loss that depends on θ directly (∂_θ f ≠ 0)",
    "few-upper": (
        "few upper variables (about 1000 at most), so that they can be searched without derivatives"
    ),
    "per-example-losses": "a loss for each single example",
    "representations": (
        "a vector for each row that describes it (`Sources.examples` declares "
        "`GivesRepresentations`)"
    ),
    "row-weights": "one weight for each lower row (`Problem.rows`)",
    "sources": "named data sources with one weight each",
    "stop-rows": "validation data for the role `stop`",
    "validation-rows": "validation rows, on which f alone has a minimiser in x",
    "reference:clean": "a named upper variable `clean` that knows the truth",
    "closed-form": "a known solution, value and hypergradient",
}
"""The traits that built-in components use, each with its text for messages."""


def needs(component: Any) -> dict[str, str]:
    """Return every trait that ``component`` or one of its parts requires.

    The values are the names of the parts that require them.

    Examples
    --------
    >>> import attrs
    >>> class Solver:
    ...     name, needs = "my-solver", frozenset({"smooth-lower"})
    >>> @attrs.frozen
    ... class Estimator:
    ...     solver: object
    ...     name = "my-estimator"
    >>> needs(Estimator(Solver()))
    {'smooth-lower': 'my-solver'}
    """
    traits: dict[str, str] = {}
    for _, part in walk_parts(component):
        for trait in sorted(needs_of(part)):
            traits.setdefault(trait, name_of(part))
    return traits


def missing_traits(method: Any, task: Any) -> dict[str, str] | None:
    """Return the traits that ``method`` requires and ``task`` lacks.

    The values are the names of the parts that require them ("" for the method itself). The result
    is ``None`` if the task declares no traits.
    """
    traits = traits_of(task)
    if traits is None:
        return None
    own = needs_of(method)
    return {
        trait: "" if trait in own else part
        for trait, part in needs(method).items()
        if trait not in traits
    }


def suggest_trait(trait: str) -> str | None:
    """Return the known trait that an unknown name most likely means.

    The result is ``None`` for a known trait, and for a name without a similar known trait. Users
    may define such names.

    Examples
    --------
    >>> suggest_trait("source"), suggest_trait("sources"), suggest_trait("my-trait")
    ('sources', None, None)
    """
    return (
        None
        if trait in TRAITS
        else closest(trait, [known for known in TRAITS if abs(len(known) - len(trait)) <= 2])
    )


def misfit(method_name: str, task_name: str, lacking: Mapping[str, str]) -> str:
    """Return a sentence with the method and the traits that the task lacks."""
    wants = [
        TRAITS.get(trait, trait) + (f" (its part {part!r})" if part else "")
        for trait, part in lacking.items()
    ]
    return (
        f"method {method_name!r} cannot run on task {task_name!r}: it requires "
        f"{' and '.join(wants)}"
    )


def ensure_fits(method: Any, task: Any, method_name: str | None = None) -> None:
    """Raise :class:`ConfigError` if ``method`` requires traits that ``task`` lacks."""
    lacking = missing_traits(method, task) or {}
    require(
        not lacking,
        "not-supported",
        misfit(method_name or name_of(method), name_of(task), lacking),
        place=("method",),
        hint="run `hgms describe NAME` for the traits of a task or the needs of a method",
    )
