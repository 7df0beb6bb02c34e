"""A sample handed to other trainers."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.exports import lines, rows_in, sample_of, write
from support.helpers import rejects
from support.small_mixes import report_of, right

from hgms.runs import DiskError
from hgms_core import ConfigError
from hgms_mix.exchange.folder import TRAINERS, export
from hgms_mix.exchange.import_mix import bring
from hgms_mix.exchange.trainer import differences
from hgms_mix.exchange.with_olmo import OLMO

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")

VALIDATION = ("sample.of=validation", "sample.size=5")
WIDE = ("finetune.adapter.rank=4", "finetune.adapter.alpha=8.5")


def texts_of(folder: Path) -> Counter[str]:
    """What the rows of an export say, whatever they are called there: answers with what was
    asked.
    """
    every = (
        row.get("messages") or [*row.get("prompt", []), *row.get("completion", [])]
        for row in rows_in(folder)
    )
    return Counter("|".join(turn["content"] for turn in turns) for turns in every)


def sample_folder(name: str = "chat") -> Path:
    return next(Path("runs").glob(f"{name}/*/seed-1"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_export_holds_the_sample_and_names_its_command(
    here: Path, tmp_path: Path, trainer: str
) -> None:
    out = write(tmp_path / "out", trainer=trainer)
    text = (out / "README.md").read_text()
    known = TRAINERS[trainer]
    assert text.startswith(f"# chat, for {trainer}\n")
    assert known.command in text
    assert known.meaning in text
    assert all((out / name).exists() for name in known.files)
    turns = (row["messages"] for part in sample_of().parts for row in part.rows)
    assert texts_of(out) == Counter("|".join(turn["content"] for turn in row) for row in turns)


def test_the_command_says_what_it_wrote_and_how_to_train(here: Path, tmp_path: Path) -> None:
    words = ("mix", "export", "chat.toml", "--to", "datasets", "--out", tmp_path / "for it")
    sets = ["finetune.epochs=0", "finetune.start=reweighted"]
    shown = right(*words, sets=sets).stdout
    assert f"cd '{tmp_path}/for it' && python load.py" in shown
    assert "trains nothing on these rows" in shown
    done = report_of(*words)
    assert {row["source"]: row["rows"] for row in done["sources"]} == {"sums": 21, "dots, 2": 9}
    assert done["notes"] == []


@pytest.mark.parametrize(
    ("epochs", "start", "said"),
    [(0, "reweighted", "trains nothing"), (2, "reweighted", "goes on with"), (2, "fresh", "")],
)
def test_an_export_says_where_the_mix_trains_otherwise(
    here: Path, tmp_path: Path, epochs: int, start: str, said: str
) -> None:
    sets = (f"finetune.epochs={epochs}", f"finetune.start={start}")
    notes = differences(sample_of("chat", sets))
    assert [said in note for note in notes] == [True] * bool(said)
    for trainer in TRAINERS:
        out = write(tmp_path / trainer, trainer=trainer, sets=sets)
        assert all(f"- {note}\n" in (out / "README.md").read_text() for note in notes)
        for file in out.glob("*.yaml"):
            table = yaml.safe_load(file.read_text())
            keys = {"num_epochs", "num_train_epochs"} & set(table)
            assert {table[key] for key in keys} <= {max(1, epochs)}


def test_a_folder_of_hgms_mix_gives_the_export_of_its_file(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is written from."""
    of_file = files_of(write(tmp_path / "file", trainer="axolotl"))
    folder = sample_folder().resolve()
    links = [folder / name for name in ("sums.jsonl", "dots.jsonl", "validation.jsonl")]
    for link in [*links, folder / "tokenizer"]:
        link.symlink_to(here / link.name)
    monkeypatch.chdir(folder)
    export(sample_of(Path()), TRAINERS["axolotl"], tmp_path / "folder")
    for link in [*links, folder / "tokenizer"]:
        link.unlink()
    assert files_of(tmp_path / "folder") == of_file


