"""The tokenizer of a GGUF file, corrected to equal the published tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

POSITIONS = 8192
"""The number of the model's positions, which is also the largest number of tokens of a text."""


def published(tokenizer: Any) -> PreTrainedTokenizerFast:
    """Return the published tokenizer.

    It splits texts at each digit first, and then as GPT-2's tokenizer splits them.

    A GGUF file contains vocabulary, merges, special tokens and chat template. It contains only a
    name for the splitting (``smollm``), which transformers ignores: it splits as GPT-2 does.
    Numbers have the same tokens then, since no merge joins digits. The white space before them does
    not. For two line breaks before a digit, GPT-2's pattern assigns the second to the following
    text. The result is two tokens instead of the single token used in training.

    Source: ``tokenizer.json`` of HuggingFaceTB/SmolLM2-135M-Instruct (``"pre_tokenizer"``).
    """
    import transformers
    from tokenizers import pre_tokenizers

    core = tokenizer.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    whole: PreTrainedTokenizerFast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=tokenizer.chat_template,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    return whole
