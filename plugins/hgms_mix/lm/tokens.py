"""Conversion of the rows of a source into their token table.

Pieces of text become tokens, each with a flag for learning.

For most byte-pair encodings, separate tokens of the prompt and of prompt with answer differ at the
border. Pieces are therefore tokenised separately. Some tokenizers put a space before every text
(SentencePiece of Llama 2), and would do so before every piece. For them the whole text is tokenised
once, and a token belongs to the piece of its last character.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from hgms import store
from hgms.store import Folder
from hgms_core import Key
from hgms_core.errors import DataError, Place
from hgms_mix.lm.examples import content
from hgms_mix.lm.formats import Format, Message
from hgms_mix.lm.parts import compute_parts
from hgms_mix.lm.rows import Record, index_of, meter, numbered_example, records_at
from hgms_mix.lm.sources import Source
from hgms_mix.lm.store import load, lock, save, warn
from hgms_mix.lm.table import TYPES, Report, TokenTable, table_of
from hgms_mix.lm.templates import Piece, Template, template_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 5
"""Version of the conversion from rows to tokens.

It is raised when the conversion changes, so that old cache entries are not used.
"""

PROBED_LENGTHS = 256
"""Rows whose lengths are checked before all rows are tokenised."""
TooLong = Literal["drop", "truncate"]


class NoRowsLeft(DataError):
    """Raised if no row of a source passes."""


def token_table(
    name: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | Template,
    max_length: int,
    too_long: TooLong = "drop",
    cache_dir: Path | None = None,
    pick: Tensor | None = None,
) -> TokenTable:
    """Tokenise all rows of ``source`` that pass.

    With ``pick``, only the rows with these numbers are tokenised, in that order. ``template`` is a
    name, or a template of this tokenizer. If it is ``last_only``, each answer of a conversation is
    a row, with all earlier turns.

    Rows with only empty answers are excluded. A row of more than ``max_length`` tokens is excluded
    too (``drop``) or cut at its end (``truncate``); it is also excluded if the cut would remove all
    tokens of answers. ``report`` contains the counts.

    The table is stored in ``cache_dir`` (None: the user's cache) under a digest of its inputs: the
    file's content (not its name), the source's fields, template, tokenizer, lengths and this code's
    version. If two processes need one table, it is created once. It is memory-mapped for reading. A
    damaged entry is named in a warning and recreated.

    Raises
    ------
    HgmsError
        Those of :func:`~hgms_mix.lm.rows.index_of` and :func:`~hgms_mix.lm.templates.template_for`.
    DataError
        If no row is left.
    DiskError
        If the cache cannot be written.

    Notes
    -----
    Cost: the sha256 of the file. If the table is not in the cache, two passes over the file that
    parse it and about 0.1 ms of a core per row. If it is, a checksum of the entry.
    """
    written = template_for(template, tokenizer) if isinstance(template, str) else template
    place = (name, "path")
    about = {
        "version": VERSION,
        "content": content(name, source),
        "source": _identity(source),
        "template": [written.name, written.text],
        "tokenizer": fingerprint(tokenizer),
        "max_length": max_length,
        "too_long": too_long,
        "split": written.last_only,
        "pick": None if pick is None else store.digest(pick.numpy().tobytes()),
    }
    digest = store.json_digest(about)
    cache = cache_dir or store.cache_folder()
    work = functools.partial(
        tokenise_rows,
        source=source,
        place=place,
        tokenizer=tokenizer,
        template=written,
        max_length=max_length,
        too_long=too_long,
    )
    entry = Folder(cache / digest, digest)
    with lock(entry):
        stored = load(entry, TYPES)
        if stored is None:
            arrays, report = _tokenise(name, source, work, written.last_only, pick, cache)
            if not len(arrays["rows"]):
                raise NoRowsLeft(
                    "no-rows",
                    f"of {report.examples} rows of {source.path}, {report.blank} have empty "
                    f"answers, and {report.too_long} do not fit into max_length={max_length}",
                    place=place,
                    hint=f"increase max_length to {report.shortest} (the shortest row) or more, "
                    'set too_long = "truncate", or add rows with answers',
                )
            stored = arrays, attrs.asdict(report)
            save(entry, TYPES, *stored)
    table = table_of(stored[0], digest, Report(**stored[1]))
    if table.report.bad > source.max_bad_rows:  # created with a larger limit
        index_of(name, source, cache, split=written.last_only)
    return attrs.evolve(table, name=name, pad_id=int(tokenizer.pad_token_id))


def drawn_table(
    name: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    key: Key,
    **options: Any,
) -> TokenTable:
    """Draw ``count`` rows of ``source`` that pass, by ``key`` without replacement.

    They are in the source's order. All rows are used if there are fewer. Other arguments are those
    of :func:`token_table`.

    Rows are drawn before tokenisation: for a source of millions of rows, only a few more than
    ``count`` rows are tokenised. A larger draw contains all smaller draws. Cost: the index
    (:func:`~hgms_mix.lm.rows.index_of`), one or two more passes over the file that leave most of it
    unparsed, and tokens of the drawn rows.
    """
    template = options["template"]
    written = template_for(template, tokenizer) if isinstance(template, str) else template
    index = index_of(name, source, options.get("cache_dir"), split=written.last_only)
    order = torch.randperm(index.size, generator=key.generator())
    tried = min(count, index.size)
    while True:
        numbers = torch.from_numpy(index.rows[order[:tried].numpy()])  # in the order of the draw
        pick = (
            torch.from_numpy(index.rows[order[:tried].sort().values.numpy()])
            if tried < index.size
            else None
        )
        try:
            table = token_table(name, source, tokenizer, **options, pick=pick)
        except NoRowsLeft:
            if pick is None:
                raise
            passed = torch.zeros(0, dtype=torch.int64)
        else:
            ascending, back = table.rows.sort()
            place = torch.searchsorted(ascending, numbers).clamp_max(table.size - 1)
            passed = back[place[ascending[place] == numbers]]
        if len(passed) >= count or pick is None:
            return (
                table
                if len(passed) == table.size <= count
                else table.take(passed[:count].sort().values)
            )
        # Estimate the required number from the share of rows that passed, plus a tenth.
        tried = min(
            index.size,
            max(
                2 * tried if not len(passed) else math.ceil(1.1 * count * tried / len(passed)),
                tried + 16,
            ),
        )


def _identity(source: Source) -> dict[str, Any]:
    """Return the fields of a source that change its tokens."""
    fields = attrs.asdict(cast(Any, source))
    return {key: value for key, value in fields.items() if key not in ("path", "max_bad_rows")}


def tokenise_rows(
    rows: Sequence[Record],
    *,
    form: Format | None,
    source: Source,
    place: Place,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    max_length: int,
    too_long: TooLong,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tokenise rows; exclude or cut rows that are too long."""
    examples = [
        numbered_example(row, number, form, source, template.last_only) for number, _, row in rows
    ]
    pieces = []
    for example in examples:
        try:
            pieces.append(template.pieces(example.messages))
        except DataError as error:
            raise DataError(
                error.code,
                f"row {example.row} of {source.path}: {error.message}",
                place=place,
                hint=error.hint,
            ) from error
    encoded = list(zip(examples, encode(pieces, tokenizer, template), strict=True))
    lengths = [len(ids) for _, (ids, _) in encoded]
    kept = [  # the loss of a token needs a token before it
        (example.row, ids, learned)
        for example, (ids, learned) in encoded
        if any(learned[1:max_length]) and (too_long == "truncate" or len(ids) <= max_length)
    ]
    tokens = (np.asarray(ids[:max_length], dtype=np.int32) for _, ids, _ in kept)
    masks = (np.asarray(learned[:max_length], dtype=np.bool_) for *_, learned in kept)
    arrays = {
        "tokens": np.concatenate([np.zeros(0, np.int32), *tokens]),
        "mask": np.concatenate([np.zeros(0, np.bool_), *masks]),
        "lengths": np.array([min(len(ids), max_length) for _, ids, _ in kept], np.int64),
        "rows": np.array([row for row, *_ in kept], np.int64),
    }
    return arrays, {
        "too_long": len(encoded) - len(kept),
        "truncated": sum(len(ids) > max_length for _, ids, _ in kept),
        "longest": max(lengths, default=0),
        "shortest": min(lengths, default=0),
    }


def _tokenise(
    name: str,
    source: Source,
    work: Callable[..., tuple[dict[str, np.ndarray], dict[str, Any]]],
    split: bool,
    pick: Tensor | None,
    cache: Path,
) -> tuple[dict[str, np.ndarray], Report]:
    """Return the arrays of a table, with the rows in the order of ``pick`` or of the source."""
    index = index_of(name, source, cache, split=split)
    wanted = index.rows if pick is None else pick.numpy()
    numbers = np.unique(wanted)
    form, records = records_at((name,), source, numbers, split=split)
    work = functools.partial(work, form=form)
    first = list(itertools.islice(records, PROBED_LENGTHS))
    records = itertools.chain(first, records)
    # Warn before minutes are spent on the other rows.
    if len(numbers) > PROBED_LENGTHS and work(first)[1]["too_long"] == PROBED_LENGTHS:
        warn(f"the first {PROBED_LENGTHS} rows of {name!r} do not fit: increase task.max_length")
    with meter(f"tokenising {name}", " rows", len(numbers)) as bar:
        leaves, parts = compute_parts(records, work, TYPES, bar.update)
    report = attrs.evolve(
        index.report,
        looked=len(numbers),
        longest=max((part["longest"] for part in parts), default=0),
        shortest=min((part["shortest"] for part in parts), default=0),
        **{what: sum(part[what] for part in parts) for what in ("too_long", "truncated")},
    )
    if np.array_equal(numbers, wanted) or not len(leaves["rows"]):
        return leaves, report
    place = np.searchsorted(leaves["rows"], wanted).clip(max=len(leaves["rows"]) - 1)
    order = torch.from_numpy(place[leaves["rows"][place] == wanted])
    table = table_of(leaves, "", report).take(order)
    return {name: getattr(table, name).numpy() for name in TYPES}, report


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of all settings that determine the tokens of a text."""
    named = [tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(tokenizer.all_special_tokens)]
    if tokenizer.is_fast:
        core = tokenizer.backend_tokenizer
        # Settings of the last call are not part of the tokenizer; every call of transformers sets
        # them.
        core.no_padding()
        core.no_truncation()
        inside = core.to_str()
    else:
        inside = json.dumps(
            [
                type(tokenizer).__qualname__,
                sorted(tokenizer.get_vocab().items()),
                repr(tokenizer.init_kwargs),
            ]
        )
    return store.digest(json.dumps(named), inside)


def encode(
    rows: Sequence[Sequence[Piece]], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[tuple[list[int], list[bool]]]:
    """Return the tokens of every row, and a flag per token for learning.

    All rows are tokenised in one batched call.
    """
    if not _separable(tokenizer):
        return _encode_whole(rows, tokenizer, template)
    texts = list(dict.fromkeys(text for row in rows for text, _ in row if isinstance(text, str)))
    ids = []
    if texts:
        ids = tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=not template.specials,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
    known = dict(zip(texts, ids, strict=True))
    encoded = []
    for row in rows:
        parts = [(known[text] if isinstance(text, str) else [text], learn) for text, learn in row]
        encoded.append(
            (
                [token for ids, _ in parts for token in ids],
                [learn for ids, learn in parts for _ in ids],
            )
        )
    return encoded


def _separable(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the text of joined pieces equals the join of their texts.

    Slow tokenizers have no offsets, so pieces are used for them.
    """
    if not tokenizer.is_fast:
        return True
    left, right = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd"))
    glued = tokenizer.decode(
        [*left, *right], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return glued.strip() == "abcd"


def _encode_whole(
    rows: Sequence[Sequence[Piece]], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[tuple[list[int], list[bool]]]:
    texts = []
    spans = []
    for row in rows:
        text = ""
        learned = []
        for part, learn in row:
            begin = len(text)
            text += part if isinstance(part, str) else str(tokenizer.convert_ids_to_tokens(part))
            if learn:
                learned.append((begin, len(text)))
        texts.append(text)
        spans.append(learned)
    batch = tokenizer(
        texts,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    encoded = []
    for tokens, offsets, learned in zip(
        batch["input_ids"], batch["offset_mapping"], spans, strict=True
    ):
        inside = [
            begin < stop and any(low < stop <= high for low, high in learned)
            for begin, stop in offsets
        ]
        encoded.append((tokens, inside))
    return encoded


def prompt_tokens(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[int]:
    """Return the tokens of the prompt for the next answer.

    They equal the tokens before that answer in training.
    """
    return encode([template.opening(messages)], tokenizer, template)[0][0]


def stop_tokens(tokenizer: PreTrainedTokenizerBase, template: Template) -> list[int]:
    """Return the tokens that end an answer.

    They are the template's own end mark and the tokenizer's end token.

    Examples
    --------
    >>> from hgms_mix.lm.templates import template_for
    >>> from hgms_mix.lm.tokenizers import byte_tokenizer
    >>> stop_tokens(byte_tokenizer(), template_for("plain", byte_tokenizer()))
    [257]
    """
    tokens, learned = encode(
        [template.pieces([Message("user", "a"), Message("assistant", "b")])], tokenizer, template
    )[0]
    last = [token for token, learn in zip(tokens, learned, strict=True) if learn][-1:]
    own = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    marks = [token for token in last if token in own]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return list(dict.fromkeys([*marks, *end]))
