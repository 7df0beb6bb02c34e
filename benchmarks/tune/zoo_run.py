"""Run ``hgms.tune``, its rivals and registered methods on the zoo; one line of JSON per run.

    OMP_NUM_THREADS=1 python benchmarks/tune/zoo_run.py --out zoo.jsonl [--seeds 40:50]
        [--only tune baselines structured ordinary plain methods]
    python benchmarks/tune/zoo_run.py --out zoo.jsonl --summary

Each run has 2 s of processor time, on the six networks 6 s. Seeds 0 to 19 are for choices. Seeds 40
to 49 are for reports, of ``tune`` and its baselines seeds 40 to 79. A run that is in the file is
skipped; a later call continues. Every test loss is the loss of the same test rows. Rivals use the
folds and the lower solver of ``tune``, and train with validation rows. Methods run at their
registered defaults; without validation rows, the last quarter of the training rows differentiates
θ, and the model is trained again on all rows with the learned θ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from problems import binary, squares
from records import main
from rivals import SAMPLERS, EarlyStopped, Newton, Objective, cleaned, cross_validated, sample
from torch import Tensor
from zoo import NETWORKS, ORDINARY, STRUCTURED, ZOO
from zoo_tables import unfinished

import hgms
from hgms import hyper
from hgms.adapters import read_table
from hgms.tuning.implicit import Implicit
from hgms.tuning.meter import Meter
from hgms.tuning.problem import TuningProblem, build
from hgms_core import Batch, Data, HgmsError, Problem, Tree

Row = dict[str, Any]
SECONDS = {"tables": 2.0, "networks": 6.0}
METHODS = (
    "hg-ms",
    "hg-baseline",
    "v-pbgd",
    "hg-implicit",
    "soba",
    "f2sa",
    "amigo",
    "stocbio",
    "fixed-point",
    "bome",
    "darts",
    "sama",
    "meha",
    "g-pbgd",
    "pbgd-free",
    "scalebio",
    "iaptt-gm",
    "hg-ms-tilted",
    "hg-ms-trajectory",
    "hg-ms-ula",
    "v-pbgd-best-of-n",
    "scalebio-best-of-n",
    "mixflow",
    "lancbio",
    "random-search",
    "tpe",
)
"""Methods without requirements on the problem, at their defaults."""


def cells() -> Iterator[tuple[str, str, str]]:
    """Return the kind of a run, the problem and the competitor."""
    kinds = {
        "tune": (ZOO, lambda name: ("tune",)),
        "baselines": (ZOO, baselines),
        "structured": (STRUCTURED, tools),
        "ordinary": (ORDINARY, tools),
        "plain": (ZOO, plain_samplers),
        "methods": (ZOO, lambda name: METHODS),
    }
    for kind, (problems, competitors) in kinds.items():
        for name in problems:
            for competitor in competitors(name):
                yield kind, name, competitor


def baselines(name: str) -> Iterator[str]:
    """Return the baselines that are not in the records of ``tune``, with the whole budget."""
    arguments = ZOO[name](0)
    if name in NETWORKS:
        yield "early stopping"
        yield "validation rows only"
    elif any(isinstance(kind, hyper.PerParameter) for kind in arguments["learn"].values()):
        yield "level with the lowest loss"
    rows = any(isinstance(kind, hyper.PerRow) for kind in arguments["learn"].values())
    if rows and arguments["loss"] is not squares:
        yield "cleanlab"


def plain_samplers(name: str) -> list[str]:
    """Return samplers without a level; with a few trials of a network, all draw at random."""
    if name in NETWORKS:
        return ["TPE + level", "TPE"] if has_level(name) else ["TPE"]
    return [sampler for sampler in SAMPLERS if has_level(name) or sampler == "random"]


def has_level(name: str) -> bool:
    """Return whether the problem has penalties or row weights, which give samplers a start."""
    kinds = {type(kind) for kind in ZOO[name](0)["learn"].values()}
    return bool({hyper.PerRow, hyper.PerInput} & kinds)


def tools(name: str) -> Iterator[str]:
    """Return the tools for a problem; samplers start from the shared level or the filter."""
    if ZOO[name](0)["loss"] in (squares, binary):
        yield "cross-validation"
    for sampler in () if name in NETWORKS else ("TPE", "CMA-ES", "GP"):
        yield f"{sampler} + level" if has_level(name) else sampler


def run(kind: str, name: str, competitor: str, seed: int) -> Row:
    arguments = ZOO[name](seed)
    row: Row = {"kind": kind, "problem": name, "competitor": competitor, "seed": seed}
    began = time.process_time()
    if kind == "tune":
        row |= tune(name, arguments, seed)
    elif competitor == "cross-validation":
        row["estimators"] = cross_validated(arguments)
    elif kind == "methods":
        row |= method(competitor, name, arguments, seed)
    else:
        row |= rival(competitor, name, arguments, seed)
    return {**row, "total_seconds": round(time.process_time() - began, 3)}


def seconds_of(name: str) -> float:
    return SECONDS["networks" if name in NETWORKS else "tables"]


def tune(name: str, arguments: Row, seed: int) -> Row:
    result = hgms.tune(**arguments, budget=f"{seconds_of(name)} s", seed=seed, clock="cpu")
    return {
        "test_loss": result.test_loss,
        "selected": result.selected,
        "is_learned": result.is_learned,
        "engine": result.engine,
        "d": sum(value.numel() for value in result.values.values()),
        "seconds": round(result.spent["seconds"], 4),
        "baselines": [row.name for row in result.table if row.is_baseline],
        "table": {row.name: [row.loss, row.test_loss] for row in result.table},
    }


def rival(competitor: str, name: str, arguments: Row, seed: int) -> Row:
    solver = EarlyStopped if name in NETWORKS else Newton
    only_validation = competitor == "validation rows only"
    objective: Objective = solver(arguments, seed, seconds_of(name), only_validation)
    if competitor == "cleanlab":
        cleaned(objective)
    elif competitor == "level with the lowest loss":
        objective.scan()
    elif competitor not in ("early stopping", "validation rows only"):
        sampler, _, level = competitor.partition(" + ")
        sample(objective, sampler, seed, bool(level))
    return {
        "seconds": round(objective.meter.seconds, 4),
        "test_loss": objective.test_loss(),
        "held_out_loss": objective.best[0],
        "trials": objective.trials,
    }


# --- registered methods


def method(competitor: str, name: str, arguments: Row, seed: int) -> Row:
    settings = {"clock": "cpu", "evaluate_every": 10**9, "compile": False}
    train = arguments["train"]
    validation = arguments.get("validation")
    if validation is None:
        first = len(train["y"]) * 3 // 4
        validation = {column: rows[first:] for column, rows in train.items()}
        train = {column: rows[:first] for column, rows in train.items()}
    parts = (arguments["model"], arguments["loss"], train, validation, arguments["learn"])
    tuning = build(*parts, None, seed).problem
    problem = as_bilevel(tuning)
    try:
        result = hgms.run(
            competitor, problem, f"{seconds_of(name)} s", seed=seed, settings=settings
        )
    except HgmsError as error:
        return {"test_loss": None, "error": error.code}
    test = read_table(arguments["test"], "test", tuning.w0)
    w = tuning.spec.ravel(result.x)
    u = torch.cat([result.theta[block] for block in tuning.space.blocks])
    row: Row = {
        "steps": int(result.records[-1]["step"]),
        "is_finite": bool(w.isfinite().all() and u.isfinite().all()),
        "without_refit": tuning.mean_loss(w, test),
    }
    refits = name not in NETWORKS and "validation" not in arguments
    return {**row, "test_loss": refit(tuning, u, test) if refits else row["without_refit"]}


def as_bilevel(tuning: TuningProblem) -> Problem:
    """Return the problem in which θ has the blocks of u, projected to their boxes."""
    space = tuning.space
    size = tuning.train_size
    columns = {name: column for name, column in tuning.rows.items() if name != "index"}

    def g(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        u = torch.cat([theta[name] for name in space.blocks])
        return tuning.train_loss(
            tuning.spec.ravel(x), u, torch.ones_like(batch["index"], dtype=u.dtype), batch
        )

    def f(theta: Tree, x: Tree, batch: Batch) -> Tensor:
        mask = torch.ones_like(batch["index"], dtype=tuning.w0.dtype)
        return tuning.outer_loss(tuning.spec.ravel(x), mask, batch) / len(mask)

    def project(theta: Tree) -> Tree:
        u = torch.cat([theta[name] for name in space.blocks])
        return space.parts(u.clamp(space.low, space.high))

    return Problem(
        theta0=space.parts(space.start),
        x0=tuning.spec.unravel(tuning.w0),
        g=g,
        f=f,
        project=project,
        lower_data=Data.of({name: column[:size] for name, column in columns.items()}),
        upper_data=Data.of({name: column[size:] for name, column in columns.items()}),
    )


def refit(tuning: TuningProblem, u: Tensor, test: Data) -> float:
    """Train a convex model on all rows with the learned u; return the loss of the test rows."""
    engine = Implicit(tuning, Meter(hgms.config.Budget("1 s"), 1, "cpu"))
    units = engine.units()
    engine.curvature = units["curvature"]
    engine.scale = float(units["scale"])
    every = torch.ones(1, tuning.total)
    w = engine.solve(tuning.w0[None], u[None], every, 1e-5, float("inf"))
    return tuning.mean_loss(w[0], test)


def summary(rows: list[Row]) -> None:
    print(unfinished(rows))


def warm_up() -> None:
    """Load modules and kernels of both engines before the first measured run."""
    for name in ("groups-16", "tasks"):
        hgms.tune(**ZOO[name](0), budget="60 steps")


if __name__ == "__main__":
    warm_up()
    columns = ("kind", "problem", "competitor")
    main(__doc__, columns, cells(), run, summary, seeds="40:50")
