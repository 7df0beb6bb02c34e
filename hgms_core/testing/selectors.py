"""Checks of selectors: one of N candidates, whatever their order, and never one that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hgms_core.records import Candidates, Selection
from hgms_core.seeding import Key
from hgms_core.testing import problems
from hgms_core.testing.kit import Check, demand, difference, has, normal, place, shown, snapshot, with_fields
from hgms_core.trees import Tree

KEY = Key(3)
COUNT = 6


def checks() -> Iterator[Check]:
    for question in (
        check_selection, check_permutation, check_nan, check_all_nan, check_ties, check_single, check_same_rows, check_chunks,
    ):  # fmt: skip
        yield Check("selector", question)


def exercise(selector: Any, dtype: torch.dtype, variant: int) -> tuple[Any, Callable[[], Any]]:
    known = problems.ridge(dtype, variant)
    found = candidates(dtype, variant)
    inputs = {"theta": known.theta, "candidates": found, "rows": known.problem.upper_data["select"].whole}
    return inputs, lambda: selector.select(known.problem, known.theta, found, KEY)


def candidates(dtype: torch.dtype = torch.float64, variant: int = 0) -> Candidates:
    x = {"w": normal(COUNT, 3, seed=variant + 40).to(dtype), "b": normal(COUNT, seed=variant + 41).to(dtype)}
    return Candidates(x=x, losses=torch.arange(COUNT, device=place()).to(dtype))


def selected(selector: Any, found: Candidates) -> Selection:
    """The selection, after its shapes were found right."""
    known = problems.ridge()
    selection: Selection = selector.select(known.problem, known.theta, found, KEY)
    demand(isinstance(selection, Selection), f"select returns {type(selection).__name__}; return a hgms_core.Selection")
    index = selection.index
    demand(
        isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point(),
        f"index is {index!r}; it is one whole number",
    )
    demand(0 <= int(index) < found.count, f"index is {int(index)} of {found.count} candidates")
    demand(
        selection.scores.shape == (found.count,), f"scores has the shape {list(selection.scores.shape)}, not [{found.count}]"
    )
    return selection


def rows(found: Candidates, order: Tensor) -> Candidates:
    assert found.losses is not None
    return Candidates(x={name: leaf[order] for name, leaf in found.x.items()}, losses=found.losses[order])


def spoilt(found: Candidates, which: list[int], value: float = math.nan) -> Candidates:
    x: Tree = {name: leaf.clone() for name, leaf in found.x.items()}
    x["w"][which, 0] = value
    return Candidates(x=x, losses=found.losses)


def check_selection(selector: Any) -> None:
    """One whole number from 0 to N − 1, N scores, and a gap that is the distance of the best two scores (or infinite)."""
    selection = selected(selector, candidates())
    demand(int(selection.finite) == COUNT, f"it says that {int(selection.finite)} of {COUNT} finite candidates are finite")
    demand(float(selection.gap) >= 0, f"the gap is {float(selection.gap)}")
    scores = selection.scores
    if torch.isfinite(scores).all():
        own = scores[int(selection.index)]
        others = torch.cat([scores[: int(selection.index)], scores[int(selection.index) + 1 :]])
        gap = float((others - own).abs().min())
        best = bool((own <= others).all() or (own >= others).all())
        demand(best, f"it takes the score {float(own):.6g}, neither the lowest nor the highest of {shown(scores)}")
        demand(
            abs(float(selection.gap) - gap) <= 1e-9 * (1 + gap), f"the gap is {float(selection.gap):.6g} instead of {gap:.6g}"
        )


def check_permutation(selector: Any) -> None:
    """Candidates in another order: the same one is chosen, and the scores change places with them."""
    found = candidates()
    order = torch.tensor([4, 2, 0, 5, 1, 3], device=place())
    one, other = selected(selector, found), selected(selector, rows(found, order))
    demand(
        int(order[int(other.index)]) == int(one.index),
        f"it chose candidate {int(one.index)}, in another order candidate {int(order[int(other.index)])}",
    )
    gap = (one.scores[order] - other.scores).abs()
    demand(not (gap > 1e-9).any(), f"the scores are {shown(other.scores)} instead of {shown(one.scores[order])}")


def check_nan(selector: Any) -> None:
    """A candidate with a number that is not finite is never chosen, and not counted as finite."""
    found = candidates()
    best = int(selected(selector, found).index)
    for value in (math.nan, math.inf):
        bad = [best, (best + 2) % COUNT]
        selection = selected(selector, spoilt(found, bad, value))
        demand(int(selection.index) not in bad, f"it chose candidate {int(selection.index)}, which holds {value}")
        demand(int(selection.finite) == COUNT - 2, f"it says {int(selection.finite)} are finite; {COUNT - 2} are")


def check_all_nan(selector: Any) -> None:
    """Where no candidate is finite it raises nothing and says that 0 are."""
    selection = selected(selector, spoilt(candidates(), list(range(COUNT))))
    demand(int(selection.finite) == 0, f"it says that {int(selection.finite)} are finite")


def check_ties(selector: Any) -> None:
    """Among equal candidates the first is chosen, every time."""
    found = rows(candidates(), torch.zeros(COUNT, dtype=torch.int64, device=place()))
    chosen = [int(selected(selector, found).index) for _ in range(3)]
    demand(chosen == [0, 0, 0], f"of {COUNT} equal candidates it chose {chosen}")


def check_single(selector: Any) -> None:
    """With one candidate that one is chosen, and the gap is infinite."""
    selection = selected(selector, rows(candidates(), torch.tensor([2], device=place())))
    demand(math.isinf(float(selection.gap)), f"the gap is {float(selection.gap)}")


def check_same_rows(selector: Any) -> None:
    """All candidates are scored on the same rows: equal ones have equal scores, on small batches too. Of the validation rows
    they are those of the role `select`: the others' are for ∇f and for stopping."""
    found = rows(candidates(), torch.zeros(COUNT, dtype=torch.int64, device=place()))
    scores = selected(with_fields(selector, batch_size=2), found).scores
    spread = float((scores - scores[0]).abs().max()) if torch.isfinite(scores).all() else 0.0
    demand(spread <= 1e-12, f"equal candidates have the scores {shown(scores)}")
    known, found = problems.ridge(), candidates()
    own = selector.select(known.problem, known.theta, found, KEY).scores
    for role in ("differentiate", "stop"):
        other = {**known.problem.upper_data, role: problems.ridge(seed=1).problem.upper_data[role]}
        differs = difference(own, selector.select(evolve(known.problem, upper_data=other), known.theta, found, KEY).scores)
        demand(not differs, f"the scores depend on the rows of {role!r}; take problem.upper_data['select']")


def check_chunks(selector: Any) -> None:
    """The fields `mode` and `chunk` change how candidates are evaluated, not what comes out."""
    if not has(selector, "mode"):
        return
    found = candidates()
    loop = snapshot(selected(with_fields(selector, mode="loop"), found))
    for options in ({"mode": "stacked"}, {"mode": "stacked", "chunk": 1}, {"mode": "stacked", "chunk": 4}):
        differs = difference(loop, snapshot(selected(with_fields(selector, **options), found)), rtol=1e-10)
        demand(not differs, f"with {options} {differs}")
