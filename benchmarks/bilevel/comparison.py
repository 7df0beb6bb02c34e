"""Compare HGMS with the solvers of benchopt's bilevel benchmark: problems, records, tables.

    python benchmarks/bilevel/comparison.py export GRID FOLDER
            every problem of a grid as a .npz file
    python benchmarks/bilevel/comparison.py keep GRID RUNS FILE.npz …
            store the runs below RUNS and the output of peers.py as records
    python benchmarks/bilevel/comparison.py
            write the tables and the picture of docs/reference/bilevel-benchmark.md
    python benchmarks/bilevel/comparison.py --check
            status 1 if a table differs from the records

The task's ``evaluate`` measures every point of all runs: the value function F(θ) by an exact lower
solve in float64, or the error on test rows. F* is the lowest F of all points and of two bounded
quasi-Newton descents with exact hypergradients.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import scipy.optimize
import torch
from pyarrow import parquet

import hgms.report as report
from hgms.comparison.grid_file import load
from hgms_core import Problem, Tree

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "results" / "bilevel"
DOCS = HERE.parents[1] / "docs"
PAGE = DOCS / "reference" / "bilevel-benchmark.md"
PICTURE = DOCS / "images" / "bilevel-suboptimality.png"
MARKED = re.compile(
    r"(?<=<!-- table: )([a-z0-9-]+)( -->\n)(.*?)(?=<!-- end of table -->)", re.DOTALL
)
CPU = torch.device("cpu")

# --- problems out
# --------------------------------------------------------------------------------------------------


def tasks_of(path: Path) -> tuple[dict[str, Any], list[int]]:
    """Return the tasks of a grid by their labels, and its seeds."""
    grid = load(
        tomllib.loads(path.read_text(encoding="utf-8")), source=path.name, sets=['run.device="cpu"']
    )
    return {task: config.task for (task, _), config in grid.pairs.items()}, list(grid.seeds)


def kind_of(problem: Problem) -> str:
    """Return the benchmark's data set with this problem's losses."""
    if "logits" in problem.theta0:
        return "mnist"
    return "ijcnn1" if problem.theta0["log_penalty"].ndim == 1 else "covtype"


def flat(kind: str, theta: Tree, x: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Return (θ, x) in the benchmark's format: coefficients by feature, a bias as the last
    feature.
    """
    upper = theta["logits" if kind == "mnist" else "log_penalty"].flatten()
    lower = (
        torch.cat([x["output.weight"], x["output.bias"][:, None]], dim=1)
        if kind == "mnist"
        else x["x"]
    )
    return upper.numpy(), lower.T.flatten().numpy()


def nested(kind: str, problem: Problem, theta: np.ndarray, x: np.ndarray) -> tuple[Tree, Tree]:
    """Invert ``flat``."""
    name, leaf = next(iter(problem.theta0.items()))
    upper = {name: torch.from_numpy(np.array(theta)).to(leaf).reshape(leaf.shape)}
    if kind == "mnist":
        columns = (
            torch.from_numpy(np.array(x)).to(leaf).reshape(-1, problem.x0["output.bias"].numel()).T
        )
        return upper, {
            "output.weight": columns[:, :-1].contiguous(),
            "output.bias": columns[:, -1].contiguous(),
        }
    shape = problem.x0["x"].shape
    return upper, {
        "x": torch.from_numpy(np.array(x)).to(leaf).reshape(shape[1], shape[0]).T.contiguous()
    }


def exported(problem: Problem, seed: int, reg: float = 0.0) -> dict[str, np.ndarray]:
    """Return the arrays of a problem and its first point, for peers.py."""
    kind = kind_of(problem)
    arrays = {}
    for name, rows in (
        ("train", problem.lower_data.whole),
        ("validation", problem.upper_data["stop"].whole),
    ):
        features = rows["pixels" if kind == "mnist" else "a"]
        features = (
            torch.cat([features, features.new_ones(len(features), 1)], dim=1)
            if kind == "mnist"
            else features
        )
        arrays |= {f"{name}_a": features.numpy(), f"{name}_label": rows["label"].numpy()}
    theta0, x0 = flat(kind, problem.theta0, problem.x0)
    numbers = {"kind": kind, "seed": seed, "reg": reg}
    return (
        arrays
        | {"theta0": theta0, "x0": x0}
        | {name: np.array(value) for name, value in numbers.items()}
    )


