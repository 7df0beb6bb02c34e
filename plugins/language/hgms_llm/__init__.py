"""Language models on data mixtures: sources, templates, token tables, base models, stacked adapters, the task `source-mixture`.

Shared by the plugins for language models, which import these names and no others. Nothing here loads transformers before a
model or a tokenizer is asked for.
"""

from __future__ import annotations

from hgms_core import hookimpl
from hgms_llm.adapter import Lora as Lora
from hgms_llm.encoding import prompt_tokens as prompt_tokens
from hgms_llm.encoding import stop_tokens as stop_tokens
from hgms_llm.formats import Message as Message
from hgms_llm.language import LanguageModel as LanguageModel
from hgms_llm.losses import Batches as Batches
from hgms_llm.losses import token_loss as token_loss
from hgms_llm.memory import StepMemory as StepMemory
from hgms_llm.memory import predicted_memory as predicted_memory
from hgms_llm.memory import step_memory as step_memory
from hgms_llm.models import BaseModel as BaseModel
from hgms_llm.overlaps import overlap_warning as overlap_warning
from hgms_llm.overlaps import overlaps as overlaps
from hgms_llm.ranking import Phase as Phase
from hgms_llm.ranking import check_size as check_size
from hgms_llm.ranking import epoch_rows as epoch_rows
from hgms_llm.ranking import first_state as first_state
from hgms_llm.ranking import highest as highest
from hgms_llm.ranking import in_phases as in_phases
from hgms_llm.ranking import optional_count as optional_count
from hgms_llm.ranking import some_share as some_share
from hgms_llm.ranking import source_counts as source_counts
from hgms_llm.ranking import sources_of as sources_of
from hgms_llm.sources import Example as Example
from hgms_llm.sources import Source as Source
from hgms_llm.sources import content as content
from hgms_llm.sources import read_examples as read_examples
from hgms_llm.table import TokenTable as TokenTable
from hgms_llm.task import SourceMixture as SourceMixture
from hgms_llm.templates import template_for as template_for
from hgms_llm.tokens import token_table as token_table
from hgms_llm.training import adamw as adamw
from hgms_llm.training import adamw_part as adamw_part
from hgms_llm.training import adamw_start as adamw_start


@hookimpl
def hgms_register_tasks() -> list[type]:
    return [SourceMixture]
