"""What subscribers are told of: those of the held blocks that a prompt can use."""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple, TypeAlias

from mamba_cache.events import Removed, Stored

__all__ = ["Announced", "EventMode", "EventView", "ViewEvent", "Withdrawn"]

EventMode = Literal["resident", "reachable"]
"""Which KV blocks are announced: all, or those before a state that is held."""

_TOKEN_BYTES = 4


class Announced(NamedTuple):
    """Consecutive blocks of one sequence are held."""

    group: int
    hashes: list[int]
    parent: int | None
    token_ids: list[int]


class Withdrawn(NamedTuple):
    """Blocks are not held any more."""

    group: int | None  # None: nothing is held any more, in no group
    hashes: list[int]


ViewEvent: TypeAlias = "Announced | Withdrawn"
"""What subscribers are told."""


class _Block:
    """A KV block that is registered."""

    __slots__ = ("hash", "is_told", "parent", "parent_hash", "tokens", "uses")

    def __init__(self, parent: int | None, tokens: bytes | None, uses: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.uses = uses
        self.is_told = False
        self.hash = 0
        self.parent_hash: int | None = None

    def tell(self, parent: _Block | None) -> None:
        """Have subscribers know of it, as they do of its parent."""
        assert self.tokens, "nobody is told of a block without tokens"
        self.parent_hash = None if parent is None else parent.hash
        before = b"" if parent is None else parent.hash.to_bytes(8, "little")
        digest = hashlib.blake2b(before + self.tokens, digest_size=8).digest()
        self.hash = int.from_bytes(digest, "little")
        self.is_told = True


class EventView:
    """The blocks and states that are held, and which of them subscribers are told of.

    A block is told of if its parent is, so that every one that is told can be matched; in mode
    "reachable" only if it, or one after it, has a state. A state is told of if its block is. Each
    call costs as much as the blocks that it names, those that it makes known or takes back, and
    their children.
    """

    def __init__(self, block_size_tokens: int, mode: EventMode) -> None:
        self.block_size_tokens = block_size_tokens
        self._block_bytes = block_size_tokens * _TOKEN_BYTES
        self._uses_of_all = 1 if mode == "resident" else 0
        self._blocks: dict[int, _Block] = {}
        self._states: set[int] = set()
        # Also of parents that are not registered: one that is again finds its children here.
        self._children: dict[int | None, dict[int, None]] = {}
        self._events: list[ViewEvent] = []
        self.num_told_blocks = self.num_told_states = self.num_untold = 0

    def apply(self, event: Stored | Removed) -> None:
        """Take over what happened in a cache."""
        if event.kind == "state":
            change = self._store_state if isinstance(event, Stored) else self._remove_state
            for hash_id in event.hash_ids:
                change(hash_id)
        elif isinstance(event, Stored):
            self._store_blocks(event)
        elif event.is_reset:
            self._clear_blocks()
        else:
            for hash_id in event.hash_ids:
                self._remove_block(hash_id)

    def take_events(self) -> list[ViewEvent]:
        """Return what subscribers are to be told since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[Announced]:
        """Return all that subscribers are told of, parents before children."""
        events: list[ViewEvent] = []
        pending = list(self._children.get(None, ()))
        while pending:
            hash_id = pending.pop()
            block = self._blocks[hash_id]
            if block.is_told:
                self._add_stored(events, hash_id, block)
                pending += self._children.get(hash_id, ())
        return [event for event in events if isinstance(event, Announced)]

    def _store_blocks(self, event: Stored) -> None:
        size, parent = self._block_bytes, event.parent_hash
        data = None if event.tokens is None else event.tokens.tobytes()
        if data is None:
            self.num_untold += len(event.hash_ids)
        for index, hash_id in enumerate(event.hash_ids):
            tokens = data and data[index * size : (index + 1) * size]
            self._store_block(hash_id, parent, tokens)
            parent = hash_id

    def _store_block(self, hash_id: int, parent: int | None, tokens: bytes | None) -> None:
        self._remove_block(hash_id)
        uses = self._uses_of_all + (hash_id in self._states)
        for child in self._children.get(hash_id, ()):
            uses += self._blocks[child].uses > 0
        block = self._blocks[hash_id] = _Block(parent, tokens, uses)
        self._children.setdefault(parent, {})[hash_id] = None
        if uses:
            self._add_use(parent)
            self._tell_from(hash_id, block)

    def _remove_block(self, hash_id: int) -> None:
        block = self._blocks.get(hash_id)
        if block is None:
            return
        if block.is_told:
            self._take_back(hash_id)
        del self._blocks[hash_id]
        self.num_untold -= block.tokens is None
        siblings = self._children[block.parent]
        del siblings[hash_id]
        if not siblings:
            del self._children[block.parent]
        if block.uses:
            self._drop_use(block.parent)

    def _clear_blocks(self) -> None:
        self._blocks.clear()
        self._children.clear()
        self.num_told_blocks = self.num_told_states = self.num_untold = 0
        self._events = [Withdrawn(None, [])]  # whatever came before is over as well

    def _store_state(self, hash_id: int) -> None:
        if hash_id in self._states:
            return
        self._states.add(hash_id)
        block = self._blocks.get(hash_id)
        if block is None:
            return
        if block.is_told:
            self._events.append(_stored_state(block))
            self.num_told_states += 1
        block.uses += 1
        if block.uses == 1:
            self._add_use(block.parent)
            self._tell_from(hash_id, block)

    def _remove_state(self, hash_id: int) -> None:
        if hash_id not in self._states:
            return
        block = self._blocks.get(hash_id)
        if block is not None and block.is_told:
            self._add_removed(1, block)
            self.num_told_states -= 1
        self._states.discard(hash_id)
        if block is not None:
            self._drop_use(hash_id)

    def _add_use(self, hash_id: int | None) -> None:
        """Count one more use of a block; the first makes it known, with those before it."""
        top = None
        while hash_id is not None and (block := self._blocks.get(hash_id)) is not None:
            block.uses += 1
            if block.uses > 1:
                break
            top = hash_id, block
            hash_id = block.parent
        if top is not None:
            self._tell_from(*top)

    def _drop_use(self, hash_id: int | None) -> None:
        """Count one use of a block less; with the last it is taken back, and those before it."""
        while hash_id is not None and (block := self._blocks.get(hash_id)) is not None:
            block.uses -= 1
            if block.uses:
                break
            if block.is_told:
                block.is_told = False
                self._add_removed(0, block)
                self.num_told_blocks -= 1
            hash_id = block.parent

    def _tell_from(self, hash_id: int, block: _Block) -> None:
        """Tell of a block, if its parent is told, and of all after it that are worth it."""
        parent = None
        if block.parent is not None:
            parent = self._blocks.get(block.parent)
            if parent is None or not parent.is_told:
                return
        pending = [(hash_id, block, parent)]
        while pending:
            hash_id, block, parent = pending.pop()
            if block.is_told or not block.uses or not block.tokens:
                continue
            block.tell(parent)
            self._add_stored(self._events, hash_id, block)
            self.num_told_blocks += 1
            self.num_told_states += hash_id in self._states
            children = self._children.get(hash_id, ())
            pending += [(child, self._blocks[child], block) for child in children]

    def _take_back(self, hash_id: int) -> None:
        """Take back a block and all after it."""
        order, pending = [], [hash_id]
        while pending:
            hash_id = pending.pop()
            block = self._blocks[hash_id]
            if block.is_told:
                block.is_told = False
                order.append((hash_id, block))
                pending += self._children.get(hash_id, ())
        for hash_id, block in reversed(order):
            if hash_id in self._states:
                self._add_removed(1, block)
                self.num_told_states -= 1
            self._add_removed(0, block)
        self.num_told_blocks -= len(order)

    def _add_stored(self, events: list[ViewEvent], hash_id: int, block: _Block) -> None:
        """Add to ``events`` that a block is held, and its state if it has one."""
        last = events[-1] if events else None
        if isinstance(last, Announced) and last.group == 0 and last.hashes[-1] == block.parent_hash:
            last.hashes.append(block.hash)
            last.token_ids.extend(_token_ids(block))
        else:
            events.append(Announced(0, [block.hash], block.parent_hash, _token_ids(block)))
        if hash_id in self._states:
            events.append(_stored_state(block))

    def _add_removed(self, group: int, block: _Block) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Withdrawn) and last.group == group:
            last.hashes.append(block.hash)
        else:
            self._events.append(Withdrawn(group, [block.hash]))


def _stored_state(block: _Block) -> Announced:
    return Announced(1, [block.hash], block.parent_hash, _token_ids(block))


def _token_ids(block: _Block) -> list[int]:
    assert block.tokens, "nobody is told of a block without tokens"
    return memoryview(block.tokens).cast("i").tolist()
