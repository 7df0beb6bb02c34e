"""A sample handed to other trainers, read back by the real package where it is installed, and
configurations brought back.
"""

from __future__ import annotations

import json
import tomllib
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from click.testing import CliRunner, Result
from support.helpers import rejects

from hgms.cli import main
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import dotted
from hgms_mix.exchange.sample import sampled
from hgms_mix.exchange.with_olmo import OLMO
from hgms_mix.exchange.with_trl import TRL

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")

CHAT = (
    "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% if turn['role'] == "
    "'assistant' %}<|eos|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALIASES = "a0: &a0 x\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
"""A value of 2^39 texts."""
TRAINERS = ("axolotl", "datasets", "llamafactory", "ms-swift", "olmo", "trl")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["mix", *map(str, arguments)])


def right(*arguments: object) -> Result:
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    return done


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of(folder: Path) -> Counter[str]:
    """What the rows of an export say, whatever they are called there: answers with what was
    asked.
    """
    said: Counter[str] = Counter()
    for path in (folder / "rows").glob("*.jsonl"):
        for row in lines(path):
            turns = row.get("messages") or [*row.get("prompt", []), *row.get("completion", [])]
            said["|".join(turn["content"] for turn in turns)] += 1
    return said


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sources of 40 and 60 rows, mixed 0.7 to 0.3: by a chat template, and by
    a named one.
    """
    from hgms_mix.lm.tokenizers import byte_tokenizer

    here = tmp_path_factory.mktemp("exchange")
    for name, first, count, answer in (
        ("sums", 0, 40, None),
        ("dots, 2", 100, 60, "."),
        ("validation", 200, 8, None),
    ):
        rows = [
            {"prompt": f"{i // 40} + {i % 40} =", "completion": answer or str(i // 40 + i % 40)}
            for i in range(first, first + count)
        ]
        (here / f"{name[:4]}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT.replace("<|eos|>", tokenizer.eos_token)
    tokenizer.save_pretrained(here / "tokenizer")
    task = (Path(__file__).resolve().parents[2] / "tiny_mix.toml").read_text()
    task = (
        task.replace("dots]", '"dots, 2"]')
        .replace("validation.jsonl", "vali.jsonl")
        .replace("test.jsonl", "vali.jsonl")
    )
    head = (
        'seed = 1\nbudget = "1 step"\nmethod = { name = "fixed", mixture = { sums = 0.7, '
        '"dots, 2" = 0.3 } }\n'
    )
    tail = "[sample]\nsize = 30\n[finetune]\nlr = 1e-2\nmicro_batch = 3\naccumulation = 2\n"
    (here / "plain.toml").write_text(head + task + tail)
    chat = (
        task.replace('"plain"', '"model"')
        .replace('"bytes"', '"tokenizer"')
        .replace("max_length = 40", "max_length = 64")
    )
    (here / "chat.toml").write_text(
        head + chat.replace("n_positions = 40", "n_positions = 64") + tail
    )
    rows = [
        {"instruction": f"Add {i}.", "input": "and 1" * (i % 2), "output": str(i + 1)}
        for i in range(40)
    ]
    (here / "alpa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alpaca = (
        task.replace('"plain"', '"alpaca"')
        .replace("sums.jsonl", "alpa.jsonl")
        .replace("= 40", "= 280")
    )
    (here / "alpaca.toml").write_text(head + alpaca + tail)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        for name in ("plain", "chat", "alpaca"):
            file = Path(f"{name}.toml")
            file.write_text(file.read_text().replace("[task]\n", f'[task]\nlabel = "{name}"\n'))
            right("sample", file)
    return here


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(made)
    return made


def sample_folder(here: Path, name: str = "chat") -> Path:
    return (
        next((here / "runs").glob(f"{name}/*/seed-1"))
        if (here / "runs").is_dir()
        else next(here.glob(f"*/{name}/*/seed-1"))
    )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_export_says_where_the_mix_trains_otherwise(
    here: Path, tmp_path: Path, trainer: str
) -> None:
    none = "trains nothing on these rows: with `[finetune] epochs = 0`"
    on = "goes on with the parameters that learning ended with"
    for epochs, start, said in ((0, "reweighted", none), (2, "reweighted", on), (2, "fresh", "")):
        out = tmp_path / f"{epochs}-{start}"
        sets = (f"finetune.epochs={epochs}", f"finetune.start={start}")
        options = [word for pair in sets for word in ("--set", pair)]
        done = right("export", "chat.toml", "--to", trainer, "--out", out, *options)
        for text in (done.stdout, (out / "README.md").read_text()):
            assert [words in text for words in (none, on)] == [
                words == said for words in (none, on)
            ]
        for file in out.glob("*.yaml"):
            table = yaml.safe_load(file.read_text())
            assert {table[key] for key in ("num_epochs", "num_train_epochs") if key in table} <= {
                max(1, epochs)
            }
    notes = json.loads(
        right("export", "chat.toml", "--to", trainer, "--out", out, *options, "--json").stdout
    )["notes"]
    assert notes == []


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_export_holds_the_sample_and_names_its_command(
    here: Path, tmp_path: Path, trainer: str
) -> None:
    from hgms_mix.exchange.folder import TRAINERS as known
    from hgms_mix.stages import read_rows

    out = tmp_path / "out"
    done = json.loads(right("export", "chat.toml", "--to", trainer, "--out", out, "--json").stdout)
    assert {row["source"]: row["rows"] for row in done["sources"]} == {"sums": 21, "dots, 2": 9}
    readme = (out / "README.md").read_text()
    assert known[trainer].command in readme
    assert known[trainer].meaning in readme
    assert all((out / name).exists() for name in known[trainer].files)
    drawn = Counter(
        "|".join(turn["content"] for turn in row["messages"])
        for row in read_rows(sample_folder(here) / "sample" / "rows.jsonl.gz")
    )
    assert texts_of(out) == drawn


def test_a_folder_of_hgms_mix_gives_the_export_of_its_file(here: Path, tmp_path: Path) -> None:
    for number, place in enumerate(("plain.toml", sample_folder(here, "plain"))):
        right("export", place, "--to", "axolotl", "--out", tmp_path / str(number))
    one, two = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / number).rglob("*.*"))}
        for number in "01"
    )
    assert one == two


def test_an_export_is_called_after_its_mix_wherever_it_is_written_from(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = sampled(Path("chat.toml"))
    folder = sample_folder(here).resolve()
    assert sample.title == "chat"
    for name in ("sums", "dots", "vali"):
        (folder / f"{name}.jsonl").symlink_to(here / f"{name}.jsonl")
    (folder / "tokenizer").symlink_to(here / "tokenizer")
    monkeypatch.chdir(folder)
    right("export", ".", "--to", "datasets", "--out", tmp_path / "out")
    for name in ("sums.jsonl", "dots.jsonl", "vali.jsonl", "tokenizer"):
        (folder / name).unlink()
    assert (tmp_path / "out" / "README.md").read_text().startswith("# chat, for datasets\n")


def test_the_command_can_be_pasted(here: Path, tmp_path: Path) -> None:
    printed = right("export", "chat.toml", "--to", "datasets", "--out", tmp_path / "for it").stdout
    assert f"cd '{tmp_path}/for it' && python load.py" in printed


@pytest.mark.parametrize(("name", "trainer"), [("plain", "olmo"), ("alpaca", "trl")])
def test_sources_that_changed_since_the_sample_was_drawn_are_not_read(
    here: Path, tmp_path: Path, name: str, trainer: str
) -> None:
    """Row 7 of a file is another row after an edit: tokens, and instructions with an input, are
    read anew.
    """
    file = here / ("sums.jsonl" if name == "plain" else "alpa.jsonl")
    before = file.read_text()
    file.write_text("".join(sorted(before.splitlines(keepends=True), reverse=True)))
    try:
        places = (sample_folder(here, name), f"{name}.toml")
        done, other = (
            call("export", place, "--to", trainer, "--out", tmp_path / "out") for place in places
        )
    finally:
        file.write_text(before)
    assert done.exit_code != 0
    assert "(task.sources.sums)" in done.output
    assert other.exit_code == 2  # by its data, the file is another mix
    assert f"hgms mix sample {name}.toml" in other.output
    assert "Traceback" not in done.output + other.output
    right("export", f"{name}.toml", "--to", trainer, "--out", tmp_path / "other")


def test_a_scale_of_lora_that_trainers_cannot_read_is_not_cut(here: Path, tmp_path: Path) -> None:
    choice = ("--set", "finetune.adapter.rank=4", "--set", "finetune.adapter.alpha=8.5")
    for trainer in ("axolotl", "llamafactory", "ms-swift", "trl"):
        done = call("export", "plain.toml", *choice, "--to", trainer, "--out", tmp_path / trainer)
        assert done.exit_code == 2
        assert "alpha=8.5" in done.output
        assert "(adapter.alpha)" in done.output
    # which knows no adapter
    right("export", "plain.toml", *choice, "--to", "datasets", "--out", tmp_path / "datasets")


def test_an_export_over_an_earlier_one_leaves_nothing_of_it(here: Path, tmp_path: Path) -> None:
    choice = ("--seed", "2", "--set", "sample.of=validation", "--set", "sample.size=5")
    right("sample", "plain.toml", *choice)
    for some in ((), choice):
        right("export", "plain.toml", *some, "--to", "olmo", "--out", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "rows").iterdir()] == ["sums.jsonl"]
    assert sorted(path.name for path in (tmp_path / "out" / "tokens").iterdir()) == [
        "labels_mask_part_0000.npy",
        "token_ids_part_0000.npy",
    ]


def test_an_export_takes_away_only_what_one_has_written(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = tmp_path / "other"
    (out / ".export.part" / "rows").mkdir(parents=True)  # of one that was killed
    right("export", "chat.toml", "--to", "trl", "--out", out)
    assert not (out / ".export.part").exists()
    mine = out / "rows" / "mine.jsonl"
    mine.write_text("{}\n")
    stale = out / "rows" / "gone.jsonl"
    listed = json.loads((out / ".export.json").read_text())
    stale.write_text("{}\n")
    (out / ".export.json").write_text(
        json.dumps({**listed, "files": [*listed["files"], "rows/gone.jsonl"]})
    )
    right("export", "chat.toml", "--to", "trl", "--out", out)
    assert (mine.exists(), stale.exists()) == (True, False)
    assert json.loads((out / ".export.json").read_text()) == listed

    (out / ".export.json").write_text(json.dumps({**listed, "files": ["../other"]}))
    other.write_text("")
    outside = call("export", "chat.toml", "--to", "trl", "--out", out)
    assert (outside.exit_code, other.exists()) == (2, True)
    assert f"({out})" in outside.output
    (out / ".export.json").write_text(json.dumps({**listed, "files": ["README.md"]}))
    taken = call("export", "chat.toml", "--to", "trl", "--out", out)
    assert taken.exit_code == 2
    assert f"({out / '.export.json'})" not in taken.output
    assert f"({out}/" in taken.output


def test_a_sample_of_the_validation_sets_is_handed_over_too(here: Path, tmp_path: Path) -> None:
    choice = ("--seed", "2", "--set", "sample.of=validation", "--set", "sample.size=5")
    right("sample", "plain.toml", *choice)
    done = json.loads(
        right(
            "export", "plain.toml", *choice, "--to", "olmo", "--out", tmp_path / "out", "--json"
        ).stdout
    )
    assert [(row["source"], row["rows"], row["weight"]) for row in done["sources"]] == [
        ("sums", 5, 1.0)
    ]
    assert set(texts_of(tmp_path / "out")) <= {f"5 + {i} =|{5 + i}" for i in range(8)}


@pytest.mark.parametrize("name", ["chat", "plain"])
def test_datasets_interleaves_each_row_once(here: Path, tmp_path: Path, name: str) -> None:
    from datasets import Dataset

    out = tmp_path / "out"
    right("export", f"{name}.toml", "--to", "datasets", "--out", out)
    plan = json.loads((out / "interleave.json").read_text())
    assert plan["probabilities"] == [0.7, 0.3]
    place: dict[str, Any] = {"__file__": str(out / "load.py")}
    exec((out / "load.py").read_text(), place)  # what it wrote is what is run
    loaded = place["load"]()
    assert isinstance(loaded, Dataset)
    written = [row for path in sorted((out / "rows").glob("*.jsonl")) for row in lines(path)]
    assert sorted(map(str, loaded.to_list())) == sorted(map(str, written))
    assert len(loaded) == 30
    if name == "plain":
        assert all(row["completion"].endswith("<eos>") for row in loaded)


@pytest.mark.parametrize("marks", [False, True])
def test_trl_gets_a_row_for_each_answer_unless_the_template_marks_answers(
    here: Path, tmp_path: Path, marks: bool
) -> None:
    """TRL stops at a chat template that it can neither use nor patch (SmolLM2's, for example)."""
    sample = several_answers(marks)
    notes = TRL.write(sample, tmp_path)
    table = yaml.safe_load((tmp_path / "sft.yaml").read_text())
    rows = {part.name: lines(tmp_path / "rows" / f"{part.stem}.jsonl") for part in sample.parts}
    fractions = [part["fraction"] for part in table["datasets"]]
    if marks:
        assert table["assistant_only_loss"] is True
        assert [len(row["messages"]) for row in rows["sums"]] == [4] * 21
        assert fractions == pytest.approx([0.7, 0.3])
        return
    assert "assistant_only_loss" not in table
    assert table["completion_only_loss"] is True
    assert {name: len(listed) for name, listed in rows.items()} == {"sums": 42, "dots, 2": 9}
    # by these fractions TRL takes each row once
    assert fractions == pytest.approx([42 / 51, 9 / 51])
    turns = sample.parts[0].rows[0]["messages"]
    assert rows["sums"][:2] == [
        {"prompt": turns[:1], "completion": turns[1:2]},
        {"prompt": turns[:3], "completion": turns[3:]},
    ]
    assert "51 for the 30 of the sample" in notes[-1]


def test_an_answer_of_weight_0_is_no_row_for_trl(here: Path, tmp_path: Path) -> None:
    sample = several_answers(marks=True)
    first, *others = sample.parts
    row = {**first.rows[0], "messages": [dict(turn) for turn in first.rows[0]["messages"]]}
    row["messages"][1]["weight"] = 0
    template = sample.tokenizer.chat_template
    sample = evolve(sample, parts=[evolve(first, rows=[row, *first.rows[1:]]), *others])
    sample.tokenizer.chat_template = template
    TRL.write(sample, tmp_path)
    written = lines(tmp_path / "rows" / "sums.jsonl")
    assert len(written) == 41
    assert [len(row["prompt"]) for row in written[:2]] == [3, 1]


def several_answers(marks: bool) -> Any:
    """The sample of the chat template, with two answers in each row of the first source."""
    sample = sampled(Path("chat.toml"))
    first, *others = sample.parts
    rows = [{**row, "messages": [*row["messages"], *row["messages"]]} for row in first.rows]
    sample = evolve(sample, parts=[evolve(first, rows=rows), *others])
    if marks:
        marked = "{% generation %}{% endgeneration %}"
        sample.tokenizer.chat_template = marked + sample.tokenizer.chat_template
    return sample


class TestTrl:
    @pytest.fixture(autouse=True)
    def _there(self) -> None:
        pytest.importorskip("trl", reason="trl is not installed")

    @pytest.mark.parametrize("name", ["chat", "plain"])
    def test_its_parser_and_loader_take_the_sample(
        self, here: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from trl import (
            DatasetMixtureConfig,
            ModelConfig,
            ScriptArguments,
            SFTConfig,
            TrlParser,
            get_dataset,
            get_peft_config,
        )

        out = tmp_path / "out"
        right("export", f"{name}.toml", "--to", "trl", "--out", out)
        monkeypatch.chdir(out)
        parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
        with warnings.catch_warnings():
            # of an option that the file sets
            warnings.filterwarnings("error", message=".*deprecated.*")
            _, training, model, data = parser.parse_args_and_config(
                ["--config", "sft.yaml", "--use_cpu", "true", "--bf16", "false"]
            )
        assert (
            training.learning_rate,
            training.per_device_train_batch_size,
            training.gradient_accumulation_steps,
        ) == (1e-2, 3, 2)
        assert (training.num_train_epochs, training.weight_decay, training.max_grad_norm) == (
            1,
            0.01,
            0.0,
        )
        assert training.completion_only_loss is True
        assert (training.activation_checkpointing, training.gradient_checkpointing) == (
            False,
            False,
        ), "trl's default is True"
        adapter = get_peft_config(model)
        assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (2, 4, r"(.*\.)?c_attn")
        rows = get_dataset(data)["train"].to_list()
        written = [row for path in (out / "rows").glob("*.jsonl") for row in lines(path)]
        assert sorted(map(str, rows)) == sorted(map(str, written))
        assert len(rows) == 30

    def test_the_settings_that_hgms_mix_gives_it_come_along(
        self, here: Path, tmp_path: Path
    ) -> None:
        sets = (
            "finetune.trainer.name=trl",
            "finetune.trainer.packing=true",
            "finetune.trainer.sft.packing_strategy=bfd",
        )
        right(
            "export",
            "plain.toml",
            "--to",
            "trl",
            "--out",
            tmp_path / "out",
            *(word for pair in sets for word in ("--set", pair)),
        )
        table = yaml.safe_load((tmp_path / "out" / "sft.yaml").read_text())
        assert (table["packing"], table["padding_free"], table["packing_strategy"]) == (
            True,
            False,
            "bfd",
        )

    @pytest.mark.filterwarnings("ignore")  # of trl and peft, about what each gives the other
    @pytest.mark.parametrize("name", ["chat", "plain", "several answers"])
    def test_its_own_script_trains_on_it(
        self, here: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`trl sft`, in this process: adapter and all, three optimiser steps."""
        from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
        from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser
        from trl.scripts.sft import main as sft

        out = tmp_path / "out"
        model = tmp_path / "model"
        tokenizer = AutoTokenizer.from_pretrained(here / "tokenizer")
        tokenizer.save_pretrained(model)
        ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
        size = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 64}
        GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **size, **ends)).save_pretrained(
            model
        )
        if name == "several answers":
            out.mkdir()
            TRL.write(several_answers(marks=False), out)
        else:
            right("export", f"{name}.toml", "--to", "trl", "--out", out)
        monkeypatch.chdir(out)
        parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
        options = {
            "model_name_or_path": model,
            "use_cpu": "true",
            "bf16": "false",
            "report_to": "none",
            "max_steps": 3,
        }
        words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        state = torch.get_rng_state()
        sft(*parser.parse_args_and_config(["--config", "sft.yaml", *words]))
        torch.set_rng_state(state)
        assert (out / "tuned" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["plain", "alpaca"])
def test_named_templates_are_written_into_the_rows_as_the_mix_tokenised_them(
    here: Path, tmp_path: Path, name: str
) -> None:
    """Segments of axolotl, put together, are the tokens and masks of the mix's own table."""
    right("export", f"{name}.toml", "--to", "axolotl", "--out", tmp_path / "out")
    sample = sampled(Path(f"{name}.toml"))
    tables = sample.config.task.tables(sample.tokenizer, "sources")
    tokenizer = sample.tokenizer
    for part in sample.parts:
        for row, written in zip(
            part.rows, lines(tmp_path / "out" / "rows" / f"{part.stem}.jsonl"), strict=True
        ):
            ids = []
            labels = []
            for segment in written["segments"]:
                piece = tokenizer(segment["text"], add_special_tokens=False)["input_ids"]
                ids += piece
                labels += [segment["label"]] * len(piece)
            tokens, mask = tables[part.name].row(tables[part.name].places[row["row"]])
            assert ids == tokens.tolist()
            assert labels == mask.tolist()


def test_prompt_and_completion_of_every_trainer_are_the_same_words(
    here: Path, tmp_path: Path
) -> None:
    for trainer in ("trl", "llamafactory", "ms-swift"):
        right("export", "plain.toml", "--to", trainer, "--out", tmp_path / trainer)
    trl, factory, swift = (
        lines(tmp_path / trainer / "rows" / "sums.jsonl")
        for trainer in ("trl", "llamafactory", "ms-swift")
    )
    assert trl == factory
    end = trl[0]["completion"].removeprefix(swift[0]["response"])
    assert end.startswith("<")
    assert [(row["query"], row["response"] + end) for row in swift] == [
        (row["prompt"], row["completion"]) for row in trl
    ]
    assert (
        yaml.safe_load((tmp_path / "llamafactory" / "train.yaml").read_text())["template"]
        == "empty"
    )
    assert (
        yaml.safe_load((tmp_path / "ms-swift" / "sft.yaml").read_text())["use_chat_template"]
        is False
    )


def test_configurations_have_what_each_trainer_documents(here: Path, tmp_path: Path) -> None:
    """Keys and types by the trainers' own argument classes (axolotl's schemas, LLaMA-Factory's and
    ms-swift's arguments, OLMo-core's source mixture), written down here from their documentation.
    """
    for trainer in TRAINERS:
        right("export", "chat.toml", "--to", trainer, "--out", tmp_path / trainer)
    axolotl = yaml.safe_load((tmp_path / "axolotl" / "axolotl.yaml").read_text())
    assert axolotl["datasets"][0] == {
        "path": "rows/sums.jsonl",
        "ds_type": "json",
        "type": "chat_template",
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }
    for key in (
        "base_model",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "num_epochs",
        "learning_rate",
        "sequence_len",
        "optimizer",
    ):
        assert key in axolotl
    factory = yaml.safe_load((tmp_path / "llamafactory" / "train.yaml").read_text())
    info = json.loads((tmp_path / "llamafactory" / "dataset_info.json").read_text())
    names = factory["dataset"].split(",")
    assert names == list(info) == ["sums", "dots-2"]
    assert all(
        (tmp_path / "llamafactory" / factory["dataset_dir"] / info[name]["file_name"]).is_file()
        for name in names
    )
    assert {info[name]["formatting"] for name in names} == {"sharegpt"}
    assert (
        info["sums"]["tags"]["assistant_tag"]
        == lines(tmp_path / "llamafactory" / "rows" / "sums.jsonl")[0]["messages"][-1]["role"]
    )
    assert factory["mix_strategy"] == "concat"
    swift = yaml.safe_load((tmp_path / "ms-swift" / "sft.yaml").read_text())
    assert swift["dataset"] == ["rows/sums.jsonl#21", "rows/dots-2.jsonl#9"]
    assert swift["tuner_type"] == "lora"
    olmo = yaml.safe_load((tmp_path / "olmo" / "mixture.yaml").read_text())["sources"]
    assert sum(source["target_ratio"] for source in olmo) == pytest.approx(1, abs=1e-12)
    assert all(
        0 < source["target_ratio"] <= 1 and source["max_repetition_ratio"] >= 1 for source in olmo
    )


def test_olmo_finds_the_rows_by_their_end_tokens(here: Path, tmp_path: Path) -> None:
    right("export", "chat.toml", "--to", "olmo", "--out", tmp_path / "out")
    sample = sampled(Path("chat.toml"))
    tables = sample.config.task.tables(sample.tokenizer, "sources")
    end = sample.tokenizer.eos_token_id
    sources = yaml.safe_load((tmp_path / "out" / "mixture.yaml").read_text())["sources"]
    lengths = []
    for part, source in zip(sample.parts, sources, strict=True):
        flat = np.memmap(tmp_path / "out" / source["paths"][0], mode="r", dtype=np.uint16)
        masks = np.memmap(
            tmp_path / "out" / source["paths"][0].replace("token_ids", "labels_mask"),
            mode="r",
            dtype=np.bool_,
        )
        lengths.append(len(flat))
        stops = (flat == end).nonzero()[0] + 1
        documents = [
            flat[begin:stop].tolist() for begin, stop in zip([0, *stops[:-1]], stops, strict=True)
        ]
        assert documents == [
            tables[part.name].row(tables[part.name].places[row["row"]])[0].tolist()
            for row in part.rows
        ]
        assert masks.tolist() == [
            learned
            for row in part.rows
            for learned in tables[part.name].row(tables[part.name].places[row["row"]])[1].tolist()
        ]
    assert [source["target_ratio"] for source in sources] == pytest.approx(
        [length / sum(lengths) for length in lengths]
    )


def test_olmo_counts_rows_whose_other_turns_end_with_the_end_token(
    here: Path, tmp_path: Path
) -> None:
    """SmolLM2's <|im_end|> also ends the turns of the user."""
    sample = sampled(Path("chat.toml"))
    end = sample.tokenizer.eos_token
    every = f"{{% for turn in messages %}}<{{{{ turn['role'] }}}}>{{{{ turn['content'] }}}}{end}"
    tail = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    sample.tokenizer.chat_template = every + tail
    notes = OLMO.write(sample, tmp_path)
    assert any(note.startswith("30 of 30 rows have the end token within") for note in notes)
    assert not any("several answers" in note for note in notes)


def test_a_source_without_rows_is_named(here: Path, tmp_path: Path) -> None:
    mixture = '{sums=0.9999, "dots, 2"=0.0001}'
    choice = ("--set", f"method.mixture={mixture}", "--seed", "3")
    right("sample", "chat.toml", *choice)
    done = right("export", "chat.toml", *choice, "--to", "trl", "--out", tmp_path / "out")
    for text in (done.stdout, (tmp_path / "out" / "README.md").read_text()):
        assert "No row is from `dots, 2`: its weight 0.0001 is too small for 30 rows." in text


@pytest.mark.parametrize(
    ("trainer", "file"),
    [
        ("axolotl", "axolotl.yaml"),
        ("datasets", "interleave.json"),
        ("llamafactory", "train.yaml"),
        ("ms-swift", "sft.yaml"),
        ("olmo", "mixture.yaml"),
        ("trl", "sft.yaml"),
    ],
)
def test_there_and_back(
    here: Path, tmp_path: Path, trainer: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported, imported, drawn again: the same rows in the same shares."""
    out = tmp_path / "out"
    right("export", "chat.toml", "--to", trainer, "--out", out)
    monkeypatch.chdir(tmp_path)
    right(
        "import",
        f"out/{file}",
        "--from",
        trainer,
        "--out",
        "back.toml",
        "--validation",
        here / "vali.jsonl",
    )
    table = tomllib.loads(Path("back.toml").read_text())
    mixture = table["method"]["mixture"]
    assert sum(mixture.values()) == pytest.approx(1)
    if trainer == "olmo":  # characters stand for tokens, which chat templates add to
        assert mixture["sums"] == pytest.approx(0.7, abs=0.03)
    else:
        assert list(mixture.values()) == pytest.approx([0.7, 0.3], abs=1e-12)
    model = (
        'config = { model_type = "gpt2", n_layer = 1, n_embd = 8, n_head = 2, n_positions = 64 }'
    )
    text = (
        Path("back.toml")
        .read_text()
        .replace('path = "MODEL"', f'{model}\ntokenizer = "{here / "tokenizer"}"')
    )
    Path("back.toml").write_text(text.replace("size = 1000", "size = 30"))
    if trainer in ("axolotl", "trl"):
        report = json.loads(
            right("sample", "back.toml", "--json", *(["--set", "task.max_length=64"])).stdout
        )
        assert sorted(row["rows"] for row in report["sources"]) == [9, 21]


def test_the_readme_says_what_a_weight_means_in_the_words_of_an_export() -> None:
    import hgms_mix.exchange
    from hgms_mix.exchange.folder import TRAINERS as known

    readme = (Path(hgms_mix.exchange.__file__).parent / "README.md").read_text()
    assert set(known) == set(TRAINERS)
    for trainer in known.values():
        assert f"| `{trainer.name}` | {trainer.meaning} |" in readme


class TestWeightsOfOthers:
    """Shares in rows, computed by hand from what each trainer documents of its weights."""

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name, count in (("a", 40), ("b", 10)):
            Path(f"{name}.jsonl").write_text('{"instruction": "p", "output": "c"}\n' * count)

    def mixture(self, trainer: str, file: str, text: str) -> list[float]:
        Path(file).write_text(text)
        return [
            row["share"]
            for row in json.loads(right("import", file, "--from", trainer, "--json").stdout)[
                "sources"
            ]
        ]

    def test_axolotl_keeps_a_share_of_each_file(self) -> None:
        text = (
            "base_model: m\ndatasets:\n- {path: a.jsonl, type: alpaca, weight: 0.25}\n"
            "- {path: b.jsonl, type: alpaca}\n"
        )
        # 10 rows and 10 rows
        assert self.mixture("axolotl", "c.yml", text) == pytest.approx([0.5, 0.5])

    def test_trl_s_fractions_are_of_the_mixture(self) -> None:
        text = (
            "datasets:\n- {path: json, data_files: a.jsonl, fraction: 3}\n"
            "- {path: json, data_files: b.jsonl, fraction: 1}\n"
        )
        assert self.mixture("trl", "c.yaml", text) == pytest.approx([0.75, 0.25])
        text = (
            "datasets:\n- {path: json, data_files: a.jsonl}\n- {path: json, data_files: b.jsonl}\n"
        )
        Path("mix.toml").unlink()
        assert self.mixture("trl", "c.yaml", text) == pytest.approx([0.8, 0.2])

    @pytest.mark.parametrize(
        ("strategy", "shares"),
        [("concat", [0.8, 0.2]), ("interleave_once", [0.8, 0.2]), ("interleave_under", [0.1, 0.9])],
    )
    def test_llamafactory_s_probabilities_count_where_it_interleaves(
        self, strategy: str, shares: list[float]
    ) -> None:
        Path("dataset_info.json").write_text(
            json.dumps({name: {"file_name": f"{name}.jsonl"} for name in "ab"})
        )
        probabilities = "" if strategy == "concat" else "interleave_probs: 0.1,0.9\n"
        text = f"dataset: a,b\ndataset_dir: .\nmix_strategy: {strategy}\n{probabilities}"
        assert self.mixture("llamafactory", "c.yaml", text) == pytest.approx(shares)

    def test_data_sets_of_the_hub_want_their_commits(self) -> None:
        Path("c.yaml").write_text(
            "datasets:\n- {path: own/er, fraction: 1}\n- {path: oth/er, fraction: 3}\n"
        )
        done = json.loads(right("import", "c.yaml", "--from", "trl", "--json").stdout)
        assert [(row["from"], row["share"]) for row in done["sources"]] == [
            ("own/er", 0.25),
            ("oth/er", 0.75),
        ]
        assert "commit of er, er-2" in done["notes"][0]
        assert Path("mix.toml").read_text().count('revision = "COMMIT"') == 2

    def test_of_the_hub_a_subset_is_kept_and_a_branch_is_no_commit(self) -> None:
        Path("c.yaml").write_text(
            "datasets:\n- {path: own/er, name: train, fraction: 1}\n"
            "- {path: oth/er, revision: main, fraction: 3}\n"
        )
        right("import", "c.yaml", "--from", "trl")
        sources = tomllib.loads(Path("mix.toml").read_text())["task"]["sources"]
        assert sources["er"] == {"hub": "own/er", "revision": "COMMIT", "subset": "train"}
        assert sources["er-2"] == {"hub": "oth/er", "revision": "COMMIT"}

    @pytest.mark.parametrize("pattern", ["*", "[cd]", "?"])
    def test_a_pattern_of_files_is_a_source(self, pattern: str) -> None:
        Path("more").mkdir()
        for name in ("c", "d"):
            Path("more", f"{name}.jsonl").write_text(Path("b.jsonl").read_text())
        text = (
            f"datasets:\n- {{path: json, data_files: 'more/{pattern}.jsonl'}}\n"
            "- {path: json, data_files: a.jsonl}\n"
        )
        assert self.mixture("trl", "c.yaml", text) == pytest.approx([1 / 3, 2 / 3])
        sources = tomllib.loads(Path("mix.toml").read_text())["task"]["sources"]
        assert sources == {"more": {"path": f"more/{pattern}.jsonl"}, "a": {"path": "a.jsonl"}}

    @pytest.mark.parametrize(
        ("trainer", "file", "text"),
        [
            (
                "datasets",
                "interleave.json",
                '{"datasets": [{"data_files": "rows/a.jsonl"}, {"data_files": "rows/b.jsonl"}]}',
            ),
            ("llamafactory", "train.yaml", "dataset: a,b\ndataset_dir: sub\n"),
            (
                "olmo",
                "mixture.yaml",
                "sources: [{source_name: a, target_ratio: 1}, {source_name: b, target_ratio: 1}]",
            ),
        ],
    )
    def test_files_that_lie_beside_a_list_are_not_taken_from_elsewhere(
        self, trainer: str, file: str, text: str
    ) -> None:
        """Where a trainer looks beside its list only, a file of that name in the working
        directory is another.
        """
        for folder in ("rows", "sub/rows"):
            Path(folder).mkdir(parents=True)
            for name in "ab":
                Path(folder, f"{name}.jsonl").write_text(Path("b.jsonl").read_text())
        Path("sub/dataset_info.json").write_text(
            json.dumps({name: {"file_name": f"rows/{name}.jsonl"} for name in "ab"})
        )
        self.mixture(trainer, f"sub/{file}", text)
        sources = tomllib.loads(Path("mix.toml").read_text())["task"]["sources"]
        assert {name: table["path"] for name, table in sources.items()} == {
            name: f"sub/rows/{name}.jsonl" for name in "ab"
        }

    def test_olmo_s_sources_with_names_that_look_alike_keep_their_rows(self) -> None:
        """Both are a-b in a file's name; the one that sorts later is a-b-2."""
        Path("rows").mkdir()
        Path("rows/a-b.jsonl").write_text('{"prompt": "pp", "completion": "cc"}\n')
        Path("rows/a-b-2.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
        text = (
            'sources: [{source_name: "a,b", target_ratio: 0.5}, {source_name: "a b", '
            "target_ratio: 0.5}]"
        )
        self.mixture("olmo", "c.yaml", text)
        sources = tomllib.loads(Path("mix.toml").read_text())["task"]["sources"]
        assert sources == {"a,b": {"path": "rows/a-b-2.jsonl"}, "a b": {"path": "rows/a-b.jsonl"}}

    def test_ms_swift_counts_rows_behind_the_file(self) -> None:
        assert self.mixture(
            "ms-swift", "c.yaml", "dataset:\n- a.jsonl#20\n- b.jsonl#60\n"
        ) == pytest.approx([0.25, 0.75])
        Path("mix.toml").unlink()
        assert self.mixture(
            "ms-swift", "c.yaml", "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [0.5, 0.5]\n"
        ) == [0.5, 0.5]
        Path("mix.toml").unlink()
        assert self.mixture("ms-swift", "c.yaml", "dataset: [a.jsonl, b.jsonl]\n") == pytest.approx(
            [0.8, 0.2]
        )


class TestDataSetsOfOthers:
    """Rows and columns of a data set that a trainer would read, and keys that are not imported."""

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in "ab":
            rows = [
                {
                    "question": "draft",
                    "answer": "DRAFT",
                    "frage": f"{name} {n}",
                    "antwort": f"ANTWORT {n}",
                    "messages": [{"role": "user", "content": "q"}, _answer("RAW")],
                    "dialog": [{"from": "human", "value": "q"}, _answer(f"DIALOG {n}")],
                    "text": f"TEXT {n}",
                }
                for n in range(100)
            ]
            Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        row = {"instruction": "p", "output": "ALPACA", "messages": rows[0]["messages"]}
        Path("c.jsonl").write_text(json.dumps(row) + "\n")

    def brought(self, trainer: str, text: str, info: Any = None) -> Any:
        from hgms_mix.exchange.folder import TRAINERS as known
        from hgms_mix.exchange.import_mix import bring

        Path("c.yaml").write_text(text)
        if info is not None:
            Path("dataset_info.json").write_text(json.dumps(info))
        Path("mix.toml").unlink(missing_ok=True)
        return bring(known[trainer], Path("c.yaml"), Path("mix.toml"))

    def answers(self, trainer: str, text: str, info: Any = None) -> list[str]:
        """The first answer of each source of the mix file."""
        from hgms_mix.lm import Source, read_examples

        self.brought(trainer, text, info)
        sources = tomllib.loads(Path("mix.toml").read_text())["task"]["sources"]
        return [
            read_examples(name, Source(**table))[0].messages[-1].text
            for name, table in sources.items()
        ]

    @pytest.mark.parametrize(
        ("split", "rows"),
        [
            ("train", (0, None)),
            ("train[:10%]", (0, 10)),
            ("train[:10]", (0, 10)),
            ("train[90%:]", (90, None)),
            ("train[-5:]", (95, None)),
            ("train[10:20]", (10, 10)),
            ("train[20%:-10%]", (20, 70)),
            ("train[:400]", (0, None)),
        ],
    )
    @pytest.mark.parametrize("trainer", ["axolotl", "trl", "llamafactory"])
    def test_a_slice_of_a_data_set(
        self, trainer: str, split: str, rows: tuple[int, int | None]
    ) -> None:
        from hgms_mix.lm import Source, read_examples

        text = (
            f"datasets:\n- {{path: json, data_files: a.jsonl, split: '{split}'}}\n"
            "- {path: json, data_files: b.jsonl}\n"
        )
        columns = {"prompt": "frage", "response": "text"}
        info: dict[str, Any] = {
            name: {"file_name": f"{name}.jsonl", "columns": columns} for name in "ab"
        }
        info["a"]["split"] = split
        text = "dataset: a,b\ndataset_dir: .\n" if trainer == "llamafactory" else text
        brought = self.brought(trainer, text, info)
        skip, count = rows
        source = brought.sources["a"]
        assert (source.get("skip", 0), source.get("rows")) == rows
        count = count or 100 - skip
        assert brought.mixture["a"] == pytest.approx(count / (count + 100))
        read = read_examples("a", Source(**source))
        assert [example.row for example in read] == list(range(skip, skip + count))

    @pytest.mark.parametrize("split", ["test", "train+test", "train[5:5]", "train[:10%](drop)"])
    def test_other_slices_are_rejected(self, split: str) -> None:
        text = f"datasets:\n- {{path: a.jsonl, split: '{split}'}}\n- {{path: b.jsonl}}\n"
        for trainer in ("axolotl", "trl"):
            with rejects(
                "no-rows" if "5:5" in split else "not-supported",
                *("c.yaml", "datasets", 0, "split"),
                of=ConfigError,
            ):
                self.brought(trainer, text)

    def test_columns_of_axolotl(self) -> None:
        named = "{field_instruction: frage, field_output: antwort}"
        asked = '{field_instruction: frage, field_output: antwort, format: "{instruction}"}'
        text = (
            f"datasets:\n- {{path: a.jsonl, type: {named}}}\n- {{path: a.jsonl, type: {asked}}}\n"
            "- {path: c.jsonl, type: alpaca}\n- {path: a.jsonl, type: chat_template}\n"
            "- {path: a.jsonl, type: chat_template, field_messages: dialog,"
            " message_property_mappings: {role: from, content: value}}\n"
            "- {path: a.jsonl, type: completion}\n"
            "- {path: a.jsonl, type: completion, field: antwort}\n"
        )
        assert self.answers("axolotl", text) == [
            *("ANTWORT 0", "ANTWORT 0", "ALPACA", "RAW", "DIALOG 0", "TEXT 0", "ANTWORT 0")
        ]
        sources = tomllib.loads(Path("mix.toml").read_text())["task"]["sources"]
        assert sources["a"]["fields"] == {"instruction": "frage", "output": "antwort"}

    def test_columns_of_trl(self) -> None:
        text = (
            "datasets:\n- {path: json, data_files: a.jsonl, columns: [text]}\n"
            "- {path: json, data_files: b.jsonl, columns: [messages]}\n"
        )
        assert self.answers("trl", text) == ["TEXT 0", "RAW"]
        text = text.replace("[text]", "[frage, antwort]")
        with rejects("not-supported", "c.yaml", "datasets", 0, "columns", of=ConfigError):
            self.brought("trl", text)

    def test_columns_of_llamafactory(self) -> None:
        file = {"file_name": "a.jsonl"}
        info: dict[str, Any] = {
            "alpaca": {"file_name": "c.jsonl"},
            "named": {**file, "columns": {"prompt": "frage", "response": "antwort"}},
            "chat": {
                **file,
                "formatting": "sharegpt",
                "columns": {"messages": "dialog"},
                "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human"},
            },
        }
        text = "dataset: alpaca,named,chat\ndataset_dir: .\n"
        assert self.answers("llamafactory", text, info) == ["ALPACA", "ANTWORT 0", "DIALOG 0"]
        for wrong, place in (
            ({"columns": {"prompt": "frage", "tools": "werkzeug"}}, ("columns", "tools")),
            ({"ranking": True}, ("ranking",)),
            ({"formatting": "sharegpt", "tags": {"role_tag": "wer"}}, ("tags", "role_tag")),
            ({"formatting": "sharegpt", "tags": {"user_tag": "ich"}}, ("tags", "user_tag")),
            ({"formatting": "other"}, ("formatting",)),
        ):
            listed = str(Path.cwd() / "dataset_info.json")
            with rejects("not-supported", listed, "named", *place, of=ConfigError):
                self.brought("llamafactory", text, {**info, "named": {**file, **wrong}})
        with rejects("not-supported", "c.yaml", "stage", of=ConfigError):
            self.brought("llamafactory", text + "stage: kto\n", info)

    def test_columns_of_ms_swift(self) -> None:
        text = "dataset: [a.jsonl, b.jsonl]\ncolumns: {frage: query, antwort: response}\n"
        assert self.answers("ms-swift", text) == ["ANTWORT 0", "ANTWORT 0"]
        text = 'dataset: [a.jsonl, b.jsonl]\ncolumns: \'{"dialog": "messages"}\'\n'
        assert self.answers("ms-swift", text) == ["DIALOG 0", "DIALOG 0"]
        for option in ("columns: {frage: rejected_response}", "rlhf_type: kto"):
            with rejects("not-supported", "c.yaml", option.partition(":")[0], of=ConfigError):
                self.brought("ms-swift", f"dataset: [a.jsonl, b.jsonl]\n{option}\n")

    @pytest.mark.parametrize(
        ("keys", "inner"),
        [
            ("shards: 4", ("shards",)),
            ("field_tools: werkzeug", ("field_tools",)),
            ("drop_system_message: true", ("drop_system_message",)),
            ("message_field_training_detail: wo", ("message_field_training_detail",)),
            ("message_field_role: wer", ("message_field_role",)),
            ("message_property_mappings: {role: wer}", ("message_property_mappings", "role")),
            ("roles_to_train: [user]", ("roles_to_train",)),
            ("roles: {user: [ich]}", ("roles", "user")),
        ],
    )
    def test_keys_of_axolotl_that_change_what_is_learned(
        self, keys: str, inner: tuple[str, ...]
    ) -> None:
        text = f"datasets:\n- {{path: a.jsonl, type: chat_template, {keys}}}\n- {{path: b.jsonl}}\n"
        with rejects("not-supported", "c.yaml", "datasets", 0, *inner, of=ConfigError):
            self.brought("axolotl", text)

    def test_keys_that_are_not_imported_are_reported(self) -> None:
        two = "{path: c.jsonl, type: alpaca, colour: red, ds_type: json}, {path: b.jsonl}"
        brought = self.brought("axolotl", f"datasets: [{two}]")
        assert brought.notes[0] == "not imported from datasets.0: colour"
        assert "type=None" in brought.notes[1]
        assert "colour" in Path("mix.toml").read_text()
        two = "{path: json, data_files: a.jsonl, colour: red}, {path: json, data_files: b.jsonl}"
        assert "colour" in self.brought("trl", f"datasets: [{two}]").notes[0]
        two = "{data_files: a.jsonl, colour: red}, {data_files: b.jsonl, name: b}"
        assert "colour" in self.brought("datasets", f"datasets: [{two}]").notes[0]
        info = {"a": {"file_name": "c.jsonl", "colour": 1}, "b": {"file_name": "c.jsonl"}}
        text = "dataset: a,b\ndataset_dir: .\n"
        assert "colour" in self.brought("llamafactory", text, info).notes[0]

    @pytest.mark.parametrize(
        ("trainer", "text"),
        [
            ("axolotl", "{path: a.jsonl, type: {field_instruction: [1]}}"),
            ("axolotl", "{path: a.jsonl, type: {format: 3, field_output: 4}}"),
            ("axolotl", "{path: a.jsonl, type: chat_template, roles_to_train: 5}"),
            ("axolotl", "{path: a.jsonl, type: chat_template, roles: [1]}"),
            ("axolotl", "{path: a.jsonl, type: chat_template, field_messages: {a: 1}}"),
            ("axolotl", "{path: a.jsonl, type: chat_template, message_property_mappings: x}"),
            ("axolotl", f"{{path: a.jsonl, split: 'train[:{'9' * 400}%]'}}"),
            ("axolotl", "{path: a.jsonl, split: {a: 1}}"),
            ("trl", "{path: a.jsonl, columns: {a: 1}}"),
            ("trl", "{path: a.jsonl, columns: [1, null, {a: 1}]}"),
            ("trl", "{path: own/er, fraction: 1, name: {a: 1}}"),
            ("trl", "{path: a.jsonl, split: [1]}"),
        ],
    )
    def test_values_of_wrong_types_are_errors(self, trainer: str, text: str) -> None:
        more = ", fraction: 1" if "fraction" in text else ""
        text = f"datasets: [{text}, {{path: b.jsonl{more}}}]"
        with pytest.raises(HgmsError):
            self.brought(trainer, text)
        assert call("import", "c.yaml", "--from", trainer).exit_code == 2
        assert not Path("mix.toml").exists()

    def test_columns_of_wrong_types_are_errors(self) -> None:
        file = {"file_name": "a.jsonl"}
        for wrong in (
            {"columns": 3},
            {"formatting": "sharegpt", "tags": [1]},
            {"columns": {"prompt": 3}},
        ):
            text = "dataset: a,b\ndataset_dir: .\n"
            with pytest.raises(HgmsError):
                self.brought("llamafactory", text, {"a": {**file, **wrong}, "b": file})
        for columns in ("3", "'{'", "{frage: {a: 1}}", "[1]"):
            text = f"dataset: ['a.jsonl#1', 'b.jsonl#1']\ncolumns: {columns}\n"
            with pytest.raises(HgmsError):
                self.brought("ms-swift", text)
        with rejects("duplicate-name", "c.yaml", "dataset", of=ConfigError):
            self.brought("llamafactory", "dataset: a,b,a\ndataset_dir: .\n", {"a": file, "b": file})

    def test_names_in_notes_are_one_line_of_the_mix_file(self) -> None:
        two = '{path: c.jsonl, type: alpaca, "x\\nbudget": 1}, {path: c.jsonl, type: alpaca}'
        notes = self.brought("axolotl", f"datasets: [{two}]").notes
        assert notes == ["not imported from datasets.0: 'x\\nbudget'"]
        assert tomllib.loads(Path("mix.toml").read_text())["budget"] == "1 step"

    def test_files_of_a_data_set_of_the_hub_are_no_local_files(self) -> None:
        Path("data").mkdir()
        Path("data/c.jsonl").write_text(Path("a.jsonl").read_text())
        text = "datasets:\n- {path: PATH, data_files: FILE}\n- {path: json, data_files: b.jsonl}\n"
        with rejects("not-supported", "c.yaml", "datasets", 0, "data_files", of=ConfigError):
            self.brought("trl", text.replace("PATH", "own/er").replace("FILE", "a.jsonl"))
        brought = self.brought("trl", text.replace("PATH", "data").replace("FILE", "c.jsonl"))
        assert brought.sources["c"] == {"path": "data/c.jsonl"}


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "from": "gpt", "content": text, "value": text}


class TestWrongInput:
    @pytest.fixture(autouse=True)
    def _there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def refused(self, *arguments: object, part: str) -> None:
        """Exit code 2, and ``part`` (a value or a place) in the message."""
        done = call(*arguments)
        assert done.exit_code == 2, done.output
        assert part in done.output
        assert "Traceback" not in done.output

    def test_a_mix_that_was_not_sampled(self, made: Path) -> None:
        text = (
            (made / "plain.toml")
            .read_text()
            .replace("seed = 1", "seed = 5")
            .replace('path = "', f'path = "{made}/')
        )
        Path("later.toml").write_text(text)
        self.refused(
            "export", "later.toml", "--to", "trl", "--out", "out", part="hgms mix sample later.toml"
        )

    def test_a_folder_that_is_none(self) -> None:
        Path("empty").mkdir()
        self.refused("export", "empty", "--to", "trl", "--out", "out", part="mix.toml (empty)")

    def test_a_sample_of_other_settings(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(made)
        self.refused(
            "export",
            "plain.toml",
            "--set",
            "sample.size=12",
            "--to",
            "trl",
            "--out",
            "out",
            part="sample)",
        )

    def test_a_place_that_is_taken(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "mine.txt").write_text("mine")
        monkeypatch.chdir(made)
        self.refused("export", "plain.toml", "--to", "trl", "--out", tmp_path, part=f"({tmp_path})")

    def test_a_folder_of_somebody_else_s_with_a_file_of_that_name(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """sft.yaml and rows/ are names that people use themselves."""
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "mine.jsonl").write_text("{}\n")
        (tmp_path / "sft.yaml").write_text("mine: 1\n")
        (tmp_path / "README.md").write_text("# My model\n")
        monkeypatch.chdir(made)
        self.refused("export", "plain.toml", "--to", "trl", "--out", tmp_path, part=f"({tmp_path})")
        assert (tmp_path / "rows" / "mine.jsonl").is_file()
        assert (tmp_path / "sft.yaml").read_text() == "mine: 1\n"

    def test_an_export_that_fails_leaves_the_earlier_one(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(made)
        out = tmp_path / "out"
        right("export", "plain.toml", "--to", "trl", "--out", out)
        (out / "tuned").mkdir()
        before = {path: path.is_dir() or path.read_bytes() for path in out.rglob("*")}
        choice = ("--set", "finetune.adapter.rank=4", "--set", "finetune.adapter.alpha=8.5")
        self.refused("export", "plain.toml", *choice, "--to", "trl", "--out", out, part="alpha=8.5")
        assert {path: path.is_dir() or path.read_bytes() for path in out.rglob("*")} == before

    def test_a_place_that_cannot_be_written(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(made)
        (tmp_path / "file").write_text("")
        done = call("export", "plain.toml", "--to", "trl", "--out", tmp_path / "file" / "out")
        assert done.exit_code == 1
        assert f"({tmp_path / 'file' / 'out'})" in done.output
        assert "Traceback" not in done.output

    def test_olmo_without_an_end_token(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By which it finds where a row ends."""
        from transformers import AutoTokenizer

        monkeypatch.chdir(made)
        tokenizer = AutoTokenizer.from_pretrained("tokenizer")
        tokenizer.eos_token = None
        tokenizer.save_pretrained(tmp_path / "endless")
        choice = ("--set", f'finetune.model={{path="nowhere", tokenizer="{tmp_path / "endless"}"}}')
        self.refused(
            "export",
            "chat.toml",
            *choice,
            "--to",
            "olmo",
            "--out",
            tmp_path / "out",
            part="(tokenizer)",
        )

    @pytest.mark.parametrize(
        ("trainer", "text", "code", "place"),
        [
            ("trl", "datasets: 3", "wrong-type", ("c.yaml", "datasets")),
            *(
                (trainer, text, "wrong-length", ("c.yaml", option))
                for trainer, text, option in (
                    # of a data set of the Hub, whose rows cannot be counted
                    ("axolotl", "datasets: [{path: owner/name, type: alpaca}]", "datasets"),
                    ("trl", "dataset_name: owner/name", "datasets"),
                    ("datasets", "datasets: [{data_files: a.jsonl}]", "datasets"),
                    ("llamafactory", "dataset: a", "dataset"),
                    ("ms-swift", "dataset: 'hf::owner/name'", "dataset"),
                    ("olmo", "sources: [{source_name: a, target_ratio: 1}]", "sources"),
                )
            ),
            ("trl", "- 1", "wrong-format", ("c.yaml",)),
            ("trl", "a: [", "wrong-format", ("c.yaml", 1)),
            ("trl", f"{ALIASES}datasets: *a39\n", "too-large", ("c.yaml",)),
            ("trl", "datasets: &a [*a]\n", "too-large", ("c.yaml",)),
            (
                "trl",
                "datasets:\n- {path: json, data_files: no.jsonl}\n- {path: own/er}",
                "missing-file",
                ("c.yaml", "datasets", 0, "data_files"),
            ),
            ("trl", "datasets:\n- {path: own/er}\n- {path: oth/er}", "not-supported", ("c.yaml",)),
            (
                "trl",
                "datasets:\n- {path: own/er, fraction: 1}\n- {path: oth/er}",
                "missing-option",
                ("c.yaml", "datasets", 1, "fraction"),
            ),
            (
                "axolotl",
                "datasets:\n- {path: own/er, weight: 3}\n- {path: own/er}",
                "out-of-range",
                ("c.yaml", "datasets", 0, "weight"),
            ),
            (
                "llamafactory",
                "dataset: a,b\ndataset_dir: nowhere",
                "missing-file",
                ("c.yaml", "dataset_dir"),
            ),
            (
                "llamafactory",
                "dataset: [1, 2]\ndataset_dir: .",
                "wrong-type",
                ("c.yaml", "dataset"),
            ),
            (
                "llamafactory",
                "dataset: a,b\ndataset_dir: .\nmax_samples: some",
                "wrong-value",
                ("c.yaml", "max_samples"),
            ),
            (
                "llamafactory",
                "dataset: a,b\ndataset_dir: .\nmax_samples: true",
                "wrong-value",
                ("c.yaml", "max_samples"),
            ),
            (
                "llamafactory",
                "dataset: a,c\ndataset_dir: .",
                "wrong-value",
                ("dataset_info.json", "c", "num_samples"),
            ),
            (
                "llamafactory",
                "dataset: a,d\ndataset_dir: .",
                "missing-option",
                ("dataset_info.json", "d"),
            ),
            (
                "llamafactory",
                "dataset: a,bb\ndataset_dir: .",
                "unknown-data-set",
                ("c.yaml", "dataset"),
            ),
            (
                "ms-swift",
                "dataset: [nobody/knows#3, a.jsonl]",
                "not-supported",
                ("c.yaml", "dataset"),
            ),
            (
                "ms-swift",
                "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [1]",
                "wrong-length",
                ("c.yaml", "interleave_prob"),
            ),
            (
                "ms-swift",
                "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [2, -1]",
                "out-of-range",
                ("c.yaml", "interleave_prob"),
            ),
            (
                "ms-swift",
                "dataset: [a.jsonl, b.jsonl]\ninterleave_prob: [0, 0]",
                "out-of-range",
                ("c.yaml", "interleave_prob"),
            ),
            ("ms-swift", "dataset: ['a.jsonl#0', 'b.jsonl#0']", "out-of-range", ("c.yaml",)),
            ("olmo", "sources: []", "wrong-type", ("c.yaml", "sources")),
            ("olmo", "sources: [{target_ratio: 1}]", "wrong-type", ("c.yaml", "sources")),
            (
                "olmo",
                "sources: [{source_name: a}, {source_name: b}]",
                "wrong-type",
                ("c.yaml", "sources", "target_ratio"),
            ),
            (
                "trl",
                "datasets:\n- {path: json, data_files: [3]}\n- {path: own/er}",
                "wrong-type",
                ("c.yaml", "datasets", 0, "data_files"),
            ),
            ("datasets", "datasets: []", "wrong-type", ("c.yaml", "datasets")),
            (
                "datasets",
                "datasets: [{data_files: c.yaml}, {data_files: c.yaml}]\nprobabilities: [1]",
                "wrong-length",
                ("c.yaml", "probabilities"),
            ),
        ],
    )
    def test_a_configuration_that_cannot_be_read(
        self, trainer: str, text: str, code: str, place: tuple[str | int, ...]
    ) -> None:
        from hgms_mix.exchange.folder import TRAINERS as known
        from hgms_mix.exchange.import_mix import bring

        for name in "ab":
            Path(f"{name}.jsonl").write_text('{"instruction": "p", "output": "c"}\n')
        info: dict[str, Any] = {name: {"file_name": f"{name}.jsonl"} for name in "ab"}
        info |= {"c": {**info["a"], "num_samples": "many"}, "d": {"file_name": 3}}
        Path("dataset_info.json").write_text(json.dumps(info))
        Path("c.yaml").write_text(text)
        first, *inner = place
        place = (str(Path.cwd() / first) if first == "dataset_info.json" else first, *inner)
        with rejects(code, *place, of=ConfigError) as caught:
            bring(known[trainer], Path("c.yaml"), Path("mix.toml"))
        near = ("b",) if code == "unknown-data-set" else ()
        assert caught.value.did_you_mean == near
        self.refused("import", "c.yaml", "--from", trainer, part=f"({dotted(place)})")
        assert not Path("mix.toml").exists()
