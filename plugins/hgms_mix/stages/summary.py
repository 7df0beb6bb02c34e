"""Run a mix and report its results: a table, report.json and a picture."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import tomlkit

from hgms.cli import print_table
from hgms.distributed import RankLost, alone
from hgms.runs import Interrupted, Progress, RunFolder, View, follow_launched
from hgms.store import LEASE, DiskError, finite, leased, replace_file
from hgms_core.errors import CheckpointError, MissingExtra
from hgms_mix.stages import pictures, reweight
from hgms_mix.stages.certainty import rows_of, spelled
from hgms_mix.stages.config import MixConfig, comparable, resolved
from hgms_mix.stages.mix import STAGES, Mix


def show(report: Mapping[str, Any]) -> None:
    """Print the tables of a report."""
    head = (
        f"{report['name']}: {report['method']}, seed {report['seed']}, "
        f"{report['outer_steps']} outer steps"
    )
    click.echo(f"{head}, {report['seconds']:.1f} s")
    columns = ("source", "weight", "rows", "of") if "sample" in report else ("source", "weight")
    print_table(columns, [{**row, "weight": f"{row['weight']:.4f}"} for row in report["sources"]])
    certainty = report.get("certainty") or {}
    if certainty:
        certain = rows_of(certainty)
        print_table(tuple(certain[0]), certain)
        for line in (
            *certainty["sentences"],
            *(f"warning: {line}" for line in certainty["warnings"]),
        ):
            click.echo(f"  {line}")
    rows = list(_losses(report.get("test", {})))
    if rows:
        print_table(tuple(rows[0]), rows)
    benchmarks = [
        f"{name}: {_benchmark(result)}" for name, result in report.get("benchmarks", {}).items()
    ]
    for line in (*benchmarks, *report["pictures"], *report["notes"], report["folder"]):
        click.echo(f"  {line}")


LEASES = (".mix.lease", LEASE)
"""The leases that a process acquires in the folder of a mix: for the mix, and for the run
that learns its mixture.
"""


def carry_out(
    config: MixConfig,
    *,
    upto: str = "evaluate",
    say: Callable[[str], None] = lambda line: None,
    view: View | None = None,
    patience: float | None = None,
) -> dict[str, Any]:
    """Run the stages up to ``upto`` and report all finished stages.

    If another process runs the same mix, wait ``patience`` seconds for it (None: until that process
    is seen to be alive).

    Raises:
        Interrupted: Ctrl-C; the message explains how to resume.
        CheckpointError: another process works on the same mix, or a part of its folder is damaged.
        DiskError: a file cannot be written; finished work is kept.
        RankLost: a rank is gone; its work since the last checkpoint is lost.
    """
    folder = mix_path(config)
    mix = Mix(config, folder, say, view or Progress(enabled=False))
    mix.check(upto)
    follow_launched(config.reweight, mix.device)  # ends every process of a launcher but one
    with claimed(folder, patience=patience):
        replace_file(folder / "mix.toml", tomlkit.dumps(resolved(config)).encode())
        try:
            mix.run("reweight")
            with alone():  # libraries of the later stages look for ranks in the environment
                mix.run(upto)
        except KeyboardInterrupt as error:
            reason = getattr(error, "message", "interrupted")
            at = next(
                (
                    stage
                    for stage in ("reweight", *(stage.name for stage in STAGES))
                    if stage not in mix.done
                ),
                upto,
            )
            raise Interrupted(
                reason,
                getattr(error, "number", signal.SIGINT),
                hint=f"run the same command again to resume in stage {at}",
            ) from None
        except (DiskError, RankLost) as error:
            # The hint of the run names an option of `hgms run`.
            hint = (
                "run the same command again to resume from the last saved state"
                if isinstance(error, RankLost)
                else "free disk space or check the permissions, then run the same command again"
            )
            raise type(error)(error.code, error.message, place=error.place, hint=hint) from error
        return report(mix)


def claimed(folder: Path, *, patience: float | None = None) -> AbstractContextManager[object]:
    """Reserve the folder of a mix for this process. The run in it has a separate lease.

    Errors: the errors of ``leased``.
    """
    return leased(folder, LEASES[0], patience=patience)


def finished(config: MixConfig) -> dict[str, Any] | None:
    """Return the report of a finished mix as :func:`carry_out` does, without loading a model.

    None: some work remains, or there is an error, which :func:`carry_out` raises.
    """
    folder = mix_path(config)
    if not (folder / "report.json").is_file():
        return None
    mix = Mix(config, folder)
    with contextlib.suppress(CheckpointError), claimed(folder, patience=0.0):
        if mix.finished():
            return report(mix)
    return None


def mix_path(config: MixConfig) -> Path:
    """Return the folder of a mix, which is the folder of its run.

    Mixes with other settings for sampling, fine-tuning or evaluation share the folder, so all of
    them use one learned mixture.

    Errors: DataError for data that cannot be read.
    """
    config.task.made_of()  # type: ignore[attr-defined]  # the hash alone does not complain
    return config.reweight.path


def name_of(config: MixConfig) -> str:
    """Return the name of the mix in reports."""
    return config.run.task_label or config.task.name


def report(mix: Mix) -> dict[str, Any]:
    """Write and return the contents of ``report.json``, and draw the mixture.

    The report contains the results of all finished stages.
    """
    config = mix.config
    done = mix.done
    content: dict[str, Any] = {
        "name": name_of(config),
        "method": done["reweight"].facts["method"],
        "seed": config.seed,
        "budget": str(config.budget),
        "folder": str(mix.folder),
        "comparable": comparable(config),
        **reweight.summary(mix),
    }
    for stage in STAGES:
        if stage.name in done:
            content |= stage.summary(mix, content)
    if "evaluate" in done:
        scores = json.dumps(finite(_scores(content)), indent=2, ensure_ascii=False)
        replace_file(mix.folder / "scores.json", scores.encode())
    content |= {"pictures": [], "notes": []}
    try:
        content["pictures"].append(
            str(pictures.mixture(RunFolder(mix.folder).records(), mix.folder / "mixture.png"))
        )
    except MissingExtra as missing:
        content["notes"].append(f"no picture: {'; '.join(missing.lines())}")
    replace_file(
        mix.folder / "report.json",
        json.dumps(finite(content), indent=2, ensure_ascii=False).encode(),
    )
    return content


def _scores(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the scores of the tuned model that `hgms report` shows next to the metrics of the run.

    Benchmarks come first, then test losses.
    """
    metrics: dict[str, float] = {}
    higher: dict[str, bool] = {}
    for name, result in content["benchmarks"].items():
        if isinstance(result, Mapping) and result.get("score") is not None:
            share = result.get("unit") == "percent"
            key = f"{name}_accuracy" if share else f"{name}_score"
            metrics[key], higher[key] = result["score"] / (100 if share else 1), True
    for name, row in content["test"].items():
        key = f"tuned_{name}_loss"
        metrics[key], higher[key] = row["token_loss"]["value"], False
    return {"metrics": metrics, "higher_is_better": higher}


