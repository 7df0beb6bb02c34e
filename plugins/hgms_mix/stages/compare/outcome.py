"""Results of the mixes: test losses of the tuned models with differences, mixtures, and costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import click
from attrs import frozen

from hgms.cli import print_table
from hgms.config.control_characters import printable
from hgms.config.tables import group_values
from hgms.results import Point, Table, table
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

    def table(self, test: str) -> Table:
        """Return the mean token losses on a test set, with differences paired by seed.

        Seconds are processor seconds, and the notes contain the mixtures.
        """
        metric = f"loss on {test}"
        points: dict[str, list[Point]] = {label: [] for label in self.roles}
        for (label, seed), report in self.reports.items():
            spent = processor_seconds(report)
            points[label].append(
                Point(
                    seed=seed,
                    metrics={metric: report["test"][test]["token_loss"]["value"]},
                    outer_steps=report["outer_steps"],
                    oracle_calls=0,
                    seconds=math.nan if spent is None else spent,
                    method=label,
                    role=self.roles[label],
                )
            )
        failed = {label: [seed for own, seed in self.failures if own == label] for label in points}
        notes = {label: [self.mixture(label)] for label, group in points.items() if group}
        return table(
            points,
            metric,
            self.reference,
            task=test,
            higher_is_better=False,
            failed=failed,
            notes=notes,
        )

    def mixture(self, label: str) -> str:
        """Return the share of each source in the drawn rows, as means over seeds."""
        shares = group_values(
            pair
            for (own, _), report in self.reports.items()
            if own == label
            for pair in drawn_shares(report).items()
        )
        return " ".join(f"{name} {fmean(values):.2f}" for name, values in shares.items())

    def warnings(self) -> list[tuple[str, list[int], str]]:
        """Return the warnings of the stage `uncertainty`, with their labels and seeds."""
        seeds = group_values(
            ((label, line), seed)
            for (label, seed), report in self.reports.items()
            for line in _warnings(report)
        )
        return [(label, own, line) for (label, line), own in seeds.items()]

    def print(self) -> None:
        for test in self.tests:
            found = self.table(test)
            rows = found.columns
            print_table(
                [name for name in rows[0] if name != "oracle calls"], rows, groups=found.groups
            )
            for line in found.remarks:
                click.echo(f"  {printable(line)}")
        for label, seeds, line in self.warnings():
            which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
            click.echo(f"  warning: {label}, {which}: {printable(line)}")
        for (label, seed), error in self.failures.items():
            click.echo(f"  failed: {label}, seed {seed}: {printable(error.lines()[0])}")

    def as_dict(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "tests": {test: self._test(test) for test in self.tests},
            "mixes": [
                {
                    "method": label,
                    "seed": seed,
                    "folder": report["folder"],
                    "shares": drawn_shares(report),
                    "losses": {
                        test: loss["token_loss"]["value"] for test, loss in report["test"].items()
                    },
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

    def _test(self, test: str) -> dict[str, Any]:
        found = self.table(test)
        return {
            **found.as_dict(),
            "differences": [
                {
                    "method": a,
                    "minus": b,
                    "mean": gap.mean,
                    "half_width": gap.half_width,
                    "seeds": gap.count,
                }
                for (a, b), gap in found.pairs.items()
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
