"""`hgms check` of a file that is wrong in one place, of a composition, and of what is registered.

``sound_solver.py`` beside this file is right in every way; a row spoils it in one place. That each
check of the kit catches its mutant, of every kind, is asked in tests/hgms/testing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spoiling import SOUND, hgms, spoilt

from hgms.testing import Check, imports
from hgms_core.discovery import import_plugin
from hgms_core.sandbox import watched

pytestmark = pytest.mark.extended

CLASS = "\n@attrs.frozen(kw_only=True)\nclass Mine:"
STEPS = "        steps = 0\n"
CHECKED: list[tuple[str, list[tuple[str, str]]]] = [
    # the check that fails, if any, and what is spoilt
    ("", []),
    ("residual", [("            x,\n", "            -x,\n")]),
    ("residual", [(STEPS, "        raise SystemExit(5)\n" + STEPS)]),
    ("inputs", [(STEPS, "        b.mul_(2).div_(2.5)\n" + STEPS)]),
    ("inputs", [(STEPS, "        torch.set_grad_enabled(False)\n" + STEPS)]),
    (
        "global-rng",
        [("system.start(x0)", "system.start(1e-9 * torch.randn_like(b) if x0 is None else x0)")],
    ),
    (
        "repeatable",
        [
            (CLASS, "\nLAST = {}\n\n" + CLASS),
            ("system.start(x0)", "system.start(LAST.get((b.shape, b.dtype)))"),
            (
                "        return system.solution(",
                "        LAST[b.shape, b.dtype] = x\n        return system.solution(",
            ),
        ],
    ),
    ("import", [("\nimport attrs\n", "\nimport attrs\n\nprint('hello')\n")]),
    (
        "registration",
        [
            ("@attrs.frozen(kw_only=True)", "@attrs.frozen(init=False)"),
            (
                "    def solve(",
                "    def __init__(self, ridge=1e-2, rtol=1e-3, /, max_steps=50):\n"
                "        self.__attrs_init__(ridge, rtol, max_steps)\n\n    def solve(",
            ),
        ],
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the files. What importing them does is looked at in one other interpreter, because one
    takes seconds to start.
    """
    folder = tmp_path_factory.mktemp("files")
    kept = torch.get_rng_state()
    for number, (_, edits) in enumerate(CHECKED):
        (folder / f"mine_{number}.py").write_text(spoilt(SOUND, *edits), encoding="utf-8")
        with watched():
            imports.announce(import_plugin(str(folder / f"mine_{number}.py")).__name__)
    torch.set_rng_state(kept)
    return folder


@pytest.mark.parametrize(("number", "check"), [(n, row[0]) for n, row in enumerate(CHECKED)])
def test_the_kit_names_the_check_that_fails(
    fresh: Path, folder: Path, number: int, check: str
) -> None:
    result = hgms("check", f"{folder / f'mine_{number}.py'}:Mine")
    assert result.exit_code == bool(check), result.output
    assert result.output.count(f"\n  FAIL {check}: " if check else " passed") == 1


COMPOSED = """
from hgms_core import Composition

MINE = Composition(name="mine", summary="One branch.", source="", parts={
    "generator": {"name": "branches", "count": 1}, "selector": {"name": "first"},
    "hypergradient": {"name": "implicit", "solver": {"name": "cg"}},
    "outer": {"name": "adam", "lr": 0.1},
})
"""


@pytest.mark.parametrize(
    ("old", "new", "code", "shown"),
    [
        ('"selector"', '"selectors"', 1, "FAIL registration: "),
        ('"cg"', '"cgg"', 1, "(the composition 'mine': hypergradient.solver.name)"),
        ("One branch.", "", 1, "FAIL docstring: "),
        ("MINE =", "MIEN =", 2, "did you mean 'mine'?"),
        ('source=""', 'source="this test"', 0, "14 passed"),
    ],
)
def test_a_composition_is_checked(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, code: int, shown: str
) -> None:
    # the built-in ones are asked elsewhere
    monkeypatch.setattr(Check, "answer", lambda check, case: ("", ""))
    (fresh / "mine.py").write_text(COMPOSED.replace(old, new, 1))
    result = hgms("check", f"{fresh / 'mine.py'}:MINE")
    assert (result.exit_code, shown in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    ("spec", "code", "shown"),
    [
        ("cg", 0, "cg: a linear solver"),
        ("method:soba", 0, "method:soba: a method"),
        ("soba", 2, "generator:soba or method:soba"),
        ("cgg", 2, "did you mean 'cg'?"),
        ("mine", 0, "mine: a linear solver"),
        (":Mine", 2, "MODULE:CLASS"),
    ],
)
def test_what_is_registered_is_checked_by_its_name(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, spec: str, code: int, shown: str
) -> None:
    monkeypatch.setattr(Check, "answer", lambda check, case: ("", ""))
    (fresh / "mine.py").write_text(SOUND)
    result = hgms("check", spec, "--plugin", fresh / "mine.py")
    assert (result.exit_code, shown in result.output) == (code, True), result.output
