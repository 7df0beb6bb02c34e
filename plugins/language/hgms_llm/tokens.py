"""Token tables: all rows of a source as tokens, flat in memory or mapped from a file that is named by what made it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

import attrs
import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from hgms_core import ConfigError, DataError, unknown
from hgms_llm.sources import Example, Source, content, read
from hgms_llm.templates import Template, encode, template_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 1
"""Of everything between a row and its tokens; raised when any of that changes, so that old cache entries are not found."""

CHUNK = 4096
TooLong = Literal["drop", "truncate"]
LEAVES = {"tokens": torch.int32, "mask": torch.bool, "offsets": torch.int64, "rows": torch.int64, "keys": torch.int64}


@final
@frozen(kw_only=True)
class Report:
    """What became of a source's rows: ``examples`` were read as asked (and ``bad`` rows left out of the file's ``total``);
    ``blank`` have no answer to learn, ``too_long`` more than the allowed tokens, and were dropped; ``truncated`` were cut;
    ``longest`` and ``shortest`` are in tokens, of all examples with an answer before any was cut."""

    format: str = ""
    total: int = 0
    bad: int = 0
    examples: int = 0
    blank: int = 0
    too_long: int = 0
    truncated: int = 0
    longest: int = 0
    shortest: int = 0

    @property
    def kept(self) -> int:
        return self.examples - self.blank - self.too_long


@final
@frozen(eq=False)
class TokenTable:
    """Rows of tokens laid end to end: row ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``, and ``mask`` marks its answers.

    ``rows`` are the rows' numbers in the source, ``keys`` 64-bit digests of their normalised prompts (for exact matching),
    ``digest`` identifies everything that made the table.

    >>> table = TokenTable("s", torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([False, True, True]),
    ...                    torch.tensor([0, 1, 3]), torch.tensor([0, 1]), "digest", pad_id=9)
    >>> table.gather(torch.tensor([[0], [1]]))[0].tolist()
    [[[5, 9]], [[6, 7]]]
    """

    name: str
    tokens: Tensor
    mask: Tensor
    offsets: Tensor
    rows: Tensor
    digest: str
    keys: Tensor = field(factory=lambda: torch.zeros(0, dtype=torch.int64))
    pad_id: int = 0
    report: Report = Report()

    @property
    def size(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row."""
        return self.offsets.diff()

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (int64) and mask of the rows numbered by ``index`` (any shape), right-padded to the longest of them:
        ``[*index.shape, T]``. Padding is ``pad_id`` and never in the mask."""
        where, inside = self._positions(index)
        tokens = torch.where(inside, self.tokens[where].long(), self.pad_id)
        return tokens, self.mask[where] & inside

    def _positions(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """For each asked row and column: a place in the flat tensors, and whether the row reaches that far."""
        index = index.to(self.offsets.device)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self.size):
            raise IndexError(f"rows {int(index.min())} … {int(index.max())} of a table of {self.size}")
        start = self.offsets[index]
        length = self.offsets[index + 1] - start
        columns = torch.arange(int(length.max()) if length.numel() else 0, device=start.device)
        inside = columns < length.unsqueeze(-1)
        return torch.where(inside, start.unsqueeze(-1) + columns, 0), inside

    def take(self, index: Tensor) -> TokenTable:
        """The table of these rows (a 1-D ``index``), in that order; its digest is that of this table and of the choice."""
        index = index.to(self.offsets.device, torch.int64)
        where, inside = self._positions(index)
        flat = where[inside]
        sha = hashlib.sha256(self.digest.encode() + index.cpu().numpy().tobytes())
        return attrs.evolve(
            self,
            tokens=self.tokens[flat],
            mask=self.mask[flat],
            offsets=_offsets(self.lengths[index]),
            rows=self.rows[index],
            keys=self.keys[index] if len(self.keys) else self.keys,
            digest=sha.hexdigest(),
        )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


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
    made_of = {
        "version": VERSION,
        "content": content(name, source),
        "source": {key: value for key, value in attrs.asdict(source).items() if key not in ("path", "max_bad_rows")},
        "template": [written.name, written.text],
        "tokenizer": fingerprint(tokenizer),
        "max_length": max_length,
        "too_long": too_long,
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()

    def make() -> TokenTable:
        return _made(name, source, tokenizer, written, max_length, too_long, digest)

    if cache_dir is None:
        return make()
    table = _cached(Path(cache_dir).expanduser(), digest, make)
    if table.report.bad > source.max_bad_rows:
        return make()  # made when more bad rows were allowed: reading the source says which rows they are
    return attrs.evolve(table, name=name, pad_id=tokenizer.pad_token_id)


def _made(
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
    report = Report(
        format=reading.format,
        total=reading.total,
        bad=reading.bad,
        examples=len(reading.examples),
        blank=len(reading.examples) - len(examples),
        too_long=dropped,
        truncated=truncated,
        longest=longest,
        shortest=shortest,
    )
    if not kept:
        raise DataError(_nothing_left(f"source {name!r} ({source.where})", report, max_length, too_long))
    return TokenTable(
        name,
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate(masks)),
        _offsets(torch.tensor([len(row) for row in tokens])),
        torch.tensor([example.row for example in kept]),
        digest,
        torch.tensor([key_of(example.key) for example in kept]),
        int(tokenizer.pad_token_id),
        report,
    )


def left_out(parts: Mapping[str, Mapping[str, TokenTable]]) -> str:
    """What to tell a person about rows that are not used, by part and name; empty where all are."""
    lines = []
    for part, tables in parts.items():
        for name, table in tables.items():
            found = table.report
            counts = {"bad": found.bad, "without an answer": found.blank, "too long": found.too_long, "cut": found.truncated}
            told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
            if told:
                lines.append(f"  {part} {name!r}: {told}, of {found.examples + found.bad}")
    return "\n".join(["rows left out or cut:", *lines]) if lines else ""


@functools.cache
def warn(said: str) -> None:
    """A message of the library, once in a process."""
    logging.getLogger("hgms").warning(said)


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


# -- the cache --------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where tables are kept unless told otherwise: ``tokens`` in ``$HGMS_CACHE``, or in ``hgms`` of the user's cache."""
    own = os.environ.get("HGMS_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hgms"
    return root.expanduser() / "tokens"


def _cached(folder: Path, digest: str, make: Callable[[], TokenTable]) -> TokenTable:
    from filelock import FileLock

    path = folder / f"{digest}.safetensors"
    table = _load(path, digest)
    if table is not None:
        return table
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
    try:
        table = _load(path, digest)  # another process may have made it while this one waited
        if table is not None:
            return table
        made = make()
        with _writing(folder):
            _save(path, made)
    finally:
        lock.release()
    return _load(path, digest) or made


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write the token cache {folder}: {getattr(error, 'strerror', None) or error}\n"
            "  free some space there, or set HGMS_CACHE to another folder"
        ) from error


