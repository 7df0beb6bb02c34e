"""Mixtures learned beside a model that trains on them: `doremi`, `doge`, `skill-it`, `aioli`."""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_online_mixing.aioli import Aioli as Aioli
from hgms_online_mixing.doge import DoGE as DoGE
from hgms_online_mixing.doremi import DoReMi as DoReMi
from hgms_online_mixing.skill_it import SkillIt as SkillIt


@hookimpl
def hgms_register_methods() -> list[type]:
    return [Aioli, DoGE, DoReMi, SkillIt]
