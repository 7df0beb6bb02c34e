"""What Python says where a component, a budget or a setting is built wrongly: the same as a
configuration file would be told.

The tables are what is written and what is said. Below them every field of every registered class is
given what it cannot take. (Problems, data, pipelines and hypergradients: test_python_input.py.)
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import field
from support.helpers import rejects

import hgms.contrib
import hgms.generators.branches
import hgms.generators.penalty
import hgms.generators.search
import hgms.generators.single_loop
import hgms.generators.ula
import hgms.hypergradients
import hgms.methods
import hgms.outer
import hgms.selectors
import hgms.solvers
import hgms.tasks.circle
import hgms.tasks.cleaning
import hgms.tasks.quadratic
import hgms_mix.lm
import hgms_mix.methods.less
import hgms_mix.methods.regmix
from hgms.comparison import compare
from hgms.config import frozen, positive
from hgms.integrations import OuterSteps, lower_solution
from hgms.runs import Patience, RunConfig, RunFolder, RunSettings, run
from hgms.testing import instance_of
from hgms_core import Budget, ConfigError, Pipeline, Problem
from hgms_core.registry import Registry

PACKAGES = (
    hgms.generators.branches,
    hgms.hypergradients,
    hgms_mix.methods.less,
    hgms_mix.lm,
    hgms.methods,
    hgms.outer,
    hgms.generators.penalty,
    hgms_mix.methods.regmix,
    hgms.generators.search,
    hgms.selectors,
    hgms.generators.single_loop,
    hgms.solvers,
    hgms.contrib,
    hgms.tasks.circle,
    hgms.tasks.cleaning,
    hgms.tasks.quadratic,
    hgms.generators.ula,
)
PROBLEM = Problem(
    theta0={"t": torch.zeros(1)},
    x0={"x": torch.ones(1)},
    g=lambda theta, x, _: (x["x"] - theta["t"]).square().sum(),
    f=lambda _, x, __: (x["x"] - 2).square().sum(),
)
NAMES: dict[str, Any] = {
    name: getattr(module, name)
    for module in PACKAGES
    for name in (*vars(module), *getattr(module, "__all__", ()))
    if name[0].isupper()
}
NAMES |= {
    "Budget": Budget,
    "Pipeline": Pipeline,
    "RunConfig": RunConfig,
    "RunSettings": RunSettings,
    "problem": PROBLEM,
}
NAMES |= {
    "Patience": Patience,
    "OuterSteps": OuterSteps,
    "lower_solution": lower_solution,
    "loss": PROBLEM.f,
}
NAMES["outer_steps"] = partial(
    OuterSteps,
    f=PROBLEM.f,
    g=PROBLEM.g,
    upper=[{}],
    theta=torch.zeros(1),
    solver=hgms.solvers.CG(),
    optimizer=hgms.outer.Adam(),
)
NAMES |= {
    "run": run,
    "RunFolder": RunFolder,
    "compare": compare,
    "evolve": attrs.evolve,
    "Path": Path,
    "math": math,
    "np": np,
    "torch": torch,
}
NAMES["pipeline"] = Pipeline(
    generator=NAMES["Branches"](),
    selector=NAMES["First"](),
    hypergradient=NAMES["Unrolled"](),
    outer=NAMES["Adam"](),
)

# what is written, the code and the place of the error, and parts of its text: values and remedies
# (a suggestion is `'count'?`)
REFUSED: list[tuple[Any, ...]] = [
    # numbers
    ("Branches(count=2.5)", "wrong-type", ("count",), "2.5"),
    ("Branches(count=4.0)", "wrong-type", ("count",), "use 4"),
    ("Branches(count='4')", "wrong-type", ("count",), "use 4"),
    ("Branches(count=True)", "wrong-type", ("count",), "True"),
    ("Branches(count=None)", "wrong-type", ("count",), "omit"),
    ("Branches(count=0)", "out-of-range", ("count",), "count=0"),
    ("Branches(count=10**30)", "out-of-range", ("count",)),
    ("Branches(batch_size=64.5)", "wrong-type", ("batch_size",), "64.5"),
    ("CG(ridge='1e-3')", "wrong-type", ("ridge",), "use 0.001"),
    ("CG(ridge=-1.0)", "out-of-range", ("ridge",), "ridge=-1.0"),
    ("CG(rtol=math.nan)", "not-finite", ("rtol",), "nan"),
    ("CG(rtol=1 + 2j)", "wrong-type", ("rtol",), "(1+2j)"),
    ("Adam(lr=[0.1])", "wrong-type", ("lr",), "use 0.1"),
    ("Adam(lr=torch.ones(2))", "wrong-type", ("lr",), "a Tensor of shape [2]"),
    ("Adam(lr=torch.ones(1))", "wrong-type", ("lr",), "use 1.0"),
    ("Adam(lr=lambda step: 0.1)", "wrong-type", ("lr",), "the function <lambda>"),
    ("Ula(temperature=10**400)", "out-of-range", ("temperature",)),
    # several numbers
    ("Adam(betas=0.9)", "wrong-type", ("betas",), "0.9"),
    ("Adam(betas=(0.9, 0.99, 0.999))", "wrong-length", ("betas",), "3"),
    ("Adam(betas=(0.9, '0.99'))", "wrong-type", ("betas", 1), "use 0.99"),
    ("Adam(betas=(0.9, 1.0))", "out-of-range", ("betas",), "betas=(0.9, 1.0)"),
    ("Branches(lr_spread=(2, 1))", "wrong-value", ("lr_spread",), "lr_spread=(2.0, 1.0)"),
    ("HyperCleaning(validation_split=(0.5, 0.5))", "wrong-length", ("validation_split",), "2"),
    # words
    ("Implicit(solver=CG(), strategy='vpj')", "unknown-choice", ("strategy",), "'vjp'?"),
    ("Implicit(solver=CG(), strategy=None)", "wrong-type", ("strategy",), "omit"),
    ("Branches(optimizer=3)", "wrong-type", ("optimizer",), "3"),
    ("Branches(keep_graph=1)", "wrong-type", ("keep_graph",), "1"),
    ("Branches(keep_graph='true')", "wrong-type", ("keep_graph",), "use True"),
    ("HyperCleaning(dataset='minst')", "wrong-value", ("dataset",), "dataset='minst'"),
    ("TorchOptimizer(optimizer='RAdm')", "unknown-optimizer", ("optimizer",), "'RAdam'?"),
    ("TorchOptimizer(settings={'lrr': 0.1})", "unknown-option", ("settings", "lrr"), "'lr'?"),
    ("TorchOptimizer(settings=0.1)", "wrong-type", ("settings",), "0.1"),
    ("Branches(optimizer='sdg')", "unknown-choice", ("optimizer",), "'sgd'?", "or a function"),
    # names of arguments
    ("Branches(cuont=3)", "unknown-option", ("cuont",), "'count'?"),
    ("Branches(learning_rate=0.1)", "unknown-option", ("learning_rate",), "'learning_rate'"),
    ("Branches(4, 20)", "positional-argument", (), "use Branches(count=4, steps=20)"),
    ("First('x')", "positional-argument", (), "use First()"),
    ("Implicit()", "missing-option", ("solver",), "a linear solver"),
    ("Implicit(solvr=CG())", "unknown-option", ("solvr",), "'solver'?"),
    # parts
    (
        "Implicit(solver='cg')",
        "wrong-part",
        ("solver",),
        "use CG(), with `from hgms.solvers import CG`",
    ),
    (
        "Implicit(solver='minress')",
        "wrong-part",
        ("solver",),
        "use MINRES(), with `from hgms.solvers import MINRES`",
    ),
    ("Implicit(solver=CG)", "wrong-part", ("solver",), "use CG()"),
    ("Implicit(solver=torch.optim.SGD)", "wrong-part", ("solver",), "the class SGD"),
    ("Implicit(solver=None)", "wrong-part", ("solver",), "None"),
    ("Implicit(solver=First())", "wrong-part", ("solver",), "a selector"),
    ("Implicit(solver=BestOfN)", "wrong-part", ("solver",), "a selector"),
    (
        "Split(upper=torch.optim.SGD, start=Adam())",
        "wrong-part",
        ("upper",),
        "use hgms.outer.TorchOptimizer(optimizer='SGD', settings={…})",
    ),
    ("Split(upper=pipeline, start=Adam())", "wrong-part", ("upper",), "a method"),
    (
        "Search(low=0.0, high=1.0, generator=First(), selector=First())",
        "wrong-part",
        ("generator",),
        "a selector",
    ),
    (
        "evolve(pipeline, outer=torch.optim.Adam)",
        "wrong-part",
        ("outer",),
        "use TorchOptimizer(optimizer='Adam', settings={…})",
    ),
    ("evolve(pipeline, generator=CG)", "wrong-part", ("generator",), "the class CG"),
    # parts of parts
    ("Adam(schedule='cosine')", "wrong-type", ("schedule",), "'cosine'"),
    ("Adam(schedule={'kind': 'cosin'})", "unknown-choice", ("schedule", "kind"), "'cosine'?"),
    ("Adam(schedule={'knid': 'cosine'})", "unknown-option", ("schedule", "knid"), "'kind'?"),
    ("Adam(schedule=Schedule)", "wrong-type", ("schedule",), "use Schedule()"),
    ("Projection(kind='box', low=1.0, high=0.0)", "out-of-range", ("high",), "high=0.0"),
    # wrappers and methods
    ("Tilted(method='hg-ms', tilt=1.0)", "wrong-part", ("method",), "'hg-ms'"),
    ("Tilted(method=pipeline)", "missing-option", ("tilt",), "a number"),
    ("Tilted(method=pipeline, tilt=-1)", "out-of-range", ("tilt",), "tilt=-1.0"),
    ("Tilted(method=Branches(), tilt=1)", "wrong-part", ("method",), "a candidate generator"),
    ("Tilted(method=RegMix(), tilt=1)", "wrong-value", ("method",), "method='regmix'"),
    ("ValidationOnly(method='uniform')", "wrong-part", ("method",), "'uniform'"),
    ("LearnedStart(method=pipeline)", "not-supported", ("learn_start",), "trajectory"),
    ("StartingAt(method=pipeline, mixture=[3, 1])", "wrong-type", ("mixture",), "[3, 1]"),
    (
        "StartingAt(method=pipeline, mixture={'code': '3'})",
        "wrong-type",
        ("mixture", "code"),
        "use 3.0",
    ),
    # language models
    ("BaseModel(path='gpt2', dtype=torch.bfloat16)", "wrong-type", ("dtype",), "use 'bfloat16'"),
    ("Lora(targets='q_proj')", "wrong-type", ("targets",), "use ('q_proj',)"),
    # budgets and settings of runs
    ("Budget('3 stps')", "wrong-budget", (), "'3 steps'?"),
    ("Budget('60')", "wrong-budget", (), "'60'", "'25 steps'"),
    ("Budget(60)", "wrong-budget", (), "60", "'25 steps'"),
    ("Budget('2.5 steps')", "wrong-budget", (), "'2.5 steps'"),
    ("Budget()", "wrong-budget", (), "no limit"),
    ("Budget('3 steps', seconds=3)", "wrong-budget", (), "seconds and outer_steps"),
    ("Budget(steps=3)", "unknown-option", ("steps",), "'outer_steps'?"),
    ("Budget(outer_steps=3.0)", "out-of-range", ("outer_steps",), "outer_steps=3.0"),
    ("Budget(outer_steps='3')", "out-of-range", ("outer_steps",), "outer_steps='3'"),
    ("Budget(seconds=-1)", "out-of-range", ("seconds",), "seconds=-1"),
    ("RunSettings(evalute_every=3)", "unknown-option", ("evalute_every",), "'evaluate_every'?"),
    ("RunSettings(device=0)", "wrong-type", ("device",), "0"),
    ("RunSettings(device=torch.device('cpu'))", "wrong-type", ("device",), "use 'cpu'"),
    ("RunSettings(device='gpu')", "wrong-value", ("device",), "device='gpu'"),
    ("RunSettings(dtype=torch.float64)", "wrong-type", ("dtype",), "use 'float64'"),
    ("RunSettings(compile='yes')", "wrong-type", ("compile",), "'yes'"),
    ("RunSettings(track='wandb')", "wrong-type", ("track",), "use ('wandb',)"),
    # runs
    ("run('hg-mss', problem, '2 steps')", "unknown-method", ("method",), "'hg-ms'?"),
    ("run(Pipeline, problem, '2 steps')", "wrong-type", ("method",), "Pipeline(…)"),
    ("run(CG(), problem, '2 steps')", "wrong-type", ("method",), "the class CG"),
    ("run(problem, pipeline, '2 steps')", "wrong-type", ("problem",), "the class Pipeline"),
    ("run(pipeline, 'quadratic', '2 steps')", "wrong-type", ("problem",), "'quadratic'"),
    ("run({'nam': 'hg-ms'}, problem, '2 steps')", "missing-option", ("method", "name")),
    (
        "run({'name': 'hg-ms', 'outer': {'lrr': 1}}, problem, '2 steps')",
        "unknown-option",
        ("method", "outer", "lrr"),
        "'lr'?",
    ),
    ("run('hg-ms', problem, '2 stps')", "wrong-budget", ("budget",), "'2 steps'?"),
    ("run('hg-ms', problem, 2)", "wrong-type", ("budget",), "2"),
    ("run('hg-ms', problem)", "missing-option", ("budget",), "'60s'"),
    ("run('hg-ms', problem, '2 steps', sed=1)", "unknown-option", ("sed",), "'seed'?"),
    (
        "run('hg-ms', problem, '2 steps', method='uniform')",
        "positional-argument",
        ("method",),
        "method",
    ),
    ("run('hg-ms', problem, '2 steps', 1)", "positional-argument", (), "4"),
    ("run('hg-ms', problem, '2 steps', seed=-1)", "out-of-range", ("seed",), "seed=-1"),
    ("run('hg-ms', problem, '2 steps', seed=1.5)", "wrong-type", ("seed",), "1.5"),
    (
        "run('hg-ms', problem, '2 steps', settings={'evalute_every': 2})",
        "unknown-option",
        ("settings", "evalute_every"),
        "'evaluate_every'?",
    ),
    ("run('hg-ms', problem, '2 steps', settings=2)", "wrong-type", ("settings",), "2"),
    ("run('hg-ms', problem, '2 steps', folder=3)", "wrong-type", ("folder",), "3"),
    ("run('hg-ms', problem, '2 steps', resume='yes')", "wrong-type", ("resume",), "'yes'"),
    ("run('hg-ms', problem, '2 steps', watch='loss')", "wrong-type", ("watch",), "a str"),
    (
        "run('uniform', problem, '1 s', watch=lambda record: 0)",
        "wrong-signature",
        ("watch",),
        "(record)",
    ),
    (
        "run('uniform', problem, '1 s', watch=Patience)",
        "wrong-type",
        ("watch",),
        "the class Patience",
    ),
    ("Patience(metric='loss', steps=0)", "out-of-range", ("steps",), "steps=0"),
    # comparisons
    (
        "compare('quadratc', 'uniform', '2 steps')",
        "unknown-task",
        ("problems", "quadratc", "name"),
        "'quadratic'?",
    ),
    ("compare(pipeline, problem, '2 steps')", "wrong-type", ("problems",), "the class Pipeline"),
    ("compare(lambda seed: 3, 'uniform', '2 steps')", "wrong-result", ("problem",), "an int"),
    ("compare(problem, CG(), '2 steps')", "wrong-type", ("methods",), "the class CG"),
    ("compare(problem, {'mine': Pipeline}, '2 steps')", "wrong-type", ("methods",), "Pipeline(…)"),
    (
        "compare(problem, ['uniform', 'hg-mss'], '2 steps')",
        "unknown-method",
        ("methods", "hg-mss", "name"),
        "'hg-ms'?",
    ),
    (
        "compare(problem, {'name': 'hg-ms', 'outer': CG()}, '2 steps')",
        "unknown-outer-optimiser",
        ("methods", "hg-ms", "outer", "name"),
        "'cg'",
    ),
    ("compare(problem, 'uniform', '2 stps')", "wrong-budget", ("budget",), "'2 steps'?"),
    ("compare(problem, 'uniform', '2 steps', seeds=-1)", "out-of-range", ("seeds",), "seeds=-1"),
    ("compare(problem, 'uniform', '2 steps', seeds=1.5)", "wrong-type", ("seeds",), "1.5"),
    ("compare(problem, 'uniform', '2 steps', seeds=[0, 0])", "wrong-value", ("seeds",), "[0, 0]"),
    ("compare(problem, 'uniform', '2 steps', seeds='3')", "wrong-type", ("seeds",), "use 3"),
    (
        "compare(problem, 'uniform', '2 steps', metod='x')",
        "unknown-option",
        ("metod",),
        "'methods'?",
    ),
    (
        "compare(problem, 'uniform', '2 steps', metric='acuracy')",
        "unknown-metric",
        ("problem", "metric"),
        "'acuracy'",
    ),
    (
        "compare('quadratic', 'uniform', '2 steps', metric='valu')",
        "unknown-metric",
        ("metric",),
        "'value'?",
    ),
    (
        "compare(problem, 'uniform', '2 steps', reference='unifrom')",
        "unknown-method",
        ("reference",),
        "'uniform'?",
    ),
    (
        "compare(problem, 'uniform', '2 steps', run={'evalute_every': 2})",
        "unknown-option",
        ("run", "evalute_every"),
        "'evaluate_every'?",
    ),
    ("compare(problem, 'uniform', '2 steps', jobs='2')", "wrong-type", ("jobs",), "use 2"),
    ("compare(problem, 'uniform', '2 steps', out=3)", "wrong-type", ("out",), "3"),
    (
        "compare(problem, 'uniform', '2 steps', registry='mine.py')",
        "wrong-type",
        ("registry",),
        "'mine.py'",
    ),
    ("RunFolder(3)", "wrong-type", ("path",), "int"),
    ("RunFolder()", "missing-option", ("path",), "a path"),
    # in somebody else's loop
    ("outer_steps(evry=3)", "unknown-option", ("evry",), "'every'?"),
    ("outer_steps(every=2.5)", "wrong-type", ("every",), "2.5"),
    ("outer_steps(every=0)", "out-of-range", ("every",), "every=0"),
    ("outer_steps(solver='cg')", "wrong-part", ("solver",), "'cg'"),
    ("outer_steps(solver=CG)", "wrong-part", ("solver",), "use CG()"),
    ("outer_steps(optimizer='adam')", "wrong-type", ("optimizer",), "'adam'"),
    ("outer_steps(optimizer=torch.optim.Adam)", "wrong-type", ("optimizer",), "the class Adam"),
    ("outer_steps(f=lambda x: x)", "wrong-signature", ("f",), "(theta, x, batch)", "(x)"),
    ("outer_steps(g=0.5)", "wrong-type", ("g",), "0.5"),
    ("outer_steps(upper=3)", "wrong-type", ("upper",), "3"),
    ("outer_steps(strategy='vpj')", "unknown-choice", ("strategy",), "'vjp'?"),
    (
        "lower_solution(loss, torch.ones(2), torch.ones(2), solver=CG(), startegy='jvp')",
        "unknown-option",
        ("startegy",),
        "'strategy'?",
    ),
    (
        "lower_solution(loss, torch.ones(2), torch.ones(2), solver=CG(), report=3)",
        "wrong-type",
        ("report",),
        "3",
    ),
]

# what is written, and the codes and places of all errors
SEVERAL: list[tuple[str, list[tuple[str, tuple[str, ...]]]]] = [
    ("Split(upper=Adam, start=CG())", [("wrong-part", ("upper",)), ("wrong-part", ("start",))]),
    (
        "SourceMixture(model={'path': 3}, sources={}, validation={})",
        [
            ("wrong-type", ("model", "path")),
            ("missing-option", ("sources",)),
            ("missing-option", ("validation",)),
        ],
    ),
    (
        "Branches(optimizer='sdg', lr=math.nan, count=-1, betas=3)",
        [
            ("unknown-choice", ("optimizer",)),
            ("not-finite", ("lr",)),
            ("wrong-type", ("betas",)),
            ("out-of-range", ("count",)),
        ],
    ),
    (
        "RunConfig(task=Quadratic, method='hg-ms', budget='3 stps', seed=-1)",
        [
            ("wrong-part", ("task",)),
            ("wrong-part", ("method",)),
            ("wrong-budget", ("budget",)),
            ("out-of-range", ("seed",)),
        ],
    ),
    ("Patience()", [("missing-option", ("metric",)), ("missing-option", ("steps",))]),
    (
        "compare('uniform', 'quadratic', '2 steps')",
        [
            ("unknown-task", ("problems", "uniform", "name")),
            ("unknown-method", ("methods", "quadratic", "name")),
        ],
    ),
    (
        "OuterSteps(f=loss)",
        [
            ("missing-option", ("g",)),
            ("missing-option", ("upper",)),
            ("missing-option", ("theta",)),
            ("missing-option", ("solver",)),
            ("missing-option", ("optimizer",)),
        ],
    ),
]

TAKEN = [
    (
        "Adam(schedule={'kind': 'cosine', 'final': 0.1})",
        "Adam(schedule=Schedule(kind='cosine', final=0.1))",
    ),
    ("Branches(count=np.int64(3), lr=np.float32(0.5))", "Branches(count=3, lr=0.5)"),
    ("Branches(lr_spread=[0.5, 2])", "Branches(lr_spread=(0.5, 2.0))"),
    ("Branches(lr_spread=np.array([0.5, 2]))", "Branches(lr_spread=(0.5, 2.0))"),
    ("Adam(lr=1, betas=torch.tensor([0.5, 0.75]))", "Adam(lr=1.0, betas=(0.5, 0.75))"),
    ("CG(max_steps=torch.tensor(7), ridge=torch.tensor(0.5))", "CG(max_steps=7, ridge=0.5)"),
    (
        "HyperCleaning(validation_split=[0.6, 0.2, 0.2])",
        "HyperCleaning(validation_split=(0.6, 0.2, 0.2))",
    ),
    (
        "TorchOptimizer(settings={'betas': [np.float64(0.5), 0.9]})",
        "TorchOptimizer(settings={'betas': (0.5, 0.9)})",
    ),
    ("BaseModel(path=Path('models') / 'small')", "BaseModel(path='models/small')"),
    ("RunSettings(out=Path('elsewhere'))", "RunSettings(out='elsewhere')"),
    ("Budget('3 steps')", "Budget(outer_steps=3)"),
    ("Budget(Budget('1 min'))", "Budget(seconds=60.0)"),
    ("Budget(outer_steps=np.int64(3))", "Budget(outer_steps=3)"),
    ("RunConfig(task=Quadratic(), method=pipeline, budget='3 steps').budget", "Budget('3 steps')"),
]


def written(code: str) -> Any:
    return eval(code, dict(NAMES))


def rejected(source: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        written(source)
    # one traceback, not two
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return caught.value


@pytest.mark.parametrize("row", REFUSED, ids=[row[0] for row in REFUSED])
def test_what_is_said(row: tuple[Any, ...]) -> None:
    source, code, place, *shown = row
    error = rejected(source)
    assert (error.code, error.place) == (code, place)
    assert [part for part in shown if part not in str(error)] == []


@pytest.mark.parametrize(("source", "errors"), SEVERAL, ids=[source for source, _ in SEVERAL])
def test_all_errors_are_reported_at_once(
    source: str, errors: list[tuple[str, tuple[str, ...]]]
) -> None:
    assert [(error.code, error.place) for error in rejected(source).errors] == errors


@pytest.mark.parametrize(("code", "same"), TAKEN, ids=[code for code, _ in TAKEN])
def test_what_is_taken(code: str, same: str) -> None:
    value = written(code)
    expected = written(same)
    assert value == expected
    assert repr(value) == repr(expected)  # the same types, too


def test_the_table_of_the_page_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "bad-input.md").read_text(
        encoding="utf-8"
    )
    rows = re.findall(r"^\| `(\w+\(.*\))` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 13
    for code, message in rows:
        text = "; ".join(rejected(code).lines())
        assert text[: len(message)] == message


def test_a_function_solves_linear_systems() -> None:
    solver = written("Implicit(solver=lambda matvec, b: b / 2)").solver
    assert solver.solve(lambda v: 2 * v, torch.ones(3)).value.tolist() == [0.5] * 3


# --- every field of every registered class
# --------------------------------------------------------------------------------------------------


def registered() -> dict[str, type]:
    """The classes of components, and those of objects in their fields."""
    components = Registry.load().components()
    classes: list[Any] = [
        getattr(component.target, "of", component.target) for component in components
    ]
    hints = [
        typing.get_type_hints(cls)[part.name]
        for cls in classes
        for part in attrs.fields(cls)
        if part.init
    ]
    inner = [part for hint in hints for part in (hint, *typing.get_args(hint))]
    classes += [
        part for part in inner if isinstance(part, type) and attrs.has(part) and part not in classes
    ]
    return {cls.__name__: cls for cls in classes if cls.__module__.partition(".")[0] != "hgms_core"}


CLASSES = registered()
BASES = {"Source": {"path": "rows.jsonl"}, "BaseModel": {"path": "gpt2"}}

WRONG: dict[str, Any] = {
    "object": object(),
    "nan": math.nan,
    "list": [object()],
    "matrix": np.zeros((2, 2)),
    "huge": 10**400,
    "None": None,
    "True": True,
    "-1": -1,
    "-1.5": -1.5,
    "string": "nonsense",
    "dictionary": {"nonsense": 1},
    "class": dict,
}
FITS = {
    "None": "None|Optional",
    "True": "bool",
    "string": "str",
    "dictionary": "Mapping",
    "class": "Callable",
}
"""What a type must name for the wrong value to be a right one."""
SIGNED = {
    "CircleKink.low",
    "CircleDegenerate.low",
    "Projection.low",
    "Projection.high",
    "Search.low",
    "Search.high",
    "NystromCG.seed",
    "Roulette.seed",
    "Less.projection_seed",
    "Source.shuffle_seed",
    "BaseModel.seed",
    "HyperCleaning.theta0",
    "LogisticCv.theta0",
}
"""Numbers that may be negative; `test_negative_numbers_work` uses them."""


def arguments(cls: type) -> dict[str, Any]:
    base = cls(**BASES[cls.__name__]) if cls.__name__ in BASES else instance_of(cls)
    return {part.alias: getattr(base, part.name) for part in attrs.fields(cls) if part.init}


def outcome(cls: type, values: Mapping[str, Any]) -> Any:
    """The object with these arguments, or the error."""
    try:
        return cls(**values)
    except ConfigError as error:
        return error


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_field_refuses_what_it_cannot_take(cls: type) -> None:
    known = arguments(cls)
    hints = typing.get_type_hints(cls)
    for part in attrs.fields(cls):
        place = f"{cls.__name__}.{part.alias}"
        for label, value in WRONG.items() if part.init else ():
            built = outcome(cls, {**known, part.alias: value})
            if isinstance(built, ConfigError):
                text = str(built)
                named = {error.place[0] for error in built.errors if error.place}
                # two fields that exclude each other have one place
                exclude = built.code == "conflicting-options" and part.alias in built.message
                assert part.alias in named or exclude, (place, label, text)
                assert len(built.lines()[0]) < 400, (place, label, text)
            else:
                fits = (
                    place in SIGNED
                    if label.startswith("-1")
                    else re.search(FITS.get(label, "$^"), str(hints[part.name]))
                )
                assert fits, f"{place} takes {value!r}"
                assert getattr(built, part.name) == value


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_number_may_be_numpy_s_or_torch_s(cls: type) -> None:
    known = arguments(cls)
    numbers = {name: value for name, value in known.items() if type(value) in (int, float, bool)}
    base = cls(**known)
    for library in (np.asarray, torch.tensor):
        same = cls(**{**known, **{name: library(value) for name, value in numbers.items()}})
        if library is np.asarray:
            assert same == base
        for name, value in numbers.items():
            stored = getattr(same, name)
            assert type(stored) is type(value)
            assert stored == pytest.approx(value, rel=1e-6)  # a tensor is in float32


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_name_of_an_argument_is_suggested(cls: type) -> None:
    known = arguments(cls)
    for name in known:
        others = {key: value for key, value in known.items() if key != name}
        with rejects("unknown-option", f"{name}_", of=ConfigError) as caught:
            cls(**others, **{f"{name}_": known[name]})
        (suggestion,) = caught.value.did_you_mean
        assert suggestion.startswith(name)
    with rejects("positional-argument", of=ConfigError):
        cls(object())


def test_negative_numbers_work() -> None:
    theta = {"theta": torch.tensor([-7.0])}
    assert written("Projection(kind='box', low=-1.5, high=-1)").apply(theta)["theta"].item() == -1.5
    for kind in ("CircleKink", "CircleDegenerate"):
        problem = written(f"{kind}(low=-1.5)").problem(0, torch.device("cpu"), torch.float32)
        assert problem.project(theta)["theta"].item() == -1.5
    for solver in ("NystromCG(seed=-1)", "Roulette(seed=-1)"):
        assert torch.isfinite(written(solver).solve(lambda v: v / 2, torch.ones(3)).value).all()


# --- classes of other people
# --------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Mine:
    """As a third party writes one: a class of attrs with one import of ours."""

    lr: float = field(default=0.1, validator=positive)
    later: NotImported | None = None  # type: ignore[name-defined]  # noqa: F821
    at: int = field(default=0, converter=int)

    @lr.validator
    def _small(self, _attribute: object, value: float) -> None:
        if value > 1:
            raise ValueError(f"'lr' must be small: {value}")


def test_a_class_of_somebody_else() -> None:
    with rejects("unknown-option", "lrr", of=ConfigError) as caught:
        Mine(lrr=3)  # type: ignore[call-arg]
    assert caught.value.did_you_mean == ("lr",)
    with rejects("wrong-value", "lr", of=ConfigError) as caught:
        Mine(lr=3)
    assert caught.value.message == "'lr' must be small: 3"
    assert Mine(later=object(), at="3").at == 3
    assert attrs.evolve(Mine(), lr=0.5) == Mine(lr=0.5)
    assert hash(Mine()) == hash(Mine())
    assert "Mine" in Mine()._repr_html_()  # type: ignore[attr-defined]


def test_a_mistake_in_a_class_keeps_its_traceback() -> None:
    @frozen(kw_only=True)
    class Broken:
        rate: float = 0.1

        def __attrs_post_init__(self) -> None:
            len(self.rate)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        Broken()


def test_positions_are_names_where_a_class_takes_them() -> None:
    @frozen
    class Point:
        x: float
        names: Mapping[str, int] = field(factory=dict)

    assert Point(1, dict[str, Any](a=np.int64(2))) == Point(x=1.0, names={"a": 2})
    with rejects("wrong-type", "names", "a", of=ConfigError):
        Point(1, dict[str, Any](a=2.5))
