"""Every built-in component against every check of the conformance kit, and every composition on
a small problem.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from hgms.cli import main
from hgms.runs import RunConfig, run
from hgms.testing import (
    Check,
    checks_of,
    checks_of_kind,
    failures_of,
    instance_of,
    parametrize_with_checks,
)
from hgms.testing.check import check as hgms_check
from hgms_core import Composition, Key, registry
from hgms_core.budget import Budget
from hgms_core.registry import Registry

REGISTRY = Registry.load()
"""Loaded once: that takes some 30 ms, which hundreds of tests would spend on finding what is
installed.
"""
COMPONENTS = REGISTRY.components()
CLASSES = [component for component in COMPONENTS if not isinstance(component.target, Composition)]
# `fixed` keeps a mixture of data sources, which the task below does not have:
# tests/hgms_mix/lm/test_llm_task.py runs it. `theta0` is `uniform` by another name, as
# test_theta0_is_uniform_by_another_name says.
COMPOSITIONS = [
    item.name
    for item in COMPONENTS
    if isinstance(item.target, Composition) and item.name != "theta0"
]
OF_SOURCES = ("fixed", "hg-ms-mixture", "hg-ms-online", "uniform-online")
"""Compositions that need data sources."""
METHODS = [name for name in COMPOSITIONS if name not in OF_SOURCES]
WRAPPERS = ("hg-ms-tilted", "iaptt-gm")
"""Compositions that their classes are asked as."""
HERE = ("hg-ms", "hg-implicit", "hg-baseline", "soba", "v-pbgd", "random-search", "uniform")
"""Compositions that the README's command asks; the rest are in ``extended``, since what they are
made of is asked anyway.
"""
FEW = {"hg-ms-crossfit": {"steps": 2, "warmup": 4}}
"""Lower steps of methods that have no generator to say them."""
EXPECTED = {
    "generator": {
        "branches",
        "trajectory",
        "ula",
        "soba",
        "value-gap",
        "gradient-norm",
        "minimax",
        "dynamic-barrier",
        "fully-first-order",
        "moreau-envelope",
        "value-free",
    },
    "selector": {"best-of-n", "worst", "first"},
    "solver": {
        "cg",
        "minres",
        "neumann",
        "roulette",
        "fixed-point",
        "nystrom",
        "recycled-cg",
        "lancbio",
        "kfac",
        "identity",
        "scipy",
        "linear-operator",
    },
    "hypergradient": {
        "implicit",
        "unrolled",
        "one-step",
        "through-step",
        "sama",
        "averaged",
        "carried",
        "fixed",
    },
    "outer": {
        "sgd",
        "adam",
        "adamw",
        "projected-gradient",
        "exponentiated-gradient",
        "split",
        "torch",
    },
    "task": {
        "quadratic",
        "circle-kink",
        "circle-degenerate",
        "sphere",
        "hyper-cleaning",
        "imbalanced-loss",
        "ridge-cv",
        "logistic-cv",
        "toy-penalty",
    },
    "method": {
        "pipeline",
        "hg-ms-ula",
        "hg-ms",
        "hg-baseline",
        "hg-implicit",
        "uniform",
        "theta0",
        "random-theta",
        "fixed",
        "oracle-clean",
        "oracle-joint",
        "uniform-tilted",
        "validation-only",
        "iaptt-gm",
        "hg-ms-trajectory",
        "soba",
        "fixed-point",
        "amigo",
        "lancbio",
        "stocbio",
        "darts",
        "sama",
        "mixflow",
        "kfac",
        "search",
        "random-search",
        "tpe",
        "v-pbgd",
        "g-pbgd",
        "scalebio",
        "bome",
        "f2sa",
        "meha",
        "pbgd-free",
        "v-pbgd-best-of-n",
        "scalebio-best-of-n",
        "learning-to-reweight",
        "mw-net",
        "doremi",
        "doge",
        "skill-it",
        "aioli",
        "hg-ms-online",
        "uniform-online",
        "small-loss",
        "agreement",
    },
}


def test_everything_promised_is_registered() -> None:
    for kind, names in EXPECTED.items():
        assert names <= {component.name for component in COMPONENTS if component.kind.name == kind}


DEAR = {
    "op-mix-equal-sources",
    "doge-equal-sources",
    "regmix-equal-sources",
    "aioli-equal-sources",
    "flat-branches-wells",
    "crossfit-failure",
    "crossfit-roles",
    "crossfit-resume",
    "crossfit-repeatable",
    "crossfit-records",
    "crossfit-precision",
    "crossfit-budget",
    "crossfit-optimum",
}
"""Checks of classes that take seconds each: in ``extended``, too."""


def asked_of_classes() -> Any:
    names, rows = parametrize_with_checks(
        [instance_of(listed.target, registry=REGISTRY) for listed in CLASSES]
    ).args
    dear = {
        row.id: pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.extended])
        for row in rows
    }
    assert dear.keys() >= DEAR
    return pytest.mark.parametrize(names, [dear[row.id] if row.id in DEAR else row for row in rows])


@asked_of_classes()
def test_conformance(component: Any, check: Check) -> None:
    check(component)


@pytest.mark.parametrize(
    "component", CLASSES, ids=lambda component: f"{component.kind.name}-{component.name}"
)
def test_hgms_check_asks_the_same(
    component: registry.Component, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that every class passes ``hgms check`` as it stands: same instance, same checks, same
    excuses as above.
    """
    looked_at: dict[str, Any] = {}
    monkeypatch.setattr(
        Check, "answer", lambda check, item: looked_at.update({check.name: item}) or ("", "")
    )
    assert isinstance(component.target, type)
    results = {result.check for result in hgms_check(component.target, component.kind, REGISTRY)}
    instance = instance_of(component.target, registry=REGISTRY)
    assert results == {"construction"} | {
        check.name for check in checks_of(instance, component.kind, REGISTRY)
    }
    assert all(item is component.target or item == instance for item in looked_at.values())


