"""Mixtures learned beside a model that trains on them: `doremi`, `doge`, `skill-it`, `aioli`, and `hg-ms-online`."""

from __future__ import annotations

from hgms_core import Composition, hookimpl
from hgms_online_mixing.aioli import Aioli as Aioli
from hgms_online_mixing.aligned_means import AlignedMeans as AlignedMeans
from hgms_online_mixing.doge import DoGE as DoGE
from hgms_online_mixing.doremi import DoReMi as DoReMi
from hgms_online_mixing.hg_ms_online import HG_MS_ONLINE, UNIFORM_ONLINE
from hgms_online_mixing.mixture_branches import MixtureBranches as MixtureBranches
from hgms_online_mixing.skill_it import SkillIt as SkillIt


@hookimpl
def hgms_register_generators() -> list[type]:
    return [MixtureBranches]


@hookimpl
def hgms_register_hypergradients() -> list[type]:
    return [AlignedMeans]


@hookimpl
def hgms_register_methods() -> list[type | Composition]:
    return [Aioli, DoGE, DoReMi, SkillIt, HG_MS_ONLINE, UNIFORM_ONLINE]
