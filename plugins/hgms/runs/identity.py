"""The identity of a run: which configurations define the same run, and how others differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hgms.config.tables import difference, flatten, parse_toml, show
from hgms.runs.config import UNCOMPARED
from hgms.store import digest
from hgms_core.errors import CheckpointError

SHOWN = 3
"""Maximum number of different settings that a message lists for two configurations."""


def comparable_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the settings that may differ within the same run."""
    settings = config.get("run")
    kept = settings.items() if isinstance(settings, Mapping) else ()
    return {**config, "run": {key: value for key, value in kept if key not in UNCOMPARED}}


def config_key(config: Mapping[str, Any]) -> str:
    """Return the sha256 of a configuration, which its results store as their key.

    Examples
    --------
    >>> config_key({"seed": 0}) == config_key({"seed": 0, "run": {"out": "runs"}})
    True
    >>> config_key({"seed": 0}) == config_key({"seed": 1})
    False
    """
    text = json.dumps(comparable_settings(config), sort_keys=True, default=str)
    return digest(text)


def text_key(text: str) -> str:
    """Return the key of a configuration in TOML; the digest of a text that is not TOML."""
    try:
        return config_key(parse_toml(text, "config.toml"))
    except CheckpointError:
        return digest(text)


def is_same(text: str, other: str) -> bool:
    """Return whether two texts configure the same run; a text that is not TOML does not."""
    try:
        return text == other or _comparable_text(text) == _comparable_text(other)
    except (CheckpointError, AttributeError):
        return False


def differences(own: str, other: str) -> list[str]:
    """Return the first settings in which the folder's text and a run's text differ, one per line.

    The result is empty if a text is not TOML.
    """
    try:
        tables = [flatten(_comparable_text(text)) for text in (own, other)]
    except (CheckpointError, AttributeError):
        return []
    keys = list(difference(tables))
    lines = []
    for key in keys[:SHOWN]:
        there, here = (show(table[key]) if key in table else "not set" for table in tables)
        lines.append(f"{key}: {there} in the folder, {here} in this run")
    if len(keys) > SHOWN:
        lines.append(f"and {len(keys) - SHOWN} more")
    return lines


def _comparable_text(text: str) -> dict[str, Any]:
    return comparable_settings(parse_toml(text, "config.toml"))
