"""The chain against the paper's formulas, written down a second time."""

from __future__ import annotations

import math

import pytest
import torch
from hgms_cyclical import CyclicalLangevin

from hgms_core import ConfigError, Data, Key, Problem

KEY = Key(5)


def gaussian(size: int, curvature: float = 1.0) -> Problem:
    """g = ½ curvature ‖x‖² + 0·θ: ``size`` independent coordinates, so one chain tells moments."""
    return Problem(
        theta0={"t": torch.zeros(1, dtype=torch.float64)},
        x0={"x": torch.zeros(size, dtype=torch.float64)},
        g=lambda theta, x, batch: 0.5 * curvature * x["x"].square().sum() + 0 * theta["t"].sum(),
        f=lambda theta, x, batch: x["x"].sum(),
    )


def regression() -> Problem:
    """Least squares in closed form: gradients are written out below, not taken from autograd."""
    draw = Key(1).generator()
    a = torch.randn(30, 4, generator=draw, dtype=torch.float64)
    y = a @ torch.ones(4, dtype=torch.float64) + 0.1 * torch.randn(
        30, generator=draw, dtype=torch.float64
    )

    def g(theta, x, batch):
        return (
            0.5 * (batch["a"] @ x["w"] - batch["y"]).square().mean()
            + 0.5 * theta["t"].exp() * x["w"].square().sum()
        )

    return Problem(
        theta0={"t": torch.tensor(-1.0, dtype=torch.float64)},
        x0={"w": torch.zeros(4, dtype=torch.float64)},
        g=g,
        f=g,
        lower_data=Data.of({"a": a, "y": y}),
    )


def propose(chain: CyclicalLangevin, problem: Problem, key: Key = KEY):
    return chain.propose(problem, problem.theta0, chain.init(problem, key), key)


@pytest.mark.parametrize(("cycles", "length"), [(1, 7), (4, 5), (3, 1)])
def test_the_step_size_is_that_of_equation_1(cycles, length):
    chain = CyclicalLangevin(count=cycles, cycle_steps=length, lr=0.3)
    total = cycles * length
    for k in range(1, total + 1):
        period = math.ceil(total / cycles)
        assert chain.step_size(k) == pytest.approx(
            0.3 / 2 * (math.cos(math.pi * ((k - 1) % period) / period) + 1)
        )
    assert chain.step_size(1) == chain.step_size(length + 1) == 0.3


@pytest.mark.parametrize(("share", "noisy"), [(0.0, 10), (0.25, 7), (0.3, 7), (0.85, 1), (1.0, 0)])
def test_the_first_share_of_every_cycle_is_free_of_noise(share, noisy):
    chain = CyclicalLangevin(count=2, cycle_steps=10, exploration=share)
    assert [chain.samples(k) for k in range(1, 21)] == 2 * ([False] * (10 - noisy) + [True] * noisy)


def test_noise_is_added_in_the_sampling_steps_only():
    """With one step a cycle and α = α₀, x after the first sampling step is √(2 α λ) ξ; before
    it, it is 0.
    """
    size = 200_000
    quiet = CyclicalLangevin(count=2, cycle_steps=4, lr=0.1, exploration=1.0, temperature=0.5)
    assert not propose(quiet, gaussian(size)).x["x"].any()
    loud = CyclicalLangevin(count=1, cycle_steps=1, lr=0.1, exploration=0.0, temperature=0.5)
    x = propose(loud, gaussian(size)).x["x"][0]
    assert float(x.var()) == pytest.approx(2 * 0.1 * 0.5, rel=5 * math.sqrt(2 / size))
    assert abs(float(x.mean())) < 5 * math.sqrt(0.1 / size)


@pytest.mark.parametrize("batch_size", [None, 8])
def test_without_noise_it_is_gradient_descent_with_warm_restarts(batch_size):
    problem = regression()
    cycles = 3
    length = 6
    rate = 0.2
    chain = CyclicalLangevin(
        count=cycles,
        cycle_steps=length,
        lr=rate,
        exploration=1.0,
        temperature=9.0,
        batch_size=batch_size,
    )
    candidates = propose(chain, problem)
    a = problem.lower_data.whole["a"]
    y = problem.lower_data.whole["y"]
    drawn = problem.lower_data.draw(KEY.fold("batches"), batch_size, cycles * length)
    w = torch.zeros(4, dtype=torch.float64)
    penalty = math.exp(-1.0)
    for cycle in range(cycles):
        for step in range(length):
            rows = slice(None) if drawn is None else drawn[cycle * length + step]
            residual = a[rows] @ w - y[rows]
            loss = 0.5 * residual.square().mean() + 0.5 * penalty * w.square().sum()
            gradient = a[rows].T @ residual / len(residual) + penalty * w
            w = w - rate * (1 + math.cos(math.pi * step / length)) / 2 * gradient
        torch.testing.assert_close(candidates.x["w"][cycle], w, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(candidates.losses[cycle], loss, rtol=1e-12, atol=0)
    assert candidates.cost.lower_gradients == cycles * length
    assert candidates.cost.rows == cycles * length * (batch_size or 30)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.6])