def test_no_excuse_is_given_twice_or_in_vain() -> None:
    """An excuse is for what a definition cannot do; whatever solves, chooses or differentiates
    has none.
    """
    excused = {
        f"{component.kind.name} {component.name}": set(
            getattr(component.target, "testing_failures", ())
        )
        for component in CLASSES
    }
    one_step = {"closed-form-ridge", "central-difference"}
    assert {name: checks for name, checks in excused.items() if checks} == {
        "solver identity": {"dense-solve"},
        "selector first": {"permutation"},
        "method doremi": {"optimum"},
        "method random-rows": {"optimum"},
        "hypergradient one-step": one_step,
        "hypergradient through-step": one_step,
        "hypergradient sama": one_step,
        "hypergradient fixed": {
            *one_step,
            "closed-form-bowl",
            "closed-form-sphere",
            "closed-form-sources",
        },
        "hypergradient aligned": {"closed-form-sources"},
        "hypergradient aligned-means": {"closed-form-sources"},
        "outer dual-averaging": {"quadratic", "simplex"},
    }


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_is_asked_as_its_composition(name: str) -> None:
    """The class's own instance, which ``test_conformance`` asks, is the composition's in every
    check.
    """
    composition = REGISTRY.get("method", name).target
    assert isinstance(composition, Composition)
    for check in checks_of_kind("method"):
        assert instance_of(composition.of, registry=REGISTRY) == instance_of(
            composition, check, REGISTRY
        )


