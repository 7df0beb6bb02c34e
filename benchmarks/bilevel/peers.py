"""Run solvers of a clone of benchopt's bilevel benchmark on problems exported by comparison.py.

    python benchmarks/bilevel/peers.py CLONE PROBLEM.npz OUT.npz --budget 10
    'SOBA[step_size=0.03125,outer_ratio=0.01]' 'F2SA'

Needs benchopt, jax, jaxopt and scikit-learn, and no module of this project. Losses, metrics and
solvers are the clone's; the arrays and the first point come from the file. Each solver compiles
outside the clock, as in its benchmark. The clock is the processor time of all threads (one core, if
the process is bound to one), and pauses while a point is stored.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import pickle
import platform
import re
import sys
import tempfile
import time
import types
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np


class Same:
    """Replaces a scaler, because the arrays are already scaled."""

    def fit_transform(self, rows: np.ndarray) -> np.ndarray:
        return rows

    transform = fit_transform


def module_of(clone: Path, folder: str, name: str) -> Any:
    """Load a module by its file: an installed package may have the name of a folder of the
    clone.
    """
    spec = importlib.util.spec_from_file_location(
        f"{folder}_{name}_of_the_clone", clone / folder / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def problem_of(clone: Path, kind: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the result of the clone's data set for these arrays instead of a download."""
    parts = {
        name: (arrays[f"{name}_a"], arrays[f"{name}_label"]) for name in ("train", "validation")
    }
    parts["test"] = parts["validation"]  # comparison.py has the test rows
    if kind == "ijcnn1":
        tables = {name: (a, 2.0 * label - 1) for name, (a, label) in parts.items()}
        fetched = types.SimpleNamespace(
            fetch_libsvm={
                "ijcnn1": tables["train"],
                "ijcnn1_test": tables["validation"],
            }.__getitem__
        )
        sys.modules["libsvmdata"] = fetched  # type: ignore[assignment]
        return (
            module_of(clone, "datasets", "ijcnn1")
            .Dataset.get_instance(reg_parametrization="exp")
            .get_data()
        )
    module = module_of(clone, "datasets", kind)
    module.StandardScaler = Same

    def split(first: str, second: str) -> list[np.ndarray]:
        return [parts[first][0], parts[second][0], parts[first][1], parts[second][1]]

    if kind == "covtype":
        parts = {
            name: (a, np.eye(int(label.max()) + 1)[label]) for name, (a, label) in parts.items()
        }
        calls = iter([split("train", "test"), split("train", "validation")])
        module.fetch_covtype = lambda **_: (arrays["train_a"], arrays["train_label"] + 1)
        module.train_test_split = lambda *_, **__: next(calls)
        return module.Dataset.get_instance(reg_parametrization="exp", random_state=0).get_data()
    module.train_test_split = lambda *_, **__: split("train", "validation")
    names = ("training_images", "training_labels", "test_images", "test_labels")
    stored = dict(zip(names, [*parts["train"], *parts["test"]], strict=True))
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("mnist.pkl").write_bytes(pickle.dumps(stored))
        try:
            return module.Dataset.get_instance(
                ratio=0.0, random_state=0, reg=float(arrays["reg"])
            ).get_data()
        finally:
            os.chdir(here)


def solver_of(clone: Path, text: str, seed: int, every: int) -> Any:
    """Parse ``NAME[setting=value,…]``, with the clone's defaults for the rest."""
    name, settings = re.fullmatch(r"(\w+)(?:\[(.*)\])?", text).groups()  # type: ignore[union-attr]
    cls = module_of(clone, "solvers", name.lower()).Solver
    values = {key: choices[0] for key, choices in cls.parameters.items()}
    own = dict(item.split("=") for item in settings.split(",")) if settings else {}
    own |= {"random_state": str(seed)} | (
        {"eval_freq": str(every)} if "eval_freq" not in own else {}
    )
    for key, value in own.items():
        if key in values:
            try:
                values[key] = ast.literal_eval(value)
            except ValueError:
                values[key] = value
    return cls.get_instance(**values)


class Clock:
    """The solver's callback: stores points periodically, outside the clock, until the budget is
    spent.
    """

    def __init__(self, solver: Any, budget: float) -> None:
        self.solver = solver
        self.budget = budget
        self.points: list[tuple[float, int, np.ndarray, np.ndarray]] = []
        self.spent, self.due, self.calls, self.began = 0.0, 0.0, -1, time.process_time()

    def __call__(self) -> bool:
        # waits for what is being computed
        x = np.asarray(self.solver.inner_var)
        theta = np.asarray(self.solver.outer_var)
        self.spent += time.process_time() - self.began
        self.calls += 1
        over = self.spent >= self.budget or not np.isfinite(theta).all()
        if self.spent >= self.due or over:
            self.points.append((self.spent, self.calls, theta.copy(), x.copy()))
            self.due = 1.25 * self.spent + 0.002 * self.budget
        self.began = time.process_time()
        return not over


def run(
    solver: Any, data: dict[str, Any], arrays: dict[str, np.ndarray], budget: float
) -> tuple[Clock, dict[str, float]]:
    """Run the solver from the file's point, and return the clone's metrics of its end."""
    import jax.numpy as jnp

    (inner, rows, *_), (outer, upper_rows, *_) = data["pb_inner"], data["pb_outer"]
    solver.set_objective(  # compiles: it runs two rounds
        f_inner=inner,
        f_outer=outer,
        n_inner_samples=rows,
        n_outer_samples=upper_rows,
        inner_var0=jnp.array(arrays["x0"]),
        outer_var0=jnp.array(arrays["theta0"]),
    )
    clock = Clock(solver, budget)
    solver.inner_var, solver.outer_var = jnp.array(arrays["x0"]), jnp.array(arrays["theta0"])
    solver.run(clock)
    *_, (_, _, theta, x) = clock.points
    return clock, data["metrics"](jnp.array(x), jnp.array(theta)) if np.isfinite(
        theta
    ).all() else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path)
    parser.add_argument("problem", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("solvers", nargs="+", metavar="SOLVER")
    parser.add_argument(
        "--budget", type=float, default=10.0, help="processor seconds of each solver"
    )
    parser.add_argument(
        "--every", type=int, default=512, help="steps between two looks at the clock"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(options.clone))
    arrays = dict(np.load(options.problem))
    out = {
        "versions": np.array(
            [f"{name} {metadata.version(name)}" for name in ("benchopt", "jax", "numpy")]
        )
    }
    out["python"] = np.array(platform.python_version())
    data = problem_of(options.clone, str(arrays["kind"]), arrays)
    for text in options.solvers:
        try:
            solver = solver_of(options.clone, text, int(arrays["seed"]), options.every)
            clock, metrics = run(solver, data, arrays, options.budget)
        except Exception as error:  # a failing solver must not lose the results of others
            print(f"{text}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        seconds, rounds, thetas, points = map(np.stack, zip(*clock.points, strict=True))
        kept = {"seconds": seconds, "rounds": rounds, "theta": thetas, "x": points}
        kept |= {f"own.{name}": np.array(value) for name, value in metrics.items()}
        out |= {f"{text}|{name}": value for name, value in kept.items()}
        print(f"{text}: {rounds[-1]} rounds in {seconds[-1]:.2f} s, {metrics}")
    np.savez_compressed(options.out, **out)


if __name__ == "__main__":
    main()
