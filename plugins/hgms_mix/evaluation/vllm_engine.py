"""Greedy generation through vLLM, with the same responses.

One base model in memory serves any number of LoRA adapters.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from hgms_core import ConfigError
from hgms_core.errors import MissingExtra, unknown_name
from hgms_mix.evaluation.generate import Prompts, Reply

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHUNK = 256
"""Prompts per call of vLLM."""
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``max_lora_rank``."""
MERGED_ONLY: Final = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
)
"""Fields of an adapter's configuration that vLLM rejects if they are set."""


class Engine:
    """vLLM with one base model (a folder in the format of transformers) and named adapters (folders
    in the format of peft).

    The base is loaded once, and each request selects an adapter. Evaluating N mixtures therefore
    needs the memory of one. vLLM keeps this memory until the ``with`` block ends.

    Args:
        base, adapters: the folders. ``length``: largest number of tokens of a prompt and its
            answer.

    Raises:
        MissingExtra: vLLM is not installed.
        ConfigError: an adapter's rank is above 512.
    """

    def __init__(self, base: Path, adapters: Mapping[str, Path], *, length: int) -> None:
        require()
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        options: dict[str, Any] = {"model": str(base), "max_model_len": length, "seed": 0}
        if adapters:
            rank = max(_rank(folder) for folder in adapters.values())
            options |= {
                "enable_lora": True,
                "max_lora_rank": _slot(rank),
                "max_loras": 1,
                "max_cpu_loras": len(adapters),
            }
        # vLLM distinguishes adapters by their numbers, which start at 1
        self._requests = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(adapters.items(), 1)
        }
        self._llm = LLM(**options)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop vLLM, which releases its memory."""
        self._llm.llm_engine.engine_core.shutdown()

    def replies(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, adapter: str | None = None
    ) -> Iterator[list[tuple[int, Reply]]]:
        """Yield the responses of the base with ``adapter`` (None: without adapter).

        The form is the same as for :func:`hgms_mix.evaluation.generate.replies`.

        Raises:
            ConfigError: there is no adapter with this name.
        """
        from vllm import SamplingParams

        if adapter is not None and adapter not in self._requests:
            raise unknown_name("adapter", adapter, self._requests, ("adapter",))
        request = None if adapter is None else self._requests[adapter]
        greedy = SamplingParams(
            temperature=0, max_tokens=prompts.new_tokens, stop_token_ids=list(prompts.stops)
        )
        seen = [{"prompt_token_ids": tokens} for tokens in prompts.visible_tokens()]
        for start in range(0, len(seen), CHUNK):
            outputs = enumerate(
                self._llm.generate(seen[start : start + CHUNK], greedy, lora_request=request), start
            )
            yield [
                prompts.reply(tokenizer, place, _tokens(output, prompts.stops))
                for place, output in outputs
            ]


def replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, folder: Path
) -> Iterator[list[tuple[int, Reply]]]:
    """Yield responses as :func:`hgms_mix.evaluation.generate.replies` does.

    vLLM requires the model as files. The function saves base and adapter to a temporary folder in
    ``folder``, and moves the model off the accelerator during generation. If vLLM cannot apply an
    adapter to a base (DoRA, a GPT-2, …), the adapter is merged into the base.
    """
    device = model.device
    move: Any = model.to
    saved = Path(tempfile.mkdtemp(prefix="vllm-", dir=folder))
    try:
        adapters = {"adapter": saved / "adapter"} if _apart(model) else {}
        move("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _save(model, saved, adapters)
        tokenizer.save_pretrained(saved)
        with Engine(saved, adapters, length=prompts.cap + prompts.new_tokens) as engine:
            yield from engine.replies(tokenizer, prompts, *adapters)
    finally:
        shutil.rmtree(saved, ignore_errors=True)
        move(device)


def _tokens(output: Any, stops: Sequence[int]) -> list[int]:
    """Return the generated tokens, including the end token, which vLLM may omit."""
    best = output.outputs[0]
    tokens = list(best.token_ids)
    ended = best.finish_reason == "stop" and not (tokens and tokens[-1] in stops)
    return [*tokens, *stops[:1]] if ended else tokens


def require() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra(
            "missing-package",
            'engine="vllm" requires vLLM, which is not installed',
            place=("evaluate", "engine"),
            install="pip install 'hgms[vllm]'",
        )


def _apart(model: Any) -> bool:
    """Return whether vLLM can serve the model's adapter separately from its base."""
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        return False
    from vllm import ModelRegistry

    (config,) = model.peft_config.values()
    plain = config.peft_type == "LORA" and config.bias == "none"
    if not plain or any(getattr(config, name, None) for name in MERGED_ONLY):
        return False
    known = ModelRegistry.models.get(type(model.get_base_model()).__name__)
    return known is not None and bool(known.inspect_model_cls().supports_lora)


def _rank(folder: Path) -> int:
    config = json.loads((folder / "adapter_config.json").read_bytes())
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def _slot(rank: int) -> int:
    """Return the smallest rank that vLLM supports and that fits the adapters."""
    fitting = [size for size in RANKS if size >= rank]
    if not fitting:
        raise ConfigError(
            "out-of-range",
            f"rank={rank} must be at most {RANKS[-1]} for vLLM",
            place=("adapter", "rank"),
            hint='set evaluate.engine = "transformers", or decrease the rank',
        )
    return fitting[0]


def _save(model: Any, folder: Path, adapters: Mapping[str, Path]) -> None:
    """Save the base into ``folder``, and its adapter separately or merged into the base."""
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        model.save_pretrained(folder)
    elif not adapters:
        # Merge into a copy: removing an adapter from a merged model leaves rounding errors in it.
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    else:
        for path in adapters.values():
            model.save_pretrained(path, save_embedding_layers=False)
        base = model.get_base_model()
        # the weights of adapted layers are one level deeper than in the plain model
        state = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name
        }
        base.save_pretrained(folder, state_dict=state)
