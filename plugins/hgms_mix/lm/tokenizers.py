"""Tokenizers: a byte-level tokenizer, GPT-2's from its two files, and transformers' tokenizers.

The byte-level tokenizer needs no file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hgms.arguments import require
from hgms.config import expand
from hgms_core import ConfigError
from hgms_core.errors import Place
from hgms_core.torch_errors import first_line
from hgms_mix.lm.files import without_expansion
from hgms_mix.lm.hub import resolve_name, transformers_quietly

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

    Raises
    ------
    MissingExtra
        Without transformers.

    Notes
    -----
    Cost: milliseconds.

    Examples
    --------
    >>> tokenizer = byte_tokenizer()
    >>> tokenizer("Grüße")["input_ids"] == list("Grüße".encode())
    True
    >>> len(tokenizer), tokenizer.decode([72, 105])
    (259, 'Hi')
    """
    transformers = transformers_quietly()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    printable = bytes_to_unicode()
    marks = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    core = Tokenizer(models.BPE(vocab={printable[byte]: byte for byte in range(256)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(marks.values()))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, **marks
    )


def load_tokenizer(
    spec: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    place: Place = ("task", "model", "tokenizer"),
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that ``spec`` names, always with a padding token.

    ``spec`` is ``"bytes"`` (:func:`byte_tokenizer`), a folder with GPT-2's
    ``encoder.json`` and ``vocab.bpe``, any other folder, or a name on the Hub (transformers'
    AutoTokenizer). A tokenizer without a padding token uses its end token for padding: the table's
    own mask excludes padding from every loss, so the two are never confused.

    Raises
    ------
    ConfigError
        For a path that does not exist, a tokenizer that cannot be loaded (also one with Python code
        that is not permitted), or neither padding nor end token.
    MissingExtra
        Without transformers.
    """
    if spec == BYTES:
        return byte_tokenizer()
    transformers = transformers_quietly()
    folder = expand(spec, place)
    vocabulary = folder / "encoder.json"
    merges = folder / "vocab.bpe"
    of_gpt2 = vocabulary.is_file() and merges.is_file()
    where = resolve_name(spec, "tokenizer", place)
    if folder.is_dir() and not of_gpt2 and not any((folder / name).is_file() for name in FILES):
        files = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "(none)"
        raise ConfigError(
            "missing-file",
            f"the folder {spec!r} has no tokenizer: its files are {files}",
            place=place,
            hint=f'set task.model.tokenizer to "{BYTES}", a folder with tokenizer.json, or '
            "OWNER/NAME on the Hub",
        )
    try:
        tokenizer: PreTrainedTokenizerBase = (
            transformers.GPT2TokenizerFast(vocab=str(vocabulary), merges=str(merges))
            if of_gpt2
            else transformers.AutoTokenizer.from_pretrained(
                where, revision=revision, trust_remote_code=trust_remote_code
            )
        )
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


def ensure_padding(
    tokenizer: PreTrainedTokenizerBase, place: Place = ("tokenizer",)
) -> PreTrainedTokenizerBase:
    """Return the tokenizer; if it has no padding token, with its end token for padding."""
    if tokenizer.pad_token_id is None:
        require(
            tokenizer.eos_token_id is not None,
            "missing-token",
            "the tokenizer has neither a padding nor an end token, so batches cannot be padded",
            place=place,
            hint="set tokenizer.pad_token, call save_pretrained, and load it from that folder",
        )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
