"""Resolution of a name in a configuration: an existing folder, or an available model on the Hub."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from hgms.config import expand
from hgms_core import ConfigError
from hgms_core.errors import MissingExtra, Place


def resolve_name(spec: str, what: str, place: Place, *, revision: str | None = None) -> str:
    """Return the folder that ``spec`` names, or ``spec`` itself for a name on the Hub.

    A name on the Hub must be in the local cache or reachable.

    ``what`` (model, tokenizer) and ``place`` (its option in the configuration) are for errors.
    Without this check, transformers would retry for most of a minute, and report a misspelt folder
    as a missing repository on the Hub.

    Raises
    ------
    ConfigError
        For a missing folder (with the nearest spelling), and for a name that is unknown to the Hub
        or cannot be checked.
    """
    folder = expand(spec, place)
    if folder.is_dir():
        return str(folder)
    try:
        others = sorted(
            entry.name
            for entry in folder.parent.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError:
        others = []
    here = difflib.get_close_matches(folder.name, others, n=1, cutoff=0.6)
    near = [str(Path(spec).with_name(name)) for name in here]
    if spec[0] in "./~$" or spec.count("/") > 1 or spec.endswith("/"):
        there = ", ".join(others[:20]) or "(no folder)"
        raise ConfigError(
            "missing-file",
            f"the folder {spec!r} of a {what} does not exist",
            place=place,
            hint=f"available in {Path(spec).parent}: {there}\nor use a name on the Hub, OWNER/NAME",
            did_you_mean=near,
        )
    _check_hub(spec, what, place, revision, near)
    return spec


def untrusted_code(what: str, spec: str | None, place: Place) -> ConfigError:
    """Return the error for a model or tokenizer that contains Python code without the user's
    consent.
    """
    return ConfigError(
        "untrusted-code",
        f"the {what} {spec!r} contains Python code, which runs only with your consent",
        place=place,
        hint="read its code first; then set task.model.trust_remote_code = true and add "
        "--trust-remote-code to the command",
    )


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
    if in_file and os.environ.get("HGMS_TRUST_REMOTE_CODE") != "1":
        raise ConfigError(
            "untrusted-code",
            f"trust_remote_code = true runs the Python code of {spec!r}, but the command does not "
            "allow it",
            place=("task", "model", "trust_remote_code"),
            hint="read that code first; then add --trust-remote-code to the command",
        )
    return in_file


def _check_hub(spec: str, what: str, place: Place, revision: str | None, near: list[str]) -> None:
    """Raise ConfigError for a name that is not on the Hub.

    The Hub gets one request, since downloads retry for a long time.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        for name in ("config.json", "tokenizer_config.json"):
            if isinstance(
                huggingface_hub.try_to_load_from_cache(spec, name, revision=revision), str
            ):
                return
        huggingface_hub.HfApi().model_info(spec, revision=revision, timeout=15)
        return
    except errors.RevisionNotFoundError:
        raise ConfigError(
            "unknown-revision",
            f"the {what} {spec!r} on the Hub has no revision {revision!r}",
            place=place,
            hint="set revision to one of its commits",
        ) from None
    except (errors.HFValidationError, errors.RepositoryNotFoundError):
        raise ConfigError(
            "unknown-model",
            f"the {what} {spec!r} is neither a folder nor visible on the Hub",
            place=place,
            hint="use a folder that exists, or OWNER/NAME on the Hub; a private or gated one "
            "requires `hf auth login`",
            did_you_mean=near,
        ) from None
    except Exception as error:  # errors of httpx and the Hub: the Hub cannot be queried
        raise ConfigError(
            "no-network",
            f"the {what} {spec!r} is neither a folder nor in the Hub's cache, and the Hub cannot "
            f"be reached: {type(error).__name__}",
            place=place,
            hint="use a folder that exists, or download it with a network: `hf download`",
            did_you_mean=near,
        ) from None


def transformers_quietly() -> Any:
    """Import transformers without its progress bars, when a model is first needed."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra(
            "missing-package",
            "language models require transformers, which is not installed",
            install="pip install 'hgms[llm]'",
        ) from None
    transformers.logging.disable_progress_bar()
    return transformers
