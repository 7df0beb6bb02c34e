"""Measure the best distance of the points of a finite difference for a bfloat16 base.

    python benchmarks/llm/displacement.py       # needs HGMS_DATA and SMOLLM2 (smollm2.py)

The mixed derivative ∇²_θx g·v of `through-step` with `derivative = "difference"` is a central
difference of ∇_θ g over the length τ on each side of x. Here v = ∇_x f of the float32 model, and
the exact product of the float32 model is the reference, on a few batches of real weights at a fresh
and a trained adapter. The output contains relative errors (2-norm over sources, without the mean
over sources, which softmax ignores) and the number of correct signs, by τ; the last τ is the
default, from the base's type.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

import torch

from hgms_core import Key, Problem, Tree, cross_product, upper_gradients
from hgms_mix.lm import BaseModel, Lora, Source, SourceMixture

LENGTHS = (0.067, 0.1, 0.2, 0.4, 0.6, 1.0, 2.0)


def task(data: Path, dtype: str, length: int) -> SourceMixture:
    german = data / "alpaca_de/alpaca_de_6000.jsonl.gz"
    english = data / "alpaca_de/alpaca_en_aligned_6000.jsonl.gz"
    return SourceMixture(
        sources={
            "german": Source(path=str(german), skip=0, rows=400),
            "english": Source(path=str(english), skip=400, rows=400),
            "code": Source(
                path=str(data / "code_alpaca/code_alpaca_2000.jsonl.gz"), skip=0, rows=400
            ),
            "dots": Source(path=str(german), skip=800, rows=400, completion="."),
        },
        validation={"german": Source(path=str(german), skip=1200, rows=200)},
        model=BaseModel(path="$SMOLLM2", dtype=dtype),
        adapter=Lora(rank=8, targets=("q_proj", "v_proj")),
        max_length=length,
        too_long="truncate",
    )


def trained(problem: Problem, steps: int, batch: int) -> Tree:
    """AdamW steps on the even mixture: an adapter whose two factors are both away from zero."""
    x = {name: leaf.detach().clone().requires_grad_() for name, leaf in problem.x0.items()}
    optimiser = torch.optim.AdamW(list(x.values()), lr=2e-3)
    for step in range(steps):
        rows = problem.lower_data.batch(problem.lower_data.draw(Key(1).fold(step), batch, 1)[0])
        optimiser.zero_grad()
        problem.g(problem.theta0, x, rows).backward()
        optimiser.step()
    return {name: leaf.detach() for name, leaf in x.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12, help="of training, for the second state")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    data = Path(os.environ["HGMS_DATA"])
    fine, coarse = (
        task(data, dtype, options.length).problem(0, torch.device("cpu"), torch.float32)
        for dtype in ("float32", "bfloat16")
    )
    states = {
        "fresh adapter": fine.x0,
        f"after {options.steps} steps": trained(coarse, options.steps, options.batch),
    }
    for label, x in states.items():
        table(label, x, fine, coarse, options.batches, options.batch)


def table(label: str, x: Tree, fine: Problem, coarse: Problem, batches: int, batch: int) -> None:
    size = torch.cat([leaf.flatten() for leaf in x.values()]).norm()
    print(f"{label} (‖x‖ = {float(size):.2f}), {batches} batches of {batch} rows", flush=True)
    rows: dict[str, list[tuple[float, int]]] = {}
    for number in range(batches):
        below = fine.lower_data.batch(fine.lower_data.draw(Key(number).fold("below"), batch, 1)[0])
        above = fine.upper_data["differentiate"]
        above = above.batch(above.draw(Key(number).fold("above"), batch, 1)[0])
        _, _, v = upper_gradients(lambda t, x, above=above: fine.f(t, x, above), fine.theta0, x)

        def mixed(
            problem: Problem, strategy: Any, tau: float | None, v: Tree = v, below: Any = below
        ) -> torch.Tensor:
            g = functools.partial(_at, problem, below)
            (value,) = cross_product(
                g, problem.theta0, x, v, strategy, tau, problem.precision
            ).values()
            return value - value.mean()

        exact = mixed(fine, "jvp", None)
        tries = {f"{tau:g}": (coarse, tau) for tau in LENGTHS} | {
            "default": (coarse, None),
            "float32, default": (fine, None),
        }
        for name, (problem, tau) in tries.items():
            estimate = mixed(problem, "difference", tau)
            right = int((estimate.sign() == exact.sign()).sum())
            rows.setdefault(name, []).append(
                (float((estimate - exact).norm() / exact.norm()), right)
            )
    for name, pairs in rows.items():
        errors = " ".join(f"{error:6.2f}" for error, _ in pairs)
        signs = " ".join(str(right) for _, right in pairs)
        print(
            (
                f"  {name:<18}{errors}   mean {sum(error for error, _ in pairs) / batches:5.2f}   "
                f"signs {signs} of 4"
            ),
            flush=True,
        )


def _at(problem: Problem, below: Tree, theta: Tree, x: Tree) -> torch.Tensor:
    return problem.g(theta, x, below)


if __name__ == "__main__":
    main()
