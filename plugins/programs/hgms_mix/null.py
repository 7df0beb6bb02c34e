"""``hgms mix null``: every source in two halves, the mixture of the halves learned several times, and how far they part."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np

from hgms_cli import print_table
from hgms_mix.certainty import spelled
from hgms_mix.config import MixConfig
from hgms_mix.mix import Mix
from hgms_mix.reweight import is_finished, weights_of
from hgms_mix.summary import claimed, mix_path, name_of
from hgms_results import NULL_TEST
from hgms_run import Interrupted, Progress, RunConfig, RunFolder, replace_file, run_config
from hgms_uncertainty import halves_test

MOST_SPLITS = 1000


def null_test(
    config: MixConfig,
    *,
    seeds: int = 3,
    splits: int = 1,
    say: Callable[[str], None] = lambda line: None,
    view: Progress | None = None,
) -> dict[str, Any]:
    """Learns the mixture of all halves with ``seeds`` seeds, from the file's on, and ``splits`` splits of them for each;
    no two runs split alike. What is finished is not made again, what was interrupted goes on.

    The result of :func:`hgms_uncertainty.halves_test`, with every run's weights; also in ``null-test/null.json`` beside
    the mixes.

    Cost: ``seeds`` · ``splits`` runs of the file's budget.

    Raises:
        Interrupted: Ctrl-C; the message says how to go on.
        CheckpointError: another process works on it, or something in its folder is damaged.
    """
    folder, names = mix_path(config).parent / NULL_TEST, tuple(config.task.sources)  # type: ignore[attr-defined]
    runs = [
        (seed, split, halved(config, seed, split))
        for seed in range(config.seed, config.seed + seeds)
        for split in range(splits)
    ]
    say(f"null test: {len(runs)} run{'s' * (len(runs) != 1)} of {config.budget} on {2 * len(names)} halves")
    Mix(config, folder, say).check("reweight")
    learned: list[dict[str, Any]] = []
    with claimed(folder):
        for seed, split, run in runs:
            path = folder / f"seed-{seed}-split-{split}"
            try:
                learned.append({"seed": seed, "split": split, "weights": learn(run, path, say, view)})
            except KeyboardInterrupt as error:
                why = f"interrupted in {path.name}\n  run the same command again to go on from there"
                raise Interrupted(why, getattr(error, "number", signal.SIGINT)) from None
        table = np.array([[[row["weights"][half] for half in halves(source)] for source in names] for row in learned])
        result = {
            "name": name_of(config), "method": config.method_name, "budget": str(config.budget), "folder": str(folder),
            **halves_test(table, names).as_dict(),
            "weights": learned,
        }  # fmt: skip
        replace_file(folder / "null.json", json.dumps(result, indent=2, ensure_ascii=False).encode())
    return result


def halves(source: str) -> tuple[str, str]:
    from hgms_llm import halves_of

    return halves_of(source)


def halved(config: MixConfig, seed: int, split: int) -> RunConfig:
    """The run of the file on halves; which rows a half has is drawn anew for every seed and split."""
    own: Any = config.task
    task = attrs.evolve(own, halves=MOST_SPLITS * seed + split)
    return attrs.evolve(config.reweight, seed=seed, task=task)


def learn(run: RunConfig, path: Path, say: Callable[[str], None], view: Progress | None) -> dict[str, float]:
    """The weights that the run ends with, from its folder or from now."""
    folder = RunFolder(path)
    say(f"  {path.name}: {'done before' if is_finished(folder) else 'going on' if folder.begun else run.budget}")
    gc.collect()  # the last run's model goes before this one's comes
    return weights_of(run_config(run, resume=True, view=view, path=path).records[-1])


def show(result: Mapping[str, Any]) -> None:
    """The table of a null test for a person."""
    click.echo(f"{result['name']}: {result['method']}, {result['runs']} runs of {result['budget']} on halves of every source")
    rows = [
        {
            "source": row["source"],
            "halves part by": spelled(row["halves"], row["low"], row["high"], 2),
            "it parts from the others by": spelled(row["apart"], row["apart_low"], row["apart_high"], 2, signed=True),
            "signal to null": "–" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "p": f"{row['p']:.3f}",
            "verdict": row["verdict"],
        }
        for row in result["sources"]
    ]
    print_table(tuple(rows[0]), rows)
    click.echo("log-odds, with 95 % intervals: over runs; with the luck that halves show. p after Holm's rule")
    click.echo(f"  {result['verdict']}")
    click.echo(f"  {result['folder']}")
