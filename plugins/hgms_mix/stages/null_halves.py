"""``hgms mix null``: split every source in two halves, learn their mixture, and compare.

The mixture is learned several times.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from hgms.arguments import require
from hgms.cli import print_table
from hgms.executors import (
    Executor,
    Here,
    Needs,
    Piece,
    RemoteProgress,
    Tell,
    run_together,
    to_stderr,
    unless_busy,
)
from hgms.plugins import Registry
from hgms.results import NULL_TEST
from hgms.runs import RunConfig, RunFolder, run_config, undeclared_plugins
from hgms.store import Folder
from hgms.uncertainty import halves_test
from hgms_core import HgmsError
from hgms_core.components import evolve
from hgms_mix.lm import halves_of
from hgms_mix.stages.config import MixConfig
from hgms_mix.stages.mix import ensure_runnable, mix_path
from hgms_mix.stages.reweight import is_finished, weights_of
from hgms_mix.stages.summary import name_of
from hgms_mix.stages.uncertainty import format_interval

MOST_SPLITS = 1000
PATIENCE = 0.5
"""Seconds to wait for a run of another process."""


def null_test(
    config: MixConfig,
    *,
    seeds: int = 3,
    splits: int = 1,
    executor: Executor | None = None,
    bars: bool = False,
) -> dict[str, Any]:
    """Run the null test: learn the mixture of all halves and compare the halves.

    The test uses ``seeds`` seeds, starting at the seed of the file, and ``splits`` splits per seed;
    no two runs use the same split. Finished runs are skipped; interrupted runs resume. ``executor``
    runs the jobs (None: this process, one after another). Several processes may run the same test.

    Return the result of :func:`hgms.uncertainty.halves_test` with the weights of every run. The
    function also writes it to ``null-test/null.json`` in the parent folder of the mixes.

    Raises
    ------
    Interrupted
        Ctrl-C; the message explains how to resume.
    HgmsError
        Runs failed, with the reasons; finished runs are kept.

    Notes
    -----
    Cost: ``seeds`` · ``splits`` runs of the file's budget.
    """
    folder = mix_path(config).parent / NULL_TEST
    names = tuple(config.task.sources)  # type: ignore[attr-defined]
    runs = [
        (seed, split) for seed in range(config.seed, config.seed + seeds) for split in range(splits)
    ]
    to_stderr(
        f"null test: {len(runs)} run{'s' * (len(runs) != 1)} of {config.budget} on "
        f"{2 * len(names)} halves"
    )
    ensure_runnable(config, "reweight")
    pieces = {
        run: piece(halved_config(config, *run), folder / "seed-{}-split-{}".format(*run))
        for run in runs
    }
    weights, failures = run_together(list(pieces.values()), executor or Here(), bars=bars)
    why = [f"{failed}: {'; '.join(error.lines())}" for failed, error in failures.items()]
    require(
        not failures,
        "runs-failed",
        "\n".join([f"{len(failures)} of {len(runs)} runs of the null test failed", *why]),
        place=(str(folder),),
        hint="run the same command again",
        error=HgmsError,
    )
    learned = [
        {"seed": seed, "split": split, "weights": weights[pieces[seed, split]]}
        for seed, split in runs
    ]
    table = np.array(
        [
            [[row["weights"][half] for half in halves_of(source)] for source in names]
            for row in learned
        ]
    )
    result = {
        "name": name_of(config),
        "method": config.method_name,
        "budget": str(config.budget),
        "folder": str(folder),
        **halves_test(table, names).as_dict(),
        "weights": learned,
    }
    store = Folder(folder, config.reweight.config_hash)
    with store.lease(patience=60.0):  # other processes write the same result
        store.write("null.json", json.dumps(result, indent=2, ensure_ascii=False).encode())
        store.commit(["null.json"], facts={}, done=True)
    return result


def piece(run: RunConfig, path: Path) -> Piece:
    """Return one run of the test, in its folder, as a job."""
    plugins = [] if run.host is None else undeclared_plugins(run.host)
    arguments = {"config": run.as_dict(), "path": str(path.absolute()), "plugins": plugins}

    def finished_weights() -> dict[str, float] | None:
        folder = RunFolder(path)
        last = folder.records()[-1:] if is_finished(folder) else []
        whole = [
            row for row in last if row["step"] == (folder.read_summary() or {}).get("outer_steps")
        ]
        # if rows are missing, the run raises the error when it is loaded
        return weights_of(whole[0]) if whole else None

    return Piece(
        title=path.name,
        path=path,
        function=f"{__name__}:learn",
        arguments=arguments,
        needs=Needs.of_run(run.run),
        finished=finished_weights,
        notice=lambda: "resumes" if RunFolder(path).has_begun else "",
        result=lambda outcome: outcome["weights"],
    )


@unless_busy
def learn(arguments: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Run ``arguments`` (see :func:`piece`) as the job of an executor.

    Return the final ``weights``.
    """
    config = RunConfig.from_dict(arguments["config"], registry=Registry.load(arguments["plugins"]))
    gc.collect()  # free the model of the last run before this run loads its model
    path = Path(arguments["path"])
    result = run_config(
        config, resume=True, view=RemoteProgress(tell), path=path, patience=PATIENCE
    )
    return {"weights": weights_of(result.records[-1])}


def halved_config(config: MixConfig, seed: int, split: int) -> RunConfig:
    """Return the run of the file on halves; every seed and split draws new halves."""
    task = evolve(config.task, halves=MOST_SPLITS * seed + split)
    return evolve(config.reweight, seed=seed, task=task)


def show(result: Mapping[str, Any]) -> None:
    """Print the table of a null test."""
    click.echo(
        f"{result['name']}: {result['method']}, {result['runs']} runs of {result['budget']} on "
        "halves of every source"
    )
    rows = [
        {
            "source": row["source"],
            "halves part by": format_interval(row["halves"], row["low"], row["high"], 2),
            "it parts from the others by": format_interval(
                row["apart"], row["apart_low"], row["apart_high"], 2, signed=True
            ),
            "signal to null": "–" if row["ratio"] is None else f"{row['ratio']:.2f}",
            "p": f"{row['p']:.3f}",
            "verdict": row["verdict"],
        }
        for row in result["sources"]
    ]
    print_table(tuple(rows[0]), rows)
    click.echo(
        "log-odds, with 95 % intervals: over runs; with the luck that halves show. p after "
        "Holm's rule"
    )
    click.echo(f"  {result['verdict']}")
    click.echo(f"  {result['folder']}")
