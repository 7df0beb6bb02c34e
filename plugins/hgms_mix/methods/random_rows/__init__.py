"""Random rows of all sources, by their sizes: what every choice of rows or weights is read
beside: method `random-rows`.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.random_rows.random_rows import RandomRows as RandomRows


@hookimpl
def hgms_register_methods() -> list[type]:
    return [RandomRows]
