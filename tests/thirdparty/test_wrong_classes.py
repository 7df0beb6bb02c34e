"""One wrong component a row, in a file: `hgms check` fails in the check that it is wrong in.

The files ``sound_*.py`` beside this one are right in every way (the first test); a row spoils one
of them in one place. That each check of the kit catches its mutant is asked in tests/hgms/testing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spoiling import SOUND, hgms, spoilt

from hgms.testing import Check, imports
from hgms_core.discovery import import_plugin
from hgms_core.registry import KINDS
from hgms_core.sandbox import watched

pytestmark = pytest.mark.extended

IMPORTS = "\nimport attrs\n"
CLASS = "\n@attrs.frozen(kw_only=True)\nclass Mine:"
CHECKED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "solver with the wrong sign",
        "solver",
        "residual",
        [("            x,\n", "            -x,\n")],
    ),
    (
        "hypergradient of the wrong direction",
        "hypergradient",
        "closed-form-bowl",
        [
            (
                "return estimate, state",
                (
                    "value = {name: -leaf for name, leaf in estimate.value.items()}\n"
                    "        return attrs.evolve(estimate, value=value), state"
                ),
            )
        ],
    ),
    (
        "hypergradient without its implicit part",
        "hypergradient",
        "closed-form-ridge",
        [("return torch.linalg.pinv(h, rtol=1e-6) @ b", "return 0 * b")],
    ),
    (
        "solver that remembers its last answer",
        "solver",
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
    (
        "hypergradient that remembers",
        "hypergradient",
        "repeatable",
        [
            (CLASS, "\nCALLS = [0]\n\n" + CLASS),
            ("        below = ", "        CALLS[0] += 1\n        below = "),
            ("self.ridge * eye", "CALLS[0] * 1e-6 * eye"),
        ],
    ),
    (
        "method that forgets its state",
        "method",
        "resume",
        [
            (CLASS, "\nMEMORY = {}\n\n" + CLASS),
            (
                '        return {"theta": dict(',
                '        MEMORY.update(m)\n        return {"theta": dict(',
            ),
            ('state["m"].items()}', "MEMORY.items()}\n        MEMORY.update(m)"),
        ],
    ),
    (
        "global generator of torch",
        "solver",
        "global-rng",
        [("system.start(x0)", "system.start(1e-9 * torch.randn_like(b) if x0 is None else x0)")],
    ),
    (
        "right-hand side changed in place",
        "solver",
        "inputs",
        [("        steps = 0\n", "        b.mul_(2).div_(2.5)\n        steps = 0\n")],
    ),
    (
        "selector that takes what is not a number",
        "selector",
        "nan",
        [("index=ranked.argmin()", "index=scores.argmin()")],
    ),
    (
        "generator with the wrong axis",
        "generator",
        "candidates",
        [
            ("count: int = 3", "count: int = 2"),
            (
                "x = stack(ends)",
                "x = {name: leaf.movedim(0, -1) for name, leaf in stack(ends).items()}",
            ),
        ],
    ),
    (
        "generator that costs nothing",
        "generator",
        "oracle-counts",
        [("lower_gradients=calls, rows=calls * problem.lower_data.count(None)", "")],
    ),
    (
        "method without a projection",
        "method",
        "projection",
        [
            (
                (
                    "theta = problem.project({name: leaf - self.lr * m[name] for name, leaf in "
                    "theta.items()})"
                ),
                "theta = {name: leaf - self.lr * m[name] for name, leaf in theta.items()}",
            )
        ],
    ),
    (
        "outer optimiser that leaves the simplex",
        "outer",
        "feasible",
        [("return self.projection.apply(moved), ", "return moved, ")],
    ),
    (
        "task of the global seed",
        "task",
        "seed",
        [("generator=draw, dtype=torch.float64)\n        y", "dtype=torch.float64)\n        y")],
    ),
    (
        "task that validates on its training rows",
        "task",
        "splits",
        [("key.fold(role)", 'key.fold("train" if role == "select" else role)')],
    ),
    ("method uphill", "method", "optimum", [("- self.lr * m[name]", "+ self.lr * m[name]")]),
    ("prints on import", "solver", "import", [(IMPORTS, "\nimport attrs\n\nprint('hello')\n")]),
    (
        "changes the default precision on import",
        "solver",
        "import",
        [
            (
                IMPORTS + "import torch\n",
                IMPORTS + "import torch\n\ntorch.set_default_dtype(torch.float64)\n",
            )
        ],
    ),
    (
        "solver that exits",
        "solver",
        "residual",
        [("        steps = 0\n", "        raise SystemExit(5)\n        steps = 0\n")],
    ),
    (
        "leaves gradients off",
        "solver",
        "inputs",
        [("        steps = 0\n", "        torch.set_grad_enabled(False)\n        steps = 0\n")],
    ),
    (
        "fields that are not taken by name",
        "solver",
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
    (
        "selector that sums over the roles",
        "selector",
        "same-rows",
        [
            (
                "        rows = [",
                "        for each in problem.upper_data.values():\n"
                "            scores = scores + values(problem.f, theta, candidates.x, each.whole)\n"
                "        rows = [",
            )
        ],
    ),
    (
        "generator whose moments are not in its state",
        "generator",
        "state",
        [
            (CLASS, "\nMOMENTS = {}\n\n" + CLASS),
            (
                "            for _ in",
                "            m, _kept = MOMENTS.get(id(start['x'].get('w')), (0.0, None))\n"
                "            x = {name: leaf - m for name, leaf in x.items()}\n"
                "            for _ in",
            ),
            (
                '        return {"x": candidates.at(index)}',
                "        kept = candidates.at(index)\n"
                '        MOMENTS[id(kept.get("w"))] = 0.3, kept  # alive: no other gets its id\n'
                '        return {"x": kept}',
            ),
        ],
    ),
    (
        "outer optimiser that mixes up the names",
        "outer",
        "structure",
        [
            (
                'state["m"][name] + gradient[name] for name in theta',
                'state["m"][name] + each for name, each in zip(theta, gradient.values())',
            )
        ],
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the files. What importing them does is looked at in one other interpreter, because one
    takes seconds to start.
    """
    folder = tmp_path_factory.mktemp("files")
    sources = {f"sound_{kind}.py": source for kind, source in SOUND.items()}
    for fault, kind, _, edits in CHECKED:
        sources[f"{fault.replace(' ', '_').replace('-', '_')}.py"] = spoilt(SOUND[kind], *edits)
    kept = torch.get_rng_state()
    for name, source in sources.items():
        (folder / name).write_text(source, encoding="utf-8")
        with watched():
            imports.announce(import_plugin(str(folder / name)).__name__)
    torch.set_rng_state(kept)
    return folder


