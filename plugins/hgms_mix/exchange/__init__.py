"""Hand-over of mixtures to other trainers, and mixing during training.

``hgms mix export`` (``command.py``) writes a learned mixture and its sample for another trainer.

``hgms_mix.exchange.online`` contains :class:`MixtureCallback` for the Trainer of transformers and
TRL's SFTTrainer. It needs the extra ``llm``.
"""

from __future__ import annotations
