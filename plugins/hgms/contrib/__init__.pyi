from hgms.contrib.kfac import KFAC as KFAC
from hgms.contrib.lancbio import LancBiO as LancBiO
from hgms.contrib.recycled_cg import RecycledCG as RecycledCG
from hgms.contrib.roulette import Roulette as Roulette
