"""Candidate generator `ula`: Langevin chains at temperature λ."""

from __future__ import annotations

from hgms.generators.ula.ula import Ula as Ula
from hgms_core import hookimpl


@hookimpl
def hgms_register_generators() -> list[type]:
    return [Ula]
