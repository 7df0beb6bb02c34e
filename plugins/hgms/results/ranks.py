"""Mean ranks over tasks and seeds, and their critical difference.

Chance does not explain a larger difference between two mean ranks.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping

from attrs import frozen

from hgms.results.colours import Look, looks

LEVEL = 0.05


@frozen(kw_only=True)
class Ranks:
    """The mean rank of each of k methods over N blocks; a block is a task with a seed.

    Rank 1 is the best, and equal values share their rank. ``critical`` is Nemenyi's critical
    difference: with all k methods equal, the chance that any two mean ranks differ by that much is
    about 5 %::

        critical = q √(k (k + 1) / 6N),
            q = the 95 % point of the studentised range of k values, over √2

    ``chance`` is the p-value of Friedman's test that all methods are equal (NaN for fewer than
    three methods).

    Source: Demšar (2006), *Statistical comparisons of classifiers over multiple data sets*, JMLR 7.

    >>> ranks = Ranks.of(
    ...     [({"a": 3.0, "b": 2.0, "c": 1.0}, True)] * 9 + [({"a": 2.0, "b": 3.0, "c": 1.0}, True)]
    ... )
    >>> ranks.means, round(ranks.critical, 3), ranks.groups
    ({'a': 1.1, 'b': 1.9, 'c': 3.0}, 1.048, [['a', 'b']])
    """

    means: Mapping[str, float]
    blocks: int
    critical: float
    chance: float

    @classmethod
    def of(cls, blocks: Iterable[tuple[Mapping[str, float], bool]]) -> Ranks | None:
        """Compute the ranks from the values by method in each block.

        The second entry of a block states whether higher values are better in it. A method without
        a value in every block is excluded. A value that is not finite gets the last rank of its
        block. A block without any finite value is excluded. The result is ``None`` if too few
        values remain to compare.
        """
        import numpy as np
        from scipy import stats

        known = list(blocks)
        labels = [
            label
            for label in (known[0][0] if known else ())
            if all(label in values for values, _ in known)
        ]
        rows = [
            [_cost(values[label], higher) for label in labels]
            for values, higher in known
            if any(math.isfinite(values[label]) for label in labels)
        ]
        count = len(labels)
        if count < 2 or not rows:
            return None
        means = np.mean(stats.rankdata(rows, axis=1), axis=0).tolist()
        varies = count > 2 and any(len(set(row)) > 1 for row in rows)
        chance = (
            float(stats.friedmanchisquare(*zip(*rows, strict=True)).pvalue)
            if varies and len(rows) > 1
            else math.nan
        )
        ordered = dict(sorted(zip(labels, means, strict=True), key=lambda pair: pair[1]))
        return cls(
            means=ordered,
            blocks=len(rows),
            critical=_quantile(count) * _error(count, len(rows)),
            chance=chance,
        )

    @property
    def says_something(self) -> bool:
        """Return whether any two mean ranks could differ by the critical difference.

        With few blocks, they cannot.
        """
        return self.critical < len(self.means) - 1

    @property
    def groups(self) -> list[list[str]]:
        """Return the largest groups of methods that the ranks do not distinguish."""
        labels = list(self.means)
        groups = list[list[str]]()
        for number, label in enumerate(labels):
            group = [
                other
                for other in labels[number:]
                if self.means[other] - self.means[label] <= self.critical
            ]
            if len(group) > 1 and not any(set(group) <= set(known) for known in groups):
                groups.append(group)
        return groups

    @property
    def fewest_blocks(self) -> int:
        """Return the smallest number of blocks that can show a difference.

        With fewer blocks, chance can explain any difference between two mean ranks.
        """
        count = len(self.means)
        return math.floor((_quantile(count) * _error(count, 1) / (count - 1)) ** 2) + 1

    @property
    def words(self) -> str:
        """Describe the ranks in sentences."""
        count = len(self.means)
        blocks = f"{self.blocks} block{'s' * (self.blocks != 1)} (a task with a seed)"
        over = f"Mean ranks of {count} methods over {blocks}, 1 the best."
        if not self.says_something:
            return (
                f"{over} Too few to say anything: the critical difference is "
                f"{self.critical:.2f}, and two mean ranks cannot "
                f"differ by more than {count - 1}. It takes {self.fewest_blocks} blocks at least."
            )
        test = (
            ""
            if math.isnan(self.chance)
            else f" Friedman's test that all are equal: p = {self.chance:.2g}."
        )
        unsure = (
            "" if math.isnan(self.chance) or self.chance <= LEVEL else " So nothing is established."
        )
        apart = "; ".join(", ".join(group) for group in self.groups)
        alike = f" Not told apart: {apart}." if apart else " All are told apart."
        return (
            f"{over}{test}{unsure} Two differ by more than chance where their mean ranks are "
            "further apart than "
            f"{self.critical:.2f} (Nemenyi's critical difference, 5 %).{alike} Seeds of one task "
            "are no new task: this speaks of these tasks alone."
        )

    def html(self, styles: Mapping[str, Look] | None = None) -> str:
        """Return a table whose middle column contains the picture.

        The picture shows a bar around each mean rank, with the length of the critical difference.
        Two methods are distinguished if their bars do not overlap.
        """
        styles = styles or looks(self.means)
        most = len(self.means)
        low = 0.8
        high = most + 0.2

        def at(rank: float) -> str:
            return f"{100 * (min(max(rank, low), high) - low) / (high - low):.2f}%"

        rows = []
        for label, mean in self.means.items():
            left = mean - self.critical / 2
            right = mean + self.critical / 2
            rows.append(
                f'<tr style="--c: var(--c{styles[label].colour})"><th scope="row"><i '
                f'class="key"></i>{html.escape(label)}</th>'
                f'<td class="track"><i class="bar" style="left: {at(left)}; right: calc(100% - '
                f'{at(right)})"></i><i class="dot" style="left: {at(mean)}"></i></td><td '
                f'class="n">{mean:.2f}</td></tr>'
            )
        step = max(1, math.ceil((most - 1) / 8))
        ticks = "".join(
            f'<span style="left: {at(tick)}">{tick}</span>' for tick in range(1, most + 1, step)
        )
        caption = (
            "Mean rank <span>bars that do not overlap: a difference beyond chance; better "
            "to the left</span>"
        )
        axis = (
            f'<tr aria-hidden="true"><th></th><td class="track axis">{ticks}</td><td '
            'class="n"></td></tr>'
        )
        body = "".join(rows)
        head = f'<table class="hgms-forest"><caption>{caption}</caption>'
        return f"{head}<tbody>{body}{axis}</tbody></table>"


def _cost(value: float, higher: bool) -> float:
    """Return a number that is lower for better values.

    It is infinite for a value that is not finite.
    """
    return (-value if higher else value) if math.isfinite(value) else math.inf


def _quantile(count: int) -> float:
    from scipy import stats

    return float(stats.studentized_range.ppf(1 - LEVEL, count, math.inf)) / math.sqrt(2)


def _error(count: int, blocks: int) -> float:
    return math.sqrt(count * (count + 1) / (6 * blocks))
