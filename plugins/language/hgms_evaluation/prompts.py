"""From what is said to the tokens a model continues, and those that end its answer: the same templates as in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from attrs import frozen

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Turn = tuple[Literal["user", "assistant"], str]
"""Who speaks, and what."""


@frozen
class Prompts:
    """The conversations' prompts as tokens, the tokens that end an answer, and what the two depend on."""

    tokens: list[list[int]]
    stops: list[int]


def build(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: str, conversations: Sequence[Sequence[Turn]]
) -> Prompts:
    """Each conversation up to where the next answer begins. An answer ends with the template's end mark, the tokenizer's end
    token or what the model's own generation settings call an end.

    Raises:
        ConfigError: no template has that name, or the tokenizer has no chat template of its own ("model") or no end token.
    """
    from hgms_llm import Message, prompt_tokens, stop_tokens, template_for

    form = template_for(template, tokenizer)
    tokens = [prompt_tokens([Message(role, text) for role, text in turns], tokenizer, form) for turns in conversations]
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    more = own if isinstance(own, (list, tuple)) else [own]
    return Prompts(tokens, sorted({*stop_tokens(tokenizer, form), *(int(token) for token in more if token is not None)}))
