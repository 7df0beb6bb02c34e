"""The cache of token tables: what identifies a table, and what damage does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from attrs import evolve
from support.helpers import rejects
from support.processes import forked
from support.source_files import source_of
from support.token_tables import same, table_of

import hgms_mix.lm.tokens
from hgms.store import DiskError, Folder
from hgms_core.errors import DataError
from hgms_mix.lm.store import lock
from hgms_mix.lm.tokenizers import byte_tokenizer

pytest.importorskip("transformers", reason="transformers is not installed")

ROWS = [("Q", "A"), ("What is it?", "A long answer."), ("R", " ")]


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Called when a source is read while a table is made."""
    watching = Mock(wraps=hgms_mix.lm.tokens.index_of)
    monkeypatch.setattr(hgms_mix.lm.tokens, "index_of", watching)
    return watching


def test_a_table_is_made_once_and_then_mapped_from_its_file(tmp_path: Path, reading: Mock) -> None:
    source = source_of(tmp_path / "a.jsonl", ROWS)
    cache = tmp_path / "cache"
    folders = (tmp_path / "other", cache, cache)
    plain, first, second = (table_of(source, cache_dir=folder) for folder in folders)
    assert same(plain, first)
    assert same(first, second)
    (file,) = cache.glob("*/tokens.bin")
    assert file.parent.name == first.digest == second.digest == plain.digest
    if sys.platform == "linux":
        assert str(file) in Path("/proc/self/maps").read_text()
    assert reading.call_count == 2  # once per cache


def test_whatever_changes_the_tokens_makes_another_table(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", ROWS)
    tokenizers = [byte_tokenizer() for _ in range(3)]
    tokenizers[0].add_tokens(["<extra>"])
    for tokenizer, end in zip(tokenizers[1:], ("<eos>", "|<eos>"), strict=True):
        text = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
        tokenizer.chat_template = text
    tables = [
        table_of(source),
        table_of(source_of(tmp_path / "b.jsonl", [*ROWS, ("Q2", "A2")])),
        *(
            table_of(evolve(source, **change))
            for change in ({"rows": 2}, {"completion": "."}, {"shuffle_seed": 1})
        ),
        *(
            table_of(source, **change)
            for change in ({"max_length": 65}, {"too_long": "truncate"}, {"template": "chatml"})
        ),
        table_of(source, tokenizers[0]),
        *(table_of(source, tokenizer, template="model") for tokenizer in tokenizers[1:]),
    ]
    assert len({table.digest for table in tables}) == len(tables)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data, other: data[:-9],
        lambda data, other: data[:5],
        lambda data, other: b"",
        lambda data, other: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
        lambda data, other: other,
    ],
    ids=["shorter", "headless", "empty", "one bit", "another table"],
)
def test_a_damaged_entry_is_named_and_made_anew(
    tmp_path: Path,
    reading: Mock,
    damage: Callable[[bytes, bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = source_of(tmp_path / "a.jsonl", ROWS)
    cache = tmp_path / "cache"
    tables = [table_of(item, cache_dir=cache) for item in (source, evolve(source, rows=1))]
    file, other = (cache / table.digest / "tokens.bin" for table in tables)
    file.write_bytes(damage(file.read_bytes(), other.read_bytes()))
    whole = table_of(source, cache_dir=tmp_path / "other")
    assert [same(whole, table_of(source, cache_dir=cache)) for _ in "12"] == 2 * [True]
    assert reading.call_count == 2 + 1 + 1  # in the other cache, and once for the damaged entry
    (warned,) = caplog.messages
    assert str(file.parent) in warned


def test_an_entry_does_not_hide_bad_rows_from_a_stricter_source(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [*ROWS, "{oops"], max_bad_rows=1)
    assert table_of(source, cache_dir=tmp_path / "cache").report.bad == 1
    with rejects("wrong-row", "s", "path", of=DataError):
        table_of(evolve(source, max_bad_rows=0), cache_dir=tmp_path / "cache")


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files, which writing meets as it meets a full disk."""
    import resource

    source = source_of(
        tmp_path / "a.jsonl", [(f"What is {i}?", 4 * "A number. ") for i in range(400)]
    )
    cache = tmp_path / "cache"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(DiskError, match=str(cache)):
            table_of(source, cache_dir=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(cache.rglob("*.part"))
    assert table_of(source, cache_dir=cache).size == 400


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_waits_for_another_that_makes_the_same_entry(tmp_path: Path) -> None:
    entry = Folder(tmp_path / "cache" / "key", "key")
    ends, begins = os.pipe()

    def make() -> None:
        with lock(entry):
            os.write(begins, b"held")
            time.sleep(0.3)
            entry.write("arrays", b"made")

    process = forked(make)
    assert os.read(ends, 4) == b"held"
    with lock(entry):
        assert (entry.path / "arrays").read_bytes() == b"made"
    os.waitpid(process, 0)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key"]
