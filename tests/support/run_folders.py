"""Run folders as the runner writes them, with numbers that a test chooses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hgms.runs import RunFolder
from hgms.runs.folder import LOGS, last_seconds
from hgms_core.errors import CheckpointError

CONFIG = """schema = 1
seed = {seed}

[task]
name = "{task}"
rho = {rho}

[method]
name = "{method}"
lr = {lr}

[budget]
outer_steps = {steps}

[run]
out = "runs"
threads = 1
label = "none"
"""

ROLES = {
    "uniform": "floor",
    "validation-only": "floor",
    "oracle-clean": "ceiling",
    "oracle-joint": "ceiling",
}
"""Of methods that are references, as their runs say it."""


def role_of(method: str) -> dict[str, str]:
    return {"role": ROLES[method]} if method in ROLES else {}


RESULTS = ("checkpoint", "steps", "summary")
"""How the files begin that have to be the same for every run of one seed."""


def contents(folder: Path, starts: str | tuple[str, ...] = RESULTS) -> dict[str, bytes]:
    """The files below ``folder`` whose names begin so."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name.startswith(starts)
    }


def write_run(
    folder: Path,
    *,
    task: str = "ring",
    rho: float = 0.4,
    method: str = "halve",
    lr: float = 0.5,
    seed: int = 0,
    steps: int = 3,
    value: float | None = 0.25,
    metric: str = "value",
    version: str | None = "2",
    error: str | None = None,
    environment: Mapping[str, Any] | None = None,
    outcomes: Sequence[str] = ("converged", "iteration-limit"),
    path: Path | None = None,
    files: Mapping[str, str | None] | None = None,
    changed: Mapping[str, str] | None = None,
) -> Path:
    """A run whose ``metric`` halves its way from 1 to ``value``, lower is better; ``value=None``
    ends in NaN, ``error`` failed.

    ``files`` lays other texts over the run's files; None leaves one out. ``changed`` has other
    texts for parts of the configuration.
    """
    path = (
        path
        or folder / task / f"{method}-{abs(hash((rho, lr, steps))) % 16**8:08x}" / f"seed-{seed}"
    )
    path.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"step": 0, f"metric.{metric}": 1.0}]
    for step in range(1, steps + 1):
        now = value if step == steps else (value or 0.0) + 2.0**-step
        rows.append(
            {
                "step": step,
                "upper_loss": 2.0 / step,
                "selected": step % 2,
                "gap": 0.1 * step,
                "scores": [0.5, 0.6],
                "residual": 0.5**step,
                "iterations": 4,
                "outcome": outcomes[step % len(outcomes)],
                "oracle_calls": 10 * step,
                f"metric.{metric}": now,
            }
        )
    about = {} if version is None else {"task": {"version": version, "metrics": {metric: False}}}
    summary = {
        "status": "failed" if error else "done",
        **({"error": error} if error else {}),
        "task": task,
        "method": method,
        **role_of(method),
        "seed": seed,
        "outer_steps": steps,
        "upper_loss": 2.0 / steps,
        "oracle_calls": 10 * steps,
        "cost": {"lower_gradients": 8 * steps},
        "metrics": {} if error else {metric: value},
    }
    whole: dict[str, str | None] = {
        "config.toml": CONFIG.format(
            seed=seed, task=task, rho=rho, method=method, lr=lr, steps=steps
        ),
        "env.json": json.dumps({"device": "cpu", "python": "3.11", **(environment or {}), **about}),
        "steps.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "timings.jsonl": "".join(
            json.dumps({"step": row["step"], "seconds": 0.25 * row["step"]}) + "\n" for row in rows
        ),
        "summary.json": json.dumps(summary),
        **(files or {}),
    }
    for old, new in (changed or {}).items():
        whole["config.toml"] = str(whole["config.toml"]).replace(old, new)
    for name, text in whole.items():
        if text is not None:
            (path / name).write_text(text, encoding="utf-8")
    seal(path)
    return path


def seal(path: Path) -> None:
    """Record the files of a run in its manifest, as the runner does. Files that are no JSON objects
    stay as they are.
    """
    folder = RunFolder(path)
    names = [name for name in (*LOGS, "summary.json") if (path / name).exists()]
    with contextlib.suppress(CheckpointError):
        facts = {"seconds": last_seconds(folder.timings)}
        folder.artifact.commit(names, facts=facts, done="summary.json" in names)


