"""Checkpoints: which states a step saves, and how they become findable when it is committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from mamba_cache.blocks import BlockHashes, KVBlockAllocator
from mamba_cache.config import CacheConfig
from mamba_cache.context.requests import ActiveRequest, Checkpoint, Chunk, RequestStatus
from mamba_cache.context.tiering import Tiering
from mamba_cache.errors import InvariantError
from mamba_cache.events import Stored
from mamba_cache.slots import (
    CheckpointPlacement,
    MambaSlotAllocator,
    PlacementFacts,
    PromptFacts,
    SlotLease,
    StateProposal,
)
from mamba_cache.slots.placement import placed_positions

__all__ = ["Checkpoints"]


class Checkpoints:
    """The states that steps save: chosen, reserved, made findable.

    A state is saved at block boundaries only, and those lie on the SSM chunk grid because the
    settings say so.
    """

    def __init__(
        self,
        config: CacheConfig,
        placement: CheckpointPlacement,
        kv_blocks: KVBlockAllocator,
        slots: MambaSlotAllocator,
        counters: Counter[str],
        *,
        tiering: Tiering | None = None,
        refuses: bool = True,
    ) -> None:
        self._tiering = tiering
        self._refuses = refuses
        self._placement = placement
        self._kv_blocks = kv_blocks
        self._slots = slots
        self._counters = counters
        self._block_size = config.block_size_tokens
        self._is_on = config.enable_prefix_caching
        self._min_computed_tokens = config.min_computed_tokens
        self.reuses_answers = config.reuse_answers
        self._save_decode_states = config.save_decode_states
        self._max_inside = self._room = config.checkpoints_per_step
        # States that hits have used, by slot, so that there are never more than slots.
        self._consumed: dict[int, SlotLease] = {}

    def plan(self, active: ActiveRequest, chunk: Chunk, hashes: BlockHashes | None = None) -> None:
        """Plan the checkpoints of a chunk."""
        if not self._is_on:
            return
        end = chunk.end
        positions = self._positions(active, chunk.start, end)
        # After the placement, which may be an embedder's and raise: a policy cannot forget again.
        if hashes is not None:
            self._tell_policies(active, hashes)
        if not positions:
            return
        without_room = max(0, len(positions) - (positions[-1] == end) - self._room)
        self._slots.skipped_checkpoints_total += without_room
        # The later ones save more, so they are kept when the buffers are short.
        kept = self._reserve(active, positions[without_room:], self._propose)
        if kept and kept[-1].position == end:
            chunk.boundary = kept.pop()
        self._room -= len(kept)
        chunk.inside = tuple(kept)

    def reserve_for_load(self, active: ActiveRequest, position: int) -> Checkpoint:
        """Reserve a slot for a state that is loaded; one can be had."""
        assert active.prompt_seen is None, "the policy hears of a prompt when its chunk is planned"
        [kept] = self._reserve(active, [position], self._propose)
        return kept._replace(is_loaded=True)

    def saves_while_decoding(self, active: ActiveRequest) -> bool:
        """Say whether states of a request may be saved while it decodes."""
        wants = self._save_decode_states or bool(active.checkpoint_positions)
        return self._is_on and self.reuses_answers and wants

    def plan_decode(self, active: ActiveRequest) -> None:
        """Plan the checkpoint of a decoding request that may end a block in the next step."""
        # Two steps are shorter than a block: there is one boundary at most.
        position = (active.num_computed // self._block_size + 1) * self._block_size
        if not self._save_decode_states and not active.wants_state_at(position):
            return
        if active.checkpoint is None:
            kept = self._reserve(active, [position], self._propose_unfinished)
            active.checkpoint = kept[0] if kept else None
        # Else the step before may get there, or this one: one slot does for both.

    def cancel_decode(self, active: ActiveRequest) -> None:
        """Give back the checkpoint of a decoding request, if it has one."""
        checkpoint, active.checkpoint = active.checkpoint, None
        if checkpoint is not None:
            self._cancel((checkpoint,))

    def drop_inside(self, chunk: Chunk) -> Chunk:
        """Return ``chunk`` without the checkpoints inside it, whose slots are given back."""
        self._cancel(chunk.inside)
        self.end(chunk)
        return replace(chunk, inside=())

    def cancel(self, chunk: Chunk) -> None:
        """Give back what was planned for a chunk that will not be committed."""
        self._cancel(chunk.checkpoints)
        self.end(chunk)

    def end(self, chunk: Chunk) -> None:
        """End a chunk: its checkpoints no longer take room in the step's buffers."""
        self._room += len(chunk.inside)

    def reset(self) -> None:
        """Forget all chunks."""
        self._room = self._max_inside

    def check_invariants(self, chunks: Sequence[Chunk]) -> None:
        """Prove that the room left is what the planned chunks leave."""
        planned = sum(len(chunk.inside) for chunk in chunks)
        if self._room + planned != self._max_inside:
            raise InvariantError(
                f"{planned} checkpoints are planned and there is room for {self._room} more, "
                f"but the buffers hold {self._max_inside}"
            )

    def mark_used(self, lease: SlotLease) -> None:
        """Remember that a hit used a state, and tell the eviction policy."""
        self._consumed[lease.slot] = lease
        self._slots.note_consumed([lease.slot])

    def publish_blocks(self, active: ActiveRequest, hashes: BlockHashes) -> list[int | None]:
        """Publish a request's complete blocks, of which ``hashes`` are the hashes."""
        first = active.num_published
        end = min(active.num_computed // self._block_size, len(hashes))
        if first >= end:
            return []
        parent_hash = hashes[first - 1] if first else None
        blocks, tokens = active.blocks_between(first, end), None
        if self._kv_blocks.listeners.wants(Stored) and active.is_told_by_tokens:
            tokens = active.tokens(first * self._block_size, end * self._block_size)
        holders = self._kv_blocks.register_kv_block_hashes(
            blocks,
            hashes[first:end],
            parent_hash=parent_hash,
            tokens=tokens,
        )
        active.num_published = end
        if self._tiering is not None:
            self._tiering.offer_blocks(active, first, blocks, holders)
        return holders

    def publish(self, active: ActiveRequest, checkpoints: Sequence[Checkpoint]) -> None:
        """Publish a request's complete blocks and the states that a step saved.

        A block whose content another request published first stays private, and its state goes to
        that other block if it has none. So a state is findable only beside the keys and values of
        the same prefix.
        """
        hashes = active.hashes
        holders = self.publish_blocks(active, hashes)
        first = active.num_published - len(holders)
        if not checkpoints:
            return
        slots, blocks, ids, saved_tokens = [], [], [], []
        private, computed = [], {}
        for checkpoint in checkpoints:
            num_saved = self._count_saved_tokens(active, checkpoint)
            index = checkpoint.position // self._block_size - 1
            hash_id = hashes[index]
            if index >= first:
                block = holders[index - first]
            else:
                block = self._kv_blocks.find_block(hash_id, hashes.digest(index))
            if block is None:
                private.append(checkpoint.slot)
                continue
            slots.append(checkpoint.slot)
            blocks.append(block)
            ids.append(hash_id)
            saved_tokens.append(num_saved)
            if not checkpoint.is_loaded:
                computed[checkpoint.slot] = checkpoint.position
        if private:
            self._slots.cancel_reserved(private)
        if slots:
            kept = self._slots.commit_reserved(slots, blocks, ids, saved_tokens=saved_tokens)
            stored = [a for a, b in zip(kept, slots, strict=True) if a == b and a in computed]
            self._counters["saved_states"] += len(stored)
            if self._tiering is not None:
                is_decoding = active.status is RequestStatus.DECODING
                propose = self._propose_unfinished if is_decoding else self._propose
                knows_prompts = active.prompt_seen_below is not None
                for slot in stored:
                    position = computed[slot]
                    proposal = propose(active, position) if knows_prompts else None
                    self._tiering.offer_state(active, position, slot, proposal)

    def supersede_decode_state(self, active: ActiveRequest, boundary: Checkpoint) -> None:
        """Free the state that a request saved one block earlier while decoding.

        The next turn of the conversation resumes from the newest, so one slot does for an answer
        of any length. States that somebody asked for by position stay, and so do those that other
        requests have used or are about to.
        """
        if active.wants_state_at(boundary.position):
            return
        old, active.decode_lease = active.decode_lease, self._lease_of(boundary)
        if old is None or not self._slots.is_current(old):
            return
        if self._consumed.get(old.slot) != old and not self._slots.is_pinned(old.slot):
            self._slots.invalidate_block(old.block_id)

    def _count_saved_tokens(self, active: ActiveRequest, checkpoint: Checkpoint) -> int:
        """Return the tokens that a state saves beyond the one before it.

        The later ones count from this one; not from the newest of a decoding request, which the
        next one supersedes.
        """
        saved_tokens = checkpoint.position - active.state_position
        is_decoding = active.status is RequestStatus.DECODING
        if not is_decoding or active.wants_state_at(checkpoint.position):
            active.state_position = checkpoint.position
        return saved_tokens

    def _lease_of(self, boundary: Checkpoint) -> SlotLease | None:
        """Name the state that ``boundary`` saved; None if another request had saved it before."""
        if self._slots.slot_to_block[boundary.slot] < 0:
            return None
        lease = self._slots.pin_slots([boundary.slot])[0]
        self._slots.unpin_slots([lease])
        return lease

    def _facts_of(self, active: ActiveRequest, hashes: BlockHashes) -> PromptFacts:
        """Describe a request that was just matched, for a policy that knows prompts."""
        num_tokens, request = active.num_tokens, active.request
        most_skipped = max(0, num_tokens - self._min_computed_tokens)
        return PromptFacts(
            hashes,
            self._block_size,
            active.num_shared_blocks,
            most_skipped // self._block_size,
            request.will_continue,
            request.source,
        )

    def _tell_policies(self, active: ActiveRequest, hashes: BlockHashes) -> None:
        """Tell of a request that was just matched the policies that know prompts."""
        tiering = self._tiering
        tells_below = tiering is not None and tiering.knows_prompts
        if not (self._slots.knows_prompts or tells_below):
            return
        facts = self._facts_of(active, hashes)
        if self._slots.knows_prompts:
            active.prompt_seen = self._slots.begin_request(facts)
        if tiering is not None and tells_below:
            active.prompt_seen_below = tiering.begin_request(facts)

    def _positions(self, active: ActiveRequest, start: int, end: int) -> list[int]:
        """Return where states of a request are worth saving after ``start`` and up to ``end``."""
        block, num_tokens = self._block_size, active.num_tokens
        num_required = -(-num_tokens // block)
        facts = PlacementFacts(num_tokens, block, active.num_shared_blocks, num_required)
        wanted = placed_positions(self._placement, facts)
        if active.checkpoint_positions:
            wanted |= active.wanted_boundaries()
        return sorted([p for p in wanted if start < p <= end])

    def _propose(self, active: ActiveRequest, position: int) -> StateProposal:
        """Describe a state inside a prompt, or at its end."""
        block, end = self._block_size, active.num_tokens
        # Of a prompt that ends with a block, the next to last is what the same prompt resumes from.
        if position >= (end - 1) // block * block:
            kind: Literal["end", "branch", "inside"] = "end"
        else:
            kind = "branch" if position == active.num_shared_tokens else "inside"
        is_asked = bool(active.checkpoint_positions) and active.wants_state_at(position)
        is_asked |= not self._refuses
        return StateProposal(active.prompt_seen, position // block, kind, is_asked)

    def _propose_unfinished(self, active: ActiveRequest, position: int) -> StateProposal:
        """Describe the state at the end of a block that a decoding request has begun."""
        depth = position // self._block_size
        is_asked = not self._refuses or active.wants_state_at(position)
        return StateProposal(active.prompt_seen, depth, "end", is_asked, active.hashes[: depth - 1])

    def _reserve(
        self,
        active: ActiveRequest,
        positions: Sequence[int],
        propose: Callable[[ActiveRequest, int], StateProposal],
    ) -> list[Checkpoint]:
        proposals = None
        if active.prompt_seen is not None:
            proposals = [propose(active, position) for position in positions]
            if active.prompt_seen_below is not None and self._tiering is not None:
                # What is worth a row but no slot must have one until it is copied.
                wanted = self._tiering.wants(active, proposals)
                proposals = [
                    each._replace(is_asked=True) if is_wanted else each
                    for each, is_wanted in zip(proposals, wanted, strict=True)
                ]
        blocks = [active.block_before(p) for p in positions]
        slots = self._slots.reserve_slots(blocks, proposals)
        pairs = zip(positions, slots, strict=True)
        return [Checkpoint(p, slot) for p, slot in pairs if slot is not None]

    def _cancel(self, checkpoints: Sequence[Checkpoint]) -> None:
        if checkpoints:
            self._slots.cancel_reserved([checkpoint.slot for checkpoint in checkpoints])
