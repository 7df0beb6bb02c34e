"""What importing a component's module does, and the decorator that makes tests of the checks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.helpers import rejects
from support.kit_parts import DOC, Exact

import hgms_core
from hgms.plugins import KINDS
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
from hgms.testing import class_checks as every
from hgms.testing.check import check as hgms_check
from hgms.testing.kit import Check, difference, place, snapshot, tensors
from hgms_core.capabilities import Randomized, Recycles
from hgms_core.errors import PluginError

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
def test_a_module_that_ends_its_interpreter_is_told_and_another_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, fresh in {"_waiting": set(), "_seen": {}}.items():
        monkeypatch.setattr(imports, name, fresh)
    (tmp_path / "ends.py").write_text("import os\nos.write(2, b'last word')\nos._exit(3)")
    (tmp_path / "goes_on.py").write_text("print('here')")
    with pytest.raises(RuntimeError) as caught:
        imports.observe("ends")
    assert "3: " in str(caught.value)
    assert "last word" in str(caught.value)
    imports._waiting.clear()
    report = imports.observe("goes_on")
    assert (report["error"], report["printed"]) == ("", "here\n")
    assert imports.observe("goes_on") is report, "it is asked once"


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


def test_what_cannot_be_checked_is_refused() -> None:
    with rejects("wrong-plugin", of=PluginError):
        list(checks_of(SimpleNamespace(name="no-method")))
    with rejects("unknown-check", "expected_failures", "zero-rsh") as caught:
        parametrize_with_checks([Exact()], expected_failures={"zero-rsh": "a slip"})
    assert caught.value.did_you_mean == ("zero-rhs",)
    with rejects("wrong-type", "components", 0):
        parametrize_with_checks([Exact])


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


@hgms_core.component
class Copies:
    """Two copies of the start. ``progress`` is required, as in the protocol."""

    name = "copies"

    def init(self, problem: Any, key: Any) -> Any:
        return {"x": problem.x0}

    def propose(self, problem: Any, theta: Any, start: Any, key: Any, progress: float) -> Any:
        return hgms_core.Candidates(x=hgms_core.repeat(start["x"], 2))

    def carry(self, start: Any, candidates: Any, index: Any, key: Any, problem: Any) -> Any:
        return {"x": candidates.at(index)}


def test_a_generator_may_require_progress() -> None:
    for name in ("candidates", "state", "repeatable"):
        assert named(name, Copies()).fault(Copies()) == ""


@pytest.mark.parametrize(
    ("body", "code", "member"),
    [
        ({"with_key": lambda own, key: own}, "undeclared-capability", "with_key"),
        ({"capabilities": frozenset({Recycles})}, "missing-member", "solve_from"),
        ({"capabilities": frozenset({Randomized}), "with_key": lambda own, key: own}, "", ""),
        ({"capabilities": property(lambda own: frozenset()), "with_key": print}, "", ""),
    ],
)
def test_a_capability_is_declared_if_and_only_if_its_members_exist(
    body: dict[str, Any], code: str, member: str
) -> None:
    faults = every.capability_faults(type("Changed", (Exact,), body), KINDS["solver"])
    assert [(fault.code, fault.place) for fault in faults] == [(code, ("capabilities",))] * bool(
        code
    )
    assert all(member in fault.message for fault in faults)


@pytest.mark.parametrize(
    ("wanted", "came"),
    [({3: 1}, {"3": 1}), ({"a": []}, {}), ({"a": []}, {"a": {}}), ([1], {"0": 1})],
)
def test_values_of_another_shape_differ(wanted: Any, came: Any) -> None:
    assert difference(wanted, came)
    assert not difference(wanted, wanted)
