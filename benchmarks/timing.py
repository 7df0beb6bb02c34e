"""Shared parts of benchmarks with several sides: processors, turns, quartiles, machine names."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import quantile_test
from torch import Tensor

Sides = Mapping[str, Callable[[], Any]]

JAX = "jax, one program"
"""The side that other sides are compared with."""


def use_processors(count: int) -> None:
    """Bind this process and its children to ``count`` processors, with as many threads of torch.

    XLA's CPU client creates a thread per available processor when JAX is imported, so call this
    first. An affinity binds all of its pools; the usual XLA flags
    (``--xla_cpu_multi_thread_eigen=false``) bind only one.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    torch.set_num_threads(count)


def arguments(description: str | None, repetitions: int) -> argparse.ArgumentParser:
    """Return the shared options of benchmarks with alternating sides."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    parser.add_argument("--processors", type=int, default=1)
    return parser


def clock_of(processors: int) -> Callable[[], float]:
    """Return the processor time of this process on one processor, which other programs affect
    least; on several processors wall time.
    """
    return time.process_time if processors == 1 else time.perf_counter


def take_turns(
    sides: Sides, rounds: int, seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return seconds of one call of each side in each round.

    In a round every side has one block of calls of about ``seconds``, in random order, so slow
    moments of the machine affect all sides. Garbage is collected only between blocks.
    """

    def block(call: Callable[[], Any], calls: int) -> float:
        gc.collect()
        gc.disable()
        begin = clock()
        for _ in range(calls):
            call()
        spent = clock() - begin
        gc.enable()
        return spent / calls

    calls = {}
    for name, call in sides.items():
        call()  # compiles, and warms up allocators
        once = block(call, 1)
        if once < seconds / 10:  # one call is too short for the clock
            once = block(call, 10)
        calls[name] = max(1, round(seconds / max(once, 1e-6)))
    order = random.Random(0)
    spent = {name: [] for name in sides}
    for _ in range(rounds):
        for name in order.sample(list(sides), len(sides)):
            spent[name].append(block(sides[name], calls[name]))
    return spent


def quartiles(values: list[float]) -> dict[str, float]:
    """Return median and quartiles; for fewer than four values the minimum and the maximum.

    >>> quartiles([1.0, 2.0, 3.0])
    {'median': 2.0, 'q25': 1.0, 'q75': 3.0}
    """
    if len(values) < 4:
        return {"median": statistics.median(values), "q25": min(values), "q75": max(values)}
    q25, median, q75 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q25": q25, "q75": q75}


def ratios(above: list[float], below: list[float]) -> dict[str, float]:
    """Return the quartiles of the ratios per round.

    >>> ratios([2.0, 2.0], [1.0, 4.0])
    {'median': 1.25, 'q25': 0.5, 'q75': 2.0}
    """
    return quartiles([a / b for a, b in zip(above, below, strict=True)])


def ratios_with_interval(above: list[float], below: list[float]) -> dict[str, float]:
    """Return the quartiles of the ratios per round, and a 95 % interval of their median.

    The interval is between two order statistics. Fewer than six rounds have none.

    >>> ratios_with_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0] * 6)
    {'median': 3.5, 'q25': 2.25, 'q75': 4.75, 'low': 1.0, 'high': 6.0}
    """
    figures = ratios(above, below)
    if len(above) < 6:
        return figures
    values = [a / b for a, b in zip(above, below, strict=True)]
    interval = quantile_test(values, q=figures["median"], p=0.5).confidence_interval(0.95)
    return {**figures, "low": float(interval.low), "high": float(interval.high)}


def against_jax(
    spent: Mapping[str, list[float]], errors: Mapping[str, float], steps: int = 1
) -> dict[str, Any]:
    """Return seconds of one of the ``steps`` of a block, errors, and ratios to :data:`JAX`."""
    reference = spent.get(JAX)
    return {
        name: {
            "seconds": quartiles([seconds / steps for seconds in values]),
            "difference": errors[name],
            **({} if reference is None else {f"/ {JAX}": ratios(values, reference)}),
        }
        for name, values in spent.items()
    }


def report_against_jax(
    title: str, sides: Mapping[str, dict[str, Any]], options: argparse.Namespace
) -> None:
    """Print the figures of :func:`against_jax`, and write them to the file of ``--json``."""
    show(
        title,
        ("side", "milliseconds", "q25", "q75", "/ jax", "q25", "q75", "difference"),
        [
            (
                name,
                *(1e3 * value for value in side["seconds"].values()),
                *side.get(f"/ {JAX}", {"": ""}).values(),
                f"{side['difference']:.1e}",
            )
            for name, side in sides.items()
        ],
    )
    if options.json:
        figures = {**machine(), "processors": options.processors, "sides": sides}
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def difference(value: Any, expected: Any) -> float:
    """Return ‖a − b‖/‖b‖ of two arrays of torch or JAX.

    >>> difference(torch.tensor([1.0, 1.0]), np.array([1.0, 0.0]))
    1.0
    """
    mine, other = (
        leaf.double() if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf)).double()
        for leaf in (value, expected)
    )
    return float((mine - other).norm() / other.norm())


def machine() -> dict[str, str]:
    """Return the processor's name and the relevant versions."""
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        models = [
            line.partition(":")[2].strip()
            for line in information.read_text().splitlines()
            if line.startswith("model name")
        ]
        name = f"{models[0]}, {len(models)} cores" if models else name
    versions = {}
    for library in ("torch", "jax", "jaxopt", "torchopt"):
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "not installed"
    return {"machine": name, "python": platform.python_version(), **versions}


def show(title: str, head: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    """Return a table in Markdown; numbers with three digits."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|---|" + "---:|" * (len(head) - 1))
    for row in rows:
        print(
            "| "
            + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row)
            + " |",
            flush=True,
        )