def _leaves(table: TokenTable) -> dict[str, Tensor]:
    return {leaf: getattr(table, leaf) for leaf in LEAVES}


def _checksum(leaves: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for leaf in LEAVES:
        sha.update(leaves[leaf].numpy().data)
    return sha.hexdigest()


def _save(path: Path, table: TokenTable) -> None:
    import safetensors.torch

    leaves = _leaves(table)
    about = {"digest": table.digest, "sha256": _checksum(leaves), "report": json.dumps(attrs.asdict(table.report))}
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        safetensors.torch.save_file(leaves, aside, metadata=about)
        with aside.open("rb+") as stream:
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _load(path: Path, digest: str) -> TokenTable | None:
    """The entry, mapped into memory; None where there is none, or (with a warning) where it is damaged."""
    if not path.exists():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stored:
            about = stored.metadata() or {}
            leaves = {leaf: stored.get_tensor(leaf) for leaf in LEAVES}
        problem = _problem(leaves, about, digest)
        if problem is None:
            report = Report(**json.loads(about["report"]))
            return TokenTable(name="", digest=digest, report=report, **leaves)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    warn(f"the token cache entry {path} is damaged ({problem}): it is made anew")
    return None


def _problem(leaves: dict[str, Tensor], about: dict[str, str], digest: str) -> str | None:
    if about.get("digest") != digest:
        return "it is of another table"
    if any(leaves[leaf].dtype != dtype for leaf, dtype in LEAVES.items()):
        return "a tensor of the wrong type"
    if about.get("sha256") != _checksum(leaves):
        return "its contents do not match the recorded sha256"
    return None
