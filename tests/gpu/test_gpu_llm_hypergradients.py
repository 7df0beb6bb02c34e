"""Which hypergradient works with which base model: every cell of the table in
docs/reference/gpu.md is a run here.

A cell that is to work runs two outer steps with finite results; one that is not stops at its first
step with a message that says what to take instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from support.helpers import rejects

from hgms.config import Budget
from hgms.runs import run
from hgms_core import Pipeline, Problem

pytest.importorskip("transformers", reason="the extra llm is not installed")
pytest.importorskip("peft", reason="the extra llm is not installed")

from hgms.generators.branches import Branches, Diversity
from hgms.generators.penalty import DynamicBarrier, GradientNorm, Minimax, PairOptimizer, ValueGap
from hgms.generators.single_loop import Soba
from hgms.hypergradients import Carried, Implicit, OneStep, ThroughStep, Unrolled
from hgms.optim import SGD
from hgms.outer import Adam, Sgd
from hgms.selectors import BestOfN, First
from hgms.solvers import CG
from hgms_mix.lm import BaseModel, Lora, Source, SourceMixture

pytestmark = pytest.mark.nightly

# Two layers whose heads the flash kernels take (64 wide), two query heads to a key head.
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 128, "n_positions": 64}
TEXTS = {
    "sums": [
        (f"{a} plus {b}", f"{a + b} it is, says the one who adds")
        for a in range(1, 7)
        for b in range(2, 6)
    ],
    "dots": [
        (f"{a} plus {b}", ". . . . . . . . . . . . . . . . .")
        for a in range(3, 8)
        for b in range(7, 9)
    ],
}
ROWS = 8


def pipeline(hypergradient: Any, steps: int = 1) -> Pipeline:
    """N = 2 branches; the steps are short, so that all that a cell can break on is its own
    mathematics.
    """
    generator = Branches(
        count=2,
        steps=steps,
        optimizer=SGD(lr=1e-3),
        diversity=Diversity(noise=1e-3),
        batch_size=ROWS,
    )
    return Pipeline(
        generator=generator,
        selector=BestOfN(batch_size=ROWS),
        hypergradient=hypergradient,
        outer=Adam(lr=0.05),
    )


def carried(generator: Any) -> Pipeline:
    return Pipeline(
        generator=generator, selector=First(), hypergradient=Carried(), outer=Adam(lr=0.05)
    )


def implicit(strategy: Any) -> Pipeline:
    solver = CG(ridge=20.0, max_steps=3)
    return pipeline(
        Implicit(solver=solver, strategy=strategy, batch_size=ROWS, upper_batch_size=ROWS)
    )


METHODS: dict[str, Callable[[], Pipeline]] = {
    "through-step, difference": lambda: pipeline(ThroughStep(upper_batch_size=ROWS)),
    "through-step, per-source": lambda: pipeline(
        ThroughStep(derivative="per-source", upper_batch_size=ROWS)
    ),
    "through-step, exact": lambda: pipeline(ThroughStep(derivative="exact", upper_batch_size=ROWS)),
    "one-step, difference": lambda: pipeline(
        OneStep(lr=1e-3, derivative="difference", batch_size=ROWS)
    ),
    "one-step": lambda: pipeline(OneStep(lr=1e-3, batch_size=ROWS)),
    "unrolled, one": lambda: pipeline(Unrolled(upper_batch_size=ROWS)),
    "unrolled, two": lambda: pipeline(Unrolled(upper_batch_size=ROWS), steps=2),
    "implicit, vjp": lambda: implicit("vjp"),
    "implicit, jvp": lambda: implicit("jvp"),
    "implicit, difference": lambda: implicit("difference"),
    "scalebio": lambda: carried(
        Minimax(optimizer=PairOptimizer(lr=1e-3), batch_size=ROWS, upper_batch_size=ROWS)
    ),
    "v-pbgd": lambda: carried(
        ValueGap(lr=1e-3, inner_lr=1e-3, batch_size=ROWS, upper_batch_size=ROWS)
    ),
    "bome": lambda: carried(
        DynamicBarrier(steps=2, lr=1e-3, inner_lr=1e-3, batch_size=ROWS, upper_batch_size=ROWS)
    ),
    "soba": lambda: carried(Soba(lr=1e-3, v_lr=1e-3, batch_size=ROWS, upper_batch_size=ROWS)),
    "g-pbgd": lambda: carried(GradientNorm(lr=1e-3, batch_size=ROWS, upper_batch_size=ROWS)),
}
RECOMPUTED = ("implicit, jvp",)
FUSED = (
    "through-step, exact",
    "one-step",
    "unrolled, one",
    "unrolled, two",
    "implicit, vjp",
    "implicit, jvp",
    "soba",
    "g-pbgd",
)
FORWARD = ("through-step, exact", "one-step", "implicit, vjp", "implicit, jvp")
# Column → how the task is set up, and the rows that are to be refused.
COLUMNS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "plain": ({"dtype": "float32"}, {}, ()),
    "checkpointing": ({"dtype": "float32"}, {"checkpointing": True}, RECOMPUTED),
    "micro_batch": ({"dtype": "float32"}, {"micro_batch": 3}, RECOMPUTED),
    "bfloat16": ({"dtype": "bfloat16"}, {}, ()),
    "bfloat16, checkpointing": ({"dtype": "bfloat16"}, {"checkpointing": True}, RECOMPUTED),
    "flash_attention_2": ({"dtype": "bfloat16", "attention": "flash_attention_2"}, {}, FUSED),
    "4bit": ({"dtype": "bfloat16", "quantize": "4bit"}, {}, FORWARD),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    folder = tmp_path_factory.mktemp("rows")
    found = {}
    for name, rows in TEXTS.items():
        path = folder / f"{name}.jsonl"
        path.write_text(
            "".join(
                json.dumps({"prompt": prompt, "completion": answer}) + "\n"
                for prompt, answer in rows
            )
        )
        found[name] = Source(path=str(path))
    return found


def mixture(files: Mapping[str, Source], model: BaseModel, **fields: Any) -> SourceMixture:
    """Cut to 49 tokens, of which 48 go in: a multiple of 8, as fused kernels like them."""
    return SourceMixture(
        sources={**files, "sums": evolve(files["sums"], rows=16)},
        validation={"sums": evolve(files["sums"], skip=16)},
        model=model,
        adapter=Lora(
            rank=4,
            alpha=8.0,
            targets=("q_proj", "v_proj") if _kind(model) != "gpt2" else ("c_attn",),
        ),
        template="plain",
        max_length=49,
        too_long="truncate",
        validation_split=(1, 1, 1),
        **fields,
    )


def _kind(model: BaseModel) -> str:
    return "qwen2" if model.config is None else str(model.config["model_type"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in a folder: quantisation needs weights to load."""
    folder = tmp_path_factory.mktemp("model")
    built = BaseModel(config=QWEN2, tokenizer="bytes")
    model: Any = built.load(torch.device("cpu"), torch.float32, len(built.load_tokenizer()))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def problems(
    files: dict[str, Source], saved: Path
) -> Iterator[Callable[[str, torch.device], Problem]]:
    """The problem of a column, built once."""
    made: dict[str, Problem] = {}

    def of(column: str, device: torch.device) -> Problem:
        if column not in made:
            how, fields, _ = COLUMNS[column]
            place: dict[str, Any] = {"path": str(saved)} if "quantize" in how else {"config": QWEN2}
            task = mixture(files, BaseModel(**place, tokenizer="bytes", **how), **fields)
            made[column] = task.problem(0, device, torch.float32)
        return made[column]

    yield of
    made.clear()


