"""Compare two checkouts or two settings: seconds of an outer step, and outer steps in a budget.

    python benchmarks/bench_versions.py --against COMMIT
            COMMIT may be the folder of a checkout
    python benchmarks/bench_versions.py --set compile=true --against-set compile=false
            settings of [run], in this checkout
    python benchmarks/bench_versions.py --against COMMIT --budget 60 --dataset mnist --only hg-ms
            hg-ms-tilted
    python benchmarks/bench_versions.py --first --set compile=true --dataset mnist --only hg-ms
    [--json FILE] [--dataset digits] [--only METHOD …] [--pairs 11] [--seconds 0.3]

Hyper-cleaning (float32, one thread, corruption 0.6) with registered methods. Each side is a worker,
a process with its checkout on the path, which executes a run like ``hgms run``: settings of
``[run]`` keep their meaning, and time outside the budget is not counted. Steps: workers execute
blocks of steps in turns, in random order; compare the ratio of processor time (median over the
pairs, quartiles, and a 95 % interval of the median). ``--budget``: outer steps within a number of
seconds of processor time. ``--first``: seconds until the end of the first step, from the start of
the process and from the start of the run, with an empty cache of compiled code (``cold``), and as
medians of ``--repetitions`` with the resulting cache (``warm``). ``--language``: one step on a
small language model (N = 4), by each checkout's ``bench_llm.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from timing import machine, quartiles, ratios_with_interval, use_processors

ROOT = Path(__file__).resolve().parents[1]
COMPARED = (
    "hg-ms",
    "hg-ms-tilted",
    "hg-baseline",
    "v-pbgd",
    "g-pbgd",
    "scalebio",
    "bome",
    "soba",
    "iaptt-gm",
    "amigo",
    "stocbio",
    "darts",
    "fixed-point",
)

METADATA = tempfile.TemporaryDirectory(prefix="hgms-bench-")
ENDLESS = "1000000000 steps"

# A run that stops after every block of steps until it is told the length of the next; it uses what
# both checkouts have.
WORKER = """
import json, os, sys, time
import torch
from attrs import evolve
from hgms.runs import RunConfig, run

work = json.loads(sys.argv[1])
torch.set_num_threads(1)
task = {"name": "hyper-cleaning", "dataset": work["dataset"], "corruption": 0.6}
settings = {"evaluations": 1, "clock": "cpu", **work["settings"]}
table = {"task": task, "method": work["method"], "budget": work["budget"], "run": settings}
config = RunConfig.from_dict(table)
problem = config.task.problem(0, torch.device("cpu"), torch.float32)
problem = evolve(problem, evaluate=lambda theta, x: {})
begin, left, since = time.perf_counter(), 0, 0.0
processor = sum(os.times()[:4])

def answer(value):
    spent = sum(os.times()[:4])
    print(json.dumps([*value, spent, spent - processor]), flush=True)

def watch(info, record, share):
    global left, since
    left -= 1
    if not work["endless"] or left > 0:
        return  # the first record is that of step 0
    answer([record["seconds"] - since, time.perf_counter() - begin])
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    left, since = json.loads(line), record["seconds"]

