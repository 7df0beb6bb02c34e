"""The same greedy answers through vLLM."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hgms_core import MissingExtra
from hgms_evaluation.generate import Prompts, Reply

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK = 256
"""Prompts that vLLM is handed at once."""


def replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, folder: Path
) -> Iterator[list[tuple[int, Reply]]]:
    """As :func:`hgms_evaluation.generate.replies`. vLLM needs the model as files: it is saved, adapters merged, to a temporary
    folder in ``folder``, and moved off the accelerator meanwhile."""
    require()
    from vllm import LLM, SamplingParams

    device = model.device
    move: Any = model.to
    saved = tempfile.mkdtemp(prefix="vllm-", dir=folder)
    try:
        _save_merged(model, Path(saved))
        tokenizer.save_pretrained(saved)
        move("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        engine = LLM(model=saved, max_model_len=prompts.cap + prompts.new_tokens, seed=0)
        greedy = SamplingParams(temperature=0, max_tokens=prompts.new_tokens, stop_token_ids=list(prompts.stops))
        seen = [{"prompt_token_ids": tokens} for tokens in prompts.seen()]
        for start in range(0, len(seen), CHUNK):
            outputs = enumerate(engine.generate(seen[start : start + CHUNK], greedy), start)
            yield [prompts.reply(tokenizer, place, _tokens(output, prompts.stops)) for place, output in outputs]
    finally:
        shutil.rmtree(saved, ignore_errors=True)
        move(device)


def _tokens(output: Any, stops: Sequence[int]) -> list[int]:
    """What was generated, with the token that ended it, which vLLM may leave out."""
    best = output.outputs[0]
    tokens = list(best.token_ids)
    ended = best.finish_reason == "stop" and not (tokens and tokens[-1] in stops)
    return [*tokens, *stops[:1]] if ended else tokens


def require() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("evaluate.engine = \"vllm\" needs vLLM, which is not installed\n  pip install 'hgms[vllm]'")


def _save_merged(model: PreTrainedModel, folder: Path) -> None:
    adapted: Any = model
    if not hasattr(adapted, "merge_adapter"):
        adapted.save_pretrained(folder)
        return
    adapted.merge_adapter()
    try:
        base = adapted.get_base_model()
        # the adapted layers hold their (now merged) weights one level deeper than the plain model has them
        state = {
            name.replace(".base_layer.", "."): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name
        }
        base.save_pretrained(folder, state_dict=state)
    finally:
        adapted.unmerge_adapter()
