"""Every built-in component against the conformance kit, and every composition on a small problem.

By default the classes take small settings and leave out the checks that take many outer steps; the
tier ``extended`` asks the rest, with the settings that the classes name themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner

from hgms.cli import main
from hgms.config import Budget
from hgms.plugins import Registry, registry
from hgms.runs import RunConfig, run
from hgms.testing import checks_of, checks_of_kind, failures_of, imports, instance_of, verdict
from hgms_core import Composition

REGISTRY = Registry.load()
"""Loaded once: that takes some 30 ms."""
COMPONENTS = REGISTRY.components()
CLASSES = {
    f"{item.kind.name}-{item.name}": item
    for item in COMPONENTS
    if not isinstance(item.target, Composition)
}
COMPOSITIONS = [item.name for item in COMPONENTS if isinstance(item.target, Composition)]
# `fixed` keeps a mixture of data sources: tests/hgms_mix/lm/test_llm_task.py runs it
OF_SOURCES = ("fixed", "hg-ms-mixture", "hg-ms-online", "uniform-online")
"""Compositions that need data sources."""
HERE = ("hg-ms", "soba", "v-pbgd", "uniform")
"""Compositions of the default tier; what the others are made of is asked anyway."""
LONG = {"failure", "optimum", "wells"}
"""Checks of many outer steps."""
USED = {
    "generator-branches",
    "hypergradient-implicit",
    "method-pipeline",
    "outer-adam",
    "outer-exponentiated-gradient",
    "selector-best-of-n",
    "solver-cg",
    "task-quadratic",
}
"""Classes that the default tier uses; the others it only looks at: they have tests of their own,
and `extended` uses them.
"""
STAY = {
    "theta0",
    "uniform",
    "random-theta",
    "uniform-tilted",
    "validation-only",
    "pbgd-free",
    "uniform-online",
}
"""Compositions whose θ stays where it is."""
SMALL = {"steps": 4, "count": 3, "warmup": 4}
EXPECTED = {
    "generator": (
        "branches trajectory ula soba value-gap gradient-norm minimax dynamic-barrier "
        "fully-first-order moreau-envelope value-free"
    ),
    "selector": "best-of-n worst first",
    "solver": ("cg minres neumann roulette fixed-point nystrom recycled-cg lancbio kfac identity"),
    "hypergradient": "implicit unrolled one-step through-step sama averaged carried fixed",
    "outer": "sgd adam adamw projected-gradient exponentiated-gradient split torch",
    "task": (
        "quadratic circle-kink circle-degenerate sphere hyper-cleaning imbalanced-loss ridge-cv "
        "logistic-cv toy-penalty"
    ),
    "method": (
        "pipeline hg-ms-ula hg-ms hg-baseline hg-implicit uniform theta0 random-theta fixed "
        "oracle-clean oracle-joint uniform-tilted validation-only iaptt-gm hg-ms-trajectory soba "
        "fixed-point amigo lancbio stocbio darts sama mixflow kfac search random-search tpe v-pbgd "
        "g-pbgd scalebio bome f2sa meha pbgd-free v-pbgd-best-of-n scalebio-best-of-n "
        "learning-to-reweight mw-net doremi doge skill-it aioli hg-ms-online uniform-online "
        "small-loss agreement out-of-fold-filter auto"
    ),
}


for item in CLASSES.values():  # imported together in the check `import`: alone takes 0.2 s each
    if item.target.__module__.startswith("hgms."):
        imports.announce(item.target.__module__)


def test_everything_promised_is_registered() -> None:
    for kind, names in EXPECTED.items():
        assert set(names.split()) <= {item.name for item in COMPONENTS if item.kind.name == kind}


def small(component: Any) -> Any:
    """The component with few steps and candidates, in its parts too."""
    values = {}
    for attribute in attrs.fields(type(component)):
        value = getattr(component, attribute.name)
        if attrs.has(type(value)):
            values[attribute.alias] = small(value)
        elif isinstance(value, int) and attribute.name in SMALL:
            values[attribute.alias] = min(value, SMALL[attribute.name])
    return attrs.evolve(component, **values)


def settings(listed: registry.Component) -> tuple[Any, Any]:
    """The instance that the class names, and a cheaper one, on which the short checks pass."""
    own = instance_of(listed.target, registry=REGISTRY)
    if listed.name == "fixed-point":
        return own, attrs.evolve(own, lr=0.5)
    return own, own if listed.kind.name == "solver" else small(own)


def faults(
    listed: registry.Component, component: Any, leave: Sequence[str] | set[str]
) -> dict[str, str]:
    checks = list(checks_of(component, listed.kind, REGISTRY))
    expected = failures_of(listed.target, checks)
    found = {
        check.name: verdict(check, component, expected).fault
        for check in checks
        if check.name not in leave
    }
    assert found
    return {name: fault for name, fault in found.items() if fault}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_passes_the_short_checks(name: str) -> None:
    listed = CLASSES[name]
    component = settings(listed)[1]
    leave = LONG - {"optimum"} if name == "method-pipeline" else LONG
    if name not in USED:
        checks = [check.name for check in checks_of(component, listed.kind, REGISTRY)]
        leave = {*checks[checks.index("import") :]}
    assert faults(listed, component, leave) == {}


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_passes_what_the_default_tier_leaves_out(name: str) -> None:
    listed = CLASSES[name]
    own, cheap = settings(listed)
    asked = {check.name for check in checks_of(own, listed.kind, REGISTRY)}
    leave = asked - LONG
    assert asked == leave or faults(listed, own, leave) == {}
    assert name in USED or faults(listed, cheap, LONG) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_class_passes_all_checks_with_its_own_settings(name: str) -> None:
    assert faults(CLASSES[name], settings(CLASSES[name])[0], ()) == {}


def test_only_definitions_excuse_failures() -> None:
    """Whatever solves, chooses or differentiates has no excuse."""
    one_step = {"closed-form-ridge", "central-difference"}
    sources = {"closed-form-sources"}
    excused = {
        name: set(getattr(item.target, "testing_failures", ())) for name, item in CLASSES.items()
    }
    assert {name: checks for name, checks in excused.items() if checks} == {
        "solver-identity": {"dense-solve"},
        "selector-first": {"permutation"},
        "method-doremi": {"optimum"},
        "method-random-rows": {"optimum"},
        "hypergradient-one-step": one_step,
        "hypergradient-through-step": one_step,
        "hypergradient-sama": one_step,
        "hypergradient-fixed": one_step | sources | {"closed-form-bowl", "closed-form-sphere"},
        "hypergradient-aligned": sources,
        "hypergradient-aligned-means": sources,
        "outer-dual-averaging": {"quadratic", "simplex"},
    }


def few(names: Sequence[str]) -> list[Any]:
    """Names as parameters: those of the default tier, and the others in ``extended``."""
    return [
        name if name in HERE else pytest.param(name, marks=pytest.mark.extended) for name in names
    ]


@pytest.mark.parametrize("name", few(COMPOSITIONS))
def test_a_composition_passes_the_short_checks(name: str) -> None:
    composition = REGISTRY.get("method", name).target
    for check in checks_of_kind("method"):
        if check.name not in LONG:
            assert check.fault(small(instance_of(composition, REGISTRY))) == ""


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize(
    "of",
    [
        pytest.param({"optimum"}, marks=pytest.mark.extended, id="optimum"),
        pytest.param(LONG - {"optimum"}, marks=pytest.mark.nightly, id="others"),
    ],
)
def test_a_composition_passes_the_long_checks(name: str, of: set[str]) -> None:
    """Made for means over thousands of rows, or for language models: some say with which rates
    to be asked (`testing`).
    """
    composition = REGISTRY.get("method", name).target
    checks = [check for check in checks_of_kind("method") if check.name in of]
    found = {check.name: check.fault(instance_of(composition, REGISTRY)) for check in checks}
    if "optimum" in failures_of(composition, checks_of_kind("method")) and "optimum" in found:
        assert name in STAY
        before, after = re.match(
            r"the distance was (\S+) at the start and is (\S+) after 60 steps", found.pop("optimum")
        ).groups()
        assert before == after
    assert not any(found.values()), found


@pytest.mark.parametrize("name", few([name for name in COMPOSITIONS if name not in OF_SOURCES]))
def test_a_composition_round_trips_and_repeats(name: str) -> None:
    if name == "kfac":
        pytest.importorskip("curvlinops", reason="the solver kfac needs curvlinops")
    method: dict[str, Any] = {"name": name}
    if name == "hg-ms-crossfit":  # has no generator to say its lower steps
        method |= {"steps": 2, "warmup": 4}
    elif "steps" in REGISTRY.get("method", name).target.parts.get("generator", ()):
        method["generator"] = {"steps": 2}
    sizes = {"train_size": 60, "validation_size": 30, "test_size": 50, "hidden": 5}
    task = {"name": "hyper-cleaning", "corruption": 0.4, **sizes}
    table = {"task": task, "method": method, "budget": {"outer_steps": 2}}
    config = RunConfig.from_dict(table, registry=REGISTRY)
    assert RunConfig.from_toml(config.to_toml(), registry=REGISTRY) == config
    problem = config.task.problem(0, torch.device("cpu"), torch.float32)
    before = torch.random.get_rng_state()
    first, again = (run(config.method, problem, Budget(outer_steps=2)) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    rows, same = ([{**row, "seconds": 0} for row in each.records] for each in (first, again))
    assert rows == same
    assert first.summary["metrics"]["test_accuracy"] >= 0


def test_hgms_check_tells_excuses_and_skips_from_faults() -> None:
    result = CliRunner().invoke(main, ["check", "hgms.solvers:Identity", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    told = {kind: {row["check"] for row in rows if row[kind]} for kind in ("excuse", "skipped")}
    assert told == {"excuse": {"dense-solve"}, "skipped": {"clip", "key"}}
    assert not any(row["fault"] for row in rows)
