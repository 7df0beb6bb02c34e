"""The randomised Neumann series: its mean is the solution, its draws come from the key, and a
run with it can be resumed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen
from support.helpers import F64, normal

from hgms.contrib import Roulette
from hgms.contrib.roulette import sum_series, weights
from hgms.generators.branches import Branches
from hgms.hypergradients import Implicit
from hgms.optim import SGD
from hgms.outer import Sgd
from hgms.selectors import BestOfN
from hgms.solvers import CG, Neumann
from hgms.testing import problems
from hgms.testing.methods import check_resume
from hgms_core import Branch, Key, LinearSystem, MatVec, Outcome, Pipeline, Solution
from hgms_core.capabilities import Capabilities, Randomized, UsesLoss

SPECTRUM = torch.linspace(0.5, 1.5, 6, dtype=F64)
B = normal(6, seed=2)


def product(v: torch.Tensor) -> torch.Tensor:
    return SPECTRUM * v


@pytest.mark.extended
@pytest.mark.parametrize("x0", [None, normal(6, seed=3)], ids=["zero", "warm"])
def test_the_mean_over_all_ends_is_the_solution(x0: torch.Tensor | None) -> None:
    """Each end with its probability: no luck. With all weights 1 the mean is another."""
    system = LinearSystem.of(product, B)
    for base in (0.5, 1.0):
        mean = torch.zeros(6, dtype=F64)
        for more in range(50):
            terms = [1.0] * 3 + [base**-k for k in range(1, more + 1)]
            mean += 0.5 * 0.5**more * sum_series(system, x0, 0.8, terms).value
        assert bool((mean - B / SPECTRUM).abs().max() < 1e-10) is (base == 0.5)


def test_the_number_of_terms_is_drawn_as_it_says() -> None:
    counts = torch.tensor([len(weights(4, 0.7, Key(0).fold(i))) - 4 for i in range(1000)])
    for more in range(1, 8):
        chance = 0.7**more
        share = float((counts >= more).double().mean())
        assert abs(share - chance) <= 4 * (chance * (1 - chance) / len(counts)) ** 0.5
    longest = weights(4, 0.7, Key(0).fold(int(counts.argmax())))
    assert longest == pytest.approx([1.0] * 4 + [0.7**-k for k in range(1, len(longest) - 3)])


def test_no_survival_is_the_neumann_series() -> None:
    plain = Neumann(lr=0.5, steps=7, ridge=0.1)
    random = Roulette(lr=0.5, steps=7, ridge=0.1, survival=0.0)
    wanted = plain.solve(product, B)
    came = random.with_key(Key(3)).solve(product, B)
    torch.testing.assert_close(came.value, wanted.value, rtol=1e-13, atol=0)
    torch.testing.assert_close(came.residual, wanted.residual, rtol=1e-10, atol=0)
    assert (came.products, int(came.iterations)) == (7, 7)
    # of one term less
    torch.testing.assert_close(came.curvature, wanted.curvature, rtol=0.05, atol=0)


def test_terms_that_grow_end_the_series() -> None:
    wild = Roulette(lr=0.8, steps=200).solve(lambda v: torch.cat([-v[:1], v[1:]]), B)
    assert (wild.outcome, wild.products < 20) == (Outcome.DIVERGED, True)
    pair = Roulette(lr=0.8, steps=60).solve(
        lambda v: torch.stack([v[0], -v[1]]), torch.stack([B, B])
    )
    assert pair.converged.tolist() == [True, False]


@frozen
class Tells:
    """A solver that says in which order an estimator calls it, and with what."""

    calls: Any
    name: ClassVar[str] = "tells"
    capabilities: ClassVar[Capabilities] = frozenset({Randomized, UsesLoss})

    def with_key(self, key: Key) -> Tells:
        self.calls.append(key)
        return self

    def for_loss(self, loss: Any, theta: Any, x: Any, batch: Any) -> Tells:
        self.calls.append("for_loss")
        return self

    def solve(self, matvec: MatVec, b: torch.Tensor, x0: torch.Tensor | None = None) -> Solution:
        return CG().solve(matvec, b, x0)


def test_an_estimator_gives_a_key_of_its_own_before_all_else() -> None:
    known = problems.ridge()
    seen: list[Any] = []
    for key in (Key(1), Key(1), Key(2)):
        Implicit(solver=Tells(seen)).estimate(
            known.problem,
            known.theta,
            *Branch(x=known.branch().x).as_candidates(),
            key,
            {"v": None},
        )
    assert seen[1::2] == ["for_loss"] * 3
    keys = seen[::2]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0] not in (Key(1), Key(1).fold("lower"), Key(1).fold("upper"))


def test_a_run_with_it_draws_anew_in_every_step_and_can_be_resumed() -> None:
    method = Pipeline(
        generator=Branches(count=2, steps=3, optimizer=SGD(lr=0.3), batch_size=6),
        selector=BestOfN(),
        hypergradient=Implicit(solver=Roulette(lr=0.5, steps=2, survival=0.9)),
        outer=Sgd(lr=0.1),
    )
    problem = problems.tracking()
    state = method.init(problem, 0)
    counts = set()
    for _ in range(6):
        state, record = method.step(problem, state)
        counts.add(int(record["iterations"]))
    assert len(counts) > 2, counts
    check_resume(method)
