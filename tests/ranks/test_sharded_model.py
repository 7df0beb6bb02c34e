"""A base in parts: the numbers of a whole one, half of it on each of two ranks, and runs that
resume on another number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.helpers import rejects

pytest.importorskip("transformers")
pytest.importorskip("peft")

from launches import on_ranks
from support.language_models import text_files
from test_ranks import assert_same

from hgms.distributed.mesh import shape_of
from hgms.runs import RunConfig, RunResult, run_config
from hgms_core import ConfigError

pytestmark = pytest.mark.extended

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VJP = {"name": "implicit", "solver": {"name": "cg", "ridge": 1.0, "max_steps": 3}}


def task(folder: Path, shard: bool) -> dict[str, Any]:
    sums, words = (
        {"path": source.path}
        for name, source in text_files(folder).items()
        if name in ("sums", "words")
    )
    return {
        "name": "source-mixture",
        "sources": {"sums": {**sums, "rows": 15}, "words": words},
        "validation": {"sums": {**sums, "skip": 15}},
        "test": {"words": words},
        "model": {"config": LLAMA, "tokenizer": "bytes", "shard": shard},
        "adapter": {"rank": 2, "alpha": 4.0},
        "template": "plain",
        "max_length": 48,
        "validation_split": [1, 1, 1],
    }


def method(count: int = 4, **hypergradient: Any) -> dict[str, Any]:
    return {
        "name": "hg-ms",
        "generator": {"count": count, "steps": 2, "batch_size": 4, "optimizer": {"lr": 0.3}},
        "hypergradient": {"name": "through-step", **hypergradient},
        "outer": {"name": "adam", "lr": 0.1},
    }


def config(
    out: Path, ranks: int, method: Any, *, shard: bool, steps: int = 3, **run: Any
) -> RunConfig:
    out.mkdir(exist_ok=True)
    settings = {
        "out": str(out),
        "dtype": "float64",
        "threads": 1,
        "evaluate_every": 2,
        "ranks": ranks,
        **run,
    }
    table = {
        "budget": f"{steps} steps",
        "seed": 3,
        "task": task(out, shard),
        "method": method,
        "run": settings,
    }
    return RunConfig.from_dict(table)


def assert_alike(ours: RunResult, alone: RunResult) -> None:
    for record in (*ours.records, *alone.records):  # what is counted of tokens is a rank's own
        record.pop("step_forward_tokens", None)
        record.pop("step_backward_tokens", None)
    assert_same(ours, alone)
    losses = [result.summary["validation_loss"] for result in (ours, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert any("metric.test_loss" in record for record in ours.records)


def test_losses_and_derivatives_on_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """Of a loss by parts: gradients, Hessian products by both modes, mixed products and stacked
    gradients, to rounding. Of a small Llama and of a model whose head is its embedding, half of the
    parameters on each of two ranks: each rank on rows of its own; in micro-batches, and with layers
    computed again; as stacked candidates. Loaded by one.
    """
    on_ranks("sharded_model.py", 2, tmp_path, seconds=600)


@pytest.mark.nightly
def test_derivatives_of_a_loss_by_three_parts_are_those_of_the_whole() -> None:
    on_ranks("derivatives.py", 3, seconds=120)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("count", "hypergradient"),
    [
        pytest.param(4, {"derivative": "difference"}, id="difference"),
        pytest.param(2, {"derivative": "per-source"}, id="per-source"),
        pytest.param(1, {"derivative": "difference", "batch": "own"}, id="own"),
        pytest.param(3, {**VJP, "strategy": "difference"}, id="implicit"),
        pytest.param(
            2,
            {**VJP, "strategy": "difference", "operator": "ggn", "batch_size": 6},
            id="gauss-newton",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_on_a_base_in_parts_is_that_on_a_whole_one(
    tmp_path: Path, count: int, hypergradient: dict[str, Any]
) -> None:
    """θ, x, choices, costs and evaluations of all steps."""
    how = method(count, **hypergradient)
    alone = run_config(config(tmp_path / "alone", 1, how, shard=False))
    assert_alike(run_config(config(tmp_path / "parts", 2, how, shard=True)), alone)


def test_parts_of_what_cannot_be_parted_are_refused(tmp_path: Path) -> None:
    with rejects("not-supported", "task", "model", "shard", of=ConfigError):
        run_config(config(tmp_path / "parts", 1, method(2), shard=True))
    quantised = {"path": "x", "quantize": "4bit", "shard": True}
    own = {**task(tmp_path, shard=True), "model": quantised}
    with rejects("conflicting-options", "task", "model", "shard", of=ConfigError):
        RunConfig.from_dict({"budget": "1 steps", "task": own, "method": method(2)})


def test_ranks_propose_equally_many_candidates_where_they_compute_together() -> None:
    shapes = [shape_of(4, 6), shape_of(4, 6, even=True), shape_of(2, 3, even=True)]
    assert shapes == [(4, 1), (2, 2), (1, 2)]
