"""The grids under benchmarks/ describe what exists: every one builds, at every scale, with every
method fitting its task.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hgms.comparison.grid import Grid
from hgms.comparison.grid_file import load

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2] / "benchmarks"
GRIDS = sorted(
    path for path in ROOT.rglob("*.toml") if "[[method]]" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_builds_at_every_scale(path: Path) -> None:
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for scale in (None, *table.get("scale", {})):
        grid = load(table, source=path.name, scale=scale, sets=['run.device="cpu"'])
        assert len(grid.cells()) == len(grid.tasks) * len(grid.methods) * len(grid.seeds)
        assert {pair.task.name for pair in grid.pairs.values()} == {one.name for one in grid.tasks}


def test_the_paper_s_experiments_are_there_with_its_five_methods() -> None:
    five = {"hg-ms", "hg-baseline", "v-pbgd", "g-pbgd", "iaptt-gm"}
    for name in ("cleaning", "imbalanced"):
        table = tomllib.loads((ROOT / "paper" / f"{name}.toml").read_text(encoding="utf-8"))
        assert five <= {one["name"] for one in table["method"]}
        assert "cpu" in table["scale"]
    sweeps = {"cleaning-sweep", "imbalanced-sweep", "softmax-cleaning"}
    assert sweeps <= {path.stem for path in GRIDS}


LLM = ROOT / "paper" / "llm"


def llm(name: str, *, scale: str | None = None, methods: Sequence[str] = ()) -> Grid:
    table = tomllib.loads((LLM / f"{name}.toml").read_text(encoding="utf-8"))
    return load(table, source=name, scale=scale, methods=methods, sets=['run.device="cpu"'])


def methods(grid: Grid) -> dict[str, Any]:
    return {label: config.method for (_, label), config in grid.pairs.items()}


# The paper's tables of hyper-parameters: lower rate, noise and outer rate of hg-ms; lower and outer
# rate of hg-baseline; lower rate, α and outer rate of scalebio; branches; budget in hours.
@pytest.mark.parametrize(
    ("name", "branched", "baseline", "scalebio", "count", "hours"),
    [
        ("math-qwen-2-7b", (1e-5, 1e-3, 0.05), (1e-5, 0.05), (1e-4, 10, 1.0), 4, 9),
        ("math-llama-3-8b", (1e-4, 1e-5, 0.05), (1e-4, 0.05), (1e-4, 10, 0.1), 4, 12),
        ("math-gemma-2-9b", (1e-4, 1e-5, 0.05), (1e-4, 0.05), (1e-4, 10, 0.1), 4, 15),
        ("math-qwen-2.5-32b", (8e-6, 5e-4, 0.03), (8e-6, 0.03), (5e-5, 100, 0.05), 4, 15),
        ("instructions-qwen", (2e-4, 5e-4, 0.05), (2e-4, 10.0), (1e-5, 100, 0.01), 8, 9),
        ("instructions-llama", (2e-4, 5e-4, 0.05), (2e-4, 10.0), (1e-5, 100, 0.01), 8, 12),
        ("instructions-gemma", (2e-4, 5e-4, 0.05), (2e-4, 10.0), (1e-5, 100, 0.01), 8, 15),
    ],
)
def test_language_models_have_the_paper_s_settings(
    name: str,
    branched: tuple[float, ...],
    baseline: tuple[float, ...],
    scalebio: tuple[float, ...],
    count: int,
    hours: float,
) -> None:
    grid = llm(name)
    found = methods(grid)
    assert set(found) == {"hg-ms", "hg-baseline", "scalebio", "uniform", "less", "rho-loss"}
    assert (grid.seeds, grid.budget.seconds) == ((2424,), 3600 * hours)
    one, other, third = (found[label] for label in ("hg-ms", "hg-baseline", "scalebio"))
    assert (one.generator.lr, one.generator.noise, one.outer.lr) == branched
    assert (other.generator.lr, other.outer.lr, other.generator.noise) == (*baseline, 0)
    assert (third.generator.lr, third.generator.alpha, third.outer.lr) == scalebio
    assert [
        (each.generator.count, each.generator.steps, each.generator.name, each.hypergradient.name)
        for each in (one, other)
    ] == [(number, 1, "branches", "through-step") for number in (count, 1)]
    optimizers = [(each.generator.optimizer, each.outer.name) for each in (one, other, third)]
    assert optimizers == [("sgd", "adam"), ("sgd", "adam"), ("sgd", "sgd")]
    task: Any = next(iter(grid.pairs.values())).task
    sizes = (len(task.sources), task.adapter.rank, task.adapter.alpha, task.max_length, task.cache)
    math = name.startswith("math")
    assert sizes == ((10, 16, 32, 512, 500) if math else (18, 4, 8, 256, 3000))
    assert task.adapter.targets == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_the_ledger_and_the_branch_study_are_those_of_the_main_table() -> None:
    main = llm("math-qwen-2-7b", methods=["hg-ms", "hg-baseline", "scalebio"])
    for hours, scale in ((3, None), (9, "9h"), (15, "15h"), (21, "21h")):
        ledger = llm("math-qwen-2-7b-budgets", scale=scale)
        assert ledger.budget.seconds == 3600 * hours
        assert {key: (one.task, one.method) for key, one in ledger.pairs.items()} == {
            key: (one.task, one.method) for key, one in main.pairs.items()
        }
    branches = llm("math-qwen-2-7b-branches")
    counts = {label: method.generator.count for label, method in methods(branches).items()}
    assert counts == {"hg-baseline": 1, "hg-ms-2": 2, "hg-ms": 4, "hg-ms-8": 8}
    for key in (("math-qwen-2-7b", "hg-ms"), ("math-qwen-2-7b", "hg-baseline")):
        # the same runs, so the branch study finds them done
        assert branches.pairs[key].config_hash == main.pairs[key].config_hash


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("gpt2-denoising", {"clean": 1.0, "corrupted": 0.0}),
        ("gpt2-multilingual", {"zh": 0.6, "en": 0.4}),
    ],
)
def test_gpt2_studies_know_their_best_mixture(name: str, best: dict[str, float]) -> None:
    task: Any = next(iter(llm(name).pairs.values())).task
    assert (task.reference, task.adapter, task.max_length) == (best, None, 128)
