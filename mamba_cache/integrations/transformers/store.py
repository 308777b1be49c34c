"""The cached prefixes of one model: their index, their tensors, and the records of sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from mamba_cache._torch import outside_inference_mode
from mamba_cache.cache import (
    BlockHashChain,
    BlockHasher,
    BlockHashes,
    CheckpointPlacement,
    ExtraKey,
    SlotEvictionPolicy,
    SlotPool,
)
from mamba_cache.cache.placement import PlacementFacts, placed_positions
from mamba_cache.cache.sequence import (
    CachedSequence,
    Checkpoint,
    PrefixMatch,
    Request,
    TokenArray,
)
from mamba_cache.config import CacheConfig
from mamba_cache.context import PrefixContent
from mamba_cache.context.memory import CacheMemory
from mamba_cache.context.tiering import NoTiers
from mamba_cache.errors import BlockCapacityError, InvariantError
from mamba_cache.events import Admitted, Listeners, Stored
from mamba_cache.integrations.transformers.layers import PrefixLayout, PrefixTensors, SequenceMemory
from mamba_cache.slots import MambaSlotAllocator

if TYPE_CHECKING:
    from mamba_cache.integrations.transformers.tiers import PrefixTiers

__all__ = ["PrefixStore", "PromptEnds", "SequenceRecord"]


class PromptEnds:
    """A placement that adds the last block boundaries of the prompt to another placement's.

    A longer prompt resumes at the prompt's end; the same prompt resumes ``min_tokens`` before it.
    """

    def __init__(self, placement: CheckpointPlacement, min_tokens: int) -> None:
        self._placement = placement
        self._min_tokens = min_tokens
        self.is_off = False

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the positions; none while the placement is off."""
        if self.is_off:
            return ()
        ends = facts.prompt_tokens, facts.prompt_tokens - self._min_tokens
        return {*placed_positions(self._placement, facts), *ends}


class _NoTiers(NoTiers):
    """Null object for a store without tiers."""

    num_offers = 0
    bring = end_forward = let_go = spill = take_weights = NoTiers._no_op

    def key_for(self, key: ExtraKey) -> ExtraKey:
        return key


