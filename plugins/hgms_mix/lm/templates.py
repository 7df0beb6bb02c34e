"""Conversion of a conversation into pieces of text, for the prompt or for learning.

A prompt template defines the text around the turns. Every template here cuts its text at the start
and the end of each answer, and ``encode`` tokenises each piece separately. No token therefore
crosses a border: in training, the tokens before an answer equal the prompt of a model that writes
the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

from attrs import evolve, field, frozen

from hgms.arguments import require
from hgms_core.errors import DataError, one_of
from hgms_core.torch_errors import first_line
from hgms_mix.lm.formats import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Piece = tuple[str | int, bool]
"""A text, or the id of one token; and whether it is part of an answer, to be learned."""

TEMPLATES = ("model", "plain", "alpaca", "chatml")
PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n"
)
PREAMBLE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
)


@final
@frozen(eq=False)
class Template:
    """The format of conversations for one tokenizer.

    ``model`` is the tokenizer's own chat template. In the named templates below, S, U, A are the
    texts of system, user and assistant turns, and ⏎ is a line break. The learned text is in ⟦ ⟧:

    - ``plain``: ``S⏎⏎`` ``U⏎`` ``⟦A eos⟧``;
    - ``alpaca`` (Stanford's): ``Below is an instruction that describes a task. Write a response
      that appropriately completes the request.⏎⏎### Instruction:⏎U⏎⏎### Response:⏎`` ``⟦A eos⟧``; a
      row with an input has the longer preamble ("…a task, paired with an input that provides
      further context. Write…") and ``### Input:⏎…⏎⏎`` before the response; ``S⏎⏎`` replaces the
      preamble; later turns begin with ``⏎⏎### Instruction:``;
    - ``chatml``: ``<|im_start|>system⏎S<|im_end|>⏎`` ``<|im_start|>user⏎U<|im_end|>⏎``
      ``<|im_start|>assistant⏎`` ``⟦A<|im_end|>⟧`` ``⏎``; if the tokenizer has no such tokens,
      the marks are written as text and ``eos`` ends an answer.

    If a tokenizer starts every text with its bos token, every named template starts with it too. In
    named templates the text of a row is only text: ``<|endoftext|>`` typed by a user is encoded as
    ordinary characters (except for tokenizers that need the whole text at once). In ``model`` the
    chat template's special tokens are written as text, so the same characters in a row become
    special tokens too.

    ``pieces`` returns the pieces of a conversation up to its last learned answer. ``opening``
    returns the pieces before an answer to generate. ``last_only``: the chat template writes earlier
    answers in another way than the last one (Qwen3), so a row per answer is required.
    """

    name: str
    pieces: Callable[[Sequence[Message]], list[Piece]]
    opening: Callable[[Sequence[Message]], list[Piece]]
    specials: bool
    text: str = field(default="", repr=False)
    last_only: bool = False


def check_template(instance: object, attribute: Any, value: str) -> None:
    """Require model, plain, alpaca or chatml."""
    one_of(attribute.name, value, TEMPLATES)


def template_for(name: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    """Return the template called ``name`` (one of :data:`TEMPLATES`) for this tokenizer.

    Raises
    ------
    ConfigError
        For an unknown name, a tokenizer without chat template (``model``) or without an end token.

    Examples
    --------
    >>> from hgms_mix.lm.tokenizers import byte_tokenizer
    >>> chat = [Message("user", "1+1?"), Message("assistant", "2")]
    >>> template_for("plain", byte_tokenizer()).pieces(chat)
    [('1+1?\\n', False), ('2', True), (257, True)]
    """
    one_of("template", name, TEMPLATES)
    if name != "model":
        return _named_template(name, tokenizer)
    require(
        tokenizer.chat_template,
        "missing-template",
        'template="model" requires a chat template, which the tokenizer does not have',
        place=("template",),
        hint=f"set template to {', '.join(other for other in TEMPLATES if other != 'model')}, "
        "or use the tokenizer of the instruction-tuned model",
    )
    chat = _Chat(tokenizer)
    return Template(
        "model",
        chat.pieces,
        chat.opening,
        specials=True,
        text=str(tokenizer.chat_template),
        last_only=chat.last_only(),
    )


def _named_template(name: str, tokenizer: PreTrainedTokenizerBase) -> Template:
    marks = tokenizer.get_added_vocab() if name == "chatml" else {}
    start = marks.get("<|im_start|>", "<|im_start|>")
    end = marks.get("<|im_end|>", tokenizer.eos_token_id)
    require(
        end is not None,
        "missing-token",
        "named templates require an end token, which the tokenizer does not have",
        place=("template",),
        hint="set tokenizer.eos_token, call save_pretrained, and load it from that folder",
    )
    heads = {"plain": [], "alpaca": ["### Response:\n"], "chatml": [start, "assistant\n"]}
    head = [(part, False) for part in heads[name]]
    bos = tokenizer.bos_token_id
    begins = bos is not None and tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [bos]

    def prompt_of(message: Message, before: set[str]) -> list[str | int]:
        """Return the text of a turn that is not an answer, after turns of the roles ``before``."""
        if name == "chatml":
            finish = marks.get("<|im_end|>", "<|im_end|>")
            return [start, f"{message.role}\n{message.text}", finish, "\n"]
        if message.role == "system":
            return [message.text + "\n\n"]
        return [message.text + "\n" if name == "plain" else _alpaca(message, before)]

    def write(messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = [(bos, False)] if begins else []
        for number, message in enumerate(messages):
            if message.role == "assistant":
                pieces += [*head, (message.text, message.learned), (end, message.learned)]
                pieces += [("\n", False)] if name == "chatml" else []
            else:
                before: set[str] = {earlier.role for earlier in messages[:number]}
                pieces += [(part, False) for part in prompt_of(message, before)]
        return pieces

    def pieces(messages: Sequence[Message]) -> list[Piece]:
        written = _merge_texts(write(until_last_answer(messages)))
        while written and not written[-1][1]:
            written.pop()  # the text after the last answer is not learned
        return written

    def opening(messages: Sequence[Message]) -> list[Piece]:
        return _merge_texts([*write(messages), *head])

    return Template(name, pieces, opening, specials=False)


def _alpaca(message: Message, before: set[str]) -> str:
    preamble = PREAMBLE_WITH_INPUT if message.context else PREAMBLE
    if before:
        preamble = "\n\n" if "user" in before else ""
    context = f"### Input:\n{message.context}\n\n" if message.context else ""
    return f"{preamble}### Instruction:\n{message.instruction}\n\n{context}"


def _merge_texts(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighbouring texts of the prompt, and remove empty texts."""
    merged: list[Piece] = []
    present = (piece for piece in pieces if piece[0] != "")
    for is_prompt, group in itertools.groupby(
        present, lambda piece: piece[1] is False and isinstance(piece[0], str)
    ):
        if is_prompt:
            merged.append(("".join(str(text) for text, _ in group), False))
        else:
            merged += group
    return merged


def until_last_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the conversation up to its last learned answer."""
    return messages[: max(answers_of(messages), default=-1) + 1]


def answers_of(messages: Sequence[Message]) -> list[int]:
    """Return the positions of the learned answers."""
    return [
        number
        for number, message in enumerate(messages)
        if message.role == "assistant" and message.learned
    ]


def one_answer_each(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return one row per learned answer of a conversation; only that answer is learned in the row.

    Examples
    --------
    >>> chat = [Message(role, text) for role, text in zip(["user", "assistant"] * 2, "qasb")]
    >>> [[message.learned for message in row] for row in one_answer_each(chat)]
    [[True, True], [True, False, True, True]]
    """
    return [
        tuple(
            evolve(message, learned=message.role != "assistant" or number == answer)
            for number, message in enumerate(messages[: answer + 1])
        )
        for answer in answers_of(messages)
    ]


PROBE = "an answer"


@frozen(eq=False)
class _Chat:
    """A tokenizer's chat template.

    The start and end of an answer are found by rendering the conversation up to these points.
    """

    tokenizer: PreTrainedTokenizerBase
    prompts: bool = field(init=False)
    """Whether it writes a generation prompt."""

    @prompts.default
    def _has_generation_prompt(self) -> bool:
        question = [Message("user", "a question")]
        try:
            return self.render(question, generate=True) != self.render(question)
        except DataError:
            return False

    def render(self, messages: Sequence[Message], generate: bool = False) -> str:
        turns = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=generate
                )
            )
        except Exception as error:  # templates may raise any exception through Jinja
            roles = ", ".join(message.role for message in messages)
            raise DataError(
                "wrong-row",
                f"the model's chat template rejects the roles {roles}: {first_line(error)}",
                place=("template",),
                hint='remove such rows, or use a named template (template = "chatml")',
            ) from error

    def last_only(self) -> bool:
        """Whether an earlier answer is written in another way than the last answer.

        The test covers answers with and without thoughts.
        """
        for answer in (PROBE, f"<think>\nthoughts\n</think>\n\n{PROBE}"):
            chat = [Message("user", "a question"), Message("assistant", answer)]
            try:
                first = self.render(chat).rstrip()
                both = self.render([*chat, *chat])
            except DataError:
                return False
            if not both.startswith(first):
                return True
        return False

    def opening(self, messages: Sequence[Message]) -> list[Piece]:
        before = self.render(messages, generate=True)
        if not self.prompts:
            whole = self.render([*messages, Message("assistant", PROBE)])
            if whole.startswith(before):
                before = whole[: self._begin(whole, PROBE, len(before))]
        return [(before, False)]

    def _begin(self, text: str, answer: str, prompt: int) -> int:
        """Return the start of an answer in a rendered conversation.

        The generation prompt ends at ``prompt``. All text that the template writes after a
        generation prompt is learned (an empty block of thoughts). If there is no generation prompt,
        the header before an answer is part of the prompt.
        """
        begin = text.find(answer.strip(), prompt)
        header = not self.prompts and begin > prompt and text[prompt:begin].strip()
        return begin if header else prompt

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        messages = until_last_answer(messages)
        whole = self.render(messages)
        answers = answers_of(messages)
        pieces: list[Piece] = []
        at = 0
        for number in answers:
            before = self.render(messages[:number], generate=True)
            through = whole if number == answers[-1] else self.render(messages[: number + 1])
            require(
                whole.startswith(before)
                and whole.startswith(through)
                and at <= len(before) <= len(through),
                "wrong-row",
                "the model's chat template changes earlier turns when later ones follow, so "
                "answers cannot be located",
                place=("template",),
                hint='use a named template (template = "chatml"), or rows of one turn',
                error=DataError,
            )
            begin = self._begin(through, messages[number].text, len(before))
            # Exclude white space that the template writes after the end mark.
            stop = max(len(through.rstrip()), begin)
            pieces += [(whole[at:begin], False), (whole[begin:stop], True)]
            at = stop
        return [piece for piece in pieces if piece[0]]
