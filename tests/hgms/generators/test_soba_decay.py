"""SOBA's rate falls with the steps, in the step and in its replay."""

from __future__ import annotations

import torch
from support.helpers import KEY, assert_same, network_problem

from hgms.generators.single_loop import Soba


def test_a_replayed_step_has_the_rate_of_its_step() -> None:
    problem = network_problem()
    generator = Soba(lr=0.3, decay=0.5)
    start = {**generator.init(problem, KEY), "step": 8}
    candidates = generator.propose(problem, problem.theta0, start, KEY)
    assert candidates.replay is not None
    replayed, _ = candidates.replay(torch.tensor(0), problem.theta0, None)
    assert_same(replayed, candidates.at(0), rtol=1e-12)
    first = generator.propose(problem, problem.theta0, {**start, "step": 0}, KEY).at(0)
    for name, leaf in problem.x0.items():
        assert_same(first[name] - leaf, 3 * (candidates.at(0)[name] - leaf), rtol=1e-9)
