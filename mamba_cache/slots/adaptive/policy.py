"""The adaptive policy: it learns which states come back, and keeps those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mamba_cache.errors import InvariantError
from mamba_cache.protocols import KVBlockView
from mamba_cache.slots.adaptive.candidates import (
    NO_CANDIDATE,
    CandidateKind,
    CandidateTree,
    PromptPath,
)
from mamba_cache.slots.policies import PromptFacts, SlotPlan, StateProposal

__all__ = ["AdaptiveSlotPolicy"]

_FEWEST_GHOSTS: Final = 4096
_GHOSTS_PER_SLOT: Final = 16
_GONE: Final = np.iinfo(np.int64).max

_KINDS: Final = {
    "end": CandidateKind.END_OF_PROMPT,
    "branch": CandidateKind.BRANCH,
    "inside": CandidateKind.INSIDE,
}


class AdaptiveSlotPolicy:
    """Keeps the states that save the most blocks in the least time, by what it saw of their kind.

    For each position of a prompt where a state is, was or could be kept it knows how deep it lies,
    how often and when it was last asked for, in which turn, and whether a longer prompt goes on
    from it. From how positions of a kind fared it learns how soon they are asked for again. What
    would be the first to go is refused before it is computed. docs/explanation/eviction.md has the
    algorithm and its figures.

    It counts requests and reads no clock, so that processes that are called alike decide alike. It
    is the default of ``CacheConfig``; where nobody says what prompts there are (``on_request``),
    it knows no more than the age of each state.
    """

    def __init__(self) -> None:
        self._tree = CandidateTree(_FEWEST_GHOSTS)
        self.reset(0)

    def reset(self, max_slots: int) -> None:
        """Forget everything."""
        self._tree.reset(max(_FEWEST_GHOSTS, _GHOSTS_PER_SLOT * max_slots), max_slots)
        self._candidates: npt.NDArray[np.int64] = np.full(max_slots, NO_CANDIDATE, np.int64)
        self._block_size = 1
        # Candidates whose last block is not computed, so that nobody knows its hash.
        self._incomplete: set[int] = set()
        self._num_incomplete = 0
        # What ``admit`` has changed already, until the caller says that it came to be.
        self._granted: list[int] = []
        self._given_up: list[int] = []

    def on_request(self, facts: PromptFacts) -> PromptPath:
        """Count a request, and learn from what it could have resumed from."""
        self._block_size = facts.block_size_tokens
        return self._tree.begin_request(
            facts.hash_ids,
            facts.num_matched_blocks,
            facts.num_usable_blocks,
            will_continue=facts.will_continue,
            source=facts.source,
        )

    def choose(
        self,
        num_slots: int,
        slots: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int32],
        kv_blocks: KVBlockView,
    ) -> list[int]:
        """Return the slots whose states are worth the least."""
        nodes = self._candidates.take(slots)
        values = self._tree.values_of(nodes)
        chosen = []
        for _ in range(min(num_slots, len(slots))):
            place = self._lowest(nodes, values)
            values[place] = _GONE
            chosen.append(slots.item(place))
        return chosen

    def admit(
        self, proposals: Sequence[StateProposal], num_free: int, slots: npt.NDArray[np.int64]
    ) -> SlotPlan:
        """Choose among the states that are kept and those that could be."""
        tree = self._tree
        nodes = [self._candidate_of(proposal) for proposal in proposals]
        # What another request of the same step is about to save needs no second slot.
        new = [n for n, p in enumerate(proposals) if p.is_asked or not tree.is_kept(nodes[n])]
        for place in new:
            tree.keep(nodes[place])
        victims: list[int] = []
        num_short = len(new) - num_free
        if num_short > 0:
            # States asked for come last, and cannot be chosen.
            refusable = [place for place in new if not proposals[place].is_asked]
            cached = self._candidates.take(slots)
            tree.look_at(cached)
            # Those that have slots, then those that want one.
            proposed = np.array([nodes[place] for place in refusable], np.int64)
            rivals = np.concatenate((cached, proposed))
            gone: list[int] = []
            for _ in range(min(num_short, len(rivals))):
                values = tree.values_of(rivals)
                values[gone] = _GONE
                place = self._lowest(rivals, values)
                gone.append(place)
                node = rivals.item(place)
                if node >= 0:
                    tree.drop(node)
                if place < len(slots):
                    victims.append(slots.item(place))
                else:
                    new.remove(refusable[place - len(slots)])
                    self._forget_incomplete(node)
        self._granted = [nodes[place] for place in new]
        self._given_up = victims.copy()
        return SlotPlan([place in new for place in range(len(nodes))], victims)

    def on_reserved(self, slots: Sequence[int | None]) -> None:
        """Record which slots the accepted states got."""
        self._given_up = []
        granted, self._granted = self._granted, []
        for slot, node in zip(slots, granted, strict=True):
            if slot is None:
                self._release(node)
            else:
                self._candidates[slot] = node

    def withdraw(self) -> None:
        """Take back what the last ``admit`` decided."""
        given_up, self._given_up = self._given_up, []
        for slot in given_up:
            if self._candidates[slot] >= 0:
                self._tree.keep(self._candidates.item(slot))
        granted, self._granted = self._granted, []
        for node in granted:
            self._release(node)

    def on_published(
        self, slots: Sequence[int], hash_ids: Sequence[int], saved_tokens: Sequence[int]
    ) -> None:
        """Record that the states of blocks with these hashes were put into slots."""
        for slot, hash_id, tokens in zip(slots, hash_ids, saved_tokens, strict=True):
            node = self._candidates.item(slot)
            if node in self._incomplete:
                self._incomplete.discard(node)
                self._tree.drop(node)
                node = self._tree.complete(node, hash_id) if hash_id > 0 else node
                self._tree.keep(node)
            elif node < 0:
                node = self._tree.find(hash_id)
                if node < 0:
                    node = self._tree.add_alone(hash_id, max(1, tokens // self._block_size))
                self._tree.keep(node)
            self._candidates[slot] = node

    def on_stored(self, slots: Sequence[int], saved_tokens: Sequence[int]) -> None:
        """Record states of blocks that nobody has named."""
        self.on_removed(slots)
        self.on_published(slots, [0] * len(slots), saved_tokens)

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Ignore it: ``on_request`` has said it."""

    def on_removed(self, slots: Sequence[int]) -> None:
        """Record that slots hold or await no state any more."""
        for slot in slots:
            node = self._candidates.item(slot)
            self._candidates[slot] = NO_CANDIDATE
            if slot in self._given_up:
                self._given_up.remove(slot)
            elif node >= 0:
                self._release(node)

    def least_loss(self, slots: npt.NDArray[np.int64]) -> int:
        """Return the place of the slot whose state is worth the least for each of its blocks."""
        nodes = self._candidates.take(slots)
        num_freed = np.maximum(self._tree.blocks_freed_by(nodes), 1)
        return self._lowest(nodes, self._tree.values_of(nodes) / num_freed)

    def check_invariants(self, slots_taken: Sequence[int]) -> None:
        """Check the bookkeeping against itself, and against the slots that hold or await states.

        Raises:
            InvariantError: Something contradicts something else.
        """
        self._tree.check_invariants()
        named = Counter(node for node in self._candidates.tolist() if node >= 0)
        stray = set(np.flatnonzero(self._candidates >= 0).tolist()) - set(slots_taken)
        if stray or named != self._tree.counts_of_kept():
            raise InvariantError(
                f"candidates {dict(named)} have slots, but {self._tree.counts_of_kept()} are kept, "
                f"and slots {sorted(stray)} have candidates but no states"
            )

    @property
    def num_candidates(self) -> int:
        """Positions that are remembered."""
        return self._tree.num_candidates

    def _release(self, node: int) -> None:
        self._tree.drop(node)
        self._forget_incomplete(node)

    def _forget_incomplete(self, node: int) -> None:
        """Forget a candidate that no prompt can ever name, once it has no slot."""
        if node in self._incomplete and not self._tree.is_kept(node):
            self._incomplete.discard(node)
            self._tree.forget(node)

    def _candidate_of(self, proposal: StateProposal) -> int:
        prompt = proposal.prompt
        if proposal.hash_ids is None:
            return self._tree.propose(prompt, proposal.num_blocks, _KINDS[proposal.kind])
        if proposal.knows_last:
            path = prompt.with_hash_ids([*proposal.hash_ids])
            return self._tree.propose(path, len(path.hash_ids), _KINDS[proposal.kind])
        # Of the last block nobody knows the hash, so it gets one that no other block has.
        self._num_incomplete += 1
        path = prompt.with_hash_ids([*proposal.hash_ids, -(self._num_incomplete << 1)])
        node = self._tree.propose(path, len(path.hash_ids), _KINDS[proposal.kind])
        self._incomplete.add(node)
        return node

    def _lowest(self, nodes: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> int:
        """Return the place of the lowest value; of equal ones, of the candidate that goes first."""
        ties = (values == values[values.argmin()]).nonzero()[0]
        orders = self._tree.orders_of_equals(nodes[ties])
        first: int = ties.item(orders.index(min(orders)))
        return first
