"""Resolution of a name in a configuration: an existing folder, or a model on the Hub."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from hgms.arguments import require
from hgms.config import expand
from hgms.packages import optional_module
from hgms_core import ConfigError
from hgms_core.errors import Place


def resolve_name(spec: str, what: str, place: Place) -> str:
    """Return the folder that ``spec`` names, or ``spec`` itself for a name on the Hub.

    ``what`` (model, tokenizer) and ``place`` (its option in the configuration) are for errors.

    Raises
    ------
    ConfigError
        For a missing folder, with the nearest spelling.
    """
    folder = expand(spec, place)
    if folder.is_dir():
        return str(folder)
    if spec[0] in "./~$" or spec.count("/") > 1 or spec.endswith("/"):
        others = [entry.name for entry in folder.parent.glob("*/")]
        near = difflib.get_close_matches(folder.name, others, n=1, cutoff=0.6)
        raise ConfigError(
            "missing-file",
            f"the folder {spec!r} of a {what} does not exist",
            place=place,
            hint="use a folder that exists, or a name on the Hub, OWNER/NAME",
            did_you_mean=[str(Path(spec).with_name(name)) for name in near],
        )
    return spec


def may_run_code(in_file: bool, spec: str | None) -> bool:
    """Return whether a model may run its Python code.

    Two consents are required. The configuration must state that the model contains code. The user
    must permit it (the option ``--trust-remote-code``, or HGMS_TRUST_REMOTE_CODE=1). A third
    party's file cannot give both.

    Raises
    ------
    ConfigError
        If only the configuration consents.
    """
    require(
        not in_file or os.environ.get("HGMS_TRUST_REMOTE_CODE") == "1",
        "untrusted-code",
        f"trust_remote_code = true runs the Python code of {spec!r}, but the command does not "
        "allow it",
        place=("task", "model", "trust_remote_code"),
        hint="read that code first; then add --trust-remote-code to the command",
    )
    return in_file


def transformers_quietly() -> Any:
    """Import transformers without its progress bars, when a model is first needed."""
    transformers = optional_module("transformers", "a language model", "llm")
    transformers.logging.disable_progress_bar()
    return transformers
