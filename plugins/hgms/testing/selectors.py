"""Checks of selectors: select one finite candidate of N, independent of their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hgms.testing import oracle, problems
from hgms.testing.kit import (
    F64,
    demand,
    demand_modes,
    difference,
    normal,
    numbers,
    place,
    show,
    with_fields,
)
from hgms_core import Candidates, Key, Selection
from hgms_core.capabilities import DrawsChoice, find

KEY = Key(3)
COUNT = 6


def exercise(selector: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    known = problems.ridge(dtype, variant)
    stack = candidates(dtype, variant)
    inputs = {
        "theta": known.theta,
        "candidates": stack,
        "rows": known.problem.upper_data["select"].whole,
    }
    return inputs, lambda: selector.select(known.problem, known.theta, stack, KEY)


def candidates(dtype: torch.dtype = F64, variant: int = 0) -> Candidates:
    x = {
        "w": normal(COUNT, 3, seed=variant + 40).to(dtype),
        "b": normal(COUNT, seed=variant + 41).to(dtype),
    }
    return Candidates(x=x, losses=torch.arange(COUNT, device=place()).to(dtype))


def select(selector: Any, stack: Candidates, key: Key = KEY) -> Selection:
    """Return the selection after a check of its shapes."""
    known = problems.ridge()
    selection: Selection = selector.select(known.problem, known.theta, stack, key)
    demand(
        isinstance(selection, Selection),
        f"select returns {type(selection).__name__}; return a hgms_core.Selection",
    )
    index = selection.index
    whole = isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point()
    demand(whole, f"index is {index!r}; it is one whole number")
    demand(0 <= int(index) < stack.count, f"index is {int(index)} of {stack.count} candidates")
    shape = list(selection.scores.shape)
    demand(shape == [stack.count], f"scores has the shape {shape}, not [{stack.count}]")
    return selection


def rows(order: Sequence[int]) -> Candidates:
    """Return these candidates in this order."""
    stack = candidates()
    index = numbers(order, torch.int64)
    assert stack.losses is not None
    return Candidates(
        x={name: leaf[index] for name, leaf in stack.x.items()}, losses=stack.losses[index]
    )


EQUAL = (0,) * COUNT
"""Indices for copies of the first candidate."""


def spoilt(which: Sequence[int], value: float = math.nan) -> Candidates:
    """Return the candidates with this number in the candidates of ``which``."""
    stack = candidates()
    stack.x["w"][list(which), 0] = value
    return stack


def check_selection(selector: Any) -> None:
    """The index is an integer from 0 to N − 1, and there are N scores. The gap is the distance
    of the two best scores (lowest or highest), or from the selected score to the next, or
    infinite.
    """
    selection = select(selector, candidates())
    demand(
        int(selection.finite) == COUNT,
        f"it says that {int(selection.finite)} of {COUNT} finite candidates are finite",
    )
    demand(float(selection.gap) >= 0, f"the gap is {float(selection.gap)}")
    scores = selection.scores
    gap = float(selection.gap)
    if torch.isfinite(scores).all():
        steps = scores.sort().values.diff()
        own = int((scores < scores[int(selection.index)]).sum())
        right = {float(steps[0]), float(steps[-1]), float(steps[max(own - 1, 0) : own + 1].min())}
        close = any(abs(gap - value) <= 1e-9 * (1 + value) for value in right)
        demand(
            close,
            (
                f"the gap is {gap:.6g} instead of "
                f"{' or '.join(f'{value:.6g}' for value in sorted(right))}"
            ),
        )


DRAWS = 200
"""Keys per selector with a random choice, to estimate the frequency of each candidate."""


MEANT = "; declare DrawsChoice if the choice is random by design"


def _choices(selector: Any, stack: Candidates, keys: int = DRAWS) -> Tensor:
    """Count how often each candidate is selected with ``keys`` keys."""
    known = problems.ridge()
    chosen = [
        selector.select(known.problem, known.theta, stack, KEY.fold("choice", i)).index
        for i in range(keys)
    ]
    return torch.bincount(torch.stack(chosen).cpu(), minlength=stack.count).double()


def _is_random(selector: Any) -> bool:
    """Whether the choice is random by design (softmax, Thompson)."""
    return find(selector, DrawsChoice) is not None


def check_permutation(selector: Any) -> None:
    """With candidates in another order, the same candidate is selected, and the scores are
    reordered in the same way. A random choice (the selector declares `DrawsChoice`) has the same
    frequencies.
    """
    order = [4, 2, 0, 5, 1, 3]
    if _is_random(selector):
        here = _choices(selector, candidates())
        there = _choices(selector, rows(order))
        there = there[torch.tensor(order).argsort()]
        gap = (here - there).abs() / (here + there).clamp_min(1).sqrt()
        often = f"{here.int().tolist()} times, in another order {there.int().tolist()} times"
        demand(float(gap.max()) <= 4.5, f"in {DRAWS} draws it chose the candidates {often}")
        return
    first = select(selector, candidates())
    second = select(selector, rows(order))
    chosen = int(first.index)
    again = order[int(second.index)]
    demand(
        again == chosen, f"it chose candidate {chosen}, in another order candidate {again}{MEANT}"
    )
    gap = (first.scores[order] - second.scores).abs()
    demand(
        not (gap > 1e-9).any(),
        f"the scores are {show(second.scores)} instead of {show(first.scores[order])}",
    )


def check_nan(selector: Any) -> None:
    """A candidate with a non-finite number is never selected, and does not count as finite."""
    best = int(select(selector, candidates()).index)
    for value in (math.nan, math.inf):
        bad = [best, (best + 2) % COUNT]
        selection = select(selector, spoilt(bad, value))
        demand(
            int(selection.index) not in bad,
            f"it chose candidate {int(selection.index)}, which holds {value}",
        )
        demand(
            int(selection.finite) == COUNT - 2,
            f"it says {int(selection.finite)} are finite; {COUNT - 2} are",
        )


def check_all_nan(selector: Any) -> None:
    """If no candidate is finite, the selector raises no error and reports 0 finite candidates."""
    selection = select(selector, spoilt(range(COUNT)))
    demand(int(selection.finite) == 0, f"it says that {int(selection.finite)} are finite")


def check_ties(selector: Any) -> None:
    """Of equal candidates, the first is always selected. A random choice (the selector declares
    `DrawsChoice`) depends on the key.
    """
    if _is_random(selector):
        demand(
            (_choices(selector, rows(EQUAL)) > 0).sum() > 1,
            f"it declares DrawsChoice, but of {COUNT} equal candidates it chose the same one with "
            f"{DRAWS} keys",
        )
        return
    chosen = [int(select(selector, rows(EQUAL), KEY.fold(i)).index) for i in range(16)]
    demand(not any(chosen), f"of {COUNT} equal candidates it chose {chosen}{MEANT}")


def check_single(selector: Any) -> None:
    """With one candidate, this candidate is selected and the gap is infinite."""
    gap = float(select(selector, rows([2])).gap)
    demand(math.isinf(gap), f"the gap is {gap}")


def check_same_rows(selector: Any) -> None:
    """All candidates are scored on the same rows: equal candidates have equal scores, also on
    small batches. Validation rows have the role `select`: the rows of other roles are for ∇f and
    for stopping.
    """
    scores = select(with_fields(selector, batch_size=2), rows(EQUAL)).scores
    spread = (
        float((scores - scores[0]).abs().max())
        if torch.isfinite(scores).all() and not _is_random(selector)  # else scores may be random
        else 0.0
    )
    demand(spread <= 1e-12, f"equal candidates have the scores {show(scores)}")
    known = problems.ridge()
    stack = candidates()
    own = selector.select(known.problem, known.theta, stack, KEY).scores
    for role in ("differentiate", "stop"):
        other = {**known.problem.upper_data, role: problems.ridge(seed=1).problem.upper_data[role]}
        again = selector.select(
            evolve(known.problem, upper_data=other), known.theta, stack, KEY
        ).scores
        demand(
            not difference(own, again),
            f"the scores depend on the rows of {role!r}; take problem.upper_data['select']",
        )


def check_oracle_counts(selector: Any) -> None:
    """The declared cost is correct: every call of f or g is declared with its rows, and no other
    call.
    """
    known = problems.ridge()
    problem, tally = oracle.watch(known.problem)
    for variant in (selector, with_fields(selector, batch_size=4)):
        variant.select(problem, known.theta, candidates(), KEY)  # the first call is not counted
        tally.clear()
        oracle.demand_honest(variant.select(problem, known.theta, candidates(), KEY).cost, tally)


def check_chunks(selector: Any) -> None:
    """The fields `mode` and `chunk` change how candidates are evaluated, but not the result."""
    demand_modes(selector, lambda variant: select(variant, candidates()), chunk=4, rtol=1e-10)
