"""Checkpoints by callers and chat templates: ends of prefixes that other prompts will share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mamba_cache._checks import as_ints, as_items
from mamba_cache.errors import InvalidArgumentError

__all__ = ["chat_checkpoints", "message_ends", "read_checkpoints"]

_OURS = ("tokenize", "return_tensors", "return_dict")
"""Options of ``apply_chat_template`` that choose the kind of its result."""

_NEARBY = 64
"""Number of characters: more than in any token, except for runs of spaces and the like."""


def message_ends(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_options: Any
) -> list[int]:
    """Return the position in a chat's prompt at which each message ends.

    Args:
        tokenizer: A tokenizer of transformers with a chat template.
        messages: The chat, as for ``tokenizer.apply_chat_template``.
        template_options: Further arguments of ``tokenizer.apply_chat_template``, such as
            ``add_generation_prompt`` and ``tools``.

    Returns:
        Positions in tokens of the prompt, ascending, to be given as ``checkpoints``: prompts that
        begin with the same messages have the tokens before them in common. A message is left out
        if the template refuses a chat that ends with it, or renders it differently there.

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
        except Exception:  # a template may raise any exception
            continue
        shared = _common(text, whole)
        # Texts may differ after the last message, where a template may close the chat.
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        if shared < len(text) and (not said or said not in text[text_before:shared]):
            continue
        end = _common(_tokens(tokenizer, text), tokens)
        if end > ends[-1]:
            ends.append(end)
            text_before = shared
    return ends[1:]


def chat_checkpoints(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    /,
    **template_options: Any,
) -> list[int]:
    """Return the positions at which other prompts will diverge from a chat's prompt.

    The first is the start of the first user message: other chats share the system prompt and tools
    before it. The second is where the prompt of this chat's next turn will diverge, because the
    template renders the end of this prompt differently by then; if it does not, there is no second
    position. The template is rendered four times. Only the text before the first user message and
    the end of the prompt are tokenized, both short.

    Return positions in tokens of the prompt, ascending, at most two: a position that the template
    does not show is left out. ``token_ids`` is the prompt, as ``tokenizer.apply_chat_template``
    returned it with the ``template_options``.
    """
    options = {name: x for name, x in template_options.items() if name not in _OURS}
    found = set()
    for find in (_first_words, _next_parting):
        try:
            found.add(find(tokenizer, messages, token_ids, options))
        except Exception:  # noqa: PERF203 - a template may raise any exception
            continue
    return sorted(position for position in found if 0 < position < len(token_ids))


def _first_words(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    options: Mapping[str, Any],
) -> int:
    """Return the number of tokens before the first user message, 0 if it is not found."""
    roles = [message["role"] for message in messages]
    before = list(messages[: roles.index("user")])
    options = {**options, "add_generation_prompt": False}
    asked = [
        tokenizer.apply_chat_template(
            [*before, {"role": "user", "content": words}], tokenize=False, **options
        )
        for words in ("a", "b")
    ]
    stem = _tokens(tokenizer, asked[0][: _common(*asked)])
    return _common(stem, list(token_ids[: len(stem)]))


def _next_parting(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
    options: Mapping[str, Any],
) -> int:
    """Return how many tokens the next turn's prompt will share, 0 if it shares all of them."""
    now = tokenizer.apply_chat_template(
        messages, tokenize=False, **{**options, "add_generation_prompt": True}
    )
    answered = [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    then = tokenizer.apply_chat_template(
        answered, tokenize=False, **{**options, "add_generation_prompt": False}
    )
    shared = _common(now, then)
    if shared == len(now):
        return 0
    # Tokens may diverge before the text does, so both texts are tokenized around that place.
    start = max(shared - _NEARBY, 0)
    rest = list(_tokens(tokenizer, now[start:]))
    rest = rest[_common(rest, list(_tokens(tokenizer, then[start : shared + _NEARBY]))) :]
    position = len(token_ids) - len(rest)
    # If the prompt ends with other tokens, one of its tokens spans that place.
    return position if rest == list(token_ids[position:]) else position - 1


def read_checkpoints(checkpoints: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Return a caller's checkpoints, one list for each row; ``lengths`` are those of the rows."""
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
    return isinstance(item, Collection) and getattr(item, "ndim", 1) > 0  # not a 0-d tensor


def _tokens(tokenizer: Any, text: str) -> Sequence[int]:
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
