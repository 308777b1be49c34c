"""Settings of the cache, checked when they are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, Literal, get_args

from mamba_cache._checks import (
    INT32_MAX,
    check_choice,
    check_int,
    check_kind,
    check_names,
    check_number,
    check_secret,
)
from mamba_cache.errors import InvalidArgumentError

__all__ = [
    "MAX_INTERMEDIATE_OFFSETS_PER_REQUEST",
    "CacheConfig",
    "EvictionPolicy",
    "HashAlgorithm",
    "SlotPolicyName",
]

MAX_INTERMEDIATE_OFFSETS_PER_REQUEST = 3
"""Maximum number of checkpoints inside one prefill chunk of one request."""

_MAX_GB = 2.0**33
"""Number of GiB in an address space of 63 bits."""

HashAlgorithm = Literal["blake2b", "sha256", "xxh3_128"]
"""Hash functions of block digests (docs/explanation/guarantees.md)."""

SlotPolicyName = Literal["adaptive", "lru"]


class EvictionPolicy(str, Enum):
    """When cached KV blocks, and the slots that belong to them, are evicted.

    The members compare equal to their string values, so an engine's own enum of the same values
    can be used instead.
    """

    LRU = "lru"
    """Keep unreferenced blocks, and evict the least recently used when room is needed."""

    REF_ZERO = "ref_zero"
    """Deregister a block when its last reference is released."""


def _setting(default: Any, check: Callable[[str, Any], Any], **options: Any) -> Any:
    """Declare a setting; ``check`` returns the value in the type that is stored."""
    return field(default=default, metadata={"check": check}, **options)


def _count(default: int | None, minimum: int = 1, maximum: int = INT32_MAX) -> Any:
    return _setting(default, partial(check_int, minimum=minimum, maximum=maximum))


def _number(default: float | None, maximum: float = _MAX_GB) -> Any:
    return _setting(default, partial(check_number, maximum=maximum))


def _one_of(choices: Sequence[str]) -> dict[str, Any]:
    return {"check": partial(check_choice, choices=choices)}


def _flag(default: bool) -> Any:
    return _setting(default, partial(check_kind, kind=bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of the cache that do not depend on the model's layers.

    Attributes:
        block_size_tokens: Number of tokens of one KV block; a multiple of ``ssm_chunk_size``.
        max_requests: Maximum number of running requests, each with a row of live states.
        max_tokens: Maximum number of tokens computed in one step, over all requests.
        max_sequence_length: Maximum number of prompt and generated tokens of one request.
        cache_gb: One budget in GiB (2**30 bytes) for KV blocks and slots, instead of
            ``kv_cache_gb`` and ``mamba_cache_gb``. It is divided when the context is made
            (docs/how-to/settings.md).
        state_share: Share of ``cache_gb`` for slots, from 0 to 1.
        kv_cache_gb: Budget for KV blocks in GiB.
        num_kv_blocks: Number of KV blocks without the dummy block, instead of ``kv_cache_gb``.
        mamba_cache_gb: Budget for slots in GiB.
        max_slots: Number of slots for saved states, instead of ``mamba_cache_gb``. 0: no state is
            saved; this is the default without prefix caching.
        ssm_chunk_size: Number of tokens of one chunk of the model's SSM kernel.
        enable_prefix_caching: If False, no prefix is matched and no state is saved.
        eviction_policy: When KV blocks without references are evicted.
        slot_policy: Which saved states are evicted first, if the context gets no policy object.
            "adaptive" learns which states are used again, and evicts KV blocks with their states;
            "lru" evicts the least recently used. None: "adaptive"; under REF_ZERO any state.
        vocab_size: Upper bound of token ids, exclusive. None: 2**31.
        min_computed_tokens: Number of prompt tokens that are computed even if all are cached.
            Kernels that cannot start from the last token alone need more than one.
        max_checkpoints_per_step: Maximum number of checkpoints inside the prefill chunks of one
            step; more are skipped and counted. Default: three for each request.
        save_decode_states: Save a state when decoding crosses a block boundary, so that the next
            turn of a conversation reuses the answer.
        reuse_answers: Publish the KV blocks that decoding fills. If False, an answer that comes
            back in a prompt is computed again, and no state is saved while decoding. That is for
            models that compute a single token differently from a prompt.
        num_speculative_tokens: Maximum number of drafts of a decoding request in one step. If not
            0, each request has ``live_rows_per_request`` live states, one for each outcome.
        slot_quantization: "int8" stores SSM states in slots in 8 bits: two to four times the slots
            in the same budget, but a hit no longer equals a miss. None: stored unchanged.
        quantized_tensors: Names of the state tensors that ``slot_quantization`` applies to. Each
            is floating-point, [heads, head_dim, state_dim] in a layer.
        host_cache_gb: Budget in GiB for a tier of KV blocks and states in host memory, pinned if a
            GPU copies from it. No tier if this and both host counts are None.
        host_state_share: Share of ``host_cache_gb`` for states, from 0 to 1; the rest is for KV.
        num_host_blocks: Number of KV blocks in the host tier, instead of ``host_cache_gb``.
        num_host_states: Number of states in the host tier, instead of ``host_cache_gb``.
        disk_cache_path: Directory for a tier on disk below the host tier. Its entries outlive the
            process; it needs an identity of model and weights.
        disk_cache_gb: Maximum size in GiB of all files below ``disk_cache_path``.
        write_on_use: 2: an entry is written to disk and store at its second use; 1: as soon as it
            is in the host tier.
        verify_hits: Share of the hits that ``verify_pending`` computes again without the cache and
            compares, from 0 to 1. 0: none.
        max_pinned_share: Maximum share of KV blocks, and of slots, that all pins hold, from 0 to 1.
        store: A store that several processes share, as a tier below the host tier and the disk: a
            ``stores.BlobStore``, or the URL of one. It needs ``hash_secret``, the same in all
            processes, and an identity of model and weights.
        hash_algorithm: Hash function of block digests. "blake2b" is keyed with ``hash_secret``: a
            client cannot craft a prompt that matches another one. "sha256" is as safe, with
            digests of 32 bytes. "xxh3_128" is fast, but safe only if every client is trusted.
        hash_secret: Key of the block digests, not empty. Default: a random key for each process;
            with ``disk_cache_path`` a random key that is kept in a file there. Processes that share
            entries need the same key.

    Raises:
        InvalidArgumentError: A value is out of range, or two settings contradict each other.
    """

    block_size_tokens: int = _count(256)
    max_requests: int = _count(64, maximum=INT32_MAX // MAX_INTERMEDIATE_OFFSETS_PER_REQUEST)
    max_tokens: int = _count(8192)
    max_sequence_length: int = _count(32768)
    cache_gb: float | None = _number(None)
    state_share: float = _number(0.25, 1)
    kv_cache_gb: float | None = _number(None)
    num_kv_blocks: int | None = _count(None, maximum=INT32_MAX - 1)
    mamba_cache_gb: float | None = _number(None)
    max_slots: int | None = _count(None, 0)
    ssm_chunk_size: int = _count(256)
    enable_prefix_caching: bool = _flag(True)
    eviction_policy: EvictionPolicy = field(
        default=EvictionPolicy.LRU, metadata=_one_of([each.value for each in EvictionPolicy])
    )
    slot_policy: SlotPolicyName | None = field(
        default=None, metadata=_one_of(get_args(SlotPolicyName))
    )
    vocab_size: int | None = _count(None)
    min_computed_tokens: int = _count(1)
    max_checkpoints_per_step: int | None = _count(None, 0)
    save_decode_states: bool = _flag(True)
    reuse_answers: bool = _flag(True)
    num_speculative_tokens: int = _count(0, 0)
    slot_quantization: Literal["int8"] | None = field(default=None, metadata=_one_of(["int8"]))
    quantized_tensors: tuple[str, ...] = _setting(("ssm",), check_names)
    host_cache_gb: float | None = _number(None)
    host_state_share: float = _number(0.75, 1)
    num_host_blocks: int | None = _count(None, 0)
    num_host_states: int | None = _count(None, 0)
    disk_cache_path: str | None = None
    disk_cache_gb: float | None = _number(None)
    write_on_use: int = _count(2, 1, 2)
    verify_hits: float = _number(0.0, 1)
    max_pinned_share: float = _number(0.25, 1)
    store: Any = field(default=None, repr=False)  # its URL may hold a password
    hash_algorithm: HashAlgorithm = field(
        default="blake2b", metadata=_one_of(get_args(HashAlgorithm))
    )
    hash_secret: bytes | None = _setting(None, check_secret, repr=False)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, check = getattr(self, setting.name), setting.metadata.get("check")
            if check is not None and (value is not None or setting.default is not None):
                object.__setattr__(self, setting.name, check(setting.name, value))
        if self.max_checkpoints_per_step is None:
            limit = MAX_INTERMEDIATE_OFFSETS_PER_REQUEST * self.max_requests
            object.__setattr__(self, "max_checkpoints_per_step", limit)
        if not self.enable_prefix_caching and self.max_slots is self.mamba_cache_gb is None:
            object.__setattr__(self, "max_slots", 0)
        object.__setattr__(self, "eviction_policy", EvictionPolicy(self.eviction_policy))
        self._check_budgets()
        self._check_tiers()
        self._check_blocks()
        if self.verify_hits and self.slot_quantization is not None:
            raise InvalidArgumentError(
                "verify_hits needs slots that keep states unchanged: with slot_quantization="
                f"{self.slot_quantization!r} a hit differs from a miss by design"
            )

    @property
    def checkpoints_per_step(self) -> int:
        """``max_checkpoints_per_step`` with its default applied."""
        assert self.max_checkpoints_per_step is not None
        return self.max_checkpoints_per_step

    @property
    def max_decode_tokens(self) -> int:
        """Maximum tokens of a decoding request in one step: the last sampled token and drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def live_rows_per_request(self) -> int:
        """Number of rows of one request in the live states.

        With drafts: one for the state before the step, and one for the state after each token.
        """
        return 1 + self.max_decode_tokens if self.num_speculative_tokens else 1

    @property
    def kv_budget_gb(self) -> float | None:
        """GiB for KV blocks: ``kv_cache_gb``, or the share of ``cache_gb`` that slots leave."""
        if self.cache_gb is None:
            return self.kv_cache_gb
        return self.cache_gb * (1 - self.state_share if self.enable_prefix_caching else 1)

    @property
    def slot_budget_gb(self) -> float | None:
        """GiB for slots: ``mamba_cache_gb``, or their share of ``cache_gb``."""
        return self.mamba_cache_gb if self.cache_gb is None else self.cache_gb * self.state_share

    @property
    def has_host_tier(self) -> bool:
        """Whether there is a host tier."""
        return self.host_cache_gb is not None or self.num_host_states is not None

    @property
    def max_blocks_per_request(self) -> int:
        """Number of KV blocks of a sequence of ``max_sequence_length`` tokens."""
        return -(-self.max_sequence_length // self.block_size_tokens)

    def _check_budgets(self) -> None:
        for size, count in (("kv_cache_gb", "num_kv_blocks"), ("mamba_cache_gb", "max_slots")):
            gb = getattr(self, size)
            if gb is not None and self.cache_gb is not None:
                raise InvalidArgumentError(f"give cache_gb or {size}, not both")
            if gb is not None and getattr(self, count) is not None:
                raise InvalidArgumentError(f"give {size} (GiB) or {count}, not both")
            if gb is None and getattr(self, count) is None and self.cache_gb is None:
                raise InvalidArgumentError(
                    f"give {size} (GiB) or {count}, or cache_gb for both budgets; all are None"
                )
        has_counts = self.num_host_blocks is not None, self.num_host_states is not None
        if self.host_cache_gb is None and any(has_counts) and not all(has_counts):
            raise InvalidArgumentError(
                "give host_cache_gb (GiB), or both num_host_blocks and num_host_states, "
                f"got {self.num_host_blocks} and {self.num_host_states}"
            )

    def _check_tiers(self) -> None:
        if (self.disk_cache_path is None) != (self.disk_cache_gb is None):
            raise InvalidArgumentError(
                "give both disk_cache_path and disk_cache_gb (GiB), "
                f"got {self.disk_cache_path!r} and {self.disk_cache_gb!r}"
            )
        if not isinstance(self.disk_cache_path, str | os.PathLike | None) or (
            self.disk_cache_path == ""  # os.fspath would make it the current folder
        ):
            raise InvalidArgumentError(
                f"disk_cache_path must be a path, got {self.disk_cache_path!r}"
            )
        if self.disk_cache_path is not None:
            object.__setattr__(self, "disk_cache_path", os.fspath(self.disk_cache_path))
        if not isinstance(self.store, str | None) and not hasattr(self.store, "get_many_into"):
            raise InvalidArgumentError(
                "store must be a stores.BlobStore or the URL of one, got "
                f"{type(self.store).__name__}"  # not its repr, which may hold a password
            )
        for name in ("disk_cache_path", "store"):
            if getattr(self, name) is not None and not self.has_host_tier:
                raise InvalidArgumentError(
                    f"{name} needs a host tier, through which its entries are copied: give "
                    "host_cache_gb (GiB)"
                )

    def _check_blocks(self) -> None:
        if self.block_size_tokens % self.ssm_chunk_size:
            raise InvalidArgumentError(
                f"block_size_tokens must be a multiple of ssm_chunk_size ({self.ssm_chunk_size}), "
                f"got {self.block_size_tokens}: a checkpoint at a block boundary would fall inside "
                "a chunk, and a hit would differ from a miss"
            )
        # With one step uncollected, a request's length is uncertain by two steps' tokens. At most
        # one block boundary may lie within them.
        if self.num_speculative_tokens and 2 * self.max_decode_tokens > self.block_size_tokens:
            raise InvalidArgumentError(
                f"num_speculative_tokens must be at most block_size_tokens / 2 - 1 "
                f"({self.block_size_tokens // 2 - 1}), got {self.num_speculative_tokens}: the "
                "tokens of two steps must fit in a block"
            )
