"""Linear solvers, timed: one CG hypergradient against other libraries, and what Nyström and warm starts save.

    python benchmarks/bench_solvers.py [--json FILE] [--repetitions 7] [--threads 2]

All times are medians of repetitions that take turns within this one run; read the ratios, not the seconds. Libraries that are
not installed are left out (``pip install "hgms[peers]"`` brings torchopt and jaxopt).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from hgms_core import Estimate, Outcome, implicit
from hgms_solvers import CG, NystromCG

PRODUCTS = 30
RIDGES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)  # the first with which CG uses up its steps is taken
Tree = dict[str, Tensor]


# 1. One implicit hypergradient on the cleaning network ------------------------------------------------------------------


def cleaning(rows: int = 5000, sizes: tuple[int, int, int] = (784, 300, 10)) -> tuple[Tree, Tree, Tree, Tree]:
    """Random data of MNIST's shape with learnable labels, and a network trained on them: (θ, x, lower, upper).

    Trained, because CG would stop at negative curvature on a random one before its products are spent.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, hidden, classes = sizes
    teacher = torch.randn(inputs, classes, generator=generator)

    def data(count: int) -> Tree:
        a = torch.rand(count, inputs, generator=generator)
        return {"a": a, "y": ((a - 0.5) @ teacher).argmax(-1)}

    x = {
        "w1": torch.randn(hidden, inputs, generator=generator) / inputs**0.5,
        "b1": torch.zeros(hidden),
        "w2": torch.randn(classes, hidden, generator=generator) / hidden**0.5,
        "b2": torch.zeros(classes),
    }
    train, validation = data(rows), data(rows // 10)
    leaves = {name: leaf.requires_grad_() for name, leaf in x.items()}
    optimiser = torch.optim.Adam(leaves.values(), lr=1e-3)
    for _ in range(600):
        optimiser.zero_grad()
        batch = torch.randint(rows, (250,), generator=generator)
        losses(leaves, {name: leaf[batch] for name, leaf in train.items()}).mean().backward()
        optimiser.step()
    return {"t": torch.zeros(rows)}, {name: leaf.detach() for name, leaf in leaves.items()}, train, validation


def losses(x: Tree, data: Tree) -> Tensor:
    hidden = torch.sigmoid(functional.linear(data["a"], x["w1"], x["b1"]))
    return functional.cross_entropy(functional.linear(hidden, x["w2"], x["b2"]), data["y"], reduction="none")


def lower(theta: Tree, x: Tree, data: Tree) -> Tensor:
    return (theta["t"].sigmoid() * losses(x, data)).mean() + 1e-4 * sum((leaf**2).sum() for leaf in x.values())


def upper(theta: Tree, x: Tree, data: Tree) -> Tensor:
    return losses(x, data).mean()


def ours(theta: Tree, x: Tree, train: Tree, validation: Tree, steps: int, ridge: float) -> Estimate:
    solver = CG(ridge=ridge, rtol=1e-12, max_steps=steps)
    return implicit(lambda t, at: upper(t, at, validation), lambda t, at: lower(t, at, train), theta, x, solver)


def handwritten(theta: Tree, x: Tree, train: Tree, validation: Tree, steps: int, ridge: float) -> Tensor:
    """The loop one would write by hand: one retained graph of the gradient, one backward pass through it a step."""
    t = theta["t"].detach().requires_grad_()
    leaves = [leaf.detach().requires_grad_() for leaf in x.values()]
    sizes, shapes = [leaf.numel() for leaf in leaves], [leaf.shape for leaf in leaves]
    tree = dict(zip(x, leaves, strict=True))

    def flat(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts])

    def split(vector: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]

    b = flat(torch.autograd.grad(upper({"t": t}, tree, validation), leaves))
    gradient = torch.autograd.grad(lower({"t": t}, tree, train), leaves, create_graph=True)
    v, r, p = torch.zeros_like(b), b.clone(), b.clone()
    rr = r.dot(r)
    for _ in range(steps):
        ap = flat(torch.autograd.grad(gradient, leaves, split(p), retain_graph=True)) + ridge * p
        alpha = rr / p.dot(ap)
        v, r = v + alpha * p, r - alpha * ap
        new = r.dot(r)
        p, rr = r + new / rr * p, new
    return -torch.autograd.grad(gradient, t, split(v))[0]