result = run(config.method, problem, config.budget, settings=config.run, watch=watch)
answer([len(result.records) - 1, time.perf_counter() - begin])
"""


class Worker:
    """A run in a separate process, in one of the checkouts."""

    def __init__(
        self,
        checkout: Path,
        settings: dict[str, Any],
        dataset: str,
        method: str,
        budget: str,
        **extra: str,
    ) -> None:
        work = {
            "dataset": dataset,
            "method": method,
            "settings": settings,
            "budget": budget,
            "endless": budget == ENDLESS,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(checkout), **extra},
            cwd=checkout,
        )

    def answer(self) -> tuple[float, float]:
        """Return the processor time of the finished block (for a budget: its steps), and wall
        seconds since the start of the run.

        ``processor`` are the seconds of the process so far, and since the start of the run.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended without an answer (status {self.process.wait()})")
        first, self.wall, *self.processor = json.loads(line)
        return first, self.wall

    def block(self, steps: int) -> float:
        """Return the processor seconds of one step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.answer()[0] / steps

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def environment(checkout: Path) -> dict[str, str]:
    """Return the variables with which Python imports a checkout's packages and finds the
    components in its pyproject.toml.
    """
    folders = [checkout, checkout / "plugins"]
    path = [str(_metadata(checkout)), *(str(folder) for folder in folders if folder.exists())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def _metadata(checkout: Path) -> Path:
    """Create a folder with the checkout's entry points, as in an installed distribution."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    number = hashlib.sha256(str(checkout).encode()).hexdigest()[:8]
    folder = Path(METADATA.name, number, f"hgms-{project['version']}.dist-info")
    folder.mkdir(parents=True, exist_ok=True)
    head = ["Metadata-Version: 2.4", "Name: hgms", f"Version: {project['version']}"]
    head += [f"Requires-Dist: {need}" for need in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        head += [
            f"Provides-Extra: {extra}",
            *(f"Requires-Dist: {need}; extra == '{extra}'" for need in needs),
        ]
    (folder / "METADATA").write_text("\n".join(head) + "\n", encoding="utf-8")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in rows.items())
        for group, rows in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder.parent


@contextmanager
def checked_out(what: str | None) -> Iterator[Path]:
    """Return a folder, or a commit in a temporary folder; None is this checkout."""
    if what is None or Path(what).is_dir():
        yield ROOT if what is None else Path(what).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "checkout"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "-q", "--detach", place, what], check=True
        )
        try:
            yield place
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", place], check=True)


Sides = dict[str, tuple[Path, dict[str, Any]]]
"""``this`` and ``other``: a checkout and its settings."""


def compare_steps(
    sides: Sides, dataset: str, method: str, pairs: int, seconds: float
) -> dict[str, Any]:
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                Worker(checkout, settings, dataset, method, "1000000000 steps")
            )
            for name, (checkout, settings) in sides.items()
        }
        for worker in workers.values():
            worker.answer()
            worker.block(1)  # compiles, and warms up
            worker.block(2)
        steps = max(1, round(seconds / max(worker.block(1) for worker in workers.values())))
        order = random.Random(0)
        spent = {name: [] for name in sides}
        for _ in range(pairs):
            for name in order.sample(list(sides), len(sides)):
                spent[name].append(workers[name].block(steps))
    return {name: quartiles(values) for name, values in spent.items()} | {
        "ratio": ratios_with_interval(spent["this"], spent["other"])
    }


def compare_budgets(
    sides: Sides, dataset: str, method: str, seconds: float, repetitions: int
) -> dict[str, Any]:
    """Count outer steps in a budget; sides take turns."""
    order = random.Random(0)
    steps = {name: [] for name in sides}
    for _ in range(repetitions):
        for name in order.sample(list(sides), len(sides)):
            checkout, settings = sides[name]
            with Worker(checkout, settings, dataset, method, f"{seconds} s") as worker:
                steps[name].append(worker.answer()[0])
    return {name: quartiles(values) for name, values in steps.items()} | {
        "ratio": ratios_with_interval(steps["this"], steps["other"])
    }


def time_first_step(
    sides: Sides, dataset: str, method: str, repetitions: int
) -> dict[str, dict[str, float]]:
    """Return seconds until the end of the first outer step, with an empty cache (cold), and with
    the resulting cache (warm, medians of repetitions in turns), by side.
    """
    found: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        caches = {name: stack.enter_context(tempfile.TemporaryDirectory()) for name in sides}
        for turn in range(1 + repetitions):
            for side, (checkout, settings) in sides.items():
                cache = caches[side]
                extra = {"TORCHINDUCTOR_CACHE_DIR": cache, "HGMS_CACHE": cache}
                begin = time.perf_counter()
                with Worker(checkout, settings, dataset, method, ENDLESS, **extra) as worker:
                    worker.answer()
                    worker.block(1)
                    process, run = worker.processor
                    seconds = {
                        "process, wall": time.perf_counter() - begin,
                        "run, wall": worker.wall,
                        "process, processor": process,
                        "run, processor": run,
                    }
                found.setdefault(f"{side} {'warm' if turn else 'cold'}", []).append(seconds)
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }


