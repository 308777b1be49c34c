"""The prefixes that are cached: who has which block and slot, and what is in them."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._guard import CallGuard, weak_callback
from mamba_cache._torch import outside_inference_mode
from mamba_cache.cache import (
    BlockHashChain,
    BlockHasher,
    BlockHashes,
    ExtraKey,
    KVBlockAllocator,
    PromptFacts,
    SlotEvictionPolicy,
    SlotPool,
    StateProposal,
)
from mamba_cache.config import HashAlgorithm
from mamba_cache.context import PrefixContent, PrefixMatch, Request
from mamba_cache.context.memory import CacheMemory
from mamba_cache.context.pins import Pins
from mamba_cache.context.requests import find_prefix
from mamba_cache.context.stats import CacheStats, collect_stats
from mamba_cache.context.verification import HitVerifier
from mamba_cache.errors import BlockCapacityError, InvalidArgumentError, InvariantError
from mamba_cache.events import Admitted, Listeners, Stored
from mamba_cache.integrations.transformers.layers import SequenceMemory
from mamba_cache.integrations.transformers.prompts import PromptHint
from mamba_cache.integrations.transformers.tensors import PrefixLayout, PrefixTensors
from mamba_cache.protocols import SlotContext
from mamba_cache.slots import MambaSlotAllocator
from mamba_cache.states import StatePool
from mamba_cache.tiers.entry import EntryKind

if TYPE_CHECKING:
    from mamba_cache.context.requests import ActiveRequest, Admission
    from mamba_cache.integrations.transformers.tiers import PrefixTiers

__all__ = ["PrefixStore", "SequenceRecord", "SoughtPrompt"]


@dataclass(frozen=True, slots=True)
class SoughtPrompt:
    """A prompt that is looked up."""

    chain: BlockHashChain  # its tokens, hashed
    tokens: npt.NDArray[np.int32]  # its token ids
    min_computed: int  # tokens of it that are left to compute in any case
    cache_salt: ExtraKey  # the salt of the chain
    is_told: bool  # whether listeners get the tokens of what is brought from lower tiers

    def extra_keys(self, first: int, end: int) -> list[tuple[Any, ...] | None] | None:
        """Return what listeners are told of blocks beside their tokens."""
        if self.cache_salt is None:
            return None
        return [None if number else (self.cache_salt,) for number in range(first, end)]


class PrefixStore:
    """Blocks and slots, their books and their tensors; settings are those of ``PrefixCache``.

    Attributes:
        layout: What blocks and slots are made of.
        hasher: Makes the digests of blocks.
        hash_secret: Its key.
        kv_blocks: The books of KV blocks.
        slots: The books of slots.
        tensors: What is in them.
        pins: Prompts that stay cached.
        counters: What was done so far.
        live_dtypes: For each adapter key the dtypes of what a model's cache holds, where they are
            not those of the layout: under autocast, for example.
    """

    def __init__(
        self,
        layout: PrefixLayout,
        *,
        num_blocks: int,
        num_slots: int,
        slot_policy: SlotEvictionPolicy,
        listeners: Listeners,
        hash_algorithm: HashAlgorithm = "blake2b",
        hash_secret: bytes | None = None,
        max_pinned_share: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self.hash_secret = secrets.token_bytes(32) if hash_secret is None else hash_secret
        self.hasher = BlockHasher(hash_algorithm, self.hash_secret)
        self.kv_blocks = KVBlockAllocator(num_blocks + 1)  # and the dummy block
        self.kv_blocks.listeners = listeners
        self.tensors = PrefixTensors(layout, num_slots=num_slots, num_blocks=num_blocks)
        self.slots = self._make_slots(num_slots, slot_policy)
        self.pins = Pins(self.kv_blocks, self.slots, max_share=max_pinned_share, clock=clock)
        self.counters = Counter[str]()
        self.live_dtypes: dict[ExtraKey, list[torch.dtype]] = {}
        self._told_lora_id: ExtraKey = None
        self.tiers: PrefixTiers | None = None
        self.verifier: HitVerifier | None = None

    @outside_inference_mode
    def _make_slots(self, num_slots: int, slot_policy: SlotEvictionPolicy) -> SlotPool:
        """Make the slots: those of a context, if one can be made for the model."""
        # A state is read by a copy that is enqueued at once, so a slot may be given up although its
        # block is held: the state that a prompt went on from makes room for the one at its end.
        try:
            self.layout.kv_spec()
        except InvalidArgumentError:
            return SlotPool(num_slots, self.kv_blocks, policy=slot_policy, evicts_held=True)
        spec = self.layout.state_spec
        fields = SimpleNamespace(
            kv_block_allocator=self.kv_blocks,
            device=self.layout.device,
            max_requests=1,
            max_mamba_intermediate_states_per_step=0,
        )
        return MambaSlotAllocator.from_spec(
            cast(SlotContext, fields),  # until a context is embedded
            num_slots,
            spec,
            policy=slot_policy,
            states=StatePool.over(spec, self.layout.pool_views(self.tensors.slots)),
            evicts_held=True,
        )

    @outside_inference_mode
    def share(self) -> CacheMemory:
        """Return what a context of the model needs to have its prefixes here as well."""
        assert isinstance(self.slots, MambaSlotAllocator)  # of each model that has such a layout
        return CacheMemory(
            slots=self.slots,
            kv_cache=self.tensors.kv_cache(),
            counters=self.counters,
            on_admitted=None if self.verifier is None else weak_callback(self._admitted),
            pins=self.pins,
            refuses_states=self.tiers is None,  # each state is copied to them
        )

    def _admitted(self, active: ActiveRequest, admission: Admission) -> None:
        if self.verifier is not None:  # it is off while something is tried out
            self.verifier.admitted(active, admission)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cached, nor could be found below."""
        if self.tiers is not None:
            return False
        return not (self.kv_blocks.num_cached_blocks or self.kv_blocks.num_used_blocks)

    def join(self, guard: CallGuard) -> None:
        """Becomes a part of what ``guard`` guards."""
        self.kv_blocks.join(guard)
        self.slots.join(guard)

    def let_go(self) -> None:
        """Give back all that records hold, when the call that opened them is over."""
        counts = np.asarray(self.kv_blocks.block_ref_counts) - self.pins.references
        held = np.flatnonzero(counts > 0)
        self.kv_blocks.release_memory_blocks(np.repeat(held, counts[held]).tolist())
        self.slots.cancel_reserved(list(self.slots.reserved))
        if self.tiers is not None:
            self.tiers.let_go()

    def match(self, prompt: SoughtPrompt) -> PrefixMatch:
        """Find how much of a prompt is cached; nothing changes."""
        return find_prefix(
            prompt.chain.hashes,
            prompt.chain.num_tokens,
            self.kv_blocks,
            self.slots,
            block_size_tokens=self.layout.block_size_tokens,
            min_computed_tokens=prompt.min_computed,
        )

    def sample_hits(self, rate: float) -> None:
        """Have a part of the hits verified."""
        self.verifier = HitVerifier(
            rate,
            self.kv_blocks,
            self.slots,
            block_size_tokens=self.layout.block_size_tokens,
            read=weak_callback(self._read),
            remove=weak_callback(self._remove),
        )

    def sample(self, record: SequenceRecord) -> None:
        """Offer a prompt that was just matched to be verified, if it is a hit."""
        tokens, chain, (salt, lora_id) = record.prompt
        if self.verifier is None or not record.match.skip_tokens:
            return
        request = Request(
            request_id=f"generate-{self.counters['requests']}",
            prompt_tokens=tokens,
            cache_salt=cast("str | None", salt),
            lora_id=cast("str | None", self.key_for(lora_id)),
        )
        self.verifier.sample(request, tokens, chain.hashes[: record.match.state_matched_blocks])

    def _read(self, slot: int, blocks: list[int], num_tokens: int) -> PrefixContent:
        return self.content(self.tensors.load(slot, blocks, num_tokens))

    def content(self, memory: SequenceMemory) -> PrefixContent:
        """Return what is held of one row, by what it is."""
        states: dict[str, list[torch.Tensor]] = {"conv": [], "recurrent": []}
        own = iter(memory.states)
        for parts in self.layout.layers:
            states["conv"] += [next(own)[0] for _ in parts.convs]
            states["recurrent"] += [next(own)[0] for _ in parts.recurrents]
        states["window"] = [window[0] for window in memory.windows]
        held = {name: tensors for name, tensors in states.items() if tensors}
        return PrefixContent(held, [tokens[0].transpose(0, 1) for tokens in memory.tokens])

    def _remove(self, kind: EntryKind, block: int, _: Request, digest: bytes) -> None:
        """Make a block, or the state at its end, unfindable that is wrong, in tiers too."""
        if kind is EntryKind.STATE:
            self.slots.invalidate_block(block)
        else:
            self.kv_blocks.deregister_blocks([block])
        if self.tiers is not None:
            self.tiers.remove(kind, None, digest)

    def open(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        cache_salt: ExtraKey,
        lora_id: ExtraKey,
        min_computed: int,
    ) -> SequenceRecord:
        """Matches a prompt and holds what was found until the record is closed.

        The arguments are those of ``SoughtPrompt``; ``lora_id`` stands for the model's settings.
        """
        self.pins.expire()
        size = self.layout.block_size_tokens
        key = self.key_for(lora_id)
        chain = BlockHashChain(size, hasher=self.hasher, cache_salt=cache_salt, lora_id=key)
        chain.append(tokens)
        is_told = self.is_told(lora_id)
        prompt = SoughtPrompt(chain, tokens, min_computed, cache_salt, is_told)
        return SequenceRecord(self, prompt, self.find(prompt), lora_id)

    def find(self, prompt: SoughtPrompt) -> PrefixMatch:
        """Find how much of a prompt is cached, once what lies below has been brought."""
        if self.tiers is not None:
            self.tiers.bring(prompt)
        return self.match(prompt)

    def offer(self, chain: BlockHashChain, lora_id: ExtraKey) -> None:
        """Offer what is cached of a sequence's whole blocks to the tiers below."""
        if self.tiers is None or lora_id in self.live_dtypes:
            return
        hashes = chain.hashes
        for index, hash_id in enumerate(hashes):
            block = self.kv_blocks.find_block(hash_id, hashes.digest(index))
            if block is None:
                return
            self.tiers.offer(EntryKind.KV, chain, index, block)
            if self.slots.has_state(block):
                self.tiers.offer(EntryKind.STATE, chain, index, block)

    def key_for(self, lora_id: ExtraKey) -> ExtraKey:
        """Return what stands in block hashes for the key that a sequence is computed under."""
        return lora_id if self.tiers is None else self.tiers.key_for(lora_id)

    def is_told(self, lora_id: ExtraKey) -> bool:
        """Return whether listeners get the tokens of sequences of a key."""
        if not self.kv_blocks.listeners.wants(Stored):
            return False
        # Listeners know prefixes by their tokens alone, so it must be one key's.
        self._told_lora_id = lora_id if self._told_lora_id is None else self._told_lora_id
        return self._told_lora_id == lora_id

    def tell_admitted(
        self,
        hashes: BlockHashes,
        num_tokens: int,
        *,
        will_continue: bool | None,
        cache_salt: ExtraKey,
    ) -> None:
        """Tell the listeners that a prompt was admitted."""
        listeners = self.kv_blocks.listeners
        if listeners.wants(Admitted):
            size = self.layout.block_size_tokens
            event = Admitted(None, num_tokens, hashes.digests, size, will_continue, cache_salt)
            listeners.put(event)
            listeners.tell()

    def stats(self) -> CacheStats:
        """Return what the cache did so far and what it holds now."""
        return collect_stats(self.counters, self.kv_blocks, self.slots, self.layout.bytes_per_slot)

    def reset(self) -> None:
        """Forget every prefix and every count."""
        # Before the blocks, which tell the slots: books that contradict each other are not read.
        self.slots.reset()
        self.pins.forget()
        self.kv_blocks.reset()
        self.counters.clear()
        self.live_dtypes.clear()
        self._told_lora_id = None
        if self.verifier is not None:
            self.verifier.reset()
        if self.tiers is not None:
            self.tiers.reset()

    def close(self) -> None:
        """Give the memory back; nothing is cached any more, nor can be."""
        self.reset()
        self.tensors.clear()
        if isinstance(self.slots, MambaSlotAllocator):  # which has views of the memory
            self.slots = SlotPool(self.slots.max_slots, self.kv_blocks)
            self.pins = Pins(self.kv_blocks, self.slots, max_share=0, clock=time.monotonic)

    def check_invariants(self) -> None:
        """Check the books, between calls."""
        self.kv_blocks.check_invariants()
        self.slots.check_invariants()
        self.pins.check_invariants()
        self.slots.check_uses(self.slots.reserved, self.pins.leases)
        references = np.asarray(self.kv_blocks.block_ref_counts) - self.pins.references
        held = (np.count_nonzero(references), self.slots.num_reserved_slots)
        if any(held):
            raise InvariantError(f"{held[0]} blocks and {held[1]} slots are held by nobody")


