"""Control characters in untrusted text, which a terminal would execute."""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""Return the text with escaped control characters.

    A terminal would execute control characters. Tabs and line feeds are unchanged.

    Examples
    --------
    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))
