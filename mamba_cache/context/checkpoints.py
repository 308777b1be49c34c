"""Plans which states a step saves, and publishes them when the step is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mamba_cache.blocks import KVBlockAllocator
from mamba_cache.context.requests import ActiveRequest, Checkpoint, Chunk, RequestStatus
from mamba_cache.context.stats import StatsCounters
from mamba_cache.errors import InvariantError
from mamba_cache.slots import (
    CheckpointPlacement,
    MambaSlotAllocator,
    PlacementFacts,
    SlotLease,
)
from mamba_cache.slots.placement import placed_positions

__all__ = ["CheckpointPlanner", "Publisher"]


class CheckpointPlanner:
    """Chooses the checkpoints of a chunk and reserves a slot for each that can have one.

    Args:
        slots: Where slots are reserved, and checkpoints that found no room are counted.
        placement: Which positions are worth a state.
        block_size_tokens: Tokens of a block. A state is saved at block boundaries only, and those
            lie on the SSM chunk grid because the settings say so.
        max_inside: Checkpoints inside prefill chunks that the buffers of one step hold.
        save_prompt_states: Whether prefill chunks have checkpoints.
        save_decode_states: Whether decoded tokens that end a block have one.
    """

    def __init__(
        self,
        slots: MambaSlotAllocator,
        placement: CheckpointPlacement,
        *,
        block_size_tokens: int,
        max_inside: int,
        save_prompt_states: bool,
        save_decode_states: bool,
    ) -> None:
        self._slots = slots
        self._placement = placement
        self._block_size = block_size_tokens
        self._max_inside = self._room = max_inside
        self._save_prompt_states = save_prompt_states
        self._save_decode_states = save_decode_states

    def plan(self, active: ActiveRequest, chunk: Chunk) -> Chunk:
        """Return ``chunk`` with its checkpoints planned.

        Args:
            active: The request, with the blocks of the chunk.
            chunk: What is computed.
        """
        if not self._save_prompt_states:
            return chunk
        positions = sorted(self._positions(active, chunk))
        inside = [p for p in positions if p < chunk.end]
        without_room = max(0, len(inside) - self._room)
        self._slots.skipped_checkpoints_total += without_room
        # The later ones save more, so they are kept when the buffers are short.
        kept = self._reserve(active, positions[without_room:])
        inside_kept = tuple(c for c in kept if c.position < chunk.end)
        self._room -= len(inside_kept)
        return replace(
            chunk,
            inside=inside_kept,
            boundary=next((c for c in kept if c.position == chunk.end), None),
            epoch=self._slots.epoch,
        )

    def plan_decode(self, active: ActiveRequest, chunk: Chunk) -> Chunk:
        """Return the chunk of a decoding request with its checkpoint, if it may end a block.

        Args:
            active: The request, with the blocks of the chunk.
            chunk: What is computed.
        """
        # Two steps are shorter than a block: there is one boundary at most.
        position = (chunk.start // self._block_size + 1) * self._block_size
        if position > active.most_computed + chunk.num_tokens or not self._save_prompt_states:
            return chunk
        wanted = active.wanted_boundaries(self._block_size)
        if not self._save_decode_states and position not in wanted:
            return chunk
        epoch, before = self._slots.epoch, active.uncollected
        if before is not None and before.boundary is not None and before.epoch == epoch:
            # The step before may get there, or this one: one slot does for both.
            return replace(chunk, boundary=before.boundary, epoch=epoch)
        kept = self._reserve(active, [position])
        return replace(chunk, boundary=kept[0] if kept else None, epoch=epoch)

    def settle_decode(self, active: ActiveRequest, chunk: Chunk, num_tokens: int) -> Chunk:
        """Return the chunk of a decoding request as it turned out.

        A checkpoint that was not reached stays with the next step if that is in flight and may
        reach it, and is given back if not.

        Args:
            active: The request; ``chunk`` is no longer among its open ones.
            chunk: What was computed.
            num_tokens: How many of the tokens became part of the sequence.

        Returns:
            The chunk cut to those tokens, with its checkpoint if that was reached.
        """
        boundary, later = chunk.boundary, active.chunk
        chunk = replace(chunk, num_tokens=num_tokens)
        is_reached = boundary is not None and chunk.start < boundary.position <= chunk.end
        if later is not None:
            is_shared = boundary is not None and later.shares_boundary(chunk)
            later = replace(later, start=chunk.end)
            active.chunk = replace(later, boundary=None) if is_shared and is_reached else later
            if is_shared and not is_reached:
                return replace(chunk, boundary=None)
        if boundary is not None and not is_reached:
            self._slots.cancel_reserved([boundary.slot], epoch=chunk.epoch)
            chunk = replace(chunk, boundary=None)
        return chunk

    def drop_inside(self, chunk: Chunk) -> Chunk:
        """Return ``chunk`` without the checkpoints inside it, whose slots are given back."""
        self._slots.cancel_reserved([c.slot for c in chunk.inside], epoch=chunk.epoch)
        self.settle(chunk)
        return replace(chunk, inside=())

    def cancel(self, chunk: Chunk) -> None:
        """Give back what was planned for a chunk that will not be committed."""
        self._slots.cancel_reserved([c.slot for c in chunk.checkpoints], epoch=chunk.epoch)
        self.settle(chunk)

    def settle(self, chunk: Chunk) -> None:
        """End a chunk: its checkpoints no longer take room in the step's buffers."""
        self._room += len(chunk.inside)

    def reset(self) -> None:
        """Forget all chunks."""
        self._room = self._max_inside

    def check_invariants(self, chunks: Sequence[Chunk]) -> None:
        """Prove that the room left is what the planned chunks leave.

        Raises:
            InvariantError: It is not.
        """
        planned = sum(len(chunk.inside) for chunk in chunks)
        if self._room + planned != self._max_inside:
            raise InvariantError(
                f"{planned} checkpoints are planned and there is room for {self._room} more, "
                f"but the buffers hold {self._max_inside}"
            )

    def _positions(self, active: ActiveRequest, chunk: Chunk) -> set[int]:
        block = self._block_size
        facts = PlacementFacts(
            prompt_tokens=active.num_tokens,
            block_size_tokens=block,
            num_matched_blocks=active.num_shared_blocks,
            num_required_blocks=-(-active.num_tokens // block),
        )
        wanted = placed_positions(self._placement, facts)
        wanted |= active.wanted_boundaries(block)
        return {p for p in wanted if chunk.start < p <= chunk.end}

    def _reserve(self, active: ActiveRequest, positions: Sequence[int]) -> list[Checkpoint]:
        blocks = [active.block_ids[p // self._block_size - 1] for p in positions]
        slots = self._slots.reserve_slots(blocks)
        return [
            Checkpoint(p, slot)
            for p, slot in zip(positions, slots, strict=True)
            if slot is not None
        ]


class Publisher:
    """Makes what a committed step wrote findable: KV blocks first, then states.

    Args:
        kv_blocks: Where block hashes are registered.
        slots: Where states are registered.
        counters: Where saved states are counted.
        block_size_tokens: Tokens of a block.
    """

    def __init__(
        self,
        kv_blocks: KVBlockAllocator,
        slots: MambaSlotAllocator,
        counters: StatsCounters,
        *,
        block_size_tokens: int,
    ) -> None:
        self._kv_blocks = kv_blocks
        self._slots = slots
        self._counters = counters
        self._block_size = block_size_tokens
        # By slot, so that there are never more than slots.
        self._consumed: dict[int, SlotLease] = {}

    def note_consumed(self, lease: SlotLease) -> None:
        """Remember that a hit used a state, and tell the eviction policy."""
        self._consumed[lease.slot] = lease
        self._slots.note_consumed([lease.slot])

    def publish(self, active: ActiveRequest, chunk: Chunk) -> None:
        """Publish a request's complete blocks and the states of its chunk.

        A block whose content another request published first stays private, and its state goes to
        that other block if it has none. So a state is findable only beside the keys and values of
        the same prefix.

        Args:
            active: The request, with ``num_computed`` advanced past the chunk.
            chunk: The chunk that was computed.
        """
        self._publish_blocks(active)
        if not chunk.checkpoints:
            return
        hashes = active.chain.hashes
        slots, blocks, ids, saved_tokens = [], [], [], []
        private = []
        for checkpoint in chunk.checkpoints:
            num_saved = self._note_state(active, checkpoint)
            index = checkpoint.position // self._block_size - 1
            block = self._kv_blocks.find_block(hashes[index], hashes.digest(index))
            if block is None:
                private.append(checkpoint.slot)
                continue
            slots.append(checkpoint.slot)
            blocks.append(block)
            ids.append(hashes[index])
            saved_tokens.append(num_saved)
        if chunk.epoch != self._slots.epoch:
            return  # the slots' owner has reset them, and what was reserved with them
        self._slots.cancel_reserved(private)
        housing = self._slots.commit_reserved(slots, blocks, ids, saved_tokens=saved_tokens)
        self._counters.saved_states += sum(a == b for a, b in zip(housing, slots, strict=True))

    def supersede_decode_state(self, active: ActiveRequest, boundary: Checkpoint) -> None:
        """Free the state that a request saved one block earlier while decoding.

        The next turn of the conversation resumes from the newest, so one slot does for an answer
        of any length. States that somebody asked for by position stay, and so do those that other
        requests have used or are about to.

        Args:
            active: The request, whose state at ``boundary`` is published.
            boundary: Its newest decode checkpoint.
        """
        if boundary.position in active.wanted_boundaries(self._block_size):
            return
        old, active.decode_lease = active.decode_lease, self._lease_of(boundary)
        if old is None or not self._slots.is_current(old):
            return
        if self._consumed.get(old.slot) != old and not self._slots.is_pinned(old.slot):
            self._slots.invalidate_block(old.block_id)

    def _note_state(self, active: ActiveRequest, checkpoint: Checkpoint) -> int:
        """Return the tokens that a state saves beyond the one before it, and note that it is there.

        The newest state of a decoding request is not noted, for the next one supersedes it.
        """
        saved_tokens = checkpoint.position - active.state_position
        is_wanted = checkpoint.position in active.wanted_boundaries(self._block_size)
        if is_wanted or active.status is not RequestStatus.DECODING:
            active.state_position = checkpoint.position
        return saved_tokens

    def _lease_of(self, boundary: Checkpoint) -> SlotLease | None:
        """Name the state that ``boundary`` saved; None if another request had saved it before."""
        if self._slots.pool.slot_to_block[boundary.slot] < 0:
            return None
        lease = self._slots.pin_slots([boundary.slot])[0]
        self._slots.unpin_slots([lease])
        return lease

    def _publish_blocks(self, active: ActiveRequest) -> None:
        hashes = active.chain.hashes
        first = active.num_published
        end = min(active.num_computed // self._block_size, len(hashes))
        if first >= end:
            return
        self._kv_blocks.register_kv_block_hashes(
            active.block_ids[first:end],
            hashes[first:end],
            parent_hash=hashes[first - 1] if first else None,
        )
        active.num_published = end