def test_the_variance_on_a_gaussian_is_that_of_the_recursion(share):
    """v ← (1 − α_k h)² v + 2 α_k λ [sampling], whose fixed point over a cycle is where the chain
    settles.
    """
    size = 20_000
    temperature = 0.3
    curvature = 2.0
    chain = CyclicalLangevin(
        count=8, cycle_steps=20, lr=0.2, exploration=share, temperature=temperature
    )
    x = propose(chain, gaussian(size, curvature)).x["x"][-1]
    variance = 0.0
    for k in range(1, 8 * 20 + 1):
        rate = 0.1 * (1 + math.cos(math.pi * ((k - 1) % 20) / 20))
        noisy = (k - 1) % 20 >= share * 20
        variance = (1 - rate * curvature) ** 2 * variance + (
            2 * rate * temperature if noisy else 0.0
        )
    assert float(x.var()) == pytest.approx(variance, rel=5 * math.sqrt(2 / size))
    assert abs(float(x.mean())) < 5 * math.sqrt(variance / size)


def test_with_long_cycles_the_variance_is_that_of_the_gibbs_measure():
    size = 20_000
    temperature = 0.3
    curvature = 2.0
    chain = CyclicalLangevin(
        count=1, cycle_steps=400, lr=0.1, exploration=0.25, temperature=temperature
    )
    x = propose(chain, gaussian(size, curvature)).x["x"][0]
    assert float(x.var()) == pytest.approx(temperature / curvature, rel=0.05)


def test_a_candidate_is_differentiated_through_the_cycles_before_it():
    """x_k = Π (1 − α_j) x_0 + (1 − Π (1 − α_j)) θ without noise, so dx/dθ after i cycles is 1 −
    Π over i·C steps.
    """
    problem = Problem(
        theta0={"t": torch.tensor(0.7, dtype=torch.float64)},
        x0={"x": torch.tensor(3.0, dtype=torch.float64)},
        g=lambda theta, x, batch: 0.5 * (x["x"] - theta["t"]) ** 2,
        f=lambda theta, x, batch: x["x"],
    )
    chain = CyclicalLangevin(count=3, cycle_steps=4, lr=0.4, temperature=0.1)
    start = chain.init(problem, KEY)
    rates = [0.2 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    for index in range(3):
        for last, through in ((None, 4 * (index + 1)), (3, 3), (99, 4 * (index + 1))):
            theta = {"t": problem.theta0["t"].clone().requires_grad_()}
            x, cost = chain.propose(problem, problem.theta0, start, KEY).replay(
                torch.tensor(index), theta, last
            )
            (slope,) = torch.autograd.grad(x["x"], theta["t"])
            wanted = 1 - math.prod(1 - rate for rate in (rates * 3)[: 4 * (index + 1)][-through:])
            assert float(slope) == pytest.approx(wanted, rel=1e-12)
            assert (cost.lower_gradients, cost.products, cost.cross_products) == (
                4 * (index + 1),
                through,
                through,
            )


def test_one_chain_that_never_ends_goes_on_from_the_last_candidate():
    problem = regression()
    for rule, row in (("last", -1), ("selected", 1)):
        chain = CyclicalLangevin(count=3, cycle_steps=2, carry_rule=rule)
        candidates = propose(chain, problem)
        carried = chain.carry(chain.init(problem, KEY), candidates, torch.tensor(1), KEY, problem)
        assert torch.equal(carried["x"]["w"], candidates.x["w"][row])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 0),
        ("cycle_steps", 1.5),
        ("lr", 0.0),
        ("exploration", 1.5),
        ("temperature", -1.0),
        ("batch_size", 0),
        ("carry_rule", "best"),
    ],
)
def test_wrong_settings_are_named(field, value):
    with pytest.raises(ConfigError) as caught:
        CyclicalLangevin(**{field: value})
    assert caught.value.place == (field,)
