"""Greedy answers in batches, with the prompts' ends aligned (left padding), so that a batch gives what single prompts give."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from hgms_core import ConfigError, HgmsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@frozen
class Reply:
    """``finished``: the model ended its answer itself; ``truncated``: the prompt was cut on its left."""

    text: str
    new_tokens: int
    finished: bool
    prompt_tokens: int
    truncated: bool


def prompt_cap(model: PreTrainedModel, max_prompt_tokens: int, max_new_tokens: int) -> int:
    """How many tokens of a prompt fit, given the positions the model has."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    room = max_prompt_tokens if positions is None else min(max_prompt_tokens, positions - max_new_tokens)
    if room < 1:
        raise ConfigError(f"evaluate.max_new_tokens = {max_new_tokens}, but the model has {positions} positions: lower it")
    return room


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of up to 64 spread entries of every parameter: answers of one model are not taken for another's."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        entries = (
            flat[:: max(1, len(flat) // 64)][:64].to("cpu", torch.float32) if flat.is_floating_point() else flat[:64].cpu()
        )
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(entries.contiguous().numpy().tobytes())
    return digest.hexdigest()


def replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    stops: Sequence[int],
    max_new_tokens: int,
    cap: int,
    batch_size: int,
    report: Callable[[str], None],
) -> Iterator[list[tuple[int, Reply]]]:
    """Greedy answers to token prompts, batch by batch, as (position in ``prompts``, reply).

    Prompts are taken longest first: those of a batch are about equally long, and a batch too large for the device shows itself
    at once. It is then halved, for all batches that follow. The model's own generation settings (temperature, repetition
    penalty) do not take part; they are as they were afterwards.

    Raises:
        HgmsError: one prompt alone is too much for the device's memory.
    """
    from transformers import GenerationConfig

    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0] if stops else 0
    greedy = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
        use_cache=True,
    )
    cut = [list(prompt[-cap:]) for prompt in prompts]
    order = sorted(range(len(cut)), key=lambda position: (-len(cut[position]), position))
    with _answering(model, GenerationConfig()):
        while order:
            now = order[:batch_size]
            try:
                new = _batch(model, [cut[position] for position in now], greedy, pad)
            except torch.OutOfMemoryError:
                batch_size = _halved(len(now), max_new_tokens, len(cut[now[0]]), report)
                continue
            order = order[batch_size:]
            yield [
                (position, reply_of(tokenizer, tokens, stops, len(cut[position]), len(prompts[position]) > cap))
                for position, tokens in zip(now, new, strict=True)
            ]


def _batch(model: PreTrainedModel, prompts: list[list[int]], greedy: object, pad: int) -> list[list[int]]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    with torch.inference_mode():
        generate: Any = model.generate
        rows = generate(input_ids=tokens, attention_mask=real, generation_config=greedy)
    new: list[list[int]] = rows[:, width:].tolist()
    return new


def _halved(rows: int, new: int, longest: int, report: Callable[[str], None]) -> int:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if rows == 1:
        raise HgmsError(
            f"out of memory with one prompt of {longest} tokens and {new} new ones\n"
            "  lower evaluate.max_prompt_tokens or evaluate.max_new_tokens, or load the model in a smaller dtype"
        )
    report(f"out of memory with {rows} prompts at once: going on with {rows // 2} (evaluate.batch_size)")
    return rows // 2


def reply_of(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stops: Sequence[int], prompt: int, truncated: bool
) -> Reply:
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True)
    assert isinstance(text, str)
    return Reply(text.strip(), len(kept) + (end is not None), end is not None, prompt, truncated)


@contextlib.contextmanager
def _answering(model: PreTrainedModel, settings: Any) -> Iterator[None]:
    """The model without dropout and without generation settings of its own, which would fill what ours leave open."""
    adapted: Any = model
    inner = adapted.get_base_model() if hasattr(adapted, "get_base_model") else model  # peft hands its own settings down
    own, training = inner.generation_config, model.training
    adapted.generation_config = inner.generation_config = settings
    model.eval()
    try:
        yield
    finally:
        adapted.generation_config = inner.generation_config = own
        model.train(training)
