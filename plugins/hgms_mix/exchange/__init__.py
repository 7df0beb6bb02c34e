"""Hand-over of mixtures to other trainers, in both directions, and mixing during training.

``hgms mix export`` writes a learned mixture and its sample for another trainer, and
``hgms mix import`` reads a trainer's configuration. Both are in ``command.py``.

``hgms_mix.exchange.online`` contains :class:`MixtureCallback` for the Trainer of transformers and
TRL's SFTTrainer. It needs the extra ``llm``.
"""

from __future__ import annotations
