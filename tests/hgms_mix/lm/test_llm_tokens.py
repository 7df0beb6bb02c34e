"""Token tables: what is kept, cut and dropped; gathering; the cache; overlaps."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects
from torch import Tensor

import hgms_mix.lm.tokens
from hgms.config import cache_folder
from hgms_core import ConfigError, DataError
from hgms_mix.lm.formats import Message
from hgms_mix.lm.overlaps import Overlap, overlap_warning, overlaps
from hgms_mix.lm.sources import Example, Source, read_examples
from hgms_mix.lm.table import TokenTable
from hgms_mix.lm.tokenizers import byte_tokenizer
from hgms_mix.lm.tokens import fingerprint, token_table

pytest.importorskip("transformers", reason="transformers is not installed")

real = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no real rows to read"
)


@functools.cache
def tokenizer() -> Any:
    return byte_tokenizer()


def source(
    tmp_path: Path, rows: list[tuple[str, str]], name: str = "a.jsonl", **fields: Any
) -> Source:
    path = tmp_path / name
    path.write_text(
        "".join(
            json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows
        )
    )
    return Source(path=str(path), **fields)


def table_of(source: Source, **options: Any) -> TokenTable:
    return token_table(
        "s", source, tokenizer(), **{"template": "plain", "max_length": 64, **options}
    )


def rows_of(table: TokenTable) -> list[tuple[list[int], list[bool]]]:
    return [
        (table.tokens[a:b].tolist(), table.mask[a:b].tolist())
        for a, b in pairwise(table.offsets.tolist())
    ]


ROWS = [
    ("Q", "A"),
    ("What is it?", "It is a rather long answer, to be cut."),
    ("R", " "),
    ("A" * 70, "B"),
    ("Z", ""),
]


# -- what is kept
# --------------------------------------------------------------------------------------------------


def test_rows_that_are_too_long_or_have_no_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    table = table_of(source(tmp_path, ROWS), max_length=30)
    assert rows_of(table) == [([*b"Q\nA", 257], [False, False, True, True])]
    assert table.rows.tolist() == [0]
    report = table.report
    assert (report.total, report.examples, report.blank, report.too_long, report.truncated) == (
        5,
        5,
        2,
        2,
        0,
    )
    assert (report.shortest, report.longest, report.bad, report.format) == (
        4,
        73,
        0,
        "prompt-completion",
    )
    assert (table.name, table.size, table.pad_id) == ("s", 1, 258)
    assert [leaf.dtype for leaf in (table.tokens, table.mask, table.offsets, table.rows)] == [
        torch.int32,
        torch.bool,
        torch.int64,
        torch.int64,
    ]


def test_truncation_cuts_the_end_and_drops_what_has_no_answer_left(tmp_path: Path) -> None:
    table = table_of(source(tmp_path, ROWS), max_length=30, too_long="truncate")
    assert table.rows.tolist() == [0, 1]
    tokens, mask = rows_of(table)[1]
    assert bytes(tokens).decode() == "What is it?\nIt is a rather long answer"[:30]
    assert mask == [False] * 12 + [True] * 18
    assert (table.report.too_long, table.report.truncated, table.size) == (1, 1, 2)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.text("xyz", min_size=1, max_size=12), st.text("abc", max_size=12)),
        min_size=1,
        max_size=6,
    ),
    st.integers(2, 20),
    st.sampled_from(["drop", "truncate"]),
)
def test_no_row_is_ever_without_an_answer_or_too_long(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    max_length: int,
    too_long: str,
) -> None:
    requests = source(tmp_path_factory.mktemp("rows"), rows)
    fit = [
        len(q) + 1 + len(a) + 1 <= max_length
        or (too_long == "truncate" and len(q) + 1 < max_length)
        for q, a in rows
    ]
    kept = [number for number, (_, answer) in enumerate(rows) if answer and fit[number]]
    if not kept:
        with rejects("no-rows", "s", "path", of=DataError):
            table_of(requests, max_length=max_length, too_long=too_long)
        return
    table = table_of(requests, max_length=max_length, too_long=too_long)
    assert table.rows.tolist() == kept
    for (tokens, mask), number in zip(rows_of(table), kept, strict=True):
        question, answer = rows[number]
        whole = [*question.encode(), 10, *answer.encode(), 257]
        assert tokens == whole[:max_length]
        assert mask == ([False] * (len(question) + 1) + [True] * (len(answer) + 1))[:max_length]
        assert any(mask[1:])


def test_first_rows_that_are_all_too_long_are_warned_of_before_the_others_become_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = hgms_mix.lm.tokens
    monkeypatch.setattr(module, "PROBED_LENGTHS", 3)
    module.warn.cache_clear()
    rows = [("Q" * 30, str(number)) for number in range(4)]
    original = module.in_parts

    def in_parts(*arguments: Any, **options: Any) -> Any:
        assert "all of the first 3 rows of 's' have more than max_length=20 tokens" in caplog.text
        return original(*arguments, **options)

    monkeypatch.setattr(module, "in_parts", in_parts)
    with rejects("no-rows", "s", "path", of=DataError):
        table_of(source(tmp_path, rows), max_length=20)
    monkeypatch.setattr(module, "in_parts", original)
    caplog.clear()
    assert table_of(source(tmp_path, [rows[0], ("Q", "A"), *rows]), max_length=20).size == 1
    assert not caplog.text, "one short row among the first ones"


def test_where_no_row_is_left_the_lengths_are_told(tmp_path: Path) -> None:
    rows = [("a question", "an answer"), ("a longer question", "an answer"), ("Q", "")]
    with rejects("no-rows", "s", "path", of=DataError) as caught:
        table_of(source(tmp_path, rows), max_length=8)
    assert str(caught.value) == (
        f"2 of 3 rows of {tmp_path / 'a.jsonl'} have more than max_length=8 tokens, and 1 have "
        "empty answers, so no row remains (s.path)\n"
        "  increase max_length to 21 (the shortest row) or more; all rows fit into 28\n"
        '  or set too_long = "truncate"'
    )
    with rejects("no-rows", "s", "path", of=DataError) as caught:
        table_of(source(tmp_path, rows), max_length=8, too_long="truncate")
    assert "no answer within max_length=8 " in caught.value.message
    assert "truncate" not in (caught.value.hint or "")
    with rejects("no-rows", "s", "path", of=DataError) as caught:
        table_of(source(tmp_path, [("Q", "")]))
    assert caught.value.message.startswith("all 1 rows ")
    assert table_of(source(tmp_path, [("Q", "")], completion=".")).size == 1


def test_options_that_make_no_table_are_refused(tmp_path: Path) -> None:
    requests = source(tmp_path, ROWS)
    with rejects("unknown-choice", "too_long", of=ConfigError) as caught:
        table_of(requests, too_long="trunc")
    assert caught.value.did_you_mean == ("truncate",)
    with rejects("out-of-range", "max_length", of=ConfigError):
        table_of(requests, max_length=1)
    bare = byte_tokenizer()
    bare.pad_token = None
    with rejects("missing-token", "tokenizer", of=ConfigError):
        token_table("s", requests, bare, template="plain", max_length=64)


def test_a_row_that_the_chat_template_refuses_is_named(tmp_path: Path) -> None:
    own = byte_tokenizer()
    refuse = "{% if m['content'] == 'R' %}{{ raise_exception('no R') }}{% endif %}"
    own.chat_template = "{% for m in messages %}" + refuse + "{{ m['content'] }}{% endfor %}"
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        token_table(
            "s", source(tmp_path, [("Q", "A"), ("R", "B")]), own, template="model", max_length=64
        )
    assert caught.value.message.startswith(f"row 1 of {tmp_path / 'a.jsonl'}: ")
    assert caught.value.message.endswith(": no R")


# -- gathering
# --------------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> TokenTable:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
    total = sum(lengths)
    tokens = draw(st.lists(st.integers(0, 9), min_size=total, max_size=total))
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    rows = 10 * torch.arange(len(lengths))
    return TokenTable(
        "t",
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(mask),
        offsets,
        rows,
        "d",
        7 * rows,
        pad_id=draw(st.integers(10, 12)),
    )


def naive(table: TokenTable, numbers: list[int]) -> tuple[list[list[int]], list[list[bool]]]:
    rows = [rows_of(table)[number] for number in numbers]
    longest = max((len(tokens) for tokens, _ in rows), default=0)
    return (
        [tokens + [table.pad_id] * (longest - len(tokens)) for tokens, _ in rows],
        [mask + [False] * (longest - len(mask)) for _, mask in rows],
    )


def indices(table: TokenTable, **sizes: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, table.size - 1), **sizes)


@settings(max_examples=40, deadline=None)
@given(st.data(), tables(), st.sampled_from([(-1,), (2, -1), (1, 2, -1), (-1, 1)]))
def test_gather_is_the_rows_one_by_one_padded_to_the_longest(
    data: st.DataObject, table: TokenTable, shape: tuple[int, ...]
) -> None:
    numbers = 2 * data.draw(indices(table, min_size=1, max_size=6))
    index = torch.tensor(numbers).reshape(shape)
    tokens, mask = table.gather(index)
    expected_tokens, expected_mask = naive(table, numbers)
    assert tokens.dtype == torch.int64
    assert tokens.shape == mask.shape == (*index.shape, len(expected_tokens[0]))
    assert tokens.reshape(len(numbers), -1).tolist() == expected_tokens
    assert mask.reshape(len(numbers), -1).tolist() == expected_mask


@settings(max_examples=40, deadline=None)
@given(st.data(), tables())
def test_take_is_the_table_of_the_chosen_rows(data: st.DataObject, table: TokenTable) -> None:
    numbers = data.draw(indices(table, max_size=6))
    taken = table.take(torch.tensor(numbers, dtype=torch.int64))
    assert rows_of(taken) == [rows_of(table)[number] for number in numbers]
    assert taken.rows.tolist() == [10 * number for number in numbers]
    assert taken.keys.tolist() == [70 * number for number in numbers]
    assert (taken.name, taken.pad_id, taken.size) == ("t", table.pad_id, len(numbers))
    assert (
        taken.digest == table.take(torch.tensor(numbers, dtype=torch.int32)).digest != table.digest
    )
    assert taken.digest != table.take(torch.tensor([*numbers, 0])).digest


def test_rows_that_do_not_exist_are_refused_and_no_rows_are_no_tokens() -> None:
    table = TokenTable(
        "t",
        torch.tensor([1, 2], dtype=torch.int32),
        torch.tensor([False, True]),
        torch.tensor([0, 2]),
        torch.tensor([0]),
        "d",
    )
    for index in ([1], [-1]):
        with pytest.raises(IndexError, match="of a table of 1"):
            table.gather(torch.tensor(index))
    tokens, mask = table.gather(torch.zeros(3, 0, dtype=torch.int64))
    assert tokens.shape == mask.shape == (3, 0, 0)


# -- the cache
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sources that were read while tables were made."""
    seen: list[str] = []
    original: Callable[..., Any] = hgms_mix.lm.tokens.index_of

    def reading(name: str, source: Source, cache: Any, **options: Any) -> Any:
        seen.append(name)
        return original(name, source, cache, **options)

    monkeypatch.setattr(hgms_mix.lm.tokens, "index_of", reading)
    return seen


