"""`hgms mix --demo`: its texts, its file, and what it says."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from support.small_mixes import report_of

from hgms_mix.lm import BaseModel
from hgms_mix.lm.table import left_out
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.stages.config import load
from hgms_mix.stages.demo import configs, run_demo
from hgms_mix.stages.texts import word_problem, write

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'hgms[llm]'")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "method", "blank"),
    [((), "hg-ms", 0.05), (("--model", "smollm2-135m"), "hg-ms-mixture", 1 / 3)],
    ids=["tiny", "real-weights"],
)
def test_the_demo_finds_the_source_that_matches(
    model: tuple[str, ...], method: str, blank: float, tmp_path: Path
) -> None:
    """Three minutes on two cores, five on real weights: the mixture goes to the matching source
    and the test loss is below uniform's.
    """
    result = report_of("mix", "--demo", *model, "--out", tmp_path)
    for mix in result["methods"][method]["mixes"]:
        weights = {row["source"]: row["weight"] for row in mix["sources"]}
        assert max(weights, key=weights.__getitem__) == "word-problems"
        assert weights["blank-answers"] < blank
        assert model == () or mix["test"]["word-problems"]["against_uniform"]["high"] < 0
    if not model:
        assert result["difference"]["mean"] < -result["difference"]["half_width"]
        assert Path(result["picture"]).exists()


@pytest.mark.extended
def test_the_demo_on_a_pretrained_model_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any folder of a model will do: here one that knows nothing, byte by byte, without a chat
    template.
    """
    size = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 256}
    base = BaseModel(config={"model_type": "gpt2", **size}, tokenizer="bytes")
    built = base.load(torch.device("cpu"), vocabulary=259)
    for part in (built, byte_tokenizer()):
        part.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    demo = run_demo(tmp_path / "out", seeds=1, model=str(tmp_path / "model"))
    assert demo.method == "hg-ms-mixture"
    file = tmp_path / "out" / "demo.toml"
    assert 'template = "plain"' in file.read_text(encoding="utf-8")
    demo.print()
    shown = capsys.readouterr().out
    assert re.search(r"over the 60 test rows of this seed: -?\d\.\d+ \[.*\] \(95 % interval", shown)
    tuned = Path(re.search(r"peft's format: (.*)", shown)[1])
    files = {"adapter_model.safetensors", "tokenizer_config.json"}
    assert {path.name for path in tuned.iterdir()} >= files
    assert shown.index("next:") < shown.index(str(file))


def test_the_demos_file_describes_its_mixes_wherever_it_is_written(tmp_path: Path) -> None:
    out = tmp_path / 'a "quoted" TEMPLATE'
    out.mkdir()
    file = out / "demo.toml"
    uniform, learned = configs(out, 1)
    assert load(file, out=str(out)).resolved() == learned.resolved()
    text = file.read_text(encoding="utf-8")
    assert "FOLDER" not in text
    method = text[text.index("\n[method]\n") + 1 : text.index("[task]")]
    # as its head says
    count = method.splitlines()[2].replace("count = 2, ", "")
    file.write_text(text.replace(method, f'[method]\nname = "uniform"\n{count}\n\n'), "utf-8")
    assert load(file, out=str(out)).resolved() == uniform.resolved()


def test_the_demos_texts_share_no_prompt_are_the_same_each_time_right_and_none_is_cut(
    tmp_path: Path,
) -> None:
    """A cut answer loses its end, which says the result."""
    [config, _] = configs(tmp_path, 1)
    for folder in ("texts", "again"):
        write(tmp_path / folder)
    texts, again = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / folder).iterdir())}
        for folder in ("texts", "again")
    )
    names = ("blank-answers", "small-talk", "test", "validation", "word-problems")
    assert list(texts) == [f"{name}.jsonl" for name in names]
    assert texts == again
    rows = b"".join(texts.values()).splitlines()
    assert len({json.loads(line)["prompt"] for line in rows}) == len(rows) == 1520
    sets = ("sources", "validation", "test")
    tables = {which: config.task.tables(byte_tokenizer(), which) for which in sets}
    assert left_out(tables) == ""
    longest = max(int(table.lengths.max()) for part in tables.values() for table in part.values())
    assert longest <= config.task.max_length

    generator = random.Random(0)
    for _ in range(300):
        _, answer = word_problem(generator)
        ((a, sign, b, result),) = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", answer)
        x, y = int(a), int(b)
        assert {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign] == int(result)
        assert answer.endswith(f"The answer is {result}.")
