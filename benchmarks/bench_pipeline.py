"""Measure the pipeline: overhead over PyTorch, stacked branches, memory of chains, `hgms list`.

    python benchmarks/bench_pipeline.py [--json FILE] [--repetitions 9] [--threads 1] [--only outer
    stacking memory list]

Times are medians of alternating repetitions; compare ratios (medians of the ratios per turn), not
seconds. One thread by default, because a busy machine distorts more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hgms.adapters import from_losses
from hgms.generators.branches import Branches
from hgms.generators.ula import Ula
from hgms.hypergradients import Implicit
from hgms.optim import SGD
from hgms.outer import Adam
from hgms.selectors import BestOfN
from hgms.solvers import CG
from hgms_core import Data, Key, Pipeline, Problem, Tree, repeat
from hgms_core.stacking import STACK_BELOW, prefers_stack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.helpers import LiveMemory

COUNT = 4
STEPS = 20
BATCH = 256
RATE = 0.1
RIDGE = 1.0
PRODUCTS = 10
OUTER_RATE = 0.1


def losses(x: Tree, batch: Tree) -> Tensor:
    hidden = torch.sigmoid(functional.linear(batch["a"], x["w1"], x["b1"]))
    # A gather instead of cross_entropy, whose batching rule under vmap takes twice as many
    # operations.
    logs = functional.linear(hidden, x["w2"], x["b2"]).log_softmax(-1)
    return -logs.gather(-1, batch["y"].unsqueeze(-1)).squeeze(-1)


def decay(x: Tree) -> Tensor:
    # leaf·leaf instead of leaf², with a power as its derivative
    return 1e-4 * sum((leaf * leaf).sum() for leaf in x.values())  # type: ignore[return-value]


def lower(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return (torch.sigmoid(theta["w"][batch["index"]]) * losses(x, batch)).mean() + decay(x)


def upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    return losses(x, batch).mean()


def cleaning(sizes: tuple[int, int, int], rows: int) -> Problem:
    """Return data of the cleaning task's shape with learnable labels, and a fresh sigmoid
    network.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, hidden, classes = sizes
    teacher = torch.randn(inputs, classes, generator=generator)

    def data(count: int) -> Data:
        a = torch.rand(count, inputs, generator=generator)
        return Data.of({"a": a, "y": ((a - 0.5) @ teacher).argmax(-1)})

    x0 = {
        "w1": torch.randn(hidden, inputs, generator=generator) / inputs**0.5,
        "b1": torch.zeros(hidden),
        "w2": torch.randn(classes, hidden, generator=generator) / hidden**0.5,
        "b2": torch.zeros(classes),
    }
    train = data(rows)
    validation = data(rows // 10)
    roles = dict.fromkeys(("differentiate", "select", "stop"), validation)
    return from_losses(
        theta0={"w": torch.zeros(rows)}, x0=x0, g=lower, f=upper, lower_data=train, upper_data=roles
    )


def turns(rounds: int, contestants: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return seconds of each contestant in each round; the order alternates."""
    for contestant in contestants.values():
        contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# 1. One outer step, through Pipeline and written straight down
#    -----------------------------------------------------------


def straight_down(
    problem: Problem,
    theta: Tensor,
    start: Tree,
    key: Key,
    count: int = COUNT,
    products: int = PRODUCTS,
) -> tuple[Tensor, Tree]:
    """One outer step of HG-MS by hand for this problem: no records, counts or choices."""
    train = problem.lower_data.whole
    validation = problem.upper_data["differentiate"].whole
    rows = theta.shape[0]
    branches = []
    scores = []
    for member in range(count):
        index = key.fold("propose", "batches", member).indices(rows, BATCH, STEPS, theta.device)
        x = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
        for step in range(STEPS):
            drawn = index[step]
            loss = (
                torch.sigmoid(theta[drawn])
                * losses(x, {"a": train["a"][drawn], "y": train["y"][drawn]})
            ).mean()
            grads = torch.autograd.grad(loss + decay(x), list(x.values()))
            with torch.no_grad():
                for leaf, grad in zip(x.values(), grads, strict=True):
                    leaf.sub_(grad, alpha=RATE)
        with torch.no_grad():
            scores.append(losses(x, validation).mean())
        branches.append(x)
    x = branches[int(torch.stack(scores).argmin())]
    leaves = list(x.values())

    rhs = torch.cat(
        [slope.reshape(-1) for slope in torch.autograd.grad(losses(x, validation).mean(), leaves)]
    )
    weighted = (torch.sigmoid(theta) * losses(x, train)).mean() + decay(x)
    slopes = torch.autograd.grad(weighted, leaves, create_graph=True)
    sizes = [leaf.numel() for leaf in leaves]

    def product(v: Tensor) -> Tensor:
        parts = [part.view(leaf.shape) for part, leaf in zip(v.split(sizes), leaves, strict=True)]
        products = torch.autograd.grad(slopes, leaves, parts, retain_graph=True)
        return torch.cat([leaf.reshape(-1) for leaf in products]) + RIDGE * v

    v = torch.zeros_like(rhs)
    residual = rhs
    direction = rhs
    size = rhs @ rhs
    for _ in range(products):
        image = product(direction)
        alpha = size / (direction @ image)
        v = v + alpha * direction
        residual = residual - alpha * image
        size, before = residual @ residual, size
        direction = residual + size / before * direction

    parts = [part.view(leaf.shape) for part, leaf in zip(v.split(sizes), leaves, strict=True)]
    still = {name: leaf.detach() for name, leaf in x.items()}
    _, along = torch.func.jvp(
        lambda point: losses(point, train), (still,), (dict(zip(x, parts, strict=True)),)
    )
    weight = torch.sigmoid(theta)
    hypergradient = -weight * (1 - weight) * along / rows
    # The first step of Adam.
    return theta - OUTER_RATE * hypergradient / (hypergradient.abs() + 1e-8), still


def compare_outer_step(rounds: int) -> dict[str, float]:
    problem = cleaning((784, 300, 10), rows=5000)
    method = Pipeline(
        generator=Branches(
            count=COUNT, steps=STEPS, optimizer=SGD(lr=RATE), batch_size=BATCH, mode="loop"
        ),
        selector=BestOfN(mode="loop"),
        hypergradient=Implicit(solver=CG(ridge=RIDGE, rtol=1e-12, max_steps=PRODUCTS)),
        outer=Adam(lr=OUTER_RATE),
    )
    state = method.init(problem, seed=0)
    key = Key(0).fold("step", 0)
    theta = problem.theta0["w"]
    x = problem.x0
    after, record = method.step(problem, state)
    by_hand, lower_state = straight_down(problem, theta, x, key)
    if record["cost_products"] != PRODUCTS:
        raise SystemExit(
            f"CG took {record['cost_products']} products and not {PRODUCTS}: the two do not do "
            "the same"
        )
    torch.testing.assert_close(after["x"], lower_state, rtol=1e-4, atol=1e-6)
    moved = after["theta"]["w"] - theta
    expected = by_hand - theta
    torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-2 * OUTER_RATE)
    seconds = turns(
        rounds,
        {
            "pipeline": lambda: method.step(problem, state),
            "straight down": lambda: straight_down(problem, theta, x, key),
        },
    )
    return {
        "pipeline [s]": statistics.median(seconds["pipeline"]),
        "straight down [s]": statistics.median(seconds["straight down"]),
        "pipeline / straight down": ratio(seconds["pipeline"], seconds["straight down"]),
        "fastest / fastest": min(seconds["pipeline"]) / min(seconds["straight down"]),
    }


# 2. Stacked against looped branches
#    --------------------------------------------------------------------------------------

SIZES = {
    "64-32-10, batch 64": ((64, 32, 10), 64),
    "128-64-10, batch 64": ((128, 64, 10), 64),
    "200-100-10, batch 64": ((200, 100, 10), 64),
    "256-128-10, batch 128": ((256, 128, 10), 128),
    "400-200-10, batch 128": ((400, 200, 10), 128),
    "784-300-10, batch 256": ((784, 300, 10), 256),
}


def compare_stacking(rounds: int, count: int = 8) -> dict[str, dict[str, float | str]]:
    """Compare the gradient step of N branches with separate batches, stacked and looped."""
    table: dict[str, dict[str, float | str]] = {}
    for name, (sizes, batch_size) in SIZES.items():
        problem = cleaning(sizes, rows=2000)
        x = repeat(problem.x0, count)
        inner = 10 if batch_size == 64 else 2
        branches = {
            mode: Branches(
                count=count, steps=inner, optimizer=SGD(lr=1e-3), batch_size=batch_size, mode=mode
            )
            for mode in ("stacked", "loop")
        }
        start = branches["loop"].init(problem, Key(0))
        seconds = turns(
            rounds,
            {
                mode: partial(generator.propose, problem, problem.theta0, start, Key(0))
                for mode, generator in branches.items()
            },
        )
        faster = "stacked" if ratio(seconds["loop"], seconds["stacked"]) > 1 else "loop"
        table[name] = {
            "multiply-adds": float(batch_size * sum(leaf.numel() for leaf in problem.x0.values())),
            "stacked [ms/step]": 1e3 * statistics.median(seconds["stacked"]) / inner,
            "loop [ms/step]": 1e3 * statistics.median(seconds["loop"]) / inner,
            "loop / stacked": ratio(seconds["loop"], seconds["stacked"]),
            "fastest / fastest": min(seconds["loop"]) / min(seconds["stacked"]),
            "faster": faster,
            "auto": "stacked" if prefers_stack(x, batch_size, "auto") else "loop",
        }
    return table


# 3. Peak memory of chains
# ------------------------------------------------------------------------------------------------


def measure_memory() -> dict[str, float]:
    """Return the peak bytes of tensors in a proposal, in lower states |x| (784-300-10, 64 rows,
    decay in g).
    """
    peaks = {}
    problem = cleaning((784, 300, 10), rows=64)
    size = sum(leaf.nbytes for leaf in problem.x0.values())
    for count in (2, 8):
        for mode, chunk in (("auto", None), ("stacked", 1), ("stacked", None)):
            settings: Any = {"mode": mode, "chunk": chunk}
            ula = Ula(count=count, steps=2, lr=1e-3, **settings)
            with LiveMemory() as memory:
                ula.propose(problem, problem.theta0, ula.init(problem, Key(0)), Key(0))
            peaks[f"N = {count}, {mode}, chunk {chunk} (bound {2 * count + 6})"] = (
                memory.peak / size
            )
    return peaks


# 4. hgms list
# --------------------------------------------------------------------------------------------------


def measure_list(rounds: int) -> dict[str, float]:
    processor: dict[str, list[float]] = {"import torch": [], "hgms list": []}

    def python(name: str, code: str) -> None:
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = os.times()
        processor[name].append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )

    listing = "import sys; from hgms.cli.group import main; sys.argv = ['hgms', 'list']; main()"
    codes = {"import torch": "import torch", "hgms list": listing}
    seconds = turns(rounds, {name: partial(python, name, code) for name, code in codes.items()})

    def beyond(times: dict[str, list[float]]) -> float:
        return statistics.median(
            a - b for a, b in zip(times["hgms list"], times["import torch"], strict=True)
        )

    return {
        "import torch [s]": statistics.median(seconds["import torch"]),
        "hgms list [s]": statistics.median(seconds["hgms list"]),
        "beyond import torch [s]": beyond(seconds),
        "beyond import torch [processor s]": beyond(processor),
    }


def show(title: str, figures: Mapping[str, object]) -> None:
    print(f"\n{title}")
    for name, value in figures.items():
        if isinstance(value, Mapping):
            cells = "  ".join(
                f"{key} {number:.4g}" if isinstance(number, float) else f"{key} {number}"
                for key, number in value.items()
            )
            print(f"  {name:24} {cells}")
        else:
            print(f"  {name:44} {value:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parts = ["outer", "stacking", "memory", "list"]
    parser.add_argument("--only", choices=parts, nargs="+", default=parts)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, object] = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
    }
    measured: dict[str, tuple[str, Callable[[], Mapping[str, object]]]] = {
        "outer": (
            (
                f"One outer step, 784-300-10, n = 5000: {COUNT} branches x {STEPS} SGD steps x "
                f"{BATCH} rows, {PRODUCTS} products"
            ),
            lambda: compare_outer_step(options.repetitions),
        ),
        "stacking": (
            f"8 branches, stacked against looped (auto stacks up to {STACK_BELOW:,} multiply-adds)",
            lambda: compare_stacking(options.repetitions),
        ),
        "memory": ("Peak memory of N chains, in lower states", measure_memory),
        "list": ("hgms list", lambda: measure_list(options.repetitions)),
    }
    for name in options.only:
        title, measure = measured[name]
        figures[name] = measure()
        show(title, figures[name])  # type: ignore[arg-type]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