class SequenceRecord:
    """One sequence that is being computed, and what of it is cached.

    Attributes:
        match: What of it was found.
        num_published: Blocks that are findable, from the sequence's start.
        cache_salt: The salt that it was matched under.
        asked: Positions at which the caller asked for a state.
    """

    def __init__(
        self, store: PrefixStore, sought: SoughtPrompt, match: PrefixMatch, lora_id: ExtraKey
    ) -> None:
        self._store = store
        self._sought = sought
        self._lora_id = lora_id
        self._chain = sought.chain
        self._tokens = sought.tokens
        self.match = match
        self._held = [*match.block_ids]
        store.kv_blocks.retain_memory_blocks(self._held)
        self.num_published = len(match.block_ids)
        self.cache_salt = sought.cache_salt
        self.asked: frozenset[int] = frozenset()
        self._prompt_seen: Any = None  # what stands for it with a policy that knows prompts
        self._num_seen = 0
        self._spare: list[int] = []
        self._reserved: dict[int, int] = {}
        self._tokens_to_state = match.skip_tokens

    @property
    def prompt(
        self,
    ) -> tuple[npt.NDArray[np.int32], BlockHashChain, tuple[ExtraKey, ExtraKey]]:
        """Its tokens, hashed, and the salt and adapter that it was matched under."""
        return self._tokens, self._chain, (self.cache_salt, self._lora_id)

    @property
    def restored_blocks(self) -> list[int]:
        """The blocks up to the state that was found, at whose end it is; none if none was."""
        return [*self.match.block_ids[: self.match.state_matched_blocks]]

    def fork(self) -> SequenceRecord:
        """Return a record that goes on from here on its own."""
        sought = replace(self._sought, chain=self._chain.copy(), tokens=self._tokens)
        other = SequenceRecord(self._store, sought, self.match, self._lora_id)
        other.num_published = self.num_published
        other._prompt_seen, other._num_seen = self._prompt_seen, self._num_seen
        other._tokens_to_state = self._tokens_to_state
        return other

    def tell_policy(self, hint: PromptHint, num_usable: int) -> None:
        """Tell a policy that knows prompts of this one, of which ``num_usable`` can be skipped."""
        slots, size = self._store.slots, self._store.layout.block_size_tokens
        if not slots.knows_prompts:
            return
        self._num_seen = len(self._tokens)
        self._prompt_seen = slots.begin_request(
            PromptFacts(
                self._chain.hashes,
                size,
                self.match.kv_matched_blocks,
                num_usable // size,
                hint.will_continue,
                hint.source,
            )
        )

    def _propose(self, position: int) -> list[StateProposal] | None:
        """Describe a state for a policy that knows prompts; None: it was not told of this one."""
        if self._prompt_seen is None:
            return None
        size = self._store.layout.block_size_tokens
        depth = position // size
        # What lies in tiers below may come back from there, so each state is to be saved once.
        is_asked = position in self.asked or self._store.tiers is not None
        if position > self._num_seen:
            before = self._chain.hashes[: depth - 1]
            return [StateProposal(self._prompt_seen, depth, "end", is_asked, before)]
        kind: Literal["end", "branch", "inside"] = "inside"
        # Of a prompt that ends with a block, the next to last is what the same prompt resumes from.
        if position >= (self._num_seen - 1) // size * size:
            kind = "end"
        elif depth == self.match.kv_matched_blocks:
            kind = "branch"
        return [StateProposal(self._prompt_seen, depth, kind, is_asked)]

    def append(self, tokens: Sequence[int]) -> None:
        """Go on with tokens."""
        self._chain.append(tokens)
        self._tokens = np.concatenate([self._tokens, np.array(tokens, dtype=np.int32)])

    def load(self) -> SequenceMemory | None:
        """Return the matched prefix in tensors of its own, or None if nothing was matched."""
        match, blocks = self.match, self.restored_blocks
        if not blocks:
            return None
        slot = self._store.slots.get_slot(blocks[-1])
        self._store.slots.note_consumed([slot])
        saved = self._store.tensors.load(slot, blocks, match.skip_tokens)
        dtypes = self._store.live_dtypes.get(self._lora_id)
        return saved if dtypes is None else saved.to_dtypes(dtypes)

    def reserve_states(self, positions: Iterable[int]) -> dict[int, SequenceMemory]:
        """Take slots for states that the next forward is to write, and return their tensors.

        Positions are multiples of the block size. What has a state already, or no room, is passed
        over.
        """
        size, rooms = self._store.layout.block_size_tokens, {}
        for position in sorted(positions):
            block = self._block_ending_at(position // size)
            if block is None or self._store.slots.has_state(block):
                continue
            proposals = self._propose(position)
            [slot] = self._store.slots.reserve_slots([block], proposals)
            if slot is not None:
                self._reserved[position] = slot
                rooms[position] = self._store.tensors.room(slot, position)
        return rooms

    def publish(
        self,
        memory: SequenceMemory,
        num_tokens: int,
        *,
        captured: Collection[int] = (),
        is_end: bool = False,
    ) -> None:
        """Copy what is new of ``num_tokens`` tokens into blocks and a slot, and make it findable.

        If there is no room, what comes first is kept and the rest is passed over. Reserved slots
        whose positions are not ``captured`` are given back. With ``is_end`` the states in
        ``memory`` are those after the last token, and are kept if a block ends there.
        """
        try:
            self._publish(memory, num_tokens, captured, is_end)
        except torch.OutOfMemoryError:  # keeping is optional: the answer is not lost for it
            self._commit_reserved(())
            self._store.slots.skipped_checkpoints_total += 1

    def _publish(
        self, memory: SequenceMemory, num_tokens: int, captured: Collection[int], is_end: bool
    ) -> None:
        if not self._can_be_kept(memory):
            self._commit_reserved(())
            return
        size = self._store.layout.block_size_tokens
        self._publish_blocks(memory, num_tokens // size)
        self._commit_reserved(captured)
        if is_end and num_tokens and not num_tokens % size:
            self._publish_end(memory, num_tokens)

    def close(self) -> None:
        """Let go of all blocks; what was published stays findable until it is evicted."""
        self._commit_reserved(())
        held, self._held, self._spare = self._held, [], []
        self._store.kv_blocks.release_memory_blocks(held)
        if self._store.tiers is not None:
            self._store.tiers.spill()

    def _block_ending_at(self, number: int) -> int | None:
        """Return the block that is the sequence's ``number``-th, taking blocks up to it."""
        if number <= self.num_published:
            hashes = self._chain.hashes
            return self._store.kv_blocks.find_block(hashes[number - 1], hashes.digest(number - 1))
        self._take_up_to(number)
        index = number - 1 - self.num_published
        return self._spare[index] if index < len(self._spare) else None

    def _take_up_to(self, number: int) -> None:
        """Hold blocks for the sequence up to its ``number``-th, as many as there are."""
        taken = self._take(number - self.num_published - len(self._spare))
        self._held += taken
        self._spare += taken

    def _can_be_kept(self, memory: SequenceMemory) -> bool:
        """Say whether the store's dtypes hold what is given, and remember what it came in."""
        kept, given = self._store.layout.initial.dtypes(), memory.dtypes()
        if given == kept:
            return True
        if any(torch.promote_types(*pair) != pair[0] for pair in zip(kept, given, strict=True)):
            return False
        return self._store.live_dtypes.setdefault(self._lora_id, given) == given

    def _publish_blocks(self, memory: SequenceMemory, last: int) -> None:
        first = self.num_published
        self._take_up_to(last)
        blocks, self._spare = self._spare[: last - first], self._spare[last - first :]
        if not blocks:
            return
        size, kv_blocks = self._store.layout.block_size_tokens, self._store.kv_blocks
        end = (first + len(blocks)) * size
        self._store.tensors.save_tokens(blocks, memory, first * size, end)
        hashes = self._chain.hashes
        holders = kv_blocks.register_kv_block_hashes(
            blocks,
            hashes[first : first + len(blocks)],
            parent_hash=hashes[first - 1] if first else None,
            tokens=self._tokens[first * size : end] if self._sought.is_told else None,
            extra_keys=self._sought.extra_keys(first, first + len(blocks)),
        )
        for index, holder in enumerate(holders, first):
            if holder is not None:
                self._offer(EntryKind.KV, index, holder)
        # A block whose hash id belongs to another content stays private, and nothing after it can
        # be found.
        self.num_published += holders.index(None) if None in holders else len(holders)

    def _commit_reserved(self, captured: Collection[int]) -> None:
        slots = self._store.slots
        for position in sorted(self._reserved):
            # First: who breaks this off leaves a reservation to be taken back, and none twice.
            slot = self._reserved.pop(position)
            index = position // self._store.layout.block_size_tokens
            is_published = position in captured and index <= self.num_published
            block = self._block_ending_at(index) if is_published else None
            if block is None:
                slots.cancel_reserved([slot])
            else:
                self._commit(slot, block, position)

    def _publish_end(self, memory: SequenceMemory, num_tokens: int) -> None:
        """Keep the state where the sequence stands, at the end of a block."""
        index = num_tokens // self._store.layout.block_size_tokens
        if index > self.num_published:
            return
        block = self._block_ending_at(index)
        if block is None or self._store.slots.has_state(block):
            return
        proposals = self._propose(num_tokens)
        [slot] = self._store.slots.reserve_slots([block], proposals)
        if slot is None:
            return
        try:
            self._store.tensors.save_state(slot, memory)
        except BaseException:
            self._store.slots.cancel_reserved([slot])
            raise
        self._commit(slot, block, num_tokens)

    def _commit(self, slot: int, block: int, position: int) -> None:
        saved = max(1, position - self._tokens_to_state)
        slots = self._store.slots
        slots.commit_reserved([slot], [block], saved_tokens=[saved])
        self._tokens_to_state = position
        self._store.counters["saved_states"] += 1
        self._offer(EntryKind.STATE, position // self._store.layout.block_size_tokens - 1, block)

    def _offer(self, kind: EntryKind, index: int, block: int) -> None:
        """Offer what is findable now to the tiers below, unless it is of other dtypes."""
        tiers = self._store.tiers
        if tiers is not None and self._lora_id not in self._store.live_dtypes:
            tiers.offer(kind, self._chain, index, block)

    def _take(self, count: int) -> list[int]:
        """Take up to ``count`` blocks, as many as there are."""
        if count <= 0:
            return []
        kv_blocks = self._store.kv_blocks
        try:
            return kv_blocks.allocate_memory_blocks(count)
        except BlockCapacityError as error:
            return kv_blocks.allocate_memory_blocks(min(count, error.available))
