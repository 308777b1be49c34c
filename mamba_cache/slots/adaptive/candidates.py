"""Candidates: positions of prompts at which a state is, was or could be kept, as a tree."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mamba_cache.errors import InvariantError
from mamba_cache.slots.adaptive.rates import BIN_OF_AGE, OLDEST, ReturnRates
from mamba_cache.slots.adaptive.trust import SourceTrust

__all__ = [
    "FORGOTTEN_AT_ONCE",
    "NO_CANDIDATE",
    "REQUESTS_PER_REFIT",
    "REQUESTS_PER_SWEEP",
    "ROOT",
    "CandidateKind",
    "CandidateTree",
    "PromptPath",
    "class_groups",
]

_Int64Array: TypeAlias = "npt.NDArray[np.int64]"

ROOT: Final = 0
"""The candidate of no tokens: always kept, so that every other has one above it."""

NO_CANDIDATE: Final = -1

REQUESTS_PER_REFIT: Final = 256
REQUESTS_PER_SWEEP: Final = 32
FORGOTTEN_AT_ONCE: Final = 32

_KEPT_PER_LOOK: Final = 32
"""The fewer states there are, the shorter they live, and the sooner an old index is a wrong one."""

_MOST_PER_LOOK: Final = 6

_SWEPT_PER_REQUEST: Final = 128
_NUM_FIELDS: Final = 15
_NUM_ORDER: Final = 3
"""The first of them: the order in which candidates go that are worth equally much."""
_ROW: Final = 16
"""Numbers kept of one candidate: with one to spare, so that they fill two lines of a cache."""
_ROW_BYTES: Final = 8 * _ROW
_PACK_ROW: Final = Struct(f"{_NUM_FIELDS}q").pack_into
_SPARE: Final = 256
"""Candidates beyond those that are remembered for which no array grows: one request would wait."""

_NO_EDGE: Final = array("q")
_MOST_WALKED: Final = 64
"""Candidates that are looked at one by one; if there are more, whole arrays are."""

_NEW_BLOCKS: Final = (3, 8, 30)
_LATER_TURNS: Final = (1, 2, 3, 6)
_NUM_KINDS: Final = 3
_NUM_USES: Final = 5
_NUM_TURNS: Final = 5
_NUM_NEW: Final = 4
_NUM_HINTS: Final = 5
_PER_GROUP: Final = _NUM_TURNS * _NUM_NEW * _NUM_HINTS
_PER_USE: Final = 2 * _PER_GROUP
_PER_KIND: Final = _NUM_USES * _PER_USE
_NUM_CLASSES: Final = _NUM_KINDS * _PER_KIND


class CandidateKind(IntEnum):
    """Why a position is a candidate."""

    END_OF_PROMPT = 0
    """The last complete block of a prompt, or of an answer, ends there."""

    BRANCH = 1
    """Prompts part there, or are expected to."""

    INSIDE = 2
    """It lies inside a prompt, as where each chunk or every n-th block of it ends."""


class PromptPath:
    """A prompt as candidates see it: made by ``CandidateTree.begin_request``.

    Attributes:
        hash_ids: Of its complete blocks.
        nodes: The candidates on its path, from the root on, as of ``version``.
        version: Of the tree: what it was when they were found.
        turn: How many prompts went on from each other before it.
        traits: What its candidates have in common, as a part of their class.
        hint: What the class of its end says of the hint that came with it.
        told: By whom and what, None if nothing was.
    """

    __slots__ = ("hash_ids", "hint", "nodes", "told", "traits", "turn", "version")

    def __init__(self, hash_ids: list[int]) -> None:
        self.hash_ids = hash_ids
        self.nodes = [ROOT]
        self.version: object = None
        self.turn = 0
        self.traits = 0
        self.hint = 0
        self.told: tuple[object, bool] | None = None

    def with_hash_ids(self, hash_ids: list[int]) -> PromptPath:
        """Return the same prompt with what came after it."""
        longer = PromptPath(hash_ids)
        longer.turn, longer.traits = self.turn, self.traits
        longer.hint, longer.told = self.hint, self.told
        return longer


class CandidateTree:
    """What is known of each candidate, and what a state at each is worth.

    A candidate with a state is *kept*, one without is a *ghost*. A ghost is *served* by the kept
    candidate nearest above it: a prompt that would have resumed from the ghost resumes from there.
    So the value of a state is its *gain*, the blocks between the kept candidate above it and
    itself, times the sum of the indices of itself and of those that it serves.

    Time is counted in requests. The index of a candidate is looked up when something happens to it
    and at every sweep over all of them; that of a kept one also before it is compared, where that
    was last done ``_requests_per_look`` ago.

    Args:
        max_ghosts: Ghosts that are remembered, and ``FORGOTTEN_AT_ONCE`` more: then the oldest are
            forgotten, but for those where others part.

    Attributes:
        clock: Requests so far.
    """

    def __init__(self, max_ghosts: int) -> None:
        self._rates = ReturnRates(class_groups())
        self._index, self._index_at = self._rates.index, self._rates.index.data
        self._bin_at = BIN_OF_AGE.data
        self.reset(max_ghosts)

    def reset(self, max_ghosts: int, max_kept: int = 0) -> None:
        """Forget everything.

        Args:
            max_ghosts: As above.
            max_kept: How many there are with states; where it is more, arrays grow.
        """
        self._max_ghosts = max_ghosts
        self._requests_per_look = min(max(1, max_kept // _KEPT_PER_LOOK), _MOST_PER_LOOK)
        self._last_look = 0
        self._rates.reset()
        self._trust = SourceTrust()
        self.clock = 0
        self._arrays: _Int64Array = np.zeros((1, _ROW), np.int64)
        self._grow(max_ghosts + max_kept + _SPARE)
        # One entry for each id that was ever taken; it grows as they are.
        self._children: list[dict[int, int]] = []  # by the first hash of the edge to each
        self._edges: list[array[int]] = []  # the hashes from the parent's depth to its own
        self._told: list[tuple[object, bool] | None] = []
        self._free: list[int] = []
        self._num_made = 0
        self._version = object()  # another one whenever a candidate comes or goes
        self._num_ghosts = 0
        self._new_id()
        self._class_at[ROOT] = _PER_GROUP  # as of what others extend already
        self._num_kept_at[ROOT] = self._num_made = 1

    def _grow(self, size: int) -> None:
        # What is known of one candidate lies side by side: a decision asks for much of a few, and
        # finds none of it in the processor's caches.
        arrays = np.zeros((size, _ROW), np.int64)
        old = len(self._arrays) - 1
        arrays[:old] = self._arrays[:old]
        self._arrays, self._memory = arrays, arrays.data
        (
            self._depths, self._last_uses, _, self._classes, self._served, self._gains,
            self._parents, self._num_kept, self._weights, self._servers, self._num_children,
            self._hashes, *_,
        ) = arrays.T  # fmt: skip
        # The last place is that of NO_CANDIDATE: worth less than nothing.
        self._served[NO_CANDIDATE], self._gains[NO_CANDIDATE] = 1, -1
        # Single elements are read and written several times faster through memoryviews.
        (
            self._depth_at, self._last_use_at, self._birth_at, self._class_at, self._served_at,
            self._gain_at, self._parent_at, self._num_kept_at, self._weight_at, self._server_at,
            self._num_children_at, self._hash_at, self._turn_at, self._older_at, self._newer_at,
        ) = (column.data for column in arrays.T[:_NUM_FIELDS])  # fmt: skip

    # What requests ask for.

    def begin_request(
        self,
        hash_ids: Sequence[int],
        num_matched_blocks: int,
        num_usable_blocks: int,
        *,
        will_continue: bool | None = None,
        source: Hashable = None,
    ) -> PromptPath:
        """Count a request; the deepest candidate that it could have resumed from is used by it.

        Args:
            hash_ids: Of each complete block of its prompt.
            num_matched_blocks: How many of them were found.
            num_usable_blocks: How many of them may be skipped at most.
            will_continue: Whether its sender says that a longer prompt will follow.
            source: Who says so.

        Returns:
            What ``propose`` takes.
        """
        self.clock += 1
        self._work()
        if self._num_ghosts >= self._max_ghosts + FORGOTTEN_AT_ONCE:
            self._forget_oldest()
        prompt = PromptPath([*hash_ids])
        self._walk(prompt)
        used = prompt.nodes[self._last_before(prompt, num_usable_blocks)]
        if used != ROOT:
            prompt.turn = self._turn_at[used] + (self._class_at[used] < _PER_KIND)
            self._use(used)
        num_new = len(prompt.hash_ids) - num_matched_blocks
        turn_class = bisect_right(_LATER_TURNS, prompt.turn)
        new_class = bisect_right(_NEW_BLOCKS, num_new)
        prompt.traits = (turn_class * _NUM_NEW + new_class) * _NUM_HINTS
        if will_continue is not None:
            prompt.told = source, will_continue
            prompt.hint = self._trust.level_of(source, will_continue)
        return prompt

    def _walk(self, prompt: PromptPath) -> None:
        """Find the candidates on the path of a prompt, from the root on."""
        path, node, depth = prompt.hash_ids, ROOT, 0
        length = len(path)
        nodes = [ROOT]
        while depth < length:
            child = self._children[node].get(path[depth])
            if child is None:
                break
            depth = self._depth_at[child]
            # A hash names all that is before it, so the last one of an edge does for all.
            if depth > length or self._hash_at[child] != path[depth - 1]:
                break
            node = child
            nodes.append(node)
        prompt.nodes, prompt.version = nodes, self._version

    def _last_before(self, prompt: PromptPath, depth: int) -> int:
        """Return where on a path the deepest candidate is that is not below a depth."""
        nodes, depth_at = prompt.nodes, self._depth_at
        place = len(nodes) - 1
        while depth_at[nodes[place]] > depth:  # the root, which is on every path, is not
            place -= 1
        return place

    def _use(self, node: int) -> None:
        told = self._told[node]
        if told is not None:
            self._told[node] = None
            self._trust.count_return(*told)
        klass = self._class_at[node]
        self._rates.end_spell(klass, self.clock - self._last_use_at[node], is_event=True)
        if klass // _PER_USE % _NUM_USES < _NUM_USES - 1:
            klass += _PER_USE
            self._class_at[node] = klass
        self._last_use_at[node] = self.clock
        if not self._num_kept_at[node]:
            self._remove_ghost(node)
            self._add_ghost(node)
        self._weigh(node)

    def _weigh(self, node: int) -> None:
        """Look up the index of a candidate at its age."""
        age = self.clock - self._last_use_at[node]
        bin_ = self._bin_at[min(age, OLDEST) - 1] if age else 0
        weight = self._index_at[bin_ * _NUM_CLASSES + self._class_at[node]]
        self._served_at[self._server_at[node]] += weight - self._weight_at[node]
        self._weight_at[node] = weight

    def propose(self, prompt: PromptPath, depth: int, kind: CandidateKind) -> int:
        """Return the candidate at a block boundary of a prompt.

        Args:
            prompt: The prompt.
            depth: Blocks before the boundary, from 1 to those that the prompt has.
            kind: Why it is a candidate, if it is a new one.
        """
        if prompt.version is not self._version:
            self._walk(prompt)
        place = self._last_before(prompt, depth)
        node = prompt.nodes[place]
        while self._depth_at[node] < depth:
            node = self._add_below(node, prompt, depth, kind)
            place += 1
            prompt.nodes.insert(place, node)
            prompt.version = self._version
        return node

    def _add_below(self, node: int, prompt: PromptPath, depth: int, kind: CandidateKind) -> int:
        """Add a candidate on a path: at a depth, or before it, where an older prompt parts."""
        path, start = prompt.hash_ids, self._depth_at[node]
        below = self._children[node].get(path[start])
        if below is not None:
            end = start + _common_length(self._edges[below], path, start)
            if end < depth:
                depth, kind = end, CandidateKind.BRANCH
        # Of a prompt that goes on the end will be a candidate, too.
        is_extended = depth < len(path) or below is not None
        klass = kind * _PER_KIND + is_extended * _PER_GROUP + prompt.traits
        told = prompt.told if kind == CandidateKind.END_OF_PROMPT else None
        if told is not None:
            klass += prompt.hint
            self._trust.count(*told)
        new = self._add_ghost_below(node, path[depth - 1], depth, klass, prompt.turn)
        self._told[new] = told
        self._edges[new] = array("q", path[start:depth])
        self._children[node][path[start]] = new
        if below is not None:
            edge = self._edges[below] = self._edges[below][depth - start :]
            self._children[new][edge[0]] = below
            self._parent_at[below] = new
            self._num_children_at[new] = 1
        else:
            self._num_children_at[node] += 1
        if not self._class_at[node] // _PER_GROUP % 2:
            self._extend(node)
        return new

    def _new_id(self) -> int:
        """Take an id that no candidate has."""
        self._version = object()
        if self._free:
            return self._free.pop()
        node = len(self._edges)
        if node == len(self._arrays) - 1:
            self._grow(2 * len(self._arrays))
        self._children.append({})
        self._edges.append(_NO_EDGE)
        self._told.append(None)
        return node

    def _add_ghost_below(
        self, parent: int, hash_id: int, depth: int, klass: int, turn: int = 0
    ) -> int:
        """Begin the first spell of a new candidate, which has no state."""
        node, born = self._new_id(), self._num_made
        server, older, weight = self._server_at[parent], self._older_at[ROOT], self._index_at[klass]
        # In the order of ``_grow``. Nothing is gained or served by it, and nobody extends it.
        fields = (depth, self.clock, born, klass, 0, 0, parent, 0, weight, server, 0, hash_id, turn)
        _PACK_ROW(self._memory, node * _ROW_BYTES, *fields, older, ROOT)
        self._newer_at[older] = self._older_at[ROOT] = node
        self._num_ghosts += 1
        self._num_made += 1
        self._served_at[server] += weight
        return node

    def _extend(self, node: int) -> None:
        """Say that another candidate extends this one, which none did before."""
        klass = self._class_at[node]
        age = self.clock - self._last_use_at[node]
        self._rates.end_spell(klass, age, is_event=False)
        self._rates.begin_spell(klass + _PER_GROUP, age)
        self._class_at[node] = klass + _PER_GROUP
        self._weigh(node)

    def add_alone(self, hash_id: int, depth: int) -> int:
        """Add a candidate whose prompt nobody has shown.

        Args:
            hash_id: Of its block; one that is not positive stands for none.
            depth: The blocks that its state saves.
        """
        if hash_id <= 0:
            hash_id = -1 - 2 * self._num_made
        klass = CandidateKind.INSIDE * _PER_KIND
        node = self._add_ghost_below(ROOT, hash_id, depth, klass)
        self._edges[node] = array("q", [1 - 2 * self._num_made])  # of no path
        self._children[ROOT][self._edges[node][0]] = node
        self._num_children_at[ROOT] += 1
        return node

    def find(self, hash_id: int) -> int:
        """Return the candidate at the block of a hash id, or ``NO_CANDIDATE``.

        It looks at all: few states come without their prompts, and many candidates come and go.
        """
        if hash_id <= 0:
            return NO_CANDIDATE
        found = (self._hashes[: len(self._edges)] == hash_id).nonzero()[0]
        return found.item(-1) if len(found) else NO_CANDIDATE

    def complete(self, node: int, hash_id: int) -> int:
        """Give a candidate the hash id of its last block, which was not known when it was made.

        Args:
            node: A ghost that no other candidate extends; it is forgotten.
            hash_id: Of its last block.

        Returns:
            The candidate of that block: it may have been one before.
        """
        path: list[int] = []
        above = node
        while above != ROOT:
            path[:0] = self._edges[above]
            above = self._parent_at[above]
        prompt = PromptPath([*path[:-1], hash_id])
        prompt.turn = self._turn_at[node]
        prompt.traits = self._class_at[node] % _PER_GROUP
        self.forget(node)
        return self.propose(prompt, len(path), CandidateKind.END_OF_PROMPT)

    # What is kept.

    @property
    def num_candidates(self) -> int:
        """Candidates with and without a state, but for ``ROOT``."""
        return int(np.count_nonzero(self._num_kept)) + self._num_ghosts - 1

    @property
    def num_ghosts(self) -> int:
        """Candidates without a state."""
        return self._num_ghosts

    def is_kept(self, node: int) -> bool:
        """Say whether a slot holds or awaits a candidate's state."""
        return bool(self._num_kept_at[node])

    def keep(self, node: int) -> None:
        """Count a slot that holds or awaits a candidate's state."""
        self._num_kept_at[node] += 1
        if self._num_kept_at[node] > 1:
            return
        self._remove_ghost(node)
        self._weigh(node)
        server, weight = self._server_at[node], self._weight_at[node]
        self._server_at[node] = node
        self._gain_at[node] = self._depth_at[node] - self._depth_at[server]
        served = self._take_over(node, node)
        if served >= 0:
            self._served_at[node] = served + weight
            self._served_at[server] -= served + weight

    def drop(self, node: int) -> None:
        """Count a slot less; without any the candidate is a ghost."""
        self._num_kept_at[node] -= 1
        if self._num_kept_at[node]:
            return
        self._add_ghost(node)
        served, self._served_at[node] = self._served_at[node], 0
        server = self._server_at[node] = self._server_at[self._parent_at[node]]
        if self._take_over(server, node) >= 0:
            self._served_at[server] += served

    def _take_over(self, server: int, node: int) -> int:
        """Have what lies below a candidate served by one that is kept from now on.

        Returns:
            The sum of the weights of the ghosts between the candidate and the kept ones below it;
            -1 if there are so many that all sums were made anew.
        """
        if not self._children[node]:
            return 0
        found = [*self._children[node].values()]
        total, depth, server_at = 0, self._depth_at[server], self._server_at
        for below in found:  # it grows
            if self._num_kept_at[below]:
                self._gain_at[below] = self._depth_at[below] - depth
            else:
                total += self._weight_at[below]
                server_at[below] = server
                found += self._children[below].values()
            if len(found) > _MOST_WALKED:
                self._resolve()
                return -1
        return total

    def _resolve(self) -> None:
        """Find anew what each kept candidate gains and serves, and which serves each ghost."""
        size = len(self._edges)
        servers = np.where(self._num_kept[:size] > 0, np.arange(size), self._parents[:size])
        while True:
            above = servers.take(servers)
            if np.array_equal(above, servers):
                break
            servers = above
        self._servers[:size] = servers
        self._sum_up()
        depths = self._depths[:size]
        self._gains[:size] = depths - depths.take(servers.take(self._parents[:size]))

    def _sum_up(self) -> None:
        """Add up the weights that each kept candidate serves."""
        size = len(self._edges)
        servers, weights = self._servers[:size], self._weights[:size]
        # Sums of integers below 2**53: float64 adds them up exactly, in any order.
        self._served[:size] = np.bincount(servers, weights, minlength=size)

    def forget(self, node: int) -> None:
        """Forget a ghost that at most one other candidate extends."""
        self._remove_ghost(node)
        self._forget(node)

    def counts_of_kept(self) -> dict[int, int]:
        """Return for each kept candidate, but for ``ROOT``, the slots that hold or await it."""
        kept = self._num_kept.nonzero()[0].tolist()
        return {node: self._num_kept_at[node] for node in kept if node != ROOT}

    def _forget_oldest(self) -> None:
        num_tried = 0
        # So many are in between only if all are where others part.
        while self._num_ghosts > self._max_ghosts and num_tried < self._num_ghosts:
            node = self._newer_at[ROOT]
            self._remove_ghost(node)
            num_tried += 1
            if self._num_children_at[node] > 1:
                self._add_ghost(node)
            else:
                self._forget(node)
                num_tried = 0

    def _add_ghost(self, node: int) -> None:
        """Put a ghost behind all others: they form a ring, by age, that ``ROOT`` closes."""
        older = self._older_at[ROOT]
        self._older_at[node], self._newer_at[node] = older, ROOT
        self._newer_at[older] = self._older_at[ROOT] = node
        self._num_ghosts += 1

    def _remove_ghost(self, node: int) -> None:
        """Take a ghost from the others."""
        older, newer = self._older_at[node], self._newer_at[node]
        self._newer_at[older], self._older_at[newer] = newer, older
        self._num_ghosts -= 1

    def _ghosts(self) -> list[int]:
        """Return all ghosts, the oldest first."""
        found, node = [], self._newer_at[ROOT]
        while node != ROOT:
            found.append(node)
            node = self._newer_at[node]
        return found

    def _forget(self, node: int) -> None:
        """Forget a ghost with one candidate directly below it, or none."""
        age = self.clock - self._last_use_at[node]
        self._rates.end_spell(self._class_at[node], age, is_event=False)
        parent, edge = self._parent_at[node], self._edges[node]
        self._served_at[self._server_at[node]] -= self._weight_at[node]
        siblings, children = self._children[parent], self._children[node]
        del siblings[edge[0]]
        for below in children.values():
            siblings[edge[0]] = below
            self._edges[below] = edge + self._edges[below]
            self._parent_at[below] = parent
        if not children:
            self._num_children_at[parent] -= 1
        children.clear()
        self._edges[node] = _NO_EDGE
        # What else there is of it is written anew with the next one of this id.
        self._weight_at[node] = self._depth_at[node] = self._num_children_at[node] = 0
        self._hash_at[node] = self._parent_at[node] = 0
        self._free.append(node)
        self._version = object()

    # What a state is worth.

    def _indices(self, nodes: npt.NDArray[np.intp]) -> _Int64Array:
        """Return the indices of many candidates at their ages."""
        ages = self._last_uses[nodes]
        np.subtract(self.clock - 1, ages, out=ages)
        bins = BIN_OF_AGE.take(ages, mode="clip")
        places = np.multiply(bins, _NUM_CLASSES, dtype=np.int64)
        places += self._classes[nodes]
        found: _Int64Array = self._index.take(places)
        return found

    def look_at(self, nodes: npt.NDArray[np.intp]) -> None:
        """Look up the indices of many kept candidates, if that is due, before they are compared."""
        if self.clock - self._last_look < self._requests_per_look:
            return
        self._last_look = self.clock
        weights = self._indices(nodes)
        self._served[nodes] += weights - self._weights[nodes]
        self._weights[nodes] = weights

    def values_of(self, nodes: npt.NDArray[np.intp]) -> _Int64Array:
        """Return what a state at each of many kept candidates is worth, or -1 or less for none."""
        values: _Int64Array = self._served[nodes]
        values *= self._gains[nodes]
        return values

    def orders_of_equals(self, nodes: npt.NDArray[np.intp]) -> list[list[int]]:
        """Return what is the least for the one that goes first of many worth equally much.

        It is the shallowest; of these the one that was used least recently, of these the oldest.
        """
        orders: list[list[int]] = self._arrays.take(nodes, 0)[:, :_NUM_ORDER].tolist()
        return orders

    def blocks_freed_by(self, nodes: npt.NDArray[np.intp]) -> _Int64Array:
        """Return the blocks that only the state of each of many kept candidates needs.

        They reach up to the kept candidate above it, or to where other prompts part from its own.
        """
        above = self._parents[nodes]
        while True:
            is_end = self._num_kept[above] > 0
            is_end |= self._num_children[above] > 1
            if is_end.all():
                break
            above = np.where(is_end, above, self._parents[above])
        freed: _Int64Array = self._depths[nodes] - self._depths[above]
        return freed

    def _work(self) -> None:
        """Do the share of refits and sweeps that is due."""
        self._rates.work()
        size = len(self._edges)
        if self.clock % REQUESTS_PER_REFIT == 0:
            known = self._depths[:size].nonzero()[0]
            ages = self.clock - self._last_uses[known]
            oldest = self.clock + 2 * REQUESTS_PER_REFIT
            self._rates.refit(self._classes[known], ages, oldest=oldest)
        elif self.clock % max(REQUESTS_PER_SWEEP, size // _SWEPT_PER_REQUEST) == 0:
            self._weights[:size] = self._indices(np.arange(size)) * (self._depths[:size] > 0)
            self._sum_up()

    # What it is proved by.

    def check_invariants(self) -> None:
        """Check the bookkeeping against itself.

        Raises:
            InvariantError: Something contradicts something else.
        """
        kept = set(self._num_kept.nonzero()[0].tolist())
        ghosts = self._ghosts()
        known = kept | {*ghosts}
        statements = {
            "ROOT is kept": ROOT in kept,
            "ghosts are counted": len(ghosts) == self._num_ghosts,
            "no ghost is kept": len(known) == len(kept) + len(ghosts),
            "known and free ids are all": (
                sorted([*known, *self._free]) == list(range(len(self._edges)))
            ),
            "children are counted": all(
                self._num_children_at[n] == len(self._children[n]) for n in known
            ),
        }
        served, gains = dict.fromkeys(kept, 0), dict.fromkeys(kept, 0)
        for node in known - {ROOT}:
            parent = self._parent_at[node]
            edge, depth = self._edges[node], self._depth_at[node]
            server = self._server_at[parent]
            is_alone = edge[0] < 0 and len(edge) == 1
            statements[f"candidate {node} hangs on its parent"] = (
                self._children[parent].get(edge[0]) == node
                and (is_alone or self._depth_at[parent] + len(edge) == depth)
                and (is_alone or edge[-1] == self._hash_at[node])
            )
            if node in kept:
                gains[node] = depth - self._depth_at[server]
                server = node
            statements[f"candidate {node} is served"] = self._server_at[node] == server
            served[server] += self._weight_at[node]
        for node in kept:
            is_right = self._served_at[node] == served[node]
            is_right &= node == ROOT or self._gain_at[node] == gains[node]
            statements[f"candidate {node} gains and serves what it should"] = is_right
        breaches = [statement for statement, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"does not hold: {'; '.join(breaches[:8])}")


def class_groups() -> _Int64Array:
    """Return the group of each class: its kind, uses, and whether it is extended.

    What came with a hint that is hardly ever wrong makes groups of its own.
    """
    classes = np.arange(_NUM_CLASSES)
    return classes // _PER_GROUP * 3 + np.maximum(classes % _NUM_HINTS - 2, 0)


def _common_length(edge: array[int], path: Sequence[int], start: int) -> int:
    """Return how many blocks of an edge a path has from its place ``start`` on.

    A hash names all that is before it, so from where one differs all do.
    """
    places = range(min(len(edge), len(path) - start))
    return bisect_left(places, True, key=lambda place: edge[place] != path[start + place])
