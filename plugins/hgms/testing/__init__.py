"""The conformance kit: small named checks that a component follows its protocol.

Built-in components and plugins use the same checks. In the tests of a plugin::

    from hgms.testing import parametrize_with_checks


    @parametrize_with_checks(
        [MySolver(), MySolver(rtol=1e-3)], expected_failures={"warm-start": "it starts from zero"}
    )
    def test_conformance(component, check):
        check(component)

Each check is a separate test, such as ``my-solver-zero-rhs``. An expected failure is strict: if the
check passes, remove it from the list. ``hgms check MODULE:CLASS`` runs the same checks. All
problems are small, in float64 and with fixed seeds. The checks create their inputs on the CPU, or
on a GPU within ``with inputs_on("cuda"):``.

A class may define two attributes for its checks:

- The class method ``testing_instance()`` returns an instance that can solve problems of size 1.
- ``testing_failures: ClassVar[Mapping[str, str]]`` maps a check to the reason why it fails. Use it
  for checks that contradict the definition of the component.
"""

from __future__ import annotations

import click

from hgms.testing.instances import failures_of, instance_of, kind_of
from hgms.testing.kit import Check, CheckFailed, inputs_on
from hgms.testing.suite import (
    all_checks,
    check_component,
    checks_of,
    checks_of_every_kind,
    checks_of_kind,
    parametrize_with_checks,
    verdict,
)
from hgms_core import hookimpl

__all__ = [
    "Check",
    "CheckFailed",
    "all_checks",
    "check_component",
    "checks_of",
    "checks_of_every_kind",
    "checks_of_kind",
    "failures_of",
    "inputs_on",
    "instance_of",
    "kind_of",
    "parametrize_with_checks",
    "verdict",
]


@hookimpl
def hgms_register_commands(cli: click.Group) -> None:
    from hgms.testing.command import check, check_gradient

    cli.add_command(check)
    cli.add_command(check_gradient)
