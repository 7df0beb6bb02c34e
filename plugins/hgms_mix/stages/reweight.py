"""Reweighting: a run of the mix's method, which learns the weights of the sources.

The folder of the mix is the folder of this run. A mix therefore reuses weights that ``hgms run`` or
``hgms compare`` already learned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hgms.comparison import measured
from hgms.config.tables import parse_json
from hgms.distributed import launched
from hgms.runs import RunFolder, run_config
from hgms.store import read_file
from hgms_core import Problem
from hgms_core.components import evolve
from hgms_core.errors import CheckpointError
from hgms_mix.stages.stage_folder import Done

if TYPE_CHECKING:
    from hgms_mix.stages.work import Work


def reweight(mix: Work) -> Done:
    """Learn the weights, resume an interrupted run, or read a finished run and check its files.

    Later stages depend on the configuration and data of the run (the hash). They also depend on its
    last state and rows (the checkpoint, which contains their sha256).

    Errors: CheckpointError if another process works on the same run, or a file is damaged.
    """
    config = mix.config.reweight
    run = RunFolder(mix.folder)
    before = is_finished(run)
    if before:
        mix.say(f"reweight: done before ({mix.folder})")
    else:
        mix.say(
            f"reweight: {'going on with ' if run.begun else ''}{config.method_name}, "
            f"{config.budget}"
        )
    # Reading a finished run starts no ranks; ranks of a launcher follow every run.
    if before and launched() is None:
        config = evolve(config, run=evolve(config.run, ranks=1))
    with contextlib.nullcontext() if before else measured(mix.folder, config.run.device):
        result = run_config(
            config,
            resume=True,
            view=mix.view,
            path=mix.folder,
            ready=lambda problem: say_memory(mix, problem),
        )
    if not before:
        say_steps(mix, result.records)
        for remark in result.summary.get("remarks") or []:
            mix.say(f"  note: {remark}")
    weights = weights_of(result.records[-1])
    if not before:
        say_weights(mix, weights)
    facts = {
        "weights": weights,
        "method": config.method_name,
        "outer_steps": result.summary["outer_steps"],
        "seconds": result.seconds,
        # this clock already contains the processor time of the whole run
        "processor_seconds": result.seconds
        if config.run.clock == "cpu"
        else processor_seconds(run),
        "metrics": result.summary.get("metrics") or {},
        "validation_loss": result.summary.get("validation_loss"),
    }
    return Done(
        path=mix.folder, key=config.config_hash, facts=facts, digest=run.results_digest()
    )


def is_finished(run: RunFolder) -> bool:
    return (run.read_summary() or {}).get("status") == "done"


def processor_seconds(run: RunFolder) -> float | None:
    """Return the processor seconds counted during the run, or None if it was interrupted."""
    with contextlib.suppress(CheckpointError):
        resources = parse_json(read_file(run.path / "resources.json"), "resources.json")
        seconds = resources.get("processor_seconds") if isinstance(resources, dict) else None
        return float(seconds) if isinstance(seconds, int | float) else None
    return None


def summary(mix: Work) -> dict[str, Any]:
    """Return the part of report.json with the results of learning."""
    learned = mix.done["reweight"].facts
    return {
        **{key: learned[key] for key in ("outer_steps", "seconds", "metrics")},
        "sources": [
            {"source": source, "weight": weight} for source, weight in learned["weights"].items()
        ],
        "stages": {
            name: {
                "key": done.key,
                "folder": str(done.path),
                "processor_seconds": done.facts.get("processor_seconds"),
            }
            for name, done in mix.done.items()
        },
    }


def weights_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of the sources in a record.

    >>> weights_of({"step": 3, "weight.sums": 0.75, "weight.chat": 0.25})
    {'sums': 0.75, 'chat': 0.25}
    """
    return {
        key.removeprefix("weight."): float(value)
        for key, value in record.items()
        if key.startswith("weight.")
    }


MOST_SAID = 12
"""Number of weights printed before the later stages; the final table contains all weights."""


def say_weights(mix: Work, weights: Mapping[str, float]) -> None:
    """Print the largest weights immediately, because later stages may take hours."""
    largest = sorted(weights.items(), key=lambda item: -item[1])[:MOST_SAID]
    more = f", and {len(weights) - MOST_SAID} smaller ones" if len(weights) > MOST_SAID else ""
    mix.say(f"  weights: {', '.join(f'{name} {weight:.3f}' for name, weight in largest)}{more}")


def say_steps(mix: Work, records: list[dict[str, Any]]) -> None:
    """Print the cost of a step, if the problem counts tokens."""
    if steps := [row for row in records if "step_forward_tokens" in row]:
        forward, backward = (
            sum(row.get(f"step_{way}_tokens", 0) for row in steps) / len(steps)
            for way in ("forward", "backward")
        )
        seconds = records[-1]["seconds"] / len(steps)
        mix.say(
            f"  an outer step: {forward:,.0f} tokens forward, {backward:,.0f} backward, "
            f"{seconds:.3g} s"
        )


def say_memory(mix: Work, problem: Problem) -> None:
    """Print the predicted memory of a step, if the method has candidates with a row count."""
    from hgms_mix.lm import predicted_memory

    task = mix.task
    generator = getattr(mix.config.method, "generator", None)
    count, rows = (getattr(generator, name, None) for name in ("count", "batch_size"))
    if count is None or rows is None:
        return
    mode = getattr(generator, "mode", "auto")
    apart = mode == "loop" or (
        mode == "auto" and (mix.device.type == "cpu" or task.adapter is None)
    )
    memory = predicted_memory(
        problem,
        candidates=count,
        batch=problem.lower_data.count(rows),
        chunk=1 if apart else getattr(generator, "chunk", None),
        length=max(int(table.lengths.max()) for table in mix.pool.values()),
    )
    if memory is not None:
        mix.say(f"  {memory}")
