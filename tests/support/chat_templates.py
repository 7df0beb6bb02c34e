"""Chat templates with the habits of published ones, for the tokenizer of bytes."""

from __future__ import annotations

import functools
from typing import Any

from hgms_mix.lm.tokenizers import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # begins with bos, trims what it writes
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
TURNS = (  # no system turns; the assistant is called model
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
INST = (  # no generation prompt of its own; a space on either side of an answer
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} "
    "[/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
LATE = (  # writes the assistant's header with its answer only
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
)
FORGETFUL = (  # strips the thoughts of all but the last answer
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>') | last }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (  # an empty block of thoughts in the last answer; the thoughts of earlier ones are removed
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% else %}{{ (m.content.split('</think>') | last).lstrip('\n') }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>"]


@functools.cache
def with_template(template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = template
    return tokenizer
