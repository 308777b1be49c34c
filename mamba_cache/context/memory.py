"""The memory of a cache: KV blocks, slots, pins that keep prompts cached, and statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._checks import check_kind, check_number, check_room
from mamba_cache._guard import CallGuard, guarded, weak_callback
from mamba_cache._torch import check_device_room
from mamba_cache.cache import (
    SLOT_POLICIES,
    CheckpointPlacement,
    KVBlockAllocator,
    RefZeroSlotPolicy,
    SlotEvictionPolicy,
    SlotLease,
    SlotPool,
)
from mamba_cache.cache.kv_block_allocator import BYTES_PER_BLOCK
from mamba_cache.cache.rows import as_rows
from mamba_cache.cache.sequence import MissReason, PrefixIndex, Request
from mamba_cache.config import CacheConfig, EvictionPolicy
from mamba_cache.context.tiering import NoTiers
from mamba_cache.context.verification import HitVerifier, PrefixContent
from mamba_cache.errors import (
    BlockCapacityError,
    BudgetError,
    InvalidArgumentError,
    InvariantError,
    MambaSlotCapacityError,
    MissingStateError,
)
from mamba_cache.protocols import SlotContext
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import (
    KVCacheSpec,
    SlotQuantization,
    StateSpec,
    slots_in_budget,
)
from mamba_cache.tiers.entry import EntryKind

__all__ = ["CacheMemory", "CacheStats", "Pin", "Pins"]

_LONGEST = 1e9
_ADVICE = "unpin another prompt, or raise max_pinned_share"


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A handle of a pinned prompt.

    Attributes:
        num_tokens: Length of the pinned prefix, which requests can skip.
        expires_at: Time of the clock at which the pin ends; None: only ``unpin`` ends it.
    """

    num_tokens: int
    expires_at: float | None
    _lease: SlotLease = field(repr=False)
    _block_ids: tuple[int, ...] = field(repr=False)


