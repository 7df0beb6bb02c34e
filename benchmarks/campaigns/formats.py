"""Malformed input of mixes: chat templates, Parquet and compressed files.

Each maker writes a working folder and returns the command line and whether it must be rejected:
True for an input that is always invalid, False for damaged input that may still be valid.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns import kills

Case = tuple[list[str], bool]
Maker = Callable[[Path, random.Random], Case]

REWEIGHT = ["mix", "reweight", "mix.toml"]
PIECE = 1 << 26
"""Bytes of one member of a compressed bomb."""


def lay_mix(folder: Path, chance: random.Random) -> str:
    """Write the sources of the smallest mix and return the text of its configuration."""
    for name, text in kills.SOURCES:
        (folder / name).write_text(text)
    return kills.mix_file(
        method=chance.choice(["hg-ms-online", "uniform-online", "fixed"]),
        seed=0,
        steps=1,
        checkpoint=30.0,
    )


# --- chat templates

WRONG_TEMPLATES = [
    "{% for m in messages %}",
    "{{",
    "{% endfor %}",
    "{% nothing %}",
    "{{ messages[0].content | no_filter }}",
    "{{ no_function() }}",
    "{{ 1 / 0 }}",
    "{{ messages[9].content }}",
    "{{ messages.content.content }}",
    "{{ raise_exception('this template accepts nothing') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 1000000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% include 'other' %}",
    "{% extends 'other' %}",
    "{% import 'os' as os %}{{ os.listdir('/') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "",
    "a constant text",
    "{{ messages[0].content }}",
    "{% for m in messages %}{{ m.content | reverse }}{% endfor %}",
    "{% for m in messages %}{{ m.content | upper }}{{ m.content | length }}x{% endfor %}é",
    "{% for m in messages %}{{ m.role }}{% endfor %}",
    "{{ messages | tojson | length }}",
    "\x00",
    "{# only a comment #}",
]
GOOD_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def of_template(folder: Path, chance: random.Random) -> Case:
    text = lay_mix(folder, chance)
    certain = chance.random() < 0.7
    if certain:
        template = chance.choice(WRONG_TEMPLATES)
        template = template if chance.random() < 0.6 else GOOD_TEMPLATE + template
        certain = template in WRONG_TEMPLATES[:14]
    else:
        at = chance.randrange(len(GOOD_TEMPLATE))
        piece = chance.choice(["", "{", "}}", "%", "|", "{% if %}", "\n", "messages", "é"])
        template = GOOD_TEMPLATE[:at] + piece + GOOD_TEMPLATE[at + chance.randrange(4) :]
    write_tokenizer(folder / "tokenizer", template, chance)
    text = text.replace('tokenizer = "bytes"', 'tokenizer = "tokenizer"')
    text = text.replace('template = "plain"', 'template = "model"')
    (folder / "mix.toml").write_text(text)
    return REWEIGHT, certain


def write_tokenizer(folder: Path, template: str, chance: random.Random) -> None:
    """Write the tokenizer of bytes with a chat template, in one of the two places for it."""
    for name, data in _tokenizer_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if chance.random() < 0.5:
        (folder / "chat_template.jinja").write_text(template)
    else:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        path.write_text(json.dumps({**settings, "chat_template": template}))


@functools.cache
def _tokenizer_files() -> dict[str, bytes]:
    import tempfile

    from hgms_mix.lm.tokenizers import byte_tokenizer

    with tempfile.TemporaryDirectory() as name:
        byte_tokenizer().save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}


# --- Parquet


def of_parquet(folder: Path, chance: random.Random) -> Case:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = lay_mix(folder, chance).replace("sums.jsonl", "sums.parquet")
    (folder / "mix.toml").write_text(text)
    (folder / "sums.jsonl").unlink()
    path = folder / "sums.parquet"
    prompts = [f"{i}+1=" for i in range(40)]
    answers = [str(i + 1) for i in range(40)]
    binary = pa.array([b"\xff\xfe"] * 40, pa.binary())
    wrong: list[Callable[[], Any]] = [
        lambda: pa.table({"prompt": list(range(40)), "completion": answers}),
        lambda: pa.table({"prompt": [[prompt] for prompt in prompts], "completion": answers}),
        lambda: pa.table({"prompt": [{"a": 1}] * 40, "completion": answers}),
        lambda: pa.table({"prompt": binary, "completion": answers}),
        lambda: pa.table({"prompt": pa.nulls(40), "completion": answers}),
        lambda: pa.table({"question": prompts, "reply": answers}),
        lambda: pa.table({"prompt": prompts}),
        lambda: pa.table({"prompt": prompts, "completion": pa.nulls(40)}),
        lambda: pa.table({"prompt": prompts[:0], "completion": answers[:0]}),
        lambda: pa.table({}),
        lambda: pa.table({"messages": [[{"role": "user"}]] * 40}),
        lambda: pa.table({"messages": ["a text"] * 40}),
        lambda: repeated(pa, 1 << 22, 1 << 14),
        lambda: repeated(pa, 1 << 27, 200),
    ]
    if chance.random() < 0.6:
        pq.write_table(chance.choice(wrong)(), path)
        return REWEIGHT, True
    pq.write_table(pa.table({"prompt": prompts, "completion": answers}), path)
    data = path.read_bytes()
    at = chance.randrange(len(data))
    ways = [
        data[:at],
        data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
        data[:4] + bytes(64) + data[68:],
        data[:-8] + b"\xff\xff\xff\x7fPAR1",
        b"PAR1" + data,
        b"PAR1PAR1",
        b"",
        json.dumps({"prompt": "a", "completion": "b"}).encode(),
    ]
    way = chance.randrange(len(ways))
    path.write_bytes(ways[way])
    return REWEIGHT, way in (3, 5, 6, 7)


def repeated(pa: Any, letters: int, rows: int) -> Any:
    """Return a small table that decodes to ``letters · rows`` letters."""
    indices = pa.array([0] * rows, pa.int32())
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * letters]))
    return pa.table({"prompt": column, "completion": ["1"] * rows})


# --- compressed files


def of_gzip(folder: Path, chance: random.Random) -> Case:
    text = lay_mix(folder, chance).replace("sums.jsonl", "sums.jsonl.gz")
    (folder / "mix.toml").write_text(text)
    rows = (folder / "sums.jsonl").read_bytes()
    (folder / "sums.jsonl").unlink()
    data = gzip.compress(rows)
    at = chance.randrange(10, len(data) - 10)
    surely: list[Callable[[], bytes]] = [
        lambda: bomb(b"\x00") * 64,
        lambda: gzip.compress(b'{"prompt": "', 1) + bomb(b"x") * 64,
        lambda: data + bomb(b"\x00") * 64,
        lambda: gzip.compress(b"[" * (1 << 20)),
        lambda: gzip.compress(data),
        lambda: data[: len(data) // 2],
        lambda: data[:3],
        lambda: rows,
        lambda: b"",
        lambda: gzip.compress(b""),
        lambda: gzip.compress(b"\n" * 1000),
        lambda: data[:-8] + b"\x00" * 8,
        lambda: b"PK\x03\x04" + data,
    ]
    if chance.random() < 0.7:
        chosen = chance.choice(surely)
        (folder / "sums.jsonl.gz").write_bytes(chosen())
        return REWEIGHT, True
    ways = [
        data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],
        data + b"trailing",
        data[:at] + data[at + 1 :],
    ]
    (folder / "sums.jsonl.gz").write_bytes(chance.choice(ways))
    return REWEIGHT, False


@functools.cache
def bomb(letter: bytes) -> bytes:
    """One member that unpacks to PIECE letters; members may follow one another."""
    return gzip.compress(letter * PIECE, 9)


MAKERS: dict[str, Maker] = {"template": of_template, "parquet": of_parquet, "gzip": of_gzip}
