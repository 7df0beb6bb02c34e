"""A plugin file that is right in every way, for test_wrong_classes.py to spoil: a selector."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch

from hgms_core import Candidates, Cost, Key, Problem, Selection, Tree, hookimpl, values


@attrs.frozen(kw_only=True)
class Mine:
    """The candidate with the lowest validation loss.

    >>> Mine().batch_size is None
    True

    Source: best of N.
    """

    name: ClassVar[str] = "mine"
    batch_size: int | None = None

    def select(self, problem: Problem, theta: Tree, candidates: Candidates, key: Key) -> Selection:
        data = problem.upper_data["select"]
        index = data.draw(key, self.batch_size, 1)
        scores = values(
            problem.f, theta, candidates.x, data.batch(None if index is None else index[0])
        )
        rows = [leaf.reshape(candidates.count, -1) for leaf in candidates.x.values()]
        finite = torch.stack([row.isfinite().all(1) for row in rows]).all(0)
        ranked = torch.where(finite, scores, torch.inf)
        ordered = ranked.sort().values
        gap = (
            (ordered[1] - ordered[0]).nan_to_num(torch.inf)
            if candidates.count > 1
            else torch.full_like(ordered[0], torch.inf)
        )
        cost = Cost(
            upper_values=candidates.count, rows=candidates.count * data.count(self.batch_size)
        )
        scores = torch.where(finite, scores, torch.nan)
        return Selection(
            index=ranked.argmin(), scores=scores, gap=gap, finite=finite.sum(), cost=cost
        )


@hookimpl
def hgms_register_selectors() -> list[type]:
    return [Mine]