class PrefixStore(CacheMemory):
    """The memory of cached prefixes: index, tensors of blocks and slots, pins and counters."""

    def __init__(
        self,
        layout: PrefixLayout,
        config: CacheConfig,
        *,
        slot_policy: SlotEvictionPolicy,
        listeners: Listeners,
        placement: CheckpointPlacement,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.placement = PromptEnds(placement, config.min_computed_tokens)
        super().__init__(
            config,
            layout.state_spec,
            None,
            device=layout.device,
            policy=slot_policy,
            placement=self.placement,
            clock=clock,
            is_owners=True,
        )
        self.layout = layout
        self.hasher = BlockHasher(config.hash_algorithm, config.hash_secret)
        self.kv_blocks.listeners = listeners
        self.tensors = PrefixTensors(layout, self.allocator.states, self.kv_blocks.pool_size)
        # By adapter key: the dtypes in the model's cache, if they differ from the layout's, as
        # under autocast.
        self.live_dtypes: dict[ExtraKey, list[torch.dtype]] = {}
        self._events_lora_id: ExtraKey = None
        self.tiers: PrefixTiers | _NoTiers = _NoTiers()

    def add_tiers(self, tiers: PrefixTiers) -> None:
        """Keep prefixes in these tiers as well, until the store is closed."""
        self.tiers = self.index.tiers = tiers
        # No policy refuses a state: tiers keep a copy of each state that was saved once.
        self.index.refuses_states = False

    @outside_inference_mode
    def share(self) -> CacheMemory:
        """Return this memory for a context that shares its prefixes."""
        self.kv_cache = self.tensors.kv_cache()
        return self

    @property
    def is_empty(self) -> bool:
        """Whether no prefix is cached and there are no tiers that could have one."""
        is_used = self.kv_blocks.num_cached_blocks or self.kv_blocks.num_used_blocks
        return self.tiers.host is None and not is_used

    def let_go(self) -> None:
        """Release the blocks and slots of records that were not closed, between calls."""
        counts = np.asarray(self.kv_blocks.block_ref_counts) - self.pins.references
        held = np.flatnonzero(counts > 0)
        self.kv_blocks.release_memory_blocks(np.repeat(held, counts[held]).tolist())
        self.slots.cancel_reserved(list(self.slots.reserved))
        self.tiers.let_go()

    def read(self, slot: int, blocks: list[int], num_tokens: int) -> PrefixContent:
        """Return the saved states, keys and values of a prefix, by the model's layers."""
        return self.content(self.tensors.load(slot, blocks, num_tokens))

    def content(self, memory: SequenceMemory) -> PrefixContent:
        """Return the tensors of a one-row ``memory``: states by name, keys and values in a list."""
        states: dict[str, list[torch.Tensor]] = {}
        held = [*memory.states, *memory.windows]
        for (name, _), tensor in zip(self.layout.state_places, held, strict=True):
            states.setdefault(name, []).append(tensor[0])
        return PrefixContent(states, [tokens[0].transpose(0, 1) for tokens in memory.tokens])

    def request(self, tokens: Any, key: ExtraKey, request_id: Hashable, **fields: Any) -> Request:
        """Return a request for a prompt under the model's key; ``fields`` are more fields."""
        lora_id = self.tiers.key_for(key)
        return Request(
            request_id=request_id,
            prompt_tokens=tokens,
            lora_id=cast("str | int | None", lora_id),
            tells_tokens=self._sends_tokens(lora_id),
            **fields,
        )

    def open(
        self, tokens: TokenArray, key: ExtraKey, *, min_computed: int, **fields: Any
    ) -> SequenceRecord:
        """Match a prompt and hold the matched blocks until the record is closed.

        At least ``min_computed`` of its tokens are left to compute. ``key`` stands for the model's
        settings. ``fields`` are more fields of ``Request``.
        """
        self.pins.expire()
        size = self.layout.block_size_tokens
        request = self.request(tokens, key, f"generate-{self.counters['requests']}", **fields)
        salt, lora_id = request.cache_salt, request.lora_id
        chain = BlockHashChain(size, hasher=self.hasher, cache_salt=salt, lora_id=lora_id)
        chain.append(tokens)
        requested = frozenset([p // size * size for p in request.checkpoint_positions])
        sequence = CachedSequence(request, tokens, chain, requested)
        self.tiers.bring(sequence, min_computed)
        match = self.index.match(sequence.chain.digests, len(tokens), min_computed)
        sequence.num_shared_blocks = sequence.num_published = match.kv_matched_blocks
        sequence.num_initial = len(tokens)
        return SequenceRecord(self, sequence, match, match.block_ids)

    def _sends_tokens(self, lora_id: ExtraKey) -> bool:
        """Return whether listeners get the tokens of sequences with a key."""
        if not self.kv_blocks.listeners.wants(Stored):
            return False
        # Listeners identify prefixes by tokens alone, so they get those of the first key only.
        self._events_lora_id = lora_id if self._events_lora_id is None else self._events_lora_id
        return self._events_lora_id == lora_id

    def tell_admitted(self, request: Request, hashes: BlockHashes) -> None:
        """Send listeners the event that a prompt was admitted."""
        listeners = self.kv_blocks.listeners
        if listeners.wants(Admitted):
            event = Admitted(
                None,
                len(request.prompt_tokens),
                hashes.digests,
                self.layout.block_size_tokens,
                will_continue=request.will_continue,
                cache_salt=request.cache_salt,
            )
            listeners.put(event)
            listeners.tell()

    def reset(self) -> None:
        """Remove every prefix and set every count to zero."""
        self.clear()
        self.live_dtypes.clear()
        self._events_lora_id = None
        self.tiers.reset()

    def close(self) -> None:
        """Free the memory; the store cannot be used afterwards."""
        tiers, self.tiers = self.tiers, _NoTiers()
        tiers.close()
        self.reset()
        self.tensors.clear()
        if isinstance(self.slots, MambaSlotAllocator):  # its views would keep the memory alive
            self.use(SlotPool(self.slots.max_slots, self.kv_blocks))
            self.kv_cache = None

    def check_invariants(self) -> None:
        """Check between calls that blocks and slots are all accounted for."""
        self.kv_blocks.check_invariants()
        self.slots.check_invariants()
        self.pins.check_invariants()
        self.slots.check_uses(self.slots.reserved, self.pins.leases)
        references = np.asarray(self.kv_blocks.block_ref_counts) - self.pins.references
        held = (np.count_nonzero(references), self.slots.num_reserved_slots)
        if any(held):
            raise InvariantError(f"{held[0]} blocks and {held[1]} slots are held without an owner")


class SequenceRecord:
    """A sequence that is computed outside a batch, and the blocks that it holds."""

    def __init__(
        self,
        store: PrefixStore,
        sequence: CachedSequence,
        match: PrefixMatch,
        blocks: Sequence[int],
        positions: Collection[int] = (),
    ) -> None:
        self._store = store
        self._size = store.layout.block_size_tokens
        self.sequence = sequence
        self.match = match
        self.positions = positions  # block boundaries at which states are to be saved
        self._blocks = [*blocks]  # held, in the order of the sequence
        store.kv_blocks.retain_memory_blocks(self._blocks)
        self._reserved: list[Checkpoint] = []

    @property
    def restored_blocks(self) -> list[int]:
        """The matched blocks up to the deepest saved state; empty without one."""
        return [*self.match.block_ids[: self.match.state_matched_blocks]]

    def fork(self, tokens: Sequence[int], position: int) -> SequenceRecord:
        """Return a new record of this sequence plus tokens, with a checkpoint at a position."""
        own = self.sequence
        sequence = own.fork(own.request.request_id, own.chain, tokens)
        sequence.chain.append(tokens)
        blocks = self._blocks[: own.num_published]
        return SequenceRecord(self._store, sequence, self.match, blocks, (position,))

    def load(self) -> SequenceMemory | None:
        """Return a copy of the matched prefix, or None if no state was matched."""
        match, blocks = self.match, self.restored_blocks
        if not blocks:
            return None
        slot = self._store.slots.slot_of(blocks[-1])
        self._store.slots.policy.on_consumed([slot])
        saved = self._store.tensors.load(slot, blocks, match.skip_tokens)
        dtypes = self._store.live_dtypes.get(self.sequence.request.lora_id)
        return saved if dtypes is None else saved.to_dtypes(dtypes)

    def reserve_states(self, positions: Collection[int]) -> dict[int, int]:
        """Reserve slots for states at positions, which are block boundaries; return them.

        Positions that have a state already, and those for which there is no room, are left out.
        """
        self._allocate_up_to(max(positions) // self._size)
        where = [p for p in sorted(positions) if p // self._size <= len(self._blocks)]
        # Another sequence may have published the same block.
        digests, find_block = self.sequence.chain.digests, self._store.kv_blocks.find_block
        ends = [p // self._size - 1 for p in where]
        known = [find_block(digests[end]) for end in ends]
        blocks = [self._blocks[i] if k is None else k for i, k in zip(ends, known, strict=True)]
        reserved = self._store.index.reserve([(self.sequence, where, blocks)])
        kept = [checkpoint for checkpoint in reserved if checkpoint is not None]
        self._reserved += kept
        return {position: slot for position, slot, _ in kept}

    def publish(self, memory: SequenceMemory, captured: Collection[int] = ()) -> None:
        """Copy the new tokens of a sequence into blocks, and its state into a slot; publish both.

        Without room for all blocks, the first ones are kept. At positions in ``captured`` a forward
        has written states into the reserved slots; other reserved slots are freed. The state in
        ``memory`` is the one after its last token. It is kept if that position is one of
        ``positions`` and all blocks before it are kept.
        """
        try:
            if self._fits_dtypes(memory):
                self._publish(memory, {*captured})
        except torch.OutOfMemoryError:  # caching is optional: the answer is returned without it
            self._store.slots.skipped_checkpoints_total += 1
        if self._reserved:
            self._cancel_reserved()

    def close(self) -> None:
        """Release all blocks; published ones stay findable until they are evicted."""
        if self._reserved:
            self._cancel_reserved()
        held, self._blocks = self._blocks, []
        self._store.kv_blocks.release_memory_blocks(held)
        self._store.tiers.spill()

    def _publish(self, memory: SequenceMemory, positions: set[int]) -> None:
        sequence, tensors, end = self.sequence, self._store.tensors, memory.num_tokens
        first, last = sequence.num_published, end // self._size
        self._allocate_up_to(last)
        blocks = self._blocks[first:last]
        if blocks:
            stop = first + len(blocks)
            tensors.save_tokens(blocks, memory, first * self._size, stop * self._size)
        if end in self.positions and not end % self._size:
            for position, slot in self.reserve_states([end]).items():
                tensors.save_state(slot, memory)
                positions.add(position)
        written = [c for c in self._reserved if c.position in positions]
        self._reserved = [each for each in self._reserved if each not in written]
        self._store.index.publish([(sequence, blocks, written)])

    def _cancel_reserved(self) -> None:
        # Cleared first, so that no reservation is cancelled twice if the cancel raises.
        reserved, self._reserved = self._reserved, []
        self._store.index.cancel(reserved)

    def _fits_dtypes(self, memory: SequenceMemory) -> bool:
        """Return whether the store's dtypes hold ``memory`` exactly; record its dtypes."""
        kept, given = self._store.layout.dtypes, memory.dtypes()
        if given == kept:
            return True
        if any(torch.promote_types(*pair) != pair[0] for pair in zip(kept, given, strict=True)):
            return False
        return self._store.live_dtypes.setdefault(self.sequence.request.lora_id, given) == given

    def _allocate_up_to(self, number: int) -> None:
        """Allocate blocks until the sequence has ``number``, or as many as are available."""
        missing, kv_blocks = number - len(self._blocks), self._store.kv_blocks
        if missing <= 0:
            return
        try:
            self._blocks += kv_blocks.allocate_memory_blocks(missing)
        except BlockCapacityError as error:
            self._blocks += kv_blocks.allocate_memory_blocks(min(missing, error.available))
