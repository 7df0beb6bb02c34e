"""The peers' tests are collected only where the peers are installed (the ``peers`` extra)."""

from __future__ import annotations

import importlib.util

PEERS = ("jax", "jaxopt", "lineax", "torchopt")

collect_ignore = [] if all(importlib.util.find_spec(name) for name in PEERS) else ["test_peers.py"]
if not all(importlib.util.find_spec(name) for name in ("statsmodels", "scikit_posthocs")):
    collect_ignore.append("test_statistics_peers.py")
