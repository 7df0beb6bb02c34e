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

import hgms_mix.exchange
from hgms.runs import DiskError
from hgms_core import ConfigError
from hgms_mix.exchange.folder import TRAINERS, export
from hgms_mix.exchange.import_mix import bring
from hgms_mix.exchange.trainer import differences
from hgms_mix.exchange.with_olmo import OLMO

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")

WIDE = ("finetune.adapter.rank=4", "finetune.adapter.alpha=8.5")
FILES = {
    "axolotl": "axolotl.yaml",
    "datasets": "interleave.json",
    "llamafactory": "train.yaml",
    "ms-swift": "sft.yaml",
    "olmo": "mixture.yaml",
    "trl": "sft.yaml",
}


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
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def table(folder: Path, trainer: str) -> Any:
    return yaml.safe_load((folder / FILES[trainer]).read_text())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_export_holds_the_sample_and_is_imported_with_its_shares(
    here: Path, tmp_path: Path, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = TRAINERS[trainer]
    out = write(tmp_path / "out", trainer=trainer)
    text = (out / "README.md").read_text()
    assert text.startswith(f"# chat, for {trainer}\n")
    assert {known.command in text, known.meaning in text} == {True}
    assert all((out / name).exists() for name in known.files)
    own = Path(hgms_mix.exchange.__file__).parent / "README.md"
    assert f"| `{trainer}` | {known.meaning} |" in own.read_text()
    turns = (row["messages"] for part in sample_of().parts for row in part.rows)
    assert texts_of(out) == Counter("|".join(turn["content"] for turn in row) for row in turns)
    export(sample_of(sample_folder()), known, tmp_path / "of folder")
    assert files_of(tmp_path / "of folder") == files_of(out)

    monkeypatch.chdir(tmp_path)
    bring(known, Path("out", FILES[trainer]), Path("back.toml"), str(here / "validation.jsonl"))
    back = Path("back.toml").read_text()
    mixture = list(tomllib.loads(back)["method"]["mixture"].values())
    # with olmo characters stand for tokens, which chat templates add to
    assert mixture == pytest.approx([0.7, 0.3], abs=0.03 if trainer == "olmo" else 1e-12)
    if trainer == "axolotl":
        size = "n_layer = 1, n_embd = 8, n_head = 2, n_positions = 64"
        model = f'config = {{ model_type = "gpt2", {size} }}\ntokenizer = "{here / "tokenizer"}"'
        back = back.replace('path = "MODEL"', model).replace("size = 1000", "size = 30")
        Path("back.toml").write_text(back)
        report = report_of("mix", "sample", "back.toml", sets=["task.max_length=64"])
        assert sorted(row["rows"] for row in report["sources"]) == [9, 21]


def test_the_command_says_what_it_wrote_and_where_the_mix_trains_otherwise(
    here: Path, tmp_path: Path
) -> None:
    words = ("mix", "export", "chat.toml", "--to", "datasets", "--out", tmp_path / "for it")
    done = report_of(*words)
    assert {row["source"]: row["rows"] for row in done["sources"]} == {"sums": 21, "dots, 2": 9}
    assert done["notes"] == []
    for epochs, said in ((0, "trains nothing"), (2, "goes on with")):
        sets = [f"finetune.epochs={epochs}", "finetune.start=reweighted"]
        [note] = differences(sample_of("chat", sets))
        assert said in note
        assert note in right(*words, sets=sets).stdout
        assert f"- {note}\n" in (tmp_path / "for it" / "README.md").read_text()
        out = write(tmp_path / str(epochs), sets=sets)
        assert table(out, "trl")["num_train_epochs"] == max(1, epochs)


@pytest.mark.parametrize(
    ("name", "trainer", "source"), [("plain", "olmo", "sums"), ("alpaca", "trl", "alpaca")]
)
def test_sources_that_changed_since_the_sample_was_drawn_are_not_read(
    here: Path, tmp_path: Path, name: str, trainer: str, source: str, request: pytest.FixtureRequest
) -> None:
    """Row 7 of a file is another row after an edit: tokens, and instructions with an input, are
    read anew.
    """
    file = here / f"{source}.jsonl"
    before = file.read_text()
    request.addfinalizer(lambda: file.write_text(before))
    file.write_text("".join(sorted(before.splitlines(keepends=True), reverse=True)))
    with rejects("data-changed", "task", "sources", "sums"):
        export(sample_of(sample_folder(name)), TRAINERS[trainer], tmp_path / "out")
    with rejects("missing-file"):  # by its data, the file is another mix
        sample_of(name)


def test_a_scale_of_lora_that_trainers_cannot_read_is_rejected_and_leaves_the_earlier_export(
    here: Path, tmp_path: Path
) -> None:
    for trainer in ("axolotl", "llamafactory", "ms-swift", "trl"):
        out = write(tmp_path / trainer, "plain", trainer)
        (out / "tuned").mkdir()
        before = files_of(out)
        with rejects("not-supported", "adapter", "alpha", of=ConfigError):
            write(out, "plain", trainer, WIDE)
        assert (files_of(out), (out / "tuned").is_dir()) == (before, True)
    write(tmp_path / "datasets", "plain", "datasets", WIDE)  # which knows no adapter


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
    for files in (["../other"], ["README.md"]):
        record.write_text(json.dumps({**listed, "files": files}))
        before = files_of(tmp_path)
        with rejects("file-exists"):
            write(out)
        assert files_of(tmp_path) == before


def test_a_sample_of_the_validation_sets_replaces_an_earlier_export(
    here: Path, tmp_path: Path
) -> None:
    sets = ("sample.of=validation", "sample.size=5")
    right("mix", "sample", "plain.toml", "--seed", "2", sets=sets)
    out = write(tmp_path / "out", "plain", "olmo")
    write(out, "plain", "olmo", sets, seed=2)
    assert set(texts_of(out)) <= {f"5 + {i} =|{5 + i}" for i in range(8)}
    assert len(rows_in(out)) == 5
    names = {"labels_mask_part_0000.npy", "token_ids_part_0000.npy"}
    assert {path.name for path in (out / "tokens").iterdir()} == names


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

    def ids(text: str) -> list[int]:
        return sample.tokenizer(text, add_special_tokens=False)["input_ids"]

    for part in sample.parts:
        table = tables[part.name]
        rows = [table.row(table.places[row["row"]]) for row in part.rows]
        assert [
            [(token, piece["label"]) for piece in row["segments"] for token in ids(piece["text"])]
            for row in lines(out / "rows" / f"{part.stem}.jsonl")
        ] == [list(zip(tokens.tolist(), mask.tolist(), strict=True)) for tokens, mask in rows]


def test_configurations_have_what_each_trainer_documents(here: Path, tmp_path: Path) -> None:
    """By the trainers' own argument classes, written down here from their documentation."""
    outs = {name: write(tmp_path / name, trainer=name) for name in FILES}
    tables = {name: table(out, name) for name, out in outs.items() if name != "datasets"}
    assert tables["axolotl"]["datasets"][0] == {
        "path": "rows/sums.jsonl",
        "ds_type": "json",
        "type": "chat_template",
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }
    assert tables["llamafactory"]["dataset"] == "sums,dots-2"
    assert tables["llamafactory"]["mix_strategy"] == "concat"
    info = json.loads((outs["llamafactory"] / "dataset_info.json").read_text())
    assert all((outs["llamafactory"] / x["file_name"]).is_file() for x in info.values())
    assert {x["formatting"] for x in info.values()} == {"sharegpt"}
    assert tables["ms-swift"]["dataset"] == ["rows/sums.jsonl#21", "rows/dots-2.jsonl#9"]
    ratios = [source["target_ratio"] for source in tables["olmo"]["sources"]]
    assert sum(ratios) == pytest.approx(1, abs=1e-12)


def test_olmo_finds_the_rows_by_their_end_tokens(here: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out", trainer="olmo")
    sample = sample_of()
    tables = sample.config.task.tables(sample.tokenizer, "sources")
    sources = table(out, "olmo")["sources"]
    lengths = []
    for part, source in zip(sample.parts, sources, strict=True):
        path = out / source["paths"][0]
        flat = np.memmap(path, mode="r", dtype=np.uint16)
        mask_path = path.with_name(path.name.replace("token_ids", "labels_mask"))
        masks = np.memmap(mask_path, mode="r", dtype=np.bool_)
        lengths.append(len(flat))
        stops = (flat == sample.tokenizer.eos_token_id).nonzero()[0] + 1
        rows = [tables[part.name].row(tables[part.name].places[row["row"]]) for row in part.rows]
        pieces = [piece.tolist() for piece in np.split(flat, stops)[:-1]]
        assert pieces == [tokens.tolist() for tokens, _ in rows]
        assert masks.tolist() == [learned for _, mask in rows for learned in mask.tolist()]
    shares = [length / sum(lengths) for length in lengths]
    assert [source["target_ratio"] for source in sources] == pytest.approx(shares)
    # SmolLM2's <|im_end|> also ends the turns of the user
    loop = "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}"
    tail = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    sample.tokenizer.chat_template = loop + sample.tokenizer.eos_token + tail
    notes = OLMO.write(sample, tmp_path)
    assert any(note.startswith("30 of 30 rows have the end token within") for note in notes)


def test_a_source_without_rows_is_named(here: Path) -> None:
    sets = ['method.mixture={sums=0.9999, "dots, 2"=0.0001}']
    right("mix", "sample", "chat.toml", "--seed", "3", sets=sets)
    [note] = differences(sample_of("chat", sets, seed=3))
    assert note.startswith("No row is from `dots, 2`: its weight 0.0001 is too small for 30 rows")


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
    # sft.yaml is a name that people use themselves
    mine = tmp_path / "sft.yaml"
    mine.write_text("mine: 1\n")
    with rejects("file-exists", str(tmp_path)):
        write(tmp_path, "plain")
    assert files_of(tmp_path) == {"sft.yaml": b"mine: 1\n"}
    with rejects("cannot-write", str(mine / "out"), of=DiskError):
        write(mine / "out", "plain")
