"""The adaptive policy: it learns which states are used again, and keeps those.

A *candidate* is a block boundary of a prompt at which a state is, was or could be saved. With a
state it is *kept*, without one it is a *ghost*. Candidates form a tree: one extends another if its
prompt begins with the other's. The value of a state is

    gain * (index of its candidate + indices of the ghosts that it serves)

*Gain* is the number of blocks from the kept candidate above it. It *serves* the ghosts below it,
down to the next kept ones: their prompts resume from it. Indices are learned from counts. Time is
counted in requests. docs/how-to/policies.md has the algorithm and its figures.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mamba_cache.cache.policies import PromptFacts, SlotPlan, StateProposal
from mamba_cache.errors import InvariantError
from mamba_cache.protocols import KVBlockView

__all__ = [
    "BIN_OF_AGE", "CLASS_GROUPS", "FORGOTTEN_AT_ONCE", "INDEX_SCALE", "MAX_EVENTS", "MAX_SOURCES",
    "MIN_GHOSTS", "NO_CANDIDATE", "NUM_BINS", "OLDEST", "REQUESTS_PER_REFIT", "REQUESTS_PER_SWEEP",
    "ROOT", "AdaptiveSlotPolicy", "CandidateTree", "PromptPath", "ReturnRates", "SourceTrust",
]  # fmt: skip

_Ints: TypeAlias = "npt.NDArray[np.int64]"
_Floats: TypeAlias = "npt.NDArray[np.float64]"

# Bin n of ages begins at 2 ** (n / 2), rounded up; no float powers, so that processes agree.
NUM_BINS: Final = 40
_EDGES: Final = np.array(
    [1 << n // 2 if n % 2 == 0 else -(-(1 << n // 2) * 665857 // 470832) for n in range(41)],
    np.int64,
)
OLDEST: Final = int(_EDGES[-1]) - 1
BIN_OF_AGE: Final = np.repeat(np.arange(NUM_BINS, dtype=np.int8), np.diff(_EDGES))  # from age 1
_FIRST_AGE: Final = _EDGES[:-1]
_WIDTHS: Final = np.diff(_EDGES).astype(np.float64)

INDEX_SCALE: Final = 1 << 32  # indices are integers, rates times this, so that sums are exact
MAX_EVENTS: Final = 5000  # when more events were counted, all counts are halved
_PRIOR: Final = 0.5 / _FIRST_AGE
_LEVEL_EVENTS, _BIN_EVENTS = 2, 0.5
MAX_SOURCES: Final = 1024
_MIN_HINTS, _MAX_HINTS = 32, 2048
_SELDOM: Final = 0.1

ROOT: Final = 0  # the candidate of no blocks; always kept
NO_CANDIDATE: Final = -1
REQUESTS_PER_REFIT: Final = 256
REQUESTS_PER_SWEEP: Final = 32
_SWEPT_PER_REQUEST: Final = 128
# With few slots states live shortly, so indices must be fresher: see docs/how-to/policies.md.
_KEPT_PER_LOOK, _MAX_PER_LOOK = 32, 6
MIN_GHOSTS: Final = 4096
_GHOSTS_PER_SLOT: Final = 16
FORGOTTEN_AT_ONCE: Final = 32

# A candidate is a row of int64 in one array: a decision reads many fields of few candidates.
_NUM_FIELDS: Final = 12
_PACK_ROW: Final = Struct(f"{_NUM_FIELDS}q").pack_into
_MAX_WALKED: Final = 64  # candidates visited one by one; beyond it, whole arrays are computed
_EVICTED: Final = np.iinfo(np.int64).max

# A class is (kind, uses, extended, turn, new blocks, hint), its group the first three and whether
# the hint is very reliable.
_KINDS: Final = {"end": 0, "branch": 1, "inside": 2}
_NEW_BLOCKS, _LATER_TURNS = (3, 8, 30), (1, 2, 3, 6)
_NUM_USES, _NUM_NEW, _NUM_HINTS = 5, 4, 5
_PER_GROUP: Final = 5 * _NUM_NEW * _NUM_HINTS
_PER_USE: Final = 2 * _PER_GROUP
_PER_KIND: Final = _NUM_USES * _PER_USE
_NUM_CLASSES: Final = len(_KINDS) * _PER_KIND
_CLASSES: Final = np.arange(_NUM_CLASSES)
CLASS_GROUPS: Final = _CLASSES // _PER_GROUP * 3 + np.maximum(_CLASSES % _NUM_HINTS - 2, 0)


class ReturnRates:
    """Events and exposure by class and age, and the index that follows from them.

    A *spell* is the time of a candidate in one class, until it is used, changes its class or is
    forgotten. *Exposure* is the time of all spells in an age bin; events over exposure is the rate
    of return. With few events the rate of a class leans on that of its group, this on that of all
    classes, and this on 1 / age (Gamma-Poisson shrinkage).
    ``index`` is [NUM_BINS * num_classes] int64, by age bin, then by class.
    """

    def __init__(self, groups: _Ints) -> None:
        self._groups = groups
        shape = len(groups), NUM_BINS
        # Events; spells that end in a bin minus spells that begin in it; the time that they spend
        # in that bin, likewise. Events and exposure from before the last halving.
        self._counts = np.zeros((*shape, 3), np.int64)
        self._old_events, self._old_exposure = np.zeros(shape), np.zeros(shape)
        self._is_seen = np.zeros(len(groups), np.bool_)
        self._table = np.zeros(shape[::-1], np.int64)
        self.index = self._table.reshape(-1)
        # Memoryviews read and write single elements several times faster.
        self._count_at, self._seen_at = self._counts.reshape(-1).data, self._is_seen.data
        self._bin_at, self._first_at = BIN_OF_AGE.data, _FIRST_AGE.data
        self.refit(np.empty(0, np.int64), np.empty(0, np.int64))

    def count(self, klass: int, age: int, step: int, *, is_event: bool = False) -> None:
        """Count a candidate that enters (-1) or leaves (1) a class, by a use or not."""
        if age:
            self._seen_at[klass] = True
            age = min(age, OLDEST)
            bin_ = self._bin_at[age - 1]
            place = 3 * (klass * NUM_BINS + bin_)
            self._count_at[place] += is_event
            self._count_at[place + 1] += step
            self._count_at[place + 2] += step * (age - self._first_at[bin_] + 1)

    def refit(self, classes: _Ints, ages: _Ints, *, oldest: int = OLDEST) -> None:
        """Derive all indices up to age ``oldest`` from counts and [n] classes and ages."""
        self._is_seen[classes] = True
        seen = self._is_seen.nonzero()[0]
        # The spells of all candidates go on; count them as if they ended now.
        row_of_class = np.zeros(len(self._is_seen), np.int64)
        row_of_class[seen] = np.arange(len(seen))
        lived = ages > 0
        ages = np.minimum(ages[lived], OLDEST)
        bins = BIN_OF_AGE[ages - 1]
        places, shape = row_of_class[classes[lived]] * NUM_BINS + bins, (len(seen), NUM_BINS)
        going = np.bincount(places, minlength=len(seen) * NUM_BINS).reshape(shape)
        parts_going = np.bincount(places, ages - _FIRST_AGE[bins] + 1, going.size).reshape(shape)
        counted, ended, parts = self._counts[seen].transpose(2, 0, 1)
        ended = ended + going
        outlasting = ended[:, ::-1].cumsum(1)[:, ::-1] - ended
        exposure = outlasting * _WIDTHS + (parts_going + parts) + self._old_exposure[seen]
        events = counted + self._old_events[seen]
        if events.sum() > MAX_EVENTS:  # the spells that go on begin anew, at their ages
            # In 1024ths, so that sums stay exact.
            self._old_events[seen] = np.floor(events * 512) / 1024
            self._old_exposure[seen] = np.floor(exposure * 512) / 1024
            self._counts.fill(0)
            self._counts[seen, :, 1], self._counts[seen, :, 2] = -going, -parts_going
        # Rates of: groups without events, each other group, each class seen.
        groups, own = np.unique(self._groups[seen], return_inverse=True)
        own += 1
        sums = (own == np.arange(len(groups) + 1)[:, None]).astype(np.float64)
        group_events, group_exposure = sums @ events, sums @ exposure
        in_all = _shrunk(group_events.sum(0), group_exposure.sum(0), _PRIOR)
        in_groups = _shrunk(group_events, group_exposure, in_all)
        rates = np.concatenate((in_groups, _shrunk(events, exposure, in_groups[own])))
        row_of_group = np.zeros(int(self._groups.max()) + 1, np.intp)
        row_of_group[groups] = np.arange(1, len(in_groups))
        rows = row_of_group[self._groups]
        rows[seen] = np.arange(len(own)) + len(in_groups)
        # The Gittins index of a state that is used at most once: the best ratio, over all ages up
        # to which it is kept, of the chance of a use to the time kept (Gittins, Glazebrook and
        # Weber, Multi-armed Bandit Allocation Indices, 2011, chapter 2).
        expected = rates.T * _WIDTHS[:, None]
        survival = 1 / (1 + expected + expected * expected / 2)  # no exp: its last bit may differ
        # [NUM_BINS + 1, n]: the chance of no use before a bin, and the time from there on.
        alive = np.ones((NUM_BINS + 1, len(rates)))
        np.cumprod(survival, 0, out=alive[1:])
        time = np.zeros_like(alive)
        spent = (alive[:-1] + alive[1:]) * (_WIDTHS[:, None] / 2)
        time[:-1] = spent[::-1].cumsum(0)[::-1]
        for bin_ in range(BIN_OF_AGE.item(min(oldest, OLDEST) - 1) + 1):
            ratio = alive[bin_] - alive[bin_ + 1 :]
            ratio /= np.maximum(time[bin_] - time[bin_ + 1 :], 1e-200)
            index = (ratio.max(0) * INDEX_SCALE).astype(np.int64)
            index.take(rows, out=self._table[bin_], mode="clip")


def _shrunk(events: _Floats, exposure: _Floats, prior: _Floats) -> _Floats:
    level = (events.sum(-1) + _LEVEL_EVENTS) / ((exposure * prior).sum(-1) + _LEVEL_EVENTS)
    rates: _Floats = (events + _BIN_EVENTS) / (exposure + _BIN_EVENTS / (prior * level[..., None]))
    return rates


class SourceTrust:
    """Learns whether the hints of a source ("this prompt will continue") are worth a class.

    They are if True was followed by a use more often than False, by more than three deviations.
    """

    def __init__(self) -> None:
        # Ends with hint False, with True, and those of each used again; the oldest record first.
        self._records: OrderedDict[Hashable, list[int]] = OrderedDict()

    def level_of(self, source: Hashable, hint: bool) -> int:
        """Return the class of a hint: 0 untrusted; 1 no, 2 yes; 3 no, 4 yes of a reliable source.

        A source is reliable if prompts with the hint False are hardly ever continued.
        """
        ends_no, ends_yes, used_no, used_yes = self._records.get(source, [0] * 4)
        if min(ends_no, ends_yes) < _MIN_HINTS:
            return 0
        no, yes = used_no / ends_no, used_yes / ends_yes
        share = (used_no + used_yes) / (ends_no + ends_yes)
        variance = share * (1 - share) * (1 / ends_no + 1 / ends_yes)
        if yes <= no or (yes - no) * (yes - no) <= 9 * variance:
            return 0
        return (3 if no < _SELDOM * share else 1) + hint

    def count(self, source: Hashable, hint: bool) -> None:
        """Count the end of a prompt that came with a hint."""
        record = self._records.setdefault(source, [0] * 4)
        self._records.move_to_end(source)
        if len(self._records) > MAX_SOURCES:
            self._records.popitem(last=False)
        record[hint] += 1
        if record[hint] > _MAX_HINTS:  # sources change
            record[:] = [n // 2 for n in record]

    def count_return(self, source: Hashable, hint: bool) -> None:
        """Count the first use of such an end."""
        if source in self._records:
            record = self._records[source]
            record[2 + hint] = min(record[2 + hint] + 1, record[hint])


@dataclass(slots=True)
class PromptPath:
    """A prompt, as ``CandidateTree`` knows it."""

    hash_ids: list[int]
    turn: int = 0  # prompts that it continues
    traits: int = 0  # turn and new blocks, as a part of the class of its candidates
    hint: int = 0  # the hint, as a part of the class of its end
    told: tuple[Hashable, bool] | None = None  # source and hint
    near: int = ROOT  # a candidate on its path to search from; it may be forgotten by now


class CandidateTree:
    """The candidates, and the value of a state at each."""

    def __init__(self, max_ghosts: int, max_kept: int = 0) -> None:
        self._max_ghosts = max_ghosts
        self._requests_per_look = min(max(1, max_kept // _KEPT_PER_LOOK), _MAX_PER_LOOK)
        self._last_look = self._clock = 0
        self._rates, self._trust = ReturnRates(CLASS_GROUPS), SourceTrust()
        self._index, self._index_at = self._rates.index, self._rates.index.data
        self._bin_at = BIN_OF_AGE.data
        self._arrays: _Ints = np.zeros((1, _NUM_FIELDS), np.int64)
        self._grow(max_ghosts + max_kept + 256)
        self.ghosts: OrderedDict[int, None] = OrderedDict()  # by last use
        # By id: the children by the first hash of the edge to each, and the hashes of the edge
        # from the parent. Hints that wait for their outcome.
        self._children: list[dict[int, int]] = [{}]
        self._edges = [array("q")]
        self._told: dict[int, tuple[Hashable, bool]] = {}
        self._by_hash: dict[int, int] = {}
        self._free: list[int] = []
        self._class_at[ROOT] = _PER_GROUP  # extended
        self.num_kept_at[ROOT] = self._num_made = 1

    def _grow(self, size: int) -> None:
        arrays = np.zeros((size, _NUM_FIELDS), np.int64)
        arrays[: len(self._arrays) - 1] = self._arrays[:-1]
        self._arrays, self._memory = arrays, arrays.data
        (
            self._depths, self._last_uses, _, self._classes, self._served, self._gains,
            self._parents, self._num_kept, self._weights, self._servers, self._num_children, _,
        ) = arrays.T  # fmt: skip
        # The last row is that of NO_CANDIDATE: its value is below all others.
        self._served[NO_CANDIDATE], self._gains[NO_CANDIDATE] = 1, -1
        (
            self._depth_at, self._last_use_at, _, self._class_at, self._served_at, self._gain_at,
            self._parent_at, self.num_kept_at, self._weight_at, self._server_at,
            self._num_children_at, self._turn_at,
        ) = (column.data for column in arrays.T)  # fmt: skip

    def begin_request(self, facts: PromptFacts) -> PromptPath:
        """Count a request as a use of the deepest candidate that it could have resumed from."""
        self._clock += 1
        size = len(self._edges)
        if self._clock % REQUESTS_PER_REFIT == 0:
            known = self._depths[:size].nonzero()[0]
            ages = self._clock - self._last_uses[known]
            oldest = self._clock + REQUESTS_PER_REFIT
            self._rates.refit(self._classes[known], ages, oldest=oldest)
        elif self._clock % max(REQUESTS_PER_SWEEP, size // _SWEPT_PER_REQUEST) == 0:
            self._weights[:size] = self._indices(np.arange(size)) * (self._depths[:size] > 0)
            self._resolve()
        if len(self.ghosts) >= self._max_ghosts + FORGOTTEN_AT_ONCE:
            self._forget_oldest()
        prompt = PromptPath([*facts.hash_ids])
        used = self._deepest(prompt, min(facts.num_usable_blocks, len(prompt.hash_ids)))
        if used != ROOT:
            prompt.turn = self._turn_at[used] + (self._class_at[used] < _PER_KIND)
            told = self._told.pop(used, None)
            if told is not None:
                self._trust.count_return(*told)
            klass = self._class_at[used]
            self._rates.count(klass, self._clock - self._last_use_at[used], 1, is_event=True)
            if klass // _PER_USE % _NUM_USES < _NUM_USES - 1:
                self._class_at[used] = klass + _PER_USE
            self._last_use_at[used] = self._clock
            if not self.num_kept_at[used]:
                self.ghosts.move_to_end(used)
            self._weigh(used)
        turn_class = bisect_right(_LATER_TURNS, prompt.turn)
        new_class = bisect_right(_NEW_BLOCKS, len(prompt.hash_ids) - facts.num_matched_blocks)
        prompt.traits = (turn_class * _NUM_NEW + new_class) * _NUM_HINTS
        if facts.will_continue is not None:
            prompt.told = facts.source, facts.will_continue
            prompt.hint = self._trust.level_of(*prompt.told)
        return prompt

    def _deepest(self, prompt: PromptPath, depth: int) -> int:
        """Return the deepest candidate on a path that is not below a depth."""
        path, node = prompt.hash_ids, prompt.near
        at = self._depth_at[node]
        # A hash names all that is before it, so the last hash of an edge proves the path.
        if not 0 < at <= depth or self._edges[node][-1] != path[at - 1]:
            node, at = ROOT, 0
        while at < depth:
            child = self._children[node].get(path[at])
            if child is None:
                break
            at = self._depth_at[child]
            if at > depth or self._edges[child][-1] != path[at - 1]:
                break
            node = child
        prompt.near = node
        return node

    def _weigh(self, node: int) -> None:
        """Look up the index of a candidate."""
        age = self._clock - self._last_use_at[node]
        bin_ = self._bin_at[min(age, OLDEST) - 1] if age else 0
        weight = self._index_at[bin_ * _NUM_CLASSES + self._class_at[node]]
        self._served_at[self._server_at[node]] += weight - self._weight_at[node]
        self._weight_at[node] = weight

    def propose(self, prompt: PromptPath, depth: int, kind: str) -> int:
        """Return the candidate ``depth`` blocks into a prompt; a new one is of this kind."""
        node = self._deepest(prompt, depth)
        while self._depth_at[node] < depth:
            node = self._add_below(node, prompt, depth, kind)
        prompt.near = node
        return node

    def _add_below(self, node: int, prompt: PromptPath, depth: int, kind: str) -> int:
        """Add a candidate on a path: at a depth, or before it where an older prompt branches."""
        path, start = prompt.hash_ids, self._depth_at[node]
        below = self._children[node].get(path[start])
        if below is not None:
            edge = self._edges[below]
            # A hash names all that is before it, so paths differ in all blocks after the first.
            places = range(min(len(edge), len(path) - start))
            end = start + bisect_left(places, True, key=lambda n: edge[n] != path[start + n])
            if end < depth:
                depth, kind = end, "branch"
        # The end of a longer prompt will be a candidate, too.
        is_extended = depth < len(path) or below is not None
        klass = _KINDS[kind] * _PER_KIND + is_extended * _PER_GROUP + prompt.traits
        told = prompt.told if kind == "end" else None
        if told is not None:
            klass += prompt.hint
            self._trust.count(*told)
        new = self._add_ghost(node, path[start:depth], depth, klass, prompt.turn)
        if told is not None:
            self._told[new] = told
        if below is not None:
            edge = self._edges[below] = self._edges[below][depth - start :]
            self._children[new][edge[0]] = below
            self._parent_at[below] = new
            self._num_children_at[new] = 1
            self._num_children_at[node] -= 1
        klass = self._class_at[node]
        if not klass // _PER_GROUP % 2:  # now another candidate extends it
            age = self._clock - self._last_use_at[node]
            self._rates.count(klass, age, 1)
            self._rates.count(klass + _PER_GROUP, age, -1)
            self._class_at[node] = klass + _PER_GROUP
            self._weigh(node)
        return new

    def _add_ghost(
        self, parent: int, edge: Sequence[int], depth: int, klass: int, turn: int = 0
    ) -> int:
        """Add a candidate below another, and begin its first spell."""
        if self._free:
            node = self._free.pop()
        else:
            node = len(self._edges)
            if node == len(self._arrays) - 1:
                self._grow(2 * len(self._arrays))
            self._children.append({})
            self._edges.append(array("q"))
        server, weight = self._server_at[parent], self._index_at[klass]
        # In the order of ``_grow``. It gains and serves nothing, and no candidate extends it.
        born = self._clock, self._num_made
        fields = depth, *born, klass, 0, 0, parent, 0, weight, server, 0, turn
        _PACK_ROW(self._memory, node * 8 * _NUM_FIELDS, *fields)
        self._edges[node] = array("q", edge)
        self._children[parent][edge[0]] = self._by_hash[edge[-1]] = node
        self._num_children_at[parent] += 1
        self._num_made += 1
        self.ghosts[node] = None
        self._served_at[server] += weight
        return node

    def find_or_add(self, hash_id: int, depth: int) -> int:
        """Return the candidate of a state that saves ``depth`` blocks of an unknown prompt."""
        if hash_id in self._by_hash:
            return self._by_hash[hash_id]
        edge = [-1 - 2 * self._num_made, hash_id if hash_id > 0 else -2 - 2 * self._num_made]
        return self._add_ghost(ROOT, edge, depth, _KINDS["inside"] * _PER_KIND)

    def keep(self, node: int) -> None:
        """Count a slot that holds or awaits a candidate's state."""
        self.num_kept_at[node] += 1
        if self.num_kept_at[node] > 1:
            return
        del self.ghosts[node]
        self._weigh(node)
        server, weight = self._server_at[node], self._weight_at[node]
        self._server_at[node] = node
        self._gain_at[node] = self._depth_at[node] - self._depth_at[server]
        served = self._take_over(node, node)
        if served >= 0:
            self._served_at[node] = served + weight
            self._served_at[server] -= served + weight

    def drop(self, node: int) -> None:
        """Undo ``keep``; without slots the candidate is a ghost."""
        self.num_kept_at[node] -= 1
        if self.num_kept_at[node]:
            return
        self.ghosts[node] = None
        served, self._served_at[node] = self._served_at[node], 0
        server = self._server_at[node] = self._server_at[self._parent_at[node]]
        if self._take_over(server, node) >= 0:
            self._served_at[server] += served

    def _take_over(self, server: int, node: int) -> int:
        """Set the server of ghosts below; return their weight, -1 if ``_resolve`` was called."""
        found = [*self._children[node].values()]
        total, depth, server_at = 0, self._depth_at[server], self._server_at
        for below in found:  # grows in the loop
            if self.num_kept_at[below]:
                self._gain_at[below] = self._depth_at[below] - depth
            else:
                total += self._weight_at[below]
                server_at[below] = server
                found += self._children[below].values()
            if len(found) > _MAX_WALKED:
                self._resolve()
                return -1
        return total

    def _resolve(self) -> None:
        """Compute servers, sums and gains of all candidates anew."""
        size = len(self._edges)
        servers = np.where(self._num_kept[:size] > 0, np.arange(size), self._parents[:size])
        while True:
            above = servers.take(servers)
            if np.array_equal(above, servers):
                break
            servers = above
        self._servers[:size] = servers
        # Sums of integers below 2**53 are exact in float64, in any order.
        self._served[:size] = np.bincount(servers, self._weights[:size], minlength=size)
        depths = self._depths[:size]
        self._gains[:size] = depths - depths.take(servers.take(self._parents[:size]))

    def _forget_oldest(self) -> None:
        num_tried = 0
        while len(self.ghosts) > self._max_ghosts and num_tried < len(self.ghosts):
            node = next(iter(self.ghosts))
            if self._num_children_at[node] > 1:  # prompts branch there
                self.ghosts.move_to_end(node)
                num_tried += 1
            else:
                self.forget(node)
                num_tried = 0

    def forget(self, node: int) -> None:
        """Forget a ghost that at most one candidate extends."""
        self._rates.count(self._class_at[node], self._clock - self._last_use_at[node], 1)
        parent, edge = self._parent_at[node], self._edges[node]
        self._served_at[self._server_at[node]] -= self._weight_at[node]
        siblings, children = self._children[parent], self._children[node]
        del self.ghosts[node], siblings[edge[0]]
        if self._by_hash.get(edge[-1]) == node:  # a candidate of an unknown prompt may share it
            del self._by_hash[edge[-1]]
        self._told.pop(node, None)
        for below in children.values():
            siblings[edge[0]] = below
            self._edges[below] = edge + self._edges[below]
            self._parent_at[below] = parent
        if not children:
            self._num_children_at[parent] -= 1
        children.clear()
        _PACK_ROW(self._memory, node * 8 * _NUM_FIELDS, *[0] * _NUM_FIELDS)
        self._free.append(node)

    def _indices(self, nodes: _Ints) -> _Ints:
        """Return the indices of many candidates."""
        ages = self._clock - 1 - self._last_uses[nodes]
        bins = BIN_OF_AGE.take(ages, mode="clip").astype(np.int64)
        found: _Ints = self._index.take(bins * _NUM_CLASSES + self._classes[nodes])
        return found

    def look_at(self, nodes: _Ints) -> None:
        """Look up the indices of kept candidates, if that is due."""
        if self._clock - self._last_look < self._requests_per_look:
            return
        self._last_look = self._clock
        weights = self._indices(nodes)
        self._served[nodes] += weights - self._weights[nodes]
        self._weights[nodes] = weights

    def values_of(self, nodes: _Ints) -> _Ints:
        """Return the value of the state of each candidate; below 0 for ``NO_CANDIDATE``."""
        values: _Ints = self._served[nodes] * self._gains[nodes]
        return values

    def lowest(self, nodes: _Ints, values: npt.NDArray[Any]) -> int:
        """Return the place of the lowest value; among equals of the least depth, use and age."""
        ties = (values == values[values.argmin()]).nonzero()[0]
        orders = self._arrays.take(nodes[ties], 0)[:, :3].tolist()
        first: int = ties.item(orders.index(min(orders)))
        return first

    def blocks_freed_by(self, nodes: _Ints) -> _Ints:
        """Return the blocks of each up to the kept candidate above, or to where prompts branch."""
        above = self._parents[nodes]
        while True:
            is_end = (self._num_kept[above] > 0) | (self._num_children[above] > 1)
            if is_end.all():
                break
            above = np.where(is_end, above, self._parents[above])
        freed: _Ints = self._depths[nodes] - self._depths[above]
        return freed

    def check_invariants(self) -> None:
        """Check the tree against itself."""
        kept = {*self._num_kept.nonzero()[0].tolist()}
        known = (kept | self.ghosts.keys()) - {ROOT}
        edge_of, children, ids = self._edges, self._children, range(len(self._edges))
        found = self._arrays[: len(ids)].copy()
        self._resolve()
        solved, self._arrays[: len(ids)] = self._arrays[: len(ids)].copy(), found
        parents = {n: self._parent_at[n] for n in known}
        statements = {
            "ids": sorted([*kept, *self.ghosts, *self._free]) == [*ids],
            "parents": all(children[up].get(edge_of[n][0]) == n for n, up in parents.items()),
            "children": [*map(len, children)] == self._num_children[: len(ids)].tolist()
            and sum(map(len, children)) == len(known),
            "hashes": all(edge_of[n][-1] == h and n in known for h, n in self._by_hash.items()),
            "depths": all(
                edge_of[n][0] < 0 or self._depth_at[up] + len(edge_of[n]) == self._depth_at[n]
                for n, up in parents.items()
            ),
            "values": np.array_equal(np.delete(found, 5, 1), np.delete(solved, 5, 1))
            and all(found[n, 5] == solved[n, 5] for n in kept),  # ghosts need no gain
        }
        breaches = [what for what, holds in statements.items() if not holds]
        if breaches:
            raise InvariantError(f"candidates contradict each other: {', '.join(breaches)}")


