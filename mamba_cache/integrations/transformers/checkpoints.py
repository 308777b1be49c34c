"""Beginnings of prompts that other prompts will share, as callers and chat templates name them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from mamba_cache._checks import as_ints, as_items
from mamba_cache.errors import InvalidArgumentError

__all__ = ["message_ends", "read_checkpoints"]

_OURS = ("tokenize", "return_tensors", "return_dict")
"""Options of ``apply_chat_template`` that say what it returns."""


def message_ends(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_options: Any
) -> list[int]:
    """Finds where each message of a chat ends in its prompt.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        messages: The chat, as for ``tokenizer.apply_chat_template``.
        template_options: What that is given for the prompt besides, such as
            ``add_generation_prompt`` and ``tools``.

    Returns:
        Positions in tokens of the prompt, ascending, to be given as ``checkpoints``: prompts that
        begin with the same messages have the tokens before them in common. A message is left out
        if the template refuses the chat that ends with it, or shows it otherwise there.

    Raises:
        InvalidArgumentError: The tokenizer has no chat templates.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        raise InvalidArgumentError(
            f"tokenizer must have apply_chat_template, got {type(tokenizer).__name__}"
        )
    options = {name: x for name, x in template_options.items() if name not in _OURS}
    whole = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    tokens = _tokens(tokenizer, whole)
    options |= {"add_generation_prompt": False, "continue_final_message": False}
    ends, text_before = [0], 0
    for number, message in enumerate(messages, 1):
        try:
            text = tokenizer.apply_chat_template(messages[:number], tokenize=False, **options)
        except Exception:  # templates raise what they like
            continue
        shared = _common(text, whole)
        # A template may close the chat after its last message, which must be there all the same.
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        if shared < len(text) and (not said or said not in text[text_before:shared]):
            continue
        end = _common(_tokens(tokenizer, text), tokens)
        if end > ends[-1]:
            ends.append(end)
            text_before = shared
    return ends[1:]


def read_checkpoints(checkpoints: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Returns what a caller names as checkpoints, a list for each row.

    Args:
        checkpoints: Ints for all rows, or a collection of ints for each row.
        lengths: Tokens of each row without its padding.

    Raises:
        InvalidArgumentError: It is neither, there are not as many as rows, or one is not within its
            prompt.
    """
    named = as_items("checkpoints", checkpoints, "ints, or a list of ints for each row")
    if any(_is_collection(item) for item in named):
        if len(named) != len(lengths):
            raise InvalidArgumentError(
                f"checkpoints must be ints for all rows, or a list for each of the {len(lengths)} "
                f"rows, got {len(named)} items, lists among them"
            )
        by_row = [as_ints(f"the checkpoints of row {i}", row) for i, row in enumerate(named)]
    else:
        by_row = [as_ints("checkpoints", named)] * len(lengths)
    for row, (positions, length) in enumerate(zip(by_row, lengths, strict=True)):
        for position in positions:
            if not 1 <= position <= length:
                raise InvalidArgumentError(
                    f"checkpoints must be in [1, {length}], numbers of tokens of the prompt"
                    f"{f' in row {row}' if len(lengths) > 1 else ''}, got {position}"
                )
    return by_row


def _is_collection(item: Any) -> bool:
    return isinstance(item, Collection) and getattr(item, "ndim", 1) > 0  # no tensor of one number


def _tokens(tokenizer: Any, text: str) -> Sequence[int]:
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many items two sequences have in common from the first on."""
    if one == other[: len(one)]:
        return len(one)
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
