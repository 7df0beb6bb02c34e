"""Checks of candidate generators: N reproducible lower states along a leading axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from hgms.facts import settings_of
from hgms.runs import needs
from hgms.testing import kit, oracle, problems
from hgms.testing.kit import (
    F64,
    Fault,
    demand,
    demand_equal,
    fail,
    has,
    normal,
    numbers,
    shapes,
    show,
    with_fields,
)
from hgms_core import Candidates, ConfigError, Cost, Key, Problem, Ravel, State, Tree
from hgms_core.capabilities import ProposesSome, find

KEY = Key(11)


def exercise(generator: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    problem = _usual(generator, dtype, variant)
    start = generator.init(problem, KEY)
    theta = problem.theta0
    data = [problem.lower_data.whole, problem.upper_data["differentiate"].whole]

    def call() -> Any:
        proposal = propose(generator, problem, start)
        candidates = proposal.candidates
        parts = {name: getattr(candidates, name) for name in ("x", "aux", "losses", "cost")}
        return {**parts, "next": proposal.carry(candidates.count - 1)}

    return {"theta": theta, "x0": problem.x0, "start": start, "data": data}, call


def _usual(generator: Any, dtype: torch.dtype = F64, variant: int = 0) -> Problem:
    """Return the problem of the checks: a ridge regression, or a mixture if sources are needed."""
    make = problems.blend if "sources" in needs(generator) else problems.ridge
    return make(dtype, variant).problem


@frozen
class Proposal:
    """Candidates at θ0, and the inputs they were proposed with."""

    generator: Any
    problem: Problem
    start: State
    candidates: Candidates

    def carry(self, selected: int, step: int = 0) -> State:
        """Return the start of the next outer step."""
        key = KEY.fold("carry", step)
        return dict(
            self.generator.carry(
                self.start, self.candidates, numbers(selected, torch.int64), key, self.problem
            )
        )

    def replay(self, i: int, theta: Tree, last: int | None = None) -> tuple[Tree, Cost]:
        """Recompute candidate ``i`` at any θ; return it and the cost.

        The generator must support a backward pass.
        """
        assert self.candidates.replay is not None
        return self.candidates.replay(numbers(i, torch.int64), theta, last)


def propose(
    generator: Any, problem: Problem, start: State | None = None, key: Key = KEY
) -> Proposal:
    start = generator.init(problem, KEY) if start is None else start
    candidates: Candidates = generator.propose(problem, problem.theta0, start, key, 0.0)
    demand(
        isinstance(candidates, Candidates),
        f"propose returns {type(candidates).__name__}; return hgms_core.Candidates",
    )
    return Proposal(generator, problem, start, candidates)


def _few(generator: Any, **values: Any) -> Any:
    """Return the generator with at most 3 candidates."""
    return with_fields(generator, count=min(3, settings_of(generator).get("count", 3)), **values)


def _on_batches(generator: Any) -> list[Any]:
    """Return the generator with few candidates: on all rows, and on small batches if it has a
    batch size.
    """
    few = _few(generator)
    return [few, with_fields(few, batch_size=4)] if has(generator, "batch_size") else [few]


def _with_graph(generator: Any) -> list[Any]:
    """Return variants with one candidate and a kept graph, if the generator has `keep_path`."""
    if not has(generator, "keep_path"):
        return []
    try:
        return [with_fields(generator, count=1, keep_path="graph")]
    except ConfigError:  # its other settings exclude it
        return []


def check_candidates(generator: Any) -> None:
    """Every leaf of x, of `aux` and of `losses` has the leading axis N (the field `count`, if
    there is one), and no graph.
    """
    problem = _usual(generator)
    candidates = propose(generator, problem).candidates
    count = settings_of(generator).get("count", candidates.count)
    wanted = {name: [count, *shape] for name, shape in shapes(problem.x0).items()}
    came = shapes(candidates.x)
    demand(came == wanted, f"x has the shapes {came}; they are {wanted}")
    rest = {
        **candidates.aux,
        **({} if candidates.losses is None else {"losses": candidates.losses}),
    }
    bad = {name: shape for name, shape in shapes(rest).items() if shape[:1] != [count]}
    demand(not bad, f"without a leading axis of {count}: {bad}")
    graph = [name for name, leaf in {**candidates.x, **rest}.items() if leaf.requires_grad]
    demand(not graph, f"{graph} still hold a graph; return detached tensors")
    broken = [name for name, leaf in candidates.x.items() if not torch.isfinite(leaf).all()]
    demand(not broken, f"{broken} are not finite on a problem of size 1")


def check_losses(generator: Any) -> None:
    """If there are `losses`, they are within the range of the values of g that led to the
    candidates.
    """
    problem, tally = oracle.watch(_usual(generator))
    for variant in _on_batches(generator):
        start = variant.init(problem, KEY)
        tally.clear()
        losses = propose(variant, problem, start).candidates.losses
        if losses is None:
            return
        seen = torch.cat(tally.values) if tally.values else torch.full_like(losses[:1], torch.nan)
        low = seen.min()
        high = seen.max()
        slack = 1e-9 * (1 + seen.abs().max())
        inside = ((losses >= low - slack) & (losses <= high + slack)).all()
        had = f"g had values from {float(low):.6g} to {float(high):.6g}"
        demand(
            inside, f"losses are {show(losses)}, and {had}; leave `losses` out where none is known"
        )


def check_oracle_counts(generator: Any) -> None:
    """The declared cost of a proposal and of a replay is correct: the calls of f and g and the
    rows are declared, within a factor of two (a product may be one backward pass or two calls).
    No other call is declared.
    """
    problem, tally = oracle.watch(_usual(generator))
    for variant in (*_on_batches(generator), *_with_graph(generator)):
        start = variant.init(problem, KEY)
        tally.clear()
        proposal = propose(variant, problem, start)
        oracle.demand_honest(proposal.candidates.cost, tally)
        if proposal.candidates.replay is None:
            continue
        for theta in (
            problem.theta0,
            {name: leaf.clone().requires_grad_() for name, leaf in problem.theta0.items()},
        ):
            tally.clear()
            end, cost = proposal.replay(proposal.candidates.count - 1, theta)
            leaves = [leaf for leaf in theta.values() if leaf.requires_grad]
            if leaves:
                total = torch.cat([leaf.reshape(-1) for leaf in end.values()]).sum()
                torch.autograd.grad(total, leaves, materialize_grads=True)
            try:
                oracle.demand_honest(cost, tally)
            except Fault as fault:
                fail(f"in a replay {'with' if leaves else 'without'} derivatives {fault}")


def check_key(generator: Any) -> None:
    """Every random number comes from the key: with two keys, the numbers differ. A generator
    that draws no numbers passes.
    """
    problem = _usual(generator)
    few = _few(generator, noise=0.5, batch_size=4)
    start = few.init(problem, KEY)
    first, second = (
        oracle.record_draws(propose, few, problem, start, key)[0]
        for key in (KEY, KEY.fold("another"))
    )
    demand(
        not oracle.same_draws(first, second),
        f"with two keys it draws the same {len(first)} tensors of random numbers",
    )


def check_descends(generator: Any) -> None:
    """After 20 outer steps at one θ, the lower loss of the best candidate is lower than at the
    start.
    """
    problem = _usual(generator)
    proposal = propose(generator, problem, key=KEY.fold(0))
    for step in range(1, 20):
        proposal = propose(generator, problem, proposal.carry(0, step - 1), KEY.fold(step))
    candidates = proposal.candidates
    whole = problem.lower_data.whole
    losses = [
        float(problem.g(problem.theta0, candidates.at(i), whole)) for i in range(candidates.count)
    ]
    first = float(problem.g(problem.theta0, problem.x0, whole))
    demand(
        min(losses) < first,
        f"g is {first:.4g} at the start, and at the candidates "
        f"{[round(loss, 4) for loss in losses[:6]]}",
    )


def check_parts(generator: Any) -> None:
    """If the generator declares `ProposesSome`, `propose_some` returns the same candidates as
    `propose`, with the same `aux`. Its replay uses the number of a candidate among all, and the
    costs of the parts sum to the total cost.
    """
    problem = _usual(generator)
    at = partial(numbers, dtype=torch.int64)
    for variant in _on_batches(generator):
        parts = find(variant, ProposesSome)
        if parts is None:
            return
        proposal = propose(variant, problem)
        whole = proposal.candidates
        cost = Cost()
        for members in (list(range(whole.count))[1:], [0]):
            if not members:
                continue
            some = parts.propose_some(problem, problem.theta0, proposal.start, KEY, 0.0, members)
            cost = cost + some.cost
            for row, member in enumerate(members):
                where = f"candidate {member} of propose_some(…, {members})"
                demand_equal(whole.at(member), some.at(row), f"{where}:", rtol=1e-10)
                demand_equal(
                    whole.branch(at(member)).aux,
                    some.branch(at(row)).aux,
                    f"`aux` of {where}:",
                    rtol=1e-10,
                )
                if some.replay is not None:
                    again, _ = some.replay(at(member), problem.theta0, None)
                    demand_equal(
                        whole.at(member), again, f"{where}, replayed by its number:", rtol=1e-10
                    )
        demand(
            cost == whole.cost,
            f"the parts cost {cost.numbers()}, and all of them together {whole.cost.numbers()}",
        )


def check_replay(generator: Any) -> None:
    """`Candidates.replay`, if it is not None, reproduces every candidate, for any number of
    differentiated steps. At another θ, it returns the same as `propose` at that θ.
    """
    problem = _usual(generator)
    for variant in (*_on_batches(generator), *_with_graph(generator)):
        proposal = propose(variant, problem)
        if proposal.candidates.replay is None:
            continue
        for theta, where in ((problem.theta0, ""), (_elsewhere(problem), " at another θ")):
            wanted = (
                variant.propose(problem, theta, proposal.start, KEY, 0.0)
                if where
                else proposal.candidates
            )
            for i in range(wanted.count):
                for last in (None, 0, 1) if i == wanted.count - 1 else (None,):
                    again, _ = proposal.replay(i, theta, last)
                    through = "" if last is None else f" (last = {last})"
                    demand_equal(
                        wanted.at(i), again, f"candidate {i} replayed{where}{through}:", rtol=1e-10
                    )


def _elsewhere(problem: Problem) -> Tree:
    return kit.near(problem.theta0, 0.3, seed=82)


def check_replay_gradient(generator: Any) -> None:
    """The derivative of a replayed candidate by θ equals finite differences of the candidate, at
    the θ of the proposal and at another θ.
    """
    problem = _usual(generator)
    for variant in (generator, *_with_graph(generator)):
        proposal = propose(variant, problem)
        if proposal.candidates.replay is None:
            continue
        for theta, where in ((problem.theta0, ""), (_elsewhere(problem), "at another θ ")):
            slope, quotient = _slopes(proposal, theta)
            close = abs(slope - quotient) <= 1e-6 + 1e-4 * abs(quotient)
            demand(
                close,
                (
                    f"{where}the derivative along a direction is {slope:.6g}, differences give "
                    f"{quotient:.6g}"
                ),
            )


def _slopes(proposal: Proposal, theta: Tree) -> tuple[float, float]:
    """Return the derivative of a weighted sum of the last candidate along a direction.

    Two values: by autograd and by differences.
    """
    spec = Ravel.of(theta)
    state = Ravel.of(proposal.problem.x0)
    last = proposal.candidates.count - 1
    flat = spec.ravel(theta)
    weights = normal(state.size, seed=80)
    direction = normal(spec.size, seed=81)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in theta.items()}
    with torch.enable_grad():
        value = state.ravel(proposal.replay(last, leaves)[0]) @ weights
        demand(value.requires_grad, "the replayed state does not depend on θ")
        grads = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)

    def value_at(step: float) -> float:
        there = spec.unravel(flat + step * direction)
        candidates = proposal.generator.propose(proposal.problem, there, proposal.start, KEY, 0.0)
        return float(state.ravel(candidates.at(last)) @ weights)

    return float(spec.ravel_leaves(list(grads)) @ direction), float(kit.differences(value_at))


def check_carry(generator: Any) -> None:
    """If the next start contains one candidate, it is the selected candidate, unless a field
    `carry_rule` defines another rule.
    """
    proposal = propose(with_fields(generator, noise=0.5, batch_size=4), _usual(generator))
    name, leaf = next(iter(proposal.candidates.x.items()))
    candidates = leaf.reshape(len(leaf), -1)
    last = len(leaf) - 1
    kit.ask_if(not has(generator, "carry_rule"), "its field carry_rule says what is carried")
    kit.ask_if(len(torch.unique(candidates, dim=0)) > last, "its candidates are not all different")
    rows = _tables(proposal.carry(last), candidates.shape[1])
    held = [
        i
        for i, own in enumerate(candidates)
        if any(bool((table == own).all(1).any()) for table in rows)
    ]
    advice = "continue from the selected one, or declare by a field `carry_rule` where it continues"
    demand(
        not held or last in held,
        f"candidate {last} was selected, and the next start holds {name!r} of {held}; {advice}",
    )


def _tables(state: Any, width: int) -> list[Tensor]:
    """Return the tensors of a state that can be read as rows of this width."""
    leaves = kit.tensors(state).values()
    return [
        leaf.reshape(-1, width) for leaf in leaves if leaf.numel() and leaf.numel() % width == 0
    ]


def check_state(generator: Any) -> None:
    """The carried state can be saved, and the next candidates are bit for bit the same."""
    problem = _usual(generator)
    for variant in _on_batches(generator):

        def following(state: State, variant: Any = variant) -> Any:
            candidates = propose(variant, problem, state, KEY.fold("next")).candidates
            return [candidates.x, candidates.aux, candidates.losses]

        kit.demand_saved(propose(variant, problem).carry(0), following)


def check_chunks(generator: Any) -> None:
    """The fields `mode` and `chunk` change how candidates are computed, but not the result."""
    problem = _usual(generator)

    def compute(variant: Any) -> Any:
        candidates = propose(variant, problem).candidates
        return [candidates.x, candidates.losses]

    for variant in _on_batches(generator):
        kit.demand_modes(variant, compute, chunk=3, rtol=1e-9, instead=" instead of a loop")


def check_wells(generator: Any) -> None:
    """Of 8 candidates (`count`, `noise` 1) from the maximum between two wells, some move to each
    well: candidates are independent. This problem has no sources.
    """
    kit.ask_of_field(generator, "count")
    kit.ask_if("sources" not in needs(generator), "it needs sources")
    problem = problems.wells()
    many = with_fields(
        generator,
        count=8,
        noise=1.0,
        temperature=max(1e-2, settings_of(generator).get("temperature", 0.0)),
    )
    start = many.init(problem, KEY)
    sides: set[bool] = set()
    for step in range(30):
        proposal = propose(many, problem, start, KEY.fold(step))
        sides |= {
            bool(x > 0) for x in proposal.candidates.x["x"].reshape(-1) if abs(float(x)) > 0.3
        }
        start = proposal.carry(step % proposal.candidates.count, step)
    demand(
        sides == {True, False},
        f"in 30 outer steps {'no candidate left the top' if not sides else 'all went to one side'}",
    )
