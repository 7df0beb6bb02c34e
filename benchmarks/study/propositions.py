"""Measure the predictions of the paper's bounds without runs: P1, P2, P3 and S.

    python benchmarks/study/propositions.py FILE.json       about one minute of processor time
    python benchmarks/tables.py figures study/propositions FILE.json

docs/reference/study-plan.md defines them. In float64 on the CPU, with fixed seeds; spheres
of dimension 1 … 5 in R¹⁰, and many-minima.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, vmap

from hgms.generators.ula import Ula
from hgms.tasks.minima import ManyMinima
from hgms.tasks.sphere import Sphere, SphereClosedForm
from hgms_core import Key, Problem, Tree

CPU = torch.device("cpu")
DOUBLE = torch.float64
TEMPERATURES = (1e-4, 4e-4, 1.6e-3, 6.4e-3)
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
COUNTS = (32, 64, 128, 256, 512, 1024)


def slope(x: list[float], y: list[float]) -> float:
    """Return the least-squares exponent p of y ∝ x^p."""
    a = torch.tensor(x, dtype=DOUBLE).log()
    b = torch.tensor(y, dtype=DOUBLE).log()
    return float(((a - a.mean()) * (b - b.mean())).sum() / (a - a.mean()).square().sum())


def root(errors: Tensor) -> float:
    """Return the root mean square of vectors ``[n, d]`` or numbers ``[n]``."""
    return float((errors.square().sum(-1) if errors.dim() > 1 else errors.square()).mean().sqrt())


def uniform(exact: SphereClosedForm, theta: Tree, count: int, key: Key) -> Tensor:
    """Return points spread evenly over S(θ), ``[count, d]``."""
    direction = torch.randn(count, exact.inside.shape[1], generator=key.generator(), dtype=DOUBLE)
    direction = direction / direction.norm(dim=1, keepdim=True)
    return vmap(lambda u: exact.point(theta, u)["x"])(direction)


def tube(problem: Problem, exact: SphereClosedForm) -> dict[str, float]:
    """Measure P1: the distance of Langevin chains from S(θ0), by temperature, and of the
    selected of 16.
    """
    theta = problem.theta0
    found = {}
    distances = []
    for i, temperature in enumerate(TEMPERATURES):
        ula = Ula(
            count=2000,
            steps=400,
            lr=0.05,
            temperature=temperature,
            spread=0.0,
            carry_rule="per-branch",
            mode="stacked",
        )
        start = uniform(exact, theta, 2000, Key(i).fold("start"))
        x = ula.propose(problem, theta, {"x": {"x": start}}, Key(i).fold("chains")).x["x"]
        distance = vmap(lambda point: exact.off_manifold(theta, {"x": point}))(x)
        distances.append(root(distance))
        found[f"distance at {temperature:g}"] = distances[-1]
        if temperature == 1.6e-3:
            chosen = (
                vmap(lambda point: problem.f(theta, {"x": point}, {}))(x).reshape(-1, 16).argmin(1)
            )
            found["selected of 16 / one"] = (
                root(distance.reshape(-1, 16).gather(1, chosen[:, None])[:, 0]) / distances[-1]
            )
    return {**found, "slope": slope(list(TEMPERATURES), distances)}


def estimate(problem: Problem, x: Tensor, ridge: float) -> Tensor:
    """Return ∇_θ f − ∂²_θx g (H + γI)⁻¹ ∇_x f at one point."""
    t = problem.theta0["theta"]

    def g(t: Tensor, x: Tensor) -> Tensor:
        return problem.g({"theta": t}, {"x": x}, {})

    def f(t: Tensor, x: Tensor) -> Tensor:
        return problem.f({"theta": t}, {"x": x}, {})

    curvature = hessian(g, argnums=1)(t, x) + ridge * torch.eye(len(x), dtype=DOUBLE)
    cross = jacfwd(grad(g, argnums=1), argnums=0)(t, x)
    return grad(f)(t, x) - cross.T @ torch.linalg.solve(curvature, grad(f, argnums=1)(t, x))


def selection(
    problem: Problem, exact: SphereClosedForm
) -> tuple[dict[str, float], dict[str, float]]:
    """Measure P2, the squared error of the best of N uniform points, and for P3 the
    hypergradient's error there.
    """
    theta = problem.theta0
    best = exact.solution(problem.theta0)["x"]
    truth = exact.hypergradient(theta)["theta"]
    errors: dict[int, list[Tensor]] = {count: [] for count in COUNTS}
    wrong: dict[int, list[Tensor]] = {count: [] for count in COUNTS}
    for piece in range(40):
        x = uniform(exact, theta, 100 * COUNTS[-1], Key(piece).fold("points"))
        scores = vmap(lambda point: problem.f(theta, {"x": point}, {}))(x).reshape(100, -1)
        x = x.reshape(100, COUNTS[-1], -1)
        for count in COUNTS:
            chosen = x[torch.arange(100), scores[:, :count].argmin(1)]
            errors[count].append(chosen - best)
            if piece < 5:
                wrong[count].append(
                    vmap(lambda point: estimate(problem, point, 1e-4))(chosen) - truth
                )
    squared = {count: root(torch.cat(errors[count])) ** 2 for count in COUNTS}
    gradient = {count: root(torch.cat(wrong[count])) for count in COUNTS}
    by_count = {f"squared error at {count}": value for count, value in squared.items()}
    fitted = {"slope": slope(list(map(float, COUNTS)), list(squared.values()))}
    return {**by_count, **fitted}, {
        "slope by N": slope(list(map(float, COUNTS)), list(gradient.values()))
    }


def ridges(problem: Problem, exact: SphereClosedForm) -> dict[str, float]:
    """Measure P3: the hypergradient's error by ridge, at x* and at points of the tube of λ =
    1e-3.
    """
    best = exact.solution(problem.theta0)["x"]
    truth = exact.hypergradient(problem.theta0)["theta"]
    curvature = hessian(lambda x: problem.g(problem.theta0, {"x": x}, {}))(best)
    values, vectors = torch.linalg.eigh(curvature)
    normal = values > 1e-8  # the others are tangents of S(θ0)
    draws = torch.randn(
        2000, int(normal.sum()), generator=Key(0).fold("tube").generator(), dtype=DOUBLE
    )
    points = best + draws @ (vectors[:, normal] * (1e-3 / values[normal]).sqrt()).T
    at_best = [float((estimate(problem, best, ridge) - truth).norm()) for ridge in RIDGES]
    beside = [
        root(vmap(lambda x, ridge=ridge: estimate(problem, x, ridge))(points) - truth)
        for ridge in RIDGES
    ]
    by_ridge = {
        f"error at x*, {ridge:g}": error for ridge, error in zip(RIDGES, at_best, strict=True)
    }
    by_ridge |= {
        f"error in the tube, {ridge:g}": error for ridge, error in zip(RIDGES, beside, strict=True)
    }
    return {
        **by_ridge,
        "slope at x*": slope(list(RIDGES[:3]), at_best[:3]),
        "best ridge": RIDGES[beside.index(min(beside))],
    }


def trained(problem: Problem, key: Key, starts: int, steps: int = 600) -> Tree:
    """Return minima of g(θ0, ·) by full-batch Adam from fresh starts, stacked."""
    assert problem.fresh is not None
    draws = [problem.fresh(key.fold(i)) for i in range(starts)]
    x = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    optimizer = torch.optim.Adam(list(x.values()), lr=0.02)
    slopes = vmap(grad(lambda y: problem.g(problem.theta0, y, problem.lower_data.whole)))
    for _ in range(steps):
        for name, value in slopes(x).items():
            x[name].grad = value
        optimizer.step()
    return x


def values_on(problem: Problem, x: Tree, rows: Tree) -> Tensor:
    """Return f at θ0 of every minimum on these rows."""
    return vmap(lambda y: problem.f(problem.theta0, y, rows))(x).double()


def minima(ambiguous: float, seeds: int = 10, starts: int = 64) -> dict[str, float]:
    """Measure S: the spread of f over minima of θ0, the gain from selection on few rows, and its
    optimism.
    """
    fresh = ManyMinima(train_size=1, test_size=1, validation_size=20000, validation_split=(1, 1, 1))
    rows = []
    for seed in range(seeds):
        problem = ManyMinima(ambiguous=ambiguous).problem(seed, CPU, torch.float32)
        large = fresh.problem(1000 + seed, CPU, torch.float32).upper_data["select"].whole
        rows.append(
            spread(
                problem,
                trained(problem, Key(seed).fold("starts"), starts),
                large,
                Key(seed).fold("subsets"),
            )
        )
    return {name: sum(own[name] for own in rows) / len(rows) for name in rows[0]}


def spread(problem: Problem, x: Tree, large: Tree, key: Key) -> dict[str, float]:
    """Return the figures of one seed: ``x`` contains its minima, ``large`` rows without
    selection.
    """
    few = problem.upper_data["select"].whole
    starts = len(x["output.bias"])
    true = values_on(problem, x, large)
    seen = values_on(problem, x, few)
    level = vmap(lambda y: problem.g(problem.theta0, y, problem.lower_data.whole))(x).double()
    each_row = [
        {name: leaf[i : i + 1] for name, leaf in few.items()} for i in range(len(few["label"]))
    ]
    single = torch.stack([values_on(problem, x, row) for row in each_row])
    figures = {
        "deviation of f over minima": float(true.std()),
        "standard error of f on the rows of selection": float(single.std(0).mean())
        / math.sqrt(len(each_row)),
        "deviation of g over minima": float(level.std()),
        "sigma": float((true - seen).std()),
    }
    generator = key.generator()
    for count in (2, 4, 8, 16):
        subsets = torch.stack(
            [torch.randperm(starts, generator=generator)[:count] for _ in range(2000)]
        )
        chosen = subsets.gather(1, seen[subsets].argmin(1, keepdim=True))[:, 0]
        gain = true.mean() - true[chosen].mean()
        possible = true.mean() - true[subsets].min(1).values.mean()
        figures[f"gain of {count}"] = float(gain)
        figures[f"gain of {count}, of the best possible"] = float(gain) / float(possible)
        figures[f"optimism of {count}"] = float((true - seen)[chosen].mean() - (true - seen).mean())
        figures[f"bound of {count}"] = figures["sigma"] * math.sqrt(2 * math.log(count))
    return figures


def main() -> int:
    torch.set_num_threads(1)
    found: dict[str, object] = {"torch": torch.__version__, "threads": 1}
    for k in range(1, 6):
        task = Sphere(k=k, d=10)
        problem = task.problem(0, CPU, DOUBLE)
        exact = task.closed_form(0, CPU, DOUBLE)
        best_of_n, by_count = selection(problem, exact)
        hypergradient = {**ridges(problem, exact), **by_count}
        found[f"sphere-{k}"] = {"P1": tube(problem, exact), "P2": best_of_n, "P3": hypergradient}
        print(f"sphere-{k}", json.dumps(found[f"sphere-{k}"]), file=sys.stderr)
    for label, ambiguous in (("minima-tied", 1.0), ("minima-control", 0.0)):
        found[label] = minima(ambiguous)
        print(label, json.dumps(found[label]), file=sys.stderr)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
