"""The prefixes that are cached: who has which block and slot, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from mamba_cache._guard import CallGuard
from mamba_cache.blocks import BlockHashChain, ExtraKey, KVBlockAllocator
from mamba_cache.context.invariants import check_states_of_blocks
from mamba_cache.context.matching import PrefixMatch, find_prefix
from mamba_cache.context.stats import CacheStats, StatsCounters, collect_stats
from mamba_cache.errors import BlockCapacityError, InvariantError
from mamba_cache.integrations.transformers.layers import SequenceMemory
from mamba_cache.integrations.transformers.tensors import PrefixLayout, PrefixTensors
from mamba_cache.slots import SlotEvictionPolicy
from mamba_cache.slots.control import SlotControl

__all__ = ["PrefixStore", "SequenceRecord"]


class PrefixStore:
    """Blocks and slots, their books and their tensors.

    Args:
        layout: What they are made of.
        num_blocks: KV blocks.
        num_slots: Slots.
        eviction: Which slots are given up first.

    Attributes:
        layout: As given.
        kv_blocks: The books of KV blocks.
        slots: The books of slots.
        tensors: What is in them.
        counters: What was done so far.
    """

    def __init__(
        self,
        layout: PrefixLayout,
        *,
        num_blocks: int,
        num_slots: int,
        eviction: SlotEvictionPolicy,
    ) -> None:
        self.layout = layout
        self.kv_blocks = KVBlockAllocator(num_blocks + 1)  # and the dummy block
        context = SimpleNamespace(kv_block_allocator=self.kv_blocks)
        self.slots = SlotControl(cast(Any, context), num_slots, policy=eviction)
        self.kv_blocks.on_blocks_deregistered = self.slots.on_kv_blocks_deregistered
        self.tensors = PrefixTensors(layout, num_slots=num_slots, num_blocks=num_blocks)
        self.counters = StatsCounters()

    def join(self, guard: CallGuard) -> None:
        """Becomes a part of what ``guard`` guards."""
        self.kv_blocks.join(guard)
        self.slots.join(guard)

    def let_go(self) -> None:
        """Gives back all that records hold, when the call that opened them is over."""
        counts = np.asarray(self.kv_blocks.block_ref_counts)
        held = np.flatnonzero(counts > 0)
        self.kv_blocks.release_memory_blocks(np.repeat(held, counts[held]).tolist())
        self.slots.cancel_reserved(list(self.slots.pool.reserved))

    def match(self, chain: BlockHashChain, *, min_computed_tokens: int) -> PrefixMatch:
        """Finds how much of a sequence is cached; nothing changes."""
        return find_prefix(
            chain.hashes,
            chain.num_tokens,
            self.kv_blocks,
            self.slots,
            block_size_tokens=self.layout.block_size_tokens,
            min_computed_tokens=min_computed_tokens,
        )

    def open(
        self, tokens: Sequence[int], *, cache_salt: ExtraKey, lora_id: ExtraKey, min_computed: int
    ) -> SequenceRecord:
        """Matches a prompt and holds what was found until the record is closed.

        Args:
            tokens: Token ids of the prompt.
            cache_salt: Sequences of different salts never match.
            lora_id: Likewise for adapters.
            min_computed: Tokens of the prompt that are left to compute in any case.

        Raises:
            InvalidArgumentError: What is given are no token ids, or no salt.
        """
        size = self.layout.block_size_tokens
        chain = BlockHashChain(size, cache_salt=cache_salt, lora_id=lora_id)
        chain.append(tokens)
        match = self.match(chain, min_computed_tokens=min_computed)
        return SequenceRecord(self, chain, match)

    def stats(self) -> CacheStats:
        """Returns what the cache did so far and what it holds now."""
        return collect_stats(self.counters, self.kv_blocks, self.slots, self.layout.bytes_per_slot)

    def reset(self) -> None:
        """Forgets every prefix and every count."""
        # Before the blocks, which tell the slots: books that contradict each other are not read.
        self.slots.reset()
        self.kv_blocks.reset()
        self.counters.reset()

    def check_invariants(self) -> None:
        """Checks the books, between calls.

        Raises:
            InvariantError: They contradict themselves, or something is still held.
        """
        self.kv_blocks.check_between_calls()
        self.slots.check_invariants()
        check_states_of_blocks(self.kv_blocks, self.slots)
        held = (self.kv_blocks.num_used_blocks, self.slots.num_reserved_slots)
        if any(held):
            raise InvariantError(f"{held[0]} blocks and {held[1]} slots are held by nobody")


class SequenceRecord:
    """One sequence that is being computed, and what of it is cached.

    Args:
        store: Where it is cached.
        chain: Its tokens so far, hashed.
        match: What of them was found.

    Attributes:
        match: As given.
        chain: As given; grows with the sequence.
        num_published: Blocks that are findable, from the sequence's start.
    """

    def __init__(self, store: PrefixStore, chain: BlockHashChain, match: PrefixMatch) -> None:
        self._store = store
        self.chain = chain
        self.match = match
        self._held = list(match.block_ids)
        store.kv_blocks.retain_memory_blocks(self._held)
        self.num_published = len(self._held)
        self._num_blocks_to_state = match.state_matched_blocks

    def fork(self) -> SequenceRecord:
        """Returns a record that goes on from here on its own."""
        other = SequenceRecord(self._store, self.chain.copy(), self.match)
        other.num_published = self.num_published
        other._num_blocks_to_state = self._num_blocks_to_state
        return other

    def load(self) -> SequenceMemory | None:
        """Returns the matched prefix, or None if nothing was matched."""
        blocks = self.match.block_ids[: self.match.state_matched_blocks]
        if not blocks:
            return None
        slot = self._store.slots.get_slot(blocks[-1])
        self._store.slots.note_consumed([slot])
        return self._store.tensors.load(slot, blocks)

    def publish(self, memory: SequenceMemory, num_tokens: int, *, has_state: bool) -> None:
        """Copies what is new into blocks and a slot, and makes it findable.

        If there is no room, what comes first is kept and the rest is passed over.

        Args:
            memory: Keys and values of at least ``num_tokens`` tokens of the sequence, one row.
            num_tokens: Tokens of it that count; of these only complete blocks.
            has_state: Its states are those after ``num_tokens`` tokens, a multiple of the block
                size, and are worth a slot.
        """
        last = num_tokens // self._store.layout.block_size_tokens
        self._publish_blocks(memory, last)
        if has_state and self.num_published >= last:
            self._publish_state(memory, last - 1)

    def close(self) -> None:
        """Lets go of all blocks; what was published stays findable until it is evicted."""
        held, self._held = self._held, []
        self._store.kv_blocks.release_memory_blocks(held)

    def _publish_blocks(self, memory: SequenceMemory, last: int) -> None:
        first = self.num_published
        blocks = self._take(last - first)
        if not blocks:
            return
        self._held += blocks
        size, kv_blocks = self._store.layout.block_size_tokens, self._store.kv_blocks
        self._store.tensors.save_blocks(blocks, memory, first * size)
        hashes = self.chain.hashes
        holders = kv_blocks.register_kv_block_hashes(
            blocks,
            hashes[first : first + len(blocks)],
            parent_hash=hashes[first - 1] if first else None,
        )
        # A block whose hash id belongs to another content stays private, and nothing after it can
        # be found.
        self.num_published += holders.index(None) if None in holders else len(holders)

    def _publish_state(self, memory: SequenceMemory, index: int) -> None:
        hashes, slots = self.chain.hashes, self._store.slots
        block = self._store.kv_blocks.find_block(hashes[index], hashes.digests[index])
        if block is None:
            return
        [slot] = slots.reserve_slots([block])
        if slot is None:
            return
        try:
            self._store.tensors.save_state(slot, memory)
        except BaseException:
            slots.cancel_reserved([slot])
            raise
        blocks_saved = index + 1 - self._num_blocks_to_state
        saved_tokens = blocks_saved * self._store.layout.block_size_tokens
        slots.commit_reserved([slot], [block], [hashes[index]], saved_tokens=[saved_tokens])
        self._num_blocks_to_state = index + 1
        self._store.counters.saved_states += 1

    def _take(self, count: int) -> list[int]:
        """Takes up to ``count`` blocks, as many as there are."""
        if count <= 0:
            return []
        try:
            return self._store.kv_blocks.allocate_memory_blocks(count)
        except BlockCapacityError as error:
            return self._store.kv_blocks.allocate_memory_blocks(min(count, error.available))
