"""Checks of methods that weigh: sources that hold the same rows, and copies of rows, keep equal
weights but for chance (A/A).

What is chance? The rows are the same, so in expectation nothing pulls one weight from the other, at
equal weights and at any others. A run goes over a few outer steps from weights e : 1 and from 1 :
e; what it departs by from where it began, in the log of the ratio of the weights, is averaged over
seeds (other data, other batches). Each of these averages has mean zero for a method that is fair,
and is told from zero by a t-test over 16 seeds (t > 4) and by its size (over a fifth of what the
method departs by anyhow: a random walk is fair, however far it goes):

- away from equality: the heavier side gains, wherever it began (one-sided: a pull towards equality
  is fair);
- by name: one side gains, whichever is the heavier;
- by order: the sources given in the other order end with other weights by name;
- halves of one file: when they are exchanged, their weights are not.

The last allows what the halves really differ by: that changes its sign with them. Seeds are added
only while an average looks unlike zero; where all are zero to rounding at the first seed, nothing
is left to chance and that one is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from hgms.runs import needs
from hgms.testing import problems
from hgms.testing.kit import F64, ask_if, fail, refused, stepped
from hgms_core import Problem, Sources, Tree

LOOKS = {4: 1.5, 8: 2.0, 16: 4.0}
"""After so many seeds a departure is chance up to this t; at the last look that is the verdict."""
SHARE = 0.2
LEAST = 0.02
"""It is chance too up to this share of the departures' root mean square, or up to this in all."""
STEPS = 8
CALLS = 200
"""Outer steps of a run: so many, or after the third as soon as it has made so many oracle calls."""


@frozen
class Departure:
    """An average to be zero: one value a seed, beside the departures (of single runs) that it is
    small or large against.
    """

    value: float
    beside: tuple[float, ...]
    says: str
    one_sided: bool = False

    @property
    def size(self) -> float:
        return self.value if self.one_sided else abs(self.value)


def check_equal_sources(method: Any) -> None:
    """On two sources with the very same rows, and on halves of one file, the weights leave equality
    by no more than chance: the heavier source does not grow, and names, order and exchanged halves
    do not matter (averages over up to 16 seeds).
    """
    error = refused(lambda: method.init(problems.halves(0, same=True), 0))
    ask_if(error is None, f"it rejects sources: {error.message if error else ''}")

    def departed(seed: int, level: float, **options: Any) -> float:
        problem = problems.halves(seed, level=level, **options)
        sources = problem.find(Sources)
        assert sources is not None
        omega = dict(
            zip(
                sources.names,
                sources.weights(_trained(method, problem, seed)).clamp_min(1e-3).tolist(),
                strict=True,
            )
        )
        return math.log(omega["left"] / omega["right"]) - level

    def trial(seed: int) -> dict[str, Departure]:
        up, down, turned = (
            departed(seed, level, same=True, turned=turn)
            for level, turn in ((1, False), (-1, False), (1, True))
        )
        half, other = (departed(seed, 0.0, same=False, turned=turn) for turn in (False, True))
        return {
            **_sides(up, down, "the source"),
            "order": Departure(
                turned - up,
                (turned, up),
                "in the other order the sources have other weights by name",
            ),
            "halves": Departure(
                (half + other) / 2,
                (half, other),
                "halves of one file are exchanged, and their weights are not",
            ),
        }

    _by_chance(trial)


def check_equal_rows(method: Any) -> None:
    """On rows that are there twice, with a weight each, the copies' mean weights leave equality by
    no more than chance: the heavier copies do not grow, and the first are not preferred (averages
    over up to 16 seeds).
    """
    if {"sources", "few-upper"} & set(needs(method)) or refused(
        lambda: method.init(problems.copies(0), 0)
    ):
        return

    def departed(seed: int, level: float) -> float:
        first, second = _trained(method, problems.copies(seed, level), seed)["logits"].chunk(2)
        return float((first - second).mean()) - level

    _by_chance(lambda seed: _sides(departed(seed, 1.0), departed(seed, -1.0), "the copy"))


def _sides(up: float, down: float, what: str) -> dict[str, Departure]:
    """From departures that began with the one side and with the other as the heavier."""
    says = f"{what} that is heavier gets heavier, though both hold the same rows"
    return {
        "away": Departure((up - down) / 2, (up, down), says, one_sided=True),
        "name": Departure(
            (up + down) / 2,
            (up, down),
            f"{what} that comes first gains, though both hold the same rows",
        ),
    }


def _trained(method: Any, problem: Problem, seed: int) -> Tree:
    # A method with phases has its weights after the last.
    phases = "sources" in needs(method) and hasattr(method, "finished")
    state = start = method.init(problem, seed)
    for step, (after, record) in enumerate(
        stepped(method, problem, start, 60 if phases else STEPS)
    ):
        state = after
        if not phases and step >= 2 and (record.get("oracle_calls") or 0) >= CALLS:
            break
    theta: Tree = method.result(state)[0]
    return theta


def _by_chance(trial: Callable[[int], Mapping[str, Departure]]) -> None:
    seen = [trial(0)]
    if all(departure.size <= 1e-6 for departure in seen[0].values()):
        return
    suspects: list[str] = []
    for looks, limit in LOOKS.items():
        seen += [trial(seed) for seed in range(len(seen), looks)]
        suspects = [
            says
            for name in seen[0]
            if (says := _beyond([departure[name] for departure in seen], limit))
        ]
        if not suspects:
            return
    fail("; ".join(suspects))


def _beyond(departures: list[Departure], limit: float) -> str:
    """What is to be said where the mean is beyond chance; empty where it is not."""
    values = torch.tensor([departure.value for departure in departures], dtype=F64)
    beside = torch.tensor([run for departure in departures for run in departure.beside], dtype=F64)
    mean = float(values.mean())
    typical = float(beside.square().mean().sqrt())
    size = mean if departures[0].one_sided else abs(mean)
    t = size / max(float(values.std()) / math.sqrt(len(values)), 1e-12)
    if size <= max(LEAST, SHARE * typical) or t <= limit:
        return ""
    much = (
        f"{mean:.2g} in the log-odds, a mean over {len(values)} seeds (t = {t:.1f}; a run "
        f"departs by {typical:.2g})"
    )
    return f"{departures[0].says}: by {much}"
