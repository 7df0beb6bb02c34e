"""Rows drawn at random from all rows: the baseline for row selection and source mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from attrs import field
from torch import Tensor

import hgms_mix.lm
from hgms.config import lowering
from hgms_core import Cost, Key, Problem, Record, State, component
from hgms_core.validators import positive


@final
@component
class RandomRows(hgms_mix.lm.TrainedMethod):
    """Equal-compute random: x is trained on rows drawn at random from all rows, until the budget is
    spent::

        ω_s = n_s / n
        x ← AdamW on the mean loss of ``batch_size`` rows, each of source s with probability ω_s

    n_s is the number of rows in the file of source s, even if the task keeps fewer
    (``task.cache``): a row is then drawn evenly from the kept rows. The method does not use the
    validation rows, and θ stays at ω.

    ``hgms mix`` draws the fine-tuning set by ω: n_s / n of its rows from each source, at random.
    This equals a simple random sample of all rows, except that the number of rows per source is not
    random.

    Use always, next to methods that rank rows or learn weights. A method must outperform this
    baseline and ``uniform``, which uses equally many rows of every source, at the same cost. Avoid
    interpreting it as even weights: large sources dominate.

    Parameters
    ----------
    lr, weight_decay, betas, eps, batch_size
        AdamW of x.
    updates
        Of x, in one outer step.
    train_steps
        Updates in all; None: until the budget is spent; 0: x does not change, and all of a mix's
        compute remains for its other stages.

    Raises
    ------
    ConfigError
        For a problem without sources.
    NumericalError
        For infinite losses.

    Notes
    -----
    Cost: ``updates`` lower gradients per step. Memory: 3 lower states between steps, 7 within one
    (10 if ``updates`` > 1).

    Source: no selection; the reference of Ivison et al. 2025 (arXiv 2503.01807), which few methods
    outperform there.

    Examples
    --------
    >>> RandomRows().train_steps is None, RandomRows.role
    (True, 'floor')
    """

    name: ClassVar[str] = "random-rows"
    use: ClassVar[str] = "draws from"
    placeholder: ClassVar[str] = "x is where it starts"
    role: ClassVar[str] = "floor"
    testing_failures: ClassVar[Mapping[str, str]] = {"optimum": "its θ stays where it is"}

    batch_size: int = field(default=16, validator=positive)
    updates: int = field(default=1, validator=positive)
    train_steps: int | None = field(default=None, validator=hgms_mix.lm.optional_count)

    memory_hints = lowering(other=["batch_size"])

    def init(self, problem: Problem, seed: int) -> State:
        started = self.start(problem, seed, "train")
        return {
            **started,
            "theta": self.sources(problem).theta(hgms_mix.lm.prior_shares(problem, "rows")),
        }

    @property
    def phases(self) -> Mapping[str, hgms_mix.lm.Phase]:
        return {"train": self._train}

    def _train(self, problem: Problem, state: State) -> tuple[State, Record, Cost]:
        at = state["at"]
        record: Record = {"lower_loss": torch.empty(())}
        count = self.next_updates(state, self.updates)
        spent = Cost()
        changes: State = {"train": state["train"]}
        for update in range(at, at + count):
            rows = draw_rows(problem, Key(state["seed"]).fold("rows", update), self.batch_size)
            changes, record, cost = self.update_on_rows(
                problem, {**state, **changes}, rows, count=update + 1
            )
            spent += cost
        return {**changes, "at": at + count}, record, spent


def draw_rows(problem: Problem, key: Key, count: int) -> Tensor:
    """Draw numbers of pool rows with replacement.

    Each row is from source s with probability n_s / n, and uniform over the rows of the source.
    """
    own = hgms_mix.lm.prior_shares(problem, "rows")
    held = torch.tensor([rows for _, rows in problem.lower_data.strata or ()])
    probability = torch.tensor(
        [own[name] for name, _ in problem.lower_data.strata or ()], dtype=torch.float64
    )
    generator = key.generator()
    source = torch.multinomial(probability, count, replacement=True, generator=generator)
    within = (torch.rand(count, generator=generator, dtype=torch.float64) * held[source]).long()
    return held.cumsum(0)[source] - held[source] + within
