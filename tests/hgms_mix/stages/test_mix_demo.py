"""`hgms mix --demo`: its texts, its file, and what it says."""

from __future__ import annotations

import json
import math
import os
import random
import re
import statistics
from pathlib import Path
from typing import Any

import attrs
import pytest
from support.small_mixes import report_of, right

from hgms_mix.lm.table import skipped_rows
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.stages import demo
from hgms_mix.stages.config import MixConfig, load
from hgms_mix.stages.demo import configs
from hgms_mix.stages.texts import word_problem, write

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")


needs_weights = pytest.mark.skipif(
    "SMOLLM2" not in os.environ, reason="no folder in SMOLLM2: benchmarks/llm/smollm2.py"
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "method", "blank"),
    [
        ((), "hg-ms", 0.05),
        pytest.param(("--model", "$SMOLLM2"), "hg-ms-mixture", 1 / 3, marks=needs_weights),
    ],
    ids=["tiny", "real-weights"],
)
def test_the_demo_finds_the_source_that_matches(
    model: tuple[str, ...], method: str, blank: float, tmp_path: Path
) -> None:
    """Three minutes on two cores, five on real weights: the mixture goes to the matching source
    and the test loss is below uniform's.
    """
    result = report_of("mix", "--demo", *model, "--out", tmp_path)
    for mix in result["mixes"]:
        if mix["method"] == method:
            report = json.loads(Path(mix["folder"], "report.json").read_bytes())
            weights = {row["source"]: row["weight"] for row in report["sources"]}
            assert max(weights, key=weights.__getitem__) == "word-problems"
            assert weights["blank-answers"] < blank
    losses = {
        label: statistics.mean(
            mix["losses"]["word-problems"] for mix in result["mixes"] if mix["method"] == label
        )
        for label in (method, "uniform")
    }
    assert losses[method] < losses["uniform"]


def test_the_demos_file_describes_its_mixes_wherever_it_is_written(tmp_path: Path) -> None:
    out = tmp_path / 'a "quoted" TEMPLATE'
    out.mkdir()
    _, learned = configs(out, 1)
    assert load(out / "demo.toml", out=str(out)).as_dict() == learned.as_dict()


@pytest.mark.extended
def test_the_demos_texts_share_no_prompt_are_right_and_none_is_cut(tmp_path: Path) -> None:
    """A cut answer loses its end, which says the result."""
    [config, _] = configs(tmp_path, 1)
    write(tmp_path / "texts")
    files = (tmp_path / "texts").iterdir()
    rows = b"".join(path.read_bytes() for path in files).splitlines()
    assert len({json.loads(line)["prompt"] for line in rows}) == len(rows) == 1520
    sets = ("sources", "validation", "test")
    tables = {which: config.task.tables(byte_tokenizer(), which) for which in sets}
    assert skipped_rows(tables) == ""
    longest = max(int(table.lengths.max()) for part in tables.values() for table in part.values())
    assert longest <= config.task.max_length

    generator = random.Random(0)
    for _ in range(300):
        _, answer = word_problem(generator)
        ((a, sign, b, result),) = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", answer)
        x, y = int(a), int(b)
        assert {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign] == int(result)


def few(sources: Any) -> Any:
    return {name: attrs.evolve(source, rows=20) for name, source in sources.items()}


def smaller(out: Path, seeds: int, model: str | None = None) -> list[MixConfig]:
    """The mixes of the demo, of a few steps on a smaller model."""
    model_of = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 224}
    return [
        attrs.evolve(
            config,
            budget=attrs.evolve(config.budget, seconds=None, outer_steps=2),
            task=attrs.evolve(
                config.task,
                cache=8,
                model=attrs.evolve(config.task.model, config=model_of),
                validation=few(config.task.validation),
                test=few(config.task.test),
            ),
            uncertainty=attrs.evolve(config.uncertainty, rows=1, resamples=100),
            sample=attrs.evolve(config.sample, size=12),
            finetune=attrs.evolve(config.finetune, epochs=1),
        )
        for config in configs(out, seeds)
    ]


@pytest.mark.extended
def test_both_methods_of_the_demo_are_compared_seed_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(demo, "configs", smaller)
    result = report_of("mix", "demo", "--out", out, "--seeds", "2")
    assert [mix["method"] for mix in result["mixes"]] == ["uniform", "hg-ms"] * 2
    losses: dict[str, list[float]] = {"hg-ms": [], "uniform": []}
    for mix in result["mixes"]:
        report = json.loads(Path(mix["folder"], "report.json").read_bytes())
        assert report["sample"]["size"] == 12
        losses[mix["method"]].append(report["test"]["word-problems"]["token_loss"]["value"])
        assert mix["losses"]["word-problems"] == losses[mix["method"]][-1]
    found = result["tests"]["word-problems"]
    gaps = [a - b for a, b in zip(losses["hg-ms"], losses["uniform"], strict=True)]
    # Student's t with one degree of freedom
    half = 12.706 * statistics.stdev(gaps) / math.sqrt(2)
    (row,) = (row for row in found["differences"] if row["method"] == "hg-ms")
    assert row["mean"] == pytest.approx(statistics.mean(gaps))
    assert row["half_width"] == pytest.approx(half, rel=1e-4)
    again = right("mix", "--demo", "--out", out, "--seeds", "2")
    assert "reweight: done before" in again.stderr
    assert f"{statistics.mean(losses['uniform']):.3f}"[:4] in again.stdout
