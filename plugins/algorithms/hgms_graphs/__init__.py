"""Steps recorded once and replayed: CUDA graphs."""

from __future__ import annotations

from hgms_graphs.graphs import RecordedProduct, Recording, recorded

__all__ = ["RecordedProduct", "Recording", "recorded"]
