"""The stage `uncertainty`: estimate the uncertainty of the mixture.

The estimates are over rows and over finished seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hgms.results import Interval
from hgms.runs import RunConfig, RunFolder
from hgms.store import Folder
from hgms.uncertainty import Uncertainty, alignments, in_words, over_rows, over_seeds
from hgms_core import ConfigError, Key, Sources, norm
from hgms_core.capabilities import HasPlaceholder, find
from hgms_core.errors import CheckpointError, OutOfMemory
from hgms_core.torch_errors import out_of_memory
from hgms_mix.stages.graph import Facts, Log, Stage
from hgms_mix.stages.reweight import Learned, is_finished, weights_of
from hgms_mix.stages.settings import Resampling

CORNER = 0.9
"""The smallest weight for which a mixture counts as a corner."""


def learns(config: RunConfig) -> bool:
    """Return whether the method of a run learns weights.

    References do not, so their weights have no uncertainty.
    """
    return config.role not in ("floor", "ceiling")


def estimate(work: Folder, *, learned: Learned, uncertainty: Resampling, log: Log) -> Facts:
    """Estimate the uncertainty of the mixture's direction by resampling rows.

    It computes no gradient for a method that does not learn weights.
    """
    method = learned.config.method_name
    if not learns(learned.config):
        log(f"  nothing to measure: {method} learns no weights")
        return {"skipped": f"the method {method!r} learns no weights"}
    try:
        return measure(learned, uncertainty)
    except ConfigError as error:
        why = error.lines()[0]
        log(f"  not measured: {why}")
        return {"skipped": why}
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemory(
            "out-of-memory",
            "the stage 'uncertainty' ran out of memory",
            place=("uncertainty", "rows"),
            hint="decrease rows or task.micro_batch",
        ) from error


UNCERTAINTY = Stage(name="uncertainty", version="1", function=estimate)
"""It writes only its manifest, and no stage depends on it."""


def measure(learned: Learned, settings: Resampling) -> dict[str, Any]:
    """Measure the mixture's direction, the change of x, and the validation loss at both ends."""
    problem = learned.problem()
    sources = problem.find(Sources)
    assert sources is not None
    _, end = learned.config.method.result(learned.state())
    states = {"start": problem.x0, "end": {name: end[name] for name in problem.x0}}
    key = Key(learned.seed).fold("certainty")
    names = sources.names
    prior = sources.weights(problem.theta0).detach().double().cpu()
    known = dict.fromkeys(settings.at)
    seen = alignments(
        problem,
        [states[state] for state in known],
        key,
        validation_blocks=settings.validation_blocks,
        source_blocks=settings.source_blocks,
        rows=settings.rows,
    )
    by_slope, by_angle = (
        over_rows(gains, names, prior, key, settings.resamples).as_dict()
        for gains in (seen.gains, seen.cosines)
    )
    losses = dict(zip(known, seen.losses, strict=True))
    start = states["start"]
    path = float(norm({name: states["end"][name] - leaf for name, leaf in start.items()}))
    return {
        "prior": dict(zip(names, prior.tolist(), strict=True)),
        "rows": by_slope,
        "rows_by_angle": by_angle,
        "moved": path / (float(norm(start)) or 1.0),
        "upper_loss": _change(losses) if len(losses) == 2 else None,
    }


