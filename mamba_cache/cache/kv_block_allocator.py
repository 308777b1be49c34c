"""The pool of KV blocks: reference counts, the tree of cached prefixes, and eviction order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import (
    INT32_MAX,
    as_ids,
    check_choice,
    check_int,
    check_kind,
    check_room,
    require_all,
)
from mamba_cache._guard import CallGuard, guarded, query
from mamba_cache.cache.hashing import BlockHashes, as_token_array, hash_id_of
from mamba_cache.cache.rows import NONE, EvictionQueue, RowIds, Rows, add_at, as_rows
from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import (
    BlockCapacityError,
    HashConflictError,
    InvalidArgumentError,
    UnknownBlockError,
)
from mamba_cache.events import Listeners, Removed, Stored

if TYPE_CHECKING:
    from mamba_cache.cache.slot_pool import SlotPool

__all__ = ["BYTES_PER_BLOCK", "KVBlockAllocator"]

_FEW = 8
"""Maximum number of blocks for which a loop is faster than whole-array arithmetic."""

BYTES_PER_BLOCK = 52
"""Size of the arrays' items for one block."""

_LAST_RESORT = 1 << 62
"""Added to the timestamp of a block that is to be evicted after all others."""


class KVBlockAllocator:
    """A pool of KV blocks with reference counts; cached blocks are found by their hash.

    A block is *free*, *used* (its reference count is positive) or *cached* (without references, but
    registered under a hash, so that a later request can use it again). A registered block is a node
    of a tree: its parent is the block before it. A child without its parent could not be matched,
    so deregistering a block deregisters all its descendants.

    Cached blocks are evicted to make room: least recently used first, children before their parent.
    A parent with used children is evicted last. Such a child belongs to a request that computed the
    parent's tokens into a private block.

    Recency is counted in calls, not seconds, so equal calls always give equal blocks. A call with k
    blocks takes O(k log n) time for n cached blocks.

    After an exception of another package during a change, every call raises ``PoisonedError`` until
    ``reset``, which is the context's ``reset`` if the blocks belong to a context.

    Args:
        pool_size: Number of blocks in the pool, >= 2. The last one is the dummy block, which
            padding refers to: it is never allocated and cannot be released.
        eviction_policy: LRU keeps cached blocks; REF_ZERO deregisters a block when its last
            reference is released.
        enable_prefix_caching: If False, no block is ever registered or found.
        as_tensor: Converts the three public arrays, such as ``torch.from_numpy``. The result must
            share their memory.

    Attributes:
        pool_size: As given.
        dummy_block_id: ``pool_size - 1``.
        block_ref_counts: [pool_size] int32, CPU. References to each block. Read only.
        block_timestamps: [pool_size] int64, CPU. The call that last allocated, retained or released
            each block. Read only.
        block_hashes: [pool_size] int64, CPU. The hash id that each block is registered under, -1
            for none. Read only.
        listeners: Receivers of ``Stored`` and ``Removed`` for blocks, and for slots over them.
        before_reset: Called first by ``reset``, which a user of the blocks can refuse by raising;
            or None.
        evicted_blocks_total: Number of cached blocks evicted to make room.

    Raises:
        InvalidArgumentError: ``pool_size`` is not an int >= 2, or the policy is unknown.
        BudgetError: The machine's memory does not hold the arrays.
    """

    def __init__(
        self,
        pool_size: int,
        *,
        eviction_policy: EvictionPolicy = EvictionPolicy.LRU,
        enable_prefix_caching: bool = True,
        as_tensor: Callable[[Any], Any] | None = None,
    ) -> None:
        check_choice("eviction_policy", eviction_policy, [p.value for p in EvictionPolicy])
        self.pool_size = check_int("pool_size", pool_size, minimum=2, maximum=INT32_MAX)
        check_room(BYTES_PER_BLOCK * self.pool_size, {"pool_size": pool_size})
        self.dummy_block_id = self.pool_size - 1
        self.eviction_policy = EvictionPolicy(eviction_policy)
        self.enable_prefix_caching = enable_prefix_caching
        self.listeners = Listeners()
        self.before_reset: Callable[[], object] | None = None
        self._guard = CallGuard(self)
        self._find_slots: Callable[[], SlotPool | None] = lambda: None
        self._follows_states = False
        # Cached blocks without cached children; blocks with used children are evicted last. If
        # states are followed, blocks with a state may be missing: see ``_evict``.
        self._leaves = EvictionQueue()
        self._timestamps = np.empty(self.pool_size, np.int64)
        # The node of each registered block. A block at a sequence's start is a child of the dummy
        # block. Children are a linked list, newest first, that -1 ends.
        self._hashes = np.empty(self.pool_size, np.int64)  # NONE for an unregistered block
        self._digests = np.empty(self.pool_size, object)
        links = np.empty((4, self.pool_size), np.int32)
        self._parents, self._first_children, self._next, self._previous = links
        self._num_cached_children = np.zeros(self.pool_size, np.int32)
        # Single elements are read and written several times faster through memoryviews.
        self.hash_at, self._used_at = self._hashes.data, self._timestamps.data
        self._parent_at, self._first_child_at, self._next_at, self._previous_at = (
            link.data for link in links
        )
        self._cached_children_at = self._num_cached_children.data
        self._rows = Rows("block", self.dummy_block_id, self._hashes)
        self._refs_at = self._rows.ref_at
        as_tensor = as_tensor or (lambda array: array)
        self.block_ref_counts = as_tensor(self._rows.refs)
        self.block_timestamps = as_tensor(self._timestamps)
        self.block_hashes = as_tensor(self._hashes)
        self._clear()

    def join(self, guard: CallGuard) -> None:
        """Use ``guard``, which the blocks then share with other objects."""
        self._guard = guard

    def _clear(self) -> None:
        self._timestamps.fill(0)
        self._block_of: dict[bytes, int] = {}  # by digest
        self._hashes.fill(NONE)
        self._digests.fill(None)
        self._first_child_at[self.dummy_block_id] = NONE
        self._cached_children_at[self.dummy_block_id] = 0
        self._rows.clear()
        self._rows.free[:] = np.arange(self.dummy_block_id)[::-1]  # lower ids are taken first
        self._leaves.clear()
        self._num_cached = 0
        self._clock = 0
        self.evicted_blocks_total = 0

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that are neither used nor cached."""
        return self._rows.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks without references that are registered under a hash."""
        return self._num_cached

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks with references."""
        return self.pool_size - 1 - self.num_free_blocks - self.num_cached_blocks

    def attach_slots(self, slots: SlotPool) -> None:
        """Free the slots of blocks whenever the blocks are deregistered; ``SlotPool`` calls it.

        Only a weak reference is kept, and only to the slots attached last. If their policy uses
        prompts, blocks with states are evicted after blocks without, in the order of their worth.
        """
        if self._follows_states:  # blocks that had states in the former slots are not queued
            self._offer(np.arange(self.dummy_block_id))
        self._find_slots = ref(slots)
        self._follows_states = slots.prompt_policy is not None

    @guarded(nests=True)
    def allocate_memory_blocks(self, num_blocks: int) -> list[int]:
        """Allocate blocks with one reference each: free blocks first, then evicted blocks.

        Raises:
            InvalidArgumentError: ``num_blocks`` is not an int >= 0.
            BlockCapacityError: Too few blocks are free or evictable; nothing is changed.
        """
        num_blocks = check_int("num_blocks", num_blocks, minimum=0)
        self._guard.is_changing = True
        return self.take(num_blocks)

    def take(self, num_blocks: int) -> list[int]:
        """Do what ``allocate_memory_blocks`` does, for a context that holds the guard.

        Raises:
            BlockCapacityError: Too few blocks are free or evictable; nothing is changed.
        """
        num_short = num_blocks - self._rows.num_free
        if num_short > self._num_cached:
            raise BlockCapacityError(num_blocks, self._rows.num_free + self._num_cached)
        if num_short > 0:
            # No block leaks if a listener raises: the victims are free, and none was taken.
            self._evict(num_short)
        blocks = self._rows.take(num_blocks)[::-1]
        self._touch(blocks)
        block_ids: list[int] = blocks.tolist()
        return block_ids

    @guarded(nests=True)
    def retain_memory_blocks(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, used or cached; a block named twice gets two.

        Raises:
            UnknownBlockError: A block is free or out of range; nothing is changed.
        """
        blocks = self._checked(block_ids)
        self._guard.is_changing = True
        self.hold(blocks)

    def hold(self, blocks: RowIds) -> None:
        """Do what ``retain_memory_blocks`` does, for a context that holds the guard."""
        reused = self._rows.hold(blocks)
        self._touch(blocks)
        if len(reused):
            self._num_cached -= len(reused)
            self._leaves.discard(reused.tolist())
            self._offer(self._count_cached(reused, -1))

    @guarded(nests=True)
    def release_memory_blocks(self, block_ids: Iterable[int]) -> None:
        """Release one reference to each block; a block named twice loses two.

        A block without references is cached if it is registered, else free.

        Raises:
            UnknownBlockError: A block id is out of range; nothing is changed.
            DoubleFreeError: A block has fewer references than are released; nothing is changed.
        """
        blocks = self._checked(block_ids)
        self._guard.is_changing = True
        self.release(blocks)

    def release(self, blocks: RowIds) -> None:
        """Do what ``release_memory_blocks`` does, for a context that holds the guard."""
        cached = self._rows.release(blocks)
        self._touch(blocks)
        if not len(cached):
            return
        self._num_cached += len(cached)
        self._leaves.discard(self._count_cached(cached, 1).tolist())
        self._offer(cached)
        if self.eviction_policy is EvictionPolicy.REF_ZERO:
            self._deregister(cached.tolist())

    def _touch(self, blocks: RowIds) -> None:
        """Set the timestamps of blocks to now."""
        self._clock += 1
        self._timestamps[blocks] = self._clock

    @guarded(nests=True)
    def register_kv_block_hashes(
        self,
        block_ids: Iterable[int],
        block_hashes: BlockHashes,
        *,
        parent_digest: bytes | None = None,
        tokens: Any = None,
    ) -> list[int | None]:
        """Make consecutive blocks of one sequence findable by their hashes.

        Call this when the work that fills the blocks is enqueued. A repeated call changes nothing.

        Args:
            block_ids: Blocks that are used, or cached under the same hash.
            block_hashes: Hash of each block.
            parent_digest: Digest of the block before the first one; None at a sequence's start.
            tokens: Tokens of the blocks for listeners, equally many in each block, of any type that
                ``compute_block_hashes`` takes. Only needed if ``listeners.wants(Stored)``.

        Returns:
            For each block the block that is registered under its hash: the block itself; or another
            one that was registered earlier, then this block stays private; or None, if the block
            before is not registered, the digest belongs to another prefix, or caching is disabled.

        Raises:
            InvalidArgumentError: Lengths differ, the hashes are no ``BlockHashes``,
                ``parent_digest`` is not ``bytes``, or the tokens are no ids or not equally many.
            UnknownBlockError: A block is free or out of range.
            HashConflictError: A block has another hash already, or is named with two hashes.
        """
        blocks = self._checked(block_ids)
        ids: list[int] = blocks.tolist()
        self._rows.without_references(blocks)
        tokens = _check_registration(ids, block_hashes, tokens)
        digests = block_hashes.digests
        _check_carried_digests(ids, self._digests[blocks].tolist(), digests)
        if parent_digest is not None:
            check_kind("parent_digest", parent_digest, bytes)
        self._guard.is_changing = True
        holders = self.register(ids, digests, list(block_hashes), parent_digest, tokens=tokens)
        self.listeners.tell()
        return holders

    def register(
        self,
        block_ids: list[int],
        digests: Sequence[bytes],
        hash_ids: Sequence[int],
        parent_digest: bytes | None,
        *,
        tokens: npt.NDArray[np.int32] | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
    ) -> list[int | None]:
        """Do what ``register_kv_block_hashes`` does, but only queue the events.

        For a context that holds the guard: its blocks are used, and have no other digests.
        """
        block_of, count = self._block_of, len(block_ids)
        parent = self.dummy_block_id
        if parent_digest is not None:
            parent = block_of.get(parent_digest, NONE)
        if not self.enable_prefix_caching or parent == NONE:
            return [None] * count
        holders = self.find_prefix(digests)
        start = end = len(holders)
        # Descendants are deregistered with a block, so no known block follows a new one. A digest
        # that is known here is forged (xxh3_128), and the blocks after it cannot be matched.
        while end < count and digests[end] not in block_of:
            block_of[digests[end]] = block_ids[end]
            end += 1
        if start < end:
            added = slice(start, end)
            parent = holders[-1] if holders else parent
            self._add_chain(block_ids[added], digests[added], hash_ids[added], parent)
            if self.listeners.wants(Stored):
                details: dict[str, Any] = {"parent_digest": self._digests[parent]}
                if extra_keys is not None:
                    details["extra_keys"] = tuple(extra_keys[added])
                if tokens is not None:  # copied: the caller may overwrite them
                    size = len(tokens) // count
                    own = tokens[start * size : end * size].copy()
                    details |= {"tokens": own, "block_size_tokens": size}
                stored = Stored("block", (*block_ids[added],), (*digests[added],), **details)
                self.listeners.put(stored)
        return [*holders, *block_ids[start:end], *[None] * (count - end)]

    @query
    def match_prefix(self, hashes: BlockHashes) -> list[int]:
        """Return the longest run of registered blocks from the start of ``hashes``.

        Retain the blocks to keep them from eviction.

        Raises:
            InvalidArgumentError: ``hashes`` is not a ``BlockHashes``; hash ids alone do not prove
                that contents are equal.
        """
        return self.find_prefix(_check_hashes(hashes).digests)

    def find_prefix(self, digests: Iterable[bytes]) -> list[int]:
        """Do what ``match_prefix`` does, for a context that holds the guard."""
        found = map(self._block_of.get, digests)
        return list(iter(found.__next__, None))  # up to the first unregistered digest

    @query
    def find_block(self, digest: bytes) -> int | None:
        """Return the block registered under a digest, or None.

        Raises:
            InvalidArgumentError: The digest is not ``bytes``.
        """
        return self._block_of.get(check_kind("digest", digest, bytes))

    @guarded(nests=True)
    def deregister_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks and their descendants unfindable.

        Cached blocks become free. Used blocks only lose their hash.

        Raises:
            UnknownBlockError: A block id is out of range; nothing is changed.
        """
        blocks = self._checked(block_ids)
        self._guard.is_changing = True
        registered = blocks[self._hashes[blocks] != NONE]
        self._deregister(list(dict.fromkeys(registered.tolist())))

    @guarded(nests=True, renews=True)
    def reset(self) -> None:
        """Return to the initial state: every block is free and has no references.

        Listeners stay, and get one ``Removed`` for all registered blocks. In a context the call
        raises ``StepOrderError`` while requests or pins hold blocks.
        """
        if self.before_reset is not None:
            self.before_reset()
        with self._guard.ending(self.listeners, renews=True):
            digests, block_ids = tuple(self._block_of), tuple(self._block_of.values())
            self._free_states(block_ids)
            self._clear()
            self.listeners.put(Removed("block", block_ids, digests, is_reset=True))

    def _checked(self, block_ids: Iterable[int]) -> RowIds:
        """Return checked block ids; the dummy block is out of range."""
        return as_rows(as_ids("block_ids", block_ids, self.dummy_block_id, error=UnknownBlockError))

    # Registration. The methods below check nothing: callers check arguments and set is_changing.

    def _add_chain(
        self, block_ids: list[int], digests: Sequence[bytes], hash_ids: Sequence[int], parent: int
    ) -> None:
        """Make unregistered blocks a chain of nodes below ``parent``."""
        if len(block_ids) <= _FEW:
            for block_id, digest, hash_id in zip(block_ids, digests, hash_ids, strict=True):
                self.hash_at[block_id], self._digests[block_id] = hash_id, digest
                self._cached_children_at[block_id], self._first_child_at[block_id] = 0, NONE
                self._attach(block_id, parent)
                parent = block_id
            return
        blocks = as_rows(block_ids)
        self._hashes[blocks], self._digests[blocks] = hash_ids, digests
        self._parents[blocks[1:]], self._first_children[blocks[:-1]] = blocks[:-1], blocks[1:]
        self._next[blocks] = self._previous[blocks] = NONE
        self._num_cached_children[blocks] = 0
        self._first_child_at[block_ids[-1]] = NONE
        self._attach(block_ids[0], parent)

    def _attach(self, block_id: int, parent: int) -> None:
        """Make a used block the first child of its parent, which is then evicted last."""
        following = self._first_child_at[parent]
        self._parent_at[block_id], self._first_child_at[parent] = parent, block_id
        self._next_at[block_id], self._previous_at[block_id] = following, NONE
        if following != NONE:
            self._previous_at[following] = block_id
        if not self._refs_at[parent] and self.hash_at[parent] != NONE:
            self._offer([parent])

    # Eviction.

    def offer_for_eviction(self, block_ids: Sequence[int]) -> None:
        """Queue blocks that lost their states, where they are evictable; ``SlotPool`` calls it."""
        if self._follows_states:
            self._offer(block_ids)

    def _offer(self, blocks: RowIds | Sequence[int]) -> None:
        """Queue the blocks that are cached and have no cached children."""
        for block_id in self._leaves_of(blocks):
            self._leaves.push(block_id, self._priority_of(block_id))

    def _priority_of(self, block_id: int) -> int:
        """Return the eviction priority of a cached block without cached children."""
        has_children = self._first_child_at[block_id] != NONE  # used children only
        return self._used_at[block_id] + (_LAST_RESORT if has_children else 0)

    def _leaves_of(self, blocks: npt.NDArray[Any] | Sequence[int]) -> list[int]:
        """Return the blocks, of [n] given, that are cached and have no cached children."""
        if len(blocks) > _FEW:
            blocks = np.asarray(blocks)
            uses = self._rows.refs[blocks] | self._num_cached_children[blocks]
            blocks = blocks[uses == 0]
        refs, children, hashes = self._refs_at, self._cached_children_at, self.hash_at
        ids = blocks.tolist() if isinstance(blocks, np.ndarray) else blocks
        return [b for b in ids if not refs[b] and not children[b] and hashes[b] != NONE]

    def _count_cached(self, blocks: RowIds, step: int) -> RowIds:
        """Add ``step`` to the parents' counts of cached children; return the parents."""
        parents = self._parents[blocks].astype(np.intp)
        if len(parents) > _FEW:
            add_at(self._num_cached_children, parents, step)
        else:
            for parent in parents.tolist():
                self._cached_children_at[parent] += step
        return parents

    def _evict(self, num_blocks: int) -> None:
        """Evict cached blocks, of which there are enough, and notify listeners.

        If states are followed, blocks without a state are evicted first, by recency. These are
        leaves, so no state is lost with them. Then the slots' policy chooses the state to evict.
        """
        slots = self._find_slots() if self._follows_states else None
        if self._follows_states and slots is None:  # the slots were deleted, with their states
            self._follows_states = False
            self._offer(np.arange(self.dummy_block_id))
        victims: list[int] = []
        leaf: tuple[int, float] | None = None  # the parent of the last victim, if it can go now
        while len(victims) < num_blocks:
            block_id, priority = NONE, float(_LAST_RESORT)
            if leaf or self._leaves:
                block_id, priority = self._leaves.push_pop(*leaf) if leaf else self._leaves.pop()
                leaf = None
                if slots is not None and slots.slot_of(block_id) >= 0:
                    continue  # slots.free_cheapest finds it
            if slots is not None and priority >= _LAST_RESORT:
                chosen = slots.free_cheapest(self._leaves_of)
                if chosen is not None:
                    self._leaves.discard([chosen])  # freeing the state has queued the block
                    if block_id != NONE:
                        self._leaves.push(block_id, priority)
                    block_id = chosen
            victims.append(block_id)
            parent = self._detach(block_id)
            is_cached = self.hash_at[parent] != NONE and not self._refs_at[parent]
            if is_cached and not self._cached_children_at[parent]:
                leaf = parent, self._priority_of(parent)
        if leaf is not None:
            self._leaves.push(*leaf)
        self.evicted_blocks_total += self._forget(victims)
        self.listeners.tell()

    def _detach(self, block_id: int) -> int:
        """Remove a registered block from its parent's children; return the parent."""
        parent = self._parent_at[block_id]
        before, after = self._previous_at[block_id], self._next_at[block_id]
        if before == NONE:
            self._first_child_at[parent] = after
        else:
            self._next_at[before] = after
        if after != NONE:
            self._previous_at[after] = before
        if not self._refs_at[block_id]:
            self._cached_children_at[parent] -= 1
        return parent

    def _deregister(self, block_ids: list[int]) -> None:
        """Make registered blocks and their descendants unfindable, and notify listeners."""
        parents = [self._detach(block_id) for block_id in block_ids]
        self._forget(block_ids)
        self._offer(parents)
        self.listeners.tell()

    def _forget(self, block_ids: list[int]) -> int:
        """Make detached blocks and descendants unfindable; return the number that became free."""
        block_ids = list(block_ids)
        for block_id in block_ids:  # grows in the loop
            child = self._first_child_at[block_id]
            while child != NONE:
                block_ids.append(child)
                child = self._next_at[child]
        self._free_states(block_ids)
        blocks = as_rows(block_ids)
        digests = self._digests[blocks].tolist()
        if block_ids and self.listeners.wants(Removed):
            self.listeners.put(Removed("block", (*block_ids,), (*digests,)))
        self._leaves.discard(block_ids)
        for digest in digests:
            del self._block_of[digest]
        self._hashes[blocks], self._digests[blocks] = NONE, None
        refs = self._rows.refs[blocks].tolist()
        cached = [block_id for block_id, count in zip(block_ids, refs, strict=True) if not count]
        self._num_cached -= len(cached)
        self._rows.push(cached[::-1])  # reversed: the stack then yields them in this order
        return len(cached)

    def _free_states(self, block_ids: Sequence[int]) -> None:
        slots = self._find_slots()
        if slots is not None:
            slots.free_states(block_ids)

    def check_invariants(self) -> None:
        """Check that all bookkeeping agrees, in O(pool_size).

        Raises:
            InvariantError: Two records contradict each other: a bug in this package.
        """
        registered = self._block_of.values()
        cached = {block_id for block_id in registered if not self._refs_at[block_id]}
        leaves = {block_id for block_id in cached if not self._cached_children_at[block_id]}
        slots = self._find_slots() if self._follows_states else None
        missing = {b for b in leaves if b not in self._leaves}
        statements = {
            "block_hashes and the registered blocks agree": self._agrees_with_hashes(),
            "children are those of their parents": self._agrees_with_parents(cached),
            "cached blocks are counted right": self._num_cached == len(cached),
            "the queue holds exactly the cached blocks without cached children": (
                len(self._leaves) == len(leaves) - len(missing)
                and all(slots is not None and slots.slot_of(b) >= 0 for b in missing)
            ),
        }
        require_all(statements | self._rows.statements())

    def _agrees_with_parents(self, cached: set[int]) -> bool:
        """Return whether lists of children and counts of cached children match the parents."""
        found = {}
        for parent in [self.dummy_block_id, *self._block_of.values()]:
            child, before, num_cached = self._first_child_at[parent], NONE, 0
            while child != NONE and child not in found and self._previous_at[child] == before:
                found[child] = parent
                num_cached += child in cached
                child, before = self._next_at[child], child
            if child != NONE or num_cached != self._cached_children_at[parent]:
                return False
        return found == {block: self._parent_at[block] for block in self._block_of.values()}

    def _agrees_with_hashes(self) -> bool:
        """Return whether the maps from hash to block and from block to hash agree."""
        with_hash = np.flatnonzero(self._hashes != NONE).tolist()
        by_block = {self._digests[block_id]: block_id for block_id in with_hash}
        return by_block == self._block_of and all(
            self.hash_at[block_id] == hash_id_of(digest) for digest, block_id in by_block.items()
        )


