"""Steps recorded once and replayed: CUDA graphs."""

from __future__ import annotations

from hgms_graphs.graphs import RecordedProduct, Replay, recorded

__all__ = [
    "RecordedProduct",
    "Replay",
    "recorded",
]
