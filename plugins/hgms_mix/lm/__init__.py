"""Language models on data mixtures.

The package contains sources, templates, token tables, base models, stacked adapters, and the task
`source-mixture`.

The plugins for language models share it, and import only these names. Transformers is imported only
when a model or a tokenizer is needed.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_mix.lm.examples import Example, content
from hgms_mix.lm.formats import ROLES, Message
from hgms_mix.lm.language import LanguageModel
from hgms_mix.lm.lora import Lora, interpolate
from hgms_mix.lm.losses import Batches, token_loss
from hgms_mix.lm.models import BaseModel, positions_of
from hgms_mix.lm.phased_methods import MixtureMethod, PhasedMethod, RowSelection, TrainedMethod
from hgms_mix.lm.ranking import (
    AdamWSettings,
    Phase,
    adamw,
    adamw_moved,
    adamw_on_mixture,
    adamw_part,
    adamw_start,
    adamw_steps,
    check_finite,
    check_positive,
    check_role,
    epoch_rows,
    focused_mixtures,
    highest,
    optional_count,
    prior_shares,
    set_losses,
    some_share,
    source_counts,
    sources_of,
    upper_gradient,
)
from hgms_mix.lm.rows import examples_at
from hgms_mix.lm.sources import Source, mixture_shares
from hgms_mix.lm.store import warn
from hgms_mix.lm.table import TokenTable, check_fits
from hgms_mix.lm.task import SourceMixture
from hgms_mix.lm.templates import template_for
from hgms_mix.lm.tokens import prompt_tokens, stop_tokens, token_table

__all__ = [
    "ROLES",
    "AdamWSettings",
    "BaseModel",
    "Batches",
    "Example",
    "LanguageModel",
    "Lora",
    "Message",
    "MixtureMethod",
    "Phase",
    "PhasedMethod",
    "RowSelection",
    "Source",
    "SourceMixture",
    "TokenTable",
    "TrainedMethod",
    "adamw",
    "adamw_moved",
    "adamw_on_mixture",
    "adamw_part",
    "adamw_start",
    "adamw_steps",
    "check_finite",
    "check_fits",
    "check_positive",
    "check_role",
    "content",
    "epoch_rows",
    "examples_at",
    "focused_mixtures",
    "highest",
    "interpolate",
    "mixture_shares",
    "optional_count",
    "positions_of",
    "prior_shares",
    "prompt_tokens",
    "set_losses",
    "some_share",
    "source_counts",
    "sources_of",
    "stop_tokens",
    "template_for",
    "token_loss",
    "token_table",
    "upper_gradient",
    "warn",
]


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [SourceMixture]
