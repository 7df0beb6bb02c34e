"""SmolLM2-135M-Instruct, real weights from the package index: the model ``smollm2-135m`` of
``[task.model]``.
"""

from __future__ import annotations

from hgms_mix.lm.smollm2.convert import folder as folder

__all__ = ["folder"]
