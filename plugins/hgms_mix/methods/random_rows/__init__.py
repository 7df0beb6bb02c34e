"""Method `random-rows`: random rows of all sources by size, the baseline for row selection and
weights.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.methods.random_rows.random_rows import RandomRows as RandomRows


@hookimpl
def hgms_register_methods() -> list[type]:
    return [RandomRows]
