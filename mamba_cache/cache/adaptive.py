"""The adaptive policy: it learns which states are used again, and keeps those states.

A *candidate* is a block boundary of a prompt at which a state is, was or could be saved. It is
*kept* if it has a state, else it is a *ghost*. Candidates form a tree: a candidate extends another
one if its prompt begins with the other's prompt. The value of a state is

    gain * (index of its candidate + indices of the ghosts that it serves)

*Gain* is the number of blocks after the next kept candidate above. A state *serves* the ghosts
below it, down to the next kept candidates: their prompts resume from it. Indices are learned from
counts. Time is counted in requests. docs/how-to/policies.md has the algorithm and its figures.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import require_all
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

# Bin n of ages begins at 2 ** (n / 2), rounded up. Float powers could differ between processes.
NUM_BINS: Final = 40
_EDGES: Final = np.array(
    [1 << n // 2 if n % 2 == 0 else -(-(1 << n // 2) * 665857 // 470832) for n in range(41)],
    np.int64,
)
OLDEST: Final = int(_EDGES[-1]) - 1
BIN_OF_AGE: Final = np.repeat(np.arange(NUM_BINS, dtype=np.int8), np.diff(_EDGES))  # from age 1
_FIRST_AGE: Final = _EDGES[:-1]
_WIDTHS: Final = np.diff(_EDGES).astype(np.float64)

INDEX_SCALE: Final = 1 << 32  # an index is a rate times this, an integer: sums are exact
MAX_EVENTS: Final = 5000  # above this number of events all counts are halved
_PRIOR: Final = 0.5 / _FIRST_AGE
_LEVEL_EVENTS, _BIN_EVENTS = 2, 0.5
MAX_SOURCES: Final = 1024
_MIN_HINTS, _MAX_HINTS = 32, 2048
_SELDOM: Final = 0.1

ROOT: Final = 0  # the candidate at depth 0; always kept
NO_CANDIDATE: Final = -1
_EVICTED: Final = -2  # marks a candidate that is chosen already
REQUESTS_PER_REFIT: Final = 256
REQUESTS_PER_SWEEP: Final = 32
_SWEPT_PER_REQUEST: Final = 128
# With few slots states are evicted early, so indices must be newer: see docs/how-to/policies.md.
_KEPT_PER_LOOK, _MAX_PER_LOOK = 32, 6
MIN_GHOSTS: Final = 4096
_GHOSTS_PER_SLOT: Final = 16
FORGOTTEN_AT_ONCE: Final = 32

# The fields of a candidate, each a row of one array.
_DEPTH, _LAST_USE, _MADE, _CLASS, _SERVED, _GAIN, _PARENT, _NUM_KEPT = range(8)
_WEIGHT, _SERVER, _NUM_CHILDREN, _TURN = range(8, 12)
_HIGHEST: Final = np.iinfo(np.int64).max
_LAST: Final = _HIGHEST, 0, 0, 0  # sorts after all candidates

# A class is (kind, uses, extended, turn, new blocks, hint). Its group is the first three, and
# whether the hint is very reliable.
_TURNS: Final = (0, 1, 2, 3, 3, 3, 4)
_NEW_BLOCKS: Final = (0,) * 3 + (1,) * 5 + (2,) * 22 + (3,)
_NUM_USES, _NUM_NEW, _NUM_HINTS = 5, 4, 5
_PER_GROUP: Final = 5 * _NUM_NEW * _NUM_HINTS
_PER_USE: Final = 2 * _PER_GROUP
_PER_KIND: Final = _NUM_USES * _PER_USE
_KINDS: Final = {"end": 0, "branch": _PER_KIND, "inside": 2 * _PER_KIND}
_CLASSES: Final = np.arange(len(_KINDS) * _PER_KIND)
CLASS_GROUPS: Final = _CLASSES // _PER_GROUP * 3 + np.maximum(_CLASSES % _NUM_HINTS - 2, 0)


class ReturnRates:
    """Events and exposure by class and age, and indices computed from both.

    A *spell* is the time of a candidate in one class, until the candidate is used, changes its
    class or is forgotten. *Exposure* is the time of all spells in an age bin. Events / exposure is
    the rate of return. With few events the rate of a class is shrunk to its group's rate, that to
    the rate of all classes, and that to 1 / age (Gamma-Poisson shrinkage).
    """

    def __init__(self, groups: _Ints) -> None:
        self._groups = groups
        shape = len(groups), NUM_BINS
        # By class and bin: events; spells that end minus spells that begin; the times of these
        # spells in the bin, as a difference too. Then events and exposure before the last halving.
        self._counts = np.zeros((3, *shape), np.int64)
        self._old_events, self._old_exposure = np.zeros(shape), np.zeros(shape)
        self._is_seen = np.zeros(len(groups), np.bool_)
        # Counts since the last refit, flat: class, age, step and events of each.
        self._noted: list[int] = []
        self._bin_at = BIN_OF_AGE.data  # memoryviews read single elements several times faster
        self.refit(np.empty(0, np.int64), np.empty(0, np.int64))

    def count(self, klass: int, age: int, step: int, *, is_event: bool = False) -> None:
        """Count a candidate that enters (-1) or leaves (1) a class; ``is_event``: by a use."""
        if age:
            self._noted += klass, age, step, is_event

    def index_of(self, klass: int, age: int) -> int:
        """Return the index of a class at an age."""
        if not age:
            return self.fresh_at[klass]
        return self._index_at[self._start_at[klass] + self._bin_at[min(age, OLDEST) - 1]]

    def indices_of(self, classes: _Ints, ages: _Ints) -> _Ints:
        """Return the index of each of [n] classes at each of [n] ages."""
        bins = BIN_OF_AGE.take(ages - 1, mode="clip")
        return self._index.take(self._starts.take(classes) + bins)

    def refit(self, classes: _Ints, ages: _Ints, *, oldest: int = OLDEST) -> None:
        """Derive all indices up to age ``oldest`` from counts and [n] classes and ages."""
        noted, noted_ages, steps, are_events = np.array(self._noted, np.int64).reshape(-1, 4).T
        self._noted.clear()
        noted_bins, parts = _bins_and_parts(noted_ages)
        for count, more in zip(self._counts, (are_events, steps, steps * parts), strict=True):
            np.add.at(count.reshape(-1), noted * NUM_BINS + noted_bins, more)
        self._is_seen[noted] = self._is_seen[classes] = True
        seen = self._is_seen.nonzero()[0]
        # Rows of rates: one for groups without events, one for each other group and class seen.
        row_of_group = np.zeros(self._groups.max() + 1, np.int64)
        row_of_group[self._groups[seen]] = 1
        row_of_group *= row_of_group.cumsum()
        num_groups, rows = row_of_group.max() + 1, row_of_group[self._groups]
        own = rows[seen]
        rows[seen] = np.arange(len(seen)) + num_groups
        # Spells of present candidates have not ended: count them as if they ended now.
        lived = ages > 0
        bins, parts = _bins_and_parts(ages[lived])
        places = (rows[classes[lived]] - num_groups) * NUM_BINS + bins
        going = np.bincount(places, minlength=len(seen) * NUM_BINS).reshape(-1, NUM_BINS)
        parts_going = np.bincount(places, parts, going.size).reshape(-1, NUM_BINS)
        counted, ended, parts = self._counts[:, seen]
        ended = ended + going
        outlasting = ended.sum(1)[:, None] - ended.cumsum(1)
        exposure = outlasting * _WIDTHS + (parts_going + parts) + self._old_exposure[seen]
        events = counted + self._old_events[seen]
        if events.sum() > MAX_EVENTS:  # present spells begin again, at their present ages
            # Halved in units of 1/1024, so that sums stay exact.
            self._old_events[seen] = np.floor(events * 512) / 1024
            self._old_exposure[seen] = np.floor(exposure * 512) / 1024
            self._counts.fill(0)
            self._counts[1:, seen] = -going, -parts_going
        sums = (own == np.arange(num_groups)[:, None]).astype(np.float64)
        group_events, group_exposure = sums @ events, sums @ exposure
        in_all = _shrunk(group_events.sum(0), group_exposure.sum(0), _PRIOR)
        in_groups = _shrunk(group_events, group_exposure, in_all)
        rates = np.concatenate((in_groups, _shrunk(events, exposure, in_groups[own])))
        # The Gittins index of a state that is used at most once: the maximum, over all ages at
        # which to stop keeping the state, of the probability of a use / the time kept (Gittins,
        # Glazebrook and Weber, Multi-armed Bandit Allocation Indices, 2011, chapter 2).
        expected = rates.T * _WIDTHS[:, None]
        survival = 1 / (1 + expected + expected * expected / 2)  # exp's last bit may differ by host
        # [NUM_BINS + 1, n]: probability of no use before a bin; expected time from the bin on.
        alive = np.ones((NUM_BINS + 1, len(rates)))
        np.cumprod(survival, 0, out=alive[1:])
        time = np.zeros_like(alive)
        spent = (alive[:-1] + alive[1:]) * (_WIDTHS[:, None] / 2)
        time[:-1] = spent[::-1].cumsum(0)[::-1]
        best = np.empty((BIN_OF_AGE.item(min(oldest, OLDEST) - 1) + 1, len(rates)))
        for bin_ in range(len(best)):
            ratio = alive[bin_] - alive[bin_ + 1 :]
            ratio /= np.maximum(time[bin_] - time[bin_ + 1 :], 1e-200)
            np.maximum.reduce(ratio, 0, out=best[bin_])
        # Indices by row and bin, flat; start of each class's row; index of each class at age 0.
        self._index: _Ints = (best.T * INDEX_SCALE).astype(np.int64).ravel()
        self._starts = rows * len(best)
        self._index_at: memoryview[int] = self._index.data
        self._start_at: memoryview[int] = self._starts.data
        self.fresh_at: memoryview[int] = self._index.take(self._starts).data


def _bins_and_parts(ages: _Ints) -> tuple[_Ints, _Ints]:
    """Return the bin of each age, and the time in the bin up to that age."""
    ages = np.minimum(ages, OLDEST)
    bins = BIN_OF_AGE[ages - 1]
    return bins.astype(np.int64), ages - _FIRST_AGE[bins] + 1


def _shrunk(events: _Floats, exposure: _Floats, prior: _Floats) -> _Floats:
    level = (events.sum(-1) + _LEVEL_EVENTS) / ((exposure * prior).sum(-1) + _LEVEL_EVENTS)
    rates: _Floats = (events + _BIN_EVENTS) / (exposure + _BIN_EVENTS / (prior * level[..., None]))
    return rates


class SourceTrust:
    """Learns whether hints of a source ("this prompt will continue") get classes of their own.

    They do if True was followed by a use more often than False, by over three standard deviations.
    """

    def __init__(self) -> None:
        # By source, oldest first: ends with hint False, with True, and how many of each were used.
        self._records: dict[Hashable, list[int]] = {}

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
        record = self._records[source] = self._records.pop(source, [0] * 4)
        if len(self._records) > MAX_SOURCES:
            del self._records[next(iter(self._records))]
        record[hint] += 1
        if record[hint] > _MAX_HINTS:  # sources change
            record[:] = [n // 2 for n in record]

    def count_return(self, source: Hashable, hint: bool) -> None:
        """Count the first use of an end that ``count`` has counted."""
        if source in self._records:
            record = self._records[source]
            record[2 + hint] = min(record[2 + hint] + 1, record[hint])


@dataclass(slots=True)
class PromptPath:
    """A prompt in a ``CandidateTree``."""

    hash_ids: list[int]
    turn: int = 0  # number of earlier prompts that this one continues
    traits: int = 0  # turn and new blocks, as a part of the class of the prompt's candidates
    hint: int = 0  # level of the hint, as a part of the class of the prompt's end
    given_hint: tuple[Hashable, bool] | None = None  # source and hint
    near: int = ROOT  # candidate on the path where a search begins; may be forgotten meanwhile


class CandidateTree:
    """The tree of candidates, and the value of a state at each."""

    def __init__(self, max_ghosts: int, max_kept: int = 0) -> None:
        self._max_ghosts = max_ghosts
        self._requests_per_look = min(max(1, max_kept // _KEPT_PER_LOOK), _MAX_PER_LOOK)
        self._last_look = self._clock = 0
        self._rates, self._trust = ReturnRates(CLASS_GROUPS), SourceTrust()
        self._arrays: _Ints = np.zeros((12, 2), np.int64)
        self._grow(max_ghosts + max_kept + 256)
        self.ghosts: dict[int, None] = {}  # in order of last use
        # By candidate: children by the first hash of their edge; hashes of the edge from the
        # parent; source and hint until the first use.
        self._children: list[dict[int, int]] = [{}]
        self._edges = [array("q")]
        self._given_hints: dict[int, tuple[Hashable, bool]] = {}
        self._by_hash: dict[int, int] = {}
        self._free: list[int] = []
        self._class_at[ROOT] = _PER_GROUP  # extended
        self.num_kept_at[ROOT] = self._num_made = 1

    def _grow(self, size: int) -> None:
        arrays = np.zeros((12, size), np.int64)
        arrays[:, : len(self._arrays[0]) - 2] = self._arrays[:, :-2]
        # NO_CANDIDATE and _EVICTED index the last two columns: the lowest and highest values.
        arrays[_SERVED, -2:], arrays[_GAIN, -2:] = 1, (_HIGHEST, -1)
        self._arrays, self._served, self._gains = arrays, arrays[_SERVED], arrays[_GAIN]
        (
            self._depth_at, self._last_use_at, self._made_at, self._class_at, self._served_at,
            self._gain_at, self._parent_at, self.num_kept_at, self._weight_at, self._server_at,
            self._num_children_at, self._turn_at,
        ) = (column.data for column in arrays)  # fmt: skip

    def begin_request(self, facts: PromptFacts) -> PromptPath:
        """Count a request as a use of the deepest candidate that it could have resumed from."""
        self._clock = clock = self._clock + 1
        size = len(self._edges)
        if clock % REQUESTS_PER_REFIT == 0:
            uses, classes = self._arrays[[_LAST_USE, _CLASS]][:, self._arrays[_DEPTH] > 0]
            self._rates.refit(classes, clock - uses, oldest=clock + REQUESTS_PER_REFIT)
        elif clock % max(REQUESTS_PER_SWEEP, size // _SWEPT_PER_REQUEST) == 0:
            depths, uses, _, classes, served, _, _, _, weights, servers, *_ = self._arrays[:, :size]
            weights[:] = self._rates.indices_of(classes, clock - uses) * (depths > 0)
            # Sums of integers below 2**53 are exact in float64, in any order.
            served[:] = np.bincount(servers, weights, minlength=size)
        if len(self.ghosts) >= self._max_ghosts + FORGOTTEN_AT_ONCE:
            for node in [*self.ghosts]:
                if self._num_children_at[node] > 1:  # a branch point stays
                    self.ghosts[node] = self.ghosts.pop(node)
                else:
                    self.forget(node)
                if len(self.ghosts) == self._max_ghosts:
                    break
        hash_ids, _, num_matched, num_usable, will_continue, source = facts
        path = [*hash_ids]
        prompt = PromptPath(path)
        used = self._deepest(prompt, min(num_usable, len(path)))
        if used != ROOT:
            klass = self._class_at[used]
            prompt.turn = self._turn_at[used] + (klass < _PER_KIND)
            if used in self._given_hints:
                self._trust.count_return(*self._given_hints.pop(used))
            self._rates.count(klass, clock - self._last_use_at[used], 1, is_event=True)
            if klass % _PER_KIND < _PER_KIND - _PER_USE:
                self._class_at[used] = klass + _PER_USE
            self._last_use_at[used] = clock
            if not self.num_kept_at[used]:
                self.ghosts[used] = self.ghosts.pop(used)
            self._weigh(used)
        turn_class = _TURNS[min(prompt.turn, 6)]
        # Evicted blocks are not new if a candidate remembers them.
        num_known = max(num_matched, self._depth_at[used])
        new_class = _NEW_BLOCKS[min(len(path) - num_known, 30)]
        prompt.traits = (turn_class * _NUM_NEW + new_class) * _NUM_HINTS
        if will_continue is not None:
            prompt.given_hint = source, will_continue
            prompt.hint = self._trust.level_of(*prompt.given_hint)
        return prompt

    def _deepest(self, prompt: PromptPath, depth: int) -> int:
        """Return the deepest candidate on a prompt's path, at most ``depth`` blocks deep."""
        path, node = prompt.hash_ids, prompt.near
        at = self._depth_at[node]
        # A hash identifies the whole prefix, so the last hash of an edge proves the path.
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
        """Update a candidate's weight: its present index."""
        weight = self._rates.index_of(self._class_at[node], self._clock - self._last_use_at[node])
        self._served_at[self._server_at[node]] += weight - self._weight_at[node]
        self._weight_at[node] = weight

    def propose(self, prompt: PromptPath, depth: int, kind: str) -> int:
        """Return the candidate ``depth`` blocks into a prompt; add one of ``kind`` if needed."""
        node = self._deepest(prompt, depth)
        while self._depth_at[node] < depth:
            node = self._add_below(node, prompt, depth, kind)
        return node

    def _add_below(self, node: int, prompt: PromptPath, depth: int, kind: str) -> int:
        """Add a candidate on a path: at ``depth``, or before where an older prompt branches off."""
        path, start = prompt.hash_ids, self._depth_at[node]
        below = self._children[node].get(path[start])
        if below is not None:
            edge = self._edges[below]
            # A hash identifies the whole prefix: after the first difference all hashes differ.
            places = range(min(len(edge), len(path) - start))
            end = start + bisect_left(places, True, key=lambda n: edge[n] != path[start + n])
            if end < depth:
                depth, kind = end, "branch"
        # depth < len(path): the prompt's end becomes a candidate, which extends this one.
        is_extended = depth < len(path) or below is not None
        klass = _KINDS[kind] + is_extended * _PER_GROUP + prompt.traits
        given_hint = prompt.given_hint if kind == "end" else None
        if given_hint is not None:
            klass += prompt.hint
        new = self._add_ghost(node, path[start:depth], depth, klass, prompt.turn)
        if given_hint is not None:
            self._trust.count(*given_hint)
            self._given_hints[new] = given_hint
        if below is not None:
            edge = self._edges[below] = edge[depth - start :]
            self._children[new][edge[0]] = below
            self._parent_at[below] = new
            self._num_children_at[new] = 1
            self._num_children_at[node] -= 1
        klass = self._class_at[node]
        if not klass // _PER_GROUP % 2:  # the parent is extended from now on
            age = self._clock - self._last_use_at[node]
            if age:
                self._rates.count(klass, age, 1)
                self._rates.count(klass + _PER_GROUP, age, -1)
            self._class_at[node] = klass + _PER_GROUP
            self._weigh(node)
        return new

    def _add_ghost(self, parent: int, edge: list[int], depth: int, klass: int, turn: int) -> int:
        """Add a candidate below another, and begin its first spell."""
        if self._free:
            node = self._free.pop()
            self._edges[node] = array("q", edge)
        else:
            node = len(self._edges)
            if node == len(self._served) - 2:
                self._grow(2 * len(self._served))
            self._children.append({})
            self._edges.append(array("q", edge))
        server, weight = self._server_at[parent], self._rates.fresh_at[klass]
        # All other fields of a free row are 0.
        self._depth_at[node], self._turn_at[node] = depth, turn
        self._last_use_at[node], self._made_at[node] = self._clock, self._num_made
        self._class_at[node], self._parent_at[node] = klass, parent
        self._server_at[node], self._weight_at[node] = server, weight
        self._served_at[server] += weight
        self._children[parent][edge[0]] = self._by_hash[edge[-1]] = node
        self._num_children_at[parent] += 1
        self._num_made += 1
        self.ghosts[node] = None
        return node

    def rename(self, node: int, hash_id: int) -> bool:
        """Set the hash of the last block of a candidate added in this request; False: it cannot."""
        edge, siblings = self._edges[node], self._children[self._parent_at[node]]
        is_taken = len(edge) == 1 and hash_id in siblings
        if is_taken or self._last_use_at[node] < self._clock:
            return False
        if len(edge) == 1:
            del siblings[edge[0]]
            siblings[hash_id] = node
        del self._by_hash[edge[-1]]
        edge[-1] = hash_id
        self._by_hash[hash_id] = node
        self._given_hints.pop(node, None)
        self._made_at[node] = self._num_made
        self._num_made += 1
        return True

    def find_or_add(self, hash_id: int, depth: int) -> int:
        """Return the candidate of a state that saves ``depth`` blocks of an unknown prompt."""
        if hash_id in self._by_hash:
            return self._by_hash[hash_id]
        edge = [-1 - 2 * self._num_made, hash_id if hash_id > 0 else -2 - 2 * self._num_made]
        return self._add_ghost(ROOT, edge, depth, _KINDS["inside"], 0)

    def keep(self, node: int) -> None:
        """Count a slot that holds a candidate's state, or is reserved for the state."""
        if self.num_kept_at[node]:
            self.num_kept_at[node] += 1
            return
        self.num_kept_at[node] = 1
        del self.ghosts[node]
        if self._last_use_at[node] < self._clock:  # else its weight is of this request
            self._weigh(node)
        server, served = self._server_at[node], self._weight_at[node]
        self._server_at[node] = node
        self._gain_at[node] = self._depth_at[node] - self._depth_at[server]
        if self._children[node]:
            served += self._take_over(node, node)
        self._served_at[node] = served
        self._served_at[server] -= served

    def drop(self, node: int) -> None:
        """Undo ``keep``; a candidate without slots becomes a ghost."""
        num_kept = self.num_kept_at[node] = self.num_kept_at[node] - 1
        if num_kept:
            return
        self.ghosts[node] = None
        served, self._served_at[node] = self._served_at[node], 0
        server = self._server_at[node] = self._server_at[self._parent_at[node]]
        self._served_at[server] += served
        if self._children[node]:
            self._take_over(server, node)

    def _take_over(self, server: int, node: int) -> int:
        """Set the server of the ghosts below a candidate, and return their weight."""
        found = [*self._children[node].values()]
        total, depth = 0, self._depth_at[server]
        for below in found:  # grows in the loop
            if self.num_kept_at[below]:
                self._gain_at[below] = self._depth_at[below] - depth
            else:
                total += self._weight_at[below]
                self._server_at[below] = server
                found += self._children[below].values()
        return total

    def forget(self, node: int) -> None:
        """Forget a ghost that at most one candidate extends."""
        self._rates.count(self._class_at[node], self._clock - self._last_use_at[node], 1)
        parent, edge = self._parent_at[node], self._edges[node]
        self._served_at[self._server_at[node]] -= self._weight_at[node]
        siblings, children = self._children[parent], self._children[node]
        del self.ghosts[node], siblings[edge[0]]
        if self._by_hash.get(edge[-1]) == node:  # a candidate of find_or_add may have this hash
            del self._by_hash[edge[-1]]
        self._given_hints.pop(node, None)
        for below in children.values():
            siblings[edge[0]] = below
            self._edges[below] = edge + self._edges[below]
            self._parent_at[below] = parent
        if not children:
            self._num_children_at[parent] -= 1
        children.clear()
        self._arrays[:, node] = 0
        self._free.append(node)

    def look_at(self, nodes: _Ints) -> None:
        """Update the weights of kept candidates, once in some requests."""
        if self._clock - self._last_look >= self._requests_per_look:
            self._last_look = self._clock
            ages = self._clock - self._arrays[_LAST_USE].take(nodes)
            weights = self._rates.indices_of(self._arrays[_CLASS].take(nodes), ages)
            self._served[nodes] += weights - self._arrays[_WEIGHT].take(nodes)
            self._arrays[_WEIGHT, nodes] = weights

    def lowest(self, nodes: _Ints, num_blocks: _Ints | None = None) -> int:
        """Return the index in ``nodes`` of the lowest value (per block); ties by ``order_of``."""
        values: npt.NDArray[Any] = self.values_of(nodes)
        if num_blocks is not None:
            values = values / num_blocks
        place = values.argmin()
        value = values.item(place)
        values[place] = _HIGHEST
        if values.item(values.argmin()) == value:
            values[place] = value
            ties = (values == value).nonzero()[0].tolist()
            place = min(ties, key=lambda tie: self.order_of(nodes.item(tie))[1:])
        return int(place)

    def values_of(self, nodes: _Ints) -> _Ints:
        """Return the values of states, the first items of ``order_of``."""
        values: _Ints = self._served.take(nodes) * self._gains.take(nodes)
        return values

    def order_of(self, node: int) -> tuple[int, int, int, int]:
        """Return the sort key of a state: its value (< 0 for ``NO_CANDIDATE``) and tie-breakers."""
        value = self._served_at[node] * self._gain_at[node]
        return value, self._depth_at[node], self._last_use_at[node], self._made_at[node]

    def blocks_freed_by(self, nodes: _Ints) -> _Ints:
        """Return for each candidate its blocks after the next kept one or branch point above."""
        depths, parents = self._arrays[_DEPTH], self._arrays[_PARENT]
        num_kept, num_children = self._arrays[_NUM_KEPT], self._arrays[_NUM_CHILDREN]
        above = parents.take(nodes)
        while True:
            # Each candidate above has at least one child, so 1 means: not kept, no branch point.
            is_between = num_kept.take(above) + num_children.take(above) == 1
            if not np.count_nonzero(is_between):
                break
            above = np.where(is_between, parents.take(above), above)
        freed: _Ints = depths.take(nodes) - depths.take(above)
        return freed

    def check_invariants(self) -> None:
        """Check that all records of the tree agree."""
        size = len(self._edges)
        fields = self._arrays[:, :size]
        depths, _, _, _, found, found_gains, above, num_kept, weights, found_servers, *_ = fields
        kept = {*num_kept.nonzero()[0].tolist()}
        known = (kept | self.ghosts.keys()) - {ROOT}
        edge_of, children, ids = self._edges, self._children, range(size)
        servers = np.where(num_kept > 0, ids, above)
        while (servers != servers.take(servers)).any():
            servers = servers.take(servers)
        served = np.bincount(servers, weights, minlength=size)
        gains = depths - depths.take(servers.take(above))
        parents = {n: self._parent_at[n] for n in known}
        statements = {
            "ids": sorted([*kept, *self.ghosts, *self._free]) == [*ids],
            "parents": all(children[up].get(edge_of[n][0]) == n for n, up in parents.items()),
            "children": [*map(len, children)] == fields[_NUM_CHILDREN].tolist()
            and sum(map(len, children)) == len(known),
            "hashes": all(edge_of[n][-1] == h and n in known for h, n in self._by_hash.items()),
            "depths": all(
                edge_of[n][0] < 0 or self._depth_at[up] + len(edge_of[n]) == self._depth_at[n]
                for n, up in parents.items()
            ),
            "values": np.array_equal((served, servers), (found, found_servers))
            and all(gains[n] == found_gains[n] for n in kept),  # ghosts need no gain
        }
        require_all(statements, "candidates contradict each other")


