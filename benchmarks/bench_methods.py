"""One outer step of every method against the same step written straight down in PyTorch, on hyper-cleaning.

    python benchmarks/bench_methods.py [--json FILE] [--only v-pbgd scalebio ...] [--rounds 21] [--steps 10] [--threads 1]

MNIST (784-300-10, 5,000 training images) where $HGMS_DATA/mnist has it, else scikit-learn's digits. Blocks of steps of the two
contestants take turns; read the ratios (medians over the turns), not the milliseconds. Before the clock starts, both make two
steps on whole batches and must agree.

To add a method: write the stepper that a person would write for this problem alone, and enter both in METHODS.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from hgms_core import Pipeline, Problem, Tree, clone
from hgms_core.config import RunConfig

Stepper = Callable[[], tuple[Tree, Tree]]
"""Makes one more outer step in place; returns (θ, x)."""
Straight = Callable[[Problem, Pipeline], Stepper]


def composed(name: str) -> Pipeline:
    """A registered method with the settings it ships with."""
    method = RunConfig.from_dict({"task": "hyper-cleaning", "method": name, "budget": "1 steps"}).method
    if not isinstance(method, Pipeline):
        raise SystemExit(f"{name} is not a pipeline")
    return method


def whole(method: Pipeline) -> Pipeline:
    """The same on whole batches."""
    made: Any = method.generator
    sizes = {name: None for name in ("batch_size", "upper_batch_size") if hasattr(made, name)}
    return evolve(method, generator=evolve(made, **sizes))


# Straight down -----------------------------------------------------------------------------------------------------------


class Batches:
    """Rows of both losses, drawn by one generator as a plain training loop draws them."""

    def __init__(self, problem: Problem, generator: Any) -> None:
        self.train, self.validation = problem.lower_data, problem.upper_data["differentiate"]
        self.sizes = (generator.batch_size, getattr(generator, "upper_batch_size", None))
        self.random = torch.Generator().manual_seed(0)

    def lower(self) -> Tree:
        return self._draw(self.train, self.sizes[0])

    def upper(self) -> Tree:
        return self._draw(self.validation, self.sizes[1])

    def _draw(self, data: Any, size: int | None) -> Tree:
        if size is None or size >= data.size:
            return dict(data.whole)
        return dict(data.rows(torch.randperm(data.size, generator=self.random)[:size].to(data.device)))


def trainable(tree: Tree) -> Tree:
    return {name: leaf.requires_grad_() for name, leaf in clone(tree).items()}


def descend(tree: Tree, grads: Any, rate: float) -> None:
    with torch.no_grad():
        torch._foreach_add_(list(tree.values()), list(grads), alpha=-rate)


def weight_of(generator: Any, k: int) -> tuple[float, float]:
    """(γ_k, c_k)."""
    gamma = min(generator.gamma, generator.gamma_start + (generator.gamma - generator.gamma_start) * k / generator.gamma_steps)
    return gamma, min(1 / gamma, 1.0) if gamma else 1.0


def v_pbgd(problem: Problem, method: Pipeline) -> Stepper:
    made: Any = method.generator
    rate = method.outer.lr  # type: ignore[attr-defined]
    theta, y, omega = trainable(problem.theta0), trainable(problem.x0), trainable(problem.x0)
    batches, k = Batches(problem, made), 0

    def step() -> tuple[Tree, Tree]:
        nonlocal k
        still = {name: leaf.detach() for name, leaf in theta.items()}
        for _ in range(made.steps):
            descend(omega, torch.autograd.grad(problem.g(still, omega, batches.lower()), list(omega.values())), made.inner_lr)
        gamma, scale = weight_of(made, k)
        rows, target = batches.lower(), {name: leaf.detach() for name, leaf in omega.items()}
        gap = problem.g(theta, y, rows) - problem.g(theta, target, rows)
        loss = scale * (problem.f(theta, y, batches.upper()) + gamma * gap)
        grads = torch.autograd.grad(loss, [*theta.values(), *y.values()])
        descend(theta, grads[: len(theta)], rate)
        descend(y, grads[len(theta) :], made.lr)
        k += 1
        return theta, y

    return step


def g_pbgd(problem: Problem, method: Pipeline) -> Stepper:
    made: Any = method.generator
    rate = method.outer.lr  # type: ignore[attr-defined]
    theta, y = trainable(problem.theta0), trainable(problem.x0)
    batches, k = Batches(problem, made), 0

    def step() -> tuple[Tree, Tree]:
        nonlocal k
        gamma, scale = weight_of(made, k)
        slopes = torch.autograd.grad(problem.g(theta, y, batches.lower()), list(y.values()), create_graph=True)
        penalty = torch.stack([slope.square().sum() for slope in slopes]).sum()
        loss = scale * (problem.f(theta, y, batches.upper()) + gamma / 2 * penalty)
        grads = torch.autograd.grad(loss, [*theta.values(), *y.values()], materialize_grads=True)
        descend(theta, grads[: len(theta)], rate)
        descend(y, grads[len(theta) :], made.lr)
        k += 1
        return theta, y

    return step


def scalebio(problem: Problem, method: Pipeline) -> Stepper:
    made: Any = method.generator
    rate = method.outer.lr  # type: ignore[attr-defined]
    theta, w, u = trainable(problem.theta0), trainable(problem.x0), trainable(problem.x0)
    batches = Batches(problem, made)

    def step() -> tuple[Tree, Tree]:
        rows = batches.lower()
        game = problem.f(theta, w, batches.upper()) + made.alpha * (problem.g(theta, w, rows) - problem.g(theta, u, rows))
        grads = torch.autograd.grad(game, [*theta.values(), *w.values(), *u.values()])
        descend(theta, grads[: len(theta)], rate)
        descend(w, grads[len(theta) : -len(u)], made.lr)
        descend(u, grads[-len(u) :], -(made.lr_u or made.lr))
        return theta, w

    return step


def bome(problem: Problem, method: Pipeline) -> Stepper:
    made: Any = method.generator
    rate = method.outer.lr  # type: ignore[attr-defined]
    theta, y = trainable(problem.theta0), trainable(problem.x0)
    both = [*theta.values(), *y.values()]
    batches = Batches(problem, made)

    def dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
        return torch.stack([(one * other).sum() for one, other in zip(a, b, strict=True)]).sum()

    def step() -> tuple[Tree, Tree]:
        rows = batches.lower()
        still = {name: leaf.detach() for name, leaf in theta.items()}
        down = list(torch.autograd.grad(problem.g(theta, y, rows), both))
        end = trainable(y)
        descend(end, down[len(theta) :], made.inner_lr)
        for _ in range(made.steps - 1):
            descend(end, torch.autograd.grad(problem.g(still, end, rows), list(end.values())), made.inner_lr)
        target = {name: leaf.detach() for name, leaf in end.items()}
        at_end = torch.autograd.grad(problem.g(theta, target, rows), list(theta.values()))
        down[: len(theta)] = [slope - other for slope, other in zip(down, at_end, strict=False)]
        up = list(torch.autograd.grad(problem.f(theta, y, batches.upper()), both, materialize_grads=True))
        weight = (made.eta - dot(up, down) / dot(down, down)).clamp_min(0)
        direction = [slope + weight * other for slope, other in zip(up, down, strict=True)]
        descend(theta, direction[: len(theta)], rate)
        descend(y, direction[len(theta) :], made.lr)
        return theta, y

    return step


def soba(problem: Problem, method: Pipeline) -> Stepper:
    made: Any = method.generator
    rate = method.outer.lr  # type: ignore[attr-defined]
    theta, x = trainable(problem.theta0), trainable(problem.x0)
    both = [*theta.values(), *x.values()]
    v = {name: torch.zeros_like(leaf) for name, leaf in problem.x0.items()}
    batches = Batches(problem, made)

    def step() -> tuple[Tree, Tree]:
        slopes = torch.autograd.grad(problem.g(theta, x, batches.lower()), list(x.values()), create_graph=True)
        products = torch.autograd.grad(slopes, both, list(v.values()))
        direct = torch.autograd.grad(problem.f(theta, x, batches.upper()), both, materialize_grads=True)
        up = torch._foreach_add(list(products), list(direct))
        descend(x, [slope.detach() for slope in slopes], made.lr)
        descend(v, up[len(theta) :], made.v_lr)
        descend(theta, up[: len(theta)], rate)
        return theta, x

    return step


def iaptt_gm(problem: Problem, method: Pipeline) -> Stepper:
    made: Any = method.generator
    outer: Any = method.outer
    theta, z = trainable(problem.theta0), trainable(problem.x0)
    adam = torch.optim.Adam(list(theta.values()), lr=outer.upper.lr)
    batches, scored = Batches(problem, made), problem.upper_data["select"].whole

    def step() -> tuple[Tree, Tree]:
        y, iterates, scores = z, [], []
        for _ in range(made.steps):
            slopes = torch.autograd.grad(problem.g(theta, y, batches.lower()), list(y.values()), create_graph=True)
            y = {name: leaf - made.lr * slope for (name, leaf), slope in zip(y.items(), slopes, strict=True)}
            iterates.append(y)
            with torch.no_grad():
                scores.append(problem.f(theta, y, scored))
        worst = iterates[int(torch.stack(scores).argmax())]
        grads = torch.autograd.grad(problem.f(theta, worst, batches.upper()), [*theta.values(), *z.values()])
        for leaf, grad in zip(theta.values(), grads, strict=False):
            leaf.grad = grad
        adam.step()
        descend(z, grads[len(theta) :], outer.start.lr)
        return theta, y

    return step


METHODS: dict[str, tuple[Pipeline, Straight]] = {
    "v-pbgd": (composed("v-pbgd"), v_pbgd),
    "g-pbgd": (composed("g-pbgd"), g_pbgd),
    "scalebio": (composed("scalebio"), scalebio),
    "bome": (composed("bome"), bome),
    "soba": (composed("soba"), soba),
    # On whole batches: the cost of a step depends on where the run is truncated, and so both truncate it at the same iterate.
    "iaptt-gm": (whole(composed("iaptt-gm")), iaptt_gm),
}

# Measuring ---------------------------------------------------------------------------------------------------------------


def through(problem: Problem, method: Pipeline) -> Stepper:
    """The same as a stepper, through Pipeline."""
    state = method.init(problem, seed=0)

    def step() -> tuple[Tree, Tree]:
        nonlocal state
        state, _ = method.step(problem, state)
        return state["theta"], state["x"]

    return step


def agree(problem: Problem, method: Pipeline, straight: Straight) -> None:
    """Two steps on whole batches give the same (θ, x)."""
    one, other = through(problem, whole(method)), straight(problem, whole(method))
    for _ in range(2):
        found, expected = one(), other()
    for mine, theirs in zip(found, expected, strict=True):
        for name in theirs:
            torch.testing.assert_close(mine[name], theirs[name].detach(), rtol=1e-3, atol=1e-5)


def measure(problem: Problem, method: Pipeline, straight: Straight, rounds: int, steps: int) -> dict[str, float]:
    agree(problem, method, straight)
    contestants = {"pipeline": through(problem, method), "straight down": straight(problem, method)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            for _ in range(steps):
                contestants[name]()
            if turn:  # the first turn warms up
                seconds[name].append((time.perf_counter() - begin) / steps)
    ratios = sorted(a / b for a, b in zip(seconds["pipeline"], seconds["straight down"], strict=True))
    return {
        "pipeline [ms]": 1e3 * statistics.median(seconds["pipeline"]),
        "straight down [ms]": 1e3 * statistics.median(seconds["straight down"]),
        "ratio": statistics.median(ratios),
        "ratio q25": ratios[len(ratios) // 4],
        "ratio q75": ratios[-1 - len(ratios) // 4],
        "fastest / fastest": min(seconds["pipeline"]) / min(seconds["straight down"]),
    }


def cleaning() -> tuple[str, Problem]:
    root = os.environ.get("HGMS_DATA")
    dataset = "mnist" if root and (Path(root) / "mnist").exists() else "digits"
    task = {"name": "hyper-cleaning", "dataset": dataset, "corruption": 0.6}
    made = RunConfig.from_dict({"task": task, "method": "scalebio", "budget": "1 steps"}).task
    return dataset, made.problem(0, torch.device("cpu"), torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", choices=list(METHODS), nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=10, help="outer steps in a block")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dataset, problem = cleaning()
    machine = platform.processor() or platform.machine()
    figures: dict[str, Any] = {"dataset": dataset, "torch": torch.__version__, "machine": machine, "threads": options.threads}
    print(
        f"hyper-cleaning on {dataset}, {options.threads} thread(s), blocks of {options.steps} steps, {options.rounds} turns\n"
    )
    for name in options.only:
        figures[name] = measure(problem, *METHODS[name], options.rounds, options.steps)
        if name == options.only[0]:
            print(f"{'method':12}" + "".join(f"{column:>20}" for column in figures[name]))
        print(f"{name:12}" + "".join(f"{value:20.3f}" for value in figures[name].values()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
