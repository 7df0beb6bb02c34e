"""Measure MNIST hyper-cleaning by the paper's protocol: accuracy after a budget of seconds.

    python benchmarks/bench_cleaning.py --out runs/cleaning [--seconds 120] [--seeds 5]
        [--first-seed 0] [--threads 1] [--corruption 0.4 0.6 0.8] [--variants hg-ms "N = 1" ...]

Needs MNIST's IDX files under HGMS_DATA/mnist. The same command resumes interrupted runs. The
settings are in ``benchmarks/cleaning.toml``; a variant changes some of them. No decision of a run
depends on test images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hgms.results.tables import table
from hgms.runs import Progress, RunResult, load, run_config

SETTINGS = Path(__file__).with_name("cleaning.toml")
BRANCHES = "method.generator"
CG = "method.hypergradient.solver"

VARIANTS: dict[str, list[str]] = {
    "hg-ms": [],
    "N = 1": [f"{BRANCHES}.count=1", "method.selector.name=first"],
    "N = 4": [f"{BRANCHES}.count=4"],
    "N = 8": [f"{BRANCHES}.count=8"],
    "carry base": [f"{BRANCHES}.carry_rule=base"],
    "carry per-branch": [f"{BRANCHES}.carry_rule=per-branch"],
    "carry restart": [f"{BRANCHES}.carry_rule=restart"],
    "never restarted": [f"{BRANCHES}.restart_every=none"],
    "one-step": [
        "method.hypergradient={name='one-step', lr=0.1, upper_batch_size=50, batch_size=2500}"
    ],
    "all validation rows at once": ["method.hypergradient.upper_batch_size=none"],
    "shared validation": ["task.validation_split=[1.0, 1.0, 1.0]"],
    "uniform": ["method={name='uniform'}"],
    "oracle-clean": ["method={name='oracle-clean'}"],
    "hg-baseline": ["method={name='hg-baseline'}"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--outer-steps", type=int, help="instead of --seconds: the same number of updates for all"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--corruption", type=float, nargs="+", default=[0.4, 0.6, 0.8])
    parser.add_argument("--variants", nargs="+", default=["hg-ms"], choices=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[], dest="sets")
    options = parser.parse_args()
    budget = f"budget={{seconds={options.seconds}}}"
    if options.outer_steps:
        budget = f"budget={{outer_steps={options.outer_steps}}}"
    for corruption in options.corruption:
        results: dict[str, list[RunResult]] = {}
        with Progress() as view:
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                for variant in options.variants:
                    sets = [
                        f"task.corruption={corruption}",
                        budget,
                        f"run.threads={options.threads}",
                        *VARIANTS[variant],
                        *options.sets,
                    ]
                    config = load(SETTINGS, sets, seed=seed, out=options.out)
                    # all are executed alike
                    first = next((runs[0].execution for runs in results.values()), None)
                    results.setdefault(variant, []).append(
                        run_config(config, resume=True, watch=view.watch, execution=first)
                    )
        for row in table(results, "test_accuracy").rows:
            kept = [
                [seconds["stop_loss"] for seconds in run.records if seconds.get("stop_loss")]
                for run in results[row.method]
            ]
            stop = [min(seconds) for seconds in kept if seconds]
            line = {
                "corruption": corruption,
                "variant": row.method,
                "test_accuracy": str(row.metrics["test_accuracy"].scale(100)),
                "each": [
                    round(100 * run.summary["metrics"]["test_accuracy"], 2)
                    for run in results[row.method]
                ],
                "stop_loss": round(sum(stop) / len(stop), 4) if stop else None,
                "cleaning_f1": str(row.metrics["cleaning_f1"]),
                "outer_steps": round(row.cost.outer_steps.mean, 1),
                "seconds": round(row.seconds.mean, 1),
            }
            print(json.dumps(line, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
