"""`hgms mix surface CONFIG`: run a design and fit surfaces."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomlkit
from attrs import frozen

from hgms.arguments import errors_at, require
from hgms.config.convert import structure
from hgms.config.tables import merge_options, tables_of
from hgms.executors import Executor, Here, Piece, run_together
from hgms.plugins import Registry
from hgms_core import HgmsError, NumericalError
from hgms_core.components import evolve
from hgms_mix.stages import OF_GRIDS, MixConfig, claim, read
from hgms_mix.surface.design import Point, design
from hgms_mix.surface.jobs import piece
from hgms_mix.surface.learn import Findings, learn
from hgms_mix.surface.outliers import MOST
from hgms_mix.surface.report import write
from hgms_mix.surface.runs import DesignRuns, Outcome, table_of
from hgms_mix.surface.settings import SurfaceSettings


@frozen(kw_only=True)
class Plan:
    """The settings from a mix file and the command line."""

    path: Path
    config: MixConfig
    settings: SurfaceSettings
    folder: Path


def load(
    path: Path,
    sets: Sequence[str] = (),
    *,
    seed: int | None = None,
    out: str | None = None,
    device: str | None = None,
    registry: Registry | None = None,
) -> Plan:
    """Return the plan of a mix file.

    Its method and budget are ignored: the design determines the mixtures. ``[finetune.model]`` and
    its adapter are ignored too: the surface is learned with the task's model.
    """
    table = {
        key: value for key, value in tables_of(path, "configuration").items() if key not in OF_GRIDS
    }
    table["method"] = "uniform"
    table.setdefault("budget", "1 steps")
    registry = registry or Registry.load()
    places = merge_options(table, sets, seed, out=out, device=device)
    with errors_at(path.name, "surface"):
        settings = structure(table.pop("surface", {}), SurfaceSettings, registry)
    config = read(table, path.name, places, registry)
    finetune = config.finetune
    if finetune.model is not None:
        finetune = evolve(finetune, model=None, adapter=None)
    return Plan(
        path=path,
        config=attrs.evolve(config, finetune=finetune),
        settings=settings,
        folder=Path(config.run.out, config.run.task_label or path.stem, "surface"),
    )


def run_surface(
    plan: Plan,
    *,
    say: Callable[[str], None] = lambda line: None,
    show: Callable[[Findings, dict[str, Any]], None] | None = None,
    executor: Executor | None = None,
    bars: bool = False,
) -> dict[str, Any]:
    """Run the unfinished runs of the design, fit surfaces, write files, and return the report.

    ``executor`` runs the jobs (None: this process, one after another). Several processes may run
    the same design.

    Raises
    ------
    Interrupted
        Ctrl-C; the same command resumes.
    HgmsError
        Runs failed, with the reasons; finished runs are kept.
    """
    executor = executor or Here()
    runs = DesignRuns(config=plan.config, folder=plan.folder)
    runs.check()
    points = points_of(plan, runs)
    for line in runs.limits():
        say(line)
    outcomes = run_points(
        runs, points, say, diverging=int(MOST * len(points)), executor=executor, bars=bars
    )
    findings = learn(
        table_of(outcomes, runs.sources), plan.settings, seed=plan.config.seed, rows=runs.rows()
    )
    more: dict[str, Any] = {
        "tokens": sum(outcome.tokens for outcome in outcomes),
        "next": following(plan, findings),
    }
    with claim(plan.folder, patience=60.0):  # other processes write the same files
        return write(findings, plan.folder, say=show, more=more)


def following(plan: Plan, findings: Findings) -> str:
    """Return the command that fine-tunes on the recommended mixture, or on the prior.

    It uses the prior unless the recommended mixture is distinguishable from the prior, and better.
    Options of this command must be added.
    """
    weights = findings.recommendation.weights if findings.apart else findings.prior
    shares = ", ".join(
        f"{tomlkit.key(name).as_string()} = {share:.4f}"
        for name, share in zip(findings.runs.sources, weights, strict=True)
    )
    method = f'method={{name = "fixed", mixture = {{{shares}}}}}'
    return shlex.join(["hgms", "mix", str(plan.path), "--set", "budget=1steps", "--set", method])


def points_of(plan: Plan, runs: DesignRuns) -> list[Point]:
    settings = plan.settings
    settings.target_weights(runs.deciding)  # rejects an unknown name before the first run
    prior = settings.prior_over(runs.rows())
    return design(
        prior,
        points=settings.points,
        repeats=settings.repeats,
        shrink=settings.shrink,
        seed=plan.config.seed,
    )


def run_points(
    runs: DesignRuns,
    points: Sequence[Point],
    say: Callable[[str], None],
    *,
    diverging: int,
    executor: Executor | None = None,
    bars: bool = False,
) -> list[Outcome]:
    """Return the outcomes of all points; reuse finished runs.

    Raises
    ------
    NumericalError
        The losses of more than ``diverging`` runs are not finite.
    HgmsError
        Runs failed, with the reasons.
    """
    done = [outcome for outcome in map(runs.find_outcome, points) if outcome is not None]
    _check_diverged(done, diverging)

    def watch(own: Piece) -> Piece:
        def words(outcome: Outcome) -> str:
            done.append(outcome)
            _check_diverged(done, diverging)
            return own.words(outcome)

        return attrs.evolve(own, words=words)

    pieces = [watch(piece(runs, point)) for point in points]
    outcomes, failures = run_together(pieces, executor or Here(), bars=bars, say=say)
    why = [f"{failed}: {'; '.join(error.lines())}" for failed, error in failures.items()]
    require(
        not failures,
        "runs-failed",
        "\n".join([f"{len(failures)} of {len(points)} runs failed", *why]),
        place=(str(runs.folder),),
        hint="run the same command again to repeat them",
        error=HgmsError,
    )
    return list(outcomes.values())


def _check_diverged(outcomes: Sequence[Outcome], most: int) -> None:
    diverged = sum(not outcome.is_finite for outcome in outcomes)
    require(
        diverged <= most,
        "diverged",
        f"the losses of {diverged} runs are not finite, but at most {most} may be",
        place=("finetune", "lr"),
        hint="decrease lr, or set clip = 1.0",
        error=NumericalError,
    )