@pytest.mark.parametrize(("name", "trainer"), [("plain", "olmo"), ("alpaca", "trl")])
def test_sources_that_changed_since_the_sample_was_drawn_are_not_read(
    here: Path, tmp_path: Path, name: str, trainer: str
) -> None:
    """Row 7 of a file is another row after an edit: tokens, and instructions with an input, are
    read anew.
    """
    file = Path("sums.jsonl" if name == "plain" else "alpaca.jsonl")
    before = file.read_text()
    file.write_text("".join(sorted(before.splitlines(keepends=True), reverse=True)))
    try:
        with rejects("data-changed", "task", "sources", "sums"):
            export(sample_of(sample_folder(name)), TRAINERS[trainer], tmp_path / "out")
        with rejects("missing-file") as caught:  # by its data, the file is another mix
            sample_of(name)
        assert f"hgms mix sample {name}.toml" in str(caught.value.hint)
    finally:
        file.write_text(before)


def test_a_scale_of_lora_that_trainers_cannot_read_is_not_cut(here: Path, tmp_path: Path) -> None:
    for trainer in ("axolotl", "llamafactory", "ms-swift", "trl"):
        with rejects("not-supported", "adapter", "alpha", of=ConfigError):
            write(tmp_path / trainer, "plain", trainer, WIDE)
    write(tmp_path / "datasets", "plain", "datasets", WIDE)  # which knows no adapter


def test_a_sample_of_the_validation_sets_leaves_nothing_of_an_earlier_export(
    here: Path, tmp_path: Path
) -> None:
    right("mix", "sample", "plain.toml", "--seed", "2", sets=VALIDATION)
    out = write(tmp_path / "out", "plain", "olmo")
    write(out, "plain", "olmo", VALIDATION, seed=2)
    assert set(texts_of(out)) <= {f"5 + {i} =|{5 + i}" for i in range(8)}
    assert len(rows_in(out)) == 5
    assert sorted(path.name for path in (out / "tokens").iterdir()) == [
        "labels_mask_part_0000.npy",
        "token_ids_part_0000.npy",
    ]


