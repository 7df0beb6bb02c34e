"""Sources at size: read row by row, in parts, on several processes, broken off and gone on with."""

from __future__ import annotations

import importlib
import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from support.fakes import Site
from support.helpers import rejects

import hgms_mix.lm.parts
import hgms_mix.lm.store
import hgms_mix.lm.tokens
from hgms_core import DataError, Key
from hgms_mix.lm import read_examples
from hgms_mix.lm.parts import in_parts
from hgms_mix.lm.rows import examples_at, index_of
from hgms_mix.lm.sources import Source
from hgms_mix.lm.table import TokenTable
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.lm.tokens import Tokenising, drawn_table, token_table

pytest.importorskip("transformers", reason="transformers is not installed")
LEAVES = ("tokens", "mask", "offsets", "rows", "keys")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """95 rows, some too long, blank or bad, in parts of ten."""
    monkeypatch.setattr(hgms_mix.lm.parts, "ROWS", 10)
    with (tmp_path / "rows.jsonl").open("w") as stream:
        for row in range(95):
            answer = " " if row % 20 == 3 else "long " * 20 if row % 11 == 5 else f"answer {row}"
            stream.write(
                "{oops\n"
                if row == 42
                else json.dumps({"prompt": f"Row {row}?", "completion": answer}) + "\n"
            )
    return Source(path=str(tmp_path / "rows.jsonl"), max_bad_rows=1)


def table_of(source: Source, cache: Path | None = None, **options: Any) -> TokenTable:
    return token_table(
        "s", source, byte_tokenizer(), template="plain", max_length=40, cache_dir=cache, **options
    )


def same(left: TokenTable, right: TokenTable) -> bool:
    return (
        all(getattr(left, leaf).equal(getattr(right, leaf)) for leaf in LEAVES)
        and left.report == right.report
    )


@pytest.mark.parametrize(
    "choice", [{}, {"skip": 7, "rows": 61}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "rows": 40}]
)
def test_parts_on_disk_make_the_table_that_memory_makes(
    source: Source, tmp_path: Path, choice: dict[str, int]
) -> None:
    source = evolve(source, **choice)
    expected = [example for example in read_examples("s", source) if not example.blank]
    short = [row for row in expected if len(f"{row.messages[0].text}\n{row.messages[1].text}") < 40]
    for cache in (None, tmp_path / "cache"):
        table = table_of(source, cache)
        assert table.rows.tolist() == [example.row for example in short]
        written = [
            bytes(table.row(position)[0][:-1].tolist()).decode() for position in range(table.size)
        ]
        assert written == [
            f"{example.messages[0].text}\n{example.messages[1].text}" for example in short
        ]
        assert table.report.too_long == len(expected) - len(short)
        assert table.report.looked == len(expected)
    assert same(table_of(source), table)
    left = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert left <= {".safetensors", ".index", ".lease"}  # no parts


def test_the_index_names_the_rows_that_have_an_answer(source: Source, tmp_path: Path) -> None:
    source = evolve(source, shuffle_seed=5, rows=70)
    expected = [example for example in read_examples("s", source) if not example.blank]
    for index in (
        index_of("s", source),
        index_of("s", source, tmp_path),
        index_of("s", source, tmp_path),
    ):
        assert index.rows.tolist() == [example.row for example in expected]
        assert (index.report.total, index.report.bad, index.report.examples) == (95, 1, 70)
        assert index.report.blank == 70 - len(expected)
    some = np.sort(index.rows[:9])
    assert [example.row for example in examples_at("s", source, some)] == some.tolist()