def write_comparison(folder: Path, *, steps: int = 12, seeds: int = 3) -> Path:
    """Two tasks, four methods, some seeds: a clear winner on one task and none on the other, one
    method worse than uniform, one failed and one unfinished run, an empty and a damaged folder, and
    two environments.
    """
    values = {"hg-ms": 0.10, "baseline": 0.20, "uniform": 0.40, "lost": 0.60}
    offsets = {
        "hg-ms": (-1, 0, 1),
        "baseline": (0, 2, -1),
        "uniform": (1, -1, 0),
        "lost": (1, 0, 0),
    }
    for rho in (0.4, 0.6):
        for method, value in values.items():
            for seed in range(seeds):
                # on the second task the first two methods differ by less than their seeds do
                spread = (0.0004 if rho == 0.4 else 0.2) * offsets[method][seed % 3]
                failed = rho == 0.4 and method == "baseline" and seed == 2
                write_run(
                    folder,
                    rho=rho,
                    method=method,
                    seed=seed,
                    steps=steps,
                    value=value + spread,
                    error="step 3: the hypergradient is not finite & <lost>" if failed else None,
                    environment={"threads": 2} if method == "lost" else {"threads": 1},
                )
    write_run(
        folder,
        path=folder / "ring" / "later" / "seed-7",
        seed=7,
        steps=steps,
        files={"summary.json": None},
    )
    write_run(
        folder,
        path=folder / "ring" / "torn" / "seed-8",
        seed=8,
        steps=steps,
        files={"steps.jsonl": '{"step": \n{}\n'},
    )
    (folder / "ring" / "later" / "seed-9").mkdir()
    return folder


def write_mixtures(
    folder: Path, *, budgets: Sequence[float] = (3600.0, 32400.0), sources: int = 5
) -> Path:
    """Two methods that learn and one that does not on named sources, three seeds, several budgets,
    one failed run.

    ``hg-ms`` goes from equal weights to 0.9 and 0.05 on the first two sources; ``scalebio`` does
    the same with the last two, but in seed 2 with the first two; ``uniform`` stays. A step costs
    1,000 tokens forward and 500 backward, of ``scalebio`` half of that.
    """
    names = [f"source-{number}" for number in range(sources)]
    for budget in budgets:
        for method, rate in (("hg-ms", 60.0), ("scalebio", 30.0), ("uniform", 60.0)):
            for seed in range(3):
                steps = round(budget / 3600 * 10)
                rows: list[dict[str, Any]] = [
                    {"step": 0, "metric.test_loss": 3.0, "metric.recovery_error": 1.6}
                ]
                for step in range(1, steps + 1):
                    share = 0.0 if method == "uniform" else step / steps
                    first = names if method == "hg-ms" or seed == 2 else names[::-1]
                    goal = {
                        **dict.fromkeys(names, 0.05 / (sources - 2)),
                        first[0]: 0.9 + 0.01 * (seed - 1),
                        first[1]: 0.05 - 0.01 * (seed - 1),
                    }
                    row = {"step": step, "upper_loss": 3.0 - share, "oracle_calls": 10 * step}
                    row |= {
                        f"weight.{name}": (1 - share) / sources + share * goal[name]
                        for name in names
                    }
                    row |= {
                        "step_forward_tokens": 1000.0 / (1 + (rate < 60)),
                        "step_backward_tokens": 500.0 / (1 + (rate < 60)),
                    }
                    rows.append(row)
                rows[-1] |= {
                    "metric.test_loss": 3.0 - share + 0.01 * seed,
                    "metric.recovery_error": 1.6 * (1 - share),
                }
                error = (
                    "out of memory"
                    if method == "scalebio" and seed == 1 and budget == budgets[-1]
                    else None
                )
                metrics = {
                    name: rows[-1][f"metric.{name}"] for name in ("test_loss", "recovery_error")
                }
                summary = {
                    "status": "failed" if error else "done",
                    **({"error": error} if error else {}),
                    "task": "source-mixture",
                    "method": method,
                    **role_of(method),
                    "seed": seed,
                    "outer_steps": steps,
                    "upper_loss": 3.0 - share,
                    "oracle_calls": 10 * steps,
                    "metrics": {} if error else metrics,
                }
                about = {"version": "1", "metrics": {"test_loss": False, "recovery_error": False}}
                text = CONFIG.format(
                    seed=seed, task="source-mixture", rho=0.4, method=method, lr=0.5, steps=steps
                )
                write_run(
                    folder,
                    path=folder / "source-mixture" / f"{method}-{budget:08.0f}" / f"seed-{seed}",
                    files={
                        "config.toml": text.replace(
                            f"outer_steps = {steps}", f"seconds = {budget}"
                        ),
                        "env.json": json.dumps({"device": "cpu", "task": about}),
                        "steps.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
                        "timings.jsonl": "".join(
                            json.dumps({"step": row["step"], "seconds": rate * row["step"]}) + "\n"
                            for row in rows
                        ),
                        "summary.json": json.dumps(summary),
                    },
                )
    return folder
