"""Bases of methods that work in phases: they learn a mixture or select rows, and then train x."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from attrs import field
from torch import Tensor

from hgms.arguments import require
from hgms_core import Cost, Data, Key, Problem, Record, Sources, State, Tree, component
from hgms_core.capabilities import (
    Capabilities,
    Finishes,
    HasPlaceholder,
    HasTestingInstance,
    RanksRows,
    find,
)
from hgms_core.validators import optional_positive, positive
from hgms_mix.lm.ranking import (
    AdamWSettings,
    Phase,
    adamw,
    adamw_on_mixture,
    adamw_part,
    adamw_start,
    epoch_rows,
    highest,
    optional_count,
    some_share,
    source_counts,
    sources_of,
)


@component
class PhasedMethod(AdamWSettings):
    """A method that works in phases, and trains x by AdamW.

    A subclass defines :attr:`phases`, ``init`` and ``is_finished``. The state of AdamW is
    ``state["train"]``, and the mixture ``state["theta"]``. ``use`` completes the message "method
    'x' … data sources".
    """

    name: ClassVar[str]
    use: ClassVar[str] = "mixes"
    needs: ClassVar[frozenset[str]] = frozenset({"sources", "per-example-losses"})
    capabilities: ClassVar[Capabilities] = frozenset({HasTestingInstance})
    testing: ClassVar[Mapping[str, Any]] = {}
    """The arguments of the instance for ``hgms check``, which ends within 60 outer steps."""

    @classmethod
    def testing_instance(cls) -> Self:
        """Return an instance for a problem of size 1."""
        return cls(**cls.testing)

    @property
    @abstractmethod
    def phases(self) -> Mapping[str, Phase]:
        """The work of one step, by phase."""

    def record_entries(self, state: State) -> dict[str, Any]:
        """Return entries for the records of all phases."""
        return {}

    def sources(self, problem: Problem) -> Sources:
        """Return the problem's sources.

        Raises
        ------
        ConfigError
            For a problem without sources.
        """
        return sources_of(problem, f"method {self.name!r} {self.use}")

    def theta(self, problem: Problem, weights: Tensor) -> Tree:
        """Return the θ that gives these weights of the sources."""
        sources = self.sources(problem)
        return sources.theta(dict(zip(sources.names, weights.tolist(), strict=True)))

    def start(self, problem: Problem, seed: int, phase: str, **more: Any) -> State:
        """Return the state before the first step, with an even mixture and x at x0.

        ``at`` is the progress in the current ``phase``.
        """
        sources = self.sources(problem)
        return {
            "seed": seed,
            "step": 0,
            "phase": phase,
            "at": 0,
            "theta": sources.theta(dict.fromkeys(sources.names, 1.0)),
            "cost": Cost().numbers(),
            "train": adamw_start(problem.x0),
            **more,
        }

    def step(self, problem: Problem, state: State, progress: float = 0.0) -> tuple[State, Record]:
        """Run one step of the phase ``state["phase"]``. A method that has ended does no work.

        Phases receive the state with its top-level tensors, which are indexed by rows, on the CPU.
        Lower variables stay on their device. The state's ``cost`` is the sum of the costs of the
        phases.
        """
        step = state["step"] + 1
        on_host = {
            name: value.cpu() if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
        ends = find(self, Finishes)
        ended = ends is not None and ends.is_finished(state)
        changes, record, spent = (
            ({}, {}, Cost()) if ended else self.phases[state["phase"]](problem, on_host)
        )
        cost = Cost(**state["cost"]) + spent
        record = {
            "step": step,
            "phase": state["phase"],
            **self.record_entries(state),
            **record,
            **{f"cost_{name}": number for name, number in cost.numbers().items()},
            "oracle_calls": cost.calls,
        }
        return {**state, **changes, "step": step, "cost": cost.numbers()}, record

    def result(self, state: State) -> tuple[Tree, Tree]:
        """Return (θ, x): the mixture so far, and the x that is trained now."""
        return state["theta"], adamw_part(state["train"], "x")


@component
class TrainedMethod(PhasedMethod):
    """A method that trains x in its last phase, ``train``, with the learned mixture or rows.

    ``placeholder`` describes x without this training.

    Parameters
    ----------
    train_steps
        Updates of a fresh x; 0: x is from an earlier phase; None: until the budget is spent.
    """

    placeholder: ClassVar[str]
    capabilities: ClassVar[Capabilities] = PhasedMethod.capabilities | {Finishes, HasPlaceholder}

    train_steps: int | None = field(default=0, validator=optional_count)

    def is_finished(self, state: State) -> bool:
        """Return whether the training of x is complete."""
        ends = self.train_steps is not None and state["at"] >= self.train_steps
        return state["phase"] == "train" and ends

    @property
    def placeholder_reason(self) -> str:
        """The reason why x was not trained on the mixture; empty if it was."""
        return f"{self.placeholder} (train_steps = 0)" if self.train_steps == 0 else ""

    def fresh(self, problem: Problem) -> State:
        """Return the change of the state at the start of training; empty without training."""
        return {"train": adamw_start(problem.x0)} if self.train_steps != 0 else {}

    def next_updates(self, state: State, most: int) -> int:
        """Return the number of updates of the next step of training, at most ``most``."""
        return most if self.train_steps is None else min(most, self.train_steps - state["at"])

    def update_on_rows(
        self,
        problem: Problem,
        state: State,
        rows: Tensor,
        *,
        lr: float | None = None,
        count: int | None = None,
        data: Data | None = None,
    ) -> tuple[State, Record, Cost]:
        """Run one update of x on some rows of ``data``: the pool, or validation rows.

        ``count`` is the number of updates including this one. By default, it is the number of
        steps so far in the phase, plus one.
        """
        data = data or problem.lower_data
        lower = data is problem.lower_data
        trained, loss = adamw(
            self.sources(problem).pooled if lower else problem.f,
            problem.theta0,
            data.rows(rows.to(data.device)),
            state["train"],
            self,
            lr=lr or self.lr,
            count=count or state["at"] + 1,
            step=state["step"] + 1,
        )
        cost = Cost(lower_gradients=int(lower), upper_gradients=int(not lower), rows=len(rows))
        return {"train": trained}, {"lower_loss" if lower else "upper_loss": loss}, cost


@component
class MixtureMethod(TrainedMethod):
    """A method that learns a mixture by updates on g(θ, ·), and then trains x at the mixture.

    Parameters
    ----------
    batch_size
        Rows of an update (None: all).
    updates
        The maximum in one outer step.
    """

    batch_size: int | None = field(default=32, validator=optional_positive)
    updates: int = field(default=10, validator=positive)

    def train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run updates of x at the learned mixture."""
        count = self.next_updates(state, self.updates)
        return self.update_on(problem, state["theta"], state, count, "train")

    def update_on(
        self, problem: Problem, theta: Tree, state: State, count: int, label: str
    ) -> tuple[State, Record, Cost]:
        """Run ``count`` updates of x at a mixture; ``label`` determines their batches."""
        train, loss, cost = adamw_on_mixture(
            problem,
            theta,
            state,
            self,
            batch_size=self.batch_size,
            key=Key(state["seed"]).fold(label),
            count=count,
        )
        return {"train": train, "at": state["at"] + count}, {"lower_loss": loss}, cost


