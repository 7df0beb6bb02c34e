"""From pieces of text to tokens, each to be learned or not.

Tokens of the prompt and of prompt with answer, taken separately and cut by length, differ at the border for most byte-pair
encodings; pieces are tokenised on their own. Tokenizers that put a space before every text (SentencePiece of Llama 2) would do
so before every piece: the whole text is tokenised once for them, and a token belongs to the piece that its last character lies
in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from hgms_llm.formats import Message
from hgms_llm.templates import Piece, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBED = 16


def encode(
    rows: Sequence[Sequence[Piece]], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[tuple[list[int], list[bool]]]:
    """Tokens of every row, and for each token whether it is to be learned. One batched call of the tokenizer for all rows."""
    if _way(tokenizer) == "whole":
        return _encode_whole(rows, tokenizer, template)
    texts = list(dict.fromkeys(text for row in rows for text, _ in row if isinstance(text, str)))
    ids = _ids(texts, tokenizer, template) if texts else []
    known = dict(zip(texts, ids, strict=True))
    encoded = []
    for row in rows:
        tokens: list[int] = []
        learned: list[bool] = []
        for text, learn in row:
            part = known[text] if isinstance(text, str) else [text]
            tokens += part
            learned += [learn] * len(part)
        encoded.append((tokens, learned))
    return encoded


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, template: Template) -> list[list[int]]:
    def usual(some: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(
            some,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            split_special_tokens=not template.specials,
            verbose=False,
        )["input_ids"]
        return ids

    # the same without the offsets, which take a third of the time; for classes that add something of their own, the usual way
    expected = usual(texts[:PROBED])
    if not tokenizer.is_fast:
        return expected + usual(texts[PROBED:])
    ids = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return ids if ids[:PROBED] == expected else usual(texts)


def _way(tokenizer: PreTrainedTokenizerBase) -> Literal["pieces", "whole"]:
    """Whether pieces put together read as their texts put together. Slow tokenizers have no offsets: pieces it is."""
    if not tokenizer.is_fast:
        return "pieces"
    left, right = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd"))
    glued = tokenizer.decode([*left, *right], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return "pieces" if glued.strip() == "abcd" else "whole"


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
    marks = [token for token in last if token in tokenizer.all_special_ids or token in _added(tokenizer)]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    return list(dict.fromkeys([*marks, *end]))


def _added(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return set(tokenizer.get_added_vocab().values())
