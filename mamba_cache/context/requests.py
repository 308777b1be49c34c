"""Requests: preparation (checks and hashes), and the records of running requests."""

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
    """A request whose tokens are checked and hashed, for several matches.

    Made by ``DynamicInferenceContext.prepare``.

    Attributes:
        request: The request.
        tokens: [prompt length] int32 prompt tokens, on the CPU; read-only.
        chain: The hash chain behind ``hashes``; do not append to it.
    """

    request: Request
    tokens: TokenArray
    chain: BlockHashChain = field(repr=False)
    _maker: object = field(repr=False)

    @property
    def hashes(self) -> BlockHashes:
        """Hashes of the prompt's complete blocks; empty if prefix caching is disabled."""
        return self.chain.hashes


class RequestPreparer:
    """Checks tokens and hashes their blocks, by a context's settings."""

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._hasher = BlockHasher(config.hash_algorithm, config.hash_secret)
        # Keys, tokens and chain of the last request: the next one often begins with equal tokens.
        # One tuple, so that the three belong together even after an interrupt.
        self._last_read: tuple[tuple[object, ...], TokenArray, BlockHashChain] | None = None

    def read(
        self, request: Request | PreparedRequest
    ) -> tuple[Request, TokenArray, BlockHashChain]:
        """Return a request, its checked tokens, and the hash chain of its complete blocks."""
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
            tokens = tokens.copy()  # the caller may overwrite its array
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
        """Return the hash chain of a request's complete blocks; empty without prefix caching.

        The common prefix with the last request of equal keys is not hashed again.
        """
        size, salt, lora_id = self._config.block_size_tokens, request.cache_salt, request.lora_id
        # With types: 1 and True are equal, and other keys of two types may be.
        keys, start = (type(salt), salt, type(lora_id), lora_id, request.multimodal_keys), 0
        last = self._last_read
        if last is not None and last[0] == keys:
            # Most prompts differ in the first block; comparing it alone takes a tenth of the time.
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
        """Return whether all ints of an array of any shape are token ids."""
        # One pass: the bitwise or of all ids is a valid id if and only if each id is valid.
        bits, limit = int(np.bitwise_or.reduce(array, axis=None)), self._config.vocab_size
        is_below = limit is None or bits < limit or int(array.max()) < limit
        return 0 <= bits <= MAX_TOKEN_ID and is_below

    def read_tokens(self, tokens: object) -> TokenArray:
        """Return checked tokens as an int32 array, which may share their memory."""
        array: TokenArray = as_token_array(tokens)
        limit = self._config.vocab_size
        if limit is not None and len(array) and int(array.max()) >= limit:
            raise InvalidArgumentError(
                f"token ids must be below vocab_size ({limit}), got {int(array.max())}"
            )
        return array


def _num_alike(tokens: TokenArray, others: TokenArray) -> int:
    """Return the length of the common prefix of two prompts; neither is empty."""
    count = min(len(tokens), len(others))
    differs = tokens[:count] != others[:count]
    first = int(differs.argmax())
    return first if differs[first] else count


class RequestStatus(Enum):
    """Status of a request between two steps."""

    SCHEDULED = "scheduled"
    """The request has a chunk for the next step."""

    PREFILLING = "prefilling"
    """The request needs ``schedule_prefill`` for its next chunk."""

    DECODING = "decoding"
    """The request decodes, one token in each step, or several with drafts."""

    PREEMPTED = "preempted"
    """The request has released its memory; ``resume_request`` admits it again."""


@dataclass(slots=True, eq=False)
class PlannedLoad:
    """A load from the host tier that a request's first chunk resumes from."""

    leases: list[RowLease]  # on the host rows: of KV blocks in order, then of the state
    first_block: int  # index in the request of the first loaded block
    blocks: list[int] = field(default_factory=list)  # the KV blocks that are loaded
    checkpoint: Checkpoint | None = None
    ticket: Ticket | None = None  # of the copies, once they are enqueued
    first_job: int = 0  # index of this request's first copy in the ticket
    is_damaged: bool | None = None  # whether the loaded bytes are wrong; None: not verified yet

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks among ``leases``."""
        return len(self.leases) - 1

    @property
    def current_checkpoint(self) -> Checkpoint:
        """The checkpoint that the state is loaded to, once its slot is reserved."""
        assert self.checkpoint is not None, "admission has reserved the slot"
        return self.checkpoint


@dataclass(slots=True, eq=False)
class Chunk:
    """The tokens of a request's prompt that the next step computes.

    A chunk does not change once its step has begun.
    """

    row: int  # the request's row in the block tables
    start: int  # number of tokens of the sequence before the chunk
    token_ids: TokenArray  # [n] tokens of the chunk
    first_writable: int = 0  # keys and values before this position are shared, and not written
    is_first: bool = False  # whether the live state must be restored or zeroed first
    samples: bool = False  # whether the chunk ends at the last known token: the next is sampled
    lease: SlotLease | None = None  # on the slot to restore from, if any
    inside: tuple[Checkpoint, ...] = ()  # checkpoints inside the chunk; the forward writes them
    boundary: Checkpoint | None = None  # checkpoint at the chunk's end, if any
    load: PlannedLoad | None = None  # a load from a tier, instead of ``lease``

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
        """All checkpoints of the chunk, including a loaded one."""
        computed = self.inside if self.boundary is None else (*self.inside, self.boundary)
        if self.load is None or self.load.checkpoint is None:
            return computed
        return (self.load.checkpoint, *computed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(PrefixMatch):
    """The result of ``add_request``: the match, and the first chunk.

    For a resumed request the answer so far counts as part of the prompt.

    Attributes:
        request_id: Id of the request.
        chunk_tokens: Number of tokens computed in the next step.
    """

    request_id: Hashable
    chunk_tokens: int


@dataclass(slots=True, eq=False)
class ActiveRequest(CachedSequence):
    """The record of an unfinished request; a steady decoding step uses only its row."""

    request_id: Hashable = field(init=False)  # the caller's id
    status: RequestStatus = RequestStatus.PREEMPTED
    row: int = -1  # row in ``RequestTable`` and of the live states; -1 while preempted
    chunk: Chunk | None = None
    checkpoint: Checkpoint | None = None  # the planned checkpoint of a decoding request
    admission: Admission | None = None  # until the hit or miss is counted
    decode_lease: SlotLease | None = None  # on the newest state saved while decoding

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    @property
    def current_chunk(self) -> Chunk:
        """The chunk of a request that is scheduled or in flight."""
        assert self.chunk is not None, f"{self.request_id!r} is in no step"
        return self.chunk

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The planned checkpoints, each with a reserved slot."""
        inside = () if self.chunk is None else self.chunk.checkpoints
        return inside if self.checkpoint is None else (*inside, self.checkpoint)

    @property
    def current_load(self) -> PlannedLoad:
        """The load of a chunk that has one."""
        load = self.current_chunk.load
        assert load is not None, f"nothing is loaded for {self.request_id!r}"
        return load