def test_a_pick_is_tokenised_alone(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = Tokenising.__call__
    monkeypatch.setattr(
        Tokenising,
        "__call__",
        lambda self, rows: (seen.extend(row[0] for row in rows), original(self, rows))[1],
    )
    numbers = index_of("s", source).rows[[30, 2, 55]]
    pick = torch.from_numpy(numbers)
    table = table_of(source, tmp_path / "cache", pick=pick)
    assert table.rows.tolist() == numbers.tolist()
    assert sorted(seen) == sorted(table.rows.tolist())
    assert table.digest != table_of(source, tmp_path / "cache", pick=pick.flip(0)).digest
    whole = table_of(source)
    for position, row in enumerate(table.rows.tolist()):
        assert table.row(position)[0].equal(whole.row(whole.places[row])[0])


def test_what_was_done_before_a_kill_is_not_done_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = table_of(source)
    cache = tmp_path / "cache"
    original = Tokenising.__call__
    done = []

    def dying(self: Tokenising, rows: Any) -> Any:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(rows[0][0])
        return original(self, rows)

    monkeypatch.setattr(Tokenising, "__call__", dying)
    with pytest.raises(KeyboardInterrupt):
        table_of(source, cache)
    (parts,) = cache.glob("*.parts")
    assert len(list(parts.iterdir())) == 4
    newest = max(parts.iterdir())
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")  # and a disk that lost a byte
    done.clear()
    monkeypatch.setattr(
        Tokenising,
        "__call__",
        lambda self, rows: (done.append(rows[0][0]), original(self, rows))[1],
    )
    assert same(table_of(source, cache), expected)
    assert len(done) == 9 - 3
    assert not parts.exists()


@pytest.mark.parametrize("cached", [False, True])
def test_a_row_that_is_picked_twice_is_there_twice(
    source: Source, tmp_path: Path, cached: bool
) -> None:
    first, other, last = index_of("s", source).rows[[2, 30, 50]].tolist()
    table = table_of(
        source,
        tmp_path / "cache" if cached else None,
        pick=torch.tensor([last, first, first, other]),
    )
    assert table.rows.tolist() == [last, first, first, other]
    assert bytes(table.row(2)[0][:-1].tolist()).decode() == f"Row {first}?\nanswer {first}"
    assert table.report.looked == 3


def test_a_cache_that_cannot_be_locked_is_named(source: Source, tmp_path: Path) -> None:
    index_of("s", source, tmp_path / "cache")
    for path in (tmp_path / "cache").glob("*.index"):
        path.unlink()
        path.with_suffix(".lease").mkdir()
    with rejects("cannot-write", str(tmp_path / "cache"), of=DataError):
        index_of("s", source, tmp_path / "cache")


def test_an_index_that_is_not_read_as_it_was_written(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = hgms_mix.lm.store.load
    monkeypatch.setattr(
        hgms_mix.lm.store,
        "load",
        lambda path, *rest: None if path.suffix == ".index" else original(path, *rest),
    )
    with rejects("cannot-write", str(tmp_path), of=DataError):
        index_of("s", source, tmp_path)


WORK = """
import os, time
import numpy as np
from attrs import frozen

class Odd(Exception):
    def __init__(self, what, where): super().__init__(f"{what} in {where}")

@frozen
class Work:
    kind: str
    types = {"numbers": "int64"}
    def __call__(self, rows):
        if rows[0] == 0: return {"numbers": np.array(rows)}, {}
        if self.kind == "raises": raise Odd("a fault", "their library")
        if self.kind == "dies": os._exit(3)
        time.sleep(60)
"""


@pytest.fixture
def work(site: Site, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Work of which this process does the first row, and another one the second, which fails."""
    monkeypatch.setattr(hgms_mix.lm.parts, "ROWS", 1)
    monkeypatch.setattr(hgms_mix.lm.parts, "ALONE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    site.module("their_work", WORK)
    return importlib.import_module("their_work").Work


def test_a_fault_in_another_process_comes_with_its_traceback(work: Any) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"(?s)in a process that reads rows:.*their_work.py.*Odd: a fault in their library",
    ):
        in_parts([0, 1], work("raises"), folder=None)


def test_a_process_that_dies_is_reported_with_its_exit_code(work: Any) -> None:
    with rejects("process-lost", of=DataError) as caught:
        in_parts([0, 1], work("dies"), folder=None)
    assert caught.value.message.endswith(" exit code 3")


def test_ctrl_c_does_not_wait_for_other_processes(
    work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    original = hgms_mix.lm.parts.subprocess.Popen
    monkeypatch.setattr(
        hgms_mix.lm.parts.subprocess,
        "Popen",
        lambda *args, **options: started.append(original(*args, **options)) or started[-1],
    )

    def interrupted() -> Any:
        yield from (0, 1)
        time.sleep(2)  # the other process is at work
        raise KeyboardInterrupt

    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_parts(interrupted(), work("sleeps"), folder=None)
    assert time.monotonic() - before < 30
    assert [process.poll() is not None for process in started] == [True]


@pytest.mark.extended
def test_other_processes_make_the_same_parts(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = index_of("s", source)
    # it is not imported, though it lies in the working directory
    (tmp_path / "safetensors.py").write_text(
        "raise AssertionError('a file of the working directory')"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hgms_mix.lm.parts, "ALONE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    mine: list[int] = []
    original = hgms_mix.lm.parts._part
    monkeypatch.setattr(
        hgms_mix.lm.parts,
        "_part",
        lambda work, chunk, path: (mine.append(1), original(work, chunk, path))[1],
    )
    index = index_of("s", source, tmp_path / "cache")
    assert len(mine) == 1
    for leaf in ("rows", "keys", "whole"):
        assert getattr(index, leaf).tolist() == getattr(expected, leaf).tolist()
    assert index.report == expected.report


def test_work_is_the_same_after_its_way_to_another_process() -> None:
    work = Tokenising(
        byte_tokenizer(), "plain", 40, False, "prompt-completion", None, "a.jsonl", ("s", "path")
    )
    rows = [
        (0, "line 1", b'{"prompt": "Why?", "completion": "So."}'),
        (1, "line 2", b'{"prompt": "How?", "completion": "So."}'),
    ]
    here = work(rows)
    there = pickle.loads(pickle.dumps(work))(rows)
    assert {name: array.tolist() for name, array in here[0].items()} == {
        name: array.tolist() for name, array in there[0].items()
    }
    assert here[1] == there[1] == {"too_long": 0, "truncated": 0, "longest": 9, "shortest": 9}


@pytest.mark.parametrize("count", [1, 9, 30, 60, 500])
@pytest.mark.parametrize("choice", [{}, {"shuffle_seed": 3, "rows": 80}])
def test_rows_are_drawn_before_they_become_tokens(
    source: Source,
    tmp_path: Path,
    count: int,
    choice: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that pass, in the order of a permutation of the rows that have an answer."""
    source = evolve(source, **choice)
    key = Key(7)
    whole = table_of(source)
    index = index_of("s", source)
    order = torch.randperm(index.size, generator=key.generator()).tolist()
    passing = [number for number in index.rows[order].tolist() if number in whole.places]
    taken = set(passing[:count])
    expected = [number for number in whole.rows.tolist() if number in taken]
    seen: set[int] = set()
    original = Tokenising.__call__
    monkeypatch.setattr(
        Tokenising,
        "__call__",
        lambda self, rows: (seen.update(row[0] for row in rows), original(self, rows))[1],
    )
    options = {"template": "plain", "max_length": 40, "cache_dir": tmp_path / "cache"}
    table = drawn_table("s", source, byte_tokenizer(), count=count, key=key, **options)
    assert table.rows.tolist() == expected
    assert all(
        table.row(place)[0].equal(whole.row(whole.places[row])[0])
        for place, row in enumerate(expected)
    )
    assert len(seen) <= 1.3 * count + 16


def test_where_no_drawn_row_passes_more_are_drawn(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completion": "long " * 20 if row else "a"} for row in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(path=str(tmp_path / "rows.jsonl"))
    options = {"template": "plain", "max_length": 40}
    for seed in range(3):
        assert drawn_table(
            "s", source, byte_tokenizer(), count=2, key=Key(seed), **options
        ).rows.tolist() == [0]
    with rejects("no-rows", "s", "path", of=DataError) as caught:
        drawn_table(
            "s", source, byte_tokenizer(), count=2, key=Key(0), template="plain", max_length=3
        )
    assert caught.value.message.startswith("60 of 60 rows ")
