"""The kit's checks of selectors, hypergradient estimators and outer optimisers: a sound one passes
them all, and a mutant for each (asked in test_testing_mutants.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, field, frozen

from hgms.testing import check_component
from hgms_core import (
    Branch,
    Candidates,
    ConfigError,
    Cost,
    Estimate,
    Key,
    Mode,
    Problem,
    Selection,
    State,
    Tree,
    hypergradient,
    values,
)

DOC = """A small sound component to break in many ways.

    >>> 1 + 1
    2

    Source: this test.
    """


@frozen(kw_only=True)
class Lowest:
    __doc__ = DOC
    name: ClassVar[str] = "lowest"
    batch_size: int | None = None
    mode: Mode = "loop"

    def scores(
        self, problem: Problem, theta: Tree, candidates: Candidates, key: Key
    ) -> torch.Tensor:
        data = problem.upper_data["select"]
        index = data.draw(key, self.batch_size, 1)
        losses = values(
            problem.f,
            theta,
            candidates.x,
            data.batch(None if index is None else index[0]),
            mode=self.mode,
        )
        sound = torch.stack(
            [leaf.reshape(candidates.count, -1).isfinite().all(1) for leaf in candidates.x.values()]
        ).all(0)
        return torch.where(sound, losses, math.nan)

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        scores = self.scores(problem, theta, candidates, key)
        cost = Cost(
            upper_values=len(scores),
            rows=len(scores) * problem.upper_data["select"].count(self.batch_size),
        )
        ranked = torch.where(scores.isfinite(), scores, math.inf)
        ordered = ranked.sort().values
        gap = (
            (ordered[1] - ordered[0]).nan_to_num(math.inf)
            if len(scores) > 1
            else torch.full_like(ordered[0], math.inf)
        )
        return Selection(
            index=ranked.argmin(), scores=scores, gap=gap, finite=scores.isfinite().sum(), cost=cost
        )


class Softmax(Lowest):
    """Draws a candidate with the probability softmax(−f), by Gumbel's trick."""

    __doc__ = DOC

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        selection = super().select(problem, theta, candidates, key)
        uniform = torch.rand(
            len(selection.scores), generator=key.fold("gumbel").generator(), dtype=torch.float64
        )
        drawn = selection.scores - (-uniform.log()).log().neg()
        return evolve(selection, index=torch.where(drawn.isfinite(), drawn, math.inf).argmin())


class Thompson(Lowest):
    """The best of scores with noise of their own."""

    __doc__ = DOC

    def scores(
        self, problem: Problem, theta: Tree, candidates: Candidates, key: Key
    ) -> torch.Tensor:
        scores = super().scores(problem, theta, candidates, key)
        return scores + torch.randn(
            candidates.count, generator=key.fold("noise").generator(), dtype=torch.float64
        ).to(scores)


class Rarely(Lowest):
    """The best one; with a probability of 3 % any other (ε-greedy), which a few keys do not
    show.
    """

    __doc__ = DOC
    draws: ClassVar[bool] = True

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        selection = super().select(problem, theta, candidates, key)
        draw = torch.rand(
            1 + candidates.count, generator=key.fold("explore").generator(), dtype=torch.float64
        )
        anywhere = torch.where(selection.scores.isfinite().cpu(), draw[1:], -1.0).argmax()
        return evolve(selection, index=anywhere if draw[0] < 0.03 else selection.index)


class NeverAfterAll(Lowest):
    """Says that it draws, and does not."""

    __doc__ = DOC
    draws: ClassVar[bool] = True


