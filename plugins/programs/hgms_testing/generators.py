"""Checks of candidate generators: N lower states along a leading axis, each of which can be had again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hgms_core import Candidates, ConfigError, Cost, Key, Problem, Ravel, State, Tree
from hgms_testing import oracle, problems
from hgms_testing.kit import Check, Fault, demand, difference, fail, has, normal, place, shown, snapshot, with_fields
from hgms_testing.outer import through_json

KEY = Key(11)
F64 = torch.float64


def checks() -> Iterator[Check]:
    for question in (
        check_candidates, check_losses, check_oracle_counts, check_key, check_descends, check_replay, check_replay_gradient,
        check_carry, check_carry_rule, check_state, check_chunks, check_wells, check_moments,
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


def check_losses(generator: Any) -> None:
    """Where there are `losses`, they lie among the values that g had on the way to the candidates."""
    problem, tally = oracle.watched(problems.ridge().problem)
    for each in _on_batches(generator):
        start = each.init(problem, KEY)
        tally.clear()
        found = proposed(each, problem, start)
        if found.losses is None:
            return
        seen = torch.cat(tally.values) if tally.values else torch.full_like(found.losses[:1], torch.nan)
        low, high, slack = seen.min(), seen.max(), 1e-9 * (1 + seen.abs().max())
        demand(
            bool(((found.losses >= low - slack) & (found.losses <= high + slack)).all()),
            f"losses are {shown(found.losses)}, and g had values from {float(low):.6g} to {float(high):.6g}; "
            "leave `losses` out where none is known",
        )


def check_oracle_counts(generator: Any) -> None:
    """Its cost, and that of a replay, is what it did: the calls of f and of g and the rows are declared, within a factor of two
    (a product may be one backward pass or two calls), and nothing is that was not called."""
    problem, tally = oracle.watched(problems.ridge().problem)
    for each in _variants(generator):
        start = each.init(problem, KEY)
        tally.clear()
        found = proposed(each, problem, start)
        oracle.demand_honest(found.cost, tally)
        for theta in (problem.theta0, {name: leaf.clone().requires_grad_() for name, leaf in problem.theta0.items()}):
            tally.clear()
            try:
                end, cost = _replay(each, problem, found, start, found.count - 1, theta)
            except ConfigError:
                break
            leaves = [leaf for leaf in theta.values() if leaf.requires_grad]
            if leaves:
                torch.autograd.grad(
                    torch.cat([leaf.reshape(-1) for leaf in end.values()]).sum(), leaves, materialize_grads=True
                )
            try:
                oracle.demand_honest(cost, tally)
            except Fault as fault:
                fail(f"in a replay {'with' if leaves else 'without'} derivatives {fault}")


def check_key(generator: Any) -> None:
    """Every number that it draws comes from its key: with two keys it draws other numbers. One that draws none is fine."""
    problem = problems.ridge().problem
    few = with_fields(generator, count=min(3, int(getattr(generator, "count", 3))), noise=0.5, batch_size=4)
    start = few.init(problem, KEY)
    seen = []
    for key in (KEY, KEY.fold("another")):
        with oracle.draws() as drawn:
            proposed(few, problem, start, key)
        seen.append(drawn)
    demand(not oracle.same_draws(*seen), f"with two keys it draws the same {len(seen[0])} tensors of random numbers")


def check_replay(generator: Any) -> None:
    """`replay` gives every candidate again, from the same start and key, through however many steps it is differentiated; at
    another θ it gives what `propose` gives there. A ConfigError that says what else to use is fine."""
    problem = problems.ridge().problem
    for each in _variants(generator):
        start = each.init(problem, KEY)
        found = proposed(each, problem, start)
        for theta, where in ((problem.theta0, ""), (_elsewhere(problem), " at another θ")):
            wanted = each.propose(problem, theta, start, KEY) if where else found
            for i in range(found.count):
                for last in (None, 0, 1) if i == found.count - 1 else (None,):
                    try:
                        again = _replayed(each, problem, found, start, i, theta, last)
                    except ConfigError:
                        return
                    differs = difference(snapshot(wanted.at(i)), snapshot(again), rtol=1e-10)
                    through = "" if last is None else f" (last = {last})"
                    demand(not differs, f"candidate {i} replayed{where}{through}: {differs}")


def _elsewhere(problem: Problem) -> Tree:
    return {name: leaf + 0.3 * normal(*leaf.shape, seed=82) for name, leaf in problem.theta0.items()}


def _variants(generator: Any) -> list[Any]:
    return [*_on_batches(generator), *_kept(generator)]


def _kept(generator: Any) -> list[Any]:
    """The generator with the graph that a field `keep_graph` keeps of one candidate."""
    return [with_fields(generator, count=1, keep_graph=True)] if has(generator, "keep_graph") else []


def _replay(
    generator: Any, problem: Problem, found: Candidates, start: State, index: int, theta: Tree, last: int | None = None
) -> tuple[Tree, Cost]:
    which = torch.tensor(index, device=place())
    if found.replay is not None:
        return found.replay(which, theta, last)
    end, cost = generator.replay(problem, theta, start, KEY, which, last)
    return dict(end), cost


def _replayed(
    generator: Any, problem: Problem, found: Candidates, start: State, index: int, theta: Tree, last: int | None = None
) -> Tree:
    return _replay(generator, problem, found, start, index, theta, last)[0]


def check_replay_gradient(generator: Any) -> None:
    """The derivative of a replayed candidate in θ is what finite differences of the candidate give, at the θ it was proposed at
    and at another."""
    problem = problems.ridge().problem
    for each in (generator, *_kept(generator)):
        start = each.init(problem, KEY)
        found = proposed(each, problem, start)
        try:
            _replayed(each, problem, found, start, 0, problem.theta0)
        except ConfigError:
            return
        for theta, where in ((problem.theta0, ""), (_elsewhere(problem), "at another θ ")):
            slope, differences = _slopes(each, problem, found, start, theta)
            demand(
                abs(slope - differences) <= 1e-6 + 1e-4 * abs(differences),
                f"{where}the derivative along a direction is {slope:.6g}, differences give {differences:.6g}",
            )


def _slopes(generator: Any, problem: Problem, found: Candidates, start: State, theta: Tree) -> tuple[float, float]:
    """The derivative of a weighted sum of the last candidate along a direction: by autograd, and by differences."""
    spec, state = Ravel.of(theta), Ravel.of(problem.x0)
    flat, weights, index = spec.ravel(theta), normal(state.size, seed=80), found.count - 1
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
    with torch.enable_grad():
        value = state.ravel(_replayed(generator, problem, found, start, index, leaves)) @ weights
        demand(value.requires_grad, "the replayed state does not depend on θ")
        grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    direction, step = normal(len(flat), seed=81), 1e-5
    ends = [
        float(
            state.ravel(generator.propose(problem, spec.unravel(flat + sign * step * direction), start, KEY).at(index))
            @ weights
        )
        for sign in (1, -1)
    ]
    return float(spec.ravel_leaves(list(grads)) @ direction), (ends[0] - ends[1]) / (2 * step)


def check_carry(generator: Any) -> None:
    """Where the next start holds one candidate, it is the selected one, unless a field `carry_rule` says which it is."""
    problem = problems.ridge().problem
    several = with_fields(generator, noise=0.5, batch_size=4)
    start = several.init(problem, KEY)
    found = proposed(several, problem, start)
    leaf, last = next(iter(found.x)), found.count - 1
    candidates = found.x[leaf].reshape(found.count, -1)
    if has(generator, "carry_rule") or len(torch.unique(candidates, dim=0)) < found.count:
        return
    rows = [
        each.reshape(-1, candidates.shape[1])
        for each in _leaves(snapshot(_carried(several, problem, start, found, last)))
        if each.numel() and each.numel() % candidates.shape[1] == 0
    ]
    held = [i for i, own in enumerate(candidates) if any(bool((each == own).all(1).any()) for each in rows)]
    demand(
        not held or last in held,
        f"candidate {last} was selected, and the next start holds {leaf!r} of {held}; go on from the selected one, or say by a "
        "field `carry_rule` where it goes on from",
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
