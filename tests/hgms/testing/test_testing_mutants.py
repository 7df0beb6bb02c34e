"""Every check of the kit against mutants made for it and against the sound component that they
were made of: a new check without a mutant fails here, and so does a mutant of a check that is gone.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from support import kit_mutants, kit_mutants_parts, kit_mutants_wholes
from support.kit_parts import Exact, Exactly, Keyed, Lowest, MinimalResidual, Step
from support.kit_wholes import Line, NoRule, Runs, Walk

from hgms.testing import (
    Check,
    CheckFailed,
    all_checks,
    check_component,
    checks_of,
    checks_of_every_kind,
    kind_of,
)

EVERY = "every"
SOUND: dict[str, Any] = {
    kind_of(type(component)).name: component
    for component in (MinimalResidual(), Lowest(), Exactly(), Step(), Runs(), Line(), Walk())
} | {EVERY: Exact()}
MUTANTS: list[tuple[str, str, Any]] = [
    *((EVERY, *row) for row in kit_mutants.UNSOUND),
    *((EVERY, "inputs", mutant) for mutant in kit_mutants_wholes.CHANGES_INPUTS),
    *(("solver", *row) for row in kit_mutants.SOLVERS),
    *kit_mutants_parts.PARTS,
    *(("generator", *row) for row in kit_mutants_wholes.GENERATORS),
    *(("task", *row) for row in kit_mutants_wholes.TASKS),
    *(("method", *row) for row in kit_mutants_wholes.METHODS),
]
"""(kind, check, the mutant)."""
CHECKS: list[tuple[str, Check]] = [
    *((EVERY, check) for check in checks_of_every_kind()),
    *((kind, check) for kind, checks in all_checks().items() for check in checks),
]
RAISE = {
    (EVERY, "pickle"),
    (EVERY, "types"),
    ("solver", "indefinite"),
    ("selector", "all-nan"),
    ("outer", "state"),
    ("generator", "state"),
    ("hypergradient", "state"),
    ("task", "smoke"),
    ("task", "stacked"),
    ("method", "resume"),
    ("method", "budget"),
    ("method", "failure"),
}
"""Checks that a mutant may fail by an error of its own."""
LONG = {("method", "optimum"), ("generator", "wells")}
"""Checks of many outer steps."""


def named(name: str, component: Any) -> Check:
    return next(check for check in checks_of(component) if check.name == name)


@functools.cache
def fault_of_the_sound_one(kind: str, name: str) -> str:
    return named(name, SOUND[kind]).fault(SOUND[kind])


def test_every_check_has_a_mutant_and_says_what_it_demands() -> None:
    checks = [(kind, check.name) for kind, check in CHECKS]
    # modules that misbehave while they are imported: test_testing_kit.py
    assert {(kind, name) for kind, name, _ in MUTANTS} | {(EVERY, "import")} == set(checks)
    assert set(SOUND) == {kind for kind, _ in checks}
    assert len(checks) == len(set(checks)) > 60
    assert all(check.demands.endswith(".") for _, check in CHECKS)


@pytest.mark.parametrize(
    ("kind", "name", "mutant"),
    [
        pytest.param(
            *row,
            id=f"{row[0]}-{row[1]}-{i}",
            marks=[pytest.mark.extended] if row[:2] in LONG else [],
        )
        for i, row in enumerate(MUTANTS)
    ],
)
def test_each_check_catches_its_mutant_and_passes_its_original(
    kind: str, name: str, mutant: Any
) -> None:
    assert fault_of_the_sound_one(kind, name) == ""
    with pytest.raises(CheckFailed) as caught:
        named(name, mutant)(mutant)
    first, _, got, *_, more = str(caught.value).splitlines()
    assert first.endswith(f" {mutant.name!r} fails the check {name}")
    assert more.startswith("  read more: docs/reference/kit.md#")
    assert "it raised" not in got or (kind, name) in RAISE, got


@pytest.mark.parametrize(
    "sound",
    [
        MinimalResidual(ridge=0.3, clip=5.0, rtol=1e-4),
        NoRule(),
        *(
            pytest.param(sound, marks=pytest.mark.extended)
            for sound in (Keyed(), Runs(carry_rule="per-branch"), Runs(carry_rule="restart"))
        ),
    ],
    ids=str,
)
def test_a_sound_component_has_no_fault(sound: Any) -> None:
    assert check_component(sound) == {}
