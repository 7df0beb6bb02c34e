"""Experimental or rarely used components, one file each, under their registered names."""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms.contrib.kfac": "KFAC",
    "hgms.contrib.lancbio": "LancBiO",
    "hgms.contrib.recycled_cg": "RecycledCG",
    "hgms.contrib.roulette": "Roulette",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
