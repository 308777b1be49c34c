"""Requests: what a caller asks for, and what the context keeps of each while it runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from mamba_cache._checks import check_int
from mamba_cache.blocks import BlockHashChain, BlockHashes
from mamba_cache.context.matching import MissReason
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.slots import SlotLease

__all__ = [
    "ActiveRequest",
    "Admission",
    "Checkpoint",
    "Chunk",
    "PreparedRequest",
    "Request",
    "RequestProgress",
    "RequestStatus",
    "TokenArray",
    "check_positions",
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
            for; two prompts match only where the keys agree.
        checkpoint_positions: Positions at which others are expected to branch off, such as the end
            of a system prompt, in tokens. A state is saved at the block boundary at or before
            each, in the prompt or in the answer, beside those that the placement chooses.
    """

    request_id: Hashable
    prompt_tokens: Any
    cache_salt: str | bytes | None = None
    lora_id: str | int | None = None
    multimodal_keys: Sequence[tuple[int, str | bytes]] = ()
    checkpoint_positions: Sequence[int] = ()

    def __post_init__(self) -> None:
        positions = check_positions(self.checkpoint_positions)
        object.__setattr__(self, "checkpoint_positions", positions)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """A request whose tokens are checked and hashed, so that it can be matched again cheaply.

    Made by ``DynamicInferenceContext.prepare``.

    Attributes:
        request: The request.
        tokens: [prompt length] int32 prompt tokens, on the CPU; read-only.
        hashes: Hashes of the prompt's complete blocks; none if prefix caching is off.
    """

    request: Request
    tokens: TokenArray
    hashes: BlockHashes
    _chain: BlockHashChain = field(repr=False)
    _maker: object = field(repr=False)

    def chain_for(self, maker: object) -> BlockHashChain:
        """Return the chain of block hashes, which the caller copies before it grows.

        Args:
            maker: What made this, to prove that its settings are the caller's.

        Raises:
            InvalidArgumentError: Another context made it: its blocks, limits or secret may differ.
        """
        if self._maker is not maker:
            raise InvalidArgumentError(
                f"request {self.request.request_id!r} was prepared by another context; "
                "prepare it with the one that runs it"
            )
        return self._chain


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


class RequestProgress(NamedTuple):
    """How far a request is.

    Attributes:
        status: Where it stands.
        num_computed: Tokens whose effect is in its live state, or will be restored to it.
        num_generated: Tokens that it generated, as far as they are collected.
    """

    status: RequestStatus
    num_computed: int
    num_generated: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that a step saves.

    Attributes:
        position: The boundary, in tokens from the sequence's start.
        slot: The slot reserved for it.
    """

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the next step does for one request.

    Attributes:
        start: First token that is computed.
        num_tokens: How many are computed. Of a decoding request some may turn out not to be part
            of the sequence.
        is_first: The live state must be restored or zeroed before.
        lease: The slot to restore from, if any.
        inside: Checkpoints inside the chunk; the forward writes them.
        boundary: The checkpoint copied from the live state at commit: at the end of a prefill
            chunk, or where a decoding request may get to.
        epoch: The epoch of the slots in which the checkpoints were reserved.
        drafts: Of a decoding request. None: they are known on the device alone.
    """

    start: int
    num_tokens: int
    is_first: bool = False
    lease: SlotLease | None = None
    inside: tuple[Checkpoint, ...] = ()
    boundary: Checkpoint | None = None
    epoch: int = 0
    drafts: tuple[int, ...] | None = ()

    @property
    def end(self) -> int:
        """The position after the last computed token."""
        return self.start + self.num_tokens

    def shares_boundary(self, other: Chunk) -> bool:
        """Say whether both may reach the same checkpoint, so that one slot does for both."""
        return (self.boundary, self.epoch) == (other.boundary, other.epoch)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """All checkpoints of the chunk."""
        return self.inside if self.boundary is None else (*self.inside, self.boundary)