def spell(interval: Mapping[str, float] | None) -> str:
    """Format a value with its interval; the empty string for None.

    >>> spell({"value": 1.25, "low": 1.2, "high": 1.31})
    '1.2500 [1.2000, 1.3100]'
    """
    return (
        "" if interval is None else spelled(interval["value"], interval["low"], interval["high"], 4)
    )


def _losses(tests: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    shown = any(row.get("against_uniform") for row in tests.values())
    for name, row in tests.items():
        beside = {"untuned": f"{row['untuned']:.4f}" if "untuned" in row else ""}
        beside |= {"token loss − uniform's": spell(row["against_uniform"])} if shown else {}
        yield {
            "test set": name,
            "rows": row["rows"],
            "token loss": spell(row["token_loss"]),
            "example loss": spell(row["example_loss"]),
            **beside,
        }


def _benchmark(result: Mapping[str, Any]) -> str:
    """Format a score with its interval, in the form that hgms_mix.evaluation returns.

    >>> _benchmark(
    ...     {
    ...         "score": 62.5,
    ...         "interval": {"low": 59.85, "high": 65.07, "kind": "wilson"},
    ...         "questions": 1319,
    ...     }
    ... )
    '62.50 [59.85, 65.07]'
    """
    interval = result.get("interval") or {}
    spread = (
        f" [{interval['low']:.2f}, {interval['high']:.2f}]"
        if {"low", "high"} <= set(interval)
        else ""
    )
    return "not scored" if result.get("score") is None else f"{result['score']:.2f}{spread}"
