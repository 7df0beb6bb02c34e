"""Control characters in text that others wrote: a terminal would obey them."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""Text whose control characters, which a terminal would obey, are spelt out; tabs and line
    feeds stay.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))