def needed(column: str, device: torch.device) -> None:
    recomputes = "checkpointing" in column or column == "micro_batch"
    if recomputes and device.type == "simulated":
        pytest.skip("torch cannot recompute activations on a device that is written in Python")
    if column == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="attention = flash_attention_2 is that package's")
    if column == "4bit":
        pytest.importorskip("bitsandbytes", reason="quantize = 4bit is that package's")
    if column in ("flash_attention_2", "4bit") and device.type != "cuda":
        pytest.skip("runs on CUDA only, also where other tests of this folder are tried on the CPU")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", METHODS)
def test_a_cell_of_the_table(
    row: str, column: str, device: torch.device, problems: Callable[[str, torch.device], Problem]
) -> None:
    needed(column, device)
    problem = problems(column, device)
    method = METHODS[row]()
    if row in COLUMNS[column][2]:
        with rejects("no-second-derivative") as caught:
            run(method, problem, Budget(outer_steps=2))
        assert "first" in (caught.value.hint or "")
        return
    records = run(method, problem, Budget(outer_steps=2)).records[1:]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        sizes = record["hypergradient_norm"], record["upper_loss"]
        assert all(map(math.isfinite, sizes)), (
            f"{row}, {column}: the hypergradient's norm and the upper loss are {sizes}"
        )
    if row != "bome":  # its multiplier may be 0, and f does not depend on θ
        assert records[-1]["hypergradient_norm"] > 0, (
            f"{row}, {column}: no hypergradient after a step"
        )


def hypergradient(method: Pipeline, problem: Problem) -> torch.Tensor:
    """That of one step from a point where nothing vanishes (a fresh adapter has B = 0), through
    a branch without noise: what a gradient step of rate 1 subtracts.
    """
    draw = torch.Generator().manual_seed(0)
    x0 = {
        name: leaf
        + 0.05
        * torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf.device, leaf.dtype)
        for name, leaf in problem.x0.items()
    }
    problem = evolve(problem, x0=x0)
    # Noise is drawn on the device, and CPU and GPU draw differently.
    generator: Any = method.generator
    if isinstance(generator, Branches):
        generator = evolve(generator, diversity=Diversity())
    method = evolve(method, outer=Sgd(lr=1.0), generator=generator)
    state, _ = method.step(problem, method.init(problem, 0))
    return (problem.theta0["logits"] - state["theta"]["logits"]).double().cpu()


@pytest.mark.parametrize("row", METHODS)
def test_the_hypergradient_is_the_cpus(
    row: str, device: torch.device, files: dict[str, Source]
) -> None:
    """Data, adapters and weights are drawn on the CPU, so a step without noise is the same one
    there and here.
    """
    task = mixture(files, BaseModel(config=GPT2, tokenizer="bytes", dtype="float64"))
    here, there = (
        hypergradient(METHODS[row](), task.problem(0, place, torch.float64))
        for place in (device, torch.device("cpu"))
    )
    off = float((here - there).norm() / there.norm().clamp_min(1e-12))
    assert off < 1e-3, (
        f"{row}: {here.tolist()} on {device}, {there.tolist()} on the CPU, apart by {off:.1e}"
    )
