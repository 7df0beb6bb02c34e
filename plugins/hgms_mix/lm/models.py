"""The base model of ``[task.model]``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

import torch
from attrs import field
from torch import nn

from hgms.arguments import require, require_known
from hgms.config import expand
from hgms.packages import optional_module
from hgms.store import file_digest, json_digest
from hgms_core import ConfigError, HgmsError, Key, component
from hgms_core.errors import OutOfMemory, Place, unknown_name
from hgms_core.torch_errors import first_line, out_of_memory
from hgms_mix.lm.files import without_expansion
from hgms_mix.lm.hub import may_run_code, resolve_name, transformers_quietly
from hgms_mix.lm.sharding import ensure_ranks, shard_model

MODEL = ("task", "model")
"""The place of a model in the configuration."""
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Attention = Literal["auto", "sdpa", "eager", "flash_attention_2"]


@final
@component
class BaseModel:
    """A causal language model of transformers.
    Its weights are loaded once, frozen, and shared by all candidates.

    Parameters
    ----------
    path
        a folder, or a name on the Hub with its ``revision``. ``$VARIABLES`` and ``~`` are expanded.
        A string in place of the table is its path: ``model = "Qwen/Qwen2-7B"``.
    config
        Instead of ``path``, an architecture to build with random weights (from ``seed``):
        ``model_type`` and any fields of its transformers configuration, such as
        ``{ model_type = "gpt2", n_layer = 4, n_embd = 128, n_head = 4 }``. The vocabulary is the
        tokenizer's. Weights are drawn on the CPU and are the same for every device.
    tokenizer
        ``bytes`` (256 bytes, no download), a folder (also with GPT-2's encoder.json and vocab.bpe),
        or a name on the Hub; None: the tokenizer at ``path``.
    dtype
        Type of the frozen weights; ``auto``: bfloat16 if the device supports it, else the type of
        the adapters.
    attention
        ``sdpa``, ``eager`` or ``flash_attention_2``; ``auto``: sdpa if the architecture supports
        it, else eager.
    quantize
        ``4bit`` stores the frozen weights in NF4 (bitsandbytes, needs a GPU).
    shard
        Split the frozen weights evenly across the ranks of a run (``run.ranks``), and gather a
        layer when a pass reaches it. This needs less memory and more communication. Requires an
        adapter, and a hypergradient of first order.
    trust_remote_code
        The model contains Python code. The code runs only if the command also permits it
        (``--trust-remote-code``; from Python HGMS_TRUST_REMOTE_CODE=1). Never permit it for a model
        whose code you have not read.

    Raises
    ------
    ConfigError
        For a missing model, and for a model with Python code without permission.
    """

    shorthand: ClassVar[str] = "path"
    """The field that a string in place of the table sets."""

    path: str | None = None
    revision: str | None = None
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    seed: int = 0
    tokenizer: str | None = None
    dtype: Dtype = "auto"
    attention: Attention = "auto"
    quantize: Literal["4bit"] | None = None
    shard: bool = False
    trust_remote_code: bool = False

    def __attrs_post_init__(self) -> None:
        require(
            not self.shard or self.quantize is None,
            "conflicting-options",
            f"shard = true and quantize={self.quantize!r} exclude each other",
            place=("shard",),
            hint="remove one of them",
        )
        either = "set path to a folder or a name on the Hub, or config to an architecture to build"
        require(
            self.path is None or self.config is None,
            "conflicting-options",
            f"path={self.path!r} and config exclude each other",
            place=("path",),
            hint=either,
        )
        require(
            self.path is not None or self.config is not None,
            "missing-option",
            "a model requires a path or a config",
            place=("path",),
            hint=either,
        )
        require(
            self.config is None or "model_type" in self.config,
            "missing-option",
            "config requires a model_type",
            place=("config", "model_type"),
            hint='set it to "gpt2", "llama", "qwen2" or "gemma2", for example',
        )
        require(
            self.config is None or self.tokenizer is not None,
            "missing-option",
            "a model built from config requires a tokenizer",
            place=("tokenizer",),
            hint='set tokenizer = "bytes", for example',
        )

    def memory_hints(self) -> list[str]:
        """Return options that reduce memory."""
        return ['set quantize = "4bit"'] if self.quantize is None and self.path is not None else []

    def load_tokenizer(self) -> Any:
        """Load the tokenizer, with a padding token."""
        transformers_quietly()
        from hgms_mix.lm.tokenizers import load_tokenizer

        trust = may_run_code(self.trust_remote_code, self.path or self.tokenizer)
        option = "path" if self.tokenizer is None else "tokenizer"
        return load_tokenizer(
            getattr(self, option),
            revision=self.revision if self.tokenizer is None else None,
            trust_remote_code=trust,
            place=(*MODEL, option),
        )

    def digest(self) -> str | None:
        """Return an identifier of the contents of the model's folder and the tokenizer's.

        Return None if the configuration identifies them (an architecture, a name on the Hub).

        Files are read completely: a hundred gigabytes of weights take some minutes, once.
        """
        options = {"path": self.path, "tokenizer": self.tokenizer}
        contents = {
            f"task.model.{option}": _contents(name, (*MODEL, option))
            for option, name in options.items()
            if name is not None
        }
        known = {place: content for place, content in contents.items() if content}
        return json_digest(known) if known else None

    def load(
        self,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        vocabulary: int | None = None,
        *,
        sharded: bool = False,
    ) -> nn.Module:
        """Load the model on the device, frozen and in evaluation mode.

        ``dtype`` is the fallback of ``auto``. ``sharded``: split across the ranks of torch's
        process group; the result is a :class:`~hgms_mix.lm.sharding.Sharded`. All ranks must then
        call this. Only rank 0 reads the weights, completely and into CPU memory.

        Raises
        ------
        ConfigError
            For a model that cannot be loaded, a device without NF4, or one rank.
        """
        require(
            self.quantize is None or (device.type == "cuda" and self.path is not None),
            "not-supported",
            f"quantize={self.quantize!r} requires path and a CUDA device, but the device is "
            f"{device.type!r} and path={self.path!r}",
            place=(*MODEL, "quantize"),
            hint="remove quantize",
        )
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported() and dtype == torch.float32
        usual = torch.bfloat16 if fast else dtype
        weights = usual if self.dtype == "auto" else getattr(torch, self.dtype)
        load = functools.partial(self._load, weights=weights, vocabulary=vocabulary)
        if not sharded:
            return load(device)
        ensure_ranks()
        whole, outline = (functools.partial(load, torch.device(kind)) for kind in ("cpu", "meta"))
        return shard_model(whole, outline, device)

    def _load(
        self, device: torch.device, weights: torch.dtype, vocabulary: int | None
    ) -> nn.Module:
        """Load the model; on the meta device its outline, without the weights."""
        transformers = transformers_quietly()
        options: dict[str, Any] = {"dtype": weights}
        if self.attention != "auto":
            options["attn_implementation"] = self.attention
        try:
            model = (
                self._build(transformers, options, vocabulary, device)
                if self.path is None
                else self._read(transformers, options, device)
            )
            if self.quantize is None:
                model = model.to(device)
        except HgmsError:
            raise
        except Exception as error:
            # transformers, the Hub, safetensors and torch raise errors of many classes.
            if out_of_memory(error):
                raise OutOfMemory(
                    "out-of-memory",
                    f"the model does not fit into the memory of {device}: {first_line(error)}",
                    place=MODEL,
                    hint='set task.model.dtype = "bfloat16" or task.model.quantize = "4bit", or '
                    "use a smaller model",
                ) from error
            spec = self.path or "config"
            raise ConfigError(
                "cannot-load",
                f"the model {spec!r} cannot be loaded: "
                f"{without_expansion(first_line(error), spec)}",
                place=(*MODEL, "config" if self.path is None else "path"),
                hint="check that it is complete (config.json, *.safetensors) and a causal "
                "language model",
            ) from error
        return model.eval().requires_grad_(False)

    def _read(self, transformers: Any, options: dict[str, Any], device: torch.device) -> Any:
        """Read the model from a folder or the Hub."""
        assert self.path is not None
        trust = may_run_code(self.trust_remote_code, self.path)
        where = resolve_name(self.path, "model", (*MODEL, "path"))
        which = {"revision": self.revision, "trust_remote_code": trust}
        if device.type == "meta":
            config = transformers.AutoConfig.from_pretrained(where, **which)
            with device:
                return transformers.AutoModelForCausalLM.from_config(
                    config, trust_remote_code=trust, **options
                )
        if self.quantize is not None:
            options |= {
                "quantization_config": _four_bit(transformers, options["dtype"]),
                "device_map": {"": device},
            }
        return transformers.AutoModelForCausalLM.from_pretrained(where, **which, **options)

    def _build(
        self,
        transformers: Any,
        options: dict[str, Any],
        vocabulary: int | None,
        device: torch.device,
    ) -> Any:
        assert self.config is not None
        fields = dict(self.config)
        kind = fields.pop("model_type")
        _check_config(transformers, kind, fields)
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        sizes = {"vocab_size": vocabulary} if vocabulary is not None else {}
        config = transformers.AutoConfig.for_model(kind, **{**ends, **sizes, **fields})
        make = functools.partial(transformers.AutoModelForCausalLM.from_config, config, **options)
        if device.type == "meta":
            with device:
                return make()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(Key(self.seed).fold("model").derive() % 2**32)
            return make()


def positions_of(model: Any) -> int | None:
    """Return the largest number of tokens of a row; None if the model has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _contents(spec: str, place: Place) -> dict[str, str]:
    """Return the digest of each file in the folder ``spec``; empty for a name on the Hub."""
    folder = expand(spec, place)
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return {file.name: file_digest(file) for file in files if file.is_file()}
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise ConfigError(
            "unreadable-file",
            f"the model {spec!r} cannot be read: {why}",
            place=place,
            hint="check the permissions of its files",
        ) from None


def _check_config(transformers: Any, kind: str, fields: Mapping[str, Any]) -> None:
    """Reject an unknown architecture and unknown fields.

    Transformers stores unknown fields without a warning.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    require_known("model type", str(kind), known, (*MODEL, "config", "model_type"))
    usual = transformers.AutoConfig.for_model(kind)
    for name in fields:
        if not hasattr(usual, name):
            raise unknown_name(
                "option",
                name,
                {*usual.to_dict(), *usual.attribute_map},
                (*MODEL, "config", name),
                label=f"{kind} option",
            )


def _four_bit(transformers: Any, dtype: torch.dtype) -> Any:
    optional_module("bitsandbytes", 'quantize = "4bit"', "quantize", place=(*MODEL, "quantize"))
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
