"""Forward runs of all branches, without a graph, in efficient groups, for each kind of step."""

from __future__ import annotations

from attrs import evolve
from torch import Tensor

from hgms.compiled import programs_of
from hgms.generators.branches.program import advance_compiled
from hgms.generators.branches.steps import Plan, advance, of_part, slope_of
from hgms.generators.branches.torch_branches import advance_torch, joined
from hgms.optim.rule import Rule
from hgms.optim.torch_rule import TorchRule
from hgms_core import Group, Mode, Problem, Tree, groups


def run_all(
    plan: Plan, problem: Problem, theta: Tree, x: Tree, moments: Tree, name: str, remember: bool
) -> tuple[Tensor, Tree, int]:
    """Move the stacked ``x`` in place to the ends of the branches.

    Return (lower losses before the last steps, moments, number of gradients). ``remember``: return
    the state of torch optimisers.
    """
    rule = plan.rule
    losses = next(iter(x.values())).new_empty(len(plan.decays))
    calls = 0
    # LBFGS evaluates each branch a variable number of times, so branches run one at a time.
    mode: Mode = "loop" if isinstance(rule, TorchRule) and rule.needs_closure else plan.mode
    memories: list[Tree] = []

    def trial() -> tuple[Tree, Tree]:
        first = None if plan.index is None else plan.index[..., 0, :]
        return theta, problem.lower_data.batch(first)

    for group in groups(
        problem.g, x, own_batch=plan.own, rows=plan.rows, mode=mode, chunk=plan.chunk, trial=trial
    ):
        mine = {key: leaf[group.part] for key, leaf in moments.items()}
        losses[group.part], kept, took = _run(plan, problem, theta, group, mine, name, remember)
        memories = memories + kept
        calls = calls + took
    return losses, joined(memories) if isinstance(rule, TorchRule) and remember else moments, calls


def _run(
    plan: Plan,
    problem: Problem,
    theta: Tree,
    group: Group,
    moments: Tree,
    name: str,
    remember: bool,
) -> tuple[Tensor, list[Tree], int]:
    """Run one group; return (losses, memory of each member's torch optimiser, gradient count)."""
    rule = plan.rule
    part = group.part
    programs = programs_of(problem)
    index = group.rows_of(plan.index) if plan.own else plan.index
    members = part if isinstance(part, slice) else slice(part, part + 1)
    rates = [step[members] for step in plan.rates]
    decays = plan.decays[members]
    calls = len(rates) * len(decays)
    if programs is not None and isinstance(rule, Rule) and plan.accumulate == 1:
        mine = evolve(plan, index=index, rates=rates, decays=decays)
        return advance_compiled(programs, name, mine, problem, theta, group, moments), [], calls
    slope = slope_of(problem, theta, group, index, accumulate=plan.accumulate)
    if isinstance(rule, TorchRule):
        loss, memories, took = advance_torch(rule, group, moments, slope, rates, decays, remember)
        return loss, memories, took * len(decays)
    like = next(iter(group.x.values()))
    of_rates = [of_part(part, step, like) for step in plan.rates]
    return (
        advance(rule, group, moments, slope, of_rates, of_part(part, plan.decays, like)),
        [],
        calls,
    )
