"""Experimental or rarely used methods; each keeps its registered name."""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms_mix.contrib.aioli": "Aioli",
    "hgms_mix.contrib.op_mix": "OpMix",
    "hgms_mix.contrib.skill_it": "SkillIt",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