def same(first: TokenTable, second: TokenTable) -> bool:
    leaves = ("tokens", "mask", "offsets", "rows", "keys")
    return (
        all(torch.equal(getattr(first, leaf), getattr(second, leaf)) for leaf in leaves)
        and first.report == second.report
    )


def test_a_table_is_made_once_and_then_mapped_from_its_file(
    tmp_path: Path, built: list[str]
) -> None:
    requests = source(tmp_path, ROWS)
    cache = tmp_path / "cache"
    plain = table_of(requests)
    first = table_of(requests, cache_dir=cache)
    second = table_of(requests, cache_dir=cache)
    assert built == ["s", "s"]  # without the cache, and the first time with it
    assert same(plain, first)
    assert same(first, second)
    assert first.digest == second.digest == plain.digest
    assert (second.name, second.pad_id) == ("s", 258)
    (file,) = cache.glob("*.safetensors")
    assert file.stem == first.digest
    if sys.platform == "linux":
        assert str(file) in Path("/proc/self/maps").read_text()
    assert not list(cache.glob("*.part"))


def test_what_makes_a_table_is_its_content_and_not_its_name_or_place(
    tmp_path: Path, built: list[str]
) -> None:
    cache = tmp_path / "cache"
    table_of(source(tmp_path, ROWS), cache_dir=cache)
    moved = source(tmp_path, ROWS, name="moved.jsonl")
    assert (
        token_table(
            "other", moved, tokenizer(), template="plain", max_length=64, cache_dir=cache
        ).name
        == "other"
    )
    assert built == ["s"]


