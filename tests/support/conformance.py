"""The kit's checks of numbers, for components that the kit's own tests use in a later tier only."""

from __future__ import annotations

from typing import Any

from hgms.testing import checks_of, failures_of, verdict

LONG = {"wells"}
"""Of many outer steps."""


def faults(component: Any) -> dict[str, str]:
    """What is wrong with what a component computes, by the name of the check."""
    checks = list(checks_of(component))
    first = [check.name for check in checks].index("inputs")  # before: how a class is written
    expected = failures_of(type(component), checks)
    found = {
        check.name: verdict(check, component, expected).fault
        for check in checks[first:]
        if check.name not in LONG
    }
    return {name: fault for name, fault in found.items() if fault}
