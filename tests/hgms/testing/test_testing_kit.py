"""What importing a component's module does, and the decorator that makes tests of the checks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve
from support.helpers import rejects
from support.kit_parts import DOC, Exact, changed
from support.kit_wholes import Line, Runs

from hgms.testing import (
    check_component,
    checks_of,
    imports,
    inputs_on,
    parametrize_with_checks,
    problems,
    selectors,
    solvers,
    tasks,
)
from hgms.testing import every_kind as every
from hgms.testing.check import check as hgms_check
from hgms.testing.check import target_of
from hgms.testing.instances import instance_of
from hgms.testing.kit import Check, place, snapshot, tensors
from hgms_core import MissingExtra, PluginError
from hgms_core.registry import Registry

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


@pytest.mark.extended
def test_what_one_module_does_is_not_seen_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has a fresh copy of the interpreter, also after one that ended it."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {
        "marks": "import sys\nprint(hasattr(sys, 'marked'))\nsys.marked = True\n",
        "ends": "import os\nos.write(2, b'good bye')\nos._exit(3)\n",
        "looks": "import marks, os\nprint(os.environ.get('LATER'))\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert imports.observed("marks")["printed"] == "False\n"
    with pytest.raises(RuntimeError, match="ended with 3: good bye"):
        imports.observed("ends")
    imports._waiting.clear()
    monkeypatch.setenv("LATER", "is seen")
    assert imports.observed("looks")["printed"] == "False\nis seen\n"


# --- the decorator, and what a class says of itself
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


def test_what_cannot_be_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with rejects("wrong-plugin", of=PluginError):
        list(checks_of(SimpleNamespace(name="no-method")))
    with rejects("unknown-check", "expected_failures", "zero-rsh") as caught:
        parametrize_with_checks([Exact()], expected_failures={"zero-rsh": "a slip"})
    assert caught.value.did_you_mean == ("zero-rhs",)
    with rejects("wrong-type", "components", 0):
        parametrize_with_checks([Exact])
    monkeypatch.setitem(sys.modules, "pytest", None)
    with rejects("missing-package", of=MissingExtra) as caught:
        parametrize_with_checks([Exact()])
    assert caught.value.install == "pip install pytest"


def test_a_class_may_say_what_it_is_not_made_to_pass() -> None:
    found = check_component(NotInOrder())
    assert found.keys() == check_component(Exact()).keys() - {"batch"} | {"frozen"}
    said = "it passes after all; take it off testing_failures (no reason at all)"
    results = {result.check: (result.fault, result.excuse) for result in hgms_check(NotInOrder)}
    assert results.keys() == {"construction", *(check.name for check in checks_of(NotInOrder()))}
    assert results["batch"] == ("", "one system at a time")
    assert results["frozen"][0] == found["frozen"] == said
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
    with rejects(code, f"{__name__}:Wrong", *place):
        check_component(wrong())
    assert list(hgms_check(wrong))[-1].fault


def test_inputs_are_made_where_asked() -> None:
    """The device ``meta`` computes shapes alone, and stops what is on two devices."""
    with inputs_on("meta"):
        problem = problems.mixture()
        below, above = problem.lower_data.batch(None), problem.upper_data["select"].batch(None)
        theta, x = problem.theta0, problem.x0
        losses = [problem.g(theta, x, below), problem.f(theta, x, above)]
        made = [theta, x, below, above, losses, solvers.matrix(0.5, 1.5), selectors.candidates()]
        leaves = tensors(snapshot(made)).values()
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    assert place().type == "cpu"


def test_a_result_elsewhere_than_the_inputs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every, "place", lambda: torch.device("cuda"))
    assert "is on cpu, the inputs on cuda" in named("precision", Exact()).fault(Exact())


def test_a_task_may_not_take_too_long_and_a_generator_may_refuse_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "SECONDS", 0.0)
    assert named("smoke", Line()).fault(Line())
    refuses = changed(
        Runs(), propose=lambda own, plain, *inputs: evolve(plain(*inputs), replay=None)
    )
    for name in ("replay", "replay-gradient"):
        assert named(name, refuses).fault(refuses) == ""


OWN_PARTS = '''
import attrs
from hgms_core import Composition, hookimpl

@attrs.frozen(kw_only=True)
class Signs:
    """Steps of one length."""
    name = "signs-of-mine"
    lr: float = 0.1
    def init(self, theta):
        return {}
    def step(self, theta, gradient, state, progress):
        return {name: leaf - self.lr * gradient[name].sign() for name, leaf in theta.items()}, state

class Unfinished:
    name = "unfinished"

MINE = Composition(name="mine-by-signs", summary="Mine.", source="mine", parts={
    "generator": {"name": "branches"}, "selector": {"name": "first"},
    "hypergradient": {"name": "unrolled"},
    "outer": {"name": "signs-of-mine", "lr": 0.2}})

@hookimpl
def hgms_register_outer_optimizers():
    return [Signs, Unfinished]

@hookimpl
def hgms_register_methods():
    return [MINE]
'''


def test_a_composition_of_a_file_has_that_files_parts(tmp_path: Path) -> None:
    """Whatever else is wrong in the file."""
    file, whole = tmp_path / "mine.py", tmp_path / "whole.py"
    file.write_text(OWN_PARTS)
    installed = Registry.load()
    for name in ("MINE", "mine-by-signs"):
        kind, target, registry = target_of(f"{file}:{name}", installed)
        assert kind.name == "method"
        assert instance_of(target, registry=registry).outer.lr == 0.2
    assert installed.find("outer", "signs-of-mine") is None
    whole.write_text(OWN_PARTS.replace("[Signs, Unfinished]", "[Signs]"))
    own = Registry.load([str(whole)])
    assert target_of(f"{whole}:MINE", own)[2] is own, "it is there already"
