"""A sample handed to other trainers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.exports import rows_in, sample_of, write
from support.helpers import rejects

from hgms_mix.exchange.trl import FILES

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'hgms[llm]'")
pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'hgms[llm]'")


def texts_of(folder: Path) -> Counter[str]:
    """What the rows of an export say, whatever they are called there: answers with what was
    asked.
    """
    every = (
        row.get("messages") or [*row.get("prompt", []), *row.get("completion", [])]
        for row in rows_in(folder)
    )
    return Counter("|".join(turn["content"] for turn in turns) for turns in every)


def test_an_export_holds_the_sample_with_its_shares(here: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    assert all((out / name).exists() for name in FILES)
    turns = (row["messages"] for rows in sample_of().rows.values() for row in rows)
    assert texts_of(out) == Counter("|".join(turn["content"] for turn in row) for row in turns)


def test_a_folder_with_an_export_is_rejected(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out)
    with rejects("file-exists", str(out)):
        write(out)


def test_a_named_template_is_written_into_the_rows_as_the_mix_tokenised_them(
    here: Path, tmp_path: Path
) -> None:
    """Prompt and completion, put together, are the tokens and masks of the mix's own table."""
    out = write(tmp_path / "out", "plain")
    sample = sample_of("plain")
    tables = sample.config.task.tables(sample.tokenizer, "sources")

    def ids(text: str) -> list[int]:
        return sample.tokenizer(text, add_special_tokens=False)["input_ids"]

    kept = [(tables[name], row["row"]) for name, rows in sample.rows.items() for row in rows]
    rows = [table.row(table.places[row]) for table, row in kept]
    assert [
        [
            (token, learned)
            for text, learned in ((row["prompt"], False), (row["completion"], True))
            for token in ids(text)
        ]
        for row in rows_in(out)
    ] == [list(zip(tokens.tolist(), mask.tolist(), strict=True)) for tokens, mask in rows]


def test_a_place_that_is_taken_is_rejected(here: Path, tmp_path: Path) -> None:
    """sft.yaml is a name that people use themselves."""
    mine = tmp_path / "sft.yaml"
    mine.write_text("mine: 1\n")
    with rejects("file-exists", str(tmp_path)):
        write(tmp_path, "plain")
    assert mine.read_text() == "mine: 1\n"
