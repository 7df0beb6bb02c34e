"""What each template writes, which of its tokens are learned, and that prompts in training are
the prompts of generation.
"""

from __future__ import annotations

import itertools
import os

import pytest
from attrs import evolve
from support.chat_templates import (
    CHATML,
    FORGETFUL,
    HEADERS,
    INST,
    LATE,
    QWEN,
    TURNS,
    with_template,
)
from support.helpers import rejects
from support.token_tables import read_examples

from hgms_core.errors import DataError
from hgms_mix.lm.formats import Message
from hgms_mix.lm.sources import Source
from hgms_mix.lm.templates import TEMPLATES, template_for
from hgms_mix.lm.tokenizers import byte_tokenizer, load_tokenizer
from hgms_mix.lm.tokens import encode, prompt_tokens, stop_tokens

pytest.importorskip("transformers", reason="transformers is not installed")
from tokenizers import processors
from transformers import PreTrainedTokenizerFast


def chat(*texts: str, system: str | None = None) -> list[Message]:
    first = [Message("system", system)] if system else []
    return [
        *first,
        *(
            Message("assistant" if number % 2 else "user", text)
            for number, text in enumerate(texts)
        ),
    ]


def shown(messages: list[Message], tokenizer: PreTrainedTokenizerFast, name: str) -> str:
    """All tokens as text, with the learned ones in ⟦ ⟧."""
    template = template_for(name, tokenizer)
    ((tokens, learned),) = encode([template.pieces(messages)], tokenizer, template)
    pairs = zip(tokens, learned, strict=True)
    parts = [
        (learn, tokenizer.decode([token for token, _ in part], skip_special_tokens=False))
        for learn, part in itertools.groupby(pairs, key=lambda pair: pair[1])
    ]
    return "".join(f"⟦{text}⟧" if learn else text for learn, text in parts)


# -- what is written, and what is learned
# --------------------------------------------------------------------------------------------------

TWO = chat("Q", "A", "R", "B")
ASKED = chat("Q", "A", "R", "B", system="S")
HEADED = "<|eot|><|head|>assistant<|/head|>\n\n"
WRITTEN: list[tuple[str, str | None, list[Message], str]] = [
    ("plain", None, ASKED, "S\n\nQ\n⟦A<eos>⟧R\n⟦B<eos>⟧"),
    # Stanford's
    (
        "alpaca",
        None,
        chat("Q", "A"),
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n"
        "### Instruction:\nQ\n\n### Response:\n⟦A<eos>⟧",
    ),
    (
        "alpaca",
        None,
        [Message("user", "Q\nI", "I"), Message("assistant", "A")],
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\n⟦A<eos>⟧",
    ),
    (
        "alpaca",
        None,
        ASKED,
        "S\n\n### Instruction:\nQ\n\n### Response:\n⟦A<eos>⟧\n\n### Instruction:\nR\n\n"
        "### Response:\n⟦B<eos>⟧",
    ),
    # with and without tokens for its marks
    *(
        (
            "chatml",
            marks,
            ASKED,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant"
            f"\n⟦A{end}⟧\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n⟦B{end}⟧",
        )
        for marks, end in ((None, "<eos>"), ("", "<|im_end|>"))
    ),
    (
        "model",
        CHATML,
        ASKED,
        "<|im_start|>system\nS<|im_end|>\n"
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
        "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n⟦B<|im_end|>⟧",
    ),
    (
        "model",
        HEADERS,
        TWO,
        f"<bos><|head|>user<|/head|>\n\nQ{HEADED}⟦A<|eot|>⟧"
        f"<|head|>user<|/head|>\n\nR{HEADED}⟦B<|eot|>⟧",
    ),
    (
        "model",
        TURNS,
        TWO,
        "<bos><turn>user\nQ</turn>\n<turn>model\n⟦A</turn>⟧\n<turn>user\nR</turn>\n"
        "<turn>model\n⟦B</turn>⟧",
    ),
    ("model", INST, TWO, "<bos>[INST] Q [/INST]⟦ A <eos>⟧<bos>[INST] R [/INST]⟦ B <eos>⟧"),
    (
        "model",
        LATE,
        TWO,
        "<|user|>\nQ<eos>\n<|assistant|>\n⟦A<eos>⟧\n<|user|>\nR<eos>\n<|assistant|>\n⟦B<eos>⟧",
    ),
    # white space that the template trims; an answer that is found inside its own prompt, and one
    # that is a part of the template
    *(
        (
            "model",
            HEADERS,
            chat(question, answer),
            f"<bos><|head|>user<|/head|>\n\n{question.strip()}{HEADED}⟦{answer.strip()}<|eot|>⟧",
        )
        for question, answer in ((" Q ", "  A\n"), ("say A", "A"), ("Q", "assistant"))
    ),
]


@pytest.mark.parametrize(("name", "template", "messages", "expected"), WRITTEN)
def test_every_answer_and_its_end_mark_are_learned_and_nothing_else(
    name: str, template: str | None, messages: list[Message], expected: str
) -> None:
    tokenizer = byte_tokenizer() if template is None else with_template(template)
    assert shown(messages, tokenizer, name) == expected
    if len(messages) > 3:
        assert expected.startswith(shown(messages[:-2], tokenizer, name))


