"""Tokenizers: a byte-level tokenizer, GPT-2's from its two files, and transformers' tokenizers.

The byte-level tokenizer needs no file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hgms.config import expand
from hgms_core import ConfigError, HgmsError
from hgms_core.errors import DataError, Place
from hgms_core.torch_errors import first_line
from hgms_mix.lm.files import without_expansion
from hgms_mix.lm.hub import resolve_name, transformers_quietly, untrusted_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTES = "bytes"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""A folder without any of these files contains no tokenizer."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte of UTF-8.

    The ids are 0 … 255 (the byte itself), then ``<bos>`` 256, ``<eos>`` 257, ``<pad>`` 258.

    Use when a small model is trained from scratch without downloads: every text in every language
    has a token sequence, and can be decoded. Avoid for pretrained models, which require their own
    tokens. No ``<bos>`` is put before a text.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer("Grüße")["input_ids"] == list("Grüße".encode())
    True
    >>> len(tokenizer), tokenizer.decode([72, 105])
    (259, 'Hi')

    Errors: MissingExtra without transformers. Cost: milliseconds.
    """
    transformers_quietly()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    printable = bytes_to_unicode()
    return _byte_level(
        {printable[byte]: byte for byte in range(256)}, [], ["<bos>", "<eos>", "<pad>"], split=False
    )


def gpt2_tokenizer(folder: str | Path, place: Place = ("folder",)) -> PreTrainedTokenizerFast:
    """Return GPT-2's byte-pair encoding from ``encoder.json`` and ``vocab.bpe``.

    These are the files as OpenAI published them (50,257 tokens).

    ``<|endoftext|>`` is the start, end and padding token. The table's own mask excludes padding
    from the loss, so that an end token as padding does no harm.

    Errors: DataError for files that are missing or have other contents; MissingExtra without
    transformers.
    """
    transformers_quietly()
    spec = folder
    folder = expand(str(folder), place)
    try:
        vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        missing = Path(error.filename).name
        raise DataError(
            "missing-file",
            f"the GPT-2 tokenizer in {spec} has no {missing}",
            place=place,
            hint="add both files, encoder.json and vocab.bpe",
        ) from None
    except (OSError, ValueError) as error:
        why = without_expansion(first_line(error), str(spec))
        raise DataError(
            "unreadable-file",
            f"the GPT-2 tokenizer in {spec} cannot be read: {why}",
            place=place,
            hint="download encoder.json and vocab.bpe again",
        ) from None
    split = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    pairs = [(parts[0], parts[-1]) for parts in split]
    try:
        # the Rust library would panic, which is no Exception
        if lost := [first + last for first, last in pairs if first + last not in vocabulary]:
            raise ValueError(f"the merged token {lost[0]!r} is missing")
        return _byte_level(vocabulary, pairs, ["<|endoftext|>"] * 3, split=True)
    except Exception as error:  # the Rust library raises plain Exceptions
        raise DataError(
            "damaged-file",
            f"encoder.json and vocab.bpe in {spec} do not match: {error}",
            place=place,
            hint="download both again",
        ) from None


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], marks: list[str], *, split: bool
) -> PreTrainedTokenizerFast:
    """Return a byte-pair encoding of bytes, with the start, end and padding marks.

    ``split``: split texts into words first.
    """
    transformers = transformers_quietly()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(dict.fromkeys(marks)))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), marks, strict=True))
    tokenizer: PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **names
    )
    return tokenizer


def load_tokenizer(
    spec: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    place: Place = ("task", "model", "tokenizer"),
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that ``spec`` names, always with a padding token.

    ``spec`` is ``"bytes"`` (:func:`byte_tokenizer`), a folder with ``encoder.json`` and
    ``vocab.bpe`` (:func:`gpt2_tokenizer`), any other folder, or a name on the Hub (transformers'
    AutoTokenizer). A tokenizer without a padding token uses its end token for padding: the table's
    own mask excludes padding from every loss, so the two are never confused.

    Errors: ConfigError for a path that does not exist, Python code that is not permitted, or
    neither padding nor end token; MissingExtra without transformers.
    """
    if spec == BYTES:
        return byte_tokenizer()
    transformers = transformers_quietly()
    folder = expand(spec, place)
    if (folder / "encoder.json").is_file() and (folder / "vocab.bpe").is_file():
        return gpt2_tokenizer(spec, place)
    where = resolve_name(spec, "tokenizer", place, revision=revision)
    if folder.is_dir() and not any((folder / name).is_file() for name in FILES):
        files = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "(none)"
        raise ConfigError(
            "missing-file",
            f"the folder {spec!r} has no tokenizer: its files are {files}",
            place=place,
            hint=f'set task.model.tokenizer to "{BYTES}", a folder with tokenizer.json, or '
            "OWNER/NAME on the Hub",
        )
    try:
        if not trust_remote_code and _needs_code(where, revision):
            raise untrusted_code("tokenizer", spec, place)
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            where, revision=revision, trust_remote_code=trust_remote_code
        )
    except HgmsError:
        raise
    except Exception as error:
        # transformers raises its own errors and those of the Hub and the Rust library.
        why = without_expansion(first_line(error), spec)
        raise ConfigError(
            "cannot-load",
            f"the tokenizer {spec!r} cannot be loaded: {type(error).__name__}: {why}",
            place=place,
            hint=f'use "{BYTES}", a folder of transformers, a folder with encoder.json and '
            "vocab.bpe, or OWNER/NAME on the Hub",
        ) from error
    return ensure_padding(tokenizer, place)


def _needs_code(where: str, revision: str | None) -> bool:
    """Return whether a tokenizer has a class that transformers does not contain."""
    from transformers.models.auto.tokenization_auto import (
        get_tokenizer_config,
        tokenizer_class_from_name,
    )

    settings = get_tokenizer_config(where, revision=revision)
    known = tokenizer_class_from_name(settings.get("tokenizer_class") or "") is not None
    return "AutoTokenizer" in settings.get("auto_map", {}) and not known


def ensure_padding(
    tokenizer: PreTrainedTokenizerBase, place: Place = ("tokenizer",)
) -> PreTrainedTokenizerBase:
    """Return the tokenizer; if it has no padding token, with its end token for padding."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "missing-token",
                "the tokenizer has neither a padding nor an end token, so batches cannot be padded",
                place=place,
                hint="set tokenizer.pad_token, call save_pretrained, and load it from that folder",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