class Pins:
    """Holds blocks and slots of pinned prompts, up to a share of all blocks and slots.

    A pin holds the prompt's blocks and the slot of its last state. Other states on these blocks can
    still be evicted.
    """

    def __init__(
        self,
        kv_blocks: KVBlockAllocator,
        slots: SlotPool,
        *,
        max_share: float,
        clock: Callable[[], float],
    ) -> None:
        self._kv_blocks = kv_blocks
        self._slots = slots
        self._max_share = max_share
        self._clock = clock
        self.held: dict[Pin, None] = {}  # oldest first
        self._soonest = math.inf  # time at which the next pin ends
        self._expire_due = weak_callback(self.expire_due)
        self.references: npt.NDArray[np.int32] = np.zeros(kv_blocks.pool_size, np.int32)
        """[pool_size] number of pins that hold each block."""

    @property
    def _guard(self) -> CallGuard:
        return self._kv_blocks._guard

    @property
    def current(self) -> tuple[Pin, ...]:
        """The pins that have not ended, oldest first."""
        now = self._clock()
        return tuple(pin for pin in self.held if not self._is_over(pin, now))

    @property
    def leases(self) -> list[SlotLease]:
        """The lease of each pin."""
        return [pin._lease for pin in self.held]

    @guarded(nests=True)
    def add(
        self, block_ids: Sequence[int], num_tokens: int, ttl_seconds: float | None = None
    ) -> Pin:
        """Pin a cached prompt."""
        if ttl_seconds is not None:
            ttl_seconds = check_number("ttl_seconds", ttl_seconds, maximum=_LONGEST)
        if not block_ids:
            raise MissingStateError(
                "nothing of the prompt is cached: run it first, with its end in "
                "checkpoint_positions if longer prompts begin with it"
            )
        self.expire()
        blocks = as_rows(block_ids)
        slot = self._slots.slot_of(block_ids[-1])
        self._check_share(blocks, slot)
        expires_at = None if ttl_seconds is None else self._clock() + ttl_seconds
        self._guard.is_changing = True
        lease = self._slots.pin(slot)
        try:
            self._kv_blocks.hold(blocks)
        except BaseException:
            self._slots.unpin(lease)
            raise
        pin = Pin(num_tokens, expires_at, lease, tuple(block_ids))
        self._slots.pin_references = self.references
        self.references[blocks] += 1
        self.held[pin] = None
        self._look_ahead()
        return pin

    def _check_share(self, blocks: npt.NDArray[np.intp], slot: int) -> None:
        """Check that all pins with a further one stay within their share."""
        num_new = int(np.count_nonzero(self.references[blocks] == 0))
        max_blocks = int(self._max_share * (self._kv_blocks.pool_size - 1))
        left = max_blocks - int(np.count_nonzero(self.references))
        if num_new > left:
            raise BlockCapacityError(num_new, left, f"for pins; {_ADVICE}")
        slots = {lease.slot for lease in self.leases}
        if slot not in slots and len(slots) >= int(self._max_share * self._slots.max_slots):
            raise MambaSlotCapacityError(1, 0, f"for pins; {_ADVICE}")

    @guarded(nests=True)
    def remove(self, pin: Pin) -> None:
        """End a pin; ignore a pin that has ended already."""
        check_kind("pin", pin, Pin)
        self.expire()
        if pin in self.held:
            self._end(pin)

    def expire_due(self) -> None:
        """End expired pins. The guard calls this before each call, while a pin has an expiry."""
        if self._soonest <= self._clock():
            self.expire()

    @guarded(nests=True)
    def expire(self) -> None:
        """End the pins that have expired, and the pins whose states were removed."""
        now = self._clock()
        for pin in [pin for pin in self.held if self._is_over(pin, now)]:
            self._end(pin)

    def forget(self) -> None:
        """Forget all pins, after the owner of blocks and slots has reset them."""
        self.held.clear()
        self._look_ahead()
        self.references.fill(0)

    def check_invariants(self) -> None:
        """Check that ``references`` has the blocks of all pins."""
        references = np.zeros_like(self.references)
        for pin in self.held:
            references[list(pin._block_ids)] += 1
        if not np.array_equal(references, self.references):
            raise InvariantError("the references of pins are not those of their blocks")

    def _look_ahead(self) -> None:
        ends = (pin.expires_at for pin in self.held if pin.expires_at is not None)
        self._soonest = min(ends, default=math.inf)
        self._guard.first = self._expire_due if self._soonest < math.inf else None

    def _is_over(self, pin: Pin, now: float) -> bool:
        is_late = pin.expires_at is not None and now >= pin.expires_at
        return is_late or not self._slots.is_current(pin._lease)

    def _end(self, pin: Pin) -> None:
        self._guard.is_changing = True
        del self.held[pin]
        self._slots.unpin(pin._lease)
        self._look_ahead()
        self.references[list(pin._block_ids)] -= 1
        self._kv_blocks.release(as_rows(pin._block_ids))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheStats:
    """Counters since the context was made or reset, and present numbers of blocks and slots.

    A request is counted when its first step is committed. A request that is aborted and added again
    counts once. Each hit restores one state.

    Any thread may read the statistics, also during a call. Then the present numbers may contradict
    each other.

    Attributes:
        requests: Requests that began to run; a resumed request counts again.
        hits: Requests that skipped tokens.
        misses: Requests that skipped no tokens, by reason.
        kv_matched_blocks: Blocks found cached.
        state_matched_blocks: Blocks skipped because a state was restored.
        skipped_tokens: Prompt tokens not computed again.
        computed_tokens: Tokens computed in committed steps, prefill and decode, including drafts
            that were not accepted. Decoded tokens count once their step is collected.
        saved_states: States that were published.
        refused_states: States not saved because the slots' policy rated others higher.
        skipped_checkpoints: States not saved because no slot or no room in the step was left.
        unwritten_states: States not published because a layer of the model did not hand over its
            part: 0, unless there is a bug in the model's layers.
        evicted_blocks: Cached KV blocks evicted to make room.
        evicted_slots: Saved states evicted to make room.
        aborted_steps: Steps that were aborted.
        preemptions: Calls of ``preempt``, without requests of aborted steps.
        self_resets: How often a ``PrefixCache`` reset itself, after an exception of another package
            during a change of its bookkeeping.
        forks: Requests made by ``fork``, which count in ``requests`` only when resumed.
        free_blocks: Present number of empty KV blocks.
        cached_blocks: Present number of KV blocks with a prefix and without references.
        used_blocks: Present number of KV blocks with references.
        free_slots: Present number of empty slots.
        reserved_slots: Present number of slots reserved for states that are not written yet.
        cached_slots: Present number of slots with a state.
        bytes_per_slot: Size of one slot in bytes.
        bypasses: Calls of a ``PrefixCache`` that neither used nor filled the cache, by reason:
            "forward hook", "replaced method", "registered function" and "foreign attribute" for
            foreign code in the model, "hidden tokens" for a mask that hides tokens of a prompt.
    """

    requests: int
    hits: int
    misses: Mapping[str, int]
    kv_matched_blocks: int
    state_matched_blocks: int
    skipped_tokens: int
    computed_tokens: int
    saved_states: int
    refused_states: int
    skipped_checkpoints: int
    unwritten_states: int
    evicted_blocks: int
    evicted_slots: int
    aborted_steps: int
    preemptions: int
    self_resets: int
    forks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    free_slots: int
    reserved_slots: int
    cached_slots: int
    bytes_per_slot: int
    bypasses: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the requests that skipped tokens, from 0 to 1; 0 before the first request."""
        return self.hits / self.requests if self.requests else 0.0

    def __repr__(self) -> str:
        counts = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = [f"hit_rate={self.hit_rate:.3g}", *(f"{k}={v}" for k, v in counts.items() if v)]
        return f"CacheStats({', '.join(shown)})"


class CacheMemory:
    """KV blocks and slots with their tensors, and the index, pins and verifier over them.

    A context makes its own memory, or shares that of an owner that computes prefixes of the same
    model. Such an owner shares one guard with the context, and holds no blocks or slots while a
    call of the context runs. An owner copies a state as soon as it is found. So its slots may be
    evicted while their blocks are held: the state that a prompt resumes from makes room for the
    state at the prompt's end.
    """

    def __init__(
        self,
        config: CacheConfig,
        state_spec: StateSpec,
        kv_spec: KVCacheSpec | None,
        *,
        device: torch.device,
        policy: SlotEvictionPolicy | None,
        placement: CheckpointPlacement,
        clock: Callable[[], float],
        is_owners: bool = False,
    ) -> None:
        quantization, slot_spec = None, state_spec
        if config.slot_quantization is not None:
            quantization = SlotQuantization(config.quantized_tensors)
            slot_spec = quantization.slot_spec(state_spec)
        num_slots = config.max_slots if config.enable_prefix_caching else 0
        if num_slots is None:
            assert config.slot_budget_gb is not None
            num_slots = slots_in_budget(config.slot_budget_gb, slot_spec)
        pool_size = _kv_pool_size(config, kv_spec)
        block_bytes = kv_spec.bytes_per_block(config.block_size_tokens) if kv_spec else 0
        given = ("cache_gb", "kv_cache_gb", "num_kv_blocks", "mamba_cache_gb", "max_slots")
        settings = {name: getattr(config, name) for name in given}
        check_room(pool_size * BYTES_PER_BLOCK, settings)
        num_bytes = pool_size * block_bytes + num_slots * slot_spec.bytes_per_slot
        check_device_room(num_bytes, settings, device)
        self.config, self._placement, self._clock = config, placement, clock
        self.bytes_per_slot = slot_spec.bytes_per_slot
        self.counters: Counter[str] = Counter()
        self.kv_blocks = KVBlockAllocator(
            pool_size,
            eviction_policy=config.eviction_policy,
            enable_prefix_caching=config.enable_prefix_caching,
            as_tensor=None if is_owners else torch.from_numpy,
        )
        self.kv_cache: torch.Tensor | None = None
        if kv_spec is not None:
            self.kv_cache = kv_spec.allocate(pool_size, config.block_size_tokens, device)
        embedding = SimpleNamespace(  # until the context is embedded
            kv_block_allocator=self.kv_blocks,
            device=device,
            max_requests=config.max_requests,
            max_mamba_intermediate_states_per_step=0,
        )
        if policy is None:
            is_ref_zero = config.eviction_policy is EvictionPolicy.REF_ZERO
            policy_of = RefZeroSlotPolicy if is_ref_zero else SLOT_POLICIES["adaptive"]
            policy = SLOT_POLICIES.get(config.slot_policy or "", policy_of)()
        slots = MambaSlotAllocator.from_spec(
            cast(SlotContext, embedding),
            num_slots,
            state_spec,
            policy=policy,
            quantization=quantization,
            evicts_held=is_owners,
        )
        self.use(slots)

    def use(self, slots: SlotPool) -> None:
        """Use these slots, over the same KV blocks; create pins, verifier and index for them."""
        config = self.config
        self.slots = slots
        share = config.max_pinned_share
        self.pins = Pins(self.kv_blocks, slots, max_share=share, clock=self._clock)
        self.verifier = HitVerifier(
            config.verify_hits,
            self.kv_blocks,
            slots,
            block_size_tokens=config.block_size_tokens,
            read=weak_callback(self.read),
            remove=weak_callback(self._remove),
        )
        self.index = PrefixIndex(
            self.kv_blocks,
            slots,
            block_size_tokens=config.block_size_tokens,
            placement=self._placement,
            counters=self.counters,
            tiers=NoTiers(),
            on_counted=self.verifier.admitted if config.verify_hits else None,
        )

    @property
    def _guard(self) -> CallGuard:
        return self.kv_blocks._guard

    @property
    def allocator(self) -> MambaSlotAllocator:
        """The slots with tensors; an owner may have released the tensors."""
        assert isinstance(self.slots, MambaSlotAllocator), "the tensors are released"
        return self.slots

    def join(self, guard: CallGuard) -> None:
        """Use ``guard`` for blocks, slots and index."""
        self.kv_blocks.join(guard)
        self.slots.join(guard)
        self.index.join(guard)

    def read(self, slot: int, blocks: list[int], num_tokens: int) -> PrefixContent:
        """Return the saved state of a prefix, and the KV of its tokens."""
        states = {name: t[:, slot] for name, t in self.allocator.states.tensors.items()}
        if self.kv_cache is None:
            return PrefixContent(states)
        return PrefixContent(states, self.kv_cache[:, :, blocks].flatten(2, 3)[:, :, :num_tokens])

    @guarded(nests=True, changes=True)
    def _remove(self, kind: EntryKind, block: int, request: Request, digest: bytes) -> None:
        """Remove an entry from the GPU and from all tiers."""
        if kind is EntryKind.STATE:
            self.slots.invalidate_block(block)
        else:
            self.kv_blocks.deregister_blocks([block])
        self.index.tiers.remove(kind, request.cache_salt, digest)

    def clear(self) -> None:
        """Remove all prefixes and pins, and reset all counters."""
        # Slots first: kv_blocks.reset calls them, and their tables may contradict each other.
        self.slots.reset()
        self.pins.forget()
        self.kv_blocks.reset()
        self.counters.clear()
        self.verifier.reset()

    def stats(self) -> CacheStats:
        """Return counters of the cache and its present contents."""
        counters, kv_blocks, slots = self.counters, self.kv_blocks, self.slots
        known: dict[str, Any] = {
            "misses": {reason.value: n for reason in MissReason if (n := counters[reason])},
            "refused_states": slots.refused_states_total,
            "skipped_checkpoints": slots.skipped_checkpoints_total,
            "evicted_blocks": kv_blocks.evicted_blocks_total,
            "evicted_slots": slots.evicted_slots_total,
            "free_blocks": kv_blocks.num_free_blocks,
            "cached_blocks": kv_blocks.num_cached_blocks,
            "used_blocks": kv_blocks.num_used_blocks,
            "free_slots": slots.free_count,
            "reserved_slots": slots.num_reserved_slots,
            "cached_slots": slots.num_cached_slots,
            "bytes_per_slot": self.bytes_per_slot,
            "bypasses": {},
        }
        counted = {each.name: counters[each.name] for each in fields(CacheStats)}
        return CacheStats(**counted | known)


def _kv_pool_size(config: CacheConfig, kv_spec: KVCacheSpec | None) -> int:
    """Return the number of KV blocks in the pool, with the dummy block."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks + 1
    if kv_spec is None:
        raise InvalidArgumentError(
            "kv_cache_gb and cache_gb need kv_spec for the size of a block: give kv_spec, or "
            "num_kv_blocks"
        )
    budget = config.kv_budget_gb
    assert budget is not None
    block_bytes = kv_spec.bytes_per_block(config.block_size_tokens)
    if not block_bytes:
        raise InvalidArgumentError(
            "a model without attention has no KV blocks to measure in kv_cache_gb or cache_gb: "
            "give num_kv_blocks"
        )
    num_blocks = int(budget * 2**30) // block_bytes
    if num_blocks < 2:
        raise BudgetError(
            f"kv_cache_gb={budget} GiB is too small: it must be at least "
            f"{2 * block_bytes / 2**30} GiB, for one KV block of {block_bytes} bytes and the dummy "
            "block that padding is written to"
        )
    return num_blocks
