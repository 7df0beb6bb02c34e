"""``hgms.tune``: hyperparameters learned by gradient, with baselines as candidates."""

from hgms.tuning.result import Judgement as Judgement
from hgms.tuning.result import TuneResult as TuneResult
from hgms.tuning.tuner import tune as tune