@dataclass(frozen=True, slots=True)
class Admission:
    """What ``add_request`` found and planned.

    Attributes:
        request_id: The request's name.
        prompt_tokens: Tokens of the prompt (of prompt and answer so far, for a resumed request).
        kv_matched_blocks: Blocks found cached.
        state_matched_blocks: How many of them lie before the restored state.
        skip_tokens: Tokens that are not computed again.
        chunk_tokens: Tokens computed in the next step.
        miss_reason: Why nothing was skipped; None if something was.
    """

    request_id: Hashable
    prompt_tokens: int
    kv_matched_blocks: int
    state_matched_blocks: int
    skip_tokens: int
    chunk_tokens: int
    miss_reason: MissReason | None


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """The context's record of a request that is not finished.

    Attributes:
        request: The caller's request.
        prompt: [prompt length] int32 prompt tokens.
        chain: Block hashes of all tokens known so far.
        is_cached: Whether prefix caching is on; if not, the chain stays empty.
        generated: Tokens sampled so far.
        status: Where it stands.
        row: Its row of the block table and the live states; -1 while preempted.
        block_ids: Its KV blocks, in order.
        num_computed: Tokens whose effect is in the live state.
        state_position: The farthest position, in tokens, at which a state of it is saved to stay.
        num_shared_blocks: Leading blocks that were found cached; their keys and values are not
            written again.
        num_published: Leading blocks whose hashes were offered to others.
        num_shared_tokens: Tokens in those blocks.
        chunk: What the next step, or the one in flight, does for it.
        uncollected: What the last step did for it while it decoded, if the device alone knows how
            many of the tokens became part of the sequence.
        num_releases: How often it gave its memory back: what a step sampled for it before counts
            no longer.
        checkpoint_positions: Positions beside the placement's at which to save a state.
        admission: What its last admission found; None once that is counted.
        decode_lease: The newest state saved while it decoded.
    """

    request: Request
    prompt: TokenArray
    chain: BlockHashChain
    is_cached: bool = True
    generated: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PREEMPTED
    row: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    state_position: int = 0
    num_shared_blocks: int = 0
    num_shared_tokens: int = 0
    num_published: int = 0
    chunk: Chunk | None = None
    uncollected: Chunk | None = None
    num_releases: int = 0
    checkpoint_positions: tuple[int, ...] = ()
    admission: Admission | None = None
    decode_lease: SlotLease | None = None

    @property
    def request_id(self) -> Hashable:
        """The caller's name for the request."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and what was sampled."""
        return len(self.prompt) + len(self.generated)

    @property
    def most_computed(self) -> int:
        """``num_computed``, or what it may be by what the device alone knows."""
        return self.num_computed + (self.uncollected.num_tokens if self.uncollected else 0)

    @property
    def open_chunks(self) -> list[Chunk]:
        """Its chunks whose outcome is not known; a checkpoint that two may reach is the later's."""
        before, chunk = self.uncollected, self.chunk
        if before is not None and chunk is not None and chunk.shares_boundary(before):
            before = replace(before, boundary=None)
        return [chunk for chunk in (before, chunk) if chunk is not None]

    @property
    def current_chunk(self) -> Chunk:
        """The chunk of a request that is scheduled or in flight."""
        assert self.chunk is not None, f"{self.request_id!r} is in no step"
        return self.chunk

    @property
    def current_admission(self) -> Admission:
        """What the admission found of a request whose first step is not committed."""
        assert self.admission is not None, f"{self.request_id!r} is not newly admitted"
        return self.admission

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the last known token, so that the next one is sampled."""
        return self.current_chunk.end == self.num_tokens

    def tokens(self, start: int, end: int) -> TokenArray:
        """Return the tokens from ``start`` to ``end``, int32."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        tail = np.array(self.generated[max(start - split, 0) : end - split], dtype=np.int32)
        return tail if start >= split else np.concatenate((self.prompt[start:], tail))

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """Add sampled tokens, and hash the blocks that they complete, if any."""
        self.generated += tokens
        if self.is_cached:
            self.chain.append(tokens)

    def wanted_boundaries(self, block_size_tokens: int) -> set[int]:
        """Return the block boundaries at which the caller wants a state."""
        return {p // block_size_tokens * block_size_tokens for p in self.checkpoint_positions}

    def want_checkpoints(self, positions: Sequence[int]) -> None:
        """Add positions at which to save a state.

        Raises:
            InvalidArgumentError: One is not an int >= 0.
        """
        self.checkpoint_positions += check_positions(positions)


def check_positions(positions: Iterable[int]) -> tuple[int, ...]:
    """Return token positions that a caller gives, checked.

    Raises:
        InvalidArgumentError: They are no collection of ints >= 0.
    """
    try:
        given = list(positions)
    except TypeError:
        raise InvalidArgumentError(
            f"checkpoint_positions must be a collection of ints, got {positions!r}"
        ) from None
    return tuple(check_int("checkpoint_positions", position, minimum=0) for position in given)
