"""Low-rank adapters on a base model: what ``[task.adapter]`` says."""

from __future__ import annotations

from typing import Any, final

from attrs import field, frozen, validators
from torch import nn

from hgms_core import ConfigError, positive, whole
from hgms_llm.hub import transformers_quietly


@final
@frozen(kw_only=True)
class Lora:
    """Low-rank adapters: a frozen W becomes W + (alpha/rank)·BA, with A ``[rank, in]`` and B ``[out, rank]`` trained.

    A starts uniform (Kaiming, as in peft), B at zero. ``dropout`` acts on what goes into A, while training only; its masks are
    a function of the batch, so that a branch can be run again. ``targets`` are module names or their last parts (None: peft's
    choice for the architecture).

    Source: Hu et al., *LoRA: low-rank adaptation of large language models*, ICLR 2022.
    """

    rank: int = field(default=16, validator=whole)
    alpha: float = field(default=32.0, validator=positive)
    dropout: float = field(default=0.0, validator=[validators.ge(0), validators.lt(1)])
    targets: tuple[str, ...] | None = None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def modules(self, model: nn.Module) -> list[str]:
        """The names of the modules that get an adapter."""
        targets = self.targets if self.targets is not None else _usual_targets(model)
        linear = [name for name, module in model.named_modules() if width_of(module) is not None]
        chosen = [name for name in linear if any(name == target or name.endswith("." + target) for target in targets)]
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if head is not None and any(model.get_submodule(name) is head for name in chosen):
            raise ConfigError("the output embedding cannot have an adapter; take it out of task.adapter.targets")
        if not chosen:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"no module of this {type(model).__name__} is called {' or '.join(map(repr, targets))} @ task.adapter.targets\n"
                f"  its linear modules are: {', '.join(known)}"
            )
        return chosen

    def peft_config(self, model: nn.Module) -> Any:
        """The same adapters as a ``peft.LoraConfig``, for fine-tuning and for saving."""
        transformers_quietly()
        import peft

        modules = self.modules(model)
        convolution = any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in modules)
        return peft.LoraConfig(
            r=self.rank, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=modules,
            fan_in_fan_out=convolution, task_type="CAUSAL_LM",
        )  # fmt: skip


def width_of(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear module: also GPT-2's Conv1D, and quantised ones."""
    if type(module).__name__ == "Conv1D":
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
    return None


def _usual_targets(model: nn.Module) -> tuple[str, ...]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual

    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    if kind not in usual:
        raise ConfigError(f"no usual adapter targets are known for a {kind or type(model).__name__}: set task.adapter.targets")
    return tuple(usual[kind])
