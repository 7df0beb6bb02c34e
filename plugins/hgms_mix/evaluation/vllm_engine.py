"""The same greedy answers through vLLM: one base in its memory, and any number of LoRA adapters
on it.
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
"""Prompts that vLLM is handed at once."""
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
"""Fields of an adapter's configuration that vLLM refuses where they say something."""


class Engine:
    """vLLM with one base model (a folder in the format of transformers) and adapters by name
    (folders in peft's). The base is loaded once; which adapter answers is said with each request,
    so that N mixtures are evaluated for the memory of one. vLLM holds that memory until the
    ``with`` block ends.

    Args:
        base, adapters: the folders. ``length``: tokens of a prompt and its answer at most.

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
        # vLLM keeps adapters apart by their numbers, which begin at 1
        self._requests = {
            name: LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(adapters.items(), 1)
        }
        self._llm = LLM(**options)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends vLLM, which gives its memory back."""
        self._llm.llm_engine.engine_core.shutdown()

    def replies(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Prompts, adapter: str | None = None
    ) -> Iterator[list[tuple[int, Reply]]]:
        """The answers of the base with ``adapter`` (None: of the base alone), as
        :func:`hgms_mix.evaluation.generate.replies`.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        from vllm import SamplingParams

        if adapter is not None and adapter not in self._requests:
            raise unknown_name("adapter", adapter, self._requests, ("adapter",))
        request = None if adapter is None else self._requests[adapter]
        greedy = SamplingParams(
            temperature=0, max_tokens=prompts.new_tokens, stop_token_ids=list(prompts.stops)
        )
        seen = [{"prompt_token_ids": tokens} for tokens in prompts.seen()]
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
    """As :func:`hgms_mix.evaluation.generate.replies`. vLLM needs the model as files: base and
    adapter are saved to a temporary folder in ``folder``, and the model is moved off the
    accelerator meanwhile. An adapter that vLLM cannot put on a base (DoRA, a GPT-2, …) is merged
    into it.
    """
    require()
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
    """What was generated, with the token that ended it, which vLLM may leave out."""
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
    """Whether vLLM can serve the model's adapter beside its base."""
    if not hasattr(model, "peft_config"):
        return False
    from vllm import ModelRegistry

    (config,) = model.peft_config.values()
    plain = (
        str(getattr(config.peft_type, "value", config.peft_type)) == "LORA"
        and config.bias == "none"
    )
    if not plain or any(getattr(config, name, None) for name in MERGED_ONLY):
        return False
    known = ModelRegistry.models.get(type(model.get_base_model()).__name__)
    return known is not None and bool(known.inspect_model_cls().supports_lora)


def _rank(folder: Path) -> int:
    config = json.loads((folder / "adapter_config.json").read_bytes())
    return max([int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())])


def _slot(rank: int) -> int:
    """The least rank that vLLM has room for and the adapters need."""
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
    """The base into ``folder``, its adapter beside it where it is served apart, else merged into
    the base.
    """
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
    elif not adapters:
        # a copy, since an adapter that is taken out of a merged model again leaves rounding errors
        # in it
        copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    else:
        for path in adapters.values():
            model.save_pretrained(path, save_embedding_layers=False)
        base = model.get_base_model()
        # the adapted layers hold their weights one level deeper than the plain model has them
        state = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name
        }
        base.save_pretrained(folder, state_dict=state)
