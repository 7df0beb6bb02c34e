"""Measure LESS: scored rows per second, against a plain backward pass per row.

    python benchmarks/bench_less.py [--json FILE] [--layers 4] [--width 256] [--rank 8] [--length
                                    128] [--chunk 16] [--repetitions 5] [--threads 1] [--device cpu]

The model is a GPT-2 with random weights and LoRA adapters, the rows random text of one length, so
neither side has padding. The plain loop computes the gradient of one row's loss after another. LESS
computes the same gradients for a chunk per pass, and makes Adam's step of each, projects,
normalises and scores it. Compare ratios of alternating times, not seconds. The target is 0.8.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hgms_core import Problem, State
from hgms_mix.lm import BaseModel, Lora, Source, SourceMixture
from hgms_mix.methods.less import GradientProjection, Less, Warmup

KINDS: dict[str, dict[str, object]] = {
    "none": {"projection": None},
    "sparse 8192": {"projection": GradientProjection()},
}


def written(folder: Path, name: str, rows: int, length: int) -> Source:
    """Rows of random letters that are ``length`` tokens long with their template, more or less."""
    letters = random.Random(name)
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(rows):
            text = "".join(letters.choices("abcdefghij ", k=length - 40))
            stream.write(json.dumps({"prompt": text[:10], "completion": text[10:]}) + "\n")
    return Source(path=str(path), format="prompt-completion")


def problem(options: argparse.Namespace, folder: Path) -> Problem:
    config = {
        "model_type": "gpt2",
        "n_layer": options.layers,
        "n_embd": options.width,
        "n_head": 4,
        "n_positions": 1024,
    }
    rows = options.chunk * options.repetitions * 2
    task = SourceMixture(
        sources={name: written(folder, name, rows, options.length) for name in ("one", "two")},
        validation={"held-out": written(folder, "held-out", 32, options.length)},
        model=BaseModel(config=config, tokenizer="bytes"),
        adapter=Lora(rank=options.rank, alpha=2.0 * options.rank),
        template="plain",
        max_length=options.length,
        too_long="truncate",
    )
    return task.problem(0, torch.device(options.device), torch.float32)


def at_the_pool(task_problem: Problem, method: Less) -> State:
    state = method.init(task_problem, 0)
    while state["phase"] != "pool":
        state, _ = method.step(task_problem, state)
    return state


def plain_loop(task_problem: Problem, first: int, count: int) -> None:
    """One ordinary backward pass a row, at x0."""
    x = {name: leaf.detach().requires_grad_() for name, leaf in task_problem.x0.items()}
    for row in range(first, first + count):
        loss = task_problem.f(
            task_problem.theta0, x, task_problem.lower_data.rows(torch.tensor([row]))
        )
        torch.autograd.grad(loss, list(x.values()))


def seconds(action: Callable[[], None], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    # Processor time on a CPU, which others' programs do not lengthen.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started = clock()
    action()
    wait()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    for name, default in (
        ("layers", 4),
        ("width", 256),
        ("rank", 8),
        ("length", 128),
        ("chunk", 16),
        ("repetitions", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)

    with tempfile.TemporaryDirectory() as folder:
        task_problem = problem(options, Path(folder))
        size = sum(leaf.numel() for leaf in task_problem.x0.values())
        chunk: Any = options.chunk
        methods = {
            kind: Less(warmup=Warmup(share=0.1, epochs=1), batch_size=8, chunk=chunk, **settings)
            for kind, settings in KINDS.items()
        }
        states = {kind: at_the_pool(task_problem, method) for kind, method in methods.items()}
        times: dict[str, list[float]] = {kind: [] for kind in ("plain loop", *KINDS)}
        for turn in range(options.repetitions + 1):
            first = turn * options.chunk
            loop = partial(plain_loop, task_problem, first, options.chunk)
            times["plain loop"].append(seconds(loop, device))
            for kind, method in methods.items():

                def score(kind: str = kind, method: Less = method) -> None:
                    states[kind] = method.step(task_problem, states[kind])[0]

                times[kind].append(seconds(score, device))
    plain = times["plain loop"][1:]  # the first turn warms up
    report = {
        "device": str(device),
        "lower variables": size,
        "chunk": options.chunk,
        "length": options.length,
        "kinds": {},
    }
    print(
        f"{size} lower variables, {options.chunk} rows of {options.length} tokens a pass, "
        f"{device}, {options.threads} thread(s)"
    )
    print(f"{'plain loop':>16}  {options.chunk / statistics.median(plain):8.1f} rows/s")
    for kind in KINDS:
        own = times[kind][1:]
        ratio = statistics.median(
            plain_seconds / other for plain_seconds, other in zip(plain, own, strict=True)
        )
        rate = options.chunk / statistics.median(own)
        report["kinds"][kind] = {"rows per second": rate, "ratio": ratio}  # type: ignore[index]
        print(f"{kind:>16}  {rate:8.1f} rows/s   {ratio:.2f} of the plain loop's")
    if options.json:
        options.json.write_text(
            json.dumps({**report, "argv": sys.argv[1:]}, indent=2), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
