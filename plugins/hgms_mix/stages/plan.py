"""``hgms mix --dry-run``: predict seconds, memory and disk of a mix.

The prediction uses two outer steps and a few rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hgms.cli import print_table
from hgms.comparison import peak_memory
from hgms.runs import device_called
from hgms_core import ConfigError, Key, Sources
from hgms_mix.stages.config import MixConfig
from hgms_mix.stages.graph import Log
from hgms_mix.stages.mix import ensure_runnable
from hgms_mix.stages.uncertainty import learns

ROWS = 8
"""Rows of a timed pass."""


def plan(config: MixConfig, log: Log = lambda line: None) -> dict[str, Any]:
    """Return seconds and bytes on disk of each stage, row counts, and peak memory.

    The peak memory is in bytes, and covers only the parts that the dry run tried.

    The dry run reads and tokenises the data (the mix reuses the token cache). For reweighting, it
    times one outer step after a warm-up step. For uncertainty and fine-tuning, it times a gradient
    on eight rows; for evaluation, their loss. It does not try benchmarks or a separate
    ``finetune.model`` or ``finetune.adapter``: their seconds are None.
    """
    if config.task.model.shard:  # type: ignore[attr-defined]
        raise ConfigError(
            "not-supported",
            "a dry run uses one process, which would load the whole base model",
            place=("task", "model", "shard"),
            hint="add --set task.model.shard=false if the model fits into memory, or start the mix "
            "with a small budget",
        )
    ensure_runnable(config, "evaluate")
    task: Any = config.task
    method = config.method
    device = device_called(config.run.device)
    tokenizer = task.model.load_tokenizer()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    log("dry run: reading the sources")
    problem, reading = _time(
        device, lambda: task.problem(config.seed, device, getattr(torch, config.run.dtype))
    )
    log("dry run: two outer steps")
    state = method.init(problem, config.seed)
    state, _ = method.step(problem, state, 0.0)
    (state, record), step = _time(device, lambda: method.step(problem, state, 0.0))
    spent = config.budget
    steps = spent.outer_steps or (spent.oracle_calls or 0) * 2 / max(
        float(record.get("oracle_calls", 0)), 1
    )
    reweighting = spent.seconds if spent.seconds is not None else steps * step

    data = problem.lower_data
    x = {name: leaf.detach().requires_grad_() for name, leaf in problem.x0.items()}
    index = torch.randperm(data.size, generator=Key(config.seed).fold("plan").generator())[
        : min(ROWS, data.size)
    ]
    batch = data.batch(index)
    sources = problem.find(Sources)
    assert sources is not None
    loss = sources.pooled
    leaves = list(x.values())
    _, tuned = _time(
        device,
        lambda: torch.autograd.grad(loss(problem.theta0, x, batch), leaves, allow_unused=True),
    )
    _, scored = _time(device, lambda: loss(problem.theta0, problem.x0, batch))
    row = tuned / len(index)
    tested = sum(table.size for table in task.tables(tokenizer, "test").values())
    trained = sum(leaf.numel() for leaf in leaves)
    own = config.finetune.model is not None or config.finetune.adapter is not None
    drawn = min(config.sample.size, sum(rows.size for rows in task.rows().values()))
    text = _bytes_of_rows(task.pool(tokenizer, config.seed), drawn)
    passing = None if own else row * drawn * config.finetune.epochs
    scoring = None if own or config.evaluate.benchmarks else scored / len(index) * tested
    certain = config.uncertainty.rows_taken(len(sources.names)) if learns(config) else 0
    stages = {
        "reweight": {"seconds": reading + reweighting, "bytes": 2 * _state_bytes(state)},
        "uncertainty": {"seconds": row * certain, "bytes": 0},
        "sample": {"seconds": None, "bytes": text},
        # the weights and Adam's two moments in each of two checkpoints, and the result
        "finetune": {"seconds": passing, "bytes": None if own else 7 * 4 * trained},
        "evaluate": {"seconds": scoring, "bytes": 64 * tested},
    }
    return {
        "stages": stages,
        "step_seconds": step,
        "reading_seconds": reading,
        "peak_bytes": torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else peak_memory() or None,
        "rows": {"learned on": data.size, "sampled": drawn, "tested": tested},
    }


def show(planned: Mapping[str, Any]) -> None:
    """Print the table of a dry run."""
    rows = [
        {
            "stage": name,
            "seconds": _number(stage["seconds"]),
            "MiB on disk": _number(stage["bytes"], 2**20),
        }
        for name, stage in planned["stages"].items()
    ]
    print_table(tuple(rows[0]), rows)
    click.echo(
        "  seconds on this machine, by the clock on the wall: reweight is reading and the "
        "budget; of the other stages "
        f"{ROWS} rows were timed, and loading the model and saving come on top"
    )
    counts = ", ".join(f"{count:,} {what}" for what, count in planned["rows"].items())
    click.echo(
        f"  rows: {counts}; an outer step: {planned['step_seconds']:.3g} s; reading: "
        f"{planned['reading_seconds']:.3g} s"
    )
    peak = _number(planned["peak_bytes"], 2**20)
    click.echo(
        f"  peak memory of what was tried: {f'{peak} MiB' if peak else 'unknown'}; a blank was "
        "not tried"
    )


def _time(device: torch.device, call: Callable[[], Any]) -> tuple[Any, float]:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - began


def _state_bytes(state: Any) -> int:
    """Return the bytes of a checkpoint of this state."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor)
    )


def _bytes_of_rows(pool: Mapping[str, Any], count: int) -> int:
    """Return the bytes of the compressed file of drawn rows: about one byte per token."""
    lengths = torch.cat([table.lengths for table in pool.values()]).double()
    return int(count * float(lengths.mean()))


def _number(value: float | None, unit: float = 1.0) -> str:
    return (
        ""
        if value is None
        else f"{value / unit:,.3g}"
        if value / unit < 1000
        else f"{value / unit:,.0f}"
    )
