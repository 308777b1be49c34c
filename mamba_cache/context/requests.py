"""Requests: what a caller asks for, and what the context keeps of each while it runs."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from mamba_cache._checks import as_items, check_hashable, check_int
from mamba_cache._torch import ZERO_SOURCE
from mamba_cache.cache import (
    MAX_TOKEN_ID,
    BlockHashChain,
    BlockHasher,
    BlockHashes,
    KVBlockAllocator,
    SlotLease,
    SlotPool,
    as_token_array,
)
from mamba_cache.config import CacheConfig
from mamba_cache.context.tier_memory import Ticket
from mamba_cache.errors import InvalidArgumentError, SequenceLengthError
from mamba_cache.tiers.rows import RowLease

__all__ = [
    "ActiveRequest",
    "Admission",
    "Checkpoint",
    "Chunk",
    "MissReason",
    "PlannedLoad",
    "PrefixMatch",
    "PreparedRequest",
    "Request",
    "RequestPreparer",
    "RequestStatus",
    "TokenArray",
    "check_hint",
    "check_positions",
    "find_prefix",
]

TokenArray = np.ndarray[Any, np.dtype[np.int32]]
"""Token ids, 1-D, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A prompt to run.

    Attributes:
        request_id: The caller's name for it; unique among the requests that are not finished.
        prompt_tokens: Token ids, 1-D: a list, a numpy array or a torch tensor.
        cache_salt: Requests of different salts never share anything.
        lora_id: Likewise for adapters.
        multimodal_keys: Pairs (token position, content key) of items that placeholder tokens stand
            for; two prompts match only where the keys agree. Any collection; a tuple is kept.
        checkpoint_positions: Positions at which others are expected to branch off, such as the end
            of a system prompt, in tokens. A state is saved at the block boundary at or before
            each, in the prompt or in the answer, beside those that the placement chooses.
        will_continue: Whether a longer prompt that begins with this one will follow, as after a
            tool call or a turn of a chat: a hint for ``AdaptiveSlotPolicy``. None: nobody knows.
        source: Who says so: hints of each source are trusted as far as they came true.
        tells_tokens: Whether listeners get its tokens. None: they do, with its salt, adapter and
            multimodal keys; True: without the adapter, which is none but the cache's own key.

    Raises:
        InvalidArgumentError: ``multimodal_keys``, ``checkpoint_positions``, ``will_continue``,
            ``source`` or ``tells_tokens`` is of a wrong kind.
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
        # A prompt may be hashed more than once, and what is read once would have no keys then.
        if type(self.multimodal_keys) is not tuple or self.multimodal_keys:
            given = as_items("multimodal_keys", self.multimodal_keys, "(position, key) pairs")
            keys = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in given)
            object.__setattr__(self, "multimodal_keys", keys)
        positions = check_positions(self.checkpoint_positions)
        object.__setattr__(self, "checkpoint_positions", positions)
        check_hint(self.will_continue, self.source)
        _check_optional_bool("tells_tokens", self.tells_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request whose tokens are checked and hashed, so that it can be matched again cheaply.

    Made by ``DynamicInferenceContext.prepare``.

    Attributes:
        request: The request.
        tokens: [prompt length] int32 prompt tokens, on the CPU; read-only.
        chain: What ``hashes`` are from, not to be appended to.
    """

    request: Request
    tokens: TokenArray
    chain: BlockHashChain = field(repr=False)
    _maker: object = field(repr=False)

    @property
    def hashes(self) -> BlockHashes:
        """Hashes of the prompt's complete blocks; none if prefix caching is off."""
        return self.chain.hashes


class RequestPreparer:
    """Checks of tokens, and hashes of their blocks, by a context's settings; it keeps nothing."""

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._hasher = BlockHasher(config.hash_algorithm, config.hash_secret)
        # Of requests without keys of their own; copied, since the root is hashed with care.
        self._plain_chain = BlockHashChain(config.block_size_tokens, hasher=self._hasher)

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request's tokens and hash its complete blocks, to be read many times."""
        return PreparedRequest(*self.read(request), self)

    def read(
        self, request: Request | PreparedRequest
    ) -> tuple[Request, TokenArray, BlockHashChain]:
        """Return a request, its tokens, checked, and the chain of its complete blocks."""
        if isinstance(request, PreparedRequest):
            if request._maker is not self:
                raise InvalidArgumentError(
                    f"request {request.request.request_id!r} was prepared by another context; "
                    "prepare it with the one that runs it"
                )
            return request.request, request.tokens, request.chain
        if not isinstance(request, Request):
            raise InvalidArgumentError(f"give a Request, got {type(request).__name__}")
        # A copy, for the caller may write into theirs.
        tokens: TokenArray = self.read_tokens(request.prompt_tokens).copy()
        if not len(tokens):
            raise InvalidArgumentError(f"the prompt of request {request.request_id!r} is empty")
        limit = self._config.max_sequence_length
        if len(tokens) > limit:
            raise SequenceLengthError(
                f"request {request.request_id!r} has {len(tokens)} prompt tokens; "
                f"max_sequence_length is {limit}"
            )
        if max(request.checkpoint_positions, default=0) > limit:
            raise InvalidArgumentError(
                f"checkpoint_positions must be at most max_sequence_length ({limit}), got "
                f"{max(request.checkpoint_positions)}"
            )
        chain = self._chain_of(request)
        if self._config.enable_prefix_caching:
            chain.append_checked(tokens)
        tokens.setflags(write=False)  # the hashes are of just these tokens
        return request, tokens, chain

    def _chain_of(self, request: Request) -> BlockHashChain:
        """Return a chain of no tokens under a request's keys."""
        if request.cache_salt is None and request.lora_id is None and not request.multimodal_keys:
            return self._plain_chain.copy()
        return BlockHashChain(
            self._config.block_size_tokens,
            hasher=self._hasher,
            cache_salt=request.cache_salt,
            lora_id=request.lora_id,
            multimodal_keys=request.multimodal_keys,
        )

    def are_tokens(self, array: np.ndarray[Any, np.dtype[Any]]) -> bool:
        """Say whether all ints of an array of any shape are token ids."""
        # One pass: the bits of all ids together make a valid id if and only if each of them is one.
        bits, limit = int(np.bitwise_or.reduce(array, axis=None)), self._config.vocab_size
        is_below = limit is None or bits < limit or int(array.max()) < limit
        return 0 <= bits <= MAX_TOKEN_ID and is_below

    def read_tokens(self, tokens: object) -> TokenArray:
        """Return tokens as an int32 array, which may share their memory."""
        array: TokenArray = as_token_array(tokens)
        limit = self._config.vocab_size
        if limit is not None and len(array) and int(array.max()) >= limit:
            raise InvalidArgumentError(
                f"token ids must be below vocab_size ({limit}), got {int(array.max())}"
            )
        return array


class RequestStatus(Enum):
    """Where a request stands between two steps."""

    SCHEDULED = "scheduled"
    """A chunk of its tokens is computed in the next step."""

    PREFILLING = "prefilling"
    """More of its tokens must be scheduled."""

    DECODING = "decoding"
    """It decodes one token in every step."""

    PREEMPTED = "preempted"
    """It gave its memory back; ``resume_request`` brings it on again."""


class Checkpoint(NamedTuple):
    """A state that a step saves."""

    position: int  # the boundary, in tokens from the sequence's start
    slot: int  # the slot reserved for it
    is_loaded: bool = False  # whether it comes from a tier, and is not computed


@dataclass(slots=True, eq=False)
class PlannedLoad:
    """What a request's first chunk is loaded from the host tier for."""

    leases: list[RowLease]  # rows that it reads: of KV blocks in order, then of the state
    first_block: int  # which of the request's blocks the first of them is loaded to
    blocks: list[int] = field(default_factory=list)  # the KV blocks that are loaded
    checkpoint: Checkpoint | None = None
    ticket: Ticket | None = None  # the copies, once they are enqueued
    first_job: int = 0  # which of them is the first of this request
    is_damaged: bool | None = None  # whether other bytes came than were written, once that is known

    @property
    def num_blocks(self) -> int:
        """KV blocks among ``leases``."""
        return len(self.leases) - 1

    @property
    def current_checkpoint(self) -> Checkpoint:
        """Where the state is loaded to, once a slot is reserved for it."""
        assert self.checkpoint is not None, "it has a slot since it was admitted"
        return self.checkpoint


@dataclass(slots=True, eq=False)
class Chunk:
    """What the next step computes of a request's prompt.

    Nothing of it is changed once its step has begun.
    """

    row: int  # the request's row in the block tables
    start: int  # tokens of the sequence before it
    token_ids: TokenArray  # [n] its tokens
    first_writable: int = 0  # keys and values before this position are shared and filled already
    is_first: bool = False  # the live state must be restored or zeroed before
    samples: bool = False  # it ends at the last known token, so that the next one is sampled
    lease: SlotLease | None = None  # the slot to restore from, if any
    inside: tuple[Checkpoint, ...] = ()  # checkpoints inside the chunk; the forward writes them
    boundary: Checkpoint | None = None
    load: PlannedLoad | None = None  # what is loaded from a tier for it, in place of ``lease``

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The position after the last computed token."""
        return self.start + len(self.token_ids)

    @property
    def restore_source(self) -> int:
        """The slot that the live state is restored from; ``ZERO_SOURCE`` clears it."""
        if self.load is not None:
            return self.load.current_checkpoint.slot
        return ZERO_SOURCE if self.lease is None else self.lease.slot

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All checkpoints of the chunk, what is loaded among them."""
        computed = self.inside if self.boundary is None else (*self.inside, self.boundary)
        if self.load is None or self.load.checkpoint is None:
            return computed
        return (self.load.checkpoint, *computed)


class MissReason(str, Enum):
    """Why a request skipped no tokens."""

    CACHE_DISABLED = "cache_disabled"
    """Prefix caching is switched off."""

    PROMPT_SHORTER_THAN_BLOCK = "prompt_shorter_than_block"
    """The prompt has no complete block, so nothing of it can ever be cached."""

    NO_KV_MATCH = "no_kv_match"
    """Not even the first block was found."""

    NO_STATE = "no_state"
    """Blocks were found, but no state is saved at the end of any of them."""

    STATE_TOO_LATE = "state_too_late"
    """The only states lie so near the prompt's end that too few tokens would be left to compute."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a prompt is cached.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        block_ids: KV blocks of the prompt found cached, from its start.
        state_matched_blocks: Blocks up to the farthest usable state.
        skip_tokens: Tokens up to it: they need not be computed again.
        miss_reason: Why ``skip_tokens`` is 0; None if it is not.
        loaded_blocks: KV blocks up to that state that are loaded from the host tier: those after
            ``block_ids``.
        loads_state: Whether the state is loaded from there as well.
        arriving_tokens: Tokens that can be skipped once what ``prefetch`` brings has arrived; 0 if
            nothing is under way.
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
        """Blocks found cached."""
        return len(self.block_ids)


def find_prefix(
    hashes: BlockHashes,
    prompt_tokens: int,
    kv_blocks: KVBlockAllocator,
    slots: SlotPool,
    *,
    block_size_tokens: int,
    min_computed_tokens: int,
) -> PrefixMatch:
    """Match a prompt against the cache."""
    block_ids = kv_blocks.match_prefix(hashes)
    reason: MissReason | None = None
    if not block_ids:
        reason = MissReason.NO_KV_MATCH if len(hashes) else MissReason.PROMPT_SHORTER_THAN_BLOCK
        return PrefixMatch(prompt_tokens, (), 0, 0, reason)
    usable_blocks = max(0, prompt_tokens - min_computed_tokens) // block_size_tokens
    state_blocks = slots.num_blocks_to_state(block_ids[:usable_blocks])
    if not state_blocks:
        too_late = slots.num_blocks_to_state(block_ids)
        reason = MissReason.STATE_TOO_LATE if too_late else MissReason.NO_STATE
    return PrefixMatch(
        prompt_tokens, tuple(block_ids), state_blocks, state_blocks * block_size_tokens, reason
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(PrefixMatch):
    """What ``add_request`` found and planned: a match, and what is made of it.

    Of a resumed request prompt and answer so far count as its prompt.

    Attributes:
        request_id: The request's name.
        chunk_tokens: Tokens computed in the next step.
    """

    request_id: Hashable
    chunk_tokens: int


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """What is kept of a request beside its row: what a steady decoding step needs nothing of."""

    request: Request  # the caller's request
    prompt: TokenArray  # [prompt length] int32 prompt tokens
    chain: BlockHashChain  # hashes of the blocks of all its known tokens
    wanted_boundaries: frozenset[int]  # block boundaries at which the caller wants a state
    # Sampled tokens, as far as they were taken over from its row.
    generated: array[int] = field(default_factory=lambda: array("i"))
    request_id: Hashable = field(init=False)  # the caller's name for it
    status: RequestStatus = RequestStatus.PREEMPTED
    row: int = -1  # its row of ``RequestTable`` and of the live states; -1 while preempted
    state_position: int = 0  # the last state that is not superseded, or where it resumed
    num_shared_blocks: int = 0  # the first blocks, which it may not write
    num_published: int = 0  # the first blocks, which were registered
    chunk: Chunk | None = None
    checkpoint: Checkpoint | None = None  # where it may save a state while it decodes
    admission: Admission | None = None  # until it is counted
    decode_lease: SlotLease | None = None  # the newest state saved while it decoded
    prompt_seen: object = None  # what the policy of the slots knows it by
    prompt_seen_below: object = None  # likewise that of the host tier

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    @property
    def num_known(self) -> int:
        """Tokens of the prompt, and sampled ones that were taken over from its row."""
        return len(self.prompt) + len(self.generated)

    @property
    def hashes(self) -> BlockHashes:
        """Hashes of the complete blocks of its known tokens; none without a cache."""
        return self.chain.hashes

    @property
    def current_chunk(self) -> Chunk:
        """The chunk of a request that is scheduled or in flight."""
        assert self.chunk is not None, f"{self.request_id!r} is in no step"
        return self.chunk

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The states that it is to save, for each of which a slot is reserved."""
        inside = () if self.chunk is None else self.chunk.checkpoints
        return inside if self.checkpoint is None else (*inside, self.checkpoint)

    @property
    def current_load(self) -> PlannedLoad:
        """What is loaded for a chunk that is."""
        load = self.current_chunk.load
        assert load is not None, f"nothing is loaded for {self.request_id!r}"
        return load

    def extra_keys(
        self, first: int, end: int, block_size: int
    ) -> tuple[tuple[Any, ...] | None, ...] | None:
        """Return what else than tokens the hashes of blocks are made of, for listeners."""
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

    def tokens(self, start: int, end: int) -> TokenArray:
        """Return known tokens from ``start`` to ``end``, int32."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        tail = np.array(self.generated[max(start - split, 0) : end - split], dtype=np.int32)
        return tail if start >= split else np.concatenate((self.prompt[start:], tail))

    def fork(
        self, request_id: Hashable, last_token: int, computed: BlockHashChain
    ) -> ActiveRequest:
        """Return a request of the same computed tokens and another last one; it has no row yet."""
        return ActiveRequest(
            replace(self.request, request_id=request_id),
            self.prompt,
            computed.copy(),
            self.wanted_boundaries,
            array("i", [*self.generated[:-1], last_token]),
            state_position=self.state_position,
            num_published=self.num_published,
            prompt_seen=self.prompt_seen,
            prompt_seen_below=self.prompt_seen_below,
        )


def check_hint(will_continue: Any, source: Any) -> None:
    """Check what a sender says of a prompt, as ``Request`` has it."""
    _check_optional_bool("will_continue", will_continue)
    check_hashable("source", source)


def _check_optional_bool(name: str, value: Any) -> None:
    if not (value is None or isinstance(value, bool)):
        raise InvalidArgumentError(f"{name} must be True, False or None, got {value!r}")


def check_positions(positions: Iterable[int]) -> tuple[int, ...]:
    """Return token positions that a caller gives, checked."""
    if type(positions) is tuple and not positions:
        return ()
    try:
        given = list(positions)
    except TypeError:
        raise InvalidArgumentError(
            f"checkpoint_positions must be a collection of ints, got {positions!r}"
        ) from None
    return tuple(check_int("checkpoint_positions", position, minimum=0) for position in given)