@pytest.mark.parametrize("kind", SOUND)
def test_what_is_not_spoilt_passes(fresh: Path, files: Path, kind: str) -> None:
    result = hgms("check", f"{files / f'sound_{kind}.py'}:Mine")
    assert result.exit_code == 0, result.output
    assert " passed" in result.output
    assert set(SOUND) == set(KINDS) == {row[1] for row in CHECKED}


@pytest.mark.parametrize(("fault", "check"), [(row[0], row[2]) for row in CHECKED])
def test_the_kit_names_the_check_that_fails(
    fresh: Path, files: Path, fault: str, check: str
) -> None:
    file = files / f"{fault.replace(' ', '_').replace('-', '_')}.py"
    result = hgms("check", f"{file}:Mine")
    assert result.exit_code == 1, result.output
    assert result.output.count(f"\n  FAIL {check}: ") == 1


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
    (fresh / "mine.py").write_text(SOUND["solver"])
    result = hgms("check", spec, "--plugin", fresh / "mine.py")
    assert (result.exit_code, shown in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    ("old", "new", "cls", "shown"),
    [
        ("def solve", "def slove", "Mine", "slove"),
        ('"mine"', '"mine"', "Mien", "did you mean 'Mine'?"),
        ("return [Mine]", "return [Mine][0", "Mine", "SyntaxError"),
        ("import attrs\n", "import attrs\nimport sys; sys.exit(3)\n", "Mine", "sys.exit(3)"),
        ("import attrs\n", "import attrs\nimport nowhere_at_all\n", "Mine", "nowhere_at_all"),
    ],
)
def test_a_file_that_cannot_be_checked(
    fresh: Path, old: str, new: str, cls: str, shown: str
) -> None:
    (fresh / "my_solver.py").write_text(spoilt(SOUND["solver"], (old, new)))
    result = hgms("check", f"{fresh / 'my_solver.py'}:{cls}")
    assert (result.exit_code, shown in result.output) == (2, True), result.output
