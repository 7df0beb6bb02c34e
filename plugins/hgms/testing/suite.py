"""The checks of a component: which ones apply, and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from hgms.facts import name_of
from hgms.plugins import KINDS, Kind, Registry
from hgms.testing import class_checks as every
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
from hgms.testing.instances import failures_of, kind_of
from hgms.testing.kit import Check
from hgms_core import ConfigError
from hgms_core.errors import unknown_name

OF_KIND: Mapping[str, Any] = {
    "generator": generators,
    "selector": selectors,
    "solver": solvers,
    "hypergradient": hypergradients,
    "outer": outer,
    "task": tasks,
    "method": methods,
}
"""The module per kind: its checks, and the usage example for the checks of every kind."""

Failures = Mapping[str, str] | Callable[[Any], Mapping[str, str]]


def checks_of(
    component: Any, kind: Kind | None = None, registry: Registry | None = None
) -> Iterator[Check]:
    """Yield the checks that a component must pass, in order.

    The kind defaults to the kind with the methods of the component. The parts of the component are
    looked up in ``registry`` (None: all installed components).

    Examples
    --------
    >>> from hgms.solvers import CG
    >>> [check.name for check in checks_of(CG())][:3]
    ['registration', 'capabilities', 'docstring']
    """
    kind = kind or kind_of(type(component))
    yield from every.checks(kind, OF_KIND[kind.name].exercise, registry)
    yield from checks_of_kind(kind.name)


def checks_of_kind(name: str) -> list[Check]:
    """Return the checks of one kind: the functions ``check_…`` of its module, in order."""
    items = vars(OF_KIND[name]).items()
    return [Check(name, question) for key, question in items if key.startswith("check_")]


def all_checks() -> dict[str, list[Check]]:
    """Return the checks per kind, without the common checks, for the reference page."""
    return {name: checks_of_kind(name) for name in OF_KIND}


def checks_of_every_kind() -> list[Check]:
    """Return the checks that are common to all kinds."""
    return list(every.checks(KINDS["solver"], solvers.exercise))


def check_component(component: Any) -> dict[str, str]:
    """Return the failed checks of a component, each with the actual result; empty if all pass.

    Examples
    --------
    >>> from hgms.solvers import CG
    >>> check_component(CG())
    {}
    """
    checks = list(checks_of(component))
    expected = failures_of(type(component), checks)
    results = [verdict(check, component, expected) for check in checks]
    return {result.check: result.fault for result in results if result.fault}


@frozen
class Result:
    """The result of one check; at most one of ``fault``, ``excuse`` and ``skipped`` is not empty.

    ``fault`` is the actual result of a check that failed; ``expected`` is then the requirement.
    ``excuse`` is the reason for an expected failure. ``skipped`` is the reason why the check did
    not run.
    """

    check: str
    fault: str = ""
    excuse: str = ""
    skipped: str = ""
    expected: str = ""


def verdict(check: Check, component: Any, expected: Mapping[str, str]) -> Result:
    """Run one check. A check that passes although a failure is expected is a fault."""
    fault, skipped = check.answer(component)
    reason = expected.get(check.name, "")
    if reason and not skipped:
        if fault:
            return Result(check.name, excuse=reason)
        fault = f"it passes after all; take it off testing_failures ({reason})"
    return Result(check.name, fault, skipped=skipped, expected=check.demands if fault else "")


def parametrize_with_checks(
    components: Sequence[Any], expected_failures: Failures | None = None
) -> Any:
    """A pytest decorator that runs a test function ``(component, check)`` for every check of every
    component.

    Parameters
    ----------
    components
        Instances, not classes. Choose settings that can solve problems with sizes and curvatures of
        order 1 (an iterative solver: enough steps).
    expected_failures
        The reason for each expected failure, by the name of the check; or a function that returns
        such a table for a component. Checks in the class's ``testing_failures`` need not be
        repeated.

    Raises
    ------
    ConfigError
        For an expected failure of a check that does not exist.
    """
    import pytest

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
    """Return the names, with their positions for names that occur twice."""
    for position, component in enumerate(components):
        if isinstance(component, type):
            raise ConfigError(
                "wrong-type",
                f"{component.__name__} is a class, but must be an instance",
                place=("components", position),
                hint=f"use {component.__name__}()",
            )
    names = [str(name_of(item)) for item in components]
    return [name if names.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(names)]
