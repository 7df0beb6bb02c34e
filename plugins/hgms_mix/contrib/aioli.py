"""Aioli: estimate in every round which source lowers which validation loss, from short training
stretches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.arguments import require
from hgms.config import lowering
from hgms_core import Cost, Key, Problem, Record, State, component, hookimpl
from hgms_core.validators import (
    at_least,
    at_most,
    greater_than,
    less_than,
    optional,
    optional_positive,
    positive,
)
from hgms_mix.methods.online import training


@final
@component
class Aioli(training.RoundsMethod):
    """Online mixing by a linear law that is estimated again in every round::

        L_j after p  =  L_j − Σ_s A_js p_s
        sweeps:   x ← AdamW, ``sweep_steps`` updates at W_i, for i in a random order,
                  ``sweeps`` times over the sources
                  Δ_ji = mean over the sweeps of the fall of L_j at W_i
                  W_i = ``focus`` on source i, the rest evenly on the others
        A_j = W⁻¹ Δ_j,   A ← A − min(0, min A),   A ← A / Σ A,    p_{t+1} ∝ p_t e^(η Σ_j A_js)
        then      x ← AdamW, ``round_steps`` updates at p_{t+1}

    L_j is the mean loss of validation set j on its rows of the role ``differentiate``. With
    ``average`` a the weights are p ∝ e^(η Σ_j Ā_js) instead, Ā ← (1 − a) A + a Ā over the rounds.
    The mixture is the mean of the p_t that x was trained on, without the sweeps, which are even on
    average. One step is one stretch of a sweep, or up to ``updates`` updates.

    Use when the useful sources change while x trains, and a loss of validation rows is cheap. Avoid
    with few validation rows: the decrease over ``sweep_steps`` updates must exceed its noise.
    Weights change by at most η per round.

    Cost of a round: S·``sweeps``·``sweep_steps`` + ``round_steps`` lower gradients, 1 +
    S·``sweeps`` upper values. Memory: 3 lower states between steps, 10 within one.

    Parameters
    ----------
    rounds
        How many (None: until the budget is spent).
    round_steps
        Updates at the mixture of each.
    sweeps, sweep_steps
        Over the sources in each round, and updates at each W_i.
    focus
        Of W_i, between 1/S and 1.
    eta, average
        η and a (None: no average).
    updates
        The maximum of updates at the mixture in one outer step.
    lr, weight_decay, betas, eps, batch_size
        AdamW.
    chunk
        Validation rows whose losses are computed at a time.

    Raises
    ------
    ConfigError
        For a problem without sources or validation rows, and a ``focus`` of at most 1/S.
    NumericalError
        For infinite losses.

    Notes
    -----
    Source: Chen et al., *Aioli: a unified optimization framework for language model data mixing*,
    2025, algorithms 1 and 2.

    Examples
    --------
    >>> Aioli(rounds=None, eta=0.5).focus
    0.75
    """

    name: ClassVar[str] = "aioli"
    testing: ClassVar[Mapping[str, Any]] = {
        "rounds": 6,
        "round_steps": 10,
        "sweeps": 1,
        "eta": 2.0,
        "lr": 0.1,
    }

    rounds: int | None = field(default=20, validator=optional_positive)
    round_steps: int = field(default=100, validator=positive)
    sweeps: int = field(default=4, validator=positive)
    sweep_steps: int = field(default=4, validator=positive)
    focus: float = field(default=0.75, validator=[greater_than(0), at_most(1)])
    eta: float = field(default=0.2, validator=positive)
    average: float | None = field(default=None, validator=optional([at_least(0), less_than(1)]))

    memory_hints = lowering(same=["chunk"], other=["batch_size"])

    def init(self, problem: Problem, seed: int) -> State:
        sources = self.sources(problem)
        started = self.start(problem, seed, "sweeps")
        require(
            self.focus > 1 / len(sources.names),
            "out-of-range",
            f"focus={self.focus:g} must be greater than 1/{len(sources.names)} for "
            f"{len(sources.names)} sources",
            place=("method", "focus"),
        )
        return {
            **started,
            "round": 0,
            "count": 0,
            "before": torch.empty(0, dtype=torch.float64),
            "falls": torch.empty(0, 0, dtype=torch.float64),
            "law": torch.empty(0, 0, dtype=torch.float64),
        }

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"sweeps": self._sweep, "train": self._train}

    def record_entries(self, state: State) -> dict[str, Any]:
        return {"round": state["round"] + 1}

    def is_finished(self, state: State) -> bool:
        """Whether all rounds are complete."""
        return self.rounds is not None and state["round"] >= self.rounds

    def _sweep(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run updates at W_i and measure the decrease of the losses.

        After the last stretch of the round, the law and its mixture are computed.
        """
        sources = self.sources(problem)
        at = state["at"]
        before = state["before"]
        falls = state["falls"]
        spent = Cost()
        size = len(sources.names)
        key = Key(state["seed"]).fold("round", state["round"])
        if at == 0:
            before, spent = self.losses(problem, state["train"], state)
            falls = torch.zeros(len(before), size, dtype=torch.float64)
        order = torch.randperm(size, generator=key.fold("order", at // size).generator())
        number = int(order[at % size])
        focused = hgms_mix.lm.focused_mixtures(size, self.focus)[number]
        train, record, cost = training.train_on_mixture(
            problem, focused, state, self, key.fold("sweep", at), state["count"], self.sweep_steps
        )
        losses, more = self.losses(problem, train, state)
        falls = falls.clone()
        falls[:, number] += (before - losses) / self.sweeps
        spent += cost + more
        changes: State = {
            "train": train,
            "at": at + 1,
            "before": losses,
            "falls": falls,
            "count": state["count"] + self.sweep_steps,
        }
        if changes["at"] == self.sweeps * size:
            law = mixing_law(falls, self.focus)
            if self.average is not None and state["round"] > 0:
                law = (1 - self.average) * law + self.average * state["law"]
            base = training.even(sources) if self.average is not None else state["weights"]
            weights = training.tilt(base, self.eta * law.sum(0))
            changes |= {"phase": "train", "at": 0, "law": law, "weights": weights}
            if state["round"] == 0:
                changes["theta"] = self.theta(problem, weights)
        return (
            changes,
            {"source": sources.names[number], **record, "upper_loss": losses.mean()},
            spent,
        )

    def _train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        """Run some updates at the mixture of the round."""
        at = state["at"]
        count = min(self.updates, self.round_steps - at)
        key = Key(state["seed"]).fold("round", state["round"], "train")
        train, record, spent = training.train_on_mixture(
            problem, state["weights"], state, self, key, state["count"], count
        )
        changes: State = {"train": train, "at": at + count, "count": state["count"] + count}
        changes |= self.used_changes(problem, state, count)
        if changes["at"] == self.round_steps:
            changes |= {"phase": "sweeps", "at": 0, "round": state["round"] + 1}
        return changes, record, spent


def mixing_law(falls: Tensor, focus: float) -> Tensor:
    """Return A from the falls Δ, ``[M, S]``: all entries are at least 0 and their sum is 1.

    If all entries are 0, A is even.

    Examples
    --------
    >>> mixing_law(torch.tensor([[3.0, 1.0]], dtype=torch.float64), focus=1.0)
    tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """
    law = torch.linalg.solve(hgms_mix.lm.focused_mixtures(falls.shape[1], focus), falls.T).T
    law = law - law.min().clamp_max(0)
    return law / law.sum() if law.sum() > 0 else torch.full_like(law, 1 / law.numel())


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Aioli]