def _change(losses: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the validation loss at both ends and the difference.

    The t-interval of the difference is over blocks of rows, each paired with itself.
    """
    gap = Interval.of((losses["end"] - losses["start"]).tolist())
    return {
        **{state: float(values.mean()) for state, values in losses.items()},
        "change": gap.mean,
        "low": gap.mean - gap.half_width,
        "high": gap.mean + gap.half_width,
    }


def summary(learned: Learned, facts: Facts) -> dict[str, Any]:
    """Collect the results of rows and seeds, as sentences and warnings."""
    weights = learned.weights
    prior = facts.get("prior") or dict.fromkeys(weights, 1 / len(weights))
    name = "" if max(prior.values()) - min(prior.values()) < 1e-6 else "the run's own"
    runs = siblings(learned)
    seeds = over_seeds(list(runs.values()), prior) if len(runs) > 1 else None
    sentences = (
        [f"{in_words(seeds, name)} (seeds differ, the data are the same)"]
        if seeds is not None
        else []
    )
    if "rows" in facts:
        sentences.append(f"{in_words(Uncertainty.from_dict(facts['rows']), name)} (to first order)")
    untrained = find(learned.config.method, HasPlaceholder)
    if untrained is not None and untrained.placeholder_reason:
        facts = {**facts, "upper_loss": None}  # the weights do not depend on this x
    return {
        **facts,
        "weights": weights,
        "seeds": None if seeds is None else seeds.as_dict(),
        "sentences": sentences,
        "warnings": list(warnings(weights, facts, runs)) if learns(learned.config) else [],
    }


def warnings(
    weights: Mapping[str, float], facts: Mapping[str, Any], runs: Mapping[int, Mapping[str, float]]
) -> Iterator[str]:
    """Yield the reasons not to trust the weights of a mixture.

    Examples
    --------
    >>> list(warnings({"a": 0.97, "b": 0.03}, {}, {0: {"a": 0.97, "b": 0.03}}))
    ['a has 0.97 of the weight, and there is no test of it: run more seeds']
    """
    upper = facts.get("upper_loss")
    moved = facts.get("moved", 0.0)
    if upper is not None:
        change = f"{upper['change']:+.4g} [{upper['low']:.4g}, {upper['high']:.4g}]"
        if upper["low"] > 0:
            yield (
                f"the validation loss rose by more than its noise ({change}; x moved by "
                f"{moved:.2g} of its length)"
            )
        elif upper["low"] <= 0 <= upper["high"]:
            yield (
                f"x learned nothing that validation shows: it moved by {moved:.2g} of its "
                "length, and the validation loss "
                f"changed within its noise ({change}); the weights are those of gradients at the "
                "start"
            )
    most = max(weights, key=weights.__getitem__)
    rows = facts.get("rows")
    if weights[most] >= CORNER and (rows is None or _sign(rows, most) <= 0):
        how = (
            "no test of it: run more seeds" if rows is None else "no support for that from the rows"
        )
        yield f"{most} has {weights[most]:.2f} of the weight, and there is {how}"
    leaders = {max(run, key=run.__getitem__) for run in runs.values()}
    if len(leaders) > 1:
        yield f"{len(runs)} seeds disagree on the largest source: {', '.join(sorted(leaders))}"
    if rows is not None:
        for row in rows["sources"]:
            if row["evidence"] > 0 and _sign(facts["rows_by_angle"], row["source"]) < 0:
                yield (
                    f"{row['source']} gains by the size of its gradients only: by their "
                    "direction it is worse than the prior"
                )


def _sign(table: Mapping[str, Any], source: str) -> int:
    return next((int(row["evidence"]) for row in table["sources"] if row["source"] == source), 0)


def siblings(learned: Learned) -> dict[int, Mapping[str, float]]:
    """Return the weights of finished runs by seed.

    The runs share this configuration, method and data, whose hash is in the folder name.
    """
    done = {learned.seed: learned.weights}
    for folder in learned.path.parent.glob("seed-*"):
        with contextlib.suppress(CheckpointError, ValueError):  # damaged, or not a run folder
            if is_finished(run := RunFolder(folder)):
                done.setdefault(
                    int(folder.name.removeprefix("seed-")), weights_of(run.records()[-1])
                )
    return dict(sorted(done.items()))


def rows_of(uncertainty: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the table to print.

    It contains the weights with intervals over seeds, and the verdict of rows.
    """
    words = {1: "more", -1: "less", 0: "cannot be told"}
    table = []
    for source, weight in uncertainty["weights"].items():
        line = {"source": source, "weight": f"{weight:.3f}"}
        if uncertainty.get("prior"):
            line["prior"] = f"{uncertainty['prior'][source]:.3f}"
        for column, test in (("over seeds", "seeds"), ("gain over the prior", "rows")):
            if uncertainty.get(test):
                effect = next(
                    effect for effect in uncertainty[test]["sources"] if effect["source"] == source
                )
                line[column] = format_interval(
                    effect["value"], effect["low"], effect["high"], signed=test == "rows"
                )
                line[f"{test} say"] = words[effect["evidence"]]
        table.append(line)
    return table


def format_interval(
    value: float, low: float | None, high: float | None, digits: int = 3, *, signed: bool = False
) -> str:
    """Format a value with its interval, if it has one.

    Examples
    --------
    >>> format_interval(0.5, 0.25, 0.75, signed=True), format_interval(1.0, None, None, digits=2)
    ('+0.500 [+0.250, +0.750]', '1.00')
    """
    width = f"{'+' if signed else ''}.{digits}f"
    return f"{value:{width}}" + (
        "" if low is None or high is None else f" [{low:{width}}, {high:{width}}]"
    )
