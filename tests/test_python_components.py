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

SOLVER = "a linear solver (an object with solve)"
METHOD = "a method (an object with init, result, step)"
GENERATOR = "a candidate generator (an object with carry, init, propose)"
OUTER = "an outer optimiser (an object with init, step)"

# what is written, and what is said: all of it, or as far as the …
REFUSED = [
    # numbers
    ("Branches(count=2.5)", "expected an integer, got 2.5 @ Branches.count"),
    ("Branches(count=4.0)", "expected an integer, got 4.0; write 4 @ Branches.count"),
    ("Branches(count='4')", "expected an integer, got '4'; write 4 @ Branches.count"),
    ("Branches(count=True)", "expected an integer, got True @ Branches.count"),
    (
        "Branches(count=None)",
        "expected an integer, got None; leave it out for the default @ Branches.count",
    ),
    ("Branches(count=0)", "'count' must be > 0: 0 @ Branches.count"),
    (
        "Branches(count=10**30)",
        "expected an integer of at most 64 bits, got a larger one @ Branches.count",
    ),
    ("Branches(batch_size=64.5)", "expected an integer or None, got 64.5 @ Branches.batch_size"),
    ("CG(ridge='1e-3')", "expected a number, got '1e-3'; write 0.001 @ CG.ridge"),
    ("CG(ridge=-1.0)", "'ridge' must be >= 0: -1.0 @ CG.ridge"),
    ("CG(rtol=math.nan)", "expected a number, got nan @ CG.rtol"),
    ("CG(rtol=1 + 2j)", "expected a number, got (1+2j) @ CG.rtol"),
    ("Adam(lr=[0.1])", "expected a number, got [0.1]; write 0.1 @ Adam.lr"),
    ("Adam(lr=torch.ones(2))", "expected a number, got a Tensor of shape [2] @ Adam.lr"),
    ("Adam(lr=torch.ones(1))", "expected a number, got a Tensor of shape [1]; write 1.0 @ Adam.lr"),
    ("Adam(lr=lambda step: 0.1)", "expected a number, got the function <lambda> @ Adam.lr"),
    (
        "Ula(temperature=10**400)",
        "expected a number, got an int, which is too large for one @ Ula.temperature",
    ),
    # several numbers
    ("Adam(betas=0.9)", "expected 2 values (a number, a number), got 0.9 @ Adam.betas"),
    (
        "Adam(betas=(0.9, 0.99, 0.999))",
        "expected 2 values (a number, a number), got 3 of them @ Adam.betas",
    ),
    ("Adam(betas=(0.9, '0.99'))", "expected a number, got '0.99'; write 0.99 @ Adam.betas[1]"),
    ("Adam(betas=(0.9, 1.0))", "'betas' must be two numbers in [0, 1): (0.9, 1.0) @ Adam.betas"),
    (
        "Branches(lr_spread=(2, 1))",
        "a spread is two positive factors (low, high) with low <= high: (2.0, 1.0) @…",
    ),
    (
        "HyperCleaning(validation_split=(0.5, 0.5))",
        "expected 3 values (a number, a number, a number), got 2 of them @…",
    ),
    # words
    (
        "Implicit(solver=CG(), strategy='vpj')",
        "unknown choice 'vpj'; did you mean 'vjp'? @ Implicit.strategy\n  available:…",
    ),
    (
        "Implicit(solver=CG(), strategy=None)",
        "expected 'vjp' or 'jvp' or 'difference', got None; leave it out for the…",
    ),
    ("Branches(optimizer=3)", "expected 'sgd' or 'adamw'…"),
    ("Branches(keep_graph=1)", "expected True or False, got 1 @ Branches.keep_graph"),
    (
        "Branches(keep_graph='true')",
        "expected True or False, got 'true'; write True @ Branches.keep_graph",
    ),
    (
        "HyperCleaning(dataset='minst')",
        "'dataset' must be digits, mnist, idx:FOLDER, npz:FILE or hub:NAME[@REVISION]:…",
    ),
    (
        "TorchOptimizer(optimizer='RAdm')",
        "unknown optimiser of torch.optim 'RAdm'; did you mean 'RAdam'? @…",
    ),
    (
        "TorchOptimizer(settings={'lrr': 0.1})",
        "unknown setting of Adam 'lrr'; did you mean 'lr'? @ TorchOptimizer…",
    ),
    (
        "TorchOptimizer(settings=0.1)",
        "expected a dictionary (True or False or an integer or a number or a string or a list…",
    ),
    (
        "Branches(optimizer='sdg')",
        (
            "unknown choice 'sdg'; did you mean 'sgd'? @ Branches.optimizer\n"
            "  available: adamw, sgd, or a function"
        ),
    ),
    # names of arguments
    (
        "Branches(cuont=3)",
        (
            "unknown argument 'cuont'; did you mean 'count'? @ Branches\n"
            "  available: accumulate, batch_size,…"
        ),
    ),
    (
        "Branches(learning_rate=0.1)",
        "unknown argument 'learning_rate'; no close match. @ Branches\n  available: accumulate,…",
    ),
    (
        "Branches(4, 20)",
        (
            "Branches takes its arguments by name, and got 2 by position\n"
            "  write Branches(count=4, steps=20)"
        ),
    ),
    (
        "First('x')",
        "First takes its arguments by name, and got 1 by position\n  it takes no arguments",
    ),
    ("Implicit()", f"missing: {SOLVER} @ Implicit.solver"),
    (
        "Implicit(solvr=CG())",
        "unknown argument 'solvr'; did you mean 'solver'? @ Implicit\n  available: batch_size,…",
    ),
    # parts
    (
        "Implicit(solver='cg')",
        (
            f"expected {SOLVER}, got 'cg' @ Implicit.solver\n"
            "  write CG(), with `from hgms.solvers import…"
        ),
    ),
    (
        "Implicit(solver='minress')",
        f"expected {SOLVER}, got 'minress' @ Implicit.solver\n  write MINRES(), with `from…",
    ),
    (
        "Implicit(solver=CG)",
        f"expected {SOLVER}, got the class CG; write CG() for an object of it @ Implicit.solver",
    ),
    (
        "Implicit(solver=torch.optim.SGD)",
        f"expected {SOLVER}, got the class SGD @ Implicit.solver\n  available: CG,…",
    ),
    (
        "Implicit(solver=None)",
        (
            f"expected {SOLVER}, got None @ Implicit.solver\n"
            "  available: CG, FixedPoint, Identity, KFAC,…"
        ),
    ),
    (
        "Implicit(solver=First())",
        f"expected {SOLVER}, got First(), which is a selector @ Implicit.solver\n  available: CG,…",
    ),
    (
        "Implicit(solver=BestOfN)",
        f"expected {SOLVER}, got the class BestOfN, which is a selector @ Implicit.solver…",
    ),
    (
        "Split(upper=Adam, start=CG())",
        f"2 errors in Split:\n  expected {OUTER}, got the class Adam; write Adam() for an…",
    ),
    (
        "Split(upper=torch.optim.SGD, start=Adam())",
        f"expected {OUTER}, got the class SGD @ Split.upper\n  write…",
    ),
    (
        "Split(upper=pipeline, start=Adam())",
        f"expected {OUTER}, got a Pipeline, which is a method @ Split.upper…",
    ),
    (
        "Search(low=0.0, high=1.0, generator=First(), selector=First())",
        f"expected {GENERATOR}, got First(), which is a…",
    ),
    (
        "evolve(pipeline, outer=torch.optim.Adam)",
        f"expected {OUTER}, got torch's Adam @ Pipeline.outer\n  it holds its own…",
    ),
    (
        "evolve(pipeline, generator=CG)",
        "expected a candidate generator (an object with init, propose, carry), got the class…",
    ),
    # parts of parts
    (
        "Adam(schedule='cosine')",
        (
            "expected an object of Schedule or a dictionary of its arguments (kind, final, "
            "decay_steps,…"
        ),
    ),
    (
        "Adam(schedule={'kind': 'cosin'})",
        "unknown choice 'cosin'; did you mean 'cosine'? @ Adam.schedule.kind\n  available:…",
    ),
    (
        "Adam(schedule={'knid': 'cosine'})",
        "unknown argument 'knid'; did you mean 'kind'? @ Adam.schedule\n  available:…",
    ),
    (
        "Adam(schedule=Schedule)",
        (
            "expected an object of Schedule or a dictionary of its arguments (kind, final, "
            "decay_steps,…"
        ),
    ),
    (
        "Projection(kind='box', low=1.0, high=0.0)",
        "'high' must be >= 'low' (1.0): 0.0 @ Projection",
    ),
    # wrappers and methods
    (
        "Tilted(method='hg-ms', tilt=1.0)",
        f"expected {METHOD}, got 'hg-ms' @ Tilted.method\n  available: Agreement,…",
    ),
    ("Tilted(method=pipeline)", "missing: a number @ Tilted.tilt"),
    ("Tilted(method=pipeline, tilt=-1)", "'tilt' must be >= 0: -1.0 @ Tilted.tilt"),
    (
        "Tilted(method=Branches(), tilt=1)",
        f"expected {METHOD}, got a Branches, which is a candidate generator @…",
    ),
    (
        "Tilted(method=RegMix(), tilt=1)",
        "'method' must be a pipeline, or a wrapper around one: 'regmix' @ Tilted.method",
    ),
    (
        "ValidationOnly(method='uniform')",
        f"expected {METHOD}, got 'uniform' @ ValidationOnly.method\n  available:…",
    ),
    (
        "LearnedStart(method=pipeline)",
        "'learn_start' needs a generator that starts from θ, such as trajectory: 'branches' @…",
    ),
    (
        "StartingAt(method=pipeline, mixture=[3, 1])",
        "expected a dictionary (a number each) or None, got [3, 1] @…",
    ),
    (
        "StartingAt(method=pipeline, mixture={'code': '3'})",
        "expected a number, got '3'; write 3.0 @ StartingAt.mixture.code",
    ),
    # language models
    (
        "SourceMixture(model={'path': 3}, sources={}, validation={})",
        "3 errors in SourceMixture:\n  expected a string or…",
    ),
    (
        "BaseModel(path='gpt2', dtype=torch.bfloat16)",
        "expected 'auto' or 'float32' or 'bfloat16' or 'float16' or 'float64',…",
    ),
    (
        "Lora(targets='q_proj')",
        "expected a list (a string each) or None, got 'q_proj'; write ('q_proj',) @ Lora.targets",
    ),
    # everything at once
    (
        "Branches(optimizer='sdg', lr=math.nan, count=-1, betas=3)",
        "4 errors in Branches:\n"
        "  unknown choice 'sdg'; did you mean 'sgd'? @ Branches.optimizer\n"
        "    available: adamw, sgd, or a function\n"
        "  expected a number, got nan @ Branches.lr\n"
        "  expected 2 values (a number, a number), got 3 @ Branches.betas\n"
        "  'count' must be > 0: -1 @ Branches.count",
    ),
    # budgets and settings of runs
    ("Budget('3 stps')", "cannot read the budget '3 stps'; did you mean '3 steps'?"),
    (
        "Budget('60')",
        "cannot read the budget '60'; write for example '60s', '25 steps' or '1e5 calls'",
    ),
    ("Budget(60)", "cannot read the budget 60; write for example '60s', '25 steps' or '1e5 calls'"),
    ("Budget('2.5 steps')", "the budget '2.5 steps' is not a whole number of steps"),
    (
        "Budget()",
        (
            "a budget is exactly one of seconds, outer_steps, oracle_calls (given: none); to "
            "replace one from the…"
        ),
    ),
    (
        "Budget('3 steps', seconds=3)",
        "a budget is exactly one of seconds, outer_steps, oracle_calls (given: seconds,…",
    ),
    (
        "Budget(steps=3)",
        (
            "unknown limit of a budget 'steps'; did you mean 'outer_steps'?\n"
            "  available: oracle_calls,…"
        ),
    ),
    ("Budget(outer_steps=3.0)", "'outer_steps' must be a whole number > 0: 3.0"),
    ("Budget(outer_steps='3')", "'outer_steps' must be a whole number > 0: '3'"),
    ("Budget(seconds=-1)", "'seconds' must be > 0 and finite: -1"),
    (
        "RunSettings(evalute_every=3)",
        "unknown argument 'evalute_every'; did you mean 'evaluate_every'? @ RunSettings…",
    ),
    ("RunSettings(device=0)", "expected a string, got 0 @ RunSettings.device"),
    (
        "RunSettings(device=torch.device('cpu'))",
        "expected a string, got device(type='cpu'); write 'cpu' @ RunSettings.device",
    ),
    (
        "RunSettings(device='gpu')",
        '\'device\' must be "cpu", "cuda", "cuda:N" or "mps": \'gpu\' @ RunSettings.device',
    ),
    (
        "RunSettings(dtype=torch.float64)",
        "expected 'float32' or 'float64', got torch.float64; write 'float64' @…",
    ),
    (
        "RunSettings(compile='yes')",
        "expected 'auto' or True or False, got 'yes' @ RunSettings.compile",
    ),
    (
        "RunSettings(track='wandb')",
        "expected a list (a string each), got 'wandb'; write ('wandb',) @ RunSettings.track",
    ),
    (
        "RunConfig(task=Quadratic, method='hg-ms', budget='3 stps', seed=-1)",
        "4 errors in RunConfig:\n  expected a task (an…",
    ),
    # runs
    (
        "run('hg-mss', problem, '2 steps')",
        "unknown method 'hg-mss'; did you mean 'hg-ms'? @ method\n  available: hg-ms,…",
    ),
    (
        "run(Pipeline, problem, '2 steps')",
        "expected a method, got the class Pipeline; write Pipeline(…)",
    ),
    (
        "run(CG(), problem, '2 steps')",
        "expected a method (an object with init, step and result), got an object of the class…",
    ),
    (
        "run(problem, pipeline, '2 steps')",
        "expected a Problem, got an object of the class Pipeline\n  of a registered task…",
    ),
    (
        "run(pipeline, 'quadratic', '2 steps')",
        "expected a Problem, got 'quadratic'\n  of a registered task or a function…",
    ),
    (
        "run({'nam': 'hg-ms'}, problem, '2 steps')",
        "the name of the method is missing @ method.name\n  available: …",
    ),
    (
        "run({'name': 'hg-ms', 'outer': {'lrr': 1}}, problem, '2 steps')",
        "unknown key 'lrr'; did you mean 'lr'? (known: lr,…",
    ),
    ("run('hg-ms', problem, '2 stps')", "cannot read the budget '2 stps'; did you mean '2 steps'?"),
    (
        "run('hg-ms', problem, 2)",
        "expected a budget like '60s', '25 steps' or '1e5 calls' or a string, got 2 @ run.budget",
    ),
    (
        "run('hg-ms', problem)",
        "missing: a budget like '60s', '25 steps' or '1e5 calls' or a string @ run.budget",
    ),
    (
        "run('hg-ms', problem, '2 steps', sed=1)",
        "unknown argument 'sed'; did you mean 'seed'? @ run\n  available: budget,…",
    ),
    (
        "run('hg-ms', problem, '2 steps', method='uniform')",
        "run got 'method' twice, by position and by name",
    ),
    (
        "run('hg-ms', problem, '2 steps', 1)",
        "run takes 3 arguments by position and the others by name, and got 4 by…",
    ),
    ("run('hg-ms', problem, '2 steps', seed=-1)", "'seed' must be >= 0: -1 @ run.seed"),
    ("run('hg-ms', problem, '2 steps', seed=1.5)", "expected an integer, got 1.5 @ run.seed"),
    (
        "run('hg-ms', problem, '2 steps', settings={'evalute_every': 2})",
        "unknown argument 'evalute_every'; did you mean…",
    ),
    (
        "run('hg-ms', problem, '2 steps', settings=2)",
        "expected an object of RunSettings or a dictionary of its arguments…",
    ),
    (
        "run('hg-ms', problem, '2 steps', folder=3)",
        "expected an object of RunFolder or a dictionary of its arguments (path)…",
    ),
    (
        "run('hg-ms', problem, '2 steps', resume='yes')",
        "expected True or False, got 'yes' @ run.resume",
    ),
    (
        "run('hg-ms', problem, '2 steps', watch='loss')",
        "'watch' must be a function, watch(info, record, share), and it is…",
    ),
    (
        "run('uniform', problem, '1 s', watch=lambda record: 0)",
        "'watch' is called as watch(info, record, share), and this…",
    ),
    (
        "run('uniform', problem, '1 s', watch=Patience)",
        "'watch' must be a function, watch(info, record, share), and it is…",
    ),
    (
        "Patience()",
        (
            "2 errors in Patience:\n  missing: a string @ Patience.metric\n"
            "  missing: an integer @ Patience.steps"
        ),
    ),
    ("Patience(metric='loss', steps=0)", "'steps' must be > 0: 0 @ Patience.steps"),
    # comparisons
    (
        "compare('quadratc', 'uniform', '2 steps')",
        "unknown task 'quadratc'; did you mean 'quadratic'? @ compare.task…",
    ),
    (
        "compare('uniform', 'quadratic', '2 steps')",
        "2 problems in compare; nothing was run:\n  unknown task 'uniform'; no…",
    ),
    (
        "compare(pipeline, problem, '2 steps')",
        "expected a Problem, a function seed -> Problem, or a task (its name, a…",
    ),
    (
        "compare(lambda seed: 3, 'uniform', '2 steps')",
        "the function 'problem' gave an int for seed 0, and a comparison…",
    ),
    (
        "compare(problem, CG(), '2 steps')",
        "expected a method (its name, a table, or an object with init, step and result);…",
    ),
    (
        "compare(problem, {'mine': Pipeline}, '2 steps')",
        "expected a method (its name, a table, or an object with init, step…",
    ),
    (
        "compare(problem, ['uniform', 'hg-mss'], '2 steps')",
        "unknown method 'hg-mss'; did you mean 'hg-ms'? @ compare.method…",
    ),
    (
        "compare(problem, {'name': 'hg-ms', 'outer': CG()}, '2 steps')",
        "unknown outer optimiser 'cg'; no close match. @…",
    ),
    (
        "compare(problem, 'uniform', '2 stps')",
        "cannot read the budget '2 stps'; did you mean '2 steps'? @ compare.budget",
    ),
    (
        "compare(problem, 'uniform', '2 steps', seeds=-1)",
        "'seeds' must be a count > 0 or a list of numbers: -1 @…",
    ),
    (
        "compare(problem, 'uniform', '2 steps', seeds=1.5)",
        "expected an integer or a list (an integer each), got 1.5 @…",
    ),
    (
        "compare(problem, 'uniform', '2 steps', seeds=[0, 0])",
        "'seeds' names a seed twice: [0, 0] @ compare.seeds",
    ),
    (
        "compare(problem, 'uniform', '2 steps', seeds='3')",
        "expected an integer or a list (an integer each), got '3'; write…",
    ),
    (
        "compare(problem, 'uniform', '2 steps', metod='x')",
        "unknown argument 'metod'; did you mean 'methods'? @ compare…",
    ),
    (
        "compare(problem, 'uniform', '2 steps', metric='acuracy')",
        "evaluate of 'problem' gives no metric 'acuracy'; it…",
    ),
    (
        "compare('quadratic', 'uniform', '2 steps', metric='valu')",
        "unknown metric 'valu'; did you mean 'value'?…",
    ),
    (
        "compare(problem, 'uniform', '2 steps', reference='unifrom')",
        "unknown reference method 'unifrom'; did you mean…",
    ),
    (
        "compare(problem, 'uniform', '2 steps', run={'evalute_every': 2})",
        "unknown key 'evalute_every'; did you mean…",
    ),
    (
        "compare(problem, 'uniform', '2 steps', jobs='2')",
        "expected an integer or None, got '2'; write 2 @ compare.jobs",
    ),
    (
        "compare(problem, 'uniform', '2 steps', out=3)",
        "expected a string or a path or None, got 3 @ compare.out",
    ),
    (
        "compare(problem, 'uniform', '2 steps', registry='mine.py')",
        "expected an object of Registry or None, got 'mine.py' @…",
    ),
    ("RunFolder(3)", "expected str, bytes or os.PathLike object, not int @ RunFolder.path"),
    ("RunFolder()", "missing: a path @ RunFolder.path"),
    # in somebody else's loop
    (
        "OuterSteps(f=loss)",
        (
            "5 errors in OuterSteps:\n  missing: a function @ OuterSteps.g\n"
            "  missing: something to go…"
        ),
    ),
    (
        "outer_steps(evry=3)",
        (
            "unknown argument 'evry'; did you mean 'every'? @ OuterSteps\n"
            "  available: every, f, g, lower,…"
        ),
    ),
    ("outer_steps(every=2.5)", "expected an integer, got 2.5 @ OuterSteps.every"),
    ("outer_steps(every=0)", "'every' must be >= 1: 0 @ OuterSteps.every"),
    (
        "outer_steps(solver='cg')",
        f"expected {SOLVER}, got 'cg' @ OuterSteps.solver\n  a name stands for an object in…",
    ),
    (
        "outer_steps(solver=CG)",
        f"expected {SOLVER}, got the class CG; write CG() @ OuterSteps.solver",
    ),
    (
        "outer_steps(optimizer='adam')",
        f"expected {OUTER} or an object of Optimizer, got 'adam' @ OuterSteps.optimizer",
    ),
    (
        "outer_steps(optimizer=torch.optim.Adam)",
        f"expected {OUTER} or an object of Optimizer, got the class Adam @…",
    ),
    (
        "outer_steps(f=lambda x: x)",
        "'f' is called as f(theta, x, batch), and this one takes (x) @ OuterSteps.f",
    ),
    ("outer_steps(g=0.5)", "expected a function, got 0.5 @ OuterSteps.g"),
    (
        "outer_steps(upper=3)",
        "expected something to go through (anything each), got 3 @ OuterSteps.upper",
    ),
    (
        "outer_steps(strategy='vpj')",
        "unknown choice 'vpj'; did you mean 'vjp'? @ OuterSteps.strategy\n  available:…",
    ),
    (
        "lower_solution(loss, torch.ones(2), torch.ones(2), solver=CG(), startegy='jvp')",
        "unknown argument 'startegy'; did…",
    ),
    (
        "lower_solution(loss, torch.ones(2), torch.ones(2), solver=CG(), report=3)",
        "expected a function or None, got 3 @…",
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


@pytest.mark.parametrize(("code", "message"), REFUSED, ids=[code for code, _ in REFUSED])
def test_what_is_said(code: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(code)
    text = str(caught.value)
    assert text.startswith(message[:-1]) if message.endswith("…") else text == message
    # one traceback, not two
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(("code", "same"), TAKEN, ids=[code for code, _ in TAKEN])
def test_what_is_taken(code: str, same: str) -> None:
    value = written(code)
    expected = written(same)
    assert value == expected
    assert repr(value) == repr(expected)  # the same types, too


def test_the_table_of_the_page_says_the_same() -> None:
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "bad-input.md").read_text(
        encoding="utf-8"
    )
    rows = re.findall(r"^\| `(\w+\(.*\))` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 13
    for code, message in rows:
        with pytest.raises(ConfigError) as caught:
            written(code)
        assert str(caught.value).splitlines()[0] == message


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


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_field_refuses_what_it_cannot_take(cls: type) -> None:
    known = arguments(cls)
    hints = typing.get_type_hints(cls)
    for part in attrs.fields(cls):
        place = f"{cls.__name__}.{part.alias}"
        for label, value in WRONG.items() if part.init else ():
            try:
                built = cls(**{**known, part.alias: value})
            except ConfigError as error:
                text = str(error)
                assert place in text or part.alias in text or f" @ {cls.__name__}" in text, (
                    place,
                    label,
                    text,
                )
                assert len(text.splitlines()[0]) < 400, (place, label, text)
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
        with pytest.raises(
            ConfigError,
            match=rf"unknown argument '{name}_'; did you mean '{name}\w*'\? @ {cls.__name__}\n",
        ):
            cls(**others, **{f"{name}_": known[name]})
    with pytest.raises(ConfigError, match="by name, and got 1 by position"):
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
    with pytest.raises(ConfigError, match="unknown argument 'lrr'; did you mean 'lr'"):
        Mine(lrr=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^'lr' must be small: 3 @ Mine\.lr$"):
        Mine(lr=3)
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
    with pytest.raises(ConfigError, match=r"expected an integer, got 2\.5 @ Point\.names\.a"):
        Point(1, dict[str, Any](a=2.5))
