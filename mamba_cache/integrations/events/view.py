"""The view of subscribers: announced blocks and states, and the events that change them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mamba_cache.events import Removed, Stored

__all__ = ["CLEARED", "EventMode", "EventView", "KVEvent", "removed_event", "stored_event"]

EventMode = Literal["resident", "reachable"]
"""Which KV blocks are announced: all, or those up to a held state."""

_ExtraKeys: TypeAlias = "tuple[Any, ...] | None"

KVEvent: TypeAlias = "dict[str, Any]"
"""An event as vLLM's classes encode it."""

CLEARED: KVEvent = {"type": "AllBlocksCleared"}
"""All blocks and states of all groups are removed."""

_GROUP_KINDS = ("full_attention", "mamba")
"""Kinds of the two groups by ``group_idx``: KV blocks, then states."""

# Routers know GPU, CPU and STORAGE. One router takes other names as GPU, another ignores them.
_MEDIUM = "GPU"
_TOKEN_BYTES = 4


def stored_event(
    group: int,
    hashes: Sequence[int],
    parent: int | None,
    token_ids: list[int],
    extra_keys: list[_ExtraKeys] | None = None,
) -> KVEvent:
    """Return the event for consecutive stored blocks, each the parent of the next."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": len(token_ids) // len(hashes),
        "lora_id": None,
        "medium": _MEDIUM,
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": _GROUP_KINDS[group],
        "extra_keys": extra_keys,
    }


def removed_event(group: int, hashes: Sequence[int]) -> KVEvent:
    """Return the event for removed blocks."""
    return {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": _MEDIUM,
        "group_idx": group,
    }


@dataclass(slots=True, eq=False)
class _Block:
    """A registered KV block."""

    parent: _Block | None
    tokens: bytes | None
    extra_keys: _ExtraKeys
    uses: int = 0  # its state, used children, and in mode "resident" itself
    has_state: bool = False
    is_announced: bool = False
    hash: int = 0
    parent_hash: int | None = None

    def announce(self) -> None:
        """Mark the block announced, and compute its hash; the parent is announced already."""
        assert self.tokens, "a block without tokens is not announced"
        self.parent_hash = None if self.parent is None else self.parent.hash
        before = b"" if self.parent_hash is None else self.parent_hash.to_bytes(8, "little")
        after = b"" if self.extra_keys is None else repr(self.extra_keys).encode()
        digest = hashlib.blake2b(before + self.tokens + after, digest_size=8).digest()
        self.hash = int.from_bytes(digest, "little")
        self.is_announced = True


class EventView:
    """The held blocks and states, with a mark on those announced to subscribers.

    A block is announced only if its parent is, so that every announced block can be matched. In
    mode "reachable" the block or a later one must have a state. A state is announced if its block
    is. Blocks are registered after their parents and before their states, and removed with their
    parents and after their states. The cost of a call is proportional to the blocks that it names,
    announces or withdraws.
    """

    def __init__(self, block_size_tokens: int, mode: EventMode) -> None:
        self._block_bytes = block_size_tokens * _TOKEN_BYTES
        self._is_resident = mode == "resident"
        self._blocks: dict[bytes, _Block] = {}  # parents before children
        self._events: list[KVEvent] = []
        self.num_told_blocks = self.num_told_states = self.num_untold = 0

    def apply(self, event: Stored | Removed) -> None:
        """Apply an event of the cache."""
        if event.kind == "state":
            change = self._store_state if isinstance(event, Stored) else self._remove_state
            for digest in event.digests:
                change(digest)
        elif isinstance(event, Stored):
            self._store_blocks(event)
        elif event.is_reset:
            self._blocks.clear()
            self.num_told_blocks = self.num_told_states = self.num_untold = 0
            self._events = [CLEARED]  # replaces all earlier events
        else:
            for digest in event.digests:
                self._remove_block(digest)

    def take_events(self) -> list[KVEvent]:
        """Return the events for subscribers since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[KVEvent]:
        """Return events for all announced blocks and states, parents before children."""
        events: list[KVEvent] = []
        for block in self._blocks.values():
            if block.is_announced:
                self._add_stored(events, block)
        return events

    def _store_blocks(self, event: Stored) -> None:
        size, parent = self._block_bytes, self._blocks.get(event.parent_digest or b"")
        data = None if event.tokens is None else event.tokens.tobytes()
        for index, digest in enumerate(event.digests):
            tokens = data and data[index * size : (index + 1) * size]
            extra_keys = event.extra_keys and event.extra_keys[index]
            self.num_untold += not tokens
            parent = self._blocks[digest] = _Block(parent, tokens, extra_keys)
            if self._is_resident:
                self._add_use(parent)

    def _remove_block(self, digest: bytes) -> None:
        block = self._blocks.pop(digest, None)
        if block is not None:
            self.num_untold -= not block.tokens
            self._drop_use(block)

    def _store_state(self, digest: bytes) -> None:
        block = self._blocks.get(digest)
        if block is not None and not block.has_state:
            block.has_state = True
            if block.is_announced:
                self._events.append(self._stored(1, block))
                self.num_told_states += 1
            self._add_use(block)

    def _remove_state(self, digest: bytes) -> None:
        block = self._blocks.get(digest)
        if block is not None and block.has_state:
            block.has_state = False
            if block.is_announced:
                self._add_removed(1, block)
                self.num_told_states -= 1
            self._drop_use(block)

    def _add_use(self, block: _Block) -> None:
        """Count a use of a block; the first use announces the block and all blocks before it."""
        path: list[_Block] = []
        above: _Block | None = block
        while above is not None:
            above.uses += 1
            if above.uses > 1:
                break
            path.append(above)
            above = above.parent
        for below in reversed(path):
            if not below.tokens or not (below.parent is None or below.parent.is_announced):
                return
            below.announce()
            self.num_told_blocks += 1
            self.num_told_states += below.has_state
            self._add_stored(self._events, below)

    def _drop_use(self, block: _Block | None) -> None:
        """Drop a use of a block; the last one withdraws the block and unused ones before it."""
        while block is not None and block.uses:
            block.uses -= 1
            if block.uses:
                break
            if block.is_announced:
                block.is_announced = False
                self._add_removed(0, block)
                self.num_told_blocks -= 1
            block = block.parent

    def _add_stored(self, events: list[KVEvent], block: _Block) -> None:
        """Add a block to ``events``, and its state if the block has one."""
        event, last = self._stored(0, block), events[-1] if events else CLEARED
        follows = last["type"] == "BlockStored" and last["block_hashes"][-1] == block.parent_hash
        if follows and last["group_idx"] == 0:
            for name in ("block_hashes", "token_ids", "extra_keys"):
                last[name] += event[name]
        else:
            events.append(event)
        if block.has_state:
            events.append(self._stored(1, block))

    def _add_removed(self, group: int, block: _Block) -> None:
        last = self._events[-1] if self._events else CLEARED
        if last["type"] == "BlockRemoved" and last["group_idx"] == group:
            last["block_hashes"].append(block.hash)
        else:
            self._events.append(removed_event(group, [block.hash]))

    def _stored(self, group: int, block: _Block) -> KVEvent:
        tokens = memoryview(block.tokens or b"").cast("i").tolist()
        return stored_event(group, [block.hash], block.parent_hash, tokens, [block.extra_keys])
