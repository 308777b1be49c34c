"""Chat templates, and tokenizers for them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% if greeting %}{{ greeting }}{% endif %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the thoughts of earlier turns; the next turn begins with this whole prompt."""

OPENING = STRIPPING + "{% if add_generation_prompt %}<think>\n{% endif %}"
"""Opens the thought in the prompt, so the next turn branches off before the prompt's end."""


def make_tokenizer(template, merges=()):
    """A tokenizer of single ASCII characters and merged pairs, so that texts show the tokens."""
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # space and newline
    symbols = [*alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return fast
