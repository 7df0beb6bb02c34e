"""Langevin chains: their stationary law, their seeds, their memory, and what Best-of-N makes of
them.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import F64, KEY, LiveMemory, assert_same, network_problem, normal, rejects
from torch import Tensor

from hgms.generators.ula import Ula
from hgms.runs import RunConfig, run
from hgms.selectors import BestOfN
from hgms.tasks.sphere import Sphere
from hgms_core import Candidates, Data, Key, Problem, State, Tree, repeat

PROBLEM = network_problem()
THETA = PROBLEM.theta0


def propose(
    ula: Ula, key: Key = KEY, start: State | None = None, problem: Problem = PROBLEM
) -> Candidates:
    return ula.propose(problem, problem.theta0, start or ula.init(problem, KEY), key)


# --- the stationary law

CURVATURES = torch.tensor([0.5, 1.0, 4.0, 8.0], dtype=F64)
BASIS = torch.linalg.qr(normal(4, 4)).Q
HESSIAN = BASIS @ torch.diag(CURVATURES) @ BASIS.T
CENTRE = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=F64)
GAUSSIAN = Problem(
    theta0={},
    x0={"a": torch.zeros(1, dtype=F64), "b": torch.zeros(3, dtype=F64)},
    g=lambda t, x, _: (
        0.5
        * (torch.cat([x["a"], x["b"]]) - CENTRE)
        @ HESSIAN
        @ (torch.cat([x["a"], x["b"]]) - CENTRE)
    ),
    f=lambda t, x, _: x["a"].sum(),
)


def test_the_stationary_law_of_a_gaussian() -> None:
    # ULA on ½(x−c)ᵀH(x−c) at temperature λ is stationary at N(c, λ (H(1 − hH/2))⁻¹); contraction (1
    # − 0.5h)^K = 2e-6.
    count = 20_000
    temperature = 0.3
    rate = 0.1
    ula = Ula(count=count, steps=260, lr=rate, temperature=temperature, chunk=5000)
    found = propose(ula, problem=GAUSSIAN)
    x = torch.cat([found.x["a"], found.x["b"]], dim=1)
    spread = BASIS @ torch.diag(temperature / (CURVATURES * (1 - rate * CURVATURES / 2))) @ BASIS.T
    # The Monte-Carlo standard errors of a mean and of a covariance entry of Gaussian samples; five
    # of them.
    mean_error = 5 * (spread.diagonal() / count).sqrt()
    entry_error = (
        5
        * (
            (spread.square() + spread.diagonal()[:, None] * spread.diagonal()[None, :]) / count
        ).sqrt()
    )
    assert ((x.mean(0) - CENTRE).abs() < mean_error).all()
    assert ((torch.cov(x.T) - spread).abs() < entry_error).all()
    # The error bars are sharp enough to see the bias of the step size: the Gibbs covariance λH⁻¹ is
    # outside them.
    assert ((torch.cov(x.T) - temperature * torch.linalg.inv(HESSIAN)).abs() > entry_error).any()


def test_the_start_is_a_gaussian_scaled_with_the_temperature() -> None:
    flat = evolve(
        GAUSSIAN,
        g=lambda t, x, _: 0.0 * (x["a"].sum() + x["b"].sum()),
        x0={"a": CENTRE[:1], "b": CENTRE[1:]},
    )
    ula = Ula(count=20_000, steps=1, lr=1e-12, temperature=0.3, spread=2.0)
    found = propose(ula, problem=flat)
    x = torch.cat([found.x["a"], found.x["b"]], dim=1)
    assert ((x.mean(0) - CENTRE).abs() < 5 * (0.6 / 20_000) ** 0.5).all()
    assert (
        (torch.cov(x.T) - 0.6 * torch.eye(4, dtype=F64)).abs() < 5 * 0.6 * (2 / 20_000) ** 0.5
    ).all()
    warm = propose(evolve(ula, spread=0.0, count=2, temperature=0.0), problem=flat)
    assert_same(warm.x, repeat(flat.x0, 2))


def test_zero_temperature_is_gradient_descent() -> None:
    found = propose(Ula(count=2, steps=300, lr=0.2, temperature=0.0), problem=GAUSSIAN)
    assert_same(found.x["b"], CENTRE[1:].expand(2, 3), rtol=1e-10)


def test_minibatches_leave_the_mean_of_a_location_problem_in_place() -> None:
    # g = ½ mean ‖x − a_i‖²: stochastic gradients are unbiased, so the stationary mean is the mean
    # of the rows. Its variance is (2λh + h² s²/B)/(1 − (1−h)²) per coordinate, s² the rows'
    # variance without replacement.
    rows = normal(40, 2, seed=3)
    problem = Problem(
        theta0={},
        x0={"x": torch.zeros(2, dtype=F64)},
        g=lambda t, x, b: 0.5 * (x["x"] - b["a"]).square().sum(-1).mean(),
        f=lambda t, x, b: x["x"].sum(),
        lower_data=Data.of({"a": rows}),
    )
    count = 3000
    rate = 0.5
    size = 4
    ula = Ula(count=count, steps=10, lr=rate, temperature=0.05, batch_size=size)
    x = propose(ula, problem=problem).x["x"]
    # 10 steps of 4 rows are one epoch, within which batches repel each other: independence would be
    # the larger variance.
    independent = (2 * 0.05 * rate + rate**2 * rows.var(0, unbiased=False) / size) / (
        1 - (1 - rate) ** 2
    )
    assert ((x.mean(0) - rows.mean(0)).abs() < 5 * (independent / count).sqrt() + 0.5**10).all()
    assert (x.var(0) > 2 * 0.05 * rate / (1 - (1 - rate) ** 2) * 1.1).all()
    assert (x.var(0) < independent * 1.1).all()


# --- seeds, replay, carry

CASES = {
    "cold": Ula(count=3, steps=6, lr=0.1, temperature=1e-2),
    "warm": Ula(count=3, steps=6, lr=0.1, temperature=1e-2, spread=0.0, carry_rule="selected"),
    "minibatch": Ula(
        count=3, steps=6, lr=0.1, temperature=1e-2, batch_size=5, carry_rule="per-branch"
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def second_start(ula: Ula) -> State:
    state = ula.init(PROBLEM, KEY)
    return ula.carry(
        state, propose(ula, KEY.fold("before"), state), torch.tensor(1), KEY.fold("carry"), PROBLEM
    )


@every_case
def test_stacked_looped_and_chunked_agree(case: str) -> None:
    start = second_start(CASES[case])
    loop, stacked, chunked = (
        propose(evolve(CASES[case], mode=mode, chunk=chunk), start=start)
        for mode, chunk in [("loop", None), ("stacked", None), ("stacked", 2)]
    )
    for other in (stacked, chunked):
        assert_same((other.x, other.losses), (loop.x, loop.losses), rtol=1e-11, atol=1e-13)
        assert other.cost == loop.cost


@every_case
@pytest.mark.parametrize("member", [0, 2])
def test_a_replayed_chain_is_the_proposed_one(case: str, member: int) -> None:
    start = second_start(CASES[case])
    candidates = propose(CASES[case], start=start)
    proposed = candidates.at(member)
    replay = candidates.replay
    assert replay is not None
    for last in (None, 2):
        theta = {name: leaf.clone().requires_grad_() for name, leaf in THETA.items()}
        replayed, cost = replay(torch.tensor(member), theta, last)
        assert_same(
            {name: leaf.detach() for name, leaf in replayed.items()},
            proposed,
            rtol=1e-11,
            atol=1e-13,
        )
        assert (cost.lower_gradients, cost.products) == (6, last or 6)
    forward, cost = replay(torch.tensor(member), THETA, None)
    assert_same(forward, proposed, rtol=1e-11, atol=1e-13)
    assert cost.calls == cost.lower_gradients == 6


@every_case
def test_a_proposal_repeats_itself_and_touches_nothing_else(case: str) -> None:
    start = second_start(CASES[case])
    before = copy.deepcopy(start)
    rng = torch.get_rng_state()
    one = propose(CASES[case], start=start)
    two = propose(CASES[case], start=start)
    assert_same((one.x, one.losses), (two.x, two.losses))
    assert_same(start, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not torch.equal(one.x["w"], propose(CASES[case], KEY.fold("other"), start).x["w"])


def test_a_chain_does_not_depend_on_how_many_there_are() -> None:
    few, many = (propose(Ula(count=n, steps=5, lr=0.1, mode="loop")) for n in (2, 5))
    assert_same(few.x, {name: leaf[:2] for name, leaf in many.x.items()})
    assert not torch.equal(many.x["w"][0], many.x["w"][1])


def test_large_states_draw_their_noise_step_by_step() -> None:
    # Below and above the block size the law is the same; only the order of the draws differs.
    for size in (100, 5000):
        flat = Problem(
            theta0={},
            x0={"x": torch.zeros(size, dtype=F64)},
            g=lambda t, x, _: 0.0 * x["x"].sum(),
            f=lambda t, x, _: x["x"].sum(),
        )
        x = propose(Ula(count=8, steps=45, lr=0.5, temperature=1.0, spread=0.0), problem=flat).x[
            "x"
        ]
        assert float(x.var()) == pytest.approx(45.0, abs=5 * 45 * (2 / (8 * size)) ** 0.5)


@pytest.mark.parametrize("rule", ["selected", "per-branch", "restart"])
def test_what_the_next_step_starts_from(rule: Any) -> None:
    ula = Ula(count=3, steps=2, carry_rule=rule)
    found = propose(ula)
    carried = ula.carry(ula.init(PROBLEM, KEY), found, torch.tensor(2), KEY.fold("carry"), PROBLEM)[
        "x"
    ]
    if rule == "per-branch":
        assert_same(carried, found.x)
    elif rule == "selected":
        assert_same(carried, {name: leaf[2:] for name, leaf in found.x.items()})
    else:
        assert PROBLEM.fresh is not None
        assert_same(
            carried, {name: leaf[None] for name, leaf in PROBLEM.fresh(KEY.fold("carry")).items()}
        )
        fixed = evolve(PROBLEM, fresh=None)
        again = ula.carry(ula.init(fixed, KEY), found, torch.tensor(2), KEY, fixed)["x"]
        assert_same(again, {name: leaf[None] for name, leaf in PROBLEM.x0.items()})


def test_the_cost_and_the_last_losses() -> None:
    ula = Ula(count=2, steps=1, lr=0.1, spread=0.0, batch_size=5)
    found = propose(ula)
    index = PROBLEM.lower_data.draw(KEY.fold("batches", 1), 5, 1)
    assert index is not None
    assert found.losses is not None
    assert_same(
        found.losses[1],
        PROBLEM.g(THETA, PROBLEM.x0, PROBLEM.lower_data.batch(index[0])),
        rtol=1e-13,
    )
    assert (found.cost.lower_gradients, found.cost.rows) == (2, 10)


def test_a_state_of_another_count_is_refused() -> None:
    start = Ula(count=3, carry_rule="per-branch").init(PROBLEM, KEY)
    with rejects("wrong-length", "generator", "count"):
        propose(Ula(count=2, carry_rule="per-branch"), start=start)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"count": 0}, "out-of-range"),
        ({"steps": 3.9}, "wrong-type"),
        ({"temperature": -1.0}, "out-of-range"),
        ({"lr": 0.0}, "out-of-range"),
        ({"carry_rule": "base"}, "unknown-choice"),
    ],
)
def test_bad_fields_are_named(options: dict[str, Any], code: str) -> None:
    with rejects(code, *options):
        Ula(**options)


# --- memory


def wide_problem(leaves: int, decay: float) -> Problem:
    """Many parameters, small activations, and large enough for ``auto`` to loop: 16 rows through
    matrices of 300 × 300.
    """
    rows = Data.of({"a": normal(16, 300)})
    names = [f"w{i}" for i in range(leaves)]

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        hidden = batch["a"]
        for name in names:
            hidden = torch.tanh(hidden @ x[name])
        penalty = sum(x[name].square().sum() for name in names) if decay else 0.0
        return hidden.square().mean() + decay * penalty

    return Problem(
        theta0={},
        x0={name: 0.05 * normal(300, 300, seed=i) for i, name in enumerate(names)},
        g=g,
        f=g,
        lower_data=rows,
    )


@pytest.mark.parametrize("decay", [0.0, 1e-3])
@pytest.mark.parametrize("rule", ["restart", "per-branch"])
@pytest.mark.parametrize(
    ("mode", "chunk"), [("auto", None), ("loop", None), ("stacked", 2), ("stacked", None)]
)
def test_the_peak_memory_of_n_chains(decay: float, rule: Any, mode: Any, chunk: int | None) -> None:
    if rule == "per-branch" and mode == "stacked" and chunk is None:
        # all at once would be starts, chains and gradients: 3N; the chunk is what bounds them
        chunk = 3
    count = 6
    problem = wide_problem(4, decay)
    size = sum(leaf.nbytes for leaf in problem.x0.values())
    ula = Ula(count=count, steps=3, lr=1e-3, mode=mode, chunk=chunk, carry_rule=rule)
    with LiveMemory() as memory:
        state = ula.init(problem, KEY)
        found = propose(ula, start=state, problem=problem)
        ula.carry(state, found, torch.tensor(1), KEY, problem)
    assert memory.peak / size >= count  # the chains themselves: the meter sees them
    assert memory.peak / size <= 2 * count + 6


# --- the sphere: closeness to the manifold, and Best-of-N's error


def slope(x: Tensor, y: Tensor) -> float:
    """The least-squares exponent of y ∝ x^p."""
    x = x.log()
    y = y.log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def sphere(k: int) -> tuple[Problem, Any, Tree]:
    task = Sphere(k=k, d=k + 3)
    problem, exact = (
        make(0, torch.device("cpu"), F64) for make in (task.problem, task.closed_form)
    )
    return problem, exact, problem.theta0


def chains(
    problem: Problem, exact: Any, theta: Tree, count: int, temperature: float, seed: int
) -> Tree:
    """ULA from points spread evenly over S(θ), where the Gibbs measure already is to first
    order; 400 steps relax the rest.
    """
    ula = Ula(
        count=count,
        steps=400,
        lr=0.05,
        temperature=temperature,
        spread=0.0,
        carry_rule="per-branch",
        mode="stacked",
        chunk=5000,
    )
    size = exact.inside.shape[1]
    direction = torch.randn(count, size, generator=Key(seed).generator(), dtype=F64)
    direction = direction / direction.norm(dim=1, keepdim=True)
    start = torch.func.vmap(lambda u: exact.point(theta, u)["x"])(direction)
    return ula.propose(problem, theta, {"x": {"x": start}}, Key(seed).fold("chains")).x


@pytest.mark.nightly
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_distance_to_the_manifold_scales_with_the_root_of_the_temperature(
    k: int, capsys: Any
) -> None:
    problem, exact, theta = sphere(k)
    temperatures = torch.tensor([1e-4, 4e-4, 1.6e-3, 6.4e-3], dtype=F64)
    distances = []
    for i, temperature in enumerate(temperatures.tolist()):
        x = chains(problem, exact, theta, 4000, temperature, seed=i)
        off = torch.func.vmap(lambda point: exact.off_manifold(theta, {"x": point}))(x["x"])
        distances.append(off.square().mean().sqrt())
    found = slope(temperatures, torch.stack(distances))
    with capsys.disabled():
        print(f"\nsphere k = {k}: RMS distance to S(θ) ∝ λ^{found:.3f} (theory: 0.5)")  # noqa: T201
    # 4000 chains give the RMS to about 1 %, so the slope over a factor 64 to about 0.005; curvature
    # terms are O(λ).
    assert found == pytest.approx(0.5, abs=0.03)


@pytest.mark.nightly
@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_of_n_falls_with_n_at_least_as_the_bound_says(k: int, capsys: Any) -> None:
    # The bound is E‖x̃ − x*‖² ≤ C₀ √(λ log(1 + N)) + C₁ N^(−1/k). λ is so small that its first term
    # does not matter here; the optimum is non-degenerate, so exact samples would give N^(−2/k): the
    # fitted exponent must be at most −1/k.
    problem, exact, theta = sphere(k)
    best = exact.solution(theta)["x"]
    pool = chains(problem, exact, theta, 40_000, 1e-6 if k == 1 else 1e-5, seed=7)["x"]
    scores = torch.func.vmap(lambda point: problem.f(theta, {"x": point}, {}))(pool)
    sizes = [2, 4, 8, 16, 32, 64]
    errors = []
    for n in sizes:
        groups = pool.shape[0] // n
        chosen = scores[: groups * n].reshape(groups, n).argmin(1) + n * torch.arange(groups)
        errors.append((pool[chosen] - best).square().sum(1).mean())
    first = Candidates(x={"x": pool[:64]})
    assert int(BestOfN().select(problem, theta, first, KEY).index) == int(scores[:64].argmin())
    found = slope(torch.tensor(sizes, dtype=F64), torch.stack(errors))
    with capsys.disabled():
        print(  # noqa: T201
            f"\nsphere k = {k}: E‖x̃ − x*‖² ∝ N^{found:.3f} (bound: −1/k = {-1 / k:.3f}; "
            f"non-degenerate: −2/k = {-2 / k:.3f})"
        )
        print(  # noqa: T201
            "   "
            + "  ".join(
                f"N={n}: {float(error):.2e}" for n, error in zip(sizes, errors, strict=True)
            )
        )
    assert found <= -1 / k
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))


@pytest.mark.extended
def test_the_registered_method_selects_where_one_branch_does_not() -> None:
    """`hg-ms-ula` and `hg-implicit` as they are registered on `sphere`, at equal oracle calls:
    the gap F(θ) − F*.
    """
    gaps = {}
    for name in ("hg-ms-ula", "hg-implicit"):
        config = RunConfig.from_dict({"task": "sphere", "method": name, "budget": "10000 calls"})
        problem = config.task.problem(0, torch.device("cpu"), F64)
        gaps[name] = run(config.method, problem, config.budget).summary["metrics"]["upper_gap"]
    # one seed: 0.35 to 0.55 on different processors
    assert gaps["hg-ms-ula"] < 0.75 * gaps["hg-implicit"]
    assert gaps["hg-ms-ula"] < 0.01


def test_chains_of_a_loss_that_vmap_cannot_evaluate_are_those_of_the_loop() -> None:
    data = {"a": normal(12, 2)}

    def g(theta: Tree, x: Tree, batch: Tree) -> Tensor:
        calls.append(1)
        far = x["x"].abs().max().item() > 1
        return (batch["a"] - (2 if far else 1) * x["x"]).square().mean()

    calls: list[int] = []
    x0 = {"x": torch.zeros(2, dtype=F64)}
    p = Problem(theta0={}, x0=x0, g=g, f=g, lower_data=data, upper_data=data)
    for batch_size in (None, 4):
        ula = Ula(count=3, steps=5, lr=0.1, temperature=0.5, batch_size=batch_size)
        ends = {}
        for mode in ("auto", "loop"):
            calls.clear()
            generator = evolve(ula, mode=mode)
            ends[mode] = generator.propose(p, {}, generator.init(p, KEY), KEY).x["x"]
            assert len(calls) - 15 == (2 if mode == "auto" else 0), "tried once, not per step"
        assert torch.equal(ends["auto"], ends["loop"])
