"""One wrong plugin a row: each is a file or an installed distribution, and is caught with words
that name its fault.

The files ``sound_*.py`` beside this one are right in every way (the first test); a row spoils one
of them in one place.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from click.testing import CliRunner, Result

from hgms.cli import group as cli
from hgms.testing import Check, imports
from hgms_core.discovery import import_plugin
from hgms_core.registry import KINDS, Registry
from hgms_core.sandbox import watched

pytestmark = pytest.mark.extended

HERE = Path(__file__).parent
SOUND = {
    path.stem.removeprefix("sound_"): path.read_text(encoding="utf-8")
    for path in sorted(HERE.glob("sound_*.py"))
}
ENVIRONMENT = ("HGMS_PLUGINS", "HGMS_DISABLE_PLUGINS", "HGMS_STRICT_PLUGINS")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host that has loaded nothing yet, and a folder on the path to install distributions
    into.
    """
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    for variable in ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    dtype = torch.get_default_dtype()
    yield site
    # where the host, against what is asked here, lets a plugin change them
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


def hgms(*words: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(word) for word in words])


def spoilt(source: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} is there {source.count(old)} times"
        source = source.replace(old, new)
    return source


# --- what `hgms check FILE:CLASS` says
# --------------------------------------------------------------------------------------------------


@frozen
class Checked:
    """A sound plugin, spoilt: the check that fails, and what it says."""

    fault: str
    kind: str
    edits: tuple[tuple[str, str], ...]
    check: str
    says: str

    @property
    def file(self) -> str:
        return f"{self.fault.replace(' ', '_').replace('-', '_')}.py"


def row(fault: str, kind: str, check: str, says: str, *edits: tuple[str, str]) -> Checked:
    return Checked(fault, kind, edits, check, says)


