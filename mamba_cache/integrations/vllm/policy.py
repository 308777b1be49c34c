"""The value policy: which offloaded chunks vLLM keeps in host memory.

vLLM loads ``ValuePolicy`` by ``eviction_policy`` and ``cache_policy_module_path``, options of its
CPU offloading: see docs/how-to/vllm.md. The value of a saved state is

    rate of return * chunks of tokens saved / chunks that only this state needs

The rates are those of the adaptive policy: docs/how-to/policies.md. An attention chunk is kept
while a state at or after it is kept, or while a running request uses it.
"""

from __future__ import annotations

import importlib.util
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, islice, takewhile
from operator import attrgetter
from typing import Any, Final

import numpy as np

from mamba_cache.cache.adaptive import MIN_GHOSTS, NO_CANDIDATE, CandidateTree, PromptPath
from mamba_cache.cache.policies import PromptFacts

__all__ = ["ValuePolicy"]

_GROUP_BYTES: Final = 4  # a key is the hash of a prefix, then the number of the cache group
_CHUNKS_PER_STATE: Final = 8
_SWEPT_PER_REQUEST: Final = 64
_MIN_REQUESTS_PER_SWEEP: Final = 4
_INFINITE: Final = float("inf")


@dataclass(slots=True, eq=False)
class _Prefix:
    """A prefix up to the end of a chunk, with the chunks of all cache groups there."""

    name: bytes
    parent: _Prefix | None
    depth: int  # in chunks
    hash_id: int  # of the prefix in the tree of candidates
    num_children: int = 0
    needed: set[_Prefix] = field(default_factory=set)  # children with needs
    num_chunks: int = 0
    num_needs: int = 0  # needed children, kept state, running requests that end here
    candidate: int = NO_CANDIDATE  # node of the kept state
    room: int = 1  # chunks that only the kept state needs, as last counted


@dataclass(slots=True, eq=False)
class _Request:
    """A running request: its path of prefixes, and the states that vLLM offered for it."""

    positions: dict[bytes, int]  # by key: tokens up to the end of the chunk
    num_known: int = 0  # positions when the path was built
    path: list[_Prefix] = field(default_factory=list)
    num_matched: int = 0  # prefixes of the path that had chunks at the request's start
    prompt: PromptPath | None = None
    num_prompt: int = 0  # prefixes of the path up to the end of the prompt
    offered: set[_Prefix] = field(default_factory=set)  # prefixes of the offered states
    is_refused: bool = False


