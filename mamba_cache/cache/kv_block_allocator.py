"""The pool of KV blocks: which are used, which are cached under which hash, which go first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import ref

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import (
    INT32_MAX,
    INT64_MAX,
    as_ids,
    check_choice,
    check_int,
)
from mamba_cache._guard import CallGuard, guarded, query
from mamba_cache.cache.hashing import BlockHashes, as_token_array
from mamba_cache.cache.rows import NONE, EvictionQueue, RowIds, Rows, as_rows, ids_of, values_at
from mamba_cache.config import EvictionPolicy
from mamba_cache.errors import (
    BlockCapacityError,
    HashConflictError,
    InvalidArgumentError,
    InvariantError,
    UnknownBlockError,
)
from mamba_cache.events import Listeners, Removed, Stored

if TYPE_CHECKING:
    from mamba_cache.cache.slot_pool import SlotPool

__all__ = ["LAST_RESORT", "KVBlockAllocator", "LeafQueue"]


class _Registration(NamedTuple):
    """Consecutive blocks that are to be registered, checked."""

    block_ids: list[int]
    hash_ids: list[int]
    digests: Sequence[bytes]
    parents: Sequence[int | None]
    tokens: npt.NDArray[np.int32] | None


LAST_RESORT = 1 << 62
"""Added to a timestamp, so that the block goes after all to whose timestamps it was not."""

_MOST_REFERENCES = 1 << 20
"""Given in one call: counts are int32."""

# Of the counts' own dtype: with any other, ``np.add.at`` takes 30 times as long.
_STEPS: Final = {1: np.int32(1), -1: np.int32(-1)}

_CHILDREN, _CACHED = 0, 1  # what is counted at a parent: registered children, cached ones


class LeafQueue:
    """Cached blocks none of whose children are cached: each may be evicted.

    The least recently used goes first; of equal ones, the lower id. If somebody tells of the states
    of blocks, those without one go before all others, and of the rest the one that they name: no
    state lies below a leaf, so nothing is lost with a leaf that has none itself.
    """

    __slots__ = ("_aside", "_queue", "find_states")

    def __init__(self) -> None:
        self._queue = EvictionQueue()
        # Leaves that had a state when it was their turn, with their priority.
        self._aside: dict[int, int] = {}
        self.find_states: Callable[[], SlotPool | None] = _no_states

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._queue or block_id in self._aside

    def push(self, block_id: int, priority: int) -> None:
        """Add a block, or move it to ``priority`` if it is there."""
        self._queue.push(block_id, priority)
        self._aside.pop(block_id, None)

    def discard(self, block_ids: Collection[int]) -> None:
        """Remove each of these that is there."""
        self._queue.discard(block_ids)
        if self._aside:
            for block_id in block_ids:
                self._aside.pop(block_id, None)

    def look(self) -> None:
        """Look which blocks that were set aside have lost their states; before a row of pops."""
        if self._aside:
            states = self.find_states()
            blocks = np.array(list(self._aside), np.intp)
            lost = blocks if states is None else blocks[~states.have_states(blocks)]
            for block_id in lost.tolist():
                self.push(block_id, self._aside[block_id])

    def push_pop(self, block_id: int, priority: int) -> int:
        """Add a block that is not there, then ``pop``."""
        if self.find_states is _no_states:
            return self._queue.push_pop(block_id, priority)[0]
        self._queue.push(block_id, priority)
        return self.pop()

    def pop(self) -> int:
        """Remove and return the block to evict first."""
        states = self.find_states()
        while states is not None and self._queue:
            block_id, priority = self._queue.pop()
            if states.holds_state(block_id):
                self._aside[block_id] = int(priority)
            elif priority >= LAST_RESORT and self._aside:
                self._queue.push(block_id, priority)
                break
            else:
                return block_id
        if states is None or not self._aside:
            return self._queue.pop()[0]
        blocks = np.array(list(self._aside), np.intp)
        block_id = states.first_to_go(blocks)
        del self._aside[block_id]
        return block_id

    def clear(self) -> None:
        """Remove every block."""
        self._queue.clear()
        self._aside.clear()


def _no_states() -> SlotPool | None:
    return None


class KVBlockAllocator:
    """A pool of KV blocks with reference counts, whose blocks are found again by their hash.

    A block is *free*, *used* (its reference count is positive) or *cached* (without references, but
    registered under a hash, so that a later request can take it up). Cached blocks are evicted to
    make room, the least recently used first, but no parent before its children: a child without its
    parent could never be matched. Only when nothing else is left does a parent go whose children
    are used: by a request that computed the parent's tokens too, into a block of its own.

    "Recently" counts calls, not seconds, so the same calls always give the same blocks. Every call
    costs as much as the blocks it names, times the logarithm of the number of cached blocks.

    After an exception of another package in the middle of a change, every call raises
    ``PoisonedError`` until ``reset``: that of the context, if the blocks are a part of one.

    Args:
        pool_size: Blocks in the pool, >= 2. The last one is the dummy block, which padding refers
            to: it is never handed out and cannot be given back.
        eviction_policy: LRU keeps cached blocks; REF_ZERO forgets a block when its last
            reference goes.
        enable_prefix_caching: If False, no block is ever registered or found.
        as_tensor: Makes what the three arrays are exposed as, such as ``torch.from_numpy``. It
            must share their memory.

    Attributes:
        pool_size: As given.
        dummy_block_id: ``pool_size - 1``.
        block_ref_counts: [pool_size] int32, CPU. References to each block. Read only.
        block_timestamps: [pool_size] int64, CPU. The call that last took, retained or released
            each block. Read only.
        block_hashes: [pool_size] int64, CPU. The hash id that each block is registered under, -1
            for none. Read only.
        listeners: They get ``Stored`` and ``Removed`` for blocks. Slots over the blocks share them.
        before_reset: What ``reset`` calls first, so that whoever uses blocks can refuse by raising;
            or None.
        evicted_blocks_total: Cached blocks given up to make room.
        hash_collisions_total: Blocks not registered because their id belongs to another digest.

    Raises:
        InvalidArgumentError: ``pool_size`` is not an int >= 2, or the policy is unknown.
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
        self.dummy_block_id = self.pool_size - 1
        self.eviction_policy = EvictionPolicy(eviction_policy)
        self.enable_prefix_caching = enable_prefix_caching
        self.listeners = Listeners()
        self.before_reset: Callable[[], object] | None = None
        self._guard = CallGuard(self)
        self._find_slots: Callable[[], SlotPool | None] = lambda: None
        # Exactly the cached blocks without cached children; those with used ones go last.
        self._leaves = LeafQueue()
        self._make_arrays(as_tensor or (lambda array: array))
        self._clear()

    def join(self, guard: CallGuard) -> None:
        """Become a part of what ``guard`` guards: it is used with the other parts."""
        self._guard = guard

    def _make_arrays(self, as_tensor: Callable[[Any], Any]) -> None:
        self._timestamps = np.empty(self.pool_size, dtype=np.int64)
        # Of each registered block: its hash and digest, its parent's hash, and where the parent's
        # block was. That is believed as long as the block there has this hash: so children may
        # outlive their parent, and many of them are counted at it by whole arrays.
        self._hashes = np.empty(self.pool_size, np.int64)  # NONE for a block without one
        self._digests = np.empty(self.pool_size, object)
        self._parents = np.empty(self.pool_size, np.int64)
        self._parent_blocks = np.empty(self.pool_size, np.intp)
        self._num_children = np.zeros(self.pool_size, np.int32)
        self._num_cached_children = np.zeros(self.pool_size, np.int32)
        # Single elements are read and written several times faster through memoryviews.
        self._hash_at = self._hashes.data
        self._parent_at, self._parent_block_at = self._parents.data, self._parent_blocks.data
        self._children_at = self._num_children.data
        self._cached_children_at = self._num_cached_children.data
        self._count_at = self._children_at, self._cached_children_at
        self._rows = Rows("block", self.dummy_block_id, self._hashes)
        self._refs_at, self._used_at = self._rows.ref_at, self._timestamps.data
        self.block_ref_counts = as_tensor(self._rows.refs)
        self.block_timestamps = as_tensor(self._timestamps)
        self.block_hashes = as_tensor(self._hashes)

    def _clear(self) -> None:
        self._timestamps.fill(0)
        self._block_of: dict[int, int] = {}  # by hash
        self._hashes.fill(NONE)
        self._digests.fill(None)
        self._parents.fill(NONE)
        self._parent_blocks.fill(self.dummy_block_id)
        # By the hash id of a parent that is not registered: its children, and the cached ones.
        self._orphans: dict[int, list[int]] = {}
        self._rows.clear()
        self._rows.free[:] = np.arange(self.dummy_block_id)[::-1]  # the lower ids first
        self._leaves.clear()
        self._num_cached = 0
        self._clock = 0
        self.evicted_blocks_total = 0
        self.hash_collisions_total = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are neither used nor cached."""
        return self._rows.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks without references that are registered under a hash."""
        return self._num_cached

    @property
    def num_used_blocks(self) -> int:
        """Blocks with references."""
        return self.pool_size - 1 - self.num_free_blocks - self.num_cached_blocks

    def attach_slots(self, slots: SlotPool) -> None:
        """Free the slots of blocks whenever the blocks are deregistered; ``SlotPool`` calls it.

        Only a weak reference is kept. Slots attached earlier are forgotten.
        """
        self._find_slots = ref(slots)

    def ask_states(self) -> None:
        """Have blocks with states evicted after those without, and in the order of their worth.

        The slots attached last are asked, whose policy must be one that knows prompts.
        """
        self._leaves.find_states = self._find_slots

    def _free_states(self, block_ids: Sequence[int], hash_ids: Sequence[int]) -> None:
        slots = self._find_slots()
        if slots is not None:
            slots.free_states(block_ids, hash_ids)

    @guarded(nests=True)
    def allocate_memory_blocks(self, num_blocks: int) -> list[int]:
        """Take blocks, with one reference to each: free ones first, then evicted ones.

        Raises:
            InvalidArgumentError: ``num_blocks`` is not an int >= 0.
            BlockCapacityError: Free and evictable blocks do not suffice; nothing is changed.
        """
        num_blocks = check_int("num_blocks", num_blocks, minimum=0)
        self._make_room(num_blocks)
        self._guard.is_changing = True
        block_ids = self._rows.take(num_blocks)[::-1]
        self._touch(as_rows(block_ids))
        return block_ids

    @guarded(nests=True)
    def retain_memory_blocks(self, block_ids: Iterable[int], num_references: int = 1) -> None:
        """Add references to each block, used or cached; a block named twice gets twice as many.

        Args:
            block_ids: The blocks.
            num_references: How many references each gets, from 1 to 2**20.

        Raises:
            UnknownBlockError: A block is free or out of range; nothing is changed.
            InvalidArgumentError: ``num_references`` is no such int; nothing is changed.
        """
        count = check_int("num_references", num_references, minimum=1, maximum=_MOST_REFERENCES)
        ids = self._checked_ids(block_ids)
        blocks = as_rows(ids)
        self._guard.is_changing = True
        reused = self._rows.hold(ids, blocks, count)
        self._touch(blocks)
        if reused:
            self._num_cached -= len(reused)
            self._leaves.discard(reused)
            blocks = blocks if len(reused) == len(ids) else as_rows(reused)
            self._offer_for_eviction(as_rows(self._count(blocks, -1, _CACHED)))

    @guarded(nests=True)
    def release_memory_blocks(self, block_ids: Iterable[int]) -> None:
        """Give back one reference to each block; a block named twice loses two.

        A block whose last reference goes becomes cached if it is registered, else free.

        Raises:
            UnknownBlockError: A block id is out of range; nothing is changed.
            DoubleFreeError: A block has fewer references than are given back; nothing is changed.
        """
        ids = self._checked_ids(block_ids)
        blocks = as_rows(ids)
        self._guard.is_changing = True
        cached = self._rows.release(ids, blocks)
        self._touch(blocks)
        if not cached:
            return
        blocks = blocks if len(cached) == len(blocks) else as_rows(cached)
        self._num_cached += len(cached)
        self._leaves.discard(self._count(blocks, 1, _CACHED))
        self._offer_for_eviction(blocks)
        if self.eviction_policy is EvictionPolicy.REF_ZERO:
            self._deregister(blocks, blocks)

    def _touch(self, blocks: RowIds) -> None:
        """Note that blocks are used now."""
        self._clock += 1
        if isinstance(blocks, list):
            for block_id in blocks:
                self._used_at[block_id] = self._clock
        else:
            self._timestamps[blocks] = self._clock

    @guarded(nests=True)
    def register_kv_block_hashes(
        self,
        block_ids: Iterable[int],
        block_hashes: BlockHashes,
        *,
        parent_hash: int | None = None,
        tokens: Any = None,
    ) -> list[int | None]:
        """Make consecutive blocks of one sequence findable by their hashes.

        Call it once what fills the blocks has been enqueued. Doing so again changes nothing.

        Args:
            block_ids: Blocks that are used, or cached under the very same hash.
            block_hashes: One hash each.
            parent_hash: Hash id of the block before the first one; None at a sequence's start.
            tokens: What the blocks hold, equally many in each, for listeners; of any kind that
                ``compute_block_hashes`` takes. Not needed unless ``listeners.wants(Stored)``.

        Returns:
            For each block the one that now stands for its hash: itself; or another that was
            registered earlier, in which case this one stays private; or None if the id belongs to
            another digest, be it as the id of an ancestor, or if prefix caching is off.

        Raises:
            InvalidArgumentError: Lengths differ, the hashes are no ``BlockHashes``, ``parent_hash``
                is no hash id, or the tokens are no ids or not equally many.
            UnknownBlockError: A block is free or out of range.
            HashConflictError: A block carries another hash already, or is named twice with two.
        """
        ids = self._checked_ids(block_ids)
        blocks = as_rows(ids)
        self._rows.without_references(ids, blocks)
        plan = self._plan_registration(ids, block_hashes, parent_hash, tokens)
        own = values_at(self._hash_at, self._hashes, blocks)
        are_new = _check_carried_hashes(ids, own, plan.hash_ids)
        if not self.enable_prefix_caching:
            return [None] * len(ids)
        self._guard.is_changing = True
        holders = self._register_all(plan, are_new)
        self.listeners.tell()
        return holders

    @query
    def match_prefix(self, hashes: BlockHashes) -> list[int]:
        """Return the longest run of registered blocks from the start of ``hashes``.

        Full digests are compared, so a block that merely shares an id does not match. A match is
        only safe from eviction once it is retained.

        Raises:
            InvalidArgumentError: ``hashes`` is not a ``BlockHashes``: ids alone prove nothing.
        """
        _check_hashes(hashes)
        if not hashes or hashes[0] not in self._block_of:
            return []  # without reading the ids of a long prompt that nobody has seen
        block_ids = []
        find, own_digests = self._block_of.get, self._digests
        for hash_id, digest in zip(hashes, hashes.digests, strict=True):
            block_id = find(hash_id)
            if block_id is None or own_digests[block_id] != digest:
                break
            block_ids.append(block_id)
        return block_ids

    @query
    def find_block(self, hash_id: int, digest: bytes | None = None) -> int | None:
        """Return the block registered under ``hash_id``, or None.

        With a ``digest``, only if it was registered with the same one.

        Raises:
            InvalidArgumentError: The id is no int, or the digest is not ``bytes``.
        """
        if digest is not None and not isinstance(digest, bytes):
            raise InvalidArgumentError(f"a digest must be bytes, got {digest!r}")
        block_id = self._block_of.get(check_int("a hash id", hash_id))
        if block_id is None or (digest is not None and self._digests[block_id] != digest):
            return None
        return block_id

    @guarded(nests=True)
    def deregister_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable: cached ones become free, used ones merely lose their hash.

        Blocks without a hash are left alone. Children stay registered; they match again when
        their parent's hash is registered anew.

        Raises:
            UnknownBlockError: A block id is out of range; nothing is changed.
        """
        self._deregister(*self._registered(dict.fromkeys(self._checked_ids(block_ids))))

    @guarded(nests=True, renews=True)
    def reset(self) -> None:
        """Return to the initial state: references are dropped and every block is free.

        Listeners stay, and get the blocks that were registered. In a context it is refused with
        ``StepOrderError`` while requests hold blocks.
        """
        if self.before_reset is not None:
            self.before_reset()
        with self._guard.ending(self.listeners, renews=True):
            self._reset()

    def _reset(self) -> None:
        gone = {block_id: hash_id for hash_id, block_id in self._block_of.items()}
        block_ids, hash_ids = tuple(gone), tuple(gone.values())
        digests = tuple(self._digests[list(gone)].tolist())
        self._free_states(block_ids, hash_ids)
        self._clear()
        self.listeners.put(Removed("block", block_ids, hash_ids, digests=digests, is_reset=True))

    def _checked_ids(self, block_ids: Iterable[int]) -> list[int]:
        """Read block ids; the dummy block, which is the last one, is none of them."""
        return as_ids("block_ids", block_ids, self.dummy_block_id, error=UnknownBlockError)

    def _plan_registration(
        self,
        block_ids: list[int],
        block_hashes: BlockHashes,
        parent_hash: int | None,
        tokens: Any,
    ) -> _Registration:
        """Check what is to be registered; the arguments are those of the public calls."""
        hash_ids = list(_check_hashes(block_hashes))
        if len(block_ids) != len(hash_ids):
            raise InvalidArgumentError(
                "block_ids and block_hashes must be of one length, "
                f"got {len(block_ids)} and {len(hash_ids)}"
            )
        if parent_hash is not None:
            parent_hash = check_int("parent_hash", parent_hash, minimum=1, maximum=INT64_MAX)
        parents = [parent_hash, *hash_ids[:-1]]
        if tokens is not None:
            tokens = as_token_array(tokens)
            if len(tokens) % max(1, len(block_ids)) or bool(len(tokens)) != bool(block_ids):
                raise InvalidArgumentError(
                    f"tokens must be equally many in each block, got {len(tokens)} of them for "
                    f"{len(block_ids)} blocks"
                )
        return _Registration(block_ids, hash_ids, block_hashes.digests, parents, tokens)

    def _register_all(self, plan: _Registration, are_new: bool) -> list[int | None]:
        """Make blocks findable; ``are_new`` says that they are different and have no hash yet."""
        block_ids, parents = plan.block_ids, plan.parents
        is_chain = are_new and bool(block_ids)
        if is_chain and self._add_chain(*plan[:3], parents[0]):
            self._offer_parent(block_ids[0])
            if self.listeners.wants(Stored):
                self.listeners.put(self._storage(plan, slice(0, len(block_ids))))
            return list(block_ids)
        holders: list[int | None] = []
        new: list[int] = []
        for index, block_id in enumerate(block_ids):
            is_new = self._hash_at[block_id] == NONE
            entry = plan.hash_ids[index], plan.digests[index], parents[index]
            holders.append(self._register(block_id, *entry))
            if is_new and holders[-1] == block_id:
                new.append(index)
        if self.listeners.wants(Stored):
            for run in _runs_of(new):
                self.listeners.put(self._storage(plan, run))
        return holders

    def _storage(self, plan: _Registration, run: slice) -> Stored:
        """Describe blocks of a plan that became findable."""
        parent_hash, size = plan.parents[run.start], None
        if run.start:
            parent_digest = plan.digests[run.start - 1]
        else:
            parent = self._block_of.get(parent_hash or NONE)
            parent_digest = None if parent is None else self._digests[parent]
        tokens = plan.tokens
        if tokens is not None:
            size = len(tokens) // len(plan.block_ids)
            tokens = tokens[run.start * size : run.stop * size].copy()
        return Stored(
            "block",
            tuple(plan.block_ids[run]),
            tuple(plan.hash_ids[run]),
            digests=tuple(plan.digests[run]),
            parent_hash=parent_hash,
            parent_digest=parent_digest,
            tokens=tokens,
            block_size_tokens=size,
        )

    def _register(
        self, block_id: int, hash_id: int, digest: bytes, parent: int | None
    ) -> int | None:
        """Make a block findable, unless another one is; return the one that is found."""
        holder = self._block_of.get(hash_id)
        if holder is None:
            if self._closes_ring(hash_id, parent):
                self.hash_collisions_total += 1  # chained digests cannot do that, only their ids
                return None
            self._add(block_id, hash_id, digest, parent)
            self._offer_parent(block_id)
            return block_id
        if self._digests[holder] != digest:
            self.hash_collisions_total += 1
            return None
        return holder

    def _make_room(self, num_blocks: int) -> None:
        """Evict cached blocks where the free ones do not suffice."""
        if num_blocks > self._rows.num_free:
            victims = as_rows(self._choose_victims(num_blocks))
            self._guard.is_changing = True
            self.evicted_blocks_total += len(victims)
            # If a listener raises, the victims are free and nothing was taken: no block leaks.
            self._deregister(victims, victims)

    def _choose_victims(self, num_blocks: int) -> list[int]:
        """Take from the queue the blocks to evict so that ``num_blocks`` are free, in order.

        A parent joins the queue when all its children are chosen. Should the blocks not suffice,
        the queue ends as it was: whoever was a leaf then is put back.
        """
        victims: list[int] = []
        chosen_children: dict[int, int] = {}  # of parents that have several
        leaves, as_leaf = self._leaves, self._as_leaf
        leaves.look()
        parent_of, num_cached_children = self._parent_of, self._cached_children_at
        new_leaf: tuple[int, int] | None = None
        num_wanted = num_blocks - self._rows.num_free
        while len(victims) < num_wanted:
            if new_leaf is None and not leaves:
                self._offer_for_eviction(as_rows(victims))
                raise BlockCapacityError(num_blocks, self._rows.num_free + len(victims))
            block_id = leaves.push_pop(*new_leaf) if new_leaf else leaves.pop()
            victims.append(block_id)
            new_leaf, parent = None, parent_of(block_id)
            if parent is None:
                continue
            num_chosen = num_cached_children[parent]
            has_siblings = num_chosen > 1
            if has_siblings:
                num_chosen = chosen_children[parent] = chosen_children.get(parent, 0) + 1
            new_leaf = as_leaf(parent, num_chosen)
        if new_leaf is not None:
            leaves.push(*new_leaf)
        return victims

    def _as_leaf(self, block_id: int, num_chosen_children: int = 0) -> tuple[int, int] | None:
        """Return a registered block and its place in the order of eviction.

        None if it is used, or not all of its cached children are among those chosen.
        """
        num_cached = self._cached_children_at[block_id]
        if num_cached != num_chosen_children or self._refs_at[block_id]:
            return None
        delay = LAST_RESORT if self._children_at[block_id] > num_cached else 0
        return block_id, self._used_at[block_id] + delay

    def _offer_for_eviction(self, blocks: RowIds) -> None:
        """Queue those of some blocks that are cached, and none of whose children are."""
        if not isinstance(blocks, list):
            is_leaf = (self._rows.refs[blocks] | self._num_cached_children[blocks]) == 0
            blocks = blocks[is_leaf].tolist()
        for block_id in blocks:
            if self._hash_at[block_id] != NONE:
                self._offer(block_id)

    def _offer(self, block_id: int) -> None:
        """Queue a registered block if it is cached, and none of its children are."""
        leaf = self._as_leaf(block_id)
        if leaf is not None:
            self._leaves.push(*leaf)

    def _offer_parent(self, block_id: int) -> None:
        """Queue a registered block's parent, if it is cached and none of its children are."""
        parent = self._parent_of(block_id)
        if parent is not None:
            self._offer(parent)

    def _registered(self, ids: Iterable[int]) -> tuple[RowIds, RowIds]:
        """Return those blocks that are registered, and those of them that are cached."""
        registered = [block_id for block_id in ids if self._hash_at[block_id] != NONE]
        cached = [block_id for block_id in registered if not self._refs_at[block_id]]
        return as_rows(registered), as_rows(cached)

    def _deregister(self, blocks: RowIds, cached: RowIds) -> None:
        """Make registered blocks unfindable, free the cached ones of them, and tell listeners."""
        self._guard.is_changing = True
        self._forget(blocks, cached)
        self._rows.push(ids_of(cached)[::-1])  # so that they are taken in this order
        self.listeners.tell()

    def _forget(self, blocks: RowIds, cached: RowIds) -> None:
        """Make registered blocks unfindable; the cached ones of them are the caller's now."""
        block_ids = ids_of(blocks)
        if not block_ids:
            return
        hash_ids = values_at(self._hash_at, self._hashes, blocks)
        self._free_states(block_ids, hash_ids)
        if self.listeners.wants(Removed):
            digests = tuple(self._digests[blocks].tolist())
            self.listeners.put(Removed("block", (*block_ids,), (*hash_ids,), digests=digests))
        self._leaves.discard(block_ids)
        self._num_cached -= len(cached)
        parents = self._count(cached, -1, _CHILDREN, _CACHED)
        if len(cached) < len(blocks):
            used = set(block_ids).difference(ids_of(cached))
            parents += self._count(as_rows([*used]), -1, _CHILDREN)
        if isinstance(blocks, list):
            for block_id in blocks:
                self._hash_at[block_id], self._digests[block_id] = NONE, None
        else:
            self._hashes[blocks], self._digests[blocks] = NONE, None
        counts = values_at(self._children_at, self._num_children, blocks)
        for block_id, hash_id, num_children in zip(block_ids, hash_ids, counts, strict=True):
            del self._block_of[hash_id]
            if num_children:
                self._orphans[hash_id] = [num_children, self._cached_children_at[block_id]]
        for parent in parents:
            if self._hash_at[parent] != NONE:
                self._offer(parent)

    def _parent_of(self, block_id: int) -> int | None:
        """Return the block that is a registered block's parent; None if it is not registered."""
        parent, block = self._parent_at[block_id], self._parent_block_at[block_id]
        if self._hash_at[block] != parent:
            return self._block_of.get(parent)
        return None if block == self.dummy_block_id else block

    def _add_chain(
        self,
        block_ids: list[int],
        hash_ids: list[int],
        digests: Sequence[bytes],
        parent: int | None,
    ) -> bool:
        """Register consecutive blocks of one sequence if their hash ids are all new."""
        # One look at each id tells whose it is, and makes it the block's where it is nobody's.
        holders = list(map(self._block_of.setdefault, hash_ids, block_ids))
        parent_block = self._block_of.get(NONE if parent is None else parent)
        is_own_parent = parent_block is not None and self._hash_at[parent_block] == NONE
        if holders != block_ids or is_own_parent or not self._orphans.keys().isdisjoint(hash_ids):
            for hash_id, holder, block_id in zip(hash_ids, holders, block_ids, strict=True):
                if holder == block_id:
                    del self._block_of[hash_id]
            return False
        blocks = as_rows(block_ids)
        if isinstance(blocks, list):
            last, last_hash = self.dummy_block_id, NONE
            for block_id, hash_id, digest in zip(block_ids, hash_ids, digests, strict=True):
                self._hash_at[block_id], self._digests[block_id] = hash_id, digest
                self._parent_at[block_id], self._parent_block_at[block_id] = last_hash, last
                self._children_at[block_id], self._cached_children_at[block_id] = 1, 0
                last, last_hash = block_id, hash_id
        else:
            self._hashes[blocks] = hash_ids
            self._digests[blocks] = digests
            before, after = blocks[:-1], blocks[1:]
            self._parents[after], self._parent_blocks[after] = self._hashes[before], before
            self._num_children[before] = 1
            self._num_cached_children[blocks] = 0
        self._children_at[block_ids[-1]] = 0
        self._join(block_ids[0], parent)
        return True

    def _add(self, block_id: int, hash_id: int, digest: bytes, parent: int | None) -> None:
        """Register a block under a hash id that nobody holds."""
        self._block_of[hash_id] = block_id
        self._hash_at[block_id] = hash_id
        self._digests[block_id] = digest
        children = self._orphans.pop(hash_id, (0, 0)) if self._orphans else (0, 0)
        self._children_at[block_id], self._cached_children_at[block_id] = children
        self._join(block_id, parent)

    def _join(self, block_id: int, parent: int | None) -> None:
        """Make a block the child of the one with a hash id."""
        parent_block = self.dummy_block_id
        if parent is None:
            parent = NONE
        elif parent in self._block_of:
            parent_block = self._block_of[parent]
            self._children_at[parent_block] += 1
        else:
            self._orphans.setdefault(parent, [0, 0])[0] += 1
        self._parent_at[block_id], self._parent_block_at[block_id] = parent, parent_block

    def _count(self, blocks: RowIds, step: int, *kinds: int) -> list[int]:
        """Change counts at the parents of registered blocks; return the parents.

        Kinds are ``_CHILDREN`` and ``_CACHED``, in the order in which orphans are counted.
        """
        if isinstance(blocks, list):
            found, count_at = [], self._count_at
            hash_at, parent_at, place_at = self._hash_at, self._parent_at, self._parent_block_at
            for block_id in blocks:
                parent, hash_id = place_at[block_id], parent_at[block_id]
                if hash_at[parent] != hash_id:
                    parent = self._count_moved(hash_id, kinds, step)
                for kind in kinds:
                    count_at[kind][parent] += step
                found.append(parent)
            return found
        parents, hash_ids = self._parent_blocks[blocks], self._parents[blocks]
        now = self._hashes[parents]
        for index in (now != hash_ids).nonzero()[0].tolist():
            parents[index] = self._count_moved(hash_ids.item(index), kinds, step)
        for kind in kinds:
            np.add.at((self._num_children, self._num_cached_children)[kind], parents, _STEPS[step])
        as_list: list[int] = parents.tolist()
        return as_list

    def _count_moved(self, parent: int, kinds: Iterable[int], step: int) -> int:
        """Return the block of a parent that had another; if there is none, count at its hash id."""
        block_id = self._block_of.get(parent)
        if block_id is not None:
            return block_id
        orphans = self._orphans[parent]
        for kind in kinds:
            orphans[kind] += step
        if not orphans[_CHILDREN]:
            del self._orphans[parent]
        return self.dummy_block_id

    def _closes_ring(self, hash_id: int, parent: int | None) -> bool:
        """Say whether a block's ancestors would lead back to it: none of them could be evicted.

        Hashes are chained, so that takes an id that an ancestor's other digest had, too. It needs
        children that are there already; only then are the parents walked, because registering a
        block must not cost as much as its prefix is long.
        """
        if hash_id not in self._orphans:
            return hash_id == parent
        ancestor = NONE if parent is None else parent
        while ancestor not in (NONE, hash_id):
            block_id = self._block_of.get(ancestor)
            ancestor = NONE if block_id is None else self._parent_at[block_id]
        return ancestor == hash_id

    def check_invariants(self) -> None:
        """Check all bookkeeping against itself, in O(pool_size).

        Raises:
            InvariantError: Something contradicts something else: a bug in this package.
        """
        cached = {block_id for block_id in self._block_of.values() if not self._refs_at[block_id]}
        evictable = {b for b in cached if not self._num_cached_children[b]}
        statements = {
            "block_hashes and the registered blocks agree": self._agrees_with_hashes(),
            "children are counted by what their parents say": self._counts_children_right(cached),
            "cached blocks are counted right": self._num_cached == len(cached),
            "the queue holds exactly the cached blocks without cached children": (
                len(self._leaves) == len(evictable) and all(b in self._leaves for b in evictable)
            ),
        }
        breaches = [statement for statement, holds in statements.items() if not holds]
        breaches += self._rows.breaches()
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches)}")

    def _counts_children_right(self, cached: Collection[int]) -> bool:
        """Say whether the counts of children are what the blocks' parents add up to."""
        parents = {b: p for b in self._block_of.values() if (p := self._parent_at[b]) != NONE}
        children = Counter(parents.values())
        cached_children = Counter(parents[b] for b in parents if b in cached)
        missing = children.keys() - self._block_of.keys()
        orphans = {parent: [children[parent], cached_children[parent]] for parent in missing}
        return self._orphans == orphans and all(
            self._num_children[block_id] == children[hash_id]
            and self._num_cached_children[block_id] == cached_children[hash_id]
            for hash_id, block_id in self._block_of.items()
        )

    def _agrees_with_hashes(self) -> bool:
        """Say whether both directions, from hash to block and from block to hash, say the same."""
        with_hash = np.flatnonzero(self._hashes != NONE)
        by_block = zip(self._hashes[with_hash].tolist(), with_hash.tolist(), strict=True)
        return self._block_of == dict(by_block) and len(self._block_of) == len(with_hash)


def _runs_of(indices: list[int]) -> list[slice]:
    """Return ascending indices as slices of consecutive ones."""
    runs: list[slice] = []
    for index in indices:
        follows = bool(runs) and runs[-1].stop == index
        start = runs.pop().start if follows else index
        runs.append(slice(start, index + 1))
    return runs


def _check_carried_hashes(block_ids: list[int], own: list[int], hash_ids: list[int]) -> bool:
    """Check that no block would get a second hash beside its ``own``."""
    if own.count(NONE) == len(own) == len(set(block_ids)):
        return True
    carried: dict[int, int] = {}
    for block_id, own_hash, hash_id in zip(block_ids, own, hash_ids, strict=True):
        before = carried.setdefault(block_id, own_hash)
        if before not in (NONE, hash_id):
            raise HashConflictError(
                f"block {block_id} carries hash {before}, and cannot be registered as {hash_id}"
            )
        carried[block_id] = hash_id
    return False


def _check_hashes(hashes: object) -> BlockHashes:
    """Return what a caller gives as hashes, if they bring digests along."""
    if not isinstance(hashes, BlockHashes):
        raise InvalidArgumentError(f"hashes must be a BlockHashes, got {type(hashes).__name__}")
    return hashes