@component
class RowSelection(TrainedMethod):
    """A method that ranks all rows of the pool, keeps the best, and trains x on them.

    Parameters
    ----------
    chunk
        Rows that are computed at a time.
    keep
        Share of all rows to keep, or ``size``: their number.
    batch_size
        Rows of an update.
    """

    use: ClassVar[str] = "chooses among the rows of"
    capabilities: ClassVar[Capabilities] = TrainedMethod.capabilities | {RanksRows}

    batch_size: int = field(default=32, validator=positive)
    chunk: int = field(default=32, validator=positive)
    keep: float = field(default=0.05, validator=some_share)
    size: int | None = field(default=None, validator=optional_positive)

    def start(self, problem: Problem, seed: int, phase: str, **more: Any) -> State:
        """Return the state before the first step: no row has a rank.

        Raises
        ------
        ConfigError
            For a ``size`` beyond the pool.
        """
        pool = problem.lower_data
        started = super().start(problem, seed, phase)
        require(
            self.size is None or self.size <= pool.size,
            "out-of-range",
            f"size={self.size} must be at most {pool.size}, the number of rows",
            place=("method", "size"),
        )
        ranks = torch.full((pool.size,), torch.nan, dtype=torch.float64)
        return {**started, "ranking": ranks, "kept": torch.empty(0, dtype=torch.int64), **more}

    def ranking(self, problem: Problem, state: State) -> Tensor:
        """Return the score of each row of the pool; NaN for rows without a score."""
        return torch.as_tensor(state["ranking"])

    def selection(self, problem: Problem, ranking: Tensor) -> State:
        """Return the changes of the state with a ranking: the kept rows, and their mixture."""
        kept = highest(ranking, self.size or max(1, round(self.keep * len(ranking))))
        theta = self.sources(problem).theta(source_counts(problem.lower_data, kept))
        return {"ranking": ranking, "kept": kept, "theta": theta, "at": 0}

    def train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run one update on the kept rows, in epochs of separate random orders."""
        kept = state["kept"]
        at = state["at"]
        key = Key(state["seed"]).fold("train")
        rows = kept[epoch_rows(key, len(kept), at, self.batch_size)]
        changes, record, cost = self.update_on_rows(problem, state, rows)
        return {**changes, "at": at + 1}, record, cost
