"""Candidate generator `ula`: Langevin chains at temperature λ."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_ula.ula import Ula as Ula


@hookimpl
def hgms_register_generators() -> list[type]:
    return [Ula]
