"""The value policy: which offloaded chunks vLLM keeps in host memory.

vLLM loads ``ValuePolicy`` by ``eviction_policy`` and ``cache_policy_module_path``, options of its
CPU offloading: see docs/how-to/vllm.md. The value of a saved state is

    rate of return * chunks of tokens saved / chunks that only it needs

The rates are those of the adaptive policy: docs/how-to/policies.md. A chunk of attention is
kept as long as a state at or below it is, or a running request has it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice, takewhile
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np

from mamba_cache.cache.adaptive import MIN_GHOSTS, NO_CANDIDATE, CandidateTree, PromptPath
from mamba_cache.cache.policies import PromptFacts

__all__ = ["ValuePolicy"]

_Entry: TypeAlias = "tuple[float, int, _Prefix]"

_GROUP_BYTES: Final = 4  # a key is the hash of a prefix, then the number of the cache group
_MAX_HASH: Final = 1 << 62
_CHUNKS_PER_STATE: Final = 8
_SWEPT_PER_REQUEST: Final = 64
_MIN_REQUESTS_PER_SWEEP: Final = 4
_INFINITE: Final = float("inf")


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix up to the end of a chunk, with the chunks of all cache groups there."""

    name: bytes
    parent: _Prefix | None
    depth: int  # chunks
    children: set[_Prefix] = field(default_factory=set)
    keys: list[bytes] = field(default_factory=list)
    num_states: int = 0  # keys of groups of states
    num_needs: int = 0  # needed children, kept state, running requests that end here
    num_running: int = 0  # running requests that end here
    candidate: int = NO_CANDIDATE  # of the kept state
    entry: int = 0  # the valid entry of the heap
    room: int = 1  # chunks that only the kept state needed, when that was counted last
    owner: _Request | None = None  # who offered it last

    @property
    def hash_id(self) -> int:
        """Return the number by which the tree of candidates knows the prefix."""
        return int.from_bytes(self.name[-8:], "big") % _MAX_HASH + 1


@dataclass(slots=True, eq=False)
class _Request:
    """What is known of a running request."""

    generation: int
    positions: dict[bytes, int | None] = field(default_factory=dict)  # tokens by key
    path: list[_Prefix] = field(default_factory=list)
    prompt: PromptPath | None = None
    end: _Prefix | None = None  # of the prompt
    offered: set[_Prefix] = field(default_factory=set)  # at which states were offered
    missing: set[_Prefix] = field(default_factory=set)  # offered, without attention yet
    is_refused: bool = False


