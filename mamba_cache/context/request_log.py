"""A log line for each request: what was matched and skipped, from which tier, and why not more."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mamba_cache.blocks import BlockHashes, KVBlockAllocator
from mamba_cache.context.matching import MissReason, PrefixMatch
from mamba_cache.context.requests import ActiveRequest, Admission, TokenArray
from mamba_cache.events import Removed
from mamba_cache.slots import SlotPool

__all__ = ["MOST_REMEMBERED", "RequestLog"]

MOST_REMEMBERED = 65536
"""Blocks, states and first blocks of which is remembered what became of them."""

_MOST_KEYS = 16
"""Salts, adapters and multimodal keys that are remembered of prompts that begin alike."""

_KEY_REASONS = ("salt_differs", "adapter_differs", "multimodal_keys_differ")

_log = logging.getLogger("mamba_cache.requests")

_Value = TypeVar("_Value")


class RequestLog:
    """Logs each request that begins to run, in the logger ``mamba_cache.requests`` at level INFO.

    To say why a request found nothing, it remembers what was removed and under which keys prompts
    began: hashes of them, no tokens, salts or keys.

    Args:
        kv_blocks: Which tells what is removed.
        slots: Likewise.
        block_size_tokens: Tokens of a block.
    """

    def __init__(
        self, kv_blocks: KVBlockAllocator, slots: SlotPool, *, block_size_tokens: int
    ) -> None:
        self._size = block_size_tokens
        self._why = "evicted"
        # By hash id: why a block, or the state at its end, is gone.
        self._blocks: OrderedDict[int, str] = OrderedDict()
        self._states: OrderedDict[int, str] = OrderedDict()
        # By the tokens of a first block: the keys under which prompts began with it.
        self._begun: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        kv_blocks.listeners.add(self._removed, Removed)

    def admitted(
        self, active: ActiveRequest, admission: Admission, tier: str | None = None
    ) -> None:
        """Log a request that began to run.

        Args:
            active: The request.
            admission: What was found of it.
            tier: Where that lay, if the admission does not know.
        """
        request = active.request
        tier = tier or ("host" if admission.loads_state else "gpu")
        refused, active.was_refused = active.was_refused, False
        keys = request.cache_salt, request.lora_id, request.multimodal_keys
        first = active.tokens(0, min(self._size, active.num_tokens))
        reason = "entry_refused" if refused and admission.miss_reason is not None else None
        self.log(active.request_id, admission, tier, first, active.hashes, keys=keys, reason=reason)

    def log(
        self,
        request_id: Hashable,
        match: PrefixMatch,
        tier: str,
        first_tokens: TokenArray,
        hashes: BlockHashes,
        *,
        keys: tuple[Hashable, Hashable, Hashable],
        reason: str | None = None,
    ) -> None:
        """Log what of a prompt was found.

        Args:
            request_id: Its name.
            match: What was found.
            tier: Where it lay.
            first_tokens: Its first block, or all of it.
            hashes: Of its blocks.
            keys: Its salt, adapter and multimodal keys.
            reason: Why it skips nothing, where the caller knows; it counts as a miss then.
        """
        hashed = tuple(hash(key) for key in keys)
        content = hash(first_tokens.tobytes())
        skipped = 0 if reason is not None else match.skip_tokens
        if match.miss_reason is None and reason is None:
            reason = "-"
        reason = reason or self._explain(match, hashes, content, hashed)
        if hashed not in (known := self._begun.pop(content, [])):
            known = [*known, hashed][-_MOST_KEYS:]
        _remember(self._begun, content, known)
        _log.info(
            "request=%r prompt_tokens=%d matched_tokens=%d skipped_tokens=%d tier=%s reason=%s",
            request_id,
            match.prompt_tokens,
            max(match.kv_matched_blocks * self._size, match.skip_tokens),
            skipped,
            tier if skipped else "-",
            reason,
        )

    @contextmanager
    def removing(self, why: str) -> Iterator[None]:
        """Remember for what is removed within that it was for this reason."""
        self._why = why
        try:
            yield
        finally:
            self._why = "evicted"

    def reset(self) -> None:
        """Forget everything."""
        for kept in (self._blocks, self._states, self._begun):
            kept.clear()

    def _explain(
        self, match: PrefixMatch, hashes: BlockHashes, content: int, keys: tuple[int, ...]
    ) -> str:
        """Say why a prompt skips nothing, as far as that is remembered."""
        reason = match.miss_reason
        assert reason is not None, "it is asked of misses"
        if reason is MissReason.NO_STATE:
            found = hashes[: match.kv_matched_blocks]
            gone = [why for each in found if (why := self._states.get(each)) is not None]
            return f"state_{gone[-1]}" if gone else str(reason.value)
        if reason is not MissReason.NO_KV_MATCH:
            return str(reason.value)
        if len(hashes) and (gone_block := self._blocks.get(hashes[0])) is not None:
            return gone_block
        known = self._begun.get(content, [])
        if not known:
            return "new_prefix"
        if keys in known:
            return "not_kept"
        differing = [
            [
                name
                for one, other, name in zip(keys, each, _KEY_REASONS, strict=True)
                if one != other
            ]
            for each in known
        ]
        return min(differing, key=len)[0]

    def _removed(self, event: Removed) -> None:
        kept = self._blocks if event.kind == "block" else self._states
        _remember_all(kept, event.hash_ids, self._why)


def _remember_all(kept: OrderedDict[int, str], hash_ids: Iterable[int], why: str) -> None:
    for hash_id in hash_ids:
        _remember(kept, hash_id, why)


def _remember(kept: OrderedDict[int, _Value], key: int, value: _Value) -> None:
    """Keep a value as the newest, and no more values than may be."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > MOST_REMEMBERED:
        kept.popitem(last=False)
