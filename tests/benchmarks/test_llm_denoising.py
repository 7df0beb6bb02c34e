"""The controlled denoising study at CPU size: a small GPT from scratch, 1,000 clean Alpaca rows,
9,000 answers of ".".
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hgms.config import Budget
from hgms.runs import RunConfig, RunSettings, run

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif("HGMS_DATA" not in os.environ, reason="needs the Alpaca rows in HGMS_DATA"),
]
GRID = Path(__file__).parents[2] / "benchmarks" / "llm" / "denoising-cpu.toml"
TABLE = tomllib.loads(GRID.read_text(encoding="utf-8"))


def trained(method: dict[str, Any], steps: int = 30) -> tuple[dict[str, float], float]:
    """(the last weights by name, the test loss)."""
    import torch

    task = {key: value for key, value in TABLE["task"].items() if key != "label"}
    config = RunConfig.from_dict({"task": task, "method": method, "budget": f"{steps} steps"})
    problem = config.task.problem(0, torch.device("cpu"), torch.float32)
    settings = RunSettings(evaluate_every=steps)
    result = run(config.method, problem, Budget(outer_steps=steps), settings=settings)
    weights = {name: result.records[-1][f"weight.{name}"] for name in task["sources"]}
    return weights, result.summary["metrics"]["test_loss"]


def test_hg_ms_finds_the_clean_source_and_its_mixture_beats_uniform_weights() -> None:
    methods = {method["name"]: method for method in TABLE["method"]}
    fixed = {"name": "fixed", "generator": methods["uniform"]["generator"]}
    weights, _ = trained(methods["hg-ms"])
    assert weights["clean"] >= 0.95
    # The same training for both mixtures, from the same start, on the same rows.
    _, learned = trained({**fixed, "mixture": weights})
    _, plain = trained(methods["uniform"])
    assert learned < plain
