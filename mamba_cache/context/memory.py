"""What the memory of a context is made of: KV blocks, slots, and pins that keep prompts there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._checks import check_kind, check_number, check_room
from mamba_cache._guard import CallGuard, guarded, weak_callback
from mamba_cache._torch import check_device_room
from mamba_cache.cache import (
    SLOT_POLICIES,
    KVBlockAllocator,
    RefZeroSlotPolicy,
    SlotEvictionPolicy,
    SlotLease,
    SlotPool,
)
from mamba_cache.cache.kv_block_allocator import BYTES_PER_BLOCK
from mamba_cache.cache.rows import as_rows
from mamba_cache.cache.sequence import PrefixIndex
from mamba_cache.config import CacheConfig, EvictionPolicy
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

__all__ = ["CacheMemory", "Pin", "Pins", "make_memory"]

_LONGEST = 1e9
_ADVICE = "unpin another prompt, or raise max_pinned_share"


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A prompt that stays cached.

    Attributes:
        num_tokens: Tokens that a request which begins with it need not compute.
        expires_at: When it ends, as the clock reads then; None: when it is given back.
    """

    num_tokens: int
    expires_at: float | None
    _lease: SlotLease = field(repr=False)
    _block_ids: tuple[int, ...] = field(repr=False)


class Pins:
    """Holds blocks and slots of pinned prompts, up to a share of all.

    Of a pinned prompt its blocks are held, and the slot of its last state is pinned. Other states
    on its blocks may be evicted as before.
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
        self.held: dict[Pin, None] = {}  # the oldest first
        self._soonest = math.inf  # when the next pin ends
        self._expire_due = weak_callback(self.expire_due)
        self.references: npt.NDArray[np.int32] = np.zeros(kv_blocks.pool_size, np.int32)
        """[pool_size] how many pins hold each block."""

    @property
    def _guard(self) -> CallGuard:
        return self._kv_blocks._guard

    @property
    def current(self) -> tuple[Pin, ...]:
        """The pins that are not over, the oldest first."""
        now = self._clock()
        return tuple(pin for pin in self.held if not self._is_over(pin, now))

    @property
    def leases(self) -> list[SlotLease]:
        """The slots that are pinned, each as often as it is."""
        return [pin._lease for pin in self.held]

    @guarded(nests=True)
    def add(
        self, block_ids: Sequence[int], num_tokens: int, ttl_seconds: float | None = None
    ) -> Pin:
        """Pin a prompt that is cached."""
        if ttl_seconds is not None:
            ttl_seconds = check_number("ttl_seconds", ttl_seconds, maximum=_LONGEST)
        if not block_ids:
            raise MissingStateError(
                "nothing of the prompt is cached: run it first, with a checkpoint at its end if "
                "longer ones begin with it"
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
        """Check that a further pin holds no more than pins may."""
        num_new = int(np.count_nonzero(self.references[blocks] == 0))
        most = int(self._max_share * (self._kv_blocks.pool_size - 1))
        left = most - int(np.count_nonzero(self.references))
        if num_new > left:
            raise BlockCapacityError(num_new, left, f"for pins; {_ADVICE}")
        slots = {lease.slot for lease in self.leases}
        if slot not in slots and len(slots) >= int(self._max_share * self._slots.max_slots):
            raise MambaSlotCapacityError(1, 0, f"for pins; {_ADVICE}")

    @guarded(nests=True)
    def remove(self, pin: Pin) -> None:
        """End a pin; one that is over already is passed over."""
        check_kind("pin", pin, Pin)
        self.expire()
        if pin in self.held:
            self._end(pin)

    def expire_due(self) -> None:
        """End the pins whose time is up. The guard calls it in each call while one has an end."""
        if self._soonest <= self._clock():
            self.expire()

    @guarded(nests=True)
    def expire(self) -> None:
        """End the pins whose time is up, and those whose states were removed."""
        now = self._clock()
        for pin in [pin for pin in self.held if self._is_over(pin, now)]:
            self._end(pin)

    def forget(self) -> None:
        """Forget all pins: the owner of the blocks and slots has taken all of them back."""
        self.held.clear()
        self._look_ahead()
        self.references.fill(0)

    def check_invariants(self) -> None:
        """Prove that the references are those of the pins."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMemory:
    """KV blocks and slots, their tensors, and what is kept of them.

    A context makes its own, or runs over that of an owner who computes prefixes of the same model.
    An owner puts both behind a guard and holds none of them while a call of the context runs,
    beside what is cached.
    """

    slots: MambaSlotAllocator  # over the KV blocks; the context is embedded in them
    kv_cache: torch.Tensor | None
    pins: Pins
    counters: Counter[str] = field(default_factory=Counter)
    index: PrefixIndex | None = None  # over both, the owner's; None: the context makes one


def make_memory(
    config: CacheConfig,
    state_spec: StateSpec,
    kv_spec: KVCacheSpec | None,
    *,
    device: torch.device,
    policy: SlotEvictionPolicy | None,
    clock: Callable[[], float],
    is_owners: bool = False,
) -> CacheMemory:
    """Make the memory of a context, or with ``is_owners`` that of an owner who shares it with one.

    An owner reads a state by a copy that is enqueued at once. So a slot may be evicted although its
    block is held: the state that a prompt resumes from makes room for the one at its end.
    """
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
    kv_blocks = KVBlockAllocator(
        pool_size,
        eviction_policy=config.eviction_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        as_tensor=None if is_owners else torch.from_numpy,
    )
    kv_cache = None
    if kv_spec is not None:
        kv_cache = kv_spec.allocate(kv_blocks.pool_size, config.block_size_tokens, device)
    fields = SimpleNamespace(  # until the context is embedded
        kv_block_allocator=kv_blocks,
        device=device,
        max_requests=config.max_requests,
        max_mamba_intermediate_states_per_step=0,
    )
    if policy is None:
        is_ref_zero = config.eviction_policy is EvictionPolicy.REF_ZERO
        policy_of = RefZeroSlotPolicy if is_ref_zero else SLOT_POLICIES["adaptive"]
        policy = SLOT_POLICIES.get(config.slot_policy or "", policy_of)()
    slots = MambaSlotAllocator.from_spec(
        cast(SlotContext, fields),
        num_slots,
        state_spec,
        policy=policy,
        quantization=quantization,
        evicts_held=is_owners,
    )
    pins = Pins(kv_blocks, slots, max_share=config.max_pinned_share, clock=clock)
    return CacheMemory(slots=slots, kv_cache=kv_cache, pins=pins)


def _kv_pool_size(config: CacheConfig, kv_spec: KVCacheSpec | None) -> int:
    """Return the KV blocks of the pool, the dummy block included."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks + 1
    if kv_spec is None:
        raise InvalidArgumentError(
            "kv_cache_gb and cache_gb need kv_spec, which says how large a block is: give it, or "
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
