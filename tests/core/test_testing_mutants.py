"""Every check of the kit against a mutant made for it and against the sound component that the mutant was made of.

The pairs are read off the tables of the kit's own tests: a new check without a mutant fails here, and so does a mutant of a
check that is gone.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any

import pytest
import test_testing_every as of_every
import test_testing_parts as of_parts
import test_testing_solvers as of_solvers
import test_testing_wholes as of_wholes
import torch
from fakes import Site

from hgms_core.testing import Check, all_checks, checks_of, checks_of_every_kind, kind_of

EVERY = "every"
SOUND: dict[str, Any] = {
    kind_of(type(each)).name: each
    for each in (
        of_solvers.MinimalResidual(),
        of_parts.Lowest(),
        of_parts.Exactly(),
        of_parts.Step(),
        of_wholes.Runs(),
        of_wholes.Line(),
        of_wholes.Walk(),
    )
} | {EVERY: of_every.Exact()}


def mutants(site: Site | None = None) -> dict[tuple[str, str], list[Any]]:
    """(kind, check) → its mutants, from all tables."""
    found = defaultdict(list)
    for check, mutant, _ in of_every.MUTANTS:
        found[EVERY, check].append(mutant)
    for check, mutant, _ in of_solvers.MUTANTS:
        found["solver", check].append(mutant)
    for kind, check, mutant, _ in (*of_parts.MUTANTS, *of_wholes.MUTANTS):
        found[kind, check].append(mutant)
    # Modules that misbehave while they are imported, made where they are asked about: the first of them.
    line, _ = of_every.IMPORTS[0]
    if site is not None:
        site.module("mutant", of_every.MODULE.format(line=line))
        state = torch.get_rng_state()
        found[EVERY, "import"].append(importlib.import_module("mutant").Mine())
        torch.set_rng_state(state)
    else:
        found[EVERY, "import"] = []
    return dict(found)


ASKED: list[tuple[str, str]] = [
    *((EVERY, check.name) for check in checks_of_every_kind()),
    *((kind, check.name) for kind, checks in all_checks().items() for check in checks),
]


def test_every_check_of_every_kind_has_a_mutant() -> None:
    assert set(mutants()) == set(ASKED)
    assert set(SOUND) == {kind for kind, _ in ASKED}
    assert len(ASKED) == len(set(ASKED)) > 60


@pytest.mark.parametrize(("kind", "name"), ASKED, ids=["-".join(each) for each in ASKED])
def test_the_mutant_fails_what_its_original_passes(kind: str, name: str, site: Site) -> None:
    sound, mutant = SOUND[kind], mutants(site if name == "import" else None)[kind, name][0]

    def asked(component: Any) -> Check:
        return next(check for check in checks_of(component) if check.name == name)

    assert asked(sound).fault(sound) == ""
    assert asked(mutant).fault(mutant)