def with_torchopt(theta: Tree, x: Tree, train: Tree, validation: Tree, steps: int, ridge: float) -> Tensor:
    import torchopt

    names = list(x)

    def stationary(leaves: tuple[Tensor, ...], t: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda at: lower({"t": t}, dict(zip(names, at, strict=True)), train))(leaves)

    solve = torchopt.linear_solve.solve_cg(rtol=1e-12, atol=0.0, maxiter=steps, ridge=ridge)

    @torchopt.diff.implicit.custom_root(stationary, argnums=1, solve=solve)
    def solver(_init: tuple[Tensor, ...], _theta: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.detach().clone() for leaf in x.values())

    t = theta["t"].detach().requires_grad_()
    leaves = solver(tuple(x.values()), t)
    return torch.autograd.grad(upper({"t": t}, dict(zip(names, leaves, strict=True)), validation), t)[0]


def with_jaxopt(theta: Tree, x: Tree, train: Tree, validation: Tree, steps: int, ridge: float) -> Callable[[], Tensor]:
    """Jitted; compiling is not timed."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jaxopt import implicit_diff, linear_solve

    def array(tree: Tree) -> dict:
        return {name: jnp.asarray(leaf.numpy()) for name, leaf in tree.items()}

    point, t, below, above = array(x), jnp.asarray(theta["t"].numpy()), array(train), array(validation)

    def loss(x: dict, data: dict) -> jax.Array:
        hidden = jax.nn.sigmoid(data["a"] @ x["w1"].T + x["b1"])
        scores = jax.nn.log_softmax(hidden @ x["w2"].T + x["b2"])
        return -jnp.take_along_axis(scores, data["y"][:, None], 1)[:, 0]

    def g(x: dict, t: jax.Array, below: dict) -> jax.Array:
        return (jax.nn.sigmoid(t) * loss(x, below)).mean() + 1e-4 * sum((leaf**2).sum() for leaf in x.values())

    solve = partial(linear_solve.solve_cg, tol=1e-12, maxiter=steps, ridge=ridge)

    @jax.jit
    def hypergradient(t: jax.Array, point: dict, below: dict, above: dict) -> jax.Array:
        solver = implicit_diff.custom_root(jax.grad(g), solve=solve)(lambda _init, _t, _below: point)
        return jax.grad(lambda t: loss(solver(point, t, below), above).mean())(t)

    return lambda: torch.from_numpy(np.array(hypergradient(t, point, below, above)))


def interleaved(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median seconds of each call; they take turns, so that a slow moment of the machine hits all of them."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(some) for name, some in seconds.items()}


def compare_hypergradients(repetitions: int) -> list[dict]:
    theta, x, train, validation = cleaning()
    problem = (theta, x, train, validation)
    ridge = next(value for value in RIDGES if int(ours(*problem, PRODUCTS, value).iterations) == PRODUCTS)
    calls: dict[str, Callable[[], Tensor]] = {
        "hand-written retained graph": lambda: handwritten(*problem, PRODUCTS, ridge),
        "hgms implicit + cg": lambda: ours(*problem, PRODUCTS, ridge).value["t"],
    }
    if importlib.util.find_spec("torchopt"):
        calls["torchopt solve_cg"] = lambda: with_torchopt(*problem, PRODUCTS, ridge)
    if importlib.util.find_spec("jaxopt"):
        calls["jaxopt solve_cg, jitted"] = with_jaxopt(*problem, PRODUCTS, ridge)
    base = handwritten(*problem, PRODUCTS, ridge)
    for name, call in calls.items():
        error = float((call() - base).norm() / base.norm())
        assert error < 0.05, f"{name} computes something else: relative difference {error:.1e}"
    seconds = interleaved(calls, repetitions)
    reference = seconds["hand-written retained graph"]
    return [{"what": name, "seconds": value, "ratio": value / reference} for name, value in seconds.items()]


# 2. Products to a relative residual of 1e-6 -----------------------------------------------------------------------------


def ill_conditioned() -> tuple[Tree, Tree, Callable, Callable]:
    """Hyper-cleaning of scikit-learn's digits with a 64–32–10 tanh network, 1000 rows, half the labels redrawn, float64.

    The weight decay of 5e-4 alone keeps the lower Hessian positive definite.
    """
    pictures, digits = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    kwargs = {"generator": generator, "dtype": torch.float64}
    order = torch.randperm(len(digits), generator=generator)
    inputs, labels = torch.tensor(pictures)[order] / 16, torch.tensor(digits)[order]
    a, y, b, z = inputs[:1000], labels[:1000].clone(), inputs[1000:], labels[1000:]
    y[:500] = torch.randint(10, (500,), generator=generator)
    x = {
        "w1": torch.randn(32, 64, **kwargs) / 8,
        "b1": torch.zeros(32, dtype=torch.float64),
        "w2": torch.randn(10, 32, **kwargs) / 32**0.5,
        "b2": torch.zeros(10, dtype=torch.float64),
    }

    def loss(x: Tree, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(functional.linear(inputs, x["w1"], x["b1"]))
        return functional.cross_entropy(functional.linear(hidden, x["w2"], x["b2"]), labels, reduction="none")

    def g(theta: Tree, x: Tree) -> Tensor:
        return (theta["t"].sigmoid() * loss(x, a, y)).mean() + 5e-4 * sum((leaf**2).sum() for leaf in x.values())

    def f(theta: Tree, x: Tree) -> Tensor:
        return loss(x, b, z).mean()

    return {"t": torch.zeros(1000, dtype=torch.float64)}, x, f, g


def minimise(g: Callable, theta: Tree, x: Tree, steps: int) -> Tree:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    optimiser = torch.optim.LBFGS(
        leaves.values(), max_iter=steps, tolerance_grad=1e-8, tolerance_change=0, line_search_fn="strong_wolfe", history_size=50
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = g(theta, leaves)
        loss.backward()
        return loss

    optimiser.step(closure)
    return {name: leaf.detach() for name, leaf in leaves.items()}


def compare_products(outer_steps: int, ranks: tuple[int, ...]) -> list[dict]:
    """Every solver sees the same outer trajectory: steps along plain CG's hypergradient, at most 0.02 in each θ_i."""
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
        at, point, last = dict(theta), x, dict.fromkeys(solvers)
        for _ in range(outer_steps):
            for name, solver in solvers.items():
                start = time.perf_counter()
                result = implicit(f, g, at, point, solver, v0=last[name] if "warm" in name else None)
                seconds[name].append(time.perf_counter() - start)
                assert result.outcome is Outcome.CONVERGED, (name, result.outcome)
                products[name].append(result.solution.products)
                last[name] = result.solution.value
                if name == "cg":
                    h = result.value["t"]
            at = {"t": at["t"] - 0.02 * h / h.abs().max()}
            point = minimise(g, at, point, 400)
        # The first solve of a trajectory has nothing to start from, so it is not what a warm start costs.
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
                    "seconds ratio": statistics.median(seconds[name][1:]) / statistics.median(seconds["cg"][1:]),
                }
            )
    return table


def show(title: str, table: list[dict]) -> None:
    print(f"\n{title}")
    keys = list(table[0])
    cells = [[f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in keys] for row in table]
    widths = [max(len(key), *(len(row[i]) for row in cells)) for i, key in enumerate(keys)]
    for row in [keys, *cells]:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--outer-steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[60, 100])
    parser.add_argument("--only", choices=["hypergradient", "products"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="We've integrated functorch", category=FutureWarning)
    warnings.filterwarnings("ignore", message="JAXopt is no longer", category=DeprecationWarning)
    figures: dict = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
    }
    if options.only != "products":
        figures["hypergradient"] = compare_hypergradients(options.repetitions)
        show(f"One implicit hypergradient, 784-300-10, n = 5000, {PRODUCTS} CG steps", figures["hypergradient"])
    if options.only != "hypergradient":
        figures["products"] = compare_products(options.outer_steps, tuple(options.ranks))
        show(
            "Products to a relative residual of 1e-6, 64-32-10 tanh network on digits (sketch and check included)",
            figures["products"],
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
