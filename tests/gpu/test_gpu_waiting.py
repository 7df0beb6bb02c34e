"""Where a step waits for the GPU: a generator, a selector and an estimator of first order do
not; a solver's test does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed import never_waiting, waits
from support.helpers import F64, moved, network_problem

from hgms.generators.branches import Branches, Trajectory
from hgms.generators.ula import Ula
from hgms.hypergradients import Implicit, OneStep, ThroughStep, Unrolled
from hgms.outer import Adam, Projection
from hgms.selectors import BestOfN, First, Worst
from hgms.solvers import CG, MINRES, FixedPoint, Identity, Neumann, NystromCG
from hgms_core import Branch, Key, LastStep, Pipeline, Problem, norm

pytestmark = pytest.mark.nightly

KEY = Key(5)
ROWS = 40


def _problem(device: torch.device) -> Problem:
    """What hyper-cleaning looks like to the parts."""
    return moved(network_problem(rows=ROWS), device)


def _twice(device: torch.device, call: Callable[[], Any]) -> None:
    """The first time loads kernels and sizes workspaces."""
    call()
    with never_waiting(device):
        call()


GENERATORS = {
    "plain": Branches(count=4, steps=4),
    "noise": Branches(count=4, steps=4, noise=0.1, noise_scale="relative", chunk=3),
    "shared minibatches": Branches(count=4, steps=4, batch_size=8, batches="shared"),
    "adamw": Branches(count=4, steps=4, optimizer="adamw", weight_decay=0.1, clip=1.0),
    "loop": Branches(count=4, steps=4, mode="loop", momentum=0.9, batch_size=8),
    "spread": Branches(
        count=4,
        steps=4,
        weight_decay=0.1,
        lr_spread=(0.5, 2.0),
        decay_spread=(0.5, 2.0),
        carry_rule="per-branch",
    ),
    "one": Branches(count=1, steps=4),
    "trajectory": Trajectory(steps=4, every=2, batch_size=8),
    "ula": Ula(count=4, steps=4, batch_size=8),
}


@pytest.mark.parametrize("generator", GENERATORS.values(), ids=GENERATORS)
def test_a_generator_does_not_wait(generator: Any, device: torch.device) -> None:
    problem = _problem(device)
    start = generator.init(problem, KEY)
    index = torch.zeros((), dtype=torch.int64, device=device)

    def call() -> None:
        found = generator.propose(problem, problem.theta0, start, KEY)
        generator.carry(start, found, index, KEY, problem)

    _twice(device, call)


@pytest.mark.parametrize(
    "selector", [BestOfN(), BestOfN(batch_size=8), BestOfN(mode="loop"), Worst(), First()], ids=repr
)
def test_a_selector_does_not_wait(selector: Any, device: torch.device) -> None:
    problem = _problem(device)
    generator = Branches(count=4, steps=2, noise=0.1)
    found = generator.propose(problem, problem.theta0, generator.init(problem, KEY), KEY)
    _twice(device, lambda: found.at(selector.select(problem, problem.theta0, found, KEY).index))


ESTIMATORS = [
    ThroughStep(),
    ThroughStep(derivative="exact"),
    ThroughStep(upper_batch_size=8),
    OneStep(),
    OneStep(batch_size=8),
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_an_estimator_of_first_order_does_not_wait(estimator: Any, device: torch.device) -> None:
    problem = _problem(device)
    last = LastStep(x=problem.x0, batch=problem.lower_data.batch(None), rows=ROWS, rate=0.1)
    branch = Branch(
        x=problem.x0,
        replay=lambda theta, last: pytest.fail("no branch is run again"),
        next_step=lambda key: last,
    )
    state = estimator.init(problem)
    _twice(device, lambda: estimator.estimate(problem, problem.theta0, branch, KEY, state))


@pytest.mark.parametrize("projection", ["none", "box", "ball", "simplex"])
def test_an_outer_step_does_not_wait(projection: Any, device: torch.device) -> None:
    theta = {"a": torch.full((5,), 0.2, dtype=F64, device=device)}
    outer = Adam(clip=1.0, projection=Projection(kind=projection))
    state = outer.init(theta)
    _twice(device, lambda: norm(outer.step(theta, theta, state, 0.5)[0]))


# --- what has to wait, and how often
# --------------------------------------------------------------------------------------------------

STEPS = {
    "through-step": (Branches(count=4, steps=4, noise=0.1, batch_size=8), ThroughStep(), 0),
    # The branch is run again on the CPU's say which one it was: its noise and its batches come from
    # keys.
    "through-step, own batch": (
        Branches(count=4, steps=4, noise=0.1, batch_size=8),
        ThroughStep(batch="own"),
        1,
    ),
    "through-step, one branch": (
        Branches(count=1, steps=4, batch_size=8),
        ThroughStep(batch="own"),
        0,
    ),
    "unrolled": (Branches(count=4, steps=4, noise=0.1, batch_size=8), Unrolled(), 1),
    "unrolled, one branch": (Branches(count=1, steps=4, batch_size=8), Unrolled(), 0),
    "one-step": (Branches(count=4, steps=4, noise=0.1, batch_size=8), OneStep(), 0),
    "identity": (Branches(count=4, steps=4, noise=0.1), Implicit(solver=Identity()), 1),
}
"""(generator, estimator, waits a step): beside these only the numbers of a record leave the
device, after the step.
"""


@pytest.mark.parametrize("case", STEPS)
def test_an_outer_step_waits_so_often(case: str, device: torch.device) -> None:
    generator, estimator, expected = STEPS[case]
    problem = _problem(device)
    method = Pipeline(
        generator=generator, selector=BestOfN(), hypergradient=estimator, outer=Adam()
    )
    state, _ = method.step(problem, method.init(problem, 0))
    with waits(device) as found:
        method.step(problem, state)
    assert found.total() <= expected, (
        f"it waits {found.total()} times at {dict(found)}; {expected} are known of"
    )


SOLVERS = {
    "cg": (CG(), lambda iterations: 2 * iterations + 6),
    "nystrom": (NystromCG(rank=4), lambda iterations: 2 * iterations + 12),
    "minres": (MINRES(), lambda iterations: 2 * iterations + 6),
    "neumann": (Neumann(lr=0.8, steps=20), lambda iterations: iterations + 3),
    "fixed-point": (FixedPoint(lr=0.8), lambda iterations: iterations + 3),
    "identity": (Identity(), lambda _iterations: 0),
}
"""A solver asks once an iteration whether all its systems are done, and a few times around that."""


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_waits_about_once_an_iteration(name: str, device: torch.device) -> None:
    solver, allowed = SOLVERS[name]
    eigenvalues = torch.linspace(0.5, 1.5, 24, dtype=F64, device=device)
    b = torch.randn(24, generator=Key(3).generator(), dtype=F64).to(device)
    iterations = int(solver.solve(lambda v: eigenvalues * v, b, None).iterations)
    with waits(device) as found:
        solver.solve(lambda v: eigenvalues * v, b, None)
    assert found.total() <= allowed(iterations), (
        f"{iterations} iterations wait {found.total()} times at {dict(found)}"
    )
