"""Counters of what the cache did, and what it holds now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

__all__ = ["CacheStats"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CacheStats:
    """Totals since the context was made or reset.

    A request is counted when its first step is committed, so one that is aborted and added again
    counts once. Each hit restores one state.

    They may be read from any thread, also while a call runs; what is counted now need not add up
    then.

    Attributes:
        requests: Requests that began to run; a resumed one counts again.
        hits: Those that skipped tokens.
        misses: The others, by reason.
        kv_matched_blocks: Blocks found cached.
        state_matched_blocks: Blocks skipped because a state was restored.
        skipped_tokens: Prompt tokens not computed again.
        computed_tokens: Tokens computed in committed steps, prefill and decode, with the drafts
            that were not accepted; those of a decoding request once its step is collected.
        saved_states: States that became findable.
        refused_states: States not computed because the slots' policy held others worth more.
        skipped_checkpoints: States not saved because no slot or no room in the step was left.
        unwritten_states: States not published because a layer of the model did not hand over its
            part: 0, unless there is a bug in the model's layers.
        evicted_blocks: Cached KV blocks evicted for others.
        evicted_slots: Saved states evicted for others.
        aborted_steps: Steps taken back.
        preemptions: Calls of ``preempt``; requests of aborted steps are not counted here.
        self_resets: Times that a ``PrefixCache`` reset itself, because an exception of another
            package broke off a change of its bookkeeping.
        forks: Requests made by ``fork``, which are not among ``requests`` unless they are resumed.
        free_blocks: KV blocks that hold nothing, now.
        cached_blocks: KV blocks that hold a prefix and belong to no request, now.
        used_blocks: KV blocks of requests, now.
        free_slots: Slots that hold nothing, now.
        reserved_slots: Slots taken for states that are being computed, now.
        cached_slots: Slots that hold a state, now.
        bytes_per_slot: What one slot holds, in bytes.
        bypasses: Calls of a ``PrefixCache`` that neither used the cache nor filled it, by reason:
            "forward hook", "replaced method", "registered function" and "foreign attribute" for
            foreign code in the model, "hidden tokens" for a mask that hides tokens of a prompt.
    """

    requests: int
    hits: int
    misses: Mapping[str, int]
    kv_matched_blocks: int
    state_matched_blocks: int
    skipped_tokens: int
    computed_tokens: int
    saved_states: int
    refused_states: int
    skipped_checkpoints: int
    unwritten_states: int
    evicted_blocks: int
    evicted_slots: int
    aborted_steps: int
    preemptions: int
    self_resets: int
    forks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    free_slots: int
    reserved_slots: int
    cached_slots: int
    bytes_per_slot: int
    bypasses: Mapping[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the requests that skipped tokens, from 0 to 1; 0 before the first request."""
        return self.hits / self.requests if self.requests else 0.0

    def __repr__(self) -> str:
        counts = {each.name: getattr(self, each.name) for each in fields(self)}
        said = [f"hit_rate={self.hit_rate:.3g}", *(f"{k}={v}" for k, v in counts.items() if v)]
        return f"CacheStats({', '.join(said)})"
