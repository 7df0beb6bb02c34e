"""Predict the duration of grids and ranks on many workers from measurements on this machine.

    python benchmarks/scale.py [--write]

prints the tables of docs/reference/scale.md, which explains each figure; ``--write`` stores them
there. MEASURED contains figures of the scripts in its comments; all others follow by the page's
equations.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "scale.md"
BEGIN = "<!-- scale -->\n"
END = "<!-- end of scale -->\n"
MANY = (1, 2, 8, 64, 512)

MEASURED = {
    # s of processor: a process that imports and lists components (for the time, see bench_scan.py)
    "load": 4.7,
    # s of processor a run: is there a result already (bench_scan.py, plan, 100,000 runs)
    "look": 0.11e-3,
    # s of processor a run: its result read, tables (bench_scan.py, compare less plan)
    "gather": 0.31e-3,
    # s of processor a run: of who hands it out (bench_executors.py, coordinator_ms less look and
    # gather)
    "hand_out": 2.8e-3,
    # s a run on its worker: all that is not the run itself (bench_executors.py, overhead_ms)
    "around": 40e-3,
    "latency": 98e-6,  # s: a sum of 4 bytes over two ranks (bench_ranks.py --sizes, least)
    "large": (8_388_608, 9.416e-3),  # bytes and s: a large one
}
# s of a step on one rank and on two by the clock (40 s over steps), calls and bytes a step
# (bench_ranks.py)
RANKS = {
    "task.hidden = 300": (40 / (52 / 3), 40 / (89 / 3), 36, 17.2e6),
    "task.hidden = 32": (40 / 70, 40 / 96, 29, 1.85e6),
}


def grid(runs: int, seconds: float, workers: int, coordinators: int = 1) -> tuple[float, str]:
    """Return the seconds of n runs of L seconds, and the largest term besides the runs.

    One coordinator assigns all runs, or each worker is a coordinator of the whole grid.
    """
    m = MEASURED
    rounds = math.ceil(runs / workers)
    # a second look at runs of other processes
    look = runs * m["look"] * (1 if coordinators == 1 else 2)
    terms = {
        "start": m["load"],
        "looking for results": look,
        "around each run": rounds * m["around"],
        "gathering": runs * m["gather"],
        "the last round": rounds * seconds - runs * seconds / workers,
    }
    if coordinators == 1:
        terms["handing out"] = max(0.0, runs * m["hand_out"] - rounds * (seconds + m["around"]))
    return runs * seconds / workers + sum(terms.values()), max(terms, key=lambda name: terms[name])


def sums(ranks: int, calls: float, size: float) -> float:
    """Return the seconds per step of collectives in a ring: 2 (R − 1) sequential messages, 2 (R
    − 1)/R of the bytes through each rank.
    """
    if ranks == 1:
        return 0.0
    alpha = MEASURED["latency"] / 2
    large, took = MEASURED["large"]
    rate = large / (took - MEASURED["latency"])
    return calls * 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * size / rate


def step(ranks: int, one: float, two: float, calls: float, size: float) -> float:
    """Return the seconds of a step: Amdahl's law through one rank and two, and the additional
    time of sums.
    """
    if ranks == 1:
        return one
    share = 2 * (1 - two / one)
    return two - share * one * (1 / 2 - 1 / ranks) + sums(ranks, calls, size) - sums(2, calls, size)


def span(seconds: float) -> str:
    for size, unit in ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def tables() -> str:
    lines = []
    for heading, coordinators in (("One coordinator", 1), ("The same command on every machine", 2)):
        lines += [
            f"{heading}:",
            "",
            "| grid | " + " | ".join(f"{count} workers" for count in MANY[1:]) + " |",
        ]
        lines.append("| --- |" + " --- |" * len(MANY[1:]))
        for runs, seconds in ((1_000, 60.0), (100_000, 60.0), (100_000, 1.0)):
            cells = []
            for workers in MANY[1:]:
                took, largest = grid(runs, seconds, workers, coordinators)
                cells.append(f"{span(took)}, {runs * seconds / workers / took:.0%}: {largest}")
            lines.append(f"| {runs:,} runs of {seconds:.0f} s | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        "One run on R ranks:",
        "",
        "| problem | " + " | ".join(f"R = {count}" for count in MANY) + " | best R |",
    ]
    lines.append("| --- |" + " --- |" * (len(MANY) + 1))
    for name, (one, two, calls, size) in RANKS.items():
        known = [step(count, one, two, calls, size) for count in MANY]
        best = min(range(1, 513), key=lambda count: step(count, one, two, calls, size))
        cells = [
            f"{took:.2f} s, {one / took / count:.0%}"
            for took, count in zip(known, MANY, strict=True)
        ]
        lines.append(
            f"| `{name}` | "
            + " | ".join(cells)
            + f" | {best} ({one / step(best, one, two, calls, size):.1f} times) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(tables())
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + tables() + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
