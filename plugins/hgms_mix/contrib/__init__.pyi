from hgms_mix.contrib.aioli import Aioli as Aioli
from hgms_mix.contrib.op_mix import OpMix as OpMix
from hgms_mix.contrib.skill_it import SkillIt as SkillIt
