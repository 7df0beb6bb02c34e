"""The kit's checks of components of every kind: a mutant for each (asked in
test_testing_mutants.py); and the decorator.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import define, evolve, field, frozen
from support.helpers import rejects
from torch import Tensor

from hgms.testing import (
    check_component,
    checks_of,
    imports,
    inputs_on,
    parametrize_with_checks,
    problems,
    selectors,
    solvers,
)
from hgms.testing import every_kind as every
from hgms.testing.check import check as hgms_check
from hgms.testing.kit import Check, place, snapshot, tensors
from hgms_core import CallableSolver, MatVec, MissingExtra, PluginError, Solution

DOC = """An exact solver, through the matrix that its operator is.

    >>> 1 + 1
    2

    Source: Gauss.
    """


def exact(matvec: MatVec, b: Tensor) -> Solution:
    def dense(matvec: MatVec, b: Tensor) -> Tensor:
        return torch.linalg.solve(
            torch.stack([matvec(row) for row in torch.eye(len(b), dtype=b.dtype)], 1), b
        )

    return CallableSolver(dense).solve(matvec, b)


@frozen(kw_only=True)
class Exact:
    __doc__ = DOC
    name: ClassVar[str] = "exact"

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return exact(matvec, b)


class BadName(Exact):
    name: ClassVar[str] = "Exact_Solver"


class NoMethod:
    name: ClassVar[str] = "no-method"


@frozen(kw_only=True)
class WrongSignature:
    __doc__ = DOC
    name: ClassVar[str] = "wrong-signature"

    def solve(self, operator: MatVec, b: Tensor) -> Solution:
        return exact(operator, b)


class NoDoc(Exact):
    __doc__ = None


class NoExample(Exact):
    """An exact solver."""


class NoSource(Exact):
    """An exact solver.

    >>> 1 + 1
    2
    """


@frozen(kw_only=True)
class UnknownType(Exact):
    __doc__ = DOC
    rtol: Nowhere = 1.0  # type: ignore[name-defined]  # noqa: F821


@define(kw_only=True)
class Changeable:
    __doc__ = DOC
    name: ClassVar[str] = "changeable"
    rtol: float = 1.0

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return exact(matvec, b)


@frozen(kw_only=True)
class Unhashable(Exact):
    __doc__ = DOC
    rates: list[float] = field(factory=lambda: [1.0])


@frozen(kw_only=True, eq=False)
class Unequal:
    __doc__ = DOC
    name: ClassVar[str] = "unequal"

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return exact(matvec, b)


@frozen(kw_only=True)
class Local(Exact):
    __doc__ = DOC
    rule: Callable[[float], float] = lambda rate: rate


@frozen(kw_only=True)
class Forgetful(Exact):
    __doc__ = DOC
    rtol: float = field(default=1.0, converter=lambda value: value + 1.0)


class InPlace(Exact):
    __doc__ = DOC

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        return exact(matvec, b.mul_(1.0 + 1e-12))


class GlobalTorch(Exact):
    __doc__ = DOC

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        torch.randn(1)
        return exact(matvec, b)


class GlobalNumpy(Exact):
    __doc__ = DOC

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        np.random.rand()  # noqa: NPY002
        return exact(matvec, b)


class GlobalRandom(Exact):
    __doc__ = DOC

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        random.random()
        return exact(matvec, b)


class Stale(Exact):
    __doc__ = DOC
    last: ClassVar[dict[str, Tensor]] = {}

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = exact(matvec, b + 1e-9 * self.last.get("b", torch.zeros_like(b)).to(b.dtype))
        self.last["b"] = b
        return answer


class Single(Exact):
    __doc__ = DOC

    def solve(self, matvec: MatVec, b: Tensor, x0: Tensor | None = None) -> Solution:
        answer = exact(matvec, b)
        return evolve(answer, value=answer.value.float())


MUTANTS: list[tuple[str, Any, str]] = [
    ("registration", BadName(), "its name 'Exact_Solver' is not in kebab-case"),
    (
        "registration",
        WrongSignature(),
        "its method solve(operator, b) should be solve(matvec, b, x0=None)",
    ),
    ("docstring", NoDoc(), "it has no docstring"),
    ("docstring", NoExample(), "its docstring has no example"),
    ("source", NoSource(), "no line that starts with Source:"),
    ("types", UnknownType(), "name 'Nowhere' is not defined"),
    ("frozen", Changeable(), "its attribute 'rtol' can be set"),
    ("hashable", Unhashable(), "it cannot be hashed (unhashable type: 'list')"),
    ("hashable", Unequal(), "two instances with equal fields are not equal"),
    ("pickle", Local(), "pickle"),
    ("toml", Local(), "(rule)"),
    ("toml", Forgetful(), "it comes back as Forgetful("),
    ("inputs", InPlace(), "after the call its input b is ["),
    ("global-rng", GlobalTorch(), "it draws from the global generator of torch;"),
    ("global-rng", GlobalNumpy(), "it draws from the global generator of numpy.random;"),
    ("global-rng", GlobalRandom(), "it draws from the global generator of random;"),
    ("repeatable", Stale(), "used again, cold.value is ["),
    ("precision", Single(), "cold.value is torch.float32, the inputs are torch.float64"),
]

MODULE = """
import sys
from typing import ClassVar
import torch
from attrs import frozen
{line}

