"""The sources of a problem, and their shares of the kept rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hgms_core import ConfigError, Data, Problem, Sources, State


def sources_of(problem: Problem) -> Sources:
    if problem.sources is None or problem.lower_data.strata is None:
        raise ConfigError("method 'less' chooses among the rows of data sources, and this problem has none")
    return problem.sources


def highest(ranking: Tensor, keep: float, size: int | None) -> Tensor:
    """The numbers of the rows with the highest scores, of equal ones those that stand first.

    >>> highest(torch.tensor([0.1, 0.5, 0.5, 0.2]), keep=0.5, size=None)
    tensor([1, 2])
    """
    return ranking.sort(descending=True, stable=True).indices[: size or max(1, round(keep * len(ranking)))]


def shares(data: Data, rows: Tensor) -> dict[str, float]:
    """Which share of the rows each source holds.

    >>> shares(Data(size=5, strata=(("a", 2), ("b", 3))), torch.tensor([1, 2, 3, 4]))
    {'a': 0.25, 'b': 0.75}
    """
    strata = data.strata or ()
    ends = torch.tensor([size for _, size in strata]).cumsum(0)
    counts = torch.bincount(torch.bucketize(rows, ends, right=True), minlength=len(strata))
    return {name: number / len(rows) for (name, _), number in zip(strata, counts.tolist(), strict=True)}


def on_host(state: State) -> State:
    """The state with all that is counted by rows on the CPU, where it is small and never waited for; x stays on its device."""
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}
