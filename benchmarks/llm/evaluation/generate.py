"""Greedy replies: format conversations, generate tokens, decode to text.

Conversations use the templates of training.

Prompts of a batch are aligned at their ends (left padding), so that a batch gives the same text
as single prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import frozen

from hgms.arguments import require
from hgms.store import Digest
from hgms_core import HgmsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Turn = tuple[Literal["user", "assistant"], str]
"""The role of a turn, and its text."""


@frozen
class Reply:
    """An answer. ``finished``: the model ended its answer; ``truncated``: the prompt was cut
    on its left.
    """

    text: str
    new_tokens: int
    finished: bool
    prompt_tokens: int
    truncated: bool


@frozen
class Prompts:
    """Conversations as tokens; the model receives the last ``cap`` tokens of each.

    An answer has at most ``new_tokens``, and ends with one of ``stops``.
    """

    tokens: Sequence[list[int]]
    stops: Sequence[int]
    cap: int
    new_tokens: int

    def reply(
        self, tokenizer: PreTrainedTokenizerBase, position: int, tokens: list[int]
    ) -> tuple[int, Reply]:
        """Return the position of a prompt, and the model's reply to it."""
        end = next((place for place, token in enumerate(tokens) if token in self.stops), None)
        kept = tokens if end is None else tokens[:end]
        prompt = len(self.tokens[position])
        text = tokenizer.decode(kept, skip_special_tokens=True)
        ended = end is not None
        return position, Reply(
            text.strip(), len(kept) + ended, ended, min(prompt, self.cap), prompt > self.cap
        )


def prompts_for(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    conversations: Sequence[Sequence[Turn]],
    max_prompt_tokens: int,
    new_tokens: int,
) -> Prompts:
    """Convert each conversation to tokens up to the start of the next answer.

    An answer ends with the template's end mark, the tokenizer's end token, or an end token in the
    model's generation settings.

    Raises
    ------
    ConfigError
        There is no template with this name, the tokenizer has no chat template ("model") or no end
        token, or the model has too few positions.
    """
    from hgms_mix.lm import Message, prompt_tokens, stop_tokens, template_for

    form = template_for(template, tokenizer)
    tokens = [
        prompt_tokens([Message(role, text) for role, text in turns], tokenizer, form)
        for turns in conversations
    ]
    stops = sorted({*stop_tokens(tokenizer, form), *own_stops(model)})
    return Prompts(tokens, stops, prompt_cap(model, max_prompt_tokens, new_tokens), new_tokens)


def own_stops(model: PreTrainedModel) -> list[int]:
    """Return the end tokens in the model's generation settings."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    return [
        int(token)
        for token in (own if isinstance(own, (list, tuple)) else [own])
        if token is not None
    ]


def prompt_cap(model: PreTrainedModel, max_prompt_tokens: int, new_tokens: int) -> int:
    """Return the number of prompt tokens that fit into the positions of the model."""
    from hgms_mix.lm import positions_of

    positions = positions_of(model)
    room = (
        max_prompt_tokens if positions is None else min(max_prompt_tokens, positions - new_tokens)
    )
    require(
        room >= 1,
        "out-of-range",
        f"max_new_tokens={new_tokens} must be less than the {positions} positions of the model",
        place=("max_new_tokens",),
    )
    return room


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of up to 64 spread entries of every parameter.

    It distinguishes the replies of different models.
    """
    digest = Digest()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        few = (
            flat[:: max(1, len(flat) // 64)][:64].to("cpu", torch.float32)
            if flat.is_floating_point()
            else flat[:64].cpu()
        )
        digest.add(f"{name} {tuple(parameter.shape)}")
        digest.add(few.contiguous().numpy().tobytes())
    return digest.text


def replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    batch_size: int,
    report: Callable[[str], None],
) -> Iterator[list[tuple[int, Reply]]]:
    """Yield greedy answers batch by batch, as (position in ``prompts``, reply).

    The longest prompts come first. The prompts of a batch therefore have similar lengths, and a
    batch that is too large for the device fails immediately. The batch size is then halved for this
    and all later batches. The model's generation settings (temperature, repetition penalty) are
    ignored, and restored afterwards.

    Raises
    ------
    HgmsError
        The memory of the device is too small for one prompt.
    """
    from transformers import GenerationConfig

    stops = list(prompts.stops)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0] if stops else 0
    lengths: dict[str, Any] = {
        "max_new_tokens": prompts.new_tokens,
        "eos_token_id": stops or None,
        "pad_token_id": pad,
    }
    greedy = GenerationConfig(do_sample=False, num_beams=1, use_cache=True, **lengths)
    seen = [prompt[-prompts.cap :] for prompt in prompts.tokens]
    order = sorted(range(len(seen)), key=lambda position: (-len(seen[position]), position))
    with without_own_settings(model):
        while order:
            now = order[:batch_size]
            try:
                new = _batch(model, [seen[position] for position in now], greedy, pad)
            except torch.OutOfMemoryError:
                batch_size = _halve(len(now), prompts.new_tokens, len(seen[now[0]]), report)
                continue
            order = order[batch_size:]
            yield [
                prompts.reply(tokenizer, position, tokens)
                for position, tokens in zip(now, new, strict=True)
            ]


def _batch(
    model: PreTrainedModel, prompts: list[list[int]], greedy: object, pad: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    tokens = torch.tensor(
        [[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device
    )
    real = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device
    )
    with torch.inference_mode():
        new = model.generate(input_ids=tokens, attention_mask=real, generation_config=greedy)
    return new[:, width:].tolist()


def _halve(rows: int, new: int, longest: int, report: Callable[[str], None]) -> int:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    require(
        rows > 1,
        "out-of-memory",
        f"memory is insufficient for one prompt of {longest} tokens and {new} new tokens",
        place=("batch_size",),
        hint="decrease max_prompt_tokens or max_new_tokens, or load the model in a smaller dtype",
        error=HgmsError,
    )
    report(f"out of memory with {rows} prompts at once: continuing with {rows // 2} (batch_size)")
    return rows // 2


@contextlib.contextmanager
def without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Disable dropout and the model's generation settings inside the block.

    Otherwise these settings would replace unset fields of the given settings.
    """
    from peft import PeftModel
    from transformers import GenerationConfig

    # peft passes on its settings
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    own = inner.generation_config
    training = model.training
    model.generation_config = inner.generation_config = GenerationConfig()
    model.eval()
    try:
        yield
    finally:
        model.generation_config = inner.generation_config = own
        model.train(training)