IMPORTS = "\nimport attrs\n"
CLASS = "\n@attrs.frozen(kw_only=True)\nclass Mine:"
CHECKED = [
    row(
        "solver with the wrong sign",
        "solver",
        "residual",
        "−v has it: the sign is wrong",
        ("            x,\n", "            -x,\n"),
    ),
    row(
        "hypergradient with the wrong sign",
        "hypergradient",
        "closed-form-ridge",
        "the part that comes through x*(θ) has the wrong sign",
        ("return torch.linalg.pinv", "return -torch.linalg.pinv"),
    ),
    row(
        "hypergradient of the wrong direction",
        "hypergradient",
        "closed-form-bowl",
        "it is −∇F: the sign is wrong",
        (
            "return estimate, state",
            (
                "return attrs.evolve(estimate, value={k: -v for k, v in estimate.value.items()}), "
                "state"
            ),
        ),
    ),
    row(
        "hypergradient without its implicit part",
        "hypergradient",
        "closed-form-ridge",
        "it is ∂f/∂θ alone: the part that comes through x*(θ) is missing",
        ("return torch.linalg.pinv(h, rtol=1e-6) @ b", "return 0 * b"),
    ),
    row(
        "solver that forgets the ridge",
        "solver",
        "ridge",
        "‖b − H·v‖/‖b‖ is: the ridge is left out",
        ("ridge=self.ridge, rtol", "ridge=0.0, rtol"),
    ),
    row(
        "hypergradient with a ridge too many",
        "hypergradient",
        "closed-form-ridge",
        "of its length (allowed 0.001)",
        ("self.ridge * eye", "0.1 * eye"),
    ),
    row(
        "solver that remembers its last answer",
        "solver",
        "repeatable",
        "it remembers something between calls",
        (CLASS, "\nLAST = {}\n\n" + CLASS),
        ("system.start(x0)", "system.start(LAST.get((b.shape, b.dtype)))"),
        (
            "        return system.solution(",
            "        LAST[b.shape, b.dtype] = x\n        return system.solution(",
        ),
    ),
    row(
        "hypergradient that remembers",
        "hypergradient",
        "repeatable",
        "it remembers something between calls",
        (CLASS, "\nCALLS = [0]\n\n" + CLASS),
        ("        below = ", "        CALLS[0] += 1\n        below = "),
        ("self.ridge * eye", "CALLS[0] * 1e-6 * eye"),
    ),
    row(
        "method that forgets its state",
        "method",
        "resume",
        "resumed, [0].t is",
        (CLASS, "\nMEMORY = {}\n\n" + CLASS),
        (
            '        return {"theta": dict(',
            '        MEMORY.update(m)\n        return {"theta": dict(',
        ),
        ('state["m"].items()}', "MEMORY.items()}\n        MEMORY.update(m)"),
    ),
    row(
        "global generator of torch",
        "solver",
        "global-rng",
        "global generator of torch; give it a field `seed`, use Key(self.seed)",
        ("system.start(x0)", "system.start(1e-9 * torch.randn_like(b) if x0 is None else x0)"),
    ),
    row(
        "global generator of numpy",
        "generator",
        "global-rng",
        "it draws from the global generator of numpy.random",
        (IMPORTS, "\nimport attrs\nimport numpy\n"),
        ("ends = []", "ends = [0 * numpy.random.rand()][:0]"),
    ),
    row(
        "right-hand side changed in place",
        "solver",
        "inputs",
        "after the call its input b is",
        ("        steps = 0\n", "        b.mul_(2).div_(2.5)\n        steps = 0\n"),
    ),
    row(
        "start changed in place",
        "generator",
        "inputs",
        "after the call its input x0.w is",
        (
            "        ends = []",
            '        [leaf.add_(0.1) for leaf in start["x"].values()]\n        ends = []',
        ),
    ),
    row(
        "division by nought",
        "solver",
        "zero-rhs",
        "the value is not finite: [nan",
        ("        return system", "        answer = system"),
        (
            "\n\n\n@hookimpl",
            "\n        size = b.norm(dim=-1, keepdim=True)\n"
            "        return attrs.evolve(answer, value=answer.value / size * size)\n\n\n@hookimpl",
        ),
    ),
    row(
        "selector that takes what is not a number",
        "selector",
        "nan",
        "which holds nan",
        ("index=ranked.argmin()", "index=scores.argmin()"),
    ),
    row(
        "generator with the wrong axis",
        "generator",
        "candidates",
        "x has the shapes {'w': [3, 2], 'b': [2]}; they are",
        ("count: int = 3", "count: int = 2"),
        (
            "x = stack(ends)",
            "x = {name: leaf.movedim(0, -1) for name, leaf in stack(ends).items()}",
        ),
    ),
    row(
        "selector along the wrong axis",
        "selector",
        "selection",
        "scores has the shape [1], not [6]",
        ("        gap = (", "        scores = scores.mean(0, keepdim=True)\n        gap = ("),
        ("torch.where(finite, scores, torch.nan)", "torch.where(finite.all(), scores, torch.nan)"),
    ),
    row(
        "generator that costs nothing",
        "generator",
        "oracle-counts",
        "times, with 15 backward passes; 0 calls are declared",
        ("lower_gradients=calls, rows=calls * problem.lower_data.count(None)", ""),
    ),
    row(
        "generator of one key",
        "generator",
        "key",
        "with two keys it draws the same",
        ("draw = key.fold(i)", "draw = Key(0).fold(i)"),
    ),
    row(
        "generator that goes on from the first",
        "generator",
        "carry",
        "candidate 2 was selected, and the next start holds 'w' of [0]",
        ("candidates.at(index)}", "candidates.at(0)}"),
    ),
    row(
        "selector that costs nothing",
        "selector",
        "oracle-counts",
        "f was called 6 times, 0 calls are declared",
        ("upper_values=candidates.count, rows=candidates.count * data.count(self.batch_size)", ""),
    ),
    row(
        "method without a projection",
        "method",
        "projection",
        "where problem.project gives another",
        (
            (
                "theta = problem.project({name: leaf - self.lr * m[name] for name, leaf in "
                "theta.items()})"
            ),
            "theta = {name: leaf - self.lr * m[name] for name, leaf in theta.items()}",
        ),
    ),
    row(
        "method with a misnamed parameter",
        "method",
        "registration",
        "its method step(p, state, progress) should be step(problem, state, progress)",
        ("def step(self, problem: Problem, state", "def step(self, p: Problem, state"),
        (
            '        theta = state["theta"]\n',
            '        problem = p\n        theta = state["theta"]\n',
        ),
    ),
    row(
        "task of one seed",
        "task",
        "other-seed",
        "with two seeds it draws the same",
        ('Key(seed).fold("mine")', 'Key(0).fold("mine")'),
    ),
    row(
        "missing method",
        "generator",
        "registration",
        "it misses the method carry(start, candidates, index, key, problem)",
        ("def carry(", "def carry_on("),
    ),
    row(
        "wrong signature",
        "solver",
        "registration",
        "its method solve(a, rhs) should be solve(matvec, b, x0=None)",
        (
            "matvec: MatVec, b: torch.Tensor, x0: torch.Tensor | None = None) -> Solution:",
            "a: MatVec, rhs: torch.Tensor) -> Solution:\n        matvec, b, x0 = a, rhs, None",
        ),
    ),
    row(
        "name that is no name",
        "solver",
        "registration",
        "its name 'Mine' is not in kebab-case",
        ('= "mine"', '= "Mine"'),
    ),
    row(
        "class that can be changed",
        "solver",
        "frozen",
        "use @frozen(kw_only=True), of hgms.config",
        ("@attrs.frozen(kw_only=True)", "@attrs.define(kw_only=True, unsafe_hash=True)"),
    ),
    row(
        "field that no TOML holds",
        "solver",
        "toml",
        "ConfigError: the function relu cannot be written to a configuration (rule)",
        ("max_steps: int = 50", "max_steps: int = 50\n    rule: object = torch.relu"),
    ),
    row(
        "field of a type that is not there",
        "solver",
        "types",
        "name 'Nowhere' is not defined",
        ("rtol: float", "rtol: Nowhere"),
    ),
    row(
        "result in another precision",
        "solver",
        "precision",
        "cold.value is torch.float32, the inputs are torch.float64",
        ("        return system", "        answer = system"),
        (
            "\n\n\n@hookimpl",
            "\n        return attrs.evolve(answer, value=answer.value.float())\n\n\n@hookimpl",
        ),
    ),
    row(
        "oracle counts that lie",
        "hypergradient",
        "oracle-counts",
        "f was called 1 times, 0 calls are declared",
        (
            "return estimate, state",
            "return attrs.evolve(estimate, cost=type(estimate.cost)()), state",
        ),
    ),
    row(
        "products that are not counted",
        "solver",
        "products",
        "products and made",
        ("        while steps", "        matvec(b)\n        while steps"),
    ),
    row(
        "outer optimiser that leaves the simplex",
        "outer",
        "feasible",
        "away from where its projection puts it",
        ("return self.projection.apply(moved), ", "return moved, "),
    ),
    row(
        "outer optimiser uphill",
        "outer",
        "simplex",
        "it ends at a = [",
        ("- self.lr * m[name]", "+ self.lr * m[name]"),
    ),
    row(
        "task of the global seed",
        "task",
        "seed",
        "built again, data.",
        ("generator=draw, dtype=torch.float64)\n        y", "dtype=torch.float64)\n        y"),
    ),
    row(
        "task that validates on its training rows",
        "task",
        "splits",
        "12 of the 12 rows of 'lower' are among the 12 of 'select'",
        ("key.fold(role)", 'key.fold("train" if role == "select" else role)'),
    ),
    row(
        "task with a misspelt metric",
        "task",
        "metrics",
        "evaluate gives ['test_eror'], declared are ['test_error']",
        ('lambda theta, x: {"test_error"', 'lambda theta, x: {"test_eror"'),
    ),
    row(
        "method uphill",
        "method",
        "optimum",
        "after 60 steps",
        ("- self.lr * m[name]", "+ self.lr * m[name]"),
    ),
    row(
        "method that swallows its error",
        "method",
        "failure",
        "the loss is gone",
        (
            "        m = {name: 0.5",
            "        if not all(bool(leaf.isfinite().all()) for leaf in estimate.value.values()):\n"
            "            raise ZeroDivisionError('the loss is gone')\n        m = {name: 0.5",
        ),
    ),
    row(
        "prints on import",
        "solver",
        "import",
        "prints 'hello\\n'",
        (IMPORTS, "\nimport attrs\n\nprint('hello')\n"),
    ),
    row(
        "seeds torch on import",
        "solver",
        "import",
        "draws from (or seeds) a global random generator",
        (IMPORTS + "import torch\n", IMPORTS + "import torch\n\ntorch.manual_seed(0)\n"),
    ),
    row(
        "changes the default precision on import",
        "solver",
        "import",
        'changes ["torch\'s default dtype from torch.float32 to torch.float64"] for everybody',
        (
            IMPORTS + "import torch\n",
            IMPORTS + "import torch\n\ntorch.set_default_dtype(torch.float64)\n",
        ),
    ),
    row(
        "method that rests before its last step",
        "method",
        "budget",
        "its oracle_calls stop growing while the budget is not spent",
        (
            '        theta = state["theta"]\n',
            '        if progress > 0.4:\n            return state, {"oracle_calls": '
            'state["calls"]}\n'
            '        theta = state["theta"]\n',
        ),
    ),
    row(
        "method that counts steps for calls",
        "method",
        "records",
        "24 times, with 27 backward passes; 3 calls are declared",
        ('calls = state["calls"] + 5 + estimate.cost.calls', 'calls = state["calls"] + 1'),
    ),
    row(
        "solver that exits",
        "solver",
        "residual",
        "it calls sys.exit(5) (solver_that_exits.py:",
        ("        steps = 0\n", "        raise SystemExit(5)\n        steps = 0\n"),
    ),
    row(
        "solver that forgets batches",
        "solver",
        "batch",
        "it claims the residual",
        (
            "        system = LinearSystem",
            "        if b.dim() > 1:\n"
            "            none = torch.zeros(b.shape[:-1])\n"
            "            first = self.solve(lambda v: v, b[0])\n"
            "            return attrs.evolve(first, value=b, residual=none, curvature=none, "
            "codes=none, iterations=none)\n"
            "        system = LinearSystem",
        ),
    ),
    row(
        "outcome of the first system for all",
        "solver",
        "residual",
        "it says converged with a residual of",
        (
            "        return system",
            "        codes = codes.flatten()[0].expand_as(codes)\n        return system",
        ),
    ),
    row(
        "seeds torch in a call",
        "solver",
        "global-rng",
        "it draws from the global generator of torch",
        ("        steps = 0\n", "        torch.manual_seed(0)\n        steps = 0\n"),
    ),
    row(
        "leaves gradients off",
        "solver",
        "inputs",
        "the call changes torch's gradient mode from True to False for everybody",
        ("        steps = 0\n", "        torch.set_grad_enabled(False)\n        steps = 0\n"),
    ),
    row(
        "fields that are not taken by name",
        "solver",
        "registration",
        "its __init__ does not take 'ridge', 'rtol' by name",
        ("@attrs.frozen(kw_only=True)", "@attrs.frozen(init=False)"),
        (
            "    def solve(",
            "    def __init__(self, ridge=1e-2, rtol=1e-3, /, max_steps=50):\n"
            "        self.__attrs_init__(ridge, rtol, max_steps)\n\n    def solve(",
        ),
    ),
    row(
        "selector that sums over the roles",
        "selector",
        "same-rows",
        "the scores depend on the rows of 'differentiate'",
        (
            "        rows = [",
            "        for each in problem.upper_data.values():\n"
            "            scores = scores + values(problem.f, theta, candidates.x, each.whole)\n"
            "        rows = [",
        ),
    ),
    row(
        "generator whose moments are not in its state",
        "generator",
        "state",
        "after its state was saved and loaded",
        (CLASS, "\nMOMENTS = {}\n\n" + CLASS),
        (
            "            for _ in",
            "            m, _kept = MOMENTS.get(id(start['x'].get('w')), (0.0, None))\n"
            "            x = {name: leaf - m for name, leaf in x.items()}\n            for _ in",
        ),
        (
            '        return {"x": candidates.at(index)}',
            "        kept = candidates.at(index)\n"
            '        MOMENTS[id(kept.get("w"))] = 0.3, kept  # alive: no other gets its id\n'
            '        return {"x": kept}',
        ),
    ),
    row(
        "outer optimiser that mixes up the names",
        "outer",
        "structure",
        "it raised RuntimeError",
        (
            'state["m"][name] + gradient[name] for name in theta',
            'state["m"][name] + each for name, each in zip(theta, gradient.values())',
        ),
    ),
    row(
        "task with one training row too many",
        "task",
        "splits",
        "1 of the 3000 rows of 'lower' are among the 3000 of 'stop'",
        ("    rows: int = 12", "    rows: int = 3000"),
        (
            'lower_data=Data.of(self.table(key.fold("train"), dtype))',
            "lower_data=Data.of({name: "
            'torch.cat([leaf[1:], self.table(key.fold("stop"), dtype)[name][-1:]]) for name, '
            "leaf in "
            'self.table(key.fold("train"), dtype).items()})',
        ),
    ),
    row(
        "task with a misspelt trait",
        "task",
        "metrics",
        "its trait 'smoth-lower' is none that methods ask for; did you mean 'smooth-lower'?",
        (
            "    rows: int = 12",
            '    traits: ClassVar[frozenset[str]] = frozenset({"smoth-lower"})\n    rows: int = 12',
        ),
    ),
    row(
        "task that says what is better in no words",
        "task",
        "registration",
        "its metrics are ['test_error']; write whether higher is better",
        ('Mapping[str, bool]] = {"test_error": False}', 'list[str]] = ["test_error"]'),
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the files. What importing them does is looked at in one other interpreter, because one
    takes seconds to start.
    """
    folder = tmp_path_factory.mktemp("files")
    sources = {f"sound_{kind}.py": source for kind, source in SOUND.items()}
    sources |= {item.file: spoilt(SOUND[item.kind], *item.edits) for item in CHECKED}
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


@pytest.mark.parametrize("wrong", CHECKED, ids=lambda item: item.fault)
def test_the_kit_names_the_fault(fresh: Path, files: Path, wrong: Checked) -> None:
    result = hgms("check", f"{files / wrong.file}:Mine")
    assert result.exit_code == 1, result.output
    (line,) = [
        line for line in result.output.splitlines() if line.startswith(f"  FAIL {wrong.check}: ")
    ]
    assert wrong.says in line


def test_every_kind_has_wrong_plugins() -> None:
    assert {item.kind for item in CHECKED} == set(SOUND) == set(KINDS)
    assert len({item.file for item in CHECKED}) == len(CHECKED) >= 12


# --- what the host says of an installed distribution, and what everything else does meanwhile
# --------------------------------------------------------------------------------------------------


@frozen
class Installed:
    """A distribution ``hgms-<name>`` with one entry point for each module."""

    name: str
    modules: dict[str, str]
    entries: dict[str, str]
    version: str = "1.0"


def distribution(name: str, source: str, entry: str = "", **more: str) -> Installed:
    module = "hgms_third_" + name.replace("-", "_")
    return Installed(
        name,
        {module: source},
        {entry or name: module + more.get("attribute", "")},
        more.get("version", "1.0"),
    )


def solver(name: str, *edits: tuple[str, str]) -> str:
    return spoilt(SOUND["solver"], ('"mine"', f'"{name}"'), *edits)


@frozen
class Broken:
    fault: str
    distributions: tuple[Installed, ...]
    says: tuple[str, ...]
    status: str = "failed"
    """Of the last distribution's plugin in ``hgms plugins``."""


def hosted(fault: str, source: str, *says: str, status: str = "failed", **options: str) -> Broken:
    return Broken(fault, (distribution("bad", source, **options),), says, status)


def observer(hook: str, body: str) -> str:
    return f"from hgms_core import hookimpl\n\n@hookimpl\ndef {hook}:\n    {body}\n"


def headed(lines: str) -> str:
    """A solver's file with lines at its top."""
    return lines + "\n" + solver("bad").replace("from __future__ import annotations", "")


RETURN = "    return [Mine]"
HOOK = "\n\n\n@hookimpl"
AGAIN = "its observers are not called again, the run goes on"
HOSTED = [
    hosted(
        "import error",
        "import nowhere_at_all",
        "ModuleNotFoundError: No module named 'nowhere_at_all'",
    ),
    Broken(
        "module that is not there",
        (Installed("bad", {}, {"bad": "hgms_nowhere"}),),
        ("No module named 'hgms_nowhere'",),
    ),
    hosted(
        "entry point to a missing attribute",
        solver("bad"),
        "the entry point bad = 'hgms_third_bad:Plugin'",
        "use the module: bad = 'hgms_third_bad'",
        attribute=":Plugin",
    ),
    hosted("syntax error", "x = 1\ndef f(:\n", "SyntaxError", "line 2"),
    hosted("exit on import", "import sys\nsys.exit(3)", "SystemExit: it calls sys.exit(3)"),
    hosted(
        "prints on import",
        headed('print("hello")'),
        "it prints while it is imported",
        status="loaded",
    ),
    hosted(
        "long import",
        headed("import time\n\ntime.sleep(1.1)"),
        "its import took 1.",
        "and every command waits for it",
        status="loaded",
    ),
    hosted(
        "another default precision",
        solver("bad", (HOOK, "\n\n\ntorch.set_default_dtype(torch.float64)" + HOOK)),
        "it changed torch's default dtype from torch.float32 to torch.float64",
        "this was undone",
        status="loaded",
    ),
    hosted(
        "another excepthook and another folder of data",
        headed("import os, sys\n\nsys.excepthook = print\nos.environ['HGMS_DATA'] = '/nowhere'"),
        "sys.excepthook",
        "HGMS_DATA from",
        "this was undone",
        status="loaded",
    ),
    hosted("no Exception on import", "raise BaseException('base')", "BaseException: base"),
    hosted(
        "one class twice",
        solver("bad", (RETURN, "    return [Mine, Mine]")),
        "plugin 'bad' registers twice the linear solver 'bad'",
        status="incomplete",
    ),
    hosted(
        "misspelt hook",
        solver("bad", ("register_linear_solvers", "register_linear_solver")),
        "unknown hook 'hgms_register_linear_solver'",
        "did you mean 'hgms_register_linear_solvers'?",
    ),
    hosted(
        "misspelt observer",
        observer("hgms_step_finish(record)", "pass"),
        "unknown hook 'hgms_step_finish'",
        "did you mean 'hgms_step_finished'?",
    ),
    hosted(
        "unmarked hook",
        solver("bad", ("@hookimpl\n", "")),
        "(hgms_register_linear_solvers)",
        "add @hookimpl",
    ),
    hosted("no hook", "x = 1", "implements no hook"),
    hosted(
        "hook that asks too much",
        observer("hgms_step_finished(record, model)", "pass"),
        "'model'",
        "hgms_step_finished",
    ),
    hosted(
        "exception in a registering hook",
        solver("bad", (RETURN, "    return [Mine][1]")),
        "hgms_register_linear_solvers raised IndexError: list index out of range",
        status="incomplete",
    ),
    hosted(
        "exit in a registering hook",
        solver("bad", (RETURN, "    raise SystemExit(4)")),
        "hgms_register_linear_solvers raised SystemExit: it calls sys.exit(4)",
        status="incomplete",
    ),
    hosted(
        "a class in place of a list",
        solver("bad", (RETURN, "    return Mine")),
        "hgms_register_linear_solvers returns the class Mine, but must return a list of classes",
        status="incomplete",
    ),
    hosted(
        "an instance in place of a class",
        solver("bad", (RETURN, "    return [Mine()]")),
        "not a class; return the class itself, without parentheses",
        status="incomplete",
    ),
    hosted(
        "missing method",
        solver("bad", ("def solve", "def slove")),
        "is not a linear solver",
        "it misses the method solve(matvec, b, x0=None)",
        status="incomplete",
    ),
    hosted(
        "wrong signature",
        solver("bad", ("b: torch.Tensor, x0", "rhs: torch.Tensor, x0")),
        "its method solve(matvec, rhs, x0) should be solve(matvec, b, x0=None)",
        status="incomplete",
    ),
    hosted(
        "name that differs from one of ours by case",
        solver("CG"),
        "its name 'CG' is not in kebab-case (like 'my-name')",
        status="incomplete",
    ),
    *(
        hosted(
            f"name of one of ours, {when}",
            solver("cg"),
            "two plugins register the linear solver 'cg'; the one of hgms ",
            f"block one with HGMS_DISABLE_PLUGINS={entry}",
            status="incomplete",
            entry=entry,
        )
        for when, entry in (("loaded before", "bad"), ("loaded after", "zoo"))
    ),
    Broken(
        "one name twice",
        (distribution("one", solver("fast-cg")), distribution("two", solver("fast-cg"))),
        (
            "two plugins register the linear solver 'fast-cg'",
            "hgms_third_one:Mine",
            "hgms_third_two:Mine",
        ),
        "incomplete",
    ),
    hosted(
        "entry point that differs from one of ours by case",
        solver("bad"),
        "the name 'ula' (case, - and _ are ignored)",
        "rename one of the plugins",
        entry="ULA",
    ),
    hosted(
        "newer API",
        headed("hgms_plugin_api = 99"),
        "requires plugin API 99, but this hgms has 2",
        "upgrade hgms",
    ),
    hosted(
        "older API",
        headed("hgms_plugin_api = 1"),
        "requires plugin API 1, but this hgms has 2",
        "hgms_plugin_api = 2",
    ),
    hosted(
        "exception in an observer",
        observer("hgms_step_finished(record)", "1 / 0"),
        f"hgms_step_finished raised ZeroDivisionError: division by zero; {AGAIN}",
        status="loaded",
    ),
    hosted(
        "exit in an observer",
        observer("hgms_run_started(run)", "raise SystemExit(1)"),
        f"hgms_run_started raised SystemExit: it calls sys.exit(1); {AGAIN}",
        status="loaded",
    ),
    hosted(
        "exception at the end",
        observer("hgms_run_finished(summary)", "summary['x'][1]"),
        f"hgms_run_finished raised KeyError: 'x'; {AGAIN}",
        status="loaded",
    ),
    hosted(
        "observer that empties the record",
        observer("hgms_step_finished(record)", "record.clear()"),
        status="loaded",
    ),
    hosted(
        "observer that draws random numbers",
        observer("hgms_step_finished(record)", "import torch; torch.manual_seed(0)"),
        status="loaded",
    ),
    hosted(
        "command that is taken",
        observer("hgms_register_commands(cli)", "cli.command('run')(lambda: print('mine'))"),
        "there is a command 'run' already; its own is left out",
        status="loaded",
    ),
    hosted(
        "exception in the commands' hook",
        observer("hgms_register_commands(cli)", "cli.no_such_thing"),
        (
            "hgms_register_commands raised AttributeError: 'Group' object has no attribute "
            "'no_such_thing'"
        ),
        status="loaded",
    ),
]

CONFIG = """
seed = 3
budget = "3 steps"
task = "quadratic"
method = { name = "hg-ms", generator = { steps = 4 } }
"""


def install(site: Path, number: int, package: Installed) -> None:
    folder = site if number == 0 else site / f"more-{number}"
    folder.mkdir(exist_ok=True)
    for module, source in package.modules.items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"hgms_{package.name}-{package.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: hgms-{package.name}\nVersion: {package.version}\n"
    )
    lines = "".join(f"{entry} = {value}\n" for entry, value in package.entries.items())
    (info / "entry_points.txt").write_text(f"[hgms]\n{lines}")


@frozen
class Seen:
    """How a run ended, byte for byte, and what there was to choose from that is ours."""

    exit_code: int
    files: dict[str, bytes]
    listed: list[dict[str, Any]]


def seen(folder: Path, call: Callable[[Sequence[str]], tuple[int, str, str]]) -> tuple[Seen, str]:
    """Lists, then runs; and what was said on stderr."""
    (folder / "run.toml").write_text(CONFIG)
    listing = call(["list", "--json"])
    assert listing[0] == 0, listing[2]
    ours = [item for item in json.loads(listing[1]) if item["distribution"] == "hgms"]
    with contextlib.chdir(folder):
        code, out, error = call(["run", "run.toml", "--json", "--out", "runs"])
    assert json.loads(out)["status"] == "done", error
    files = {
        name: next(folder.rglob(name)).read_bytes() for name in ("steps.jsonl", "summary.json")
    }
    return Seen(code, files, ours), listing[2] + error


def within(words: Sequence[str]) -> tuple[int, str, str]:
    result = hgms(*words)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Without any third party."""
    return seen(tmp_path_factory.mktemp("alone"), within)[0]


@pytest.mark.parametrize("broken", HOSTED, ids=lambda item: item.fault)
def test_the_host_names_the_fault_and_nothing_else_changes(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Seen, broken: Broken
) -> None:
    for number, package in enumerate(broken.distributions):
        install(fresh, number, package)
        if number:
            monkeypatch.syspath_prepend(fresh / f"more-{number}")
    without = seen(tmp_path, within)
    assert without[0] == alone
    code, out, error = within(["plugins", "-v"])
    assert code == 0, error
    _, _, unknown = within(["no-such-command"])  # asks plugins for their commands
    result = "\n".join([without[1], out, error, unknown])
    assert [words for words in broken.says if words not in result] == [], result
    assert "Traceback" not in without[1]
    rows = json.loads(within(["plugins", "--json"])[1])
    (last,) = [
        item for item in rows if item["distribution"] == f"hgms-{broken.distributions[-1].name}"
    ]
    assert last["status"] == broken.status


# --- what is said of a file that a person names: an error at once, in words
# --------------------------------------------------------------------------------------------------

FILES = [
    ("missing file", "my_slover.py", None, "my_slover.py)", "my_solver.py'?"),
    ("no Python file", "my_solver.txt", "hello", "my_solver.txt)", "ends in .py"),
    ("syntax error", "syntax.py", "x = 1\ndef f(:\n", "SyntaxError", "line 2"),
    ("import error", "imports.py", "import nowhere_at_all", "No module named 'nowhere_at_all'", ""),
    ("exit", "exits.py", "raise SystemExit(3)", "SystemExit: it calls sys.exit(3)", ""),
    (
        "misspelt hook",
        "hook.py",
        solver("bad", ("_solvers()", "_solver()")),
        "did you mean 'hgms_register_linear_solvers'",
        "",
    ),
    (
        "unmarked hook",
        "mark.py",
        solver("bad", ("@hookimpl\n", "")),
        "(hgms_register_linear_solvers)",
        "add @hookimpl",
    ),
    (
        "name of one of ours",
        "name.py",
        solver("cg"),
        "two plugins register the linear solver 'cg'",
        "rename",
    ),
    (
        "missing method",
        "method.py",
        solver("bad", ("def solve", "def slove")),
        "it misses the method solve(",
        "not a linear",
    ),
    ("folder", "folder/", "", "is a folder", "pip install -e"),
    ("Latin-1", "latin.py", 'x = "\udce9"', "SyntaxError", "utf-8"),
    ("newer API", "api.py", headed("hgms_plugin_api = 99"), "plugin API 99", "upgrade"),
]


@pytest.mark.parametrize(
    ("name", "source", "says", "advice"),
    [case[1:] for case in FILES],
    ids=[case[0] for case in FILES],
)
def test_a_named_file_is_an_error_in_words(
    fresh: Path, name: str, source: str | None, says: str, advice: str
) -> None:
    (fresh / "my_solver.py").write_text(solver("bad"))
    if name.endswith("/"):
        (fresh / name).mkdir()
    elif source is not None:
        (fresh / name).write_text(source, errors="surrogateescape")
    result = hgms("list", "solver", "--plugin", fresh / name)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert says in result.stderr
    assert advice in result.stderr


def test_one_file_named_in_two_ways_is_one_plugin_and_two_of_one_name_are_two(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / "other").mkdir()
    (fresh / "mine.py").write_text(solver("one"))
    (fresh / "other" / "mine.py").write_text(solver("two"))
    monkeypatch.chdir(fresh)
    monkeypatch.setenv("HOME", str(fresh))
    files = ["mine.py", "./mine.py", fresh / "mine.py", "~/mine.py", "other/mine.py"]
    result = hgms(
        "list", "solver", "--json", *(word for item in files for word in ("--plugin", item))
    )
    assert result.exit_code == 0, result.output
    assert [row["plugin"] for row in json.loads(result.stdout) if row["distribution"] is None] == [
        "mine",
        "other/mine.py",
    ]
    registry = Registry.load(files)
    first, second = (registry.get("solver", name).target for name in ("one", "two"))
    assert pickle.loads(pickle.dumps(first)) is first  # each under a module of its own
    assert pickle.loads(pickle.dumps(second)) is second


CLASSES = [
    ("def solve", "def slove", "Mine", 2, "rename the method slove to solve"),
    ('"mine"', '"mine"', "Mien", 2, "did you mean 'Mine'?"),
    ("return [Mine]", "return [Mine][0", "Mine", 2, "SyntaxError"),
    ("import attrs\n", "import attrs\nimport sys; sys.exit(3)\n", "Mine", 2, "sys.exit(3)"),
    (
        "import attrs\n",
        "import attrs\nimport nowhere_at_all\n",
        "Mine",
        2,
        "No module named 'nowhere_at_all'",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "cls", "code", "says"), CLASSES, ids=[case[-1] for case in CLASSES]
)
def test_a_file_that_cannot_be_checked(
    fresh: Path, old: str, new: str, cls: str, code: int, says: str
) -> None:
    (fresh / "my_solver.py").write_text(spoilt(SOUND["solver"], (old, new)))
    result = hgms("check", f"{fresh / 'my_solver.py'}:{cls}")
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert says in result.output


COMPOSED = """
from hgms_core import Composition

MINE = Composition(name="mine", summary="One branch.", source="", parts={
    "generator": {"name": "branches", "count": 1}, "selector": {"name": "first"},
    "hypergradient": {"name": "implicit", "solver": {"name": "cg"}},
    "outer": {"name": "adam", "lr": 0.1},
})
"""
PARTS = [
    (
        '"selector"',
        '"selectors"',
        1,
        "FAIL registration: unknown part of a pipeline 'selectors'; did you mean 'selector'?",
    ),
    (
        '"cg"',
        '"cgg"',
        1,
        "FAIL construction: unknown linear solver 'cgg' "
        "(the composition 'mine': hypergradient.solver.name)\n  did you mean 'cg'?",
    ),
    ("One branch.", "", 1, "FAIL docstring: its summary is empty"),
    ("MINE =", "MIEN =", 2, "did you mean 'mine'?"),
    ('source=""', 'source="this test"', 0, "14 passed"),
]


@pytest.mark.parametrize(("old", "new", "code", "says"), PARTS, ids=[case[-1] for case in PARTS])
def test_a_composition_is_checked(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, code: int, says: str
) -> None:
    # the built-in ones are asked elsewhere
    monkeypatch.setattr(Check, "answer", lambda check, case: ("", ""))
    (fresh / "mine.py").write_text(COMPOSED.replace(old, new, 1))
    result = hgms("check", f"{fresh / 'mine.py'}:MINE")
    assert result.exit_code == code, result.output
    assert says in result.output


NAMED = [
    ("cg", 0, "cg: a linear solver"),
    ("method:soba", 0, "method:soba: a method"),
    ("soba", 2, "use generator:soba or method:soba"),
    ("cgg", 2, "did you mean 'cg'?"),
    ("mine", 0, "mine: a linear solver"),
    (":Mine", 2, "':Mine' is not of the form MODULE:CLASS"),
]


@pytest.mark.parametrize(("spec", "code", "says"), NAMED, ids=[case[0] for case in NAMED])
def test_what_is_registered_is_checked_by_its_name(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, spec: str, code: int, says: str
) -> None:
    monkeypatch.setattr(Check, "answer", lambda check, case: ("", ""))
    (fresh / "mine.py").write_text(SOUND["solver"])
    result = hgms("check", spec, "--plugin", fresh / "mine.py")
    assert result.exit_code == code, result.output
    assert says in result.output


def test_a_field_that_no_toml_holds(fresh: Path, tmp_path: Path) -> None:
    """It works from Python; a configuration cannot hold it, and says so."""
    text = spoilt(
        SOUND["solver"],
        ("max_steps: int = 50", "max_steps: int = 50\n    rule: object = torch.relu"),
    )
    (fresh / "mine.py").write_text(text)
    result = hgms("describe", "solver", "mine", "--plugin", fresh / "mine.py")
    assert result.exit_code == 0, result.output
    assert "rule" in result.output
    text = CONFIG.replace(
        "steps = 4 }", 'steps = 4 }, hypergradient = { name = "implicit", solver = "mine" }'
    )
    (tmp_path / "run.toml").write_text(text)
    result = hgms(
        "run", tmp_path / "run.toml", "--plugin", fresh / "mine.py", "--out", tmp_path / "runs"
    )
    assert result.exit_code == 2, result.output
    assert "(method.hypergradient.solver.rule)" in result.stderr


def test_a_type_that_cannot_be_evaluated_stops_only_who_uses_it(
    fresh: Path, tmp_path: Path
) -> None:
    install(fresh, 0, distribution("bad", solver("bad", ("rtol: float", "rtol: Nowhere"))))
    text = CONFIG.replace(
        "steps = 4 }", 'steps = 4 }, hypergradient = { name = "implicit", solver = "bad" }'
    )
    (tmp_path / "run.toml").write_text(text)
    for words in (["describe", "solver", "bad"], ["run", str(tmp_path / "run.toml")]):
        code, _, error = within(words)
        assert code == 2, error
        assert "name 'Nowhere' is not defined" in error
        assert "hgms_third_bad" in error


def test_all_of_them_at_once_in_a_process_of_their_own(
    fresh: Path, tmp_path: Path, alone: Seen
) -> None:
    """As a person meets them: every broken distribution at once, one interpreter a command."""
    paths = [fresh]
    for number, broken in enumerate(item for item in HOSTED if len(item.distributions) == 1):
        (package,) = broken.distributions
        renamed = Installed(
            f"{package.name}-{number}",
            {f"{name}_{number}": source for name, source in package.modules.items()},
            {
                f"{key}-{number}": value.replace("_bad", f"_bad_{number}")
                for key, value in package.entries.items()
            },
        )
        install(fresh, number, renamed)
        paths.append(fresh / f"more-{number}")
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))

    def call(words: Sequence[str]) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "hgms.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        return done.returncode, done.stdout, done.stderr

    assert seen(tmp_path, call)[0] == alone