class AdaptiveSlotPolicy:
    """Keeps the states that save the most blocks in the least time, as learned from requests.

    A state that would be the first to go is refused before it is computed. Requests are counted and
    no clock is read, so processes with equal calls decide alike.
    """

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, max_slots: int) -> None:
        """Forget everything."""
        self._tree = CandidateTree(max(MIN_GHOSTS, _GHOSTS_PER_SLOT * max_slots), max_slots)
        self._candidates: _Ints = np.full(max_slots, NO_CANDIDATE, np.int64)
        self._block_size = 1
        # Prompts by the candidates at their ends, where the last block has no hash yet.
        self._incomplete: dict[int, PromptPath] = {}
        self._num_incomplete = 0
        # Of the last ``admit``, until it is confirmed: accepted candidates; victims by slot.
        self._granted: list[int] = []
        self._victims: dict[int, int] = {}

    def on_request(self, facts: PromptFacts) -> PromptPath:
        """Count a request."""
        self._block_size = facts.block_size_tokens
        return self._tree.begin_request(facts)

    def choose(
        self,
        num_slots: int,
        slots: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int32],
        kv_blocks: KVBlockView,
    ) -> list[int]:
        """Return the slots whose states have the lowest values."""
        nodes = self._candidates.take(slots)
        values = self._tree.values_of(nodes)
        chosen = []
        for _ in range(min(num_slots, len(slots))):
            place = self._tree.lowest(nodes, values)
            values[place] = _EVICTED
            chosen.append(slots.item(place))
        return chosen

    def admit(self, proposals: Sequence[StateProposal], num_free: int, slots: _Ints) -> SlotPlan:
        """Choose among the states that are kept and those that could be saved."""
        tree = self._tree
        nodes = [self._candidate_of(proposal) for proposal in proposals]
        # A state that another request of this step saves needs no second slot.
        new = [n for n, p in enumerate(proposals) if p.is_asked or not tree.num_kept_at[nodes[n]]]
        for place in new:
            tree.keep(nodes[place])
        victims: list[int] = []
        self._victims = {}
        num_short = len(new) - num_free
        if num_short > 0:
            refusable = [place for place in new if not proposals[place].is_asked]
            cached = self._candidates.take(slots)
            tree.look_at(cached)
            # Those that have slots, then those that want one.
            rivals = np.array([*cached.tolist(), *(nodes[place] for place in refusable)], np.int64)
            gone: list[int] = []
            for _ in range(min(num_short, len(rivals))):
                values = tree.values_of(rivals)
                values[gone] = _EVICTED
                place = tree.lowest(rivals, values)
                gone.append(place)
                node = rivals.item(place)
                if place >= len(slots):
                    new.remove(refusable[place - len(slots)])
                    self._release(node)
                    continue
                slot = slots.item(place)
                victims.append(slot)
                self._victims[slot], self._candidates[slot] = node, NO_CANDIDATE
                if node >= 0:
                    tree.drop(node)
        self._granted = [nodes[place] for place in new]
        return SlotPlan([place in new for place in range(len(nodes))], victims)

    def on_reserved(self, slots: Sequence[int | None]) -> None:
        """Record the slots of the accepted states."""
        for slot, node in zip(slots, self._granted, strict=True):
            if slot is None:
                self._release(node)
            else:
                self._candidates[slot] = node
        self._granted, self._victims = [], {}

    def withdraw(self) -> None:
        """Take back the last ``admit``."""
        for slot, node in self._victims.items():
            self._candidates[slot] = node
            if node >= 0:
                self._tree.keep(node)
        for node in self._granted:
            self._release(node)
        self._granted, self._victims = [], {}

    def on_published(
        self, slots: Sequence[int], hash_ids: Sequence[int], saved_tokens: Sequence[int]
    ) -> None:
        """Record the hash ids of the blocks whose states were saved."""
        tree = self._tree
        for slot, hash_id, tokens in zip(slots, hash_ids, saved_tokens, strict=True):
            node = self._candidates.item(slot)
            if node in self._incomplete and hash_id > 0:
                prompt = self._incomplete[node]
                self._release(node)
                prompt.hash_ids[-1] = hash_id
                node = tree.propose(prompt, len(prompt.hash_ids), "end")
                tree.keep(node)
            elif node < 0:
                node = tree.find_or_add(hash_id, max(1, tokens // self._block_size))
                tree.keep(node)
            self._candidates[slot] = node

    def on_stored(self, slots: Sequence[int], saved_tokens: Sequence[int]) -> None:
        """Record states of blocks without hashes."""
        self.on_removed(slots)
        self.on_published(slots, [0] * len(slots), saved_tokens)

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Do nothing: ``on_request`` counts the use."""

    def on_removed(self, slots: Sequence[int]) -> None:
        """Record that slots neither hold nor await a state."""
        for slot in slots:
            node = self._candidates.item(slot)
            self._candidates[slot] = NO_CANDIDATE
            self._victims.pop(slot, None)
            if node >= 0:
                self._release(node)

    def least_loss(self, slots: _Ints) -> int:
        """Return the place of the slot with the lowest value per KV block that its loss frees."""
        nodes = self._candidates.take(slots)
        num_freed = np.maximum(self._tree.blocks_freed_by(nodes), 1)
        return self._tree.lowest(nodes, self._tree.values_of(nodes) / num_freed)

    def check_invariants(self, slots_taken: Sequence[int]) -> None:
        """Check the bookkeeping against itself, and against the slots that hold or await states.

        Raises:
            InvariantError: Something contradicts something else.
        """
        tree = self._tree
        tree.check_invariants()
        named = Counter(node for node in self._candidates.tolist() if node >= 0)
        stray = set(np.flatnonzero(self._candidates >= 0).tolist()) - set(slots_taken)
        kept = {n: tree.num_kept_at[n] for n in np.flatnonzero(tree.num_kept_at).tolist() if n}
        if stray or named != kept:
            raise InvariantError(f"{dict(named)} have slots, {kept} are kept, {stray} are stray")

    def _release(self, node: int) -> None:
        """Drop a candidate, and forget a ghost whose last block no prompt can name."""
        self._tree.drop(node)
        if node in self._incomplete and not self._tree.num_kept_at[node]:
            del self._incomplete[node]
            self._tree.forget(node)

    def _candidate_of(self, proposal: StateProposal) -> int:
        if proposal.hash_ids is None:
            return self._tree.propose(proposal.prompt, proposal.num_blocks, proposal.kind)
        self._num_incomplete += 1
        # Its last block gets a hash id that no other block has.
        hash_ids = [*proposal.hash_ids, -(self._num_incomplete << 1)]
        prompt = replace(proposal.prompt, hash_ids=hash_ids)
        node = self._tree.propose(prompt, len(hash_ids), proposal.kind)
        # The hint is counted once, and stays in the class.
        traits = prompt.traits + prompt.hint
        self._incomplete[node] = replace(prompt, traits=traits, told=None)
        return node