def compare_language(sides: Sides, repetitions: int) -> dict[str, Any]:
    """Return processor seconds of one outer step on a language model, by each checkout's script,
    in turns.
    """
    order = random.Random(0)
    spent = {name: [] for name in sides}
    for _ in range(repetitions):
        for name in order.sample(list(sides), len(sides)):
            checkout, _settings = sides[name]
            script = [
                sys.executable,
                "benchmarks/bench_llm.py",
                "--chunk",
                "1",
                "--clock",
                "cpu",
                "--repeats",
                "3",
            ]
            done = subprocess.run(
                script,
                text=True,
                capture_output=True,
                env=environment(checkout),
                cwd=checkout,
                check=False,
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            line = next(line for line in done.stdout.splitlines() if line.startswith("outer step"))
            spent[name].append(float(line.split()[2]))
    return {name: quartiles(values) for name, values in spent.items()} | {
        "ratio": ratios_with_interval(spent["this"], spent["other"])
    }


def setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key.removeprefix("run."), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.removeprefix("run."), value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--against", metavar="CHECKOUT", help="a commit or a folder; without it, this checkout"
    )
    pairs: dict[str, Any] = {
        "type": setting,
        "nargs": "+",
        "action": "extend",
        "default": [],
        "metavar": "KEY=VALUE",
    }
    parser.add_argument("--set", help="settings of this side's [run]; also several times", **pairs)
    parser.add_argument("--against-set", help="of the other side's", **pairs)
    parser.add_argument("--only", nargs="+", default=COMPARED, metavar="METHOD")
    parser.add_argument("--dataset", choices=["mnist", "digits"], default="digits")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.3, help="processor time of a block")
    parser.add_argument("--budget", type=float, help="count outer steps in so many seconds instead")
    parser.add_argument("--repetitions", type=int, default=1, help="of a budget or a warm start")
    parser.add_argument(
        "--language", action="store_true", help="a step on a language model instead"
    )
    parser.add_argument("--first", action="store_true", help="time the first step instead")
    options = parser.parse_args()
    if not options.first:  # compiling may use all processors
        use_processors(1)
    figures: dict[str, Any] = {
        **machine(),
        "dataset": options.dataset,
        "against": options.against or "this checkout",
        "set": dict(options.set),
        "against set": dict(options.against_set),
        "budget": options.budget,
        "methods": {},
    }
    with checked_out(options.against) as other:
        sides: Sides = {
            "this": (ROOT, dict(options.set)),
            "other": (other, dict(options.against_set)),
        }
        if options.language:
            figures["methods"]["hg-ms on a language model"] = compare_language(
                sides, max(options.repetitions, 3)
            )
            options.only = ()
            print(json.dumps(figures["methods"], indent=1))
        for method in options.only:
            if options.first:
                first = sides if options.against or options.against_set else {"this": sides["this"]}
                rows = time_first_step(first, options.dataset, method, options.repetitions)
                seconds = {kind: rows[f"this {kind}"]["run, wall"] for kind in ("cold", "warm")}
                figures["methods"][method] = {**rows, **seconds}
                for name, row in rows.items():
                    cells = [f"{key} {value:.2f} s" for key, value in row.items()]
                    print(method, name, *cells, flush=True)
                continue
            if options.budget:
                row = compare_budgets(
                    sides, options.dataset, method, options.budget, options.repetitions
                )
            else:
                row = compare_steps(sides, options.dataset, method, options.pairs, options.seconds)
            figures["methods"][method] = row
            unit = 1 if options.budget else 1e3
            cells = [unit * row[name]["median"] for name in ("this", "other")] + list(
                row["ratio"].values()
            )
            print(f"{method:16s}", *(f"{cell:10.3f}" for cell in cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
