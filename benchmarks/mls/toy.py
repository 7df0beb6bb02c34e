"""Count the steps of V-PBGD and G-PBGD on the toy problem of Shen and Chen (2023), section 5.1.

    python benchmarks/mls/toy.py [--seed 0] [--json FILE]

There are 1,000 starts, with the published settings: γ = 10 from the first step, α = 0.1/γ for both
variables, θ projected onto [0, 3]. A start has converged when its projected gradient, (old − new)/α
of both variables, is at most 1e-5 long. The code of the authors and of MLS-Bench contains
1 + (e^{2−4θ})² instead of (1 + e^{2−4θ})² in ∂f/∂θ; ``published`` follows that code, ``exact`` the
function f.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from attrs import evolve
from torch import Tensor

from hgms.generators.penalty import GradientNorm, Ramp, ValueGap
from hgms.hypergradients import Carried
from hgms.outer import Sgd
from hgms.selectors import First
from hgms.tasks.toy import ToyPenalty
from hgms_core import Pipeline, Problem, Tree

PUBLISHED = {"v-pbgd": 260.7, "g-pbgd": 303.7}
"""Mean steps of the 1,000 starts in MLS-Bench (arXiv 2605.08678), task optimization-bilevel."""
GAMMA = 10.0
RATE = 0.1
TOLERANCE = 1e-5
# The published V-PBGD knows that min g = 0 and needs no ω; here ω finds it, in 20 steps of rate 0.1
# each time.
GENERATORS: dict[str, ValueGap | GradientNorm] = {
    "v-pbgd": ValueGap(steps=20, inner_lr=0.1, lr=RATE, gamma=GAMMA, ramp=Ramp(steps=0)),
    "v-pbgd, one step on ω": ValueGap(
        steps=1, inner_lr=0.1, lr=RATE, gamma=GAMMA, ramp=Ramp(steps=0)
    ),
    "g-pbgd": GradientNorm(lr=RATE, gamma=GAMMA, ramp=Ramp(steps=0)),
}


def published_upper(theta: Tree, x: Tree, batch: Tree) -> Tensor:
    """Return a function with the gradient of the published code; its value has no meaning.

    −arctan(e^{2−4θ}) has the derivative 4e^{2−4θ}/(1 + e^{2(2−4θ)})."""
    t = theta["theta"]
    y = x["x"]
    slow = 4 * t - 2
    in_theta = -(-slow).exp().atan() * (4 * y.detach() + 2).cos() + 0.5 * (slow.square() + 1).log()
    return (in_theta + (4 * y + 2).cos() * slow.detach().sigmoid()).sum()


def steps_to_convergence(
    generator: ValueGap | GradientNorm, problem: Problem, most: int = 20_000
) -> Tensor:
    """Return the steps of each start until its projected gradient is short enough, ``[starts]``;
    ``most`` without convergence.
    """
    method = Pipeline(
        generator=generator, selector=First(), hypergradient=Carried(), outer=Sgd(lr=RATE)
    )
    state = method.init(problem, 0)
    alpha = RATE / GAMMA
    steps = torch.full_like(problem.theta0["theta"], float(most))
    for step in range(1, most + 1):
        before = torch.stack([state["theta"]["theta"], state["x"]["x"]])
        state, _ = method.step(problem, state)
        length = (before - torch.stack([state["theta"]["theta"], state["x"]["x"]])).norm(
            dim=0
        ) / alpha
        steps = torch.where((length <= TOLERANCE) & (steps == most), float(step), steps)
        if bool((steps < most).all()):
            break
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    exact = ToyPenalty(starts=options.starts).problem(
        options.seed, torch.device("cpu"), torch.float64
    )
    rows = []
    for gradient, problem in (("published", evolve(exact, f=published_upper)), ("exact", exact)):
        for name, generator in GENERATORS.items():
            steps = steps_to_convergence(generator, problem)
            half = 1.96 * float(steps.std()) / len(steps) ** 0.5
            row = {"gradient": gradient, "method": name, "mean": float(steps.mean()), "half": half}
            rows.append({**row, "median": float(steps.median()), "most": float(steps.max())})
            figure = PUBLISHED.get(name)
            known = f"   published {figure}" if figure and gradient == "published" else ""
            print(f"{gradient:10}{name:24}{row['mean']:8.1f} ± {half:4.1f} steps{known}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
