"""Checks of candidate generators: N lower states along a leading axis, each of which can be had again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hgms_core.errors import ConfigError
from hgms_core.problem import Problem
from hgms_core.protocols import State
from hgms_core.records import Candidates
from hgms_core.seeding import Key
from hgms_core.testing import problems
from hgms_core.testing.kit import Check, demand, difference, has, normal, place, refused, snapshot, with_fields
from hgms_core.testing.outer import through_json
from hgms_core.trees import Ravel, Tree

KEY = Key(11)
F64 = torch.float64


def checks() -> Iterator[Check]:
    for question in (
        check_candidates, check_descends, check_replay, check_replay_gradient, check_carry_rule, check_state, check_chunks,
        check_wells, check_moments,
    ):  # fmt: skip
        yield Check("generator", question)


def exercise(generator: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    problem = problems.ridge(dtype, variant).problem
    start, theta = generator.init(problem, KEY), problem.theta0
    data = [problem.lower_data.whole, problem.upper_data["differentiate"].whole]

    def call() -> Any:
        found = generator.propose(problem, theta, start, KEY)
        index = torch.tensor(found.count - 1, device=place())
        carried = generator.carry(start, found, index, KEY.fold("carry"), problem)
        return {"x": found.x, "aux": found.aux, "losses": found.losses, "cost": found.cost, "carried": carried}

    return {"theta": theta, "x0": problem.x0, "start": start, "data": data}, call


def proposed(generator: Any, problem: Problem, start: State | None = None, key: Key = KEY) -> Candidates:
    start = generator.init(problem, KEY) if start is None else start
    found: Candidates = generator.propose(problem, problem.theta0, start, key)
    demand(isinstance(found, Candidates), f"propose returns {type(found).__name__}; return hgms_core.Candidates")
    return found


def _on_batches(generator: Any) -> list[Any]:
    """The generator with at most 3 candidates, on all rows, and on small batches where it takes a batch size."""
    few = with_fields(generator, count=min(3, int(getattr(generator, "count", 3))))
    return [few, with_fields(few, batch_size=4)] if has(generator, "batch_size") else [few]


def _carried(generator: Any, problem: Problem, start: State, found: Candidates, index: int, step: int = 0) -> State:
    return dict(generator.carry(start, found, torch.tensor(index, device=place()), KEY.fold("carry", step), problem))


def check_candidates(generator: Any) -> None:
    """Every leaf of x, of `aux` and `losses` has the leading axis N (`count`, where there is such a field), and no graph."""
    problem = problems.ridge().problem
    found = proposed(generator, problem)
    count = int(getattr(generator, "count", found.count))
    wanted = {name: [count, *leaf.shape] for name, leaf in problem.x0.items()}
    came = {name: list(leaf.shape) for name, leaf in found.x.items()}
    demand(came == wanted, f"x has the shapes {came}; they are {wanted}")
    rest = {**found.aux, **({} if found.losses is None else {"losses": found.losses})}
    bad = {name: list(leaf.shape) for name, leaf in rest.items() if leaf.dim() == 0 or leaf.shape[0] != count}
    demand(not bad, f"without a leading axis of {count}: {bad}")
    graph = [name for name, leaf in {**found.x, **rest}.items() if leaf.requires_grad]
    demand(not graph, f"{graph} still hold a graph; return detached tensors")
    broken = [name for name, leaf in found.x.items() if not torch.isfinite(leaf).all()]
    demand(not broken, f"{broken} are not finite on a problem of size 1")


def check_descends(generator: Any) -> None:
    """After 20 outer steps at one θ, the lower loss of the best candidate is lower than at the start."""
    problem = problems.ridge().problem
    start, found = generator.init(problem, KEY), None
    for step in range(20):
        found = proposed(generator, problem, start, KEY.fold(step))
        start = _carried(generator, problem, start, found, 0, step)
    assert found is not None
    whole = problem.lower_data.whole
    losses = [float(problem.g(problem.theta0, found.at(i), whole)) for i in range(found.count)]
    first = float(problem.g(problem.theta0, problem.x0, whole))
    demand(min(losses) < first, f"g began at {first:.4g}, the candidates are at {[round(each, 4) for each in losses[:6]]}")


def check_replay(generator: Any) -> None:
    """`replay` gives every candidate again, from the same start and key; a ConfigError that says what else to use is fine."""
    problem = problems.ridge().problem
    for each in _on_batches(generator):
        start = each.init(problem, KEY)
        found = proposed(each, problem, start)
        for i in range(found.count):
            try:
                again = _replayed(each, problem, found, start, i)
            except ConfigError:
                return
            differs = difference(snapshot(found.at(i)), snapshot(again), rtol=1e-10)
            demand(not differs, f"candidate {i} replayed: {differs}")


def _replayed(generator: Any, problem: Problem, found: Candidates, start: State, index: int, theta: Tree | None = None) -> Tree:
    at, which = problem.theta0 if theta is None else theta, torch.tensor(index, device=place())
    x, _ = found.replay(which, at, None) if found.replay is not None else generator.replay(problem, at, start, KEY, which, None)
    return dict(x)


def check_replay_gradient(generator: Any) -> None:
    """The derivative of a replayed candidate in θ is what finite differences of the candidate give."""
    problem = problems.ridge().problem
    start = generator.init(problem, KEY)
    found = proposed(generator, problem, start)
    if refused(lambda: _replayed(generator, problem, found, start, 0)):
        return
    spec, flat = Ravel.of(problem.theta0), Ravel.of(problem.theta0).ravel(problem.theta0)
    weights = normal(Ravel.of(problem.x0).size, seed=80)
    index = found.count - 1

    def value(theta: Tree) -> Tensor:
        return Ravel.of(problem.x0).ravel(_replayed(generator, problem, found, start, index, theta)) @ weights

    leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.theta0.items()}
    with torch.enable_grad():
        at = value(leaves)
        demand(at.requires_grad, "the replayed state does not depend on θ")
        grads = torch.autograd.grad(at, list(leaves.values()), materialize_grads=True)
    direction = normal(len(flat), seed=81)
    step = 1e-5
    ends = []
    for sign in (1, -1):
        moved = spec.unravel(flat + sign * step * direction)
        again = generator.propose(problem, moved, start, KEY).at(index)
        ends.append(float(Ravel.of(problem.x0).ravel(again) @ weights))
    slope = float(spec.ravel_leaves(list(grads)) @ direction)
    differences = (ends[0] - ends[1]) / (2 * step)
    size = 1e-6 + 1e-4 * abs(differences)
    demand(
        abs(slope - differences) <= size, f"the derivative along a direction is {slope:.6g}, differences give {differences:.6g}"
    )


def check_carry_rule(generator: Any) -> None:
    """A field `carry_rule` does what it is called: `selected`, `per-branch`, `restart`."""
    if not has(generator, "carry_rule"):
        return
    problem = problems.ridge().problem
    start = generator.init(problem, KEY)
    found = proposed(generator, problem, start)
    rule, last = str(generator.carry_rule), found.count - 1
    carried = [snapshot(_carried(generator, problem, start, found, index)) for index in (0, last)]
    leaf = next(iter(found.x))
    if rule == "restart" or rule == "per-branch":
        differs = difference(carried[0], carried[1])
        demand(not differs, f"the rule is {rule!r} and what is carried depends on which candidate was selected: {differs}")
    wanted = {"selected": found.x[leaf][last], "per-branch": found.x[leaf]}.get(rule)
    if wanted is not None:
        rows = wanted.reshape(1 if rule == "selected" else len(wanted), -1)
        held = [
            each.reshape(-1, rows.shape[1]) for each in _leaves(carried[1]) if each.numel() % rows.numel() == 0 and each.numel()
        ]
        found_it = any(torch.equal(each, rows.expand_as(each) if len(rows) == 1 else rows) for each in held)
        demand(found_it, f"the rule is {rule!r}, and the next start does not hold that state ({leaf!r} of candidate {last})")


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for each in (value.values() if isinstance(value, dict) else ()) for leaf in _leaves(each)]


def check_state(generator: Any) -> None:
    """What it carries can be saved, and the next candidates are bit for bit the same as without."""
    problem = problems.ridge().problem
    for each in _on_batches(generator):
        start = each.init(problem, KEY)
        start = _carried(each, problem, start, proposed(each, problem, start), 0)
        one, other = (proposed(each, problem, state, KEY.fold("next")) for state in (start, through_json(start)))
        differs = difference(snapshot([one.x, one.aux, one.losses]), snapshot([other.x, other.aux, other.losses]))
        demand(not differs, f"after its state was saved and loaded {differs}")


def check_chunks(generator: Any) -> None:
    """The fields `mode` and `chunk` change how candidates are computed, not what comes out."""
    if not has(generator, "mode"):
        return
    problem = problems.ridge().problem
    for each in _on_batches(generator):
        loop = proposed(with_fields(each, mode="loop"), problem)
        for options in ({"mode": "stacked"}, {"mode": "stacked", "chunk": 1}, {"mode": "stacked", "chunk": 3}):
            other = proposed(with_fields(each, **options), problem)
            differs = difference(snapshot([loop.x, loop.losses]), snapshot([other.x, other.losses]), rtol=1e-9)
            demand(not differs, f"with {options} instead of a loop {differs}")


def check_wells(generator: Any) -> None:
    """Of 8 candidates (`count`, `noise` 1) from the top between two wells, some go to each: they are independent views."""
    if not has(generator, "count"):
        return
    problem = problems.wells()
    many = with_fields(generator, count=8, noise=1.0, temperature=max(1e-2, float(getattr(generator, "temperature", 0.0))))
    start = many.init(problem, KEY)
    sides: set[bool] = set()
    for step in range(30):
        found = proposed(many, problem, start, KEY.fold(step))
        sides |= {bool(each > 0) for each in found.x["x"].reshape(-1) if abs(float(each)) > 0.3}
        start = _carried(many, problem, start, found, step % found.count, step)
    demand(sides == {True, False}, f"in 30 outer steps {'no candidate left the top' if not sides else 'all went to one side'}")


def check_moments(generator: Any) -> None:
    """A field `temperature` λ samples exp(−g/λ): on g = ½‖x‖² the mean is 0 and the variance λ, up to the step's bias."""
    if not has(generator, "temperature"):
        return
    problem = Problem(
        theta0={"t": torch.zeros(1, dtype=F64, device=place())},
        x0={"x": torch.zeros(2, dtype=F64, device=place())},
        g=lambda theta, x, batch: 0.5 * x["x"].square().sum() + 0 * theta["t"].sum(),
        f=lambda theta, x, batch: x["x"].sum() + 0 * theta["t"].sum(),
    )
    sampler = with_fields(generator, temperature=0.25, count=2000, steps=80, lr=0.1, mode="stacked")
    x = proposed(sampler, problem).x["x"]
    mean, variance = float(x.mean(0).abs().max()), float(x.var(0).mean())
    demand(mean <= 0.06, f"the mean is {mean:.3g} away from 0")
    demand(abs(variance - 0.25) <= 0.05, f"the variance is {variance:.3g}; at temperature 0.25 it is 0.25")
