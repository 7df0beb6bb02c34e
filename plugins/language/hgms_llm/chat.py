"""The template `model`: a tokenizer's own chat template, and where answers lie in what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from hgms_core import ConfigError, DataError
from hgms_llm.formats import Message
from hgms_llm.templates import TEMPLATES, Piece, Template, answered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def model_template(tokenizer: PreTrainedTokenizerBase) -> Template:
    if not tokenizer.chat_template:
        raise ConfigError(
            'the tokenizer has no chat template, which template = "model" asks for (base models often have none)\n'
            f"  set template to one of: {', '.join(name for name in TEMPLATES if name != 'model')};"
            " or give the tokenizer of the instruction-tuned model"
        )
    chat = _Chat(tokenizer)
    return Template("model", chat.pieces, chat.opening, specials=True, text=str(tokenizer.chat_template))


@frozen(eq=False)
class _Chat:
    """A tokenizer's chat template. Where answers begin and end is found by rendering the conversation up to there."""

    tokenizer: PreTrainedTokenizerBase
    frame: tuple[str, str] | None = field(init=False)

    @frame.default
    def _around(self) -> tuple[str, str] | None:
        """What is written before the last answer and after it; None where a probe does not tell."""
        question = [Message("user", "a question")]
        try:
            bare, before = self.render(question), self.render(question, generate=True)
            whole = self.render([*question, Message("assistant", "an answer")])
        except DataError:
            return None
        head = before.removeprefix(bare)
        clear = head not in ("", before) and whole.startswith(before + "an answer")
        return (head, whole[len(before) + len("an answer") :]) if clear else None

    def render(self, messages: Sequence[Message], generate: bool = False) -> str:
        turns = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate))
        except Exception as error:  # templates raise what they like through Jinja
            roles = ", ".join(message.role for message in messages)
            raise DataError(
                f"the model's chat template refuses a conversation of the roles {roles}: {error}\n"
                '  leave such rows out, or take a named template (template = "chatml")'
            ) from error

    def opening(self, messages: Sequence[Message]) -> list[Piece]:
        return [(self.render(messages, generate=True), False)]

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        messages = answered(messages)
        whole = self.render(messages)
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        if len(answers) == 1:
            row = self._last(whole, messages[-1].text)
            if row:
                return row
        pieces: list[Piece] = []
        at = 0
        for number in answers:
            before = self.render(messages[:number], generate=True)
            through = whole if number == answers[-1] else self.render(messages[: number + 1])
            if not (whole.startswith(before) and whole.startswith(through) and at <= len(before) <= len(through)):
                raise DataError(
                    "the model's chat template writes earlier turns differently once later ones follow: answers cannot be\n"
                    '  told from what surrounds them\n  take a named template (template = "chatml"), or rows of one turn'
                )
            begin, stop = _answer(through, len(before), messages[number].text)
            pieces += [(whole[at:begin], False), (whole[begin:stop], True)]
            at = stop
        return [piece for piece in pieces if piece[0]]

    def _last(self, whole: str, answer: str) -> list[Piece] | None:
        """The usual row: one answer, found from the end, which spares rendering the prompt for itself."""
        if self.frame is None:
            return None
        head, tail = self.frame
        for text in (answer, answer.strip()):
            if text.strip() and whole.endswith(head + text + tail):
                begin = len(whole) - len(tail) - len(text)
                return [(whole[:begin], False), (whole[begin:].rstrip(), True)]
        return None


def _answer(text: str, begin: int, answer: str) -> tuple[int, int]:
    """Where the answer and its end mark lie in ``text[begin:]``: without a header that the generation prompt lacks, and without
    the white space that the template puts after the end mark."""
    at = text.find(answer.strip(), begin)
    if at > begin and text[begin:at].strip():
        begin = at
    return begin, max(len(text.rstrip()), begin)
