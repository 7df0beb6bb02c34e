"""What a name in a configuration stands for: a folder that is here, or a model on the Hub that
can be had.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

from hgms_core import ConfigError
from hgms_core.errors import MissingExtra, Place
from hgms_mix.lm.model_names import model_folder, named_models


def located(
    spec: str,
    what: str,
    place: Place,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """The folder that ``spec`` names (or that an installed package has for the name), or ``spec``
    itself where it is a name on the Hub that is in its cache or can be reached.

    ``what`` (model, tokenizer) and ``place`` (its option in the configuration) are for errors.
    Transformers alone would try for most of a minute, and say of a misspelt folder that the Hub has
    no repository of that name.

    Errors: ConfigError for a folder that is not there (with the nearest spelling), one that brings
    Python code of its own without leave, and a name that the Hub does not know or cannot be asked
    about.
    """
    folder = model_folder(spec, place)
    if folder.is_dir():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as known

        try:
            config = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError):
            config = {}
        own = (
            isinstance(config, dict)
            and "auto_map" in config
            and config.get("model_type") not in known
        )
        if own and not trust_remote_code:
            raise own_code(what, spec, place)
        return str(folder)
    try:
        others = sorted(
            entry.name
            for entry in folder.parent.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
    except OSError:
        others = []
    installed = named_models()
    alike = difflib.get_close_matches(spec.casefold(), installed, n=1, cutoff=0.6)
    here = difflib.get_close_matches(folder.name, others, n=1, cutoff=0.6)
    near = alike or [str(Path(spec).with_name(name)) for name in here]
    if spec[0] in "./~$" or spec.count("/") > 1 or spec.endswith("/"):
        there = ", ".join(others[:20]) or "(no folder)"
        raise ConfigError(
            "missing-file",
            f"the folder {spec!r} of a {what} does not exist",
            place=place,
            hint=f"available in {Path(spec).parent}: {there}\nor use a name on the Hub, OWNER/NAME",
            did_you_mean=near,
        )
    _ask(spec, what, place, revision, near, installed)
    return spec


def own_code(what: str, spec: str | None, place: Place) -> ConfigError:
    """The error for a model or tokenizer that contains Python code without the user's consent."""
    return ConfigError(
        "untrusted-code",
        f"the {what} {spec!r} contains Python code, which runs only with your consent",
        place=place,
        hint="read its code first; then set task.model.trust_remote_code = true and add "
        "--trust-remote-code to the command",
    )


def consented(in_file: bool, spec: str | None) -> bool:
    """Whether a model may bring Python code of its own: the configuration says that it does, and
    the person who runs it (the option ``--trust-remote-code``, or HGMS_TRUST_REMOTE_CODE=1) that it
    may. A file of somebody else's cannot say both.

    Errors: ConfigError where only the configuration does.
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


def _ask(
    spec: str, what: str, place: Place, revision: str | None, near: list[str], installed: list[str]
) -> None:
    """Refuses what the Hub has not; it is asked once, since downloads retry for long."""
    import huggingface_hub
    from huggingface_hub import errors

    others = f"\nor use an installed model: {', '.join(installed)}" if installed else ""
    try:
        for name in ("config.json", "tokenizer_config.json"):
            if isinstance(
                huggingface_hub.try_to_load_from_cache(spec, name, revision=revision), str
            ):
                return
        huggingface_hub.HfApi().model_info(spec, revision=revision, timeout=15)
        return
    except errors.HFValidationError:
        raise ConfigError(
            "unknown-model",
            f"the {what} {spec!r} is neither a folder nor a valid name on the Hub",
            place=place,
            hint=f"use a folder that exists, or OWNER/NAME on the Hub{others}",
            did_you_mean=near,
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            "unknown-revision",
            f"the {what} {spec!r} on the Hub has no revision {revision!r}",
            place=place,
            hint="set revision to one of its commits",
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            "unknown-model",
            f"the {what} {spec!r} is neither a folder nor visible on the Hub",
            place=place,
            hint=f"check the spelling; a private or gated one requires `hf auth login`{others}",
            did_you_mean=near,
        ) from None
    except Exception as error:  # httpx' and the Hub's own errors: it cannot be asked
        raise ConfigError(
            "no-network",
            f"the {what} {spec!r} is neither a folder nor in the Hub's cache, and the Hub cannot "
            f"be reached: {type(error).__name__}",
            place=place,
            hint=f"use a folder that exists, or download it with a network: `hf download`{others}",
            did_you_mean=near,
        ) from None


def transformers_quietly() -> Any:
    """transformers, without its progress bars; imported when a model is first needed."""
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
