"""Named data sources: files of rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, final

from attrs import field, validators

from hgms.arguments import require, require_known
from hgms_core import component
from hgms_core.errors import Place
from hgms_core.validators import at_least, not_empty, optional
from hgms_mix.lm.formats import FORMATS

LONGEST_NAME = 120
OWN_NAMES = 'fields = { prompt = "COLUMN", completion = "COLUMN" }'
"""The example in messages for columns with names that no format has."""


def _format(_source: object, _attribute: object, value: object) -> None:
    require_known("format", str(value), ["auto", *FORMATS], ("format",))


def _fields(_source: object, _attribute: object, value: Mapping[str, str]) -> None:
    require(
        all(isinstance(text, str) and text for pair in value.items() for text in pair),
        "wrong-value",
        f"fields={dict(value)} must map names of fields to names of columns",
        place=("fields",),
        hint=f"write {OWN_NAMES}",
    )
    require(
        len(set(value.values())) == len(value),
        "wrong-value",
        f"fields={dict(value)} uses a column for two fields",
        place=("fields",),
    )


text: Any = [validators.instance_of(str), not_empty]
count: Any = at_least(0)


@final
@component
class Source:
    """A source of rows of text: a file.

    A row is bad if it has a column or key that changes its meaning and cannot be used: ``label =
    false`` (the answer is marked as bad), ``tools``, ``images``, ``history``, a ``context`` outside
    an Alpaca row, ``tool_calls`` or ``reasoning_content`` of a turn. Other columns are ignored. A
    turn with ``"weight": 0`` (or ``"train": false``, ``"loss": false``) is excluded from the loss.
    ``fields = { ignored = "COLUMN" }`` skips a column on purpose.

    A file is ``.json`` (an array of objects), ``.jsonl`` (one object per line) or ``.parquet``,
    plain, ``.gz`` or ``.zst``. The contents determine the format of JSON, so JSON lines may be
    named ``.json``. A path may also be a folder of such files, or a pattern with ``*`` (``**``: in
    subfolders, too): their rows follow each other in the order of the files' paths.
    ``$VARIABLES`` and ``~`` in a path are expanded.

    Use when data has a separate name and weight, or is a validation or test set. The loss is
    computed on answers only. For text without prompt and answer (``format = "text"``) it is
    computed on the whole text.

    Parameters
    ----------
    path
        a file, a folder or a pattern. A string in place of the table is its path:
        ``faq = "faq.jsonl"``.
    format
        One of :data:`~hgms_mix.lm.formats.FORMATS`, or ``auto`` (the format of most of the first
        rows).
    fields
        The file's own columns for the fields of the format, if their names differ (None: no
        difference): ``fields = { prompt = "frage", completion = "antwort" }``.
    skip, rows
        Select ``rows`` rows (None: all) after the first ``skip``, in the file's order or, with
        ``shuffle_seed``, in the order of a permutation drawn from it. Bad rows do not count.
    completion
        The replacement of every answer (None: no replacement); ``"."`` is ScaleBiO's corruption.
    max_bad_rows
        The number of skipped rows (malformed or without fields) before an error is raised.

    Raises
    ------
    ConfigError
        For a variable that is not set.
    DataError
        For data that is missing, empty, damaged, malformed or too short.
    MissingExtra
        Without pyarrow.

    Notes
    -----
    Cost: one pass over the file. A JSON array is read as a whole; every other type of file row by
    row, for any length.

    Source: HG-MS paper, appendix "Controlled GPT-2" and "Real-world language models" (named sources
    of instruction rows).

    Examples
    --------
    >>> Source(path="$HGMS_DATA/gsm8k/train.jsonl.gz", rows=1000, shuffle_seed=0).format
    'auto'
    """

    shorthand: ClassVar[str] = "path"
    """The field that a string in place of the table sets."""

    path: str = field(validator=text)
    format: str = field(default="auto", validator=_format)
    fields: Mapping[str, str] | None = field(default=None, validator=optional(_fields), hash=False)
    skip: int = field(default=0, validator=count)
    rows: int | None = field(default=None, validator=optional(at_least(1)))
    shuffle_seed: int | None = None
    completion: str | None = field(default=None, validator=optional(text))
    max_bad_rows: int = field(default=0, validator=count)


def check_names(names: Iterable[str], what: str = "source", place: Place = ()) -> None:
    """Raise ConfigError for invalid names of sources.

    Names must not be empty, equal, or differ by case only (a file system or a reader confuses
    them). They must be valid parts of file names, since files of results contain them. ``place`` is
    the place of their table.
    """
    seen: dict[str, str] = {}
    for name in names:
        require(
            name.strip() and name.isprintable() and not (set(name) & set("/\\")),
            "wrong-value",
            f"the name {name[:80]!r} of a {what} is empty or contains a slash or control "
            "characters",
            place=place,
            hint="use a different name for each: names of files include it",
        )
        require(
            len(name.encode()) <= LONGEST_NAME,
            "wrong-length",
            f"the name {name[:40]!r}… of a {what} has more than {LONGEST_NAME} bytes",
            place=place,
            hint="use a shorter name: names of files include it",
        )
        folded = name.strip().casefold()
        require(
            folded not in seen,
            "duplicate-name",
            f"two {what}s have the names {seen.get(folded)!r} and {name!r}, which are equal or "
            "differ only in case or spaces",
            place=place,
            hint="rename the second: names connect weights and data",
        )
        seen[folded] = name


def mixture_shares(
    mixture: Mapping[str, float], sources: Collection[str], what: str
) -> list[float]:
    """Return the weights of all sources in their order, summing to one.

    ``what`` is the option that sets them.
    """
    for name, share in mixture.items():
        require_known("source", name, sources, (what, name))
        require(
            0 <= share < math.inf,
            "out-of-range",
            f"the weight {share} of {name!r} must be at least 0 and finite",
            place=(what, name),
        )
    total = sum(mixture.values())
    require(total, "wrong-value", f"{what}={dict(mixture)} has no positive weight", place=(what,))
    return [mixture.get(name, 0.0) / total for name in sources]
