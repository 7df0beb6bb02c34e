"""How certain a mix is: the stage `uncertainty`, on models of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_mixes import report_of, write_rows

from hgms_core import Key
from hgms_mix.stages import uncertainty as certain

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")

MIX = """
seed = 0
budget = "BUDGET"
METHOD
[task]
name = "source-mixture"
template = "plain"
max_length = 24
validation_split = [0.8, 0.1, 0.1]
[task.model]
config = { model_type = "gpt2", n_layer = 1, n_embd = 16, n_head = 2, n_positions = 24 }
tokenizer = "bytes"
[task.sources]
first = { path = "like.jsonl" }
second = { path = "SECOND.jsonl" }
[task.validation.sums]
path = "validation.jsonl"
[sample]
size = 20
"""
SMALL_STEPS = """
[method]
name = "hg-baseline"
generator = { optimizer = { lr = 0.1 }, batch_size = 8, mode = "loop" }
hypergradient = { upper_batch_size = 16 }
outer = { lr = 0.1 }
"""


def write(name: str, numbers: Sequence[int], answer: str | None = None) -> None:
    texts = [{"prompt": f"{n} + 1", "completion": answer or f"is {n + 1}"} for n in numbers]
    write_rows(name, texts)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    halves = torch.randperm(100, generator=Key(5).generator()).add(100).split(50)
    for name, half in zip(("like", "alike"), halves, strict=True):
        write(name, half.tolist())
    write("noise", range(300, 350), "zzzzzzz")
    write("validation", range(200, 260))
    mix_of()
    return tmp_path


def mix_of(second: str = "noise", method: str = SMALL_STEPS, budget: str = "20 steps") -> None:
    """mix.toml: the source `first` is like the validation rows."""
    text = MIX.replace("SECOND", second).replace("METHOD", method).replace("BUDGET", budget)
    Path("mix.toml").write_text(text)


def uncertainty(*arguments: object) -> Any:
    return report_of("mix", "uncertainty", "mix.toml", *arguments)["uncertainty"]


@pytest.mark.extended
def test_two_halves_of_one_source_are_no_evidence(here: Path) -> None:
    """A/A: `first` and `second` are random halves of one list."""
    mix_of("alike")
    report = uncertainty()
    assert not report["rows"]["evidence"]
    assert "no evidence against the prior (uniform)" in report["sentences"][0]


@pytest.mark.extended
def test_a_source_like_the_validation_rows_beside_noise_is_evidence(here: Path) -> None:
    mix_of(budget="5 steps")
    for seed in range(3):
        report = uncertainty("--seed", seed)
    assert report["seeds"]["over"] == "3 seeds"
    assert [row["evidence"] for row in report["rows"]["sources"]] == [1, -1]
    effect = report["seeds"]["sources"][0]
    assert 0 < effect["low"] < effect["value"] < effect["high"] < 1


def test_a_method_that_learns_nothing_has_no_uncertainty(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certain, "alignments", None)  # no gradient is taken
    mix_of(method='method = { name = "fixed", mixture = { first = 1 } }', budget="1 step")
    report = uncertainty()
    assert report["skipped"] == "the method 'fixed' learns no weights"
    assert not report["warnings"] + report["sentences"]


def table(first: int) -> dict[str, Any]:
    return {"sources": [{"source": "a", "evidence": first}, {"source": "b", "evidence": -first}]}


EVEN, TURNED = {"a": 0.6, "b": 0.4}, {"a": 0.4, "b": 0.6}
FELL = {"start": 2.0, "end": 1.5, "change": -0.5, "low": -0.6, "high": -0.4}
GOOD = {"rows": table(1), "rows_by_angle": table(1), "moved": 0.1, "upper_loss": FELL}
ROSE = {**GOOD, "upper_loss": {"start": 2.0, "end": 2.5, "change": 0.5, "low": 0.4, "high": 0.6}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((EVEN, GOOD, {0: EVEN}), ""),
        ((EVEN, ROSE, {0: EVEN}), "rose by more than its noise (+0.5 [0.4, 0.6]; x moved"),
        ((EVEN, GOOD, {0: EVEN, 1: TURNED}), "2 seeds disagree on the largest source: a, b"),
        ((EVEN, {**GOOD, "rows_by_angle": table(-1)}, {0: EVEN}), "a gains by the size"),
    ],
)
def test_what_is_to_be_warned_of(arguments: Any, said: str) -> None:
    assert [said in line for line in certain.warnings(*arguments)] == [True] * bool(said)