@pytest.mark.parametrize("check", checks_of_kind("method"), ids=lambda check: check.name)
@pytest.mark.parametrize(
    "name",
    [
        name if name in HERE else pytest.param(name, marks=pytest.mark.extended)
        for name in COMPOSITIONS
        if name not in WRAPPERS
    ],
)
def test_composition_conforms(name: str, check: Check) -> None:
    """Made for means over thousands of rows, or for language models: some say with which rates
    to be asked (`testing`).
    """
    composition = REGISTRY.get("method", name).target
    fault = check.fault(instance_of(composition, check, REGISTRY))
    if check.name in failures_of(composition, checks_of_kind("method")):
        assert check.name == "optimum"
        assert name in {
            "uniform",
            "random-theta",
            "uniform-tilted",
            "validation-only",
            "pbgd-free",
            "uniform-online",
        }
        before, after = re.match(
            r"the distance was (\S+) at the start and is (\S+) after 60 steps", fault
        ).groups()
        assert before == after, "its θ stays where it is"
    else:
        assert not fault


@pytest.mark.parametrize("name", METHODS)
def test_composition_round_trips_and_steps(name: str) -> None:
    if name == "kfac":
        pytest.importorskip("curvlinops", reason="the solver kfac needs curvlinops")
    composition = REGISTRY.get("method", name).target
    assert isinstance(composition, Composition)
    generator = (
        {"generator": {"steps": 2}} if "steps" in composition.parts.get("generator", ()) else {}
    )
    table = {
        "task": {
            "name": "hyper-cleaning",
            "corruption": 0.4,
            "train_size": 60,
            "validation_size": 30,
            "test_size": 50,
            "hidden": 5,
        },
        "method": {"name": name, **generator, **FEW.get(name, {})},
        "budget": {"outer_steps": 3},
        "run": {"threads": 1},
    }
    config = RunConfig.from_dict(table, registry=REGISTRY)
    assert RunConfig.from_toml(config.to_toml(), registry=REGISTRY) == config
    assert config.method_name == name
    before = torch.random.get_rng_state()
    first, again = (
        run(
            config.method,
            config.task.problem(0, torch.device("cpu"), torch.float32),
            Budget(outer_steps=3),
        )
        for _ in range(2)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert [{**row, "seconds": 0} for row in first.records] == [
        {**row, "seconds": 0} for row in again.records
    ]
    assert first.summary["metrics"]["test_accuracy"] >= 0


@pytest.mark.parametrize("task", sorted(EXPECTED["task"]))
def test_task_is_what_the_protocol_says(task: str) -> None:
    built = RunConfig.from_dict({"task": task, "method": "hg-implicit", "budget": "1 steps"}).task
    problem, same, other = (
        built.problem(seed, torch.device("cpu"), torch.float64) for seed in (0, 0, 1)
    )
    assert set(problem.evaluate(problem.theta0, problem.x0)) == set(built.metrics)
    batch = problem.lower_data.whole
    values = [
        float(drawn.g(drawn.theta0, drawn.x0, drawn.lower_data.whole)) for drawn in (problem, same)
    ]
    assert values[0] == values[1]
    assert problem.g(problem.theta0, problem.x0, batch).dtype == torch.float64
    for role in ("differentiate", "select", "stop"):
        assert problem.f(problem.theta0, problem.x0, problem.upper_data[role].whole).dim() == 0
    if problem.fresh is not None:
        assert not torch.equal(
            *(next(iter(problem.initial(Key(seed)).values())) for seed in (0, 1))
        )
    assert set(other.theta0) == set(problem.theta0)


def test_hgms_check_says_what_a_class_is_not_made_to_pass() -> None:
    result = CliRunner().invoke(main, ["check", "hgms.solvers:Identity"])
    assert result.exit_code == 0, result.output
    assert (
        "  but  dense-solve: expected to fail: it solves nothing: v = scale·b is its definition\n"
        in result.output
    )
    assert "  -    clip: not asked: it has no field clip\n" in result.output
    assert result.output.endswith("28 passed, 1 expected to fail, 2 not asked\n")
    rows = json.loads(
        CliRunner().invoke(main, ["check", "hgms.solvers:Identity", "--json"]).stdout
    )["results"]
    assert {row["check"] for row in rows if row["excuse"]} == {"dense-solve"}
    assert {row["check"] for row in rows if row["skipped"]} == {"clip", "key"}
