"""Selectors `best-of-n`, `worst` and `first`."""

from __future__ import annotations

from hgms.selectors.selectors import BestOfN as BestOfN
from hgms.selectors.selectors import First as First
from hgms.selectors.selectors import Worst as Worst
from hgms_core import hookimpl


@hookimpl
def hgms_register_selectors() -> list[type]:
    return [BestOfN, Worst, First]
