"""Sequences and the prefix index: match, reserve and publish blocks and states of a sequence.

A context has one sequence for each request, ``PrefixCache.generate`` one for each prompt.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from mamba_cache._checks import INT64_MAX, as_ids, as_items, check_hashable
from mamba_cache._guard import CallGuard, guarded
from mamba_cache.cache.hashing import BlockHashChain, BlockHashes, ExtraKey, list_hash_ids
from mamba_cache.cache.kv_block_allocator import KVBlockAllocator
from mamba_cache.cache.placement import CheckpointPlacement, PlacementFacts, placed_positions
from mamba_cache.cache.policies import PromptFacts, StateProposal
from mamba_cache.cache.slot_pool import SlotPool
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.events import Stored

__all__ = [
    "CachedSequence",
    "Checkpoint",
    "MissReason",
    "PrefixIndex",
    "PrefixMatch",
    "Request",
    "TierOffers",
    "TokenArray",
    "check_hint",
    "check_positions",
]

TokenArray = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids, 1-D, on the CPU."""

_SequenceT = TypeVar("_SequenceT", bound="CachedSequence")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A prompt to run.

    Attributes:
        request_id: Id of the request, unique among the unfinished requests.
        prompt_tokens: Token ids, 1-D: a list, a numpy array or a torch tensor.
        cache_salt: Requests with different salts share no entry.
        lora_id: Id of the adapter. Requests with different adapters share no entry.
        multimodal_keys: Pairs (token position, content key) of items that placeholder tokens stand
            for. Two prompts match only where the keys agree. Any collection; stored as a tuple.
        checkpoint_positions: Positions in tokens where other requests may branch off, such as the
            end of a system prompt. A state is saved at the last block boundary at or before each
            position, in prompt or answer, in addition to the checkpoints of the placement.
        will_continue: Whether a longer prompt that begins with this one will follow, as after a
            tool call or a turn of a chat: a hint for ``AdaptiveSlotPolicy``. None: unknown.
        source: Source of the hint. Each source is trusted by how often its hints came true.
        tells_tokens: Whether listeners get the tokens. None: yes, with salt, adapter and multimodal
            keys. True: without ``lora_id``, which is then only the cache's own key.

    Raises:
        InvalidArgumentError: ``multimodal_keys``, ``checkpoint_positions``, ``will_continue``,
            ``source`` or ``tells_tokens`` has a wrong type.
    """

    request_id: Hashable
    prompt_tokens: Any
    cache_salt: str | bytes | None = None
    lora_id: str | int | None = None
    multimodal_keys: Sequence[tuple[int, str | bytes]] = ()
    checkpoint_positions: Sequence[int] = ()
    will_continue: bool | None = None
    source: Hashable = None
    tells_tokens: bool | None = None

    def __post_init__(self) -> None:
        # A prompt may be hashed more than once; an iterator would be exhausted the second time.
        if type(self.multimodal_keys) is not tuple or self.multimodal_keys:
            given = as_items("multimodal_keys", self.multimodal_keys, "(position, key) pairs")
            keys = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in given)
            object.__setattr__(self, "multimodal_keys", keys)
        if type(self.checkpoint_positions) is not tuple or self.checkpoint_positions:
            positions = check_positions(self.checkpoint_positions)
            object.__setattr__(self, "checkpoint_positions", positions)
        if self.will_continue is not None or self.source is not None:
            check_hint(self.will_continue, self.source)
        if self.tells_tokens is not None:
            _check_optional_bool("tells_tokens", self.tells_tokens)


class Checkpoint(NamedTuple):
    """A block boundary whose state a step saves, and the slot reserved for the state."""

    position: int  # the boundary, in tokens from the sequence's start
    slot: int
    is_loaded: bool = False  # whether the state is loaded from a tier, not computed


class MissReason(str, Enum):
    """Why a request skipped no tokens."""

    CACHE_DISABLED = "cache_disabled"
    """Prefix caching is switched off."""

    PROMPT_SHORTER_THAN_BLOCK = "prompt_shorter_than_block"
    """The prompt has no complete block, so it cannot be cached."""

    NO_KV_MATCH = "no_kv_match"
    """The first block was not found."""

    NO_STATE = "no_state"
    """Blocks were found, but no block has a saved state."""

    STATE_TOO_LATE = "state_too_late"
    """All saved states are so near the prompt's end that too few tokens would remain to compute."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a prompt.

    Attributes:
        prompt_tokens: Number of tokens of the prompt.
        block_ids: KV blocks of the cached prefix, in order.
        state_matched_blocks: Number of blocks up to the deepest usable state.
        skip_tokens: Number of tokens up to that state, which need not be computed again.
        miss_reason: Why ``skip_tokens`` is 0; None if it is not 0.
        loaded_blocks: Number of KV blocks that are loaded from the host tier: the blocks after
            ``block_ids``, up to the usable state.
        loads_state: Whether the state is loaded from the host tier as well.
        arriving_tokens: Number of tokens that can be skipped once the running loads of a
            ``prefetch`` have ended; 0 if none are running.
    """

    prompt_tokens: int
    block_ids: tuple[int, ...]
    state_matched_blocks: int
    skip_tokens: int
    miss_reason: MissReason | None
    loaded_blocks: int = 0
    loads_state: bool = False
    arriving_tokens: int = 0

    @property
    def kv_matched_blocks(self) -> int:
        """Number of blocks found cached."""
        return len(self.block_ids)


@dataclass(slots=True, eq=False)
class CachedSequence:
    """One sequence: its tokens and hashes, and its shared and published blocks."""

    request: Request  # the caller's request
    prompt: TokenArray  # [prompt length] int32 prompt tokens
    chain: BlockHashChain  # hashes of the complete blocks of all known tokens
    requested_boundaries: frozenset[int] = frozenset()  # where the caller requests a state
    # Tokens after the prompt, as far as they were copied from the request table.
    generated: array[int] = field(default_factory=partial(array, "i"))
    num_shared_blocks: int = 0  # first blocks, which the sequence must not write
    num_published: int = 0  # first blocks, which are registered
    num_initial: int = 0  # tokens at the match: later tokens are decoded
    _hash_ids: list[int] = field(default_factory=list)  # of the first blocks
    prompt_seen: object = None  # handle of the prompt from the slots' policy
    prompt_seen_below: object = None  # handle of the prompt from the host tier's policy

    @property
    def num_known(self) -> int:
        """Number of tokens of the prompt and of ``generated``."""
        return len(self.prompt) + len(self.generated)

    @property
    def hashes(self) -> BlockHashes:
        """Hashes of the complete blocks of the known tokens; empty if caching is disabled."""
        return self.chain.hashes

    def hash_ids(self) -> list[int]:
        """Return the hash id of each complete block of the known tokens; the list may grow."""
        known, digests = self._hash_ids, self.chain.digests
        if len(known) < len(digests):
            known += list_hash_ids(digests[len(known) :])
        return known

    def tokens(self, start: int, end: int) -> TokenArray:
        """Return known tokens from ``start`` to ``end``, int32."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        tail = np.array(self.generated[max(start - split, 0) : end - split], dtype=np.int32)
        return tail if start >= split else np.concatenate((self.prompt[start:], tail))

    def extra_keys(
        self, first: int, end: int, block_size: int
    ) -> tuple[tuple[Any, ...] | None, ...] | None:
        """Return the salt, adapter and multimodal keys that blocks are hashed with, per block."""
        request = self.request
        lora_id = None if request.tells_tokens else request.lora_id
        if request.cache_salt is None and lora_id is None and not request.multimodal_keys:
            return None
        keys: list[list[Any]] = [[] if lora_id is None else [lora_id] for _ in range(first, end)]
        for position, key in request.multimodal_keys:
            if first <= position // block_size < end:
                keys[position // block_size - first].append((key, position % block_size))
        if first == 0 and request.cache_salt is not None:
            keys[0].append(request.cache_salt)
        return tuple(tuple(each) or None for each in keys)

    def fork(
        self: _SequenceT, request_id: Hashable, chain: BlockHashChain, generated: Iterable[int]
    ) -> _SequenceT:
        """Return a new sequence with the same prompt and its own tokens after the prompt."""
        return type(self)(
            replace(self.request, request_id=request_id),
            self.prompt,
            chain.copy(),
            self.requested_boundaries,
            array("i", generated),
            num_shared_blocks=self.num_shared_blocks,
            num_published=self.num_published,
            num_initial=self.num_initial,
            prompt_seen=self.prompt_seen,
            prompt_seen_below=self.prompt_seen_below,
        )


class TierOffers(Protocol):
    """The calls that the index makes to the tiers below the GPU."""

    def begin_request(self, facts: PromptFacts, /) -> object:
        """Announce a prompt to the tiers' policy; return the policy's handle of the prompt."""

    def wants(self, sequence: CachedSequence, proposals: Sequence[StateProposal]) -> Sequence[bool]:
        """Return for each state whether it is worth a host row and has none yet."""

    def offer_blocks(
        self,
        sequence: CachedSequence,
        first: int,
        blocks: Sequence[int],
        holders: Sequence[int | None],
        /,
    ) -> object:
        """Offer published blocks of a sequence, of which ``first`` is the index of the first."""

    def offer_state(
        self,
        sequence: CachedSequence,
        position: int,
        slot: int,
        proposal: StateProposal | None,
        /,
    ) -> object:
        """Offer a published state of a sequence."""

    def remove(self, kind: Any, cache_salt: ExtraKey, digest: bytes, /) -> object:
        """Remove a wrong entry, a state or a KV block, from all tiers."""


class PrefixIndex:
    """Matches, reserves and publishes KV blocks and slots of sequences together."""

    def __init__(
        self,
        kv_blocks: KVBlockAllocator,
        slots: SlotPool,
        *,
        block_size_tokens: int,
        placement: CheckpointPlacement,
        counters: Counter[str],
        tiers: TierOffers,
        on_counted: Callable[[CachedSequence, PrefixMatch], object] | None = None,
    ) -> None:
        self._kv_blocks = kv_blocks
        self._slots = slots
        self._block_size = block_size_tokens
        self._placement = placement
        self._counters = counters
        self.tiers = tiers
        self._on_counted = on_counted
        self.refuses_states = True  # whether the policy may refuse states
        self.join(kv_blocks._guard)

    def match(
        self, digests: Sequence[bytes], prompt_tokens: int, min_computed_tokens: int
    ) -> PrefixMatch:
        """Find how much of a prompt is cached; change nothing."""
        if not self._kv_blocks.enable_prefix_caching:
            return PrefixMatch(prompt_tokens, (), 0, 0, MissReason.CACHE_DISABLED)
        block_ids = self._kv_blocks.find_prefix(digests)
        reason: MissReason | None = None
        if not block_ids:
            reason = MissReason.NO_KV_MATCH if digests else MissReason.PROMPT_SHORTER_THAN_BLOCK
            return PrefixMatch(prompt_tokens, (), 0, 0, reason)
        usable_blocks = max(0, prompt_tokens - min_computed_tokens) // self._block_size
        state_blocks = self._slots.num_blocks_to_state(block_ids[:usable_blocks])
        if not state_blocks:
            too_late = self._slots.num_blocks_to_state(block_ids)
            reason = MissReason.STATE_TOO_LATE if too_late else MissReason.NO_STATE
        return PrefixMatch(
            prompt_tokens, tuple(block_ids), state_blocks, state_blocks * self._block_size, reason
        )

    def count(self, sequence: CachedSequence, match: PrefixMatch) -> None:
        """Count a sequence that began to run."""
        self._counters["requests"] += 1
        self._counters[match.miss_reason or "hits"] += 1
        self._counters["kv_matched_blocks"] += len(match.block_ids)
        self._counters["state_matched_blocks"] += match.state_matched_blocks
        self._counters["skipped_tokens"] += match.skip_tokens
        if self._on_counted is not None:
            self._on_counted(sequence, match)

    def join(self, guard: CallGuard) -> None:
        """Use ``guard``, which the index then shares with other objects."""
        self._guard = guard

    @guarded(nests=True, changes=True)
    def announce(self, sequence: CachedSequence, max_skipped: int) -> None:
        """Announce a newly matched sequence to the policies that use prompts."""
        policy = self._slots.prompt_policy
        if policy is None:  # then no policy of a tier uses prompts
            return
        request = sequence.request
        facts = PromptFacts(
            tuple(sequence.hash_ids()),
            self._block_size,
            sequence.num_shared_blocks,
            max(0, max_skipped) // self._block_size,
            request.will_continue,
            request.source,
        )
        sequence.prompt_seen = policy.on_request(facts)
        sequence.prompt_seen_below = self.tiers.begin_request(facts)

    def positions(self, sequence: CachedSequence) -> set[int]:
        """Return the checkpoints that the placement chooses or the caller requested."""
        size, num_tokens = self._block_size, sequence.num_known
        facts = PlacementFacts(num_tokens, size, sequence.num_shared_blocks, -(-num_tokens // size))
        return placed_positions(self._placement, facts) | sequence.requested_boundaries

    @guarded(nests=True, changes=True)
    def reserve(
        self, requested: Sequence[tuple[CachedSequence, Sequence[int], Sequence[int]]]
    ) -> list[Checkpoint | None]:
        """Reserve slots for states of sequences at positions.

        ``requested`` has a sequence, its positions, and the block that ends at each. Return a
        checkpoint for each position in order; None where no slot was reserved.
        """
        positions: list[int] = []
        block_ids: list[int] = []
        proposals: list[StateProposal] = []
        for sequence, own_positions, blocks in requested:
            positions += own_positions
            block_ids += blocks
            proposals += self._proposals(sequence, own_positions)
        slots = self._slots.reserve(block_ids, proposals or None)
        return [
            None if slot is None else Checkpoint(position, slot)
            for position, slot in zip(positions, slots, strict=True)
        ]

    @guarded(nests=True, changes=True)
    def cancel(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Release reserved slots."""
        if checkpoints:
            self._slots.cancel([checkpoint.slot for checkpoint in checkpoints])

    @guarded(nests=True, changes=True)
    def publish(
        self, written: Sequence[tuple[CachedSequence, list[int], Sequence[Checkpoint]]]
    ) -> None:
        """Publish new complete blocks of sequences, and states that were written.

        A block stays private if another sequence has published a block of the same content. Its
        state is then published at the other block, unless that has one. So a state is findable only
        together with the keys and values of the same prefix.
        """
        private: list[Checkpoint] = []
        shared: list[tuple[CachedSequence, Checkpoint]] = []
        blocks: list[int] = []
        for sequence, new_blocks, checkpoints in written:
            first = sequence.num_published
            holders = self._publish_blocks(sequence, new_blocks) if new_blocks else []
            for checkpoint in checkpoints:
                index = checkpoint.position // self._block_size - 1
                if index >= first:
                    block = holders[index - first]
                else:
                    block = self._kv_blocks.find_block(sequence.chain.digests[index])
                if block is None:
                    private.append(checkpoint)
                    continue
                shared.append((sequence, checkpoint))
                blocks.append(block)
        if private:
            self.cancel(private)
        if shared:
            self._publish_states(shared, blocks)
        if self._kv_blocks.listeners.waiting:
            self._kv_blocks.listeners.tell()

    def _publish_blocks(self, sequence: CachedSequence, blocks: list[int]) -> list[int | None]:
        first, digests, size = sequence.num_published, sequence.chain.digests, self._block_size
        end, tokens, extra = first + len(blocks), None, None
        if self._kv_blocks.listeners.wants(Stored) and sequence.request.tells_tokens is not False:
            tokens = sequence.tokens(first * size, end * size)
            extra = sequence.extra_keys(first, end, size)
        parent = digests[first - 1] if first else None
        hash_ids = sequence.hash_ids()[first:end]
        holders = self._kv_blocks.register(
            blocks, digests[first:end], hash_ids, parent, tokens=tokens, extra_keys=extra
        )
        sequence.num_published = end
        self.tiers.offer_blocks(sequence, first, blocks, holders)
        return holders

    def _publish_states(
        self, written: Sequence[tuple[CachedSequence, Checkpoint]], blocks: Sequence[int]
    ) -> None:
        """Publish states of sequences, each at its block of ``blocks``."""
        slots = [checkpoint.slot for _, checkpoint in written]
        positions = [checkpoint.position for _, checkpoint in written]
        kept = self._slots.commit(slots, blocks, positions)
        for (sequence, (position, slot, is_loaded)), now in zip(written, kept, strict=True):
            if slot != now or is_loaded:
                continue
            self._counters["saved_states"] += 1
            knows_prompt = sequence.prompt_seen_below is not None
            proposal = self._propose(sequence, position) if knows_prompt else None
            self.tiers.offer_state(sequence, position, slot, proposal)

    def _propose(self, sequence: CachedSequence, position: int) -> StateProposal:
        """Describe a state to the policy: in a prompt, at its end, or of a decoding sequence."""
        size, end, prompt = self._block_size, sequence.num_initial, sequence.prompt_seen
        depth = position // size
        is_asked = not self.refuses_states or position in sequence.requested_boundaries
        if position > end:  # the hash of the last block may not be known yet
            return StateProposal(prompt, depth, "end", is_asked, sequence.hash_ids()[: depth - 1])
        # If a prompt ends with a block, the same prompt again resumes from the penultimate block.
        if position >= (end - 1) // size * size:
            kind: Literal["end", "branch", "inside"] = "end"
        else:
            kind = "branch" if position == sequence.num_shared_blocks * size else "inside"
        return StateProposal(prompt, depth, kind, is_asked)

    def _proposals(self, sequence: CachedSequence, positions: Sequence[int]) -> list[StateProposal]:
        """Describe states to a policy that uses prompts; return [] for other policies."""
        if sequence.prompt_seen is None:
            return []
        proposals = [self._propose(sequence, position) for position in positions]
        if sequence.prompt_seen_below is None:
            return proposals
        # A state that is worth a host row but no slot needs a slot until it is copied.
        worth_rows = self.tiers.wants(sequence, proposals)
        return [
            each._replace(is_asked=True) if is_worth_row else each
            for each, is_worth_row in zip(proposals, worth_rows, strict=True)
        ]


def check_hint(will_continue: Any, source: Any) -> None:
    """Check ``will_continue`` and ``source`` of a ``Request``."""
    _check_optional_bool("will_continue", will_continue)
    check_hashable("source", source)


def _check_optional_bool(name: str, value: Any) -> None:
    if not (value is None or isinstance(value, bool)):
        raise InvalidArgumentError(f"{name} must be True, False or None, got {value!r}")


def check_positions(positions: Iterable[int]) -> tuple[int, ...]:
    """Check token positions of a caller, and return them as a tuple."""
    return tuple(as_ids("checkpoint_positions", positions, INT64_MAX))