class AdaptiveSlotPolicy:
    """Keeps the states that save the most blocks in the least time, as learned from requests.

    A state that would be evicted first is refused before it is computed. Time is the number of
    requests, not a clock, so processes with equal calls decide alike.
    """

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, max_slots: int) -> None:
        """Forget everything."""
        self._tree = CandidateTree(max(MIN_GHOSTS, _GHOSTS_PER_SLOT * max_slots), max_slots)
        self._candidates: _Ints = np.full(max_slots, NO_CANDIDATE, np.int64)
        self._candidate_at = self._candidates.data
        self._block_size = 1
        # By candidate: prompts that end there with a block that has no hash yet.
        self._incomplete: dict[int, PromptPath] = {}
        self._num_incomplete = 0
        # Of the last ``admit``, until ``on_reserved``: accepted candidates; victims by slot.
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
        chosen = []
        for _ in range(min(num_slots, len(slots))):
            place = self._tree.lowest(nodes)
            nodes[place] = _EVICTED
            chosen.append(slots.item(place))
        return chosen

    def admit(self, proposals: Sequence[StateProposal], num_free: int, slots: _Ints) -> SlotPlan:
        """Accept proposed states, and choose victims, by the values of all these states."""
        tree = self._tree
        accepted: list[bool] = []
        refusable: dict[int, int] = {}
        self._granted, self._victims = [], {}
        for prompt, depth, kind, is_asked, hash_ids in proposals:
            node = self._candidate_of(prompt, depth, kind, hash_ids)
            # A state that another request saves in this step needs no second slot.
            is_in = is_asked or not tree.num_kept_at[node]
            if is_in:
                self._granted.append(node)
                if not is_asked:
                    refusable[len(accepted)] = node
            accepted.append(is_in)
        for node in self._granted:
            tree.keep(node)
        num_short = len(self._granted) - num_free
        if num_short > 0:
            cached = self._candidates.take(slots)
            tree.look_at(cached)
            for _ in range(min(num_short, len(slots) + len(refusable))):
                refused, first = -1, _LAST
                if len(self._victims) < len(slots):
                    lowest = tree.lowest(cached)
                    evicted = cached.item(lowest)
                    first = tree.order_of(evicted)
                for place, node in refusable.items():
                    order = tree.order_of(node)
                    if order < first:
                        refused, first = place, order
                if refused >= 0:
                    accepted[refused] = False
                    node = refusable.pop(refused)
                    self._granted.remove(node)
                    self._release(node)
                    continue
                cached[lowest] = _EVICTED
                slot = slots.item(lowest)
                self._victims[slot], self._candidate_at[slot] = evicted, NO_CANDIDATE
                if evicted >= 0:
                    tree.drop(evicted)
        return SlotPlan(accepted, [*self._victims])

    def on_reserved(self, slots: Sequence[int | None]) -> None:
        """Record the slots of the accepted states."""
        for slot, node in zip(slots, self._granted, strict=True):
            if slot is None:
                self._release(node)
            else:
                self._candidate_at[slot] = node
        self._granted, self._victims = [], {}

    def withdraw(self) -> None:
        """Undo the last ``admit``."""
        for slot, node in self._victims.items():
            self._candidate_at[slot] = node
            if node >= 0:
                self._tree.keep(node)
        self.on_reserved([None] * len(self._granted))

    def on_published(
        self, slots: Sequence[int], hash_ids: Sequence[int], prefix_tokens: Sequence[int]
    ) -> None:
        """Record the hash ids of the blocks whose states were saved."""
        for slot, hash_id, tokens in zip(slots, hash_ids, prefix_tokens, strict=True):
            node = self._candidate_at[slot]
            if node in self._incomplete and hash_id > 0:
                prompt = self._incomplete[node]
                prompt.hash_ids[-1] = hash_id
                if self._tree.rename(node, hash_id):
                    del self._incomplete[node]
                else:  # another candidate has this hash, or the clock has advanced
                    self._release(node)
                    node = self._tree.propose(prompt, len(prompt.hash_ids), "end")
                    self._tree.keep(node)
            elif node < 0:
                node = self._tree.find_or_add(hash_id, max(1, tokens // self._block_size))
                self._tree.keep(node)
            self._candidate_at[slot] = node

    def on_stored(self, slots: Sequence[int]) -> None:
        """Record states of blocks without hashes."""
        self.on_removed(slots)
        self.on_published(slots, [0] * len(slots), [1] * len(slots))

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Do nothing: ``on_request`` counts the use."""

    def on_removed(self, slots: Sequence[int]) -> None:
        """Record that slots neither hold a state nor are reserved."""
        for slot in slots:
            node = self._candidate_at[slot]
            self._candidate_at[slot] = NO_CANDIDATE
            self._victims.pop(slot, None)
            if node >= 0:
                self._release(node)

    def least_loss(self, slots: _Ints) -> int:
        """Return the index of the slot with the lowest value per KV block that its loss frees."""
        nodes = self._candidates.take(slots)
        return self._tree.lowest(nodes, np.maximum(self._tree.blocks_freed_by(nodes), 1))

    def check_invariants(self, slots_taken: Sequence[int]) -> None:
        """Check that all bookkeeping agrees, also with the cached and reserved slots given.

        Raises:
            InvariantError: Two records contradict each other.
        """
        tree = self._tree
        tree.check_invariants()
        named = Counter(node for node in self._candidates.tolist() if node >= 0)
        stray = set(np.flatnonzero(self._candidates >= 0).tolist()) - set(slots_taken)
        kept = {n: tree.num_kept_at[n] for n in np.flatnonzero(tree.num_kept_at).tolist() if n}
        if stray or named != kept:
            raise InvariantError(f"{dict(named)} have slots, {kept} are kept, {stray} are stray")

    def _release(self, node: int) -> None:
        """Drop a candidate; forget the ghost if its last block has no hash to be found by."""
        self._tree.drop(node)
        if node in self._incomplete and not self._tree.num_kept_at[node]:
            del self._incomplete[node]
            self._tree.forget(node)

    def _candidate_of(
        self, prompt: PromptPath, depth: int, kind: str, hash_ids: Sequence[int] | None
    ) -> int:
        if hash_ids is None:
            return self._tree.propose(prompt, depth, kind)
        self._num_incomplete += 1
        # The last block has no hash yet: it gets a unique negative id.
        path, traits, hint = [*hash_ids, -(self._num_incomplete << 1)], prompt.traits, prompt.hint
        grown = PromptPath(path, prompt.turn, traits, hint, prompt.given_hint, prompt.near)
        node = self._tree.propose(grown, len(path), kind)
        prompt.near = grown.near  # the search for the next block begins here
        # The hint counts once (given_hint is None), but stays in the class.
        grown.traits, grown.given_hint = traits + hint, None
        self._incomplete[node] = grown
        return node