@frozen(kw_only=True)
class Mine:
    name: ClassVar[str] = "mine"
    def solve(self, matvec, b, x0=None): return b
"""
IMPORTS = [
    ("torch.manual_seed(3)", "draws from (or seeds) a global random generator"),
    ("print('hello')", "prints 'hello\\n'"),
    (
        "import socket; socket.getaddrinfo('localhost', 80)",
        "ends in OSError: no network while a plugin is imported",
    ),
    (
        "torch.set_default_dtype(torch.float64)",
        'changes ["torch\'s default dtype from torch.float32 to torch.float64"]',
    ),
    ("try:\n    torch.cuda.init()\nexcept Exception: pass", "touches ['CUDA']"),
]


def named(name: str, component: Any) -> Check:
    return next(check for check in checks_of(component) if check.name == name)


def test_what_importing_a_module_does_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    components = []
    for number, (line, _) in enumerate(IMPORTS):
        (tmp_path / f"imported_{number}.py").write_text(MODULE.format(line=line))
        components.append(__import__(f"imported_{number}", fromlist=["Mine"]).Mine())
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float32)  # the modules were imported here too
    parametrize_with_checks(components)
    torch.set_rng_state(state)
    assert named("import", Exact()).fault(Exact()) == ""
    for component, (_, came) in zip(components, IMPORTS, strict=True):
        assert came in named("import", component).fault(component)


def test_what_one_module_does_is_not_seen_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has a fresh copy of the interpreter, also after one that ended it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "marks.py").write_text(
        "import sys\nprint(hasattr(sys, 'marked'))\nsys.marked = True\n"
    )
    (tmp_path / "ends.py").write_text("import os\nos.write(2, b'good bye')\nos._exit(3)\n")
    (tmp_path / "looks.py").write_text("import marks, os\nprint(os.environ.get('LATER'))\n")
    assert imports.observed("marks")["printed"] == "False\n"
    with pytest.raises(
        RuntimeError, match="the interpreter that imports ends ended with 3: good bye"
    ):
        imports.observed("ends")
    imports._waiting.clear()
    monkeypatch.setenv("LATER", "is seen")
    assert imports.observed("looks")["printed"] == "False\nis seen\n"


@frozen(kw_only=True)
class NoCarry:
    __doc__ = DOC
    name: ClassVar[str] = "no-carry"

    def init(self, problem: Any, key: Any) -> Any: ...
    def propose(self, problem: Any, theta: Any, start: Any, key: Any) -> Any: ...


def test_a_missing_method_is_named() -> None:
    came = named("registration", NoCarry()).fault(NoCarry())
    assert came == "it misses the method carry(start, candidates, index, key, problem)"


def test_a_class_without_any_method_is_told_what_there_is() -> None:
    with rejects("wrong-plugin", of=PluginError):
        list(checks_of(NoMethod()))


# --- the decorator
# --------------------------------------------------------------------------------------------------

SUITE = """
from test_testing_every import Exact
from hgms.testing import parametrize_with_checks

@parametrize_with_checks([Exact()], expected_failures={failures})
def test_conformance(component, check):
    check(component)
"""


def suite(folder: Path, failures: str) -> str:
    (folder / "test_mine.py").write_text(SUITE.replace("{failures}", failures))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rxXf",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "-k",
        "frozen or batch",
        str(folder),
    ]
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=path, cwd=folder).stdout


def test_ids_and_strict_expected_failures(tmp_path: Path) -> None:
    output = suite(tmp_path, '{"batch": "one system at a time", "frozen": "no reason at all"}')
    assert "XFAIL test_mine.py::test_conformance[exact-batch] - one system at a time" in output
    assert "FAILED test_mine.py::test_conformance[exact-frozen]" in output
    assert "[XPASS(strict)] no reason at all" in output


def test_the_names_of_expected_failures_are_checked() -> None:
    with rejects("unknown-check", "expected_failures", "zero-rsh") as caught:
        parametrize_with_checks([Exact()], expected_failures={"zero-rsh": "a slip"})
    assert caught.value.did_you_mean == ("zero-rhs",)
    with rejects("wrong-type", "components", 0):
        parametrize_with_checks([Exact])


def test_instances_of_one_class_are_told_apart() -> None:
    from test_testing_solvers import MinimalResidual

    mark = parametrize_with_checks([MinimalResidual(), MinimalResidual(rtol=1e-3), Exact()])
    ids = {
        row.id.removesuffix("-docstring") for row in mark.args[1] if row.id.endswith("-docstring")
    }
    assert ids == {"minimal-residual()", "minimal-residual(rtol=0.001)", "exact"}


def test_without_pytest_the_decorator_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    with rejects("missing-package", of=MissingExtra) as caught:
        parametrize_with_checks([Exact()])
    assert caught.value.install == "pip install pytest"


def test_the_kit_is_imported_only_when_asked_for() -> None:
    code = """