def test_an_export_takes_away_only_what_one_has_written(here: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    (out / ".export.part" / "rows").mkdir(parents=True)  # of one that was killed
    write(out)
    assert not (out / ".export.part").exists()
    mine, stale = out / "rows" / "mine.jsonl", out / "rows" / "gone.jsonl"
    for file in (mine, stale, other):
        file.write_text("{}\n")
    record = out / ".export.json"
    listed = json.loads(record.read_text())
    record.write_text(json.dumps({**listed, "files": [*listed["files"], "rows/gone.jsonl"]}))
    write(out)
    assert (mine.exists(), stale.exists()) == (True, False)
    assert json.loads(record.read_text()) == listed

    record.write_text(json.dumps({**listed, "files": ["../other"]}))
    with rejects("file-exists", str(out)):
        write(out)
    assert other.exists()
    record.write_text(json.dumps({**listed, "files": ["README.md"]}))
    before = files_of(out)
    with rejects("file-exists") as caught:  # and not the list
        write(out)
    assert caught.value.place[0] in {str(out / name) for name in listed["files"]}
    assert files_of(out) == before


def test_an_export_that_fails_leaves_the_earlier_one(here: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out", "plain")
    (out / "tuned").mkdir()
    before = files_of(out)
    with rejects("not-supported", "adapter", "alpha"):
        write(out, "plain", sets=WIDE)
    assert files_of(out) == before
    assert (out / "tuned").is_dir()


@pytest.mark.parametrize("name", ["chat", "plain"])
def test_datasets_interleaves_each_row_once(here: Path, tmp_path: Path, name: str) -> None:
    out = write(tmp_path / "out", name, "datasets")
    assert json.loads((out / "interleave.json").read_text())["probabilities"] == [0.7, 0.3]
    place: dict[str, Any] = {"__file__": str(out / "load.py")}
    exec((out / "load.py").read_text(), place)  # what it wrote is what is run
    loaded = place["load"]().to_list()
    assert sorted(map(str, loaded)) == sorted(map(str, rows_in(out)))
    assert len(loaded) == 30
    assert name == "chat" or all(row["completion"].endswith("<eos>") for row in loaded)


@pytest.mark.parametrize("name", ["plain", "alpaca"])
def test_named_templates_are_written_into_the_rows_as_the_mix_tokenised_them(
    here: Path, tmp_path: Path, name: str
) -> None:
    """Segments of axolotl, put together, are the tokens and masks of the mix's own table."""
    out = write(tmp_path / "out", name, "axolotl")
    sample = sample_of(name)
    tables = sample.config.task.tables(sample.tokenizer, "sources")
    for part in sample.parts:
        table = tables[part.name]
        for row, written in zip(part.rows, lines(out / "rows" / f"{part.stem}.jsonl"), strict=True):
            pieces = [
                (token, segment["label"])
                for segment in written["segments"]
                for token in sample.tokenizer(segment["text"], add_special_tokens=False)[
                    "input_ids"
                ]
            ]
            tokens, mask = table.row(table.places[row["row"]])
            assert pieces == list(zip(tokens.tolist(), mask.tolist(), strict=True))


def test_prompt_and_completion_of_every_trainer_are_the_same_words(
    here: Path, tmp_path: Path
) -> None:
    names = ("trl", "llamafactory", "ms-swift")
    outs = {name: write(tmp_path / name, "plain", name) for name in names}
    trl, factory, swift = (lines(out / "rows" / "sums.jsonl") for out in outs.values())
    assert trl == factory
    end = trl[0]["completion"].removeprefix(swift[0]["response"])
    assert end.startswith("<")
    assert [(row["query"], row["response"] + end) for row in swift] == [
        (row["prompt"], row["completion"]) for row in trl
    ]
    assert yaml.safe_load((outs["llamafactory"] / "train.yaml").read_text())["template"] == "empty"
    swift_table = yaml.safe_load((outs["ms-swift"] / "sft.yaml").read_text())
    assert swift_table["use_chat_template"] is False


def test_configurations_have_what_each_trainer_documents(here: Path, tmp_path: Path) -> None:
    """Keys and types by the trainers' own argument classes (axolotl's schemas, LLaMA-Factory's and
    ms-swift's arguments, OLMo-core's source mixture), written down here from their documentation.
    """

    def table(trainer: str, file: str) -> Any:
        return yaml.safe_load((write(tmp_path / trainer, trainer=trainer) / file).read_text())

    axolotl = table("axolotl", "axolotl.yaml")
    assert axolotl["datasets"][0] == {
        "path": "rows/sums.jsonl",
        "ds_type": "json",
        "type": "chat_template",
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }
    assert set(axolotl) >= {
        *("base_model", "micro_batch_size", "gradient_accumulation_steps", "num_epochs"),
        *("learning_rate", "sequence_len", "optimizer"),
    }
    factory = table("llamafactory", "train.yaml")
    folder = tmp_path / "llamafactory"
    info = json.loads((folder / "dataset_info.json").read_text())
    assert factory["dataset"].split(",") == list(info) == ["sums", "dots-2"]
    assert all((folder / factory["dataset_dir"] / x["file_name"]).is_file() for x in info.values())
    assert {x["formatting"] for x in info.values()} == {"sharegpt"}
    role = lines(folder / "rows" / "sums.jsonl")[0]["messages"][-1]["role"]
    assert info["sums"]["tags"]["assistant_tag"] == role
    assert factory["mix_strategy"] == "concat"
    swift = table("ms-swift", "sft.yaml")
    assert swift["dataset"] == ["rows/sums.jsonl#21", "rows/dots-2.jsonl#9"]
    assert swift["tuner_type"] == "lora"
    olmo = table("olmo", "mixture.yaml")["sources"]
    assert sum(source["target_ratio"] for source in olmo) == pytest.approx(1, abs=1e-12)
    assert all(
        source["target_ratio"] > 0 and source["max_repetition_ratio"] >= 1 for source in olmo
    )


def test_olmo_finds_the_rows_by_their_end_tokens(here: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out", trainer="olmo")
    sample = sample_of()
    tables = sample.config.task.tables(sample.tokenizer, "sources")
    sources = yaml.safe_load((out / "mixture.yaml").read_text())["sources"]
    lengths = []
    for part, source in zip(sample.parts, sources, strict=True):
        path = source["paths"][0]
        flat = np.memmap(out / path, mode="r", dtype=np.uint16)
        mask_path = out / path.replace("token_ids", "labels_mask")
        masks = np.memmap(mask_path, mode="r", dtype=np.bool_)
        lengths.append(len(flat))
        stops = (flat == sample.tokenizer.eos_token_id).nonzero()[0] + 1
        table = tables[part.name]
        rows = [table.row(table.places[row["row"]]) for row in part.rows]
        assert [piece.tolist() for piece in np.split(flat, stops)[:-1]] == [
            tokens.tolist() for tokens, _ in rows
        ]
        assert masks.tolist() == [learned for _, mask in rows for learned in mask.tolist()]
    shares = [length / sum(lengths) for length in lengths]
    assert [source["target_ratio"] for source in sources] == pytest.approx(shares)


def test_olmo_counts_rows_whose_other_turns_end_with_the_end_token(
    here: Path, tmp_path: Path
) -> None:
    """SmolLM2's <|im_end|> also ends the turns of the user."""
    sample = sample_of()
    end = sample.tokenizer.eos_token
    every = f"{{% for turn in messages %}}<{{{{ turn['role'] }}}}>{{{{ turn['content'] }}}}{end}"
    tail = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    sample.tokenizer.chat_template = every + tail
    notes = OLMO.write(sample, tmp_path)
    assert any(note.startswith("30 of 30 rows have the end token within") for note in notes)
    assert not any("several answers" in note for note in notes)
    sample.tokenizer.eos_token = None  # by which it finds where a row ends
    with rejects("missing-token", "tokenizer", of=ConfigError):
        OLMO.write(sample, tmp_path / "endless")


def test_a_source_without_rows_is_named(here: Path) -> None:
    sets = ['method.mixture={sums=0.9999, "dots, 2"=0.0001}']
    right("mix", "sample", "chat.toml", "--seed", "3", sets=sets)
    [note] = differences(sample_of("chat", sets, seed=3))
    assert note.startswith("No row is from `dots, 2`: its weight 0.0001 is too small for 30 rows")


FILES = {
    "axolotl": "axolotl.yaml",
    "datasets": "interleave.json",
    "llamafactory": "train.yaml",
    "ms-swift": "sft.yaml",
    "olmo": "mixture.yaml",
    "trl": "sft.yaml",
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_there_and_back(
    here: Path, tmp_path: Path, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported, imported, drawn again: the same rows in the same shares."""
    write(tmp_path / "out", trainer=trainer)
    monkeypatch.chdir(tmp_path)
    origin = Path("out", FILES[trainer])
    bring(TRAINERS[trainer], origin, Path("back.toml"), str(here / "validation.jsonl"))
    text = Path("back.toml").read_text()
    mixture = tomllib.loads(text)["method"]["mixture"]
    assert sum(mixture.values()) == pytest.approx(1)
    if trainer == "olmo":  # characters stand for tokens, which chat templates add to
        assert mixture["sums"] == pytest.approx(0.7, abs=0.03)
    else:
        assert list(mixture.values()) == pytest.approx([0.7, 0.3], abs=1e-12)
    if trainer == "axolotl":
        size = "n_layer = 1, n_embd = 8, n_head = 2, n_positions = 64"
        model = f'config = {{ model_type = "gpt2", {size} }}'
        text = text.replace('path = "MODEL"', f'{model}\ntokenizer = "{here / "tokenizer"}"')
        Path("back.toml").write_text(text.replace("size = 1000", "size = 30"))
        report = report_of("mix", "sample", "back.toml", sets=["task.max_length=64"])
        assert sorted(row["rows"] for row in report["sources"]) == [9, 21]


def test_the_readme_says_what_a_weight_means_in_the_words_of_an_export() -> None:
    import hgms_mix.exchange

    text = (Path(hgms_mix.exchange.__file__).parent / "README.md").read_text()
    for trainer in TRAINERS.values():
        assert f"| `{trainer.name}` | {trainer.meaning} |" in text


def test_a_sample_that_is_not_there_or_a_place_that_is_taken_is_rejected(
    here: Path, tmp_path: Path
) -> None:
    with rejects("missing-file") as caught:
        sample_of("plain", seed=5)
    assert "hgms mix sample plain.toml" in str(caught.value.hint)
    with rejects("missing-file", str(tmp_path)):
        sample_of(tmp_path)
    with rejects("other-settings", str(sample_folder("plain") / "sample")):
        sample_of("plain", ["sample.size=12"])
    # sft.yaml and rows/ are names that people use themselves
    (tmp_path / "rows").mkdir()
    for name in ("rows/mine.jsonl", "sft.yaml", "README.md"):
        (tmp_path / name).write_text("mine: 1\n")
    before = files_of(tmp_path)
    with rejects("file-exists", str(tmp_path)):
        write(tmp_path, "plain")
    assert files_of(tmp_path) == before
    with rejects("cannot-write", str(tmp_path / "sft.yaml" / "out"), of=DiskError):
        write(tmp_path / "sft.yaml" / "out", "plain")
