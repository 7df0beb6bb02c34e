"""Methods that learn a data mixture or select rows."""

from __future__ import annotations

from hgms.lazy import Places, attach

PLACES: Places = {
    "hgms_mix.methods.fastmix": "FastMix",
    "hgms_mix.methods.less": "Less",
    "hgms_mix.methods.online": "AlignedMeans DoGE DoReMi MixtureBranches",
    "hgms_mix.methods.random_rows": "RandomRows",
    "hgms_mix.methods.rds": "Rds",
    "hgms_mix.methods.regmix": "RegMix",
    "hgms_mix.methods.rho_loss": "RhoLoss",
}

__getattr__, __dir__, __all__ = attach(__name__, PLACES)
