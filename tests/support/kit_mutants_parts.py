"""Selectors, estimators and outer optimisers that each fail one check of the kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve

from hgms_core import Candidates, Cost
from hgms_core.capabilities import DrawsChoice
from support.kit_parts import DOC, Boxed, Exactly, Lowest, Step, Thompson, changed

# --- selectors, estimators, outer optimisers
# --------------------------------------------------------------------------------------------------


def selects(change: Callable[[Any, Candidates], Any], sound: Any = None) -> Any:
    return changed(
        sound or Lowest(),
        select=lambda own, plain, p, theta, c, key: change(plain(p, theta, c, key), c),
    )


def scores(change: Callable[..., Any]) -> Any:
    """A selector with other scores: ``change(own, plain, p, theta, c, key)``."""
    return changed(Lowest(), scores=change)


def on_rows_of(role: str) -> Callable[..., Any]:
    return lambda own, plain, p, theta, c, key: plain(
        evolve(p, upper_data={**p.upper_data, "select": p.upper_data[role]}), theta, c, key
    )


def nothing_to_choose(selection: Any, c: Candidates) -> Any:
    if not selection.finite:
        raise ValueError("nothing to choose from")
    return selection


def estimates(change: Callable[[Any], Any]) -> Any:
    return changed(
        Exactly(),
        estimate=lambda own, plain, *inputs: (change((made := plain(*inputs))[0]), made[1]),
    )


def steps(change: Callable[[Any, float], Any]) -> Any:
    """An optimiser whose next θ is changed, leaf by leaf."""

    def step(own: Any, plain: Any, theta: Any, gradient: Any, state: Any, progress: float) -> Any:
        following, after = plain(theta, gradient, state, progress)
        return {name: change(leaf, progress) for name, leaf in following.items()}, after

    return changed(Step(), step=step)


def differs_after_a_file(
    own: Any, plain: Any, theta: Any, gradient: Any, state: Any, progress: float
) -> Any:
    """A step of an optimiser that holds a tuple in its state; a file returns it as a list."""
    following, after = plain(theta, gradient, state, progress)
    shift = 0.1 * isinstance(state.get("mark"), list)
    return {name: leaf + shift for name, leaf in following.items()}, {**after, "mark": (1,)}


PARTS: list[tuple[str, str, Any]] = [
    ("selector", "selection", selects(lambda s, c: evolve(s, index=s.index[None]))),
    ("selector", "selection", selects(lambda s, c: evolve(s, gap=2 * s.gap))),
    ("selector", "selection", selects(lambda s, c: evolve(s, scores=s.scores.mean()))),
    ("selector", "permutation", selects(lambda s, c: evolve(s, index=torch.tensor(0)))),
    (
        "selector",
        "nan",  # sorts NaN first
        selects(
            lambda s, c: (
                s if s.finite == c.count else evolve(s, index=s.scores.isnan().int().argmax())
            )
        ),
    ),
    ("selector", "all-nan", selects(nothing_to_choose)),
    (
        "selector",
        "ties",
        selects(lambda s, c: evolve(s, index=(s.scores == s.scores[s.index]).nonzero().max())),
    ),
    (
        "selector",
        "ties",
        type("Changed", (Lowest,), {"__doc__": DOC, "capabilities": frozenset({DrawsChoice})})(),
    ),
    ("selector", "ties", Thompson()),
    ("selector", "permutation", Thompson()),
    ("selector", "single", selects(lambda s, c: evolve(s, gap=s.gap.nan_to_num(posinf=0.0)))),
    ("selector", "same-rows", scores(on_rows_of("differentiate"))),
    ("selector", "same-rows", scores(on_rows_of("stop"))),
    ("selector", "oracle-counts", selects(lambda s, c: evolve(s, cost=Cost()))),
    (
        "selector",
        "chunks",
        scores(
            lambda own, plain, *inputs: (
                plain(*inputs) + 0.1 * (own.mode == "stacked") * plain(*inputs).mean()
            )
        ),
    ),
    ("hypergradient", "structure", estimates(lambda h: evolve(h, upper_loss=2 * h.upper_loss + 1))),
    (
        "hypergradient",
        "structure",
        estimates(lambda h: evolve(h, value={k: v[None] for k, v in h.value.items()})),
    ),
    ("hypergradient", "closed-form-bowl", Exactly(sign=-1.0)),
    (
        "hypergradient",
        "closed-form-bowl",  # of the right length in another direction
        estimates(
            lambda h: evolve(h, value={name: leaf.flip(-1) for name, leaf in h.value.items()})
        ),
    ),
    ("hypergradient", "closed-form-ridge", Exactly(ridge=0.1)),
    ("hypergradient", "closed-form-sources", Exactly(sign=-1.0)),
    ("hypergradient", "closed-form-sphere", Exactly(ridge=0.1)),
    ("hypergradient", "central-difference", Exactly(ridge=0.1)),
    ("hypergradient", "oracle-counts", estimates(lambda h: evolve(h, cost=Cost()))),
    (
        "hypergradient",
        "oracle-counts",
        estimates(lambda h: evolve(h, cost=evolve(h.cost, products=0))),
    ),
    (
        "hypergradient",
        "state",  # keeps what cannot be written to a file
        changed(
            Exactly(),
            estimate=lambda own, plain, p, theta, branch, key, state: (
                plain(p, theta, branch, key, {"calls": 0})[0],
                {"calls": 0, "branch": branch},
            ),
        ),
    ),
    ("outer", "state", changed(Step(), step=differs_after_a_file)),
    ("outer", "structure", steps(lambda leaf, progress: leaf[None])),
    (
        "outer",
        "structure",  # its rate is that of a budget that never quite ends
        steps(lambda leaf, progress: leaf + 0 * leaf / torch.tensor(1.0 - progress)),
    ),
    (
        "outer",
        "quadratic",
        changed(
            Step(),
            step=lambda own, plain, theta, gradient, *more: plain(
                theta, {name: -leaf for name, leaf in gradient.items()}, *more
            ),
        ),
    ),
    ("outer", "quadratic", steps(lambda leaf, progress: leaf.clamp_min(0))),
    (
        "outer",
        "simplex",
        steps(lambda leaf, progress: torch.where((leaf > 0).all(), 0.5 * leaf, leaf)),
    ),
    ("outer", "feasible", Boxed()),
    (
        "outer",
        "state",  # keeps what cannot be written to a file
        changed(
            Step(),
            step=lambda own, plain, *inputs: (
                (made := plain(*inputs))[0],
                {**made[1], "kept": object()},
            ),
        ),
    ),
]
