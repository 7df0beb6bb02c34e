"""The conformance kit: is this component what its protocol says? One list of small named checks for
built-ins and plugins.

In a plugin's own tests::

    from hgms.testing import parametrize_with_checks


    @parametrize_with_checks(
        [MySolver(), MySolver(rtol=1e-3)], expected_failures={"warm-start": "it starts from zero"}
    )
    def test_conformance(component, check):
        check(component)

Each check is a test of its own, ``my-solver-zero-rhs``. An expected failure is strict: a check that
passes after all has to be taken off the list. ``hgms check MODULE:CLASS`` asks the same checks.
Everything is small, in float64 and with fixed seeds. The checks make their inputs on the CPU, and
within ``with inputs_on("cuda"):`` on a GPU. :func:`simulated_device` is a device for such tests on
a machine without one.

A class may say two things about its checks itself: a class method ``testing_instance()`` makes an
instance that can do what is asked of problems of size 1, and ``testing_failures:
ClassVar[Mapping[str, str]]`` holds the reason for each check that no instance is made to pass,
because its definition says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import click

from hgms.testing import equal_weights as equal
from hgms.testing import every_kind as every
from hgms.testing import (
    generators,
    hypergradients,
    imports,
    methods,
    outer,
    selectors,
    solvers,
    tasks,
)
from hgms.testing.instances import failures_of, instance_of, kind_of
from hgms.testing.kit import Check, CheckFailed, inputs_on
from hgms.testing.simulated import Counts, counted, no_waiting, simulated_device
from hgms_core import ConfigError, hookimpl
from hgms_core.errors import MissingExtra, unknown_name
from hgms_core.registry import KINDS, Kind, Registry

OF_KIND: Mapping[str, Any] = {
    "generator": generators,
    "selector": selectors,
    "solver": solvers,
    "hypergradient": hypergradients,
    "outer": outer,
    "task": tasks,
    "method": methods,
}
"""The module with the checks of a kind and the use of a component that the checks of every kind
look at.
"""

Failures = Mapping[str, str] | Callable[[Any], Mapping[str, str]]


def checks_of(
    component: Any, kind: Kind | None = None, registry: Registry | None = None
) -> Iterator[Check]:
    """The checks that a component of this kind (by its methods) has to pass, in order; its parts
    are looked up in ``registry`` (None: what is installed).

    >>> from hgms.solvers import CG
    >>> [check.name for check in checks_of(CG())][:3]
    ['registration', 'docstring', 'source']
    """
    kind = kind or kind_of(type(component))
    yield from every.checks(kind, OF_KIND[kind.name].exercise, registry)
    yield from checks_of_kind(kind.name)


def checks_of_kind(name: str) -> list[Check]:
    """The checks that are those of one kind: the functions ``check_…`` of its modules, in order."""
    modules = [methods, equal] if name == "method" else [OF_KIND[name]]
    named = [vars(module).items() for module in modules]
    return [
        Check(name, question)
        for items in named
        for key, question in items
        if key.startswith("check_")
    ]


def all_checks() -> dict[str, list[Check]]:
    """The checks of each kind beside those of every kind: what the reference page lists."""
    return {name: checks_of_kind(name) for name in OF_KIND}


def checks_of_every_kind() -> list[Check]:
    """The checks that are the same for every kind."""
    return list(every.checks(KINDS["solver"], solvers.exercise))


def check_component(component: Any) -> dict[str, str]:
    """What is wrong with a component: the failed checks, each with what came instead; empty where
    all is well.

    >>> from hgms.solvers import CG
    >>> check_component(CG())
    {}
    """
    checks = list(checks_of(component))
    expected = failures_of(type(component), checks)
    verdicts = {check.name: verdict(check, component, expected)[0] for check in checks}
    return {name: fault for name, fault in verdicts.items() if fault}


def verdict(check: Check, component: Any, expected: Mapping[str, str]) -> tuple[str, str, str]:
    """(fault, excuse, skipped) of one check: what came instead where it should have passed, the
    reason why it does not, or why it does not apply. A check that passes against expectation is a
    fault.
    """
    fault, skipped = check.answer(component)
    reason = expected.get(check.name, "")
    if skipped or not reason:
        return fault, "", skipped
    if fault:
        return "", reason, ""
    return f"it passes after all; take it off testing_failures ({reason})", "", ""


def parametrize_with_checks(
    components: Sequence[Any], expected_failures: Failures | None = None
) -> Any:
    """A pytest decorator that runs a test function ``(component, check)`` for every check of every
    component.

    Arguments:
        components: instances, not classes. Choose settings that can do what a check asks of
            problems with sizes and curvatures of order 1 (an iterative solver: enough steps).
        expected_failures: the reason for every check that is not to be passed, by its name; or a
            function from a component to such a table, where components differ. Those of a class's
            own ``testing_failures`` need not be repeated.

    Errors: MissingExtra without pytest; ConfigError for an expected failure of a check that does
        not exist.
    """
    try:
        import pytest
    except ModuleNotFoundError:
        raise MissingExtra(
            "missing-package",
            "parametrize_with_checks requires pytest, which is not installed",
            install="pip install pytest",
        ) from None
    rows = []
    for label, component in zip(_labels(components), components, strict=True):
        expected = (
            expected_failures(component)
            if callable(expected_failures)
            else (expected_failures or {})
        )
        checks = list(checks_of(component))
        for name in expected:
            if name not in {check.name for check in checks} and (
                callable(expected_failures) or len(components) == 1
            ):
                raise unknown_name(
                    "check", name, [check.name for check in checks], ("expected_failures", name)
                )
        expected = {**failures_of(type(component), checks), **expected}
        imports.announce(type(component).__module__)
        for check in checks:
            marks = (
                [pytest.mark.xfail(strict=True, reason=expected[check.name])]
                if check.name in expected
                else []
            )
            rows.append(pytest.param(component, check, id=f"{label}-{check.name}", marks=marks))
    return pytest.mark.parametrize(("component", "check"), rows)


def _labels(components: Sequence[Any]) -> list[str]:
    """Names; where two have one, what tells them apart is added."""
    names = [str(getattr(item, "name", type(item).__name__)) for item in components]
    labels = []
    for position, (name, component) in enumerate(zip(names, components, strict=True)):
        if isinstance(component, type):
            raise ConfigError(
                "wrong-type",
                f"{component.__name__} is a class, but must be an instance",
                place=("components", position),
                hint=f"use {component.__name__}()",
            )
        if names.count(name) == 1 or not attrs.has(type(component)):
            labels.append(name)
            continue
        own = [
            field
            for field in attrs.fields(type(component))
            if getattr(component, field.name) != field.default
        ]
        settings = (f"{field.name}={getattr(component, field.name)!r}" for field in own)
        labels.append(f"{name}({','.join(settings)})")
    return [label if labels.count(label) == 1 else f"{label}#{i}" for i, label in enumerate(labels)]


__all__ = [
    "Check",
    "CheckFailed",
    "Counts",
    "all_checks",
    "check_component",
    "checks_of",
    "checks_of_every_kind",
    "checks_of_kind",
    "counted",
    "failures_of",
    "inputs_on",
    "instance_of",
    "kind_of",
    "no_waiting",
    "parametrize_with_checks",
    "simulated_device",
    "verdict",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.testing.command import check, check_gradient

    cli.add_command(check)
    cli.add_command(check_gradient)
