"""Requests: what a caller asks for, and what the context keeps of each while it runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from mamba_cache._torch import ZERO_SOURCE
from mamba_cache.cache import (
    MAX_TOKEN_ID,
    BlockHashChain,
    BlockHasher,
    BlockHashes,
    SlotLease,
    as_token_array,
)
from mamba_cache.cache.sequence import (
    CachedSequence,
    Checkpoint,
    PrefixMatch,
    Request,
    TokenArray,
)
from mamba_cache.config import CacheConfig
from mamba_cache.context.tier_memory import Ticket
from mamba_cache.errors import InvalidArgumentError, SequenceLengthError
from mamba_cache.tiers.rows import RowLease

__all__ = [
    "ActiveRequest",
    "Admission",
    "Chunk",
    "PlannedLoad",
    "PreparedRequest",
    "RequestPreparer",
    "RequestStatus",
]


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
    """Checks of tokens, and hashes of their blocks, by a context's settings."""

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._hasher = BlockHasher(config.hash_algorithm, config.hash_secret)
        # Keys, tokens and chain of the last request: those that come together often begin alike.
        # One tuple: after an interrupt, too, they belong together.
        self._last_read: tuple[tuple[object, ...], TokenArray, BlockHashChain] | None = None

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
        tokens: TokenArray = self.read_tokens(request.prompt_tokens)
        if not isinstance(request.prompt_tokens, (list, tuple)):
            tokens = tokens.copy()  # the caller may write into theirs
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
        tokens.setflags(write=False)  # the hashes are of just these tokens
        return request, tokens, self._chain_of(request, tokens)

    def _chain_of(self, request: Request, tokens: TokenArray) -> BlockHashChain:
        """Return the chain of a request's complete blocks; of none if prefix caching is off.

        What it has in common with the last request of the same keys is not hashed again.
        """
        size, salt, lora_id = self._config.block_size_tokens, request.cache_salt, request.lora_id
        # 1 and True are equal, and so may other keys of two types be.
        keys, start = (type(salt), salt, type(lora_id), lora_id, request.multimodal_keys), 0
        last = self._last_read
        if last is not None and last[0] == keys:
            # Most prompts differ in their first block, which is compared in a tenth of the time.
            if tokens[:size].tobytes() == last[1][:size].tobytes():
                start = _num_alike(tokens, last[1]) // size * size
            chain = last[2].copy(start // size)
        else:
            chain = BlockHashChain(
                size,
                hasher=self._hasher,
                cache_salt=salt,
                lora_id=lora_id,
                multimodal_keys=request.multimodal_keys,
            )
        if self._config.enable_prefix_caching:
            chain.append_checked(tokens[start:])
            self._last_read = keys, tokens, chain
        return chain

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


def _num_alike(tokens: TokenArray, others: TokenArray) -> int:
    """Return with how many of the same tokens two prompts begin; none is empty."""
    count = min(len(tokens), len(others))
    differs = tokens[:count] != others[:count]
    first = int(differs.argmax())
    return first if differs[first] else count


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
class ActiveRequest(CachedSequence):
    """What is kept of a request beside its row: what a steady decoding step needs nothing of."""

    request_id: Hashable = field(init=False)  # the caller's name for it
    status: RequestStatus = RequestStatus.PREEMPTED
    row: int = -1  # its row of ``RequestTable`` and of the live states; -1 while preempted
    chunk: Chunk | None = None
    checkpoint: Checkpoint | None = None  # where it may save a state while it decodes
    admission: Admission | None = None  # until it is counted
    decode_lease: SlotLease | None = None  # the newest state saved while it decoded

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

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