@pytest.mark.parametrize("name", ["plain", "alpaca", "chatml"])
def test_a_special_token_typed_in_a_row_is_only_text(name: str) -> None:
    tokenizer = byte_tokenizer()
    template = template_for(name, tokenizer)
    pieces = template.pieces(chat("what is <eos>?", "<eos> ends, <pad> pads"))
    ((tokens, _),) = encode([pieces], tokenizer, template)
    assert (tokens.count(tokenizer.eos_token_id), tokens.count(tokenizer.pad_token_id)) == (1, 0)


def test_a_tokenizer_that_begins_with_bos_begins_a_named_template_with_it_once() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 256)]
    )
    assert shown(chat("Q", "A"), tokenizer, "plain") == "<bos>Q\n⟦A<eos>⟧"
    tokens = prompt_tokens(chat("Q"), tokenizer, template_for("plain", tokenizer))
    assert tokens == [256, *b"Q\n"]


# -- the model's own
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, HEADERS, TURNS, INST, LATE, FORGETFUL, QWEN])
@pytest.mark.parametrize("answer", ["A", "<think>\nhm\n</think>\n\nA"])
def test_the_prompt_at_evaluation_is_the_prompt_in_training(template: str, answer: str) -> None:
    tokenizer = with_template(template)
    written = template_for("model", tokenizer)
    for messages in (chat("1+1?", answer), chat("1+1?", answer, "2+2?", answer)):
        *context, last = messages
        row = [*(evolve(m, learned=m.role != "assistant") for m in context), last]
        tokens, learned = encode([written.pieces(row)], tokenizer, written)[0]
        border = learned.index(True)
        assert prompt_tokens(context, tokenizer, written) == tokens[:border]
        assert all(learned[border:])
        assert "A" in tokenizer.decode(tokens[border:])


REFUSING = "{% if messages OP %}{{ raise_exception('no') }}{% endif %}" + CHATML
FRAMED = (  # another text before the first answer than a prompt says
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}bot>{% endif %}"
)


def test_templates_that_refuse_probes_are_used_for_the_rows_that_they_take() -> None:
    """One that wants an answer, one that takes a single one, and one whose prompt is none."""
    strict, once, framed = (
        template_for("model", with_template(text))
        for text in (
            REFUSING.replace("OP", "[-1]['role'] != 'assistant'"),
            REFUSING.replace("OP", "| length > 2"),
            FRAMED,
        )
    )
    assert not strict.last_only | once.last_only
    asked = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert once.pieces(chat("Q", "A")) == [(asked, False), ("A<|im_end|>", True)]
    for template, messages in ((strict, chat("Q", "A")), (once, TWO), (framed, chat("Q", "A"))):
        with rejects("wrong-row", "template", of=DataError):
            template.pieces(messages)


# -- borders
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> PreTrainedTokenizerFast:
    if "HGMS_DATA" not in os.environ:
        pytest.skip("HGMS_DATA is not set: no real rows or GPT-2 vocabulary")
    tokenizer = load_tokenizer("$HGMS_DATA/gpt2_bpe")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.extended
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_token_of_real_rows_lies_across_the_border(
    name: str, gpt2: PreTrainedTokenizerFast
) -> None:
    template = template_for(name, gpt2)
    files = ("alpaca_zh/alpaca_zh_6000", "scalebio_math_valtest/val", "gsm8k/test")
    sources = [Source(path=f"$HGMS_DATA/{file}.jsonl.gz", rows=8) for file in files]
    examples = [e for source in sources for e in read_examples("s", source) if not e.blank]
    rows = encode([template.pieces(example.messages) for example in examples], gpt2, template)
    for example, (tokens, learned) in zip(examples, rows, strict=True):
        prompt = prompt_tokens(example.messages[:-1], gpt2, template)
        assert prompt == tokens[: len(prompt)]
        assert learned == [at >= len(prompt) for at in range(len(tokens))]
        text = example.messages[-1].text
        ended = f"{text.rstrip()}<|im_end|>" if name == "model" else f"{text}<|endoftext|>"
        assert gpt2.decode(tokens[len(prompt) :], skip_special_tokens=False) == ended


def test_gpt2s_tokens_are_the_published_ones(gpt2: PreTrainedTokenizerFast) -> None:
    assert gpt2("Hello world<|endoftext|>")["input_ids"] == [15496, 995, 50256]
    assert gpt2.pad_token_id == gpt2.eos_token_id == len(gpt2) - 1 == 50256
    assert gpt2.decode(gpt2("naïve 自然\n\t x")["input_ids"]) == "naïve 自然\n\t x"


def test_stop_tokens_are_the_templates_mark_and_the_end_token() -> None:
    tokenizer = with_template(CHATML)
    mark = tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = [stop_tokens(tokenizer, template_for(name, tokenizer)) for name in TEMPLATES]
    assert dict(zip(TEMPLATES, found, strict=True)) == {
        "plain": [257],
        "alpaca": [257],
        "chatml": [mark, 257],
        "model": [mark, 257],
    }
