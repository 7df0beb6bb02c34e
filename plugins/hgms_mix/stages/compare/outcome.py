"""Results of the mixes: test losses of the tuned models with differences, mixtures, and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import click
from attrs import frozen

from hgms.cli import print_table
from hgms.config.control_characters import printable
from hgms.results import Interval, few_seeds, paired_differences, spell
from hgms.runs import total_seconds
from hgms_core import HgmsError

Mixes = Mapping[tuple[str, int], Mapping[str, Any]]


@frozen(kw_only=True)
class Outcome:
    """The reports of the mixes by label and seed, in the form that ``hgms mix --json`` prints.

    ``roles`` contains the role of every method by label.
    """

    reports: Mixes
    failures: Mapping[tuple[str, int], HgmsError]
    roles: Mapping[str, str]
    reference: str

    @property
    def tests(self) -> list[str]:
        """The test sets, in the order of the file."""
        return list(
            dict.fromkeys(name for report in self.reports.values() for name in report["test"])
        )

    def losses(self, test: str) -> dict[str, dict[int, float]]:
        """Return the mean token loss on a test set, by label and seed."""
        return {
            label: {
                seed: report["test"][test]["token_loss"]["value"]
                for (own, seed), report in self.reports.items()
                if own == label and test in report["test"]
            }
            for label in self.roles
        }

    def pairs(self, test: str) -> dict[tuple[str, str], Interval]:
        """Return all differences of losses, paired by seed.

        Intervals follow Holm's rule over the pairs that include a method.
        """
        return paired_differences(
            {label: values for label, values in self.losses(test).items() if values},
            roles=dict(self.roles),
        )

    def rows(self, test: str) -> list[dict[str, Any]]:
        losses = self.losses(test)
        pairs = self.pairs(test)
        ranked = sorted(
            (label for label in self.roles if losses[label]),
            key=lambda label: self._order(label, losses),
        )
        result = []
        for label in ranked:
            gap = pairs.get((label, self.reference))
            mean = Interval.of([*losses[label].values()])
            star = (
                " *"
                if gap is not None and gap.excludes_zero and self.roles[label] != "ceiling"
                else ""
            )
            result.append(
                {
                    "method": label,
                    "role": self.roles[label],
                    f"loss on {test} ↓": spell(mean),
                    f"− {self.reference}": spell(gap, signed=True) + star
                    if gap is not None and gap.count
                    else "",
                    "mixture": self.mixture(label),
                    "rows": self._span(label, lambda report: report["sample"]["size"]),
                    "processor s": self._span(label, processor_seconds),
                    "seeds": len(losses[label]),
                }
            )
        return result

    def mixture(self, label: str) -> str:
        """Return the share of each source in the drawn rows, as means over seeds."""
        shares: dict[str, list[float]] = {}
        for (own, _), report in self.reports.items():
            if own == label:
                for name, share in drawn_shares(report).items():
                    shares.setdefault(name, []).append(share)
        return " ".join(f"{name} {fmean(values):.2f}" for name, values in shares.items())

    def verdicts(self, test: str) -> list[str]:
        """Return sentences about which methods outperform the floors."""
        losses = self.losses(test)
        pairs = self.pairs(test)
        methods = [label for label in self.roles if losses[label] and not self.roles[label]]
        floors = [label for label in self.roles if losses[label] and self.roles[label] == "floor"]
        lines = []
        for label in sorted(methods, key=lambda label: fmean(losses[label].values())):
            behind = [
                floor
                for floor in floors
                if not (pairs[label, floor].excludes_zero and pairs[label, floor].mean < 0)
            ]
            if floors:
                words = (
                    f"not better than {', '.join(behind)}"
                    if behind
                    else "better than every baseline that does not learn"
                )
                lines.append(f"{test}: {label} is {words}")
        return lines

    def _order(self, label: str, losses: Mapping[str, Mapping[int, float]]) -> tuple[int, float]:
        return ["", "floor", "ceiling"].index(self.roles[label]), fmean(losses[label].values())

    def _span(self, label: str, number: Callable[[Mapping[str, Any]], float | None]) -> str:
        values = [number(report) for (own, _), report in self.reports.items() if own == label]
        known = [value for value in values if value is not None]
        if not known:
            return "–"
        low = min(known)
        high = max(known)
        return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f}–{high:.0f}"

    def warnings(self) -> list[tuple[str, list[int], str]]:
        """Return the warnings of the stage `uncertainty`, with their labels and seeds."""
        seeds: dict[tuple[str, str], list[int]] = {}
        for (label, seed), report in self.reports.items():
            for line in _warnings(report):
                seeds.setdefault((label, line), []).append(seed)
        return [(label, own, line) for (label, line), own in seeds.items()]

    def print(self) -> None:
        for test in self.tests:
            rows = self.rows(test)
            print_table(tuple(rows[0]), rows)
        for test in self.tests:
            for line in self.verdicts(test):
                click.echo(f"  {printable(line)}")
        if self.reports:
            note = few_seeds(len({seed for _, seed in self.reports}))
            click.echo(
                "  * the interval, by Holm's rule over all pairs, excludes zero"
                + (f"; {note}" if note else "")
            )
        for label, seeds, line in self.warnings():
            which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
            click.echo(f"  warning: {label}, {which}: {printable(line)}")
        for (label, seed), error in self.failures.items():
            click.echo(f"  failed: {label}, seed {seed}: {printable(error.lines()[0])}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "tests": {
                test: {
                    "losses": self.losses(test),
                    "differences": [
                        {
                            "method": a,
                            "minus": b,
                            "mean": gap.mean,
                            "half_width": gap.half_width,
                            "seeds": gap.count,
                        }
                        for (a, b), gap in self.pairs(test).items()
                    ],
                    "verdicts": self.verdicts(test),
                }
                for test in self.tests
            },
            "mixes": [
                {
                    "method": label,
                    "seed": seed,
                    "folder": report["folder"],
                    "shares": drawn_shares(report),
                    "processor_seconds": processor_seconds(report),
                    "warnings": _warnings(report),
                }
                for (label, seed), report in self.reports.items()
            ],
            "failures": [
                {"method": label, "seed": seed, "why": str(error)}
                for (label, seed), error in self.failures.items()
            ],
        }


def drawn_shares(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of each source in the drawn rows."""
    counts = report["sample"]["counts"]
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()}


def processor_seconds(report: Mapping[str, Any]) -> float | None:
    """Return the processor seconds of all stages except evaluation.

    None if a stage was interrupted and resumed: its first part was not counted.
    """
    return total_seconds(
        report["stages"][name].get("processor_seconds")
        for name in ("reweight", "sample", "finetune")
    )


def _warnings(report: Mapping[str, Any]) -> list[str]:
    return list((report.get("uncertainty") or {}).get("warnings", []))
