"""From the rows of a source to their token table: pieces of text become tokens, each to be learned or not.

Tokens of the prompt and of prompt with answer, taken separately and cut by length, differ at the border for most byte-pair
encodings; pieces are tokenised on their own. Tokenizers that put a space before every text (SentencePiece of Llama 2) would do
so before every piece: the whole text is tokenised once for them, and a token belongs to the piece that its last character lies
in.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
import torch

from hgms_core import ConfigError, DataError, one_of
from hgms_llm.formats import Message
from hgms_llm.sources import Example, Source, content, read
from hgms_llm.table import Report, TokenTable, cached, offsets_of
from hgms_llm.templates import Piece, Template, template_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1
"""Of everything between a row and its tokens; raised when any of that changes, so that old cache entries are not found."""

CHUNK = 4096
PROBED = 16
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
    one_of("value of too_long", too_long, ["drop", "truncate"])
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
    make = functools.partial(_encoded, name, source, tokenizer, written, max_length, too_long == "truncate", digest)
    if cache_dir is None:
        return make()
    table = cached(Path(cache_dir).expanduser(), digest, make)
    if table.report.bad > source.max_bad_rows:
        return make()  # made when more bad rows were allowed: reading the source says which rows they are
    return attrs.evolve(table, name=name, pad_id=tokenizer.pad_token_id)


def _encoded(
    name: str, source: Source, tokenizer: PreTrainedTokenizerBase, template: Template, max_length: int, cut: bool, digest: str
) -> TokenTable:
    everything, report = read(name, source)
    where, examples = f"source {name!r} ({source.where})", [example for example in everything if not example.blank]
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
                raise DataError(f"{where}, row {example.row}: {error}") from error
        for example, (ids, learned) in zip(chunk, encode(pieces, tokenizer, template), strict=True):
            length = len(ids)
            longest, shortest = max(longest, length), min(shortest or length, length)
            if length > max_length:
                learned = learned[:max_length] if cut else []
            # the loss of a token needs one before it
            if not any(learned[1:]):
                dropped += 1
                continue
            truncated += length > max_length
            kept.append(example)
            tokens.append(np.asarray(ids[:max_length], dtype=np.int32))
            masks.append(np.asarray(learned, dtype=np.bool_))
    report = attrs.evolve(
        report, blank=report.examples - len(examples), too_long=dropped, truncated=truncated, longest=longest, shortest=shortest
    )
    if not kept:
        raise DataError(_nothing_left(where, report, max_length, cut))
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


def _nothing_left(where: str, report: Report, max_length: int, cut: bool) -> str:
    if report.blank == report.examples:
        return f"{where}: all {report.examples} rows have empty answers, so there is nothing to learn\n  replace the file"
    so = f"{report.too_long} of {report.examples} rows have {'no answer within' if cut else 'more than'}"
    also = f", and {report.blank} have empty answers" if report.blank else ""
    cure = f"raise max_length to {report.shortest} or more (all fit into {report.longest})"
    other = "" if cut else ', or set too_long = "truncate"'
    return (
        f"{where}: no row is left: {so} max_length = {max_length} tokens{also}\n"
        f"  the shortest row has {report.shortest} tokens: {cure}{other}"
    )


def key_of(prompt: str) -> int:
    """A 64-bit digest of a normalised prompt: among n prompts two different ones share it with probability n²/2⁶⁵."""
    digest = hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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


def encode(
    rows: Sequence[Sequence[Piece]], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[tuple[list[int], list[bool]]]:
    """Tokens of every row, and for each token whether it is to be learned. One batched call of the tokenizer for all rows."""
    if not _separable(tokenizer):
        return _encode_whole(rows, tokenizer, template)
    texts = list(dict.fromkeys(text for row in rows for text, _ in row if isinstance(text, str)))
    known = dict(zip(texts, _ids(texts, tokenizer, template) if texts else [], strict=True))
    encoded = []
    for row in rows:
        parts = [(known[text] if isinstance(text, str) else [text], learn) for text, learn in row]
        encoded.append(([token for ids, _ in parts for token in ids], [learn for ids, learn in parts for _ in ids]))
    return encoded


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, template: Template) -> list[list[int]]:
    options: Any = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}

    def usual(some: list[str]) -> list[list[int]]:
        encoded = tokenizer(some, add_special_tokens=False, split_special_tokens=not template.specials, **options)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    # the same without the offsets, which take a third of the time; for classes that add something of their own, the usual way
    expected = usual(texts[:PROBED])
    if not tokenizer.is_fast:
        return expected + usual(texts[PROBED:])
    ids = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return ids if ids[:PROBED] == expected else usual(texts)


def _separable(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether pieces put together read as their texts put together. Slow tokenizers have no offsets: pieces it is."""
    if not tokenizer.is_fast:
        return True
    left, right = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd"))
    glued = tokenizer.decode([*left, *right], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return glued.strip() == "abcd"


def _encode_whole(
    rows: Sequence[Sequence[Piece]], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[tuple[list[int], list[bool]]]:
    texts, spans = [], []
    for row in rows:
        text, learned = "", []
        for part, learn in row:
            begin = len(text)
            text += part if isinstance(part, str) else str(tokenizer.convert_ids_to_tokens(part))
            if learn:
                learned.append((begin, len(text)))
        texts.append(text)
        spans.append(learned)
    batch = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    encoded = []
    for tokens, offsets, learned in zip(batch["input_ids"], batch["offset_mapping"], spans, strict=True):
        inside = [begin < stop and any(low < stop <= high for low, high in learned) for begin, stop in offsets]
        encoded.append((tokens, inside))
    return encoded


def prompt_tokens(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: Template) -> list[int]:
    """The tokens after which a model writes the next answer: exactly those before that answer in training."""
    return encode([template.opening(messages)], tokenizer, template)[0][0]


def stop_tokens(tokenizer: PreTrainedTokenizerBase, template: Template) -> list[int]:
    """The tokens that end an answer: the template's own end mark and the tokenizer's end token.

    >>> from hgms_llm.templates import template_for
    >>> from hgms_llm.tokenizers import byte_tokenizer
    >>> stop_tokens(byte_tokenizer(), template_for("plain", byte_tokenizer()))
    [257]
    """
    tokens, learned = encode([template.pieces([Message("user", "a"), Message("assistant", "b")])], tokenizer, template)[0]
    last = [token for token, learn in zip(tokens, learned, strict=True) if learn][-1:]
    own = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    marks = [token for token in last if token in own]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return list(dict.fromkeys([*marks, *end]))