def export(grid: Path, folder: Path, count: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tasks, seeds = tasks_of(grid)
    for label, task in tasks.items():
        for seed in seeds[:count]:
            problem = task.problem(seed, CPU, torch.float32)
            np.savez(
                folder / f"{label}-{seed}.npz",
                **exported(problem, seed, getattr(task, "omega", 0.0)),
            )


# --- records in
# --------------------------------------------------------------------------------------------------


def ours(runs: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (a row per run, a row per point)."""
    rows = []
    points = []
    for section in report.build([runs]).sections:
        for run in [run for entry in section.entries for run in entry.runs]:
            about = {"task": run.task_label, "method": run.label, "of": "hgms", "seed": run.seed}
            metrics = [f"metric.{name}" for name in run.higher_is_better]
            columns = run.columns(["seconds", *metrics])
            lines = [
                dict(zip(("step", "seconds", *metrics), line, strict=True))
                for line in zip(*columns.values(), strict=True)
            ]
            # rows between evaluations
            lines = [line for line in lines if any(math.isfinite(line[name]) for name in metrics)]
            points += [about | line | {"step": int(line["step"])} for line in lines]
            versions = {
                f"environment.{name}": run.environment["versions"].get(name)
                for name in ("hgms", "torch", "numpy")
            }
            rows.append(
                about
                | {"steps": int(lines[-1]["step"]), "budget": run.budget}
                | versions
                | lines[-1]
            )
    return rows, points


def theirs(
    path: Path, task: Any, label: str, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the same for the output of peers.py: its seconds, and the task's measures of its
    points.
    """
    problem = task.problem(seed, CPU, torch.float32)
    stored = np.load(path)
    kind = kind_of(problem)
    rows = []
    points = []
    versions = {
        f"environment.{name}": version
        for name, version in (str(text).split() for text in stored["versions"])
    }
    for text in dict.fromkeys(key.rpartition("|")[0] for key in stored.files if "|" in key):
        about = {"task": label, "method": text, "of": "benchmark_bilevel", "seed": seed}
        columns = [stored[f"{text}|{name}"] for name in ("seconds", "rounds", "theta", "x")]
        for seconds, rounds, theta, x in zip(*columns, strict=True):
            values = (
                problem.evaluate(*nested(kind, problem, theta, x))
                if np.isfinite(theta).all()
                else {}
            )
            measured = {f"metric.{name}": value for name, value in values.items()}
            points.append(about | {"step": int(rounds), "seconds": float(seconds)} | measured)
        own = {
            key.partition("|")[2]: float(stored[key])
            for key in stored.files
            if key.startswith(f"{text}|own.")
        }
        rows.append(about | {"steps": points[-1]["step"]} | versions | points[-1] | own)
    return rows, points


def lowest(task: Any, seed: int, points: Sequence[Mapping[str, Any]]) -> float:
    """Return the lowest F of two L-BFGS-B runs in the task's box and of all evaluated points."""
    exact = task.closed_form(seed, CPU, torch.float64)
    theta0 = task.problem(seed, CPU, torch.float64).theta0["log_penalty"]

    def both(theta: np.ndarray) -> tuple[float, np.ndarray]:
        tree = {"log_penalty": torch.from_numpy(theta).reshape(theta0.shape)}
        _, value, slope = exact.exactly(tree)
        return float(value), slope["log_penalty"].flatten().numpy()

    bounds = [(-task.bound, task.bound)] * theta0.numel()
    options = {"ftol": 1e-14, "gtol": 1e-10, "maxiter": 100}
    values = [
        point["metric.value_function"]
        for point in points
        if math.isfinite(point.get("metric.value_function", math.nan))
    ]
    for share in (0.2, 0.6):
        start = np.full(theta0.numel(), -share * task.bound)
        values.append(
            scipy.optimize.minimize(
                both, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
            ).fun
        )
    return float(min(values))


def keep(grid: Path, runs: Path, files: Sequence[Path]) -> list[Path]:
    """Store the records of a grid's tasks.

    A file of peers.py is called TASK-SEED.npz, like the problem.
    """
    tasks, _ = tasks_of(grid)
    rows, points = ours(runs)
    for path in files:
        label, _, seed = path.stem.rpartition("-")
        more = theirs(path, tasks[label], label, int(seed))
        rows = rows + more[0]
        points = points + more[1]
    minima = {}
    for label, task in tasks.items():
        for seed in sorted({row["seed"] for row in rows if row["task"] == label}):
            own = [point for point in points if (point["task"], point["seed"]) == (label, seed)]
            if getattr(task, "exact", False):
                minima[label, seed] = lowest(task, seed, own)
    rows = [{**row, "minimum": minima.get((row["task"], row["seed"]))} for row in rows]
    return [write(f"{grid.stem}", rows), write(f"{grid.stem}.curves", points)]


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    RECORDS.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.Table.from_pylist([{key: row.get(key) for key in names} for row in rows])
    parquet.write_table(table, RECORDS / f"{name}.parquet", compression="zstd")
    return RECORDS / f"{name}.parquet"


# --- the table and the picture
# --------------------------------------------------------------------------------------------------

Curve = tuple[np.ndarray, np.ndarray]


def read(name: str) -> list[dict[str, Any]]:
    return parquet.read_table(RECORDS / f"{name}.parquet").to_pylist()


def curves(name: str) -> dict[str, dict[tuple[str, str], list[Curve]]]:
    """Return seconds and the measure of each seed, by task and by (method, of)."""
    minimum = {(row["task"], row["seed"]): row["minimum"] for row in read(name)}
    lines: dict[tuple[str, str, str, int], list[tuple[float, float]]] = {}
    for point in read(f"{name}.curves"):
        least = minimum[point["task"], point["seed"]]
        measure = point["metric.test_accuracy" if least is None else "metric.value_function"]
        # None: it had diverged
        value = math.nan if measure is None else 1 - measure if least is None else measure - least
        lines.setdefault((point["task"], point["method"], point["of"], point["seed"]), []).append(
            (point["seconds"], value)
        )
    by_task: dict[str, dict[tuple[str, str], list[Curve]]] = {}
    for (task, method, of, _), line in lines.items():
        seconds, values = map(np.array, zip(*line, strict=True))
        by_task.setdefault(task, {}).setdefault((method, of), []).append((seconds, values))
    return by_task


def at(curve: Curve, second: float) -> float:
    """Return the measure at the last point before that time."""
    seconds, values = curve
    return float(values[max(np.searchsorted(seconds, second * 1.02, side="right") - 1, 0)])


def table_of(name: str) -> str:
    """Return the median of the seeds at a tenth, a third and all of the budget."""
    text = []
    for methods in curves(name).values():
        end = max(seconds[-1] for lines in methods.values() for seconds, _ in lines)
        times = [round(end * share, 1) for share in (0.1, 1 / 3, 1)]
        last = {
            name: np.median([at(line, times[-1]) for line in lines])
            for name, lines in methods.items()
        }
        rows = sorted(methods.items(), key=lambda item: np.nan_to_num(last[item[0]], nan=math.inf))
        steps = {(row["method"], row["of"]): row["steps"] for row in read(name)}
        head = ["solver", "of", *(f"{time:g} s" for time in times), "rounds", "seeds"]
        text += [f"| {' | '.join(head)} |", "|" + "---|" * 7]
        for (method, of), lines in rows:
            cells = [f"{np.median([at(line, time) for line in lines]):.2e}" for time in times]
            row = [f"`{method}`", of, *cells, str(steps[method, of]), str(len(lines))]
            text.append(f"| {' | '.join(row)} |")
    return "\n".join(text) + "\n"


def page(text: str) -> str:
    return MARKED.sub(lambda match: match[1] + match[2] + "\n" + table_of(match[1]) + "\n", text)


def draw(names: Sequence[str]) -> None:
    """Draw one panel per problem: the median of the seeds against processor seconds; peers
    dashed.
    """
    from matplotlib.figure import Figure

    panels = [(name, task, methods) for name in names for task, methods in curves(name).items()]
    figure = Figure(figsize=(5.6 * len(panels), 5.2), layout="constrained")
    for panel, (_, task, methods) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        end = max(seconds[-1] for lines in methods.values() for seconds, _ in lines)
        grid = np.geomspace(end / 100, end, 100)
        for number, ((method, of), lines) in enumerate(
            sorted(methods.items(), key=lambda item: item[0][1])
        ):
            values = np.median([[at(line, time) for time in grid] for line in lines], axis=0)
            label = method.partition("[")[0] + ("" if of == "hgms" else " (theirs)")
            panel.plot(
                grid,
                values,
                "-" if of == "hgms" else "--",
                color=f"C{number % 10}",
                linewidth=1.6,
                label=label,
            )
        panel.set(title=task, xlabel="processor seconds", xscale="log", yscale="log")
        panel.legend(frameon=False, fontsize=7)
    figure.axes[0].set_ylabel("F(θ) − F*, or test error")
    figure.savefig(PICTURE, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    commands = parser.add_subparsers(dest="command")
    own = commands.add_parser("export")
    own.add_argument("grid", type=Path)
    own.add_argument("folder", type=Path)
    own.add_argument("--seeds", type=int, help="only so many of the grid's")
    own = commands.add_parser("keep")
    own.add_argument("grid", type=Path)
    own.add_argument("runs", type=Path)
    own.add_argument("files", type=Path, nargs="*")
    options = parser.parse_args()
    if options.command == "export":
        export(options.grid, options.folder, options.seeds)
        return 0
    if options.command == "keep":
        print(*keep(options.grid, options.runs, options.files), sep="\n")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    if options.check:
        return int(page(text) != text)
    PAGE.write_text(page(text), encoding="utf-8")
    draw([match[1] for match in MARKED.finditer(text)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
