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
from hgms_evaluation.generate import Reply, reply_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    stops: Sequence[int],
    max_new_tokens: int,
    cap: int,
    folder: Path,
    chunk: int = 256,
) -> Iterator[list[tuple[int, Reply]]]:
    """The same through vLLM, which needs the model as files: it is saved, adapters merged, to a temporary folder in ``folder``,
    and moved off the accelerator meanwhile.

    Raises:
        MissingExtra: vLLM is not installed.
    """
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
        engine = LLM(model=saved, max_model_len=cap + max_new_tokens, seed=0)
        greedy = SamplingParams(temperature=0, max_tokens=max_new_tokens, stop_token_ids=list(stops))
        for start in range(0, len(prompts), chunk):
            part = prompts[start : start + chunk]
            outputs = engine.generate([{"prompt_token_ids": list(prompt[-cap:])} for prompt in part], greedy)
            yield [
                (start + place, reply_of(tokenizer, _tokens(output, stops), stops, min(len(prompt), cap), len(prompt) > cap))
                for place, (prompt, output) in enumerate(zip(part, outputs, strict=True))
            ]
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
