"""Every check of the kit against a mutant made for it and against the sound component that the
mutant was made of.

The pairs are read off the tables of the kit's own tests: a new check without a mutant fails here,
and so does a mutant of a check that is gone.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import test_testing_every as of_every
import test_testing_parts as of_parts
import test_testing_solvers as of_solvers
import test_testing_wholes as of_wholes

from hgms.testing import Check, CheckFailed, all_checks, checks_of_every_kind, kind_of

EVERY = "every"
SOUND: dict[str, Any] = {
    kind_of(type(component)).name: component
    for component in (
        of_solvers.MinimalResidual(),
        of_parts.Lowest(),
        of_parts.Exactly(),
        of_parts.Step(),
        of_wholes.Runs(),
        of_wholes.Line(),
        of_wholes.Walk(),
    )
} | {EVERY: of_every.Exact()}

MUTANTS: list[tuple[str, str, Any, str]] = [
    *((EVERY, *row) for row in of_every.MUTANTS),
    *(("solver", *row) for row in of_solvers.MUTANTS),
    *of_parts.MUTANTS,
    *of_wholes.MUTANTS,
]
"""(kind, check, the mutant, what comes of it), from all tables."""

CHECKS: list[tuple[str, Check]] = [
    *((EVERY, check) for check in checks_of_every_kind()),
    *((kind, check) for kind, checks in all_checks().items() for check in checks),
]


@functools.cache
def fault_of_the_sound_one(kind: str, name: str) -> str:
    return of_every.named(name, SOUND[kind]).fault(SOUND[kind])


def test_every_check_has_a_mutant_and_says_what_it_demands() -> None:
    checks = [(kind, check.name) for kind, check in CHECKS]
    # modules that misbehave while they are imported have a table and a test of their own
    assert {(kind, name) for kind, name, *_ in MUTANTS} | {(EVERY, "import")} == set(checks)
    assert set(SOUND) == {kind for kind, _ in checks}
    assert len(checks) == len(set(checks)) > 60
    assert all(check.demands.endswith(".") for _, check in CHECKS)


@pytest.mark.parametrize(
    ("kind", "name", "mutant", "came"),
    MUTANTS,
    ids=[f"{kind}-{name}-{i}" for i, (kind, name, *_) in enumerate(MUTANTS)],
)
def test_each_check_catches_its_mutant_and_passes_its_original(
    kind: str, name: str, mutant: Any, came: str
) -> None:
    assert fault_of_the_sound_one(kind, name) == ""
    with pytest.raises(CheckFailed) as caught:
        of_every.named(name, mutant)(mutant)
    first, *_ = str(caught.value).splitlines()
    assert first.endswith(f" {mutant.name!r} fails the check {name}")
    assert kind == EVERY or first.startswith(f"{kind} ")
    assert came in str(caught.value)
