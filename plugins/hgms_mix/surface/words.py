"""Print the findings as sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click
import numpy as np

from hgms.cli import print_table
from hgms_mix.surface.learn import TARGET, Findings, weighted_losses
from hgms_mix.surface.recommend import Gap


def show(findings: Findings, report: Mapping[str, Any]) -> None:
    """Print the recommended mixture, then its gain, then the files."""
    runs = findings.runs
    recommendation = findings.recommendation
    weights = findings.targets
    target = ", ".join(
        name if len(weights) == 1 else f"{weight:.2f} {name}" for name, weight in weights.items()
    )
    distinct = len(np.unique(runs.mixtures.round(6), axis=0))
    click.echo(
        f"surface over {len(runs.sources)} sources: {len(runs.names)} runs of {distinct} "
        f"mixtures; target: {target}"
    )
    rows = [
        {
            "source": name,
            findings.prior_name: f"{findings.prior[number]:.4f}",
            "best tried": f"{recommendation.best[number]:.4f}",
            "recommended": f"{recommendation.weights[number]:.4f}",
            "best, 95 % region": "{:.2f} to {:.2f}".format(*recommendation.region[number]),
        }
        for number, name in enumerate(runs.sources)
    ]
    print_table(tuple(rows[0]), rows)
    gaps = [
        {"metric": name, f"recommended − {findings.prior_name}": spell(gap)}
        for name, gap in findings.differences.items()
    ]
    if len(findings.targets) > 1:
        gaps.append(
            {
                "metric": TARGET,
                f"recommended − {findings.prior_name}": spell(recommendation.against_prior),
            }
        )
    print_table(tuple(gaps[0]), gaps)
    for line in sentences(findings):
        click.echo(line)
    for line in report["files"]:
        click.echo(f"  {line}")
    if "next" in report:
        click.echo(f"next: {report['next']}")


def sentences(findings: Findings) -> Iterator[str]:
    """Yield the verdict and its reliability, as sentences."""
    prior = findings.prior_name
    if findings.aside.names:
        losses = ", ".join(
            f"{name} {loss:.4g}"
            for name, loss in zip(
                findings.aside.names, weighted_losses(findings.aside, findings.targets), strict=True
            )
        )
        yield (
            "set aside, since their losses are not finite or far above what the others allow: "
            f"{losses}. Did they diverge? Lower the learning rate"
        )
    yield verdict(findings.recommendation.against_prior, prior)
    best = findings.recommendation.against_best
    if best.low < best.high:
        conclusion = "better than" if best.high < 0 else "cannot be distinguished from"
        yield f"recommended − best tried: {spell(best)}: {conclusion} the best that was tried"
    surface = findings.surface
    if surface.noise is None:
        yield (
            "noise: no mixture was run often enough to show it; it is estimated from how the "
            "surface misses"
        )
    else:
        at_prior = float(np.sqrt(surface.noise.variance(findings.prior[None])[0]))
        stands_on = f"{surface.noise.freedom} degrees of freedom"
        yield f"noise: one run of {prior} has a standard deviation of {at_prior:.2g} ({stands_on})"
    much = f"; intervals are widened by {surface.widening:.2f}" if surface.widening > 1 else ""
    yield (
        f"leave-one-out: mixtures miss their prediction by {findings.calibration:.2f} of "
        f"what is expected; {findings.covered:.0%} lie in their 95 % interval{much}"
    )


def verdict(gap: Gap, prior: str) -> str:
    """Return the sentence that compares the recommended mixture with the prior.

    Examples
    --------
    >>> verdict(Gap(value=-0.1, low=-0.3, high=0.1, below=0.9), "uniform").partition(";")[0]
    'recommended − uniform: -0.100 [-0.300, +0.100]: cannot be distinguished from uniform'
    >>> verdict(Gap(value=-0.2, low=-0.3, high=-0.1, below=1.0), "uniform")
    'recommended − uniform: -0.200 [-0.300, -0.100]: better than uniform'
    """
    conclusion = f"better than {prior}"
    if gap.high >= 0:  # the recommended mixture minimises the surface, so it is never worse
        conclusion = f"cannot be distinguished from {prior}; there is no reason to leave it"
    return f"recommended − {prior}: {spell(gap)}: {conclusion}"


def spell(gap: Gap) -> str:
    """Format a difference with the digits that its interval supports.

    Examples
    --------
    >>> spell(Gap(value=-0.12345, low=-0.2345, high=-0.0123, below=1.0))
    '-0.123 [-0.234, -0.012]'
    """
    width = gap.high - gap.low
    digits = 6 if not width > 0 else int(np.clip(2 - np.floor(np.log10(width)), 0, 8))
    value, low, high = (f"{number:+.{digits}f}" for number in (gap.value, gap.low, gap.high))
    return f"{value} [{low}, {high}]"