def test_whatever_changes_the_tokens_makes_another_table(tmp_path: Path) -> None:
    requests = source(tmp_path, ROWS)
    longer = source(tmp_path, [*ROWS, ("Q2", "A2")], name="b.jsonl")
    larger = byte_tokenizer()
    larger.add_tokens(["<extra>"])
    chatty = byte_tokenizer()
    chatty.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    other_chat = byte_tokenizer()
    other_chat.chat_template = "{% for m in messages %}{{ m['content'] }}|<eos>{% endfor %}"
    digests = [
        table_of(requests).digest,
        table_of(longer).digest,
        table_of(evolve(requests, rows=2)).digest,
        table_of(evolve(requests, completion=".")).digest,
        table_of(evolve(requests, shuffle_seed=1)).digest,
        table_of(requests, max_length=65).digest,
        table_of(requests, too_long="truncate").digest,
        table_of(requests, template="chatml").digest,
        token_table("s", requests, larger, template="plain", max_length=64).digest,
        token_table("s", requests, chatty, template="model", max_length=64).digest,
        token_table("s", requests, other_chat, template="model", max_length=64).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert table_of(requests).digest == digests[0]


def test_a_tokenizer_is_the_same_after_it_has_been_used() -> None:
    fresh = byte_tokenizer()
    used = byte_tokenizer()
    used(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert fingerprint(fresh) == fingerprint(used)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-9], "damaged"),
        (lambda data: data[:5], "damaged"),
        (lambda data: b"", "damaged"),
        (
            lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
            "do not match the recorded sha256",
        ),
    ],
    ids=["shorter", "headless", "empty", "one bit"],
)
def test_a_damaged_entry_is_named_and_made_anew(
    tmp_path: Path,
    built: list[str],
    damage: Callable[[bytes], bytes],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = source(tmp_path, ROWS)
    cache = tmp_path / "cache"
    first = evolve(table_of(requests))
    table_of(requests, cache_dir=cache)
    (file,) = cache.glob("*.safetensors")
    file.write_bytes(damage(file.read_bytes()))
    built.clear()
    again = table_of(requests, cache_dir=cache)
    (warned,) = caplog.messages
    assert warned.startswith(f"the token cache entry {file} is damaged (")
    assert why in warned
    assert built == ["s"]
    assert same(first, again)
    assert same(first, table_of(requests, cache_dir=cache))
    assert built == ["s"]


def test_an_entry_of_another_table_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    item = source(tmp_path, ROWS)
    other = source(tmp_path, [("Q", "B")], name="b.jsonl")
    first = table_of(item, cache_dir=cache)
    second = table_of(other, cache_dir=cache)
    (cache / f"{first.digest}.safetensors").write_bytes(
        (cache / f"{second.digest}.safetensors").read_bytes()
    )
    assert same(table_of(item, cache_dir=cache), table_of(item))
    assert "it is of another table" in caplog.text


def test_an_entry_does_not_hide_bad_rows_from_a_stricter_source(tmp_path: Path) -> None:
    requests = source(tmp_path, ROWS, max_bad_rows=1)
    cache = tmp_path / "cache"
    assert requests.path is not None
    with Path(requests.path).open("a") as stream:
        stream.write("{oops\n")
    assert table_of(requests, cache_dir=cache).report.bad == 1
    with rejects("wrong-row", "s", "path", of=DataError) as caught:
        table_of(evolve(requests, max_bad_rows=0), cache_dir=cache)
    assert "\nline 6: " in caught.value.message


def test_a_full_disk_says_where(tmp_path: Path) -> None:
    """A limit on the size of files, which safetensors meets as it meets a full disk."""
    import resource

    requests = source(tmp_path, [(f"What is {i}?", "A number. " * 4) for i in range(400)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with rejects("cannot-write", str(tmp_path / "cache"), of=DataError):
            table_of(requests, cache_dir=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "cache").glob("*.part"))
    assert table_of(requests, cache_dir=tmp_path / "cache").size == 400


def test_a_cache_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with rejects("cannot-write", str(tmp_path / "file" / "cache"), of=DataError):
        table_of(source(tmp_path, ROWS), cache_dir=tmp_path / "file" / "cache")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HGMS_CACHE", "/x")
    assert cache_folder() == Path("/x/tokens")
    monkeypatch.delenv("HGMS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/y")
    assert cache_folder() == Path("/y/hgms/tokens")


SCRIPT = """
import sys, time
from pathlib import Path
import hgms_mix.lm.tokens
from hgms_mix.lm.sources import Source
from hgms_mix.lm.tokenizers import byte_tokenizer
path, cache, log = sys.argv[1:]
reading = hgms_mix.lm.tokens.index_of
def slow(*arguments, **options):
    with open(log, "a") as stream:
        stream.write("made\\n")
    time.sleep(1)
    return reading(*arguments, **options)
hgms_mix.lm.tokens.index_of = slow
tokenizer = byte_tokenizer()
print("ready", flush=True)
sys.stdin.readline()
settings = {"template": "plain", "max_length": 64, "cache_dir": cache}
table = hgms_mix.lm.tokens.token_table("s", Source(path=path), tokenizer, **settings)
print(table.size, table.tokens.sum().item())
"""


@pytest.mark.extended
def test_two_processes_that_want_one_table_make_it_once(tmp_path: Path) -> None:
    requests = source(tmp_path, ROWS)
    arguments = [
        sys.executable,
        "-c",
        SCRIPT,
        str(requests.path),
        str(tmp_path / "cache"),
        str(tmp_path / "log"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in running]
    table = table_of(requests)
    assert answers == 2 * [f"{table.size} {int(table.tokens.sum())}\n"]
    assert (tmp_path / "log").read_text() == "made\n"


# -- overlaps
# --------------------------------------------------------------------------------------------------


def examples(*prompts: str) -> list[Example]:
    return [
        Example((Message("user", prompt), Message("assistant", "a")), row)
        for row, prompt in enumerate(prompts)
    ]


def test_overlaps_are_counted_between_the_parts_and_told() -> None:
    result = overlaps(
        {"clean": examples("one", "Two  words", "three"), "other": examples("four")},
        {"val": examples("two\nWORDS", "five", "five")},
        {"test": examples("FIVE", "four", "six", "one "), "far": examples("seven")},
    )
    assert result == (
        Overlap("validation", "val", "train", "clean", 1, 3, (0,)),
        Overlap("test", "test", "train", "clean", 1, 4, (3,)),
        Overlap("test", "test", "train", "other", 1, 4, (1,)),
        Overlap("test", "test", "validation", "val", 1, 4, (0,)),
    )
    text = overlap_warning(result)
    assert "validation 'val' and train 'clean': 1 of 3 (33.3%); rows 0 of 'val'" in text
    assert "test 'test' and validation 'val': 1 of 4 (25.0%); rows 0 of 'test'" in text
    assert "take the rows out of one of the two sets" in text
    assert overlap_warning(overlaps({"a": examples("x")}, {"b": examples("y")})) == ""


def test_rows_that_stand_in_two_sources_or_twice_in_one_are_told(tmp_path: Path) -> None:
    """One file as two sources; some rows of it as a third; sixty copies of one row; the same
    prompts with other answers.
    """
    rows = [(f"{i} plus one", str(i + 1)) for i in range(40)]
    sets = {
        "whole": rows,
        "again": rows,
        "some": [*rows[:3], *((f"{i} twice", str(2 * i)) for i in range(20))],
        "copies": [("Say hi", "Hi")] * 60,
        "dots": [(prompt, ".") for prompt, _ in rows],
    }
    sources = {}
    for name, entry in sets.items():
        (tmp_path / name).mkdir()
        sources[name] = source(tmp_path / name, entry)
    expected = (
        Overlap("train", "again", "train", "whole", 40, 40, (0, 1, 2, 3, 4)),
        Overlap("train", "some", "train", "whole", 3, 23, (0, 1, 2)),
        Overlap("train", "some", "train", "again", 3, 23, (0, 1, 2)),
        Overlap("train", "copies", "train", "copies", 59, 60, (1, 2, 3, 4, 5)),
    )
    result = overlaps({name: table_of(item) for name, item in sources.items()})
    assert (
        result
        == expected
        == overlaps({name: read_examples(name, item) for name, item in sources.items()})
    )
    text = overlap_warning(result)
    assert "train 'again' and train 'whole': 40 of 40 (100.0%)" in text
    assert (
        "train 'copies': 59 of 60 (98.3%) are copies of an earlier row; rows 1, 2, 3, 4, 5, …"
        in text
    )
    assert "scores on such rows" not in text
    # one copy in 42 is what real sets hold
    assert overlaps({"few": examples("x", *map(str, range(40)), "x")}) == ()


def test_only_what_the_user_said_counts_as_the_prompt() -> None:
    turns = (
        Message("system", "Be brief."),
        Message("user", "Is it?"),
        Message("assistant", "Yes."),
    )
    with_system = Example(turns, 4)
    longer = Example((*turns, Message("user", "Sure?"), Message("assistant", "Yes.")), 5)
    assert with_system.key == "is it?"
    assert [
        item.count for item in overlaps({"t": examples("is  it?")}, {"v": [with_system, longer]})
    ] == [1]


def test_tables_and_examples_overlap_alike(tmp_path: Path) -> None:
    requests = source(tmp_path, [("One", "1"), ("Two", "2"), ("Three", "3")])
    table = table_of(requests)
    by_examples = overlaps(
        {"t": read_examples("t", requests)}, {"v": examples("two", "THREE", "x")}
    )
    assert overlaps({"t": table}, {"v": examples("two", "THREE", "x")}) == by_examples
    assert by_examples[0].count == 2
    assert [
        item.rows
        for item in overlaps({"t": examples("two")}, {"v": table.take(torch.tensor([2, 1]))})
    ] == [(1,)]


@real
def test_overlaps_of_real_sets_are_those_their_notes_tell() -> None:
    def load(file: str) -> list[Example]:
        return read_examples(file, Source(path=f"$HGMS_DATA/{file}.jsonl.gz"))

    train = {
        "clean": load("alpaca_gpt4_en/alpaca_gpt4_en_6000"),
        "alpaca": load("scalebio_data_tiny/train_alpaca"),
    }
    judged = {part: load(f"scalebio_data_tiny/{part}") for part in ("val", "test")}
    result = overlaps(train, {"val": judged["val"]}, {"test": judged["test"]})
    clean = [(item.messages[0].text, item.messages[-1].text) for item in train["clean"]]
    both = sum((item.messages[0].text, item.messages[-1].text) in clean for item in train["alpaca"])
    assert both > 0
    assert [(item.name, item.other, item.count) for item in result] == [
        ("val", "clean", 962),
        ("val", "alpaca", 165),
        ("test", "clean", 951),
        ("test", "alpaca", 160),
        ("alpaca", "clean", both),
    ]
    mathematics = [
        "mathinstruct/mathinstruct_2000",
        "orca_math/orca_math_2000",
        "dart_math_uniform/dart_math_uniform_2000",
    ]
    test = {"gsm8k": load("gsm8k/test"), "math": load("math/test")}
    assert (
        overlaps(
            {file: load(file) for file in mathematics},
            {"val": load("scalebio_math_valtest/val")},
            test,
        )
        == ()
    )
    (whole,) = overlaps({"math": test["math"]}, {}, {"math500": load("math/math500")})
    assert (whole.count, whole.size) == (500, 500)


@real
@pytest.mark.parametrize("template", ["plain", "alpaca", "chatml"])
def test_the_learned_tokens_of_real_rows_read_as_their_answers(template: str) -> None:
    for file in (
        "alpaca_zh/alpaca_zh_6000",
        "math/math500",
        "mathinstruct/mathinstruct_2000",
        "gpteacher_roleplay/gpteacher_roleplay_1923",
    ):
        requests = Source(path=f"$HGMS_DATA/{file}.jsonl.gz", rows=100, shuffle_seed=3)
        table = token_table("real", requests, tokenizer(), template=template, max_length=100_000)
        answers = {
            example.row: example.messages[-1].text for example in read_examples("real", requests)
        }
        index = torch.arange(table.size)
        tokens, mask = table.gather(index)
        for number, row in enumerate(table.rows.tolist()):
            learned: Tensor = tokens[number][mask[number]]
            assert learned[-1] == 257
            assert bytes(learned[:-1].tolist()).decode() == answers[row]
