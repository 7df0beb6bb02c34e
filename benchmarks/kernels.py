"""Count the kernels of a step of ``hg-ms`` without a GPU: eager operations and compiled kernels.

    python benchmarks/kernels.py [--json benchmarks/results/kernels.json] [--dataset digits]

For the cleaning network, each part of a step: the operations of the eager code (without views and
empty tensors; each would be a launch on a GPU), the operations of its traced graph, its matrix
products, and the kernels of torch's inductor for the rest on the CPU. The number for a GPU differs,
because its generator fuses by other rules. The script measures no time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hgms.compiled import programs
from hgms.solvers.pcg import begin, iteration
from hgms.tasks.cleaning import HyperCleaning
from hgms_core import Key, Linearization, LinearSystem, Loss, Problem, Tree, values

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.step_graphs import RIDGE, branches, multiplications, operations, step_graphs

FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "alias",
    "lift_fresh",
    "_local_scalar_dense",
}


class Operations(TorchDispatchMode):
    """Counts the operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func.overloadpacket.__name__ not in FREE
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> int:
    call()
    with Operations() as ran:
        call()
    return ran.count


def eager(problem: Problem) -> dict[str, int]:
    """Return the eager operations of each part of a step; names as in :func:`step_graphs`."""

    def propose(steps: int) -> Any:
        generator = branches(steps=steps)
        return generator.propose(problem, problem.theta0, generator.init(problem, Key(0)), Key(1))

    def on(loss: Loss, batch: Tree, theta: Tree, x: Tree) -> torch.Tensor:
        return loss(theta, x, batch)

    def linearized() -> Linearization:
        return Linearization.of(
            partial(on, problem.f, above),
            partial(on, problem.g, below),
            problem.theta0,
            problem.x0,
            "vjp",
        )

    def scores() -> torch.Tensor:
        scored = values(
            problem.f,
            problem.theta0,
            candidates.x,
            problem.upper_data["select"].batch(None),
            mode="stacked",
        )
        return torch.where(candidates.finite, scored, torch.full_like(scored, torch.nan))

    below = problem.lower_data.batch(None)
    above = problem.upper_data["differentiate"].batch(None)
    candidates = propose(1)
    here = linearized()
    system = LinearSystem.of(here.matvec, here.rhs, ridge=RIDGE)
    state = begin(system, None, 1, None, None)
    return {
        "lower step": counted(lambda: propose(3)) - counted(lambda: propose(2)),
        "scores": counted(scores),
        "linearisation": counted(linearized),
        "Hessian product": counted(lambda: here.matvec(here.rhs)),
        "mixed product": counted(lambda: here.mixed(here.rhs)),
        "iteration of CG": counted(lambda: iteration(system, state, 1)),
    }


def generated(graph: torch.fx.GraphModule, leaves: Any) -> int:
    """Return the number of CPU kernels, without matrix products and other library calls."""
    from torch._inductor import metrics

    metrics.reset()
    programs.compile_graph(graph, leaves)
    return int(metrics.generated_kernel_count)


def count(problem: Problem) -> dict[str, dict[str, int]]:
    written = eager(problem)
    table = {}
    for name, (graph, leaves) in step_graphs(problem, "cpu").items():
        if name not in written:
            continue
        table[name] = {
            "eager operations": written[name],
            "operations traced": len(operations(graph)),
            "products of matrices": multiplications(graph),
            "kernels generated": generated(graph, leaves),
        }
        print(name, table[name], flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--dataset", default="digits")
    options = parser.parse_args()
    problem = HyperCleaning(dataset=options.dataset).problem(0, torch.device("cpu"), torch.float32)
    figures = {"torch": torch.__version__, "dataset": options.dataset, "kernels": count(problem)}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
