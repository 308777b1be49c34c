"""Requests of the server, as the code that answers one knows it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mamba_cache.integrations.transformers.checkpoints import chat_checkpoints

__all__ = ["SALT_HEADER", "ServedRequest", "current_request", "salt_of", "salt_values"]

SALT_HEADER = b"x-cache-salt"
"""The header that keeps requests apart, in lower case as ASGI has it."""

salt_values: ContextVar[tuple[str, ...]] = ContextVar("salt_values", default=())
"""What the headers of the HTTP request that is being answered say."""

current_request: ContextVar[ServedRequest | None] = ContextVar("current_request", default=None)
"""The request that is being answered, also in tasks that it begins, such as that of a stream."""


@dataclass(slots=True)
class ServedRequest:
    """One request of a model."""

    handler: Any = None  # the server's handler that answers it
    body: dict[str, Any] = field(default_factory=dict)  # what the client sent
    cache_salt: str | None = None  # requests of different salts share nothing
    messages: Sequence[Any] | None = None  # the chat as the template is given it, if it is one
    # Tokens of the prompt that were not computed; None: not known yet, or there is no cache.
    cached_tokens: int | None = None
    error: BaseException | None = None  # why it failed in a batch

    @property
    def will_continue(self) -> bool | None:
        """Whether a longer prompt is to follow, as far as the request tells: a hint, no promise.

        A chat that offers tools, or has had an answer already, goes on more often than a first
        question does. Of a completion nobody knows.
        """
        if self.messages is None:
            return None
        roles = {message.get("role") for message in self.messages if isinstance(message, dict)}
        return bool(self.body.get("tools")) or not roles.isdisjoint(("assistant", "tool"))

    def checkpoints(self, processor: Any, token_ids: Sequence[int]) -> list[int]:
        """Return where other prompts will part from this one.

        ``processor`` is a tokenizer, or what has one beside processors of images.
        """
        if self.messages is None:
            return []
        tokenizer = getattr(processor, "tokenizer", processor)
        try:
            options = {
                **getattr(self.handler, "chat_template_kwargs", {}),
                **(self.body.get("chat_template_kwargs") or {}),
            }
            tools = self.body.get("tools")
            normalize = getattr(self.handler, "_normalize_tools", None)
            options["tools"] = tools if normalize is None else normalize(tools)
            return chat_checkpoints(tokenizer, self.messages, token_ids, **options)
        except Exception:  # the server has read the request already, in its own way
            return []


def salt_of(headers: Sequence[str], user: Any) -> str | None:
    """Return the salt of a request: what its headers of that name and its field ``user`` say."""
    if user is None and not headers:
        return None
    return json.dumps([list(headers), user], sort_keys=True)