import sys, hgms_core
print([name for name in sys.modules if name.startswith("hgms.testing")])
import hgms.testing
print("pytest" in sys.modules)
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\nFalse\n"
    )


def test_what_is_wrong_with_a_component_at_once() -> None:
    assert "batch" in check_component(Exact())


# --- what a class says of itself
# --------------------------------------------------------------------------------------------------


class NotInOrder(Exact):
    """Knows what it cannot do.

    >>> 1 + 1
    2

    Source: Gauss.
    """

    testing_failures: ClassVar[dict[str, str]] = {
        "batch": "one system at a time",
        "frozen": "no reason at all",
    }


def test_a_class_may_say_what_it_is_not_made_to_pass() -> None:
    assert check_component(NotInOrder()).keys() == check_component(Exact()).keys() - {"batch"} | {
        "frozen"
    }
    assert (
        check_component(NotInOrder())["frozen"]
        == "it passes after all; take it off testing_failures (no reason at all)"
    )
    results = {result.check: (result.fault, result.excuse) for result in hgms_check(NotInOrder)}
    assert results["batch"] == ("", "one system at a time")
    assert results["frozen"][0].startswith("it passes after all")
    rows = {row.id: row.marks for row in parametrize_with_checks([NotInOrder()]).args[1]}
    (mark,) = rows["exact-batch"]
    assert mark.kwargs == {"strict": True, "reason": "one system at a time"}
    assert not rows["exact-docstring"]


@pytest.mark.parametrize(
    ("declared", "code", "place"),
    [
        ({"bacth": "a slip"}, "unknown-check", ("testing_failures", "bacth")),
        ({"batch": ""}, "wrong-value", ("testing_failures", "batch")),
        ("batch", "wrong-type", ("testing_failures",)),
    ],
)
def test_what_it_says_is_checked(declared: Any, code: str, place: tuple[str, ...]) -> None:
    wrong = type("Wrong", (Exact,), {"testing_failures": declared, "__doc__": DOC})
    with rejects(code, f"{__name__}:Wrong", *place) as caught:
        check_component(wrong())
    *_, last = hgms_check(wrong)
    assert caught.value.message in last.fault


def test_a_slip_in_a_method_s_name_is_named() -> None:
    class Slip:
        name: ClassVar[str] = "slip"

        def slove(self, matvec: MatVec, b: Tensor) -> Tensor: ...

    with rejects("wrong-plugin", of=PluginError) as caught:
        list(checks_of(Slip()))
    assert "rename the method slove to solve" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name", ["ridge", "bowl", "sphere", "curved", "wells", "tracking", "mixture"]
)
def test_problems_are_made_where_asked(name: str) -> None:
    """The device ``meta`` computes shapes alone, and stops what is on two devices."""
    with inputs_on("meta"):
        known = getattr(problems, name)()
        problem = getattr(known, "problem", known)
        rows = {
            role: data.batch(None)
            for role, data in {"lower": problem.lower_data, **problem.upper_data}.items()
        }
        leaves = tensors(snapshot([problem.theta0, problem.x0, rows, problem.references]))
        values = [
            problem.g(problem.theta0, problem.x0, rows["lower"]),
            problem.f(problem.theta0, problem.x0, rows["select"]),
        ]
    assert {leaf.device.type for leaf in [*leaves.values(), *values]} == {"meta"}
    assert place().type == "cpu"


def test_systems_and_candidates_are_made_where_asked() -> None:
    with inputs_on("meta"):
        leaves = [solvers.matrix(0.5, 1.5), *tensors(snapshot(selectors.candidates())).values()]
    assert {leaf.device.type for leaf in leaves} == {"meta"}


def test_a_result_elsewhere_than_the_inputs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every, "place", lambda: torch.device("cuda"))
    [check] = [item for item in checks_of(Exact()) if item.name == "precision"]
    assert "is on cpu, the inputs on cuda" in check.fault(Exact())
