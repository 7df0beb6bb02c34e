"""Mixtures learned while a model trains on them: `doremi`, `doge` and `hg-ms-online`."""

from __future__ import annotations

from hgms_core import Composition, hookimpl
from hgms_mix.methods.online.aligned_means import AlignedMeans as AlignedMeans
from hgms_mix.methods.online.doge import DoGE as DoGE
from hgms_mix.methods.online.doremi import DoReMi as DoReMi
from hgms_mix.methods.online.hg_ms_online import HG_MS_ONLINE, UNIFORM_ONLINE
from hgms_mix.methods.online.mixture_branches import MixtureBranches as MixtureBranches


@hookimpl
def hgms_register_generators() -> list[type]:
    return [MixtureBranches]


@hookimpl
def hgms_register_hypergradients() -> list[type]:
    return [AlignedMeans]


@hookimpl
def hgms_register_methods() -> list[type | Composition]:
    return [DoGE, DoReMi, HG_MS_ONLINE, UNIFORM_ONLINE]