def _check_registration(block_ids: list[int], block_hashes: BlockHashes, tokens: Any) -> Any:
    """Check the arguments of a registration; return the tokens as an array."""
    if len(block_ids) != len(_check_hashes(block_hashes)):
        raise InvalidArgumentError(
            "block_ids and block_hashes must be of one length, "
            f"got {len(block_ids)} and {len(block_hashes)}"
        )
    if tokens is not None:
        tokens = as_token_array(tokens)
        if len(tokens) % max(1, len(block_ids)) or bool(len(tokens)) != bool(block_ids):
            raise InvalidArgumentError(
                f"tokens must be equally many in each block, got {len(tokens)} of them for "
                f"{len(block_ids)} blocks"
            )
    return tokens


def _check_carried_digests(
    block_ids: list[int], own: list[bytes | None], digests: Sequence[bytes]
) -> None:
    """Check that no block would get a second digest besides its ``own``."""
    if own.count(None) == len(own) == len(set(block_ids)):
        return
    carried: dict[int, bytes] = {}
    for block_id, own_digest, digest in zip(block_ids, own, digests, strict=True):
        before = carried.setdefault(block_id, own_digest or digest)
        if before != digest:
            raise HashConflictError(
                f"block {block_id} carries hash {before.hex()}, and cannot be registered as "
                f"{digest.hex()}"
            )


def _check_hashes(hashes: object) -> BlockHashes:
    """Return ``hashes`` if it is a ``BlockHashes``, which has digests."""
    if not isinstance(hashes, BlockHashes):
        raise InvalidArgumentError(f"hashes must be a BlockHashes, got {type(hashes).__name__}")
    return hashes
