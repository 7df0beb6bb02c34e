"""`hgms mix --demo`: its texts, its file, and what it says."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_mixes import report_of

from hgms.uncertainty import in_words

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")


@pytest.mark.nightly
def test_the_demo_finds_the_source_that_matches(tmp_path: Path) -> None:
    """Three minutes on two cores: the mixture goes to the matching source and the test loss is
    below uniform's.
    """
    result = report_of("mix", "--demo", "--out", tmp_path)
    assert result["difference"]["mean"] < 0
    assert abs(result["difference"]["mean"]) > result["difference"]["half_width"]
    for mix in result["methods"]["hg-ms"]["mixes"]:
        weights = {row["source"]: row["weight"] for row in mix["sources"]}
        assert max(weights, key=weights.__getitem__) == "word-problems"
        assert weights["blank-answers"] < 0.05
    assert Path(result["picture"]).exists()


@pytest.mark.extended
def test_the_demo_on_a_pretrained_model_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any folder of a model will do: here one that knows nothing, byte by byte, without a chat
    template.
    """
    from hgms_mix.lm import BaseModel
    from hgms_mix.lm.tokenizers import byte_tokenizer
    from hgms_mix.stages.demo import run_demo

    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 256}
    built = BaseModel(config={"model_type": "gpt2", **size}, tokenizer="bytes").load(
        torch.device("cpu"), vocabulary=259
    )
    built.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    byte_tokenizer().save_pretrained(tmp_path / "model")
    demo = run_demo(tmp_path / "out", seeds=1, model=str(tmp_path / "model"))
    assert demo.method == "hg-ms-mixture"
    assert 'template = "plain"' in (tmp_path / "out" / "demo.toml").read_text(encoding="utf-8")
    demo.print()
    shown = capsys.readouterr().out
    assert re.search(
        r"over the 60 test rows of this seed: -?\d\.\d+ \[.*\] \(95 % interval, paired\)", shown
    )
    tuned = Path(re.search(r"peft's format: (.*)", shown)[1])
    assert (tuned / "adapter_model.safetensors").is_file()
    assert (tuned / "tokenizer_config.json").is_file()
    assert shown.index("next:") < shown.index(str(tmp_path / "out" / "demo.toml"))


def test_the_demos_file_describes_its_mixes_wherever_it_is_written(tmp_path: Path) -> None:
    from hgms_mix.stages.config import load
    from hgms_mix.stages.demo import configs

    out = tmp_path / 'a "quoted" TEMPLATE'
    out.mkdir()
    uniform, learned = configs(out, 1)
    assert load(out / "demo.toml", out=str(out)).resolved() == learned.resolved()
    text = (out / "demo.toml").read_text(encoding="utf-8")
    assert "FOLDER" not in text
    method = text[text.index("\n[method]\n") + 1 : text.index("[task]")]
    # as its head says
    other = (
        '[method]\nname = "uniform"\n' + method.splitlines()[2].replace("count = 2, ", "") + "\n\n"
    )
    (out / "other.toml").write_text(text.replace(method, other), encoding="utf-8")
    assert load(out / "other.toml", out=str(out)).resolved() == uniform.resolved()


def test_the_demos_texts_share_no_prompt_are_the_same_each_time_and_none_is_cut(
    tmp_path: Path,
) -> None:
    """A cut answer loses its end, which says the result."""
    from hgms_mix.lm.table import left_out
    from hgms_mix.lm.tokenizers import byte_tokenizer
    from hgms_mix.stages.demo import configs
    from hgms_mix.stages.texts import write

    [config, _] = configs(tmp_path, 1)
    write(tmp_path / "texts")
    write(tmp_path / "again")
    names = ("blank-answers", "small-talk", "test", "validation", "word-problems")
    texts, again = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / folder).iterdir())}
        for folder in ("texts", "again")
    )
    assert list(texts) == [f"{name}.jsonl" for name in names]
    assert texts == again
    whole = b"".join(texts.values())
    prompts = {json.loads(line)["prompt"] for line in whole.splitlines()}
    assert len(prompts) == len(whole.splitlines()) == 1520
    tables = {
        which: config.task.tables(byte_tokenizer(), which)
        for which in ("sources", "validation", "test")
    }
    assert left_out(tables) == ""
    longest = max(int(table.lengths.max()) for part in tables.values() for table in part.values())
    assert longest <= config.task.max_length


def test_the_word_problems_are_solved_rightly() -> None:
    from hgms_mix.stages.texts import word_problem

    generator = random.Random(0)
    for _ in range(300):
        _, answer = word_problem(generator)
        ((a, sign, b, result),) = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", answer)
        x, y = int(a), int(b)
        assert {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign] == int(result)
        assert answer.endswith(f"The answer is {result}.")


def test_the_demo_knows_what_its_seeds_say() -> None:
    from hgms_mix.stages.demo import Demo

    def certainty(*weights: float) -> Any:
        reports = {
            seed: {
                "sources": [
                    {"source": "sums", "weight": weight},
                    {"source": "dots", "weight": 1 - weight},
                ]
            }
            for seed, weight in enumerate(weights)
        }
        return Demo(
            method="hg-ms", reports={"hg-ms": reports}, picture=None, folder=Path()
        ).certainty

    said = in_words(certainty(0.7, 0.72, 0.69))
    assert said.startswith("over 3 seeds: evidence for more of sums (p = 0.002), less of dots")
    assert certainty(0.7) is None
