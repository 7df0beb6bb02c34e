"""Measure the savings of Nyström and warm starts for linear solvers along an outer trajectory.

    python benchmarks/bench_solvers.py [--json FILE] [--threads 2]

Every solver gets the same systems. Compare products and ratios, not seconds.
``bench_hypergradient.py`` compares one hypergradient with other libraries.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from hgms.solvers import CG, NystromCG
from hgms_core import Linearization, Outcome

Tree = dict[str, Tensor]


# Products to a relative residual of 1e-6
# --------------------------------------------------------------------------------------------------


def ill_conditioned() -> tuple[Tree, Tree, Callable, Callable]:
    """Return hyper-cleaning of scikit-learn's digits: 64–32–10 tanh network, 1000 rows, float64.

    Half the labels are redrawn. Only the weight decay of 5e-4 keeps the lower Hessian positive
    definite.
    """
    pictures, digits = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    kwargs = {"generator": generator, "dtype": torch.float64}
    order = torch.randperm(len(digits), generator=generator)
    inputs = torch.tensor(pictures)[order] / 16
    labels = torch.tensor(digits)[order]
    a = inputs[:1000]
    y = labels[:1000].clone()
    b = inputs[1000:]
    z = labels[1000:]
    y[:500] = torch.randint(10, (500,), generator=generator)
    x = {
        "w1": torch.randn(32, 64, **kwargs) / 8,
        "b1": torch.zeros(32, dtype=torch.float64),
        "w2": torch.randn(10, 32, **kwargs) / 32**0.5,
        "b2": torch.zeros(10, dtype=torch.float64),
    }

    def loss(x: Tree, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(functional.linear(inputs, x["w1"], x["b1"]))
        return functional.cross_entropy(
            functional.linear(hidden, x["w2"], x["b2"]), labels, reduction="none"
        )

    def g(theta: Tree, x: Tree) -> Tensor:
        return (theta["t"].sigmoid() * loss(x, a, y)).mean() + 5e-4 * sum(
            (leaf**2).sum() for leaf in x.values()
        )

    def f(theta: Tree, x: Tree) -> Tensor:
        return loss(x, b, z).mean()

    return {"t": torch.zeros(1000, dtype=torch.float64)}, x, f, g


def minimise(g: Callable, theta: Tree, x: Tree, steps: int) -> Tree:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    optimiser = torch.optim.LBFGS(
        leaves.values(),
        max_iter=steps,
        tolerance_grad=1e-8,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
        history_size=50,
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = g(theta, leaves)
        loss.backward()
        return loss

    optimiser.step(closure)
    return {name: leaf.detach() for name, leaf in leaves.items()}


def compare_products(outer_steps: int, ranks: tuple[int, ...]) -> list[dict]:
    """Give every solver the same outer trajectory: steps along plain CG's hypergradient, at most
    0.02 in each θ_i.
    """
    theta, x, f, g = ill_conditioned()
    x = minimise(g, theta, x, 6000)
    table = []
    for ridge in (1e-5, 1e-4):
        limit = {"ridge": ridge, "rtol": 1e-6, "max_steps": 3000}
        solvers = {"cg": CG(**limit), "cg, warm start": CG(**limit)}
        solvers |= {f"nystrom rank {rank}": NystromCG(rank=rank, **limit) for rank in ranks}
        solvers |= {f"nystrom rank {ranks[0]}, warm start": NystromCG(rank=ranks[0], **limit)}
        products = {name: [] for name in solvers}
        seconds = {name: [] for name in solvers}
        at = dict(theta)
        point = x
        last = dict.fromkeys(solvers)
        for _ in range(outer_steps):
            for name, solver in solvers.items():
                start = time.perf_counter()
                start_value = last[name] if "warm" in name else None
                result = Linearization.of(f, g, at, point).hypergradient(solver, start_value)
                seconds[name].append(time.perf_counter() - start)
                assert result.outcome is Outcome.CONVERGED, (name, result.outcome)
                products[name].append(result.solution.products)
                last[name] = result.solution.value
                if name == "cg":
                    h = result.value["t"]
            at = {"t": at["t"] - 0.02 * h / h.abs().max()}
            point = minimise(g, at, point, 400)
        # The first solve of a trajectory has no start, so it does not represent the cost of a warm
        # start.
        plain = statistics.median(products["cg"][1:])
        for name in solvers:
            median = statistics.median(products[name][1:])
            table.append(
                {
                    "what": name,
                    "ridge": ridge,
                    "products": median,
                    "ratio": median / plain,
                    "seconds": statistics.median(seconds[name][1:]),
                    "seconds ratio": statistics.median(seconds[name][1:])
                    / statistics.median(seconds["cg"][1:]),
                }
            )
    return table


def show(title: str, table: list[dict]) -> None:
    print(f"\n{title}")
    keys = list(table[0])
    cells = [
        [f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in keys]
        for row in table
    ]
    widths = [max(len(key), *(len(row[i]) for row in cells)) for i, key in enumerate(keys)]
    for row in [keys, *cells]:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--outer-steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[60, 100])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
    }
    figures["products"] = compare_products(options.outer_steps, tuple(options.ranks))
    show(
        (
            "Products to a relative residual of 1e-6, 64-32-10 tanh network on digits (sketch and "
            "check included)"
        ),
        figures["products"],
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