class ValuePolicy:
    """Keeps the chunks that save the most tokens for the room they take, as learned from requests.

    Chunks that are worth less than all that is kept are refused: ``evict`` returns None, and vLLM
    goes on without storing them. Chunks of full attention and of states are told apart by how
    often requests have them: a prompt has one of attention at each place, and few states.

    Args:
        cache_capacity: Chunks in host memory.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self._generation = 0
        self.clear()

    def clear(self) -> None:
        """Forget all chunks and all that was learned."""
        self._generation += 1  # views of requests from before are void
        self._chunks: dict[bytes, Any] = {}
        self._prefixes: dict[bytes, _Prefix] = {}
        self._kept: dict[_Prefix, None] = {}
        self._heap: list[_Entry] = []
        self._num_entries = self._num_requests = 0
        # Chunks of no value that no transfer reads; the first to go are first.
        self._worthless: OrderedDict[bytes, None] = OrderedDict()
        self._num_seen: Counter[bytes] = Counter()  # chunks of requests by cache group
        self._sparse: frozenset[bytes] = frozenset()  # the groups of states
        self._num_dense = 1
        max_kept = self.cache_capacity // _CHUNKS_PER_STATE
        self._tree = CandidateTree(max(MIN_GHOSTS, self.cache_capacity), max_kept)

    def get(self, key: bytes) -> Any:
        """Return a chunk, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        """Add a chunk."""
        self._chunks[key] = chunk
        prefix = self._prefix(key[:-_GROUP_BYTES], None)
        prefix.keys.append(key)
        if key[-_GROUP_BYTES:] in self._sparse:
            prefix.num_states += 1
            if prefix.candidate < 0 and self._has_state(prefix):
                self._keep(prefix, self._candidate_of(prefix, prefix.owner))
        elif prefix.owner is not None:
            prefix.owner.missing.discard(prefix)
        self._sort_out(key, prefix)

    def remove(self, key: bytes) -> None:
        """Remove a chunk whose transfer failed."""
        prefix = self._prefixes[key[:-_GROUP_BYTES]]
        self._worthless[key] = None
        self._take(key)
        if prefix.candidate >= 0 and not self._has_state(prefix):
            self._drop(prefix)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Count the request, if it was not counted before."""
        self._request_of(req_context, keys)

    on_request_access = touch

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Record what a request offers."""
        keys = [*keys]
        request = self._request_of(req_context, keys)
        for key in keys:
            prefix = self._prefix(key[:-_GROUP_BYTES], None)
            prefix.owner = request
            places = request.offered if key[-_GROUP_BYTES:] in self._sparse else request.missing
            places.add(prefix)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """Let go of a request's chunks, and of its states whose attention was refused."""
        request: _Request | None = req_context.get_state(_Request)
        if request is None or request.generation != self._generation or not request.path:
            return
        self._tell_groups_apart(key_groups)
        end = request.path[-1]
        broken = min((prefix.depth for prefix in request.missing), default=end.depth + 1)
        for prefix in request.path:
            is_state = self._has_state(prefix) if self._sparse else prefix is end
            if prefix.candidate >= 0:
                if prefix.depth >= broken or (self._sparse and not is_state):
                    self._drop(prefix)
            elif is_state and prefix.depth < broken:
                self._keep(prefix, self._candidate_of(prefix, request))
            if prefix.owner is request:
                prefix.owner = None
        end.num_running -= 1
        self._release(end)
        request.path = []

    def mark_evictable(self, key: bytes) -> None:
        """Record that no transfer reads a chunk."""
        self._sort_out(key, self._prefixes[key[:-_GROUP_BYTES]])

    def mark_non_evictable(self, key: bytes) -> None:
        """Record that a transfer reads a chunk."""
        self._worthless.pop(key, None)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict chunks for those of ``protected`` that are offered.

        Returns:
            ``n`` keys with their chunks; None if what is kept is worth more than what is offered.
        """
        num_needed = n + sum(map(self._worthless.__contains__, protected))
        # Refused chunks are offered again without ``on_store_miss``.
        found = (self._prefixes.get(key[:-_GROUP_BYTES]) for key in protected)
        owned = [prefix for prefix in found if prefix is not None and prefix.owner is not None]
        request = max(owned, key=attrgetter("depth")).owner if owned else None
        if request is None:
            is_room = self._demote(num_needed, _INFINITE)
        else:
            is_room = not request.is_refused and self._admit(request, num_needed)
            request.is_refused = not is_room
        if not is_room:
            return None
        chosen = islice((key for key in self._worthless if key not in protected), n)
        return [(key, self._take(key)) for key in [*chosen]]

    def _admit(self, request: _Request, num_needed: int) -> bool:
        """Make room for what a request offers, if its states are worth more than others."""
        new = [prefix for prefix in request.offered if not self._has_state(prefix)]
        end = request.end
        if end is not None and end.candidate < 0:
            new = [*{*new, end}]
        if not new:  # room was made with the states; what an answer adds is worth nothing yet
            return len(self._worthless) >= num_needed
        for prefix in new:
            if prefix.candidate < 0:
                self._keep(prefix, self._candidate_of(prefix, request), is_new=True)
        num_free = self.cache_capacity - len(self._chunks)
        while new:
            deepest = max(prefix.depth for prefix in new)
            num_wanted = len(new) * len(self._sparse) - num_free
            for prefix in request.path:
                num_wanted += prefix.depth <= deepest and len(prefix.keys) == prefix.num_states
            lowest = min(new, key=self._density)
            if self._demote(max(num_wanted, num_needed), self._density(lowest)):
                for prefix in new:
                    self._push(prefix)
                return True
            new.remove(lowest)
            self._drop(lowest)
        return False

    def _demote(self, num_needed: int, limit: float) -> bool:
        """Make chunks worthless whose states are worth less than a limit; none if too few."""
        demoted: list[tuple[_Prefix, int]] = []
        while len(self._worthless) < num_needed:
            lowest = self._lowest(limit)
            if lowest is None:
                for prefix, node in reversed(demoted):
                    self._keep(prefix, node)
                return False
            demoted.append((lowest, lowest.candidate))
            self._drop(lowest)
        return True

    def _tell_groups_apart(self, key_groups: Sequence[Sequence[bytes]]) -> None:
        """Count the chunks that requests have of each cache group."""
        self._num_seen.update({keys[0][-_GROUP_BYTES:]: len(keys) for keys in key_groups if keys})
        most = max(self._num_seen.values(), default=0)
        sparse = frozenset(group for group, n in self._num_seen.items() if 2 * n <= most)
        self._num_dense = max(1, len(self._num_seen) - len(sparse))
        if sparse == self._sparse:
            return
        self._sparse = sparse
        for prefix in [*self._prefixes.values()]:
            prefix.num_states = sum(key[-_GROUP_BYTES:] in sparse for key in prefix.keys)
            if prefix.candidate >= 0 and sparse and not self._has_state(prefix):
                self._drop(prefix)
            for key in prefix.keys:
                self._sort_out(key, prefix)

    def _request_of(self, context: Any, keys: Iterable[bytes]) -> _Request:
        """Return the view of a request; count it, and extend its path by new keys."""
        request: _Request | None = context.get_state(_Request)
        if request is None or request.generation != self._generation:
            request = _Request(self._generation)
            context.set_state(request)
        positions, num_known = request.positions, len(request.positions)
        # Only this private attribute has the keys that a request neither offered nor loaded.
        found = getattr(context, "_offload_key_positions", None)
        if found is None:
            found = {key: context.get_offload_key_position(key) for key in keys}
        positions.update(found)
        if len(positions) > num_known:
            self._walk(request)
        return request

    def _walk(self, request: _Request) -> None:
        """Find the prefixes of a request; count it the first time."""
        old_end = request.path[-1] if request.path else None
        names: dict[int, bytes] = {}
        chunk_of: dict[bytes, int] = {}  # vLLM also asks for places inside chunks, but later
        for key, tokens in request.positions.items():
            if tokens and not tokens % chunk_of.setdefault(key[-_GROUP_BYTES:], tokens):
                names[tokens] = key[:-_GROUP_BYTES]
        if not names:
            return
        above: _Prefix | None = None
        request.path = path = []
        for _, name in sorted(names.items()):
            prefix = self._prefixes.get(name)
            if prefix is None or prefix.parent is not above:
                prefix = self._prefix(name, above)
            path.append(prefix)
            above = prefix
        path[-1].num_running += 1
        self._need(path[-1])
        if old_end is not None:
            old_end.num_running -= 1
            self._release(old_end)
        hash_ids = [prefix.hash_id for prefix in path]
        if request.prompt is not None:
            request.prompt.hash_ids[:] = hash_ids
            return
        num_matched = sum(1 for _ in takewhile(attrgetter("keys"), path))
        facts = PromptFacts(hash_ids, 1, num_matched, len(path))
        request.prompt, request.end = self._tree.begin_request(facts), path[-1]
        self._tree.propose(request.prompt, len(path), "end")
        self._num_requests += 1
        num_between = max(_MIN_REQUESTS_PER_SWEEP, len(self._kept) // _SWEPT_PER_REQUEST)
        if self._num_requests % num_between == 0:
            self._sweep()

    def _candidate_of(self, prefix: _Prefix, request: _Request | None) -> int:
        if request is None or request.end is None or prefix not in request.path:
            return self._tree.find_or_add(prefix.hash_id, prefix.depth)
        assert request.prompt is not None
        kind = "branch" if prefix.depth < request.end.depth else "end"
        return self._tree.propose(request.prompt, request.path.index(prefix) + 1, kind)

    def _prefix(self, name: bytes, parent: _Prefix | None) -> _Prefix:
        """Return a prefix; a new one, or one without a parent, has this parent."""
        prefix = self._prefixes.get(name)
        if prefix is None:
            depth = 1 if parent is None else parent.depth + 1
            prefix = self._prefixes[name] = _Prefix(name, parent, depth)
        elif prefix.parent is None and parent is not None:
            prefix.parent, prefix.depth = parent, parent.depth + 1
            if prefix.num_needs:
                self._need(parent)
        if prefix.parent is not None:
            prefix.parent.children.add(prefix)
        return prefix

    def _has_state(self, prefix: _Prefix) -> bool:
        return 0 < len(self._sparse) == prefix.num_states

    def _keep(self, prefix: _Prefix, node: int, *, is_new: bool = False) -> None:
        """Give a state its value, and its attention chunks a reason to stay."""
        self._tree.keep(node)
        prefix.candidate = node
        self._kept[prefix] = None
        for key in prefix.keys:
            self._worthless.pop(key, None)
        self._need(prefix)
        if not is_new:
            self._push(prefix)
        self._push_nearest(prefix.parent)

    def _drop(self, prefix: _Prefix) -> None:
        """Make a state worthless, and the attention chunks that only it needs."""
        self._tree.drop(prefix.candidate)
        prefix.candidate, prefix.entry = NO_CANDIDATE, 0
        del self._kept[prefix]
        for key in prefix.keys:
            self._sort_out(key, prefix)
        self._push_nearest(prefix.parent)
        self._release(prefix)

    def _need(self, prefix: _Prefix | None) -> None:
        """Count a reason to keep the chunks up to a prefix."""
        while prefix is not None:
            prefix.num_needs += 1
            if prefix.num_needs > 1:
                return
            for key in prefix.keys:
                self._sort_out(key, prefix)
            prefix = prefix.parent

    def _release(self, prefix: _Prefix) -> None:
        """Undo ``_need``; the deepest chunks become worthless first."""
        above: _Prefix | None = prefix
        while above is not None:
            above.num_needs -= 1
            if above.num_needs:
                break
            for key in above.keys:
                self._sort_out(key, above)
            above = above.parent
        self._forget_empty(prefix)
        if above is not None and above.num_needs == 1:  # the only one that needs it frees more now
            alone: _Prefix | None = above
            while alone is not None and alone.candidate < 0:
                alone = next((below for below in alone.children if below.num_needs), None)
            self._push_nearest(alone)

    def _sort_out(self, key: bytes, prefix: _Prefix) -> None:
        """Put a chunk among the worthless ones, or take it from there."""
        is_state = key[-_GROUP_BYTES:] in self._sparse
        is_needed = prefix.candidate >= 0 if is_state else prefix.num_needs > 0
        if is_needed or self._chunks[key].ref_cnt:
            self._worthless.pop(key, None)
        else:
            self._worthless.setdefault(key, None)

    def _take(self, key: bytes) -> Any:
        """Remove a worthless chunk."""
        del self._worthless[key]
        prefix = self._prefixes[key[:-_GROUP_BYTES]]
        prefix.keys.remove(key)
        prefix.num_states -= key[-_GROUP_BYTES:] in self._sparse
        self._forget_empty(prefix)
        return self._chunks.pop(key)

    def _forget_empty(self, prefix: _Prefix | None) -> None:
        while prefix is not None and not (prefix.keys or prefix.num_needs or prefix.children):
            del self._prefixes[prefix.name]
            if prefix.parent is not None:
                prefix.parent.children.discard(prefix)
            prefix = prefix.parent

    def _density(self, prefix: _Prefix) -> float:
        """Return the value of a state per chunk that only it needs."""
        num_alone = 0
        if prefix.num_needs - prefix.num_running <= 1:
            num_alone, above = 1, prefix.parent
            while above is not None and above.num_needs <= 1 and above.candidate < 0:
                num_alone, above = num_alone + 1, above.parent
        prefix.room = num_alone * self._num_dense + max(1, len(self._sparse))
        return self._tree.order_of(prefix.candidate)[0] / prefix.room

    def _push(self, prefix: _Prefix) -> None:
        """Enter a state into the heap, at its present value."""
        self._num_entries += 1
        prefix.entry = self._num_entries
        heappush(self._heap, (self._density(prefix), prefix.entry, prefix))

    def _push_nearest(self, prefix: _Prefix | None) -> None:
        """Enter the nearest state at or above a prefix anew: its value has changed."""
        while prefix is not None and prefix.candidate < 0:
            prefix = prefix.parent
        if prefix is not None and prefix.entry:
            self._push(prefix)

    def _sweep(self) -> None:
        """Enter all states at their present ages, and drop entries that are no longer valid."""
        tree = self._tree
        tree.look_at(np.array([prefix.candidate for prefix in self._kept], np.int64))
        self._heap = [
            (tree.order_of(prefix.candidate)[0] / prefix.room, prefix.entry, prefix)
            for prefix in self._kept
        ]
        heapify(self._heap)

    def _lowest(self, limit: float) -> _Prefix | None:
        """Return the state of the lowest value, if that is below a limit."""
        while self._heap:
            value, number, prefix = self._heap[0]
            if prefix.entry != number:
                heappop(self._heap)
                continue
            now = self._density(prefix)
            if now <= value:
                return prefix if now < limit else None
            heapreplace(self._heap, (now, number, prefix))
        return None


if importlib.util.find_spec("vllm") is not None:  # it takes subclasses of its own interface only
    _base = importlib.import_module("vllm.v1.kv_offload.cpu.policies.base")
    _base.CachePolicy.register(ValuePolicy)
