"""What each template writes, which of its tokens are learned, and that prompts in training are
the prompts of generation.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helpers import rejects

from hgms_core import ConfigError, DataError, Key, MissingExtra
from hgms_mix.lm.formats import Message
from hgms_mix.lm.models import BaseModel
from hgms_mix.lm.rows import examples_at
from hgms_mix.lm.sources import Source, read_examples
from hgms_mix.lm.templates import TEMPLATES, template_for
from hgms_mix.lm.tokenizers import byte_tokenizer, gpt2_tokenizer, load_tokenizer, padded
from hgms_mix.lm.tokens import drawn_table, encode, prompt_tokens, stop_tokens, token_table

pytest.importorskip("transformers", reason="transformers is not installed")
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

real = pytest.mark.skipif(
    "HGMS_DATA" not in os.environ, reason="HGMS_DATA is not set: no real rows or GPT-2 vocabulary"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # begins with bos, trims what it writes
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
TURNS = (  # no system turns; the assistant is called model
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
INST = (  # no generation prompt of its own; a space on either side of an answer
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} "
    "[/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
LATE = (  # writes the assistant's header with its answer only
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
)
FORGETFUL = (  # strips the thoughts of all but the last answer
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>') | last }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (  # an empty block of thoughts in the last answer; the thoughts of earlier ones are removed
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% else %}{{ (m.content.split('</think>') | last).lstrip('\n') }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>"]


@functools.cache
def byte() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@functools.cache
def marked(template: str) -> PreTrainedTokenizerFast:
    return with_template(template)


def with_template(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = template
    return tokenizer


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
    tokens, learned = encode(
        [template_for(name, tokenizer).pieces(messages)], tokenizer, template_for(name, tokenizer)
    )[0]
    text = ""
    start = 0
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or learned[at] != learned[start]:
            part = tokenizer.decode(tokens[start:at], skip_special_tokens=False)
            text += f"⟦{part}⟧" if learned[start] else part
            start = at
    return text


# -- named templates
# --------------------------------------------------------------------------------------------------


def test_plain() -> None:
    tokenizer = byte_tokenizer()
    assert shown(chat("Q", "A"), tokenizer, "plain") == "Q\n⟦A<eos>⟧"
    assert (
        shown(chat("Q", "A", "R", "B", system="S"), tokenizer, "plain")
        == "S\n\nQ\n⟦A<eos>⟧R\n⟦B<eos>⟧"
    )


def test_alpaca_is_stanfords_prompt_with_and_without_an_input() -> None:
    tokenizer = byte_tokenizer()
    assert shown(chat("Q", "A"), tokenizer, "alpaca") == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n"
        "### Instruction:\nQ\n\n### Response:\n⟦A<eos>⟧"
    )
    assert shown(
        [Message("user", "Q\nI", "I"), Message("assistant", "A")], tokenizer, "alpaca"
    ) == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\n⟦A<eos>⟧"
    )
    assert shown(chat("Q", "A", "R", "B", system="S"), tokenizer, "alpaca") == (
        "S\n\n### Instruction:\nQ\n\n### Response:\n⟦A<eos>⟧\n\n### Instruction:\nR\n\n"
        "### Response:\n⟦B<eos>⟧"
    )


@pytest.mark.parametrize(
    ("tokenizer", "end"), [(byte_tokenizer(), "<eos>"), (with_template(""), "<|im_end|>")]
)
def test_chatml_with_and_without_tokens_for_its_marks(
    tokenizer: PreTrainedTokenizerFast, end: str
) -> None:
    messages = chat("Q", "A", "R", "B", system="S")
    assert shown(messages, tokenizer, "chatml") == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
        f"⟦A{end}⟧\n<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n⟦B{end}⟧"
    )


@pytest.mark.parametrize("name", ["plain", "alpaca", "chatml"])
def test_a_special_token_typed_in_a_row_is_only_text(name: str) -> None:
    tokenizer = byte_tokenizer()
    template = template_for(name, tokenizer)
    tokens, _ = encode(
        [template.pieces(chat("what is <eos>?", "<eos> ends, <pad> pads"))], tokenizer, template
    )[0]
    assert tokens.count(tokenizer.eos_token_id) == 1
    assert tokenizer.pad_token_id not in tokens


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


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n⟦A<|im_end|>⟧\n"
            "<|im_start|>user\nR<|im_end|>\n"
            "<|im_start|>assistant\n⟦B<|im_end|>⟧",
        ),
        (
            HEADERS,
            "<bos><|head|>user<|/head|>\n\nQ<|eot|><|head|>assistant<|/head|>\n\n⟦A<|eot|>⟧"
            "<|head|>user<|/head|>\n\nR<|eot|><|head|>assistant<|/head|>\n\n⟦B<|eot|>⟧",
        ),
        (
            TURNS,
            (
                "<bos><turn>user\nQ</turn>\n<turn>model\n⟦A</turn>⟧\n<turn>user\nR</turn>\n"
                "<turn>model\n⟦B</turn>⟧"
            ),
        ),
        (INST, "<bos>[INST] Q [/INST]⟦ A <eos>⟧<bos>[INST] R [/INST]⟦ B <eos>⟧"),
        (
            LATE,
            "<|user|>\nQ<eos>\n<|assistant|>\n⟦A<eos>⟧\n<|user|>\nR<eos>\n<|assistant|>\n⟦B<eos>⟧",
        ),
    ],
    ids=["chatml", "headers", "turns", "inst", "late"],
)
def test_the_answers_of_a_chat_template_and_their_end_marks_are_learned(
    template: str, expected: str
) -> None:
    tokenizer = with_template(template)
    assert shown(chat("Q", "A", "R", "B"), tokenizer, "model") == expected
    single = shown(chat("Q", "A"), tokenizer, "model")
    assert expected.startswith(single)
    assert single.endswith("⟧")
    if template not in (TURNS, INST):
        assert "S" in shown(chat("Q", "A", system="S"), tokenizer, "model")


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


def test_templates_that_write_earlier_answers_in_another_way_are_known() -> None:
    known = {
        template: template_for("model", with_template(template)).last_only
        for template in (CHATML, HEADERS, TURNS, INST, LATE, FORGETFUL, QWEN)
    }
    assert [template for template, last_only in known.items() if last_only] == [FORGETFUL, QWEN]
    assert not template_for("chatml", with_template(QWEN)).last_only


def test_a_conversation_is_a_row_for_each_answer_where_the_template_requires_it(
    tmp_path: Path,
) -> None:
    """Qwen3. The rows are the same whether they are all tokenised, picked by their numbers, or
    drawn.
    """
    tokenizer = with_template(QWEN)
    talks = [
        [("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "B")],
        [("user", "S"), ("assistant", "C")],
        [("user", "T"), ("assistant", ""), ("user", "U"), ("assistant", "D")],
    ]
    path = tmp_path / "s.jsonl"
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]})
            + "\n"
            for talk in talks
        )
    )
    options: dict[str, Any] = {"template": "model", "max_length": 200}
    source = Source(path=str(path))
    table = token_table("s", source, tokenizer, **options)
    # answer 0 of row 2 is empty
    assert table.rows.tolist() == [0, 1, 1000, 2001]
    user, assistant = "<|im_start|>user\n", "<|im_start|>assistant\n"
    thoughts = "<think>\n\n</think>\n\n"
    rows = [tokenizer.decode(table.row(position)[0]) for position in range(4)]
    assert rows == [
        f"{user}Q<|im_end|>\n{assistant}{thoughts}A<|im_end|>",
        f"{user}Q<|im_end|>\n{assistant}A<|im_end|>\n{user}R<|im_end|>\n"
        f"{assistant}{thoughts}B<|im_end|>",
        f"{user}S<|im_end|>\n{assistant}{thoughts}C<|im_end|>",
        f"{user}T<|im_end|>\n{assistant}<|im_end|>\n{user}U<|im_end|>\n"
        f"{assistant}{thoughts}D<|im_end|>",
    ]
    for position, answer in enumerate("ABCD"):
        tokens, mask = table.row(position)
        assert tokenizer.decode(tokens[mask]) == f"{thoughts}{answer}<|im_end|>"
    picked = token_table("s", source, tokenizer, **options, pick=torch.tensor([1000, 1]))
    assert picked.rows.tolist() == [1000, 1]
    assert torch.equal(picked.row(1)[0], table.row(1)[0])
    drawn = drawn_table("s", source, tokenizer, count=3, key=Key(0), **options)
    assert drawn.size == 3
    assert set(drawn.rows.tolist()) < set(table.rows.tolist())
    # parts of a file share no conversation
    half = token_table("s", Source(path=str(path), rows=1, shuffle_seed=0), tokenizer, **options)
    rest = token_table("s", Source(path=str(path), skip=1, shuffle_seed=0), tokenizer, **options)
    talks_of = [{row // 1000 for row in part.rows.tolist()} for part in (half, rest)]
    assert not talks_of[0] & talks_of[1]
    assert talks_of[0] | talks_of[1] == {0, 1, 2}
    texts = [
        [(message.text, message.learned) for message in example.messages]
        for example in examples_at("s", source, np.array([1, 1000]), split=True)
    ]
    assert texts == [
        [("Q", True), ("A", False), ("R", True), ("B", True)],
        [("S", True), ("C", True)],
    ]


def test_white_space_that_a_template_trims_does_not_hide_the_answer() -> None:
    tokenizer = with_template(HEADERS)
    assert shown(chat(" Q ", "  A\n"), tokenizer, "model").endswith("\n\n⟦A<|eot|>⟧")
    # an answer that is found inside its own prompt, and one that is a part of the template
    assert shown(chat("say A", "A"), tokenizer, "model").endswith(
        "say A<|eot|><|head|>assistant<|/head|>\n\n⟦A<|eot|>⟧"
    )
    assert shown(chat("Q", "assistant"), tokenizer, "model").endswith(
        "<|head|>assistant<|/head|>\n\n⟦assistant<|eot|>⟧"
    )


def test_what_a_chat_template_refuses_is_explained() -> None:
    tokenizer = with_template(TURNS)
    template = template_for("model", tokenizer)
    with rejects("wrong-row", "template", of=DataError) as caught:
        template.pieces(chat("Q", "A", system="S"))
    assert "system, user, assistant: System role not" in caught.value.message
    forgetful = template_for("model", with_template(FORGETFUL))
    assert forgetful.pieces(chat("Q", "hm</think>A"))[-1] == ("hm</think>A<|im_end|>", True)
    with rejects("wrong-row", "template", of=DataError):
        forgetful.pieces(chat("Q", "hm</think>A", "R", "hm</think>B"))


def test_a_chat_template_that_does_not_end_is_stopped() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with rejects("too-slow", "template", of=ConfigError):
        template_for("model", with_template(loops)).pieces(chat("Q", "A"))


def test_a_tokenizer_without_chat_template_names_the_built_in_ones() -> None:
    with rejects("missing-template", "template", of=ConfigError) as caught:
        template_for("model", byte_tokenizer())
    assert "plain, alpaca, chatml" in (caught.value.hint or "")
    with rejects("unknown-choice", "template", of=ConfigError) as caught:
        template_for("chatlm", byte_tokenizer())
    assert caught.value.did_you_mean == ("chatml",)
    assert "alpaca, chatml, model" in (caught.value.hint or "")


# -- borders
# --------------------------------------------------------------------------------------------------

texts = st.text(min_size=1, max_size=40).filter(lambda text: text.strip())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(texts, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0),
    st.sampled_from(["plain", "alpaca", "chatml"]),
)
def test_what_is_learned_is_every_answer_and_its_end_and_nothing_else(
    turns: list[str], name: str
) -> None:
    tokenizer = byte()
    template = template_for(name, tokenizer)
    tokens, learned = encode([template.pieces(chat(*turns))], tokenizer, template)[0]
    answers = [token for token, learn in zip(tokens, learned, strict=True) if learn]
    assert answers == [
        byte for text in turns[1::2] for byte in [*text.encode(), tokenizer.eos_token_id]
    ]
    assert learned[-1]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(texts, min_size=2, max_size=6).filter(lambda turns: len(turns) % 2 == 0),
    st.sampled_from(TEMPLATES),
)
def test_the_prompt_of_generation_is_what_stands_before_each_answer_in_training(
    turns: list[str], name: str
) -> None:
    tokenizer = marked(CHATML)
    template = template_for(name, tokenizer)
    tokens, learned = encode([template.pieces(chat(*turns))], tokenizer, template)[0]
    begins = [at for at in range(1, len(tokens)) if learned[at] and not learned[at - 1]]
    assert len(begins) == len(turns) // 2
    for number, begin in enumerate(begins):
        assert prompt_tokens(chat(*turns[: 2 * number + 1]), tokenizer, template) == tokens[:begin]


@real
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_token_of_real_rows_lies_across_the_border(name: str) -> None:
    tokenizer = gpt2_tokenizer("$HGMS_DATA/gpt2_bpe")
    tokenizer.chat_template = CHATML
    template = template_for(name, tokenizer)
    files = [
        "alpaca_zh/alpaca_zh_6000",
        "scalebio_math_valtest/val",
        "gsm8k/test",
        "code_alpaca/code_alpaca_2000",
    ]
    for file in files:
        examples = [
            e
            for e in read_examples("s", Source(path=f"$HGMS_DATA/{file}.jsonl.gz", rows=25))
            if not e.blank
        ]
        rows = encode(
            [template.pieces(example.messages) for example in examples], tokenizer, template
        )
        for example, (tokens, learned) in zip(examples, rows, strict=True):
            border = learned.index(True)
            assert prompt_tokens(example.messages[:-1], tokenizer, template) == tokens[:border]
            answer = tokenizer.decode(tokens[border:], skip_special_tokens=False)
            end = "<|im_end|>" if name == "model" else "<|endoftext|>"
            assert (
                answer == example.messages[-1].text.rstrip() + end
                if name == "model"
                else example.messages[-1].text + end
            )
            assert all(learned[border:])


@real
def test_the_border_matters_for_byte_pairs() -> None:
    """The trap that pieces avoid: tokens of a prompt are no prefix of the tokens of prompt and
    answer.
    """
    tokenizer = gpt2_tokenizer("$HGMS_DATA/gpt2_bpe")
    prompt = "Q: 1+1?\nA:\n"
    answer = "\n\n2"
    alone, together = (tokenizer(text)["input_ids"] for text in (prompt, prompt + answer))
    assert together[: len(alone)] != alone
    assert (
        shown(chat("Q: 1+1?\nA:", answer), tokenizer, "plain")
        == prompt + f"⟦{answer}<|endoftext|>⟧"
    )


def spaced() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text it is given, as SentencePiece does."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyzABQRS?<>|/_:.,#\n", "<0x0A>"]
    core = Tokenizer(
        models.BPE(
            vocab={"<unk>": 0, **{letter: i for i, letter in enumerate(dict.fromkeys(letters), 1)}},
            merges=[],
            unk_token="<unk>",
        )
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def test_a_tokenizer_that_adds_spaces_gets_none_at_the_borders() -> None:
    tokenizer = spaced()
    template = template_for("plain", tokenizer)
    tokens, learned = encode(
        [template.pieces(chat("is it so?", "it is", "sure?", "yes"))], tokenizer, template
    )[0]
    words = tokenizer.convert_ids_to_tokens(tokens)
    assert "".join(words) == "▁is▁it▁so?\nit▁is</s>▁sure?\nyes</s>"
    assert (
        "".join(word for word, learn in zip(words, learned, strict=True) if learn)
        == "it▁is</s>yes</s>"
    )


def test_stop_tokens_are_the_templates_mark_and_the_end_token() -> None:
    plain = byte()
    chatty = marked(CHATML)
    assert stop_tokens(plain, template_for("alpaca", plain)) == [257]
    mark = chatty.convert_tokens_to_ids("<|im_end|>")
    assert stop_tokens(chatty, template_for("model", chatty)) == [mark, 257]
    assert stop_tokens(chatty, template_for("chatml", chatty)) == [mark, 257]


# -- tokenizers
# --------------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
@settings(max_examples=25, deadline=None)
def test_bytes_are_their_own_tokens_and_come_back(text: str) -> None:
    tokenizer = byte()
    tokens = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_the_byte_tokenizer_survives_being_saved(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "t")
    loaded = load_tokenizer(str(tmp_path / "t"))
    assert loaded("Grüße")["input_ids"] == list("Grüße".encode())
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (256, 257, 258)
    assert load_tokenizer("bytes").pad_token_id == 258


@real
def test_gpt2s_tokens_are_the_published_ones() -> None:
    tokenizer = load_tokenizer("$HGMS_DATA/gpt2_bpe")
    assert len(tokenizer) == 50257
    assert tokenizer("Hello world")["input_ids"] == [15496, 995]
    assert tokenizer("<|endoftext|>")["input_ids"] == [50256]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 50256
    assert tokenizer.decode(tokenizer("naïve 自然\n\t x")["input_ids"]) == "naïve 自然\n\t x"


def test_a_tokenizer_without_padding_gets_its_end_token() -> None:
    tokenizer = spaced()
    assert tokenizer.pad_token_id is None
    assert padded(tokenizer).pad_token_id == tokenizer.eos_token_id
    bare = byte_tokenizer()
    bare.pad_token = bare.eos_token = None
    with rejects("missing-token", "tokenizer", of=ConfigError):
        padded(bare)
    with rejects("missing-token", "template", of=ConfigError):
        template_for("plain", bare)


def test_a_tokenizer_that_is_not_there_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("task", "model", "tokenizer")
    with rejects("missing-file", *place, of=ConfigError) as caught:
        load_tokenizer(str(tmp_path / "nowhere"))
    assert "/nowhere' of a tokenizer " in caught.value.message
    (tmp_path / "empty").mkdir()
    with rejects("missing-file", *place, of=ConfigError) as caught:
        load_tokenizer(str(tmp_path / "empty"))
    assert caught.value.message.endswith(" (none)")
    with rejects("missing-variable", *place, of=ConfigError) as caught:
        load_tokenizer("$HGMS_NOT_SET/t")
    assert " HGMS_NOT_SET " in caught.value.message
    with rejects("missing-file", "folder", of=DataError) as caught:
        gpt2_tokenizer(tmp_path / "empty")
    assert caught.value.message.endswith(" encoder.json")
    (tmp_path / "empty" / "encoder.json").write_text(json.dumps({"a": 0}))
    (tmp_path / "empty" / "vocab.bpe").write_text("#version: 0.2\nx y\n")
    with rejects("damaged-file", *place, of=DataError):
        load_tokenizer(str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with rejects("missing-package", of=MissingExtra) as caught:
        byte_tokenizer()
    assert caught.value.install == "pip install 'hgms[llm]'"


def test_code_of_its_own_is_refused_unless_allowed(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
    )
    (tmp_path / "own.py").write_text(
        "from transformers import GPT2Tokenizer\nclass Own(GPT2Tokenizer): pass\n"
    )
    with rejects("untrusted-code", "task", "model", "tokenizer", of=ConfigError) as caught:
        load_tokenizer(str(tmp_path))
    assert "task.model.trust_remote_code = true" in (caught.value.hint or "")


def test_a_file_alone_has_no_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trust_remote_code = true` of a stranger's configuration: the command has to say so too,
    and nothing was imported.
    """
    monkeypatch.delenv("HGMS_TRUST_REMOTE_CODE", raising=False)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
    )
    (tmp_path / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise ImportError('it was run')\n"
    )
    model = BaseModel(path=str(tmp_path), tokenizer="bytes", trust_remote_code=True)
    for load in (model.load_tokenizer, lambda: model.load(torch.device("cpu"))):
        with rejects(
            "untrusted-code", "task", "model", "trust_remote_code", of=ConfigError
        ) as caught:
            load()
        assert "--trust-remote-code" in (caught.value.hint or "")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("HGMS_TRUST_REMOTE_CODE", "1")
    with rejects("cannot-load", "task", "model", "path", of=ConfigError) as caught:
        model.load(torch.device("cpu"))
    assert "it was run" in caught.value.message
    assert (tmp_path / "ran").exists()
