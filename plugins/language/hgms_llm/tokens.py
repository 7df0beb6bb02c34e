"""From the rows of a source to their token table."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np
import torch

from hgms_core import ConfigError, DataError, unknown
from hgms_llm.encoding import encode
from hgms_llm.sources import Example, Source, content, read
from hgms_llm.table import Report, TokenTable, cached, offsets_of
from hgms_llm.templates import Template, template_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1
"""Of everything between a row and its tokens; raised when any of that changes, so that old cache entries are not found."""

CHUNK = 4096
TooLong = Literal["drop", "truncate"]


def token_table(
    name: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    max_length: int,
    too_long: TooLong = "drop",
    cache_dir: str | Path | None = None,
) -> TokenTable:
    """All rows of ``source`` that pass, as tokens.

    Rows whose every answer is empty are left out. A row of more than ``max_length`` tokens is left out too (``drop``) or loses
    its end (``truncate``), unless no token of an answer would be left. ``report`` has the counts.

    With ``cache_dir`` the table is kept there under the digest of all that made it: the file's content (not its name), the
    source's fields, template, tokenizer, lengths and this code's version. The file is written aside, renamed, and mapped into
    memory when read; two processes that want one table make it once. A damaged entry is named in a warning and made anew.

    Errors: those of :func:`~hgms_llm.sources.read` and :func:`~hgms_llm.templates.template_for`; DataError where no row is
    left, or the cache cannot be written. Cost: one pass over the file and about 0.3 ms of a core a row; from the cache, a
    checksum of the entry.
    """
    if too_long not in ("drop", "truncate"):
        raise ConfigError(unknown("value of too_long", str(too_long), ["drop", "truncate"]))
    if max_length < 2:
        raise ConfigError(f"max_length must hold a prompt and an answer, at least 2 tokens: {max_length}")
    if tokenizer.pad_token_id is None:
        raise ConfigError("the tokenizer has no padding token\n  hgms_llm.tokenizers.padded gives it its end token for one")
    written = template_for(template, tokenizer)
    about = {
        "version": VERSION,
        "content": content(name, source),
        "source": {key: value for key, value in attrs.asdict(source).items() if key not in ("path", "max_bad_rows")},
        "template": [written.name, written.text],
        "tokenizer": fingerprint(tokenizer),
        "max_length": max_length,
        "too_long": too_long,
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def make() -> TokenTable:
        return _encoded(name, source, tokenizer, written, max_length, too_long, digest)

    if cache_dir is None:
        return make()
    table = cached(Path(cache_dir).expanduser(), digest, make)
    if table.report.bad > source.max_bad_rows:
        return make()  # made when more bad rows were allowed: reading the source says which rows they are
    return attrs.evolve(table, name=name, pad_id=tokenizer.pad_token_id)


def _encoded(
    name: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    max_length: int,
    too_long: TooLong,
    digest: str,
) -> TokenTable:
    reading = read(name, source)
    examples = [example for example in reading.examples if not example.blank]
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    kept: list[Example] = []
    longest, shortest, dropped, truncated = 0, 0, 0, 0
    for chunk in (examples[at : at + CHUNK] for at in range(0, len(examples), CHUNK)):
        pieces = []
        for example in chunk:
            try:
                pieces.append(template.pieces(example.messages))
            except DataError as error:
                raise DataError(f"source {name!r} ({source.where}), row {example.row}: {error}") from error
        for example, (ids, learned) in zip(chunk, encode(pieces, tokenizer, template), strict=True):
            length = len(ids)
            longest, shortest = max(longest, length), min(shortest or length, length)
            if length > max_length:
                learned = learned[:max_length] if too_long == "truncate" else []
            # the loss of a token needs one before it
            if not any(learned[1:]):
                dropped += 1
                continue
            truncated += length > max_length
            kept.append(example)
            tokens.append(np.asarray(ids[:max_length], dtype=np.int32))
            masks.append(np.asarray(learned, dtype=np.bool_))
    count = len(reading.examples)
    report = Report(
        format=reading.format, total=reading.total, bad=reading.bad, examples=count, blank=count - len(examples),
        too_long=dropped, truncated=truncated, longest=longest, shortest=shortest,
    )  # fmt: skip
    if not kept:
        raise DataError(_nothing_left(f"source {name!r} ({source.where})", report, max_length, too_long))
    return TokenTable(
        name,
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate(masks)),
        offsets_of(torch.tensor([len(row) for row in tokens])),
        torch.tensor([example.row for example in kept]),
        digest,
        torch.tensor([key_of(example.key) for example in kept]),
        int(tokenizer.pad_token_id),
        report,
    )


def _nothing_left(where: str, report: Report, max_length: int, too_long: TooLong) -> str:
    if report.blank == report.examples:
        return f"{where}: all {report.examples} rows have empty answers, so there is nothing to learn\n  replace the file"
    so = "more than" if too_long == "drop" else "no answer within"
    also = f", and {report.blank} have empty answers" if report.blank else ""
    cure = f"raise max_length to {report.shortest} or more (all fit into {report.longest})"
    cut = ', or set too_long = "truncate"' if too_long == "drop" else ""
    return (
        f"{where}: no row is left: {report.too_long} of {report.examples} rows have {so} max_length = {max_length} tokens"
        f"{also}\n"
        f"  the shortest row has {report.shortest} tokens: {cure}{cut}"
    )


def key_of(prompt: str) -> int:
    """A 64-bit digest of a normalised prompt: among n prompts two different ones share it with probability n²/2⁶⁵."""
    return int.from_bytes(
        hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The sha256 of all that decides which tokens a text becomes."""
    named = [tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_tokens)]
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        # what the last call asked for is no part of the tokenizer; every call of transformers sets it anew
        core.no_padding()
        core.no_truncation()
        inside = core.to_str()
    else:
        inside = json.dumps([type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items()), repr(tokenizer.init_kwargs)])
    return hashlib.sha256((json.dumps(named) + inside).encode("utf-8", "surrogatepass")).hexdigest()