class Middle(Lowest):
    """The candidate in the middle of the ranking."""

    __doc__ = DOC

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        selection = super().select(problem, theta, candidates, key)
        order = torch.where(selection.scores.isfinite(), selection.scores, math.inf).argsort(
            stable=True
        )
        tied = selection.scores == selection.scores[order[max(int(selection.finite) - 1, 0) // 2]]
        return evolve(selection, index=tied.to(torch.int64).argmax())


def selector(change: Callable[[Selection, Candidates], Selection], cls: type = Lowest) -> Any:
    """A selector whose answer is changed on its way out."""

    class Changed(cls):  # type: ignore[valid-type, misc]
        __doc__ = DOC

        def select(
            self, problem: Problem, theta: Tree, candidates: Candidates, key: Key
        ) -> Selection:
            return change(super().select(problem, theta, candidates, key), candidates)

    return Changed()


class Unsound(Lowest):
    """Sorts NaN first."""

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        selection = super().select(problem, theta, candidates, key)
        bad = ~selection.scores.isfinite()
        return evolve(selection, index=bad.to(torch.int64).argmax()) if bad.any() else selection


class Raises(Lowest):
    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        selection = super().select(problem, theta, candidates, key)
        if not selection.finite:
            raise ValueError("nothing to choose from")
        return selection


class OwnRows(Lowest):
    """Scores every candidate on rows of its own."""

    def scores(
        self, problem: Problem, theta: Tree, candidates: Candidates, key: Key
    ) -> torch.Tensor:
        scores = [
            Lowest.scores(
                self,
                problem,
                theta,
                Candidates(x={name: leaf[i : i + 1] for name, leaf in candidates.x.items()}),
                key.fold(i),
            )
            for i in range(candidates.count)
        ]
        return torch.cat(scores)


class StackedSum(Lowest):
    """Forgets, in the stacked form only, that candidates have scores of their own."""

    def scores(
        self, problem: Problem, theta: Tree, candidates: Candidates, key: Key
    ) -> torch.Tensor:
        scores = super().scores(problem, theta, candidates, key)
        return scores + 0.1 * scores.mean() if self.mode == "stacked" else scores


@frozen(kw_only=True)
class Exactly:
    __doc__ = DOC
    name: ClassVar[str] = "exactly"
    sign: float = 1.0
    ridge: float = 0.0

    def init(self, problem: Problem) -> State:
        return {"calls": 0}

    def estimate(
        self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State
    ) -> tuple[Estimate, State]:
        below = problem.lower_data.batch(None)
        above = problem.upper_data["differentiate"].batch(None)

        def dense(matvec: Any, b: torch.Tensor) -> torch.Tensor:
            columns = torch.stack([matvec(row) for row in torch.eye(len(b), dtype=b.dtype)], 1)
            return (
                self.sign
                * torch.linalg.pinv(
                    columns + self.ridge * torch.eye(len(b), dtype=b.dtype), rtol=1e-6
                )
                @ b
            )

        estimate = hypergradient(
            lambda t, x: problem.f(t, x, above),
            lambda t, x: problem.g(t, x, below),
            theta,
            branch.x,
            solver=dense,
        )
        return estimate, {"calls": state["calls"] + 1}


def estimator(change: Callable[[Estimate], Estimate]) -> Any:
    class Changed(Exactly):
        __doc__ = DOC

        def estimate(
            self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State
        ) -> tuple[Estimate, State]:
            estimate, state = super().estimate(problem, theta, branch, key, state)
            return change(estimate), state

    return Changed()


class NoMixedTerm(Exactly):
    """Quadratic problems only: takes the curvature at the origin."""

    def estimate(
        self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State
    ) -> tuple[Estimate, State]:
        moved = evolve(branch, x={name: 0.5 * leaf for name, leaf in branch.x.items()})
        estimate, state = super().estimate(problem, theta, moved, key, state)
        return evolve(
            estimate,
            upper_loss=problem.f(theta, branch.x, problem.upper_data["differentiate"].batch(None)),
        ), state


class Remembers(Exactly):
    """Keeps what cannot be written to a file."""

    def estimate(
        self, problem: Problem, theta: Tree, branch: Branch, key: Key, state: State
    ) -> tuple[Estimate, State]:
        estimate, _ = super().estimate(problem, theta, branch, key, {"calls": 0})
        return estimate, {"calls": 0, "branch": branch}


@frozen(kw_only=True)
class Step:
    __doc__ = DOC
    name: ClassVar[str] = "step"
    lr: float = 0.1
    decay: float = field(default=0.5)

    def init(self, theta: Tree) -> State:
        return {"m": {name: torch.zeros_like(leaf) for name, leaf in theta.items()}}

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        m = {name: self.decay * state["m"][name] + gradient[name] for name in theta}
        return {name: theta[name] - self.lr * m[name] for name in theta}, {"m": m}


@frozen
class Box:
    low: float = -1.0

    def apply(self, theta: Tree) -> Tree:
        return {name: leaf.clamp(self.low, 1.0) for name, leaf in theta.items()}


@frozen(kw_only=True)
class Unprojected(Step):
    __doc__ = DOC
    projection: Box = Box()


class Ascent(Step):
    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        return super().step(
            theta, {name: -leaf for name, leaf in gradient.items()}, state, progress
        )


class PositiveOnly(Step):
    """Refuses no start, and clamps at 0 all the same."""

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        moved, state = super().step(theta, gradient, state, progress)
        return {name: leaf.clamp_min(0) for name, leaf in moved.items()}, state


class RefusesAll(Step):
    def init(self, theta: Tree) -> State:
        raise ConfigError("wrong-value", "no start is good enough")


class OffSimplex(Step):
    """Halves what is positive: right for no vector that has to stay one of probabilities."""

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        moved, state = super().step(theta, gradient, state, progress)
        return {
            name: torch.where((leaf > 0).all(), 0.5 * leaf, leaf) for name, leaf in moved.items()
        }, state


class Flattens(Step):
    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        moved, state = super().step(theta, gradient, state, progress)
        return {name: leaf[None] for name, leaf in moved.items()}, state


class DividesByWhatIsLeft(Step):
    """Its rate is that of a budget that never quite ends."""

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        moved, state = super().step(theta, gradient, state, progress)
        left = torch.tensor(1.0 - progress, dtype=torch.float64)
        return {name: leaf + 0 * leaf / left for name, leaf in moved.items()}, state


class ForgetsWhatItSaved(Step):
    """Its momentum is kept in objects that no file holds."""

    def step(
        self, theta: Tree, gradient: Tree, state: State, progress: float
    ) -> tuple[Tree, State]:
        state = (
            state
            if "seen" not in state
            else {"m": {name: value.leaf for name, value in state["seen"].items()}}
        )
        moved, after = super().step(theta, gradient, state, progress)
        return moved, {"seen": {name: Kept(leaf) for name, leaf in after["m"].items()}}


@frozen(eq=False)
class Kept:
    leaf: torch.Tensor


MUTANTS: list[tuple[str, str, Any, str]] = [
    (
        "selector",
        "selection",
        selector(lambda s, c: evolve(s, index=s.index[None])),
        "it is one whole number",
    ),
    ("selector", "selection", selector(lambda s, c: evolve(s, gap=2 * s.gap)), "the gap is"),
    (
        "selector",
        "selection",
        selector(lambda s, c: evolve(s, scores=s.scores.mean())),
        "scores has the shape []",
    ),
    (
        "selector",
        "permutation",
        selector(lambda s, c: evolve(s, index=torch.tensor(0))),
        "in another order candidate",
    ),
    ("selector", "nan", Unsound(), "which holds nan"),
    ("selector", "all-nan", Raises(), "it raised ValueError: nothing to choose from"),
    (
        "selector",
        "ties",
        selector(lambda s, c: evolve(s, index=(s.scores == s.scores[s.index]).nonzero().max())),
        "it chose [5, 5, 5]",
    ),
    (
        "selector",
        "ties",
        NeverAfterAll(),
        "it says draws = True, and of 6 equal candidates it chose the same one with",
    ),
    (
        "selector",
        "single",
        selector(lambda s, c: evolve(s, gap=s.gap.nan_to_num(posinf=0.0))),
        "the gap is 0.0",
    ),
    ("selector", "same-rows", OwnRows(), "equal candidates have the scores"),
    (
        "selector",
        "oracle-counts",
        selector(lambda s, c: evolve(s, cost=Cost())),
        "f was called 6 times, 0 calls are declared",
    ),
    ("selector", "chunks", StackedSum(), "with {'mode': 'stacked'} scores is"),
    (
        "hypergradient",
        "structure",
        estimator(lambda h: evolve(h, upper_loss=2 * h.upper_loss + 1)),
        "upper_loss is",
    ),
    (
        "hypergradient",
        "structure",
        estimator(lambda h: evolve(h, value={k: v[None] for k, v in h.value.items()})),
        "θ has",
    ),
    ("hypergradient", "closed-form-bowl", Exactly(sign=-1.0), "of its length (allowed 0.001)"),
    ("hypergradient", "closed-form-ridge", Exactly(ridge=0.1), "of its length (allowed 0.001)"),
    ("hypergradient", "closed-form-sources", Exactly(sign=-1.0), "of its length (allowed 0.001)"),
    ("hypergradient", "closed-form-sphere", Exactly(ridge=0.1), "of its length (allowed 0.001)"),
    ("hypergradient", "central-difference", NoMixedTerm(), "differences give"),
    (
        "hypergradient",
        "oracle-counts",
        estimator(lambda h: evolve(h, cost=Cost())),
        "f was called 1 times, 0 calls are declared",
    ),
    (
        "hypergradient",
        "oracle-counts",
        estimator(lambda h: evolve(h, cost=evolve(h.cost, products=0))),
        "products, 0 are declared",
    ),
    ("hypergradient", "state", Remembers(), "a Branch"),
    (
        "outer",
        "structure",
        Flattens(),
        "θ has {'a': [3], 'b': [2]}, the next one {'a': [1, 3], 'b': [1, 2]}",
    ),
    (
        "outer",
        "structure",
        DividesByWhatIsLeft(),
        "at progress 1.0 'a' is not finite, 'b' is not finite",
    ),
    ("outer", "quadratic", Ascent(), "it ends at a = "),
    ("outer", "quadratic", PositiveOnly(), "it ends at a = "),
    ("outer", "simplex", OffSimplex(), "it ends at a = "),
    ("outer", "simplex", RefusesAll(), "it raised ConfigError: no start is good enough"),
    ("outer", "feasible", Unprojected(), "away from where its projection puts it"),
    ("outer", "state", ForgetsWhatItSaved(), "(state.seen.a)"),
]


@pytest.mark.parametrize(
    "sound",
    [Lowest(), Softmax(), Thompson(), Rarely(), Middle(), Exactly(), Step()],
    ids=lambda x: type(x).__name__,
)
def test_a_sound_component(sound: Any) -> None:
    assert check_component(sound) == {}
