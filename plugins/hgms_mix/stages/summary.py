"""The results of a mix: a table, report.json and scores.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from hgms.cli import print_table
from hgms.store import finite, replace_file
from hgms_mix.stages import sample, uncertainty
from hgms_mix.stages.config import MixConfig
from hgms_mix.stages.graph import Finished
from hgms_mix.stages.reweight import Learned
from hgms_mix.stages.uncertainty import format_interval, rows_of


def show(report: Mapping[str, Any]) -> None:
    """Print the tables of a report."""
    head = (
        f"{report['name']}: {report['method']}, seed {report['seed']}, "
        f"{report['outer_steps']} outer steps"
    )
    click.echo(f"{head}, {report['seconds']:.1f} s")
    columns = ("source", "weight", "rows", "of") if "sample" in report else ("source", "weight")
    print_table(columns, [{**row, "weight": f"{row['weight']:.4f}"} for row in report["sources"]])
    uncertainty = report.get("uncertainty") or {}
    if uncertainty:
        certain = rows_of(uncertainty)
        print_table(tuple(certain[0]), certain)
        for line in (
            *uncertainty["sentences"],
            *(f"warning: {line}" for line in uncertainty["warnings"]),
        ):
            click.echo(f"  {line}")
    rows = list(_losses(report.get("test", {})))
    if rows:
        print_table(tuple(rows[0]), rows)
    click.echo(f"  {report['folder']}")


def write_report(
    config: MixConfig, learned: Learned, finished: Mapping[str, Finished]
) -> dict[str, Any]:
    """Write and return the contents of ``report.json``.

    The report contains the results of all ``finished`` stages, by name.
    """
    folder = learned.path
    facts = {name: stage.facts for name, stage in finished.items()}
    parts: dict[str, Learned | Finished] = {"reweight": learned, **finished}
    stages = {
        name: {
            "key": part.key,
            "folder": str(part.path),
            "processor_seconds": part.facts.get("processor_seconds"),
        }
        for name, part in parts.items()
    }
    content: dict[str, Any] = {
        "name": config.run.task_label or config.task.name,
        "method": learned.facts["method"],
        "seed": config.seed,
        "budget": str(config.budget),
        "folder": str(folder),
        **{key: learned.facts[key] for key in ("outer_steps", "seconds", "metrics")},
        "sources": [
            {"source": source, "weight": weight} for source, weight in learned.weights.items()
        ],
        "stages": stages,
    }
    if "uncertainty" in finished:
        content["uncertainty"] = uncertainty.summary(learned, facts["uncertainty"])
    if "sample" in finished:
        content["sources"] = sample.sources_summary(content["sources"], facts["sample"])
        content["sample"] = facts["sample"]
    if "finetune" in finished:
        content["finetune"] = facts["finetune"]
    if "evaluate" in finished:
        content["test"] = facts["evaluate"]["test"]
        scores = json.dumps(finite(_scores(content)), indent=2, ensure_ascii=False)
        replace_file(folder / "scores.json", scores.encode())
    text = json.dumps(finite(content), indent=2, ensure_ascii=False)
    replace_file(folder / "report.json", text.encode())
    return content


def _scores(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the test losses of the tuned model.

    `hgms report` shows them next to the metrics of the run.
    """
    metrics = {
        f"tuned_{name}_loss": row["token_loss"]["value"] for name, row in content["test"].items()
    }
    return {"metrics": metrics, "higher_is_better": dict.fromkeys(metrics, False)}


def _losses(tests: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for name, row in tests.items():
        token, example = (
            format_interval(loss["value"], loss["low"], loss["high"], 4)
            for loss in (row["token_loss"], row["example_loss"])
        )
        yield {
            "test set": name,
            "rows": row["rows"],
            "token loss": token,
            "example loss": example,
            "untuned": f"{row['untuned']:.4f}",
        }
