"""Checks of methods that learn weights: equal rows must keep equal weights, up to chance (A/A).

The rows are sources with the same rows, or copies of rows. Since the rows are equal, the expected
change of a weight ratio is zero, at equal weights and at any other weights.

The test: a run of a few outer steps starts from weights e : 1 and from 1 : e. Its departure is the
change of the log of the weight ratio. The departures are averaged over seeds (other data, other
batches). Each average below has mean zero for a fair method. It differs from zero if both
conditions are true:

- the t-test over 16 seeds rejects zero (t > 4);
- the average is larger than a fifth of the usual departures of the method: a random walk is fair,
  regardless of its length.

The averages:

- away from equality: the heavier side gains, regardless of its start (one-sided: a pull towards
  equality is fair);
- by name: one side gains, regardless of which is heavier;
- by order: sources given in the other order have other final weights by name;
- halves of one file: when the halves are exchanged, their weights are not.

The last average allows real differences between the halves, because these change sign with the
exchange. Seeds are added only while an average appears to differ from zero. If all averages are
zero to rounding at the first seed, there is no chance involved and one seed is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from hgms.runs import needs
from hgms.testing import problems
from hgms.testing.kit import F64, ask_if, fail, rejection, run_steps
from hgms_core import Problem, Sources, Tree
from hgms_core.capabilities import Finishes, find

LOOKS = {4: 1.5, 8: 2.0, 16: 4.0}
"""The limit of t per number of seeds; the last limit decides."""
SHARE = 0.2
LEAST = 0.02
"""The limits of chance: a share of the root mean square of the departures, and an absolute
value.
"""
STEPS = 8
CALLS = 200
"""Outer steps of a run; from the third step, a run stops earlier after ``CALLS`` oracle calls."""


@frozen
class Departure:
    """An average that should be zero: one value per seed.

    ``of_runs`` are the departures of single runs, the scale of the value.
    """

    value: float
    of_runs: tuple[float, ...]
    says: str
    one_sided: bool = False

    @property
    def size(self) -> float:
        return self.value if self.one_sided else abs(self.value)


def check_equal_sources(method: Any) -> None:
    """On two sources with the same rows, and on halves of one file, the weights leave equality
    by no more than chance. The heavier source does not grow. Names, order and exchanged halves
    have no effect (averages over up to 16 seeds).
    """
    error = rejection(lambda: method.init(problems.halves(0, same=True), 0))
    ask_if(error is None, f"it rejects sources: {error.message if error else ''}")

    def departure(seed: int, level: float, **options: Any) -> float:
        problem = problems.halves(seed, level=level, **options)
        sources = problem.find(Sources)
        assert sources is not None
        omega = dict(
            zip(
                sources.names,
                sources.weights(_train(method, problem, seed)).clamp_min(1e-3).tolist(),
                strict=True,
            )
        )
        return math.log(omega["left"] / omega["right"]) - level

    def trial(seed: int) -> dict[str, Departure]:
        up, down, turned = (
            departure(seed, level, same=True, turned=turn)
            for level, turn in ((1, False), (-1, False), (1, True))
        )
        half, other = (departure(seed, 0.0, same=False, turned=turn) for turn in (False, True))
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
    """On rows that occur twice, with one weight each, the mean weights of the copies leave
    equality by no more than chance. The heavier copies do not grow, and the first copies are not
    preferred (averages over up to 16 seeds).
    """
    if {"sources", "few-upper"} & set(needs(method)) or rejection(
        lambda: method.init(problems.copies(0), 0)
    ):
        return

    def departure(seed: int, level: float) -> float:
        first, second = _train(method, problems.copies(seed, level), seed)["logits"].chunk(2)
        return float((first - second).mean()) - level

    _by_chance(lambda seed: _sides(departure(seed, 1.0), departure(seed, -1.0), "the copy"))


def _sides(up: float, down: float, what: str) -> dict[str, Departure]:
    """Return the departures of runs that started with one side heavier (``up``) and the other
    (``down``).
    """
    says = f"{what} that is heavier gets heavier, though both hold the same rows"
    return {
        "away": Departure((up - down) / 2, (up, down), says, one_sided=True),
        "name": Departure(
            (up + down) / 2,
            (up, down),
            f"{what} that comes first gains, though both hold the same rows",
        ),
    }


def _train(method: Any, problem: Problem, seed: int) -> Tree:
    # The weights of a method with phases exist after its last phase.
    phases = "sources" in needs(method) and find(method, Finishes) is not None
    state = start = method.init(problem, seed)
    for step, (after, record) in enumerate(
        run_steps(method, problem, start, 60 if phases else STEPS)
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
    """Return the message for a mean beyond chance; empty if the mean is within chance."""
    values = torch.tensor([departure.value for departure in departures], dtype=F64)
    of_runs = torch.tensor(
        [run for departure in departures for run in departure.of_runs], dtype=F64
    )
    mean = float(values.mean())
    typical = float(of_runs.square().mean().sqrt())
    size = mean if departures[0].one_sided else abs(mean)
    t = size / max(float(values.std()) / math.sqrt(len(values)), 1e-12)
    if size <= max(LEAST, SHARE * typical) or t <= limit:
        return ""
    much = (
        f"{mean:.2g} in the log-odds, a mean over {len(values)} seeds (t = {t:.1f}; a run "
        f"departs by {typical:.2g})"
    )
    return f"{departures[0].says}: by {much}"
