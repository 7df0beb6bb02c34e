"""Compare a step on one rank and on two, with communication separately.

    export HGMS_DATA=…; OMP_NUM_THREADS=1 python benchmarks/bench_ranks.py [--ranks 1,2] [--steps 6]
    [--set KEY=VALUE]

The output contains clock time, processor time, calls and bytes. The run is benchmarks/ranks.toml
(MNIST cleaning, eight branches) for a few outer steps, measured from the end of the first to the
end of the last but one. In the process of rank 0, a timer wraps torch.distributed's collectives
while the script runs. The seconds of a collective include the wait for later ranks; /proc provides
the processor time of other ranks.

``--sizes`` measures only a sum over ranks (``all_reduce`` of gloo), by its size and the number of
ranks, on processes of this machine: minimum and median of 50 calls. Use processor time if there are
more ranks than cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from hgms.config.tables import merge_options, tables_of
from hgms.plugins import Registry
from hgms.runs import RunConfig, run_config

PROBLEM = Path(__file__).with_name("ranks.toml")
CALLS = ("all_reduce", "all_gather", "broadcast")
SIZES = (4, 4_096, 65_536, 1_048_576, 8_388_608)
REPEATS = 50


class Timed:
    """Totals of the collectives of this process, by name: calls, bytes, clock and processor
    seconds.
    """

    def __init__(self) -> None:
        self.totals = {name: [0.0, 0.0, 0.0, 0.0] for name in CALLS}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            # of a gather: this rank's part
            own = next(item for item in reversed(arguments) if isinstance(item, torch.Tensor))
            began = time.perf_counter()
            spent = time.process_time()
            try:
                return call(*arguments, **more)
            finally:
                took = (
                    1.0,
                    own.numel() * own.element_size(),
                    time.perf_counter() - began,
                    time.process_time() - spent,
                )
                self.totals[name] = [a + b for a, b in zip(self.totals[name], took, strict=True)]

        return timed

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        calls = {name: getattr(dist, name) for name in CALLS}
        try:
            for name, call in calls.items():
                setattr(dist, name, self.around(name, call))
            yield
        finally:
            for name, call in calls.items():
                setattr(dist, name, call)


def others() -> float:
    """Return the processor seconds of the child processes."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            ticks += sum(
                map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
            )
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(ranks: int, steps: int, sets: list[str]) -> dict[str, Any]:
    """Measure a step of the run on this number of ranks."""
    table = tables_of(PROBLEM, "configuration")
    timer = Timed()
    merge_options(table, [*sets, f"run.ranks={ranks}", f"budget={steps} steps"])
    config = RunConfig.from_dict(table, source=PROBLEM.name, registry=Registry.load())
    marks: list[tuple[float, float, float, float, dict[str, list[float]]]] = []

    def watch(_info: object, record: Any, _share: float) -> None:
        totals = {name: list(numbers) for name, numbers in timer.totals.items()}
        marks.append(
            (float(record["seconds"]), time.perf_counter(), time.process_time(), others(), totals)
        )

    with tempfile.TemporaryDirectory() as place, timer.everywhere():
        run_config(config, path=Path(place) / "run", watch=watch)
    # after the first step, and before the one that is evaluated
    first = marks[1]
    last = marks[-2]
    count = len(marks) - 3
    clock, _, own, theirs = (b - a for a, b in zip(first[:4], last[:4], strict=True))
    calls = {}
    for name in CALLS:
        numbers = [(b - a) / count for a, b in zip(first[4][name], last[4][name], strict=True)]
        calls[name] = dict(
            zip(("calls", "bytes", "seconds", "processor_seconds"), numbers, strict=True)
        )
    return {
        "ranks": ranks,
        "steps": count,
        "seconds": clock / count,
        "processor_seconds": own / count,
        "processor_seconds_of_others": theirs / count,
        "collectives": calls,
    }


def sum_over(rank: int, count: int, place: str) -> None:
    """Measure sums on one rank, by size; rank 0 stores the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=count)
    figures = []
    for size in SIZES:
        value = torch.ones(max(size // 4, 1))
        clock = []
        processor = []
        for _ in range(REPEATS + 3):
            dist.barrier()
            began = time.perf_counter()
            spent = time.process_time()
            dist.all_reduce(value)
            clock.append(time.perf_counter() - began)
            processor.append(time.process_time() - spent)
        figures.append(
            {
                "ranks": count,
                "bytes": size,
                "least_seconds": min(clock[3:]),
                "median_seconds": statistics.median(clock[3:]),
                "processor_seconds": statistics.mean(processor[3:]),
            }
        )
    if rank == 0:
        Path(place, "figures").write_text(json.dumps(figures))
    dist.destroy_process_group()


def sums(ranks: list[int]) -> list[dict[str, Any]]:
    figures = []
    for count in ranks:
        with tempfile.TemporaryDirectory() as place:
            processes.spawn(sum_over, (count, place), nprocs=count)
            figures += json.loads(Path(place, "figures").read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--sizes", action="store_true", help="a sum over ranks alone, by its size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = [int(word) for word in options.ranks.split(",")]
    if options.sizes:
        figures = sums([count for count in ranks if count > 1])
        for row in figures:
            print(
                f"{row['ranks']} ranks, {row['bytes']:>9,} bytes: "
                f"{1e6 * row['least_seconds']:9.0f} µs at least, "
                f"{1e6 * row['median_seconds']:9.0f} median, "
                f"{1e6 * row['processor_seconds']:8.0f} of processor a rank"
            )
    else:
        figures = [measure(count, options.steps, options.sets) for count in ranks]
        for row in figures:
            print(
                f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}: {row['seconds']:.3f} s a step; "
                f"processor {row['processor_seconds']:.3f} s of rank 0, "
                f"{row['processor_seconds_of_others']:.3f} of others"
            )
            for name, told in row["collectives"].items():
                took = (
                    f"{told['seconds']:.3f} s with waiting, {told['processor_seconds']:.3f} s "
                    "of processor"
                )
                print(
                    f"    {name:10} {told['calls']:7.1f} calls, {told['bytes'] / 1e6:8.3f} MB, "
                    f"{took}"
                )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
