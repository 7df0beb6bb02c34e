"""The tokenizer of a GGUF file, mended to be the published one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

POSITIONS = 8192
"""The model's, which are also the most tokens of a text."""


def published(tokenizer: Any) -> PreTrainedTokenizerFast:
    """The published tokenizer: texts are split at each digit first, and then as GPT-2's tokenizer
    splits them.

    A GGUF file holds vocabulary, merges, special tokens and chat template, but of the splitting
    only a name (``smollm``), which transformers does not look at: it splits as GPT-2 does. Numbers
    come out the same then, since no merge joins digits; the white space before them does not: of
    two line breaks before a digit GPT-2's pattern leaves the second to what follows, so that they
    are two tokens instead of the one that the model was trained on.

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
