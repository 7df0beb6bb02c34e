"""Hand-over: a learned mixture and its sample for other trainers, their configurations back, and
mixing while they train.

``hgms mix export`` and ``hgms mix import`` are in ``command.py``; ``hgms_mix.exchange.online``
holds :class:`MixtureCallback` for the Trainer of transformers and TRL's SFTTrainer, which need the
extra ``llm``.
"""

from __future__ import annotations
