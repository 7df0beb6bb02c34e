"""Selectors `best-of-n`, `worst` and `first`."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_selectors.selectors import BestOfN as BestOfN
from hgms_selectors.selectors import First as First
from hgms_selectors.selectors import Worst as Worst


@hookimpl
def hgms_register_selectors() -> list[type]:
    return [BestOfN, Worst, First]