class ValuePolicy:
    """Keeps the chunks that save the most tokens per memory used, as learned from requests.

    Chunks of lower value than all kept chunks are refused: ``evict`` returns None, and vLLM does
    not store them. Attention chunks and state chunks are distinguished by their frequency: a
    prompt has an attention chunk at each position, and few states.

    Args:
        cache_capacity: Number of chunks that host memory holds.
    """

    def __init__(self, cache_capacity: int) -> None:
        self.cache_capacity = cache_capacity
        self.clear()

    def clear(self) -> None:
        """Forget all chunks and everything learned."""
        self._chunks: dict[bytes, Any] = {}
        self._prefixes: dict[bytes, _Prefix] = {}
        # Chunks without value that no transfer reads, in the order of eviction.
        self._worthless: OrderedDict[bytes, None] = OrderedDict()
        self._running: dict[str, _Request] = {}
        self._last: _Request | None = None  # request of the last offer
        self._num_seen = Counter[bytes]()  # chunks of requests by cache group
        self._dense: tuple[bytes, ...] = ()  # groups of attention
        self._sparse: tuple[bytes, ...] = ()  # groups of states
        self._kept: dict[_Prefix, None] = {}  # prefixes whose states have value
        self._heap: list[tuple[float, int, _Prefix]] = []  # values as of the push
        self._numbers = count()  # break ties of the heap
        self._until_sweep = 0  # requests until values are recomputed
        max_kept = self.cache_capacity // _CHUNKS_PER_STATE
        self._tree = CandidateTree(max(MIN_GHOSTS, 2 * max_kept), max_kept)

    def get(self, key: bytes) -> Any:
        """Return a chunk, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        """Add a chunk."""
        self._chunks[key] = chunk
        prefix = self._prefix(key[:-_GROUP_BYTES])
        prefix.num_chunks += 1
        is_state = key[-_GROUP_BYTES:] in self._sparse
        if is_state and prefix.candidate < 0 and self._has(prefix, self._sparse):
            self._keep(prefix, self._candidate_of(prefix, self._last))

    def remove(self, key: bytes) -> None:
        """Remove a chunk whose transfer failed."""
        prefix = self._prefixes[key[:-_GROUP_BYTES]]
        self._take(key)
        if not self._has(prefix, self._sparse or self._dense):
            self._drop(prefix)

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Count the request at its first access."""
        self._request_of(req_context)

    on_request_access = touch

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Record the states that a request offers."""
        self._last = request = self._request_of(req_context)
        states = [key for key in keys if key[-_GROUP_BYTES:] in self._sparse]
        request.offered.update(self._prefix(key[:-_GROUP_BYTES]) for key in states)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """Release a request's chunks, and drop its states whose attention chunks were refused."""
        request = self._request_of(req_context)
        del self._running[req_context.req_id]
        self._last = None
        if not request.path:
            return
        self._classify_groups(key_groups)
        path, new = request.path, request.path[request.num_matched :]
        broken = next((p.depth for p in new if not self._has(p, self._dense)), _INFINITE)
        states = {path[request.num_prompt - 1], path[-1], *request.offered}
        for prefix in sorted(states, key=attrgetter("depth")):
            if prefix.depth >= broken or not self._has(prefix, self._sparse):
                self._drop(prefix)
            elif prefix.candidate < 0:
                self._keep(prefix, self._candidate_of(prefix, request))
        self._release(path[-1])

    def mark_evictable(self, key: bytes) -> None:
        """Record that no transfer reads a chunk."""
        prefix = self._prefixes[key[:-_GROUP_BYTES]]
        if not prefix.num_needs or (prefix.candidate < 0 and key[-_GROUP_BYTES:] in self._sparse):
            self._worthless[key] = None

    def mark_non_evictable(self, key: bytes) -> None:
        """Record that a transfer reads a chunk."""
        self._worthless.pop(key, None)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict ``n`` chunks so that offered ones can be stored; those in ``protected`` stay.

        Returns:
            ``n`` keys with their chunks; None if the kept chunks are worth more than those offered.
        """
        num_needed = n + sum(map(self._worthless.__contains__, protected))
        request = self._last
        # Refused chunks are offered again without ``on_store_miss``.
        if request is None or not protected <= request.positions.keys():
            others = self._running.values()
            request = next((r for r in others if protected <= r.positions.keys()), None)
        self._last = request
        if request is None:
            if not self._demote(num_needed, _INFINITE):
                return None
        elif request.is_refused or not self._admit(request, num_needed):
            request.is_refused = True
            return None
        chosen = islice((key for key in self._worthless if key not in protected), n)
        return [(key, self._take(key)) for key in [*chosen]]

    def _admit(self, request: _Request, num_needed: int) -> bool:
        """Make room for a request's offered chunks if its states are worth more than kept ones."""
        offered = {prefix for prefix in request.offered if not self._has(prefix, self._sparse)}
        if (end := request.path[request.num_prompt - 1]).candidate < 0:
            offered.add(end)
        new = sorted(offered, key=attrgetter("depth"))
        if not new:  # room was made with the states; an answer's chunks have no value yet
            return len(self._worthless) >= num_needed
        for prefix in new:
            if prefix.candidate < 0:
                self._keep(prefix, self._candidate_of(prefix, request))
        while new:
            num_required = len(new) * len(self._sparse) + len(self._chunks) - self.cache_capacity
            for prefix in request.path[request.num_matched : new[-1].depth]:
                num_required += not prefix.num_chunks
            lowest = min(new, key=self._density)
            if self._demote(max(num_required, num_needed), self._density(lowest)):
                return True
            new.remove(lowest)
            self._drop(lowest)
        return False

    def _demote(self, num_needed: int, limit: float) -> bool:
        """Drop states below a value until enough chunks are worthless; if too few are, undo."""
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

    def _classify_groups(self, key_groups: Sequence[Sequence[bytes]]) -> None:
        """Count a request's chunks by cache group, and classify the groups by these counts."""
        for keys in filter(None, key_groups):
            self._num_seen[keys[0][-_GROUP_BYTES:]] += len(keys)
        num_seen = self._num_seen
        sparse = tuple(group for group, n in num_seen.items() if 2 * n <= max(num_seen.values()))
        if sparse == self._sparse and len(num_seen) == len(sparse) + len(self._dense):
            return
        self._sparse, self._dense = sparse, tuple(g for g in num_seen if g not in sparse)
        for prefix in [*self._kept]:
            if not self._has(prefix, sparse):
                self._drop(prefix)
        self._worthless.clear()
        for key, chunk in self._chunks.items():
            if not chunk.ref_cnt:
                self.mark_evictable(key)

    def _request_of(self, context: Any) -> _Request:
        """Return the record of a request with its current prefixes; count a new request."""
        positions = context._offload_key_positions  # includes keys neither offered nor loaded
        request = self._running.get(context.req_id)
        if request is None:
            request = self._running[context.req_id] = _Request(positions)
        if len(positions) == request.num_known:
            return request
        request.num_known = len(positions)
        key_at = {at: key for key, at in positions.items()}  # a key of any group
        old_path, above = request.path, None
        request.path = path = []
        chunk = min(key_at)
        for tokens in sorted(key_at):
            if not tokens % chunk:  # vLLM also has positions inside chunks
                above = self._prefix(key_at[tokens][:-_GROUP_BYTES], above)
                path.append(above)
        self._need(path[-1])
        if old_path:
            self._release(old_path[-1])
        hash_ids = [prefix.hash_id for prefix in path]
        if request.prompt is not None:
            request.prompt.hash_ids[:] = hash_ids
            return request
        request.num_matched = sum(1 for _ in takewhile(attrgetter("num_chunks"), path))
        facts = PromptFacts(hash_ids, 1, request.num_matched, len(path))
        request.prompt, request.num_prompt = self._tree.begin_request(facts), len(path)
        self._tree.propose(request.prompt, len(path), "end")
        self._until_sweep -= 1
        return request

    def _candidate_of(self, prefix: _Prefix, request: _Request | None) -> int:
        if request is None or request.prompt is None or prefix not in request.path:
            return self._tree.find_or_add(prefix.hash_id, prefix.depth)
        kind = "branch" if prefix.depth < request.num_prompt else "end"
        return self._tree.propose(request.prompt, request.path.index(prefix) + 1, kind)

    def _prefix(self, name: bytes, parent: _Prefix | None = None) -> _Prefix:
        """Return the prefix of a name, created if new; set its parent if it has none."""
        prefix = self._prefixes.get(name)
        if prefix is None:
            hash_id = int.from_bytes(name[-7:], "big") + 1
            prefix = self._prefixes[name] = _Prefix(name, None, 1, hash_id)
        if parent is not None and prefix.parent is None:
            prefix.parent, prefix.depth = parent, parent.depth + 1
            parent.num_children += 1
            if prefix.num_needs:
                parent.needed.add(prefix)
                self._need(parent)
        return prefix

    def _has(self, prefix: _Prefix, groups: tuple[bytes, ...]) -> bool:
        return all(map(self._chunks.__contains__, map(prefix.name.__add__, groups)))

    def _keep(self, prefix: _Prefix, node: int) -> None:
        """Keep a state and the attention chunks that it needs."""
        self._tree.keep(node)
        prefix.candidate = node
        for group in self._sparse:
            self._worthless.pop(prefix.name + group, None)
        self._need(prefix)
        self._kept[prefix] = None
        heappush(self._heap, (self._density(prefix), next(self._numbers), prefix))

    def _drop(self, prefix: _Prefix) -> None:
        """Make a state worthless, and the attention chunks that only this state needs."""
        if prefix.candidate >= 0:
            self._tree.drop(prefix.candidate)
            prefix.candidate = NO_CANDIDATE
            self._kept.pop(prefix, None)
            self._mark_worthless(prefix, self._sparse)
            self._release(prefix)

    def _need(self, prefix: _Prefix | None) -> None:
        """Add a need for the attention chunks up to a prefix."""
        while prefix is not None:
            prefix.num_needs += 1
            if prefix.num_needs > 1:
                return
            for group in self._dense:
                self._worthless.pop(prefix.name + group, None)
            if prefix.parent is not None:
                prefix.parent.needed.add(prefix)
            prefix = prefix.parent

    def _release(self, prefix: _Prefix) -> None:
        """Undo ``_need``; the deepest chunks become worthless first."""
        above: _Prefix | None = prefix
        while above is not None:
            above.num_needs -= 1
            if above.num_needs:
                break
            self._mark_worthless(above, self._dense)
            if above.parent is not None:
                above.parent.needed.discard(above)
            above = above.parent
        self._forget_empty(prefix)
        if above is not None:
            while above.candidate < 0 and above.num_needs == len(above.needed) == 1:
                (above,) = above.needed
            if above.candidate >= 0:  # more chunks may be needed by its state alone
                heappush(self._heap, (self._density(above), next(self._numbers), above))

    def _mark_worthless(self, prefix: _Prefix, groups: tuple[bytes, ...]) -> None:
        """Mark chunks as worthless, unless a transfer reads them."""
        for group in groups:
            key = prefix.name + group
            chunk = self._chunks.get(key)
            if chunk is not None and not chunk.ref_cnt:
                self._worthless.setdefault(key, None)

    def _take(self, key: bytes) -> Any:
        self._worthless.pop(key, None)
        prefix = self._prefixes[key[:-_GROUP_BYTES]]
        prefix.num_chunks -= 1
        self._forget_empty(prefix)
        return self._chunks.pop(key)

    def _forget_empty(self, prefix: _Prefix | None) -> None:
        while prefix and not (prefix.num_chunks or prefix.num_needs or prefix.num_children):
            del self._prefixes[prefix.name]
            prefix = prefix.parent
            if prefix is not None:
                prefix.num_children -= 1

    def _density(self, prefix: _Prefix) -> float:
        """Return the value of a state per chunk that only this state needs."""
        num_alone = 0
        if not prefix.needed:
            num_alone, above = 1, prefix.parent
            while above is not None and above.num_needs <= 1 and above.candidate < 0:
                num_alone, above = num_alone + 1, above.parent
        prefix.room = num_alone * max(1, len(self._dense)) + max(1, len(self._sparse))
        return self._tree.order_of(prefix.candidate)[0] / prefix.room

    def _lowest(self, limit: float) -> _Prefix | None:
        """Return the kept prefix of the lowest value, if this value is below a limit."""
        if self._until_sweep <= 0:  # recompute all values, at the states' present ages
            between = len(self._kept) // _SWEPT_PER_REQUEST
            self._until_sweep = max(_MIN_REQUESTS_PER_SWEEP, between)
            nodes = np.fromiter(map(attrgetter("candidate"), self._kept), np.int64, len(self._kept))
            rooms = np.fromiter(map(attrgetter("room"), self._kept), np.int64, len(self._kept))
            self._tree.look_at(nodes)
            values = (self._tree.values_of(nodes) / rooms).tolist()
            self._heap = [*zip(values, self._numbers, self._kept, strict=False)]
            heapify(self._heap)
        while self._heap:
            value, number, prefix = self._heap[0]
            if prefix.candidate < 0:
                heappop(self._heap)
                continue
            now = self._density(prefix)
            if now <= value:
                return prefix if now < limit else None
            heapreplace(self._heap, (now, number, prefix))
        return None


if importlib.util.find_spec("vllm") is not None:  # vLLM accepts subclasses of its interface only
    _base = importlib.import_module("vllm.v1.kv_offload.cpu.policies.base")
    _base.CachePolicy.register(ValuePolicy)
