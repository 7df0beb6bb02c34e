"""What the tables of wrong Python input are written with."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import hgms.contrib
import hgms.generators.branches
import hgms.generators.penalty
import hgms.generators.search
import hgms.generators.single_loop
import hgms.generators.ula
import hgms.hypergradients
import hgms.methods
import hgms.optim
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
from hgms.config import Budget
from hgms.integrations import OuterSteps, lower_solution
from hgms.runs import RunConfig, RunFolder, RunSettings, run
from hgms_core import ConfigError, Pipeline, Problem

PACKAGES = (
    hgms.optim,  # first: two of its names are also those of an outer optimiser
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
NAMES |= {"OuterSteps": OuterSteps, "lower_solution": lower_solution, "loss": PROBLEM.f}
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


def written(code: str) -> Any:
    return eval(code, dict(NAMES))


def rejected(source: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        written(source)
    # one traceback, not two
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return caught.value
