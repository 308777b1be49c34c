"""The order of requests: who takes part in a step, and who gives memory back when it runs out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace

import torch

from mamba_cache.context import DynamicInferenceContext
from mamba_cache.errors import BlockCapacityError, CapacityError
from mamba_cache.integrations.transformers.batching.requests import (
    BatchRequest,
    branch_positions,
    common_blocks,
)
from mamba_cache.integrations.transformers.store import PrefixHit, PrefixStore, SoughtPrompt

__all__ = ["BatchQueues"]

_MOST_WAITED_STEPS = 64


class BatchQueues:
    """Requests by what becomes of them next.

    Prompts that are begun come first, then requests that gave their memory back, then those that
    wait. Whoever was admitted earlier has precedence: when memory runs out the youngest gives it
    back. Of several prompts that begin alike one computes what they have in common, and is told to
    save a state where the others branch off; those wait for it.

    Args:
        context: The requests' memory.
        store: What of prompts is cached.
        fewest_tokens: What a chunk of a prompt must have at least, but for prompts of one token.
        choose_first: Chooses the first token of a request from cached logits, [1, vocabulary], and
            says whether it is the last one.

    Attributes:
        decoding: By the context's name, the requests that decode.
        running: Those that hold memory, the oldest first.
        scheduled: Those whose chunk is computed in the step.
    """

    def __init__(
        self,
        context: DynamicInferenceContext,
        store: PrefixStore,
        *,
        fewest_tokens: int,
        choose_first: Callable[[BatchRequest, torch.Tensor], object],
    ) -> None:
        self._context = context
        self._store = store
        self._choose_first = choose_first
        self._block_size = context.config.block_size_tokens
        self._fewest_tokens = fewest_tokens
        self.decoding: dict[Hashable, BatchRequest] = {}
        self.running: dict[Hashable, BatchRequest] = {}
        self._waiting: dict[Hashable, BatchRequest] = {}
        self._prefilling: dict[Hashable, BatchRequest] = {}
        self._preempted: dict[Hashable, BatchRequest] = {}
        self.scheduled: dict[Hashable, BatchRequest] = {}
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self.running) + len(self._waiting) + len(self._preempted)

    @property
    def is_steady(self) -> bool:
        """Whether all that there is decodes."""
        return len(self.decoding) == len(self)

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute in the next step."""
        return bool(self.scheduled or self.decoding)

    def add(self, request: BatchRequest) -> None:
        """Lets a request wait."""
        self._waiting[request.key] = request

    def clear(self) -> None:
        """Forgets all requests; what they hold is dealt with by the caller."""
        for queue in self._all():
            queue.clear()

    def idle_rows(self, bound: int) -> list[int]:
        """Returns the rows below ``bound`` of prompts that no chunk of is computed in the step."""
        if not self._prefilling:
            return []
        scheduled = self._context.request_table
        in_use = set(scheduled.decoding_rows)
        in_use |= set(scheduled.scheduled_rows)
        return sorted(
            row for row in range(bound) if row not in in_use and scheduled.num_blocks.item(row)
        )

    def schedule(self, budget: int, most_requests: int) -> None:
        """Schedules chunks of prompts for the next step, of ``budget`` tokens together.

        No more than ``most_requests`` requests hold memory then.
        """
        self.scheduled.clear()
        preempted = sorted(self._preempted.values(), key=lambda one: one.admitted)
        # Asked of each in its turn: who comes before it may have been given its first token.
        waiting = (one for one in list(self._waiting.values()) if not one.awaits_fork)
        for place, requests in (
            (self._continue, list(self._prefilling.values())),
            (self._resume, preempted),
            (self._admit, waiting),
        ):
            for request in requests:
                is_full = len(self.running) >= most_requests and request.key not in self.running
                if budget <= 0 or is_full:
                    return
                try:
                    budget -= place(request, budget)
                except CapacityError:
                    return  # those behind one that does not fit stay behind it

    def make_work(self, budget: int, most_requests: int) -> None:
        """Schedules until there is something to compute."""
        while True:
            self.schedule(budget, most_requests)
            if self.has_work or not len(self):  # all that there was is answered
                return
            self.preempt_youngest()

    def preempt_youngest(self) -> None:
        """Takes the memory of the youngest request back; it is resumed later."""
        # Alone, each has room: no sequence may be longer than all KV blocks together.
        assert len(self.running) > 1, "one request does not fit alone"
        request = next(reversed(self.running.values()))
        self._context.preempt(request.key)
        self._forget(request)
        self._preempted[request.key] = request

    def rename(self, request: BatchRequest, key: Hashable) -> None:
        """Calls a decoding request by another name, which the context has for it now."""
        old = request.key
        request.prepared = replace(
            request.prepared, request=replace(request.prepared.request, request_id=key)
        )
        for name in ("decoding", "running"):  # in the same order, which is that of precedence
            queue = getattr(self, name)
            setattr(self, name, {key if k == old else k: one for k, one in queue.items()})

    def end(self, request: BatchRequest) -> None:
        """Ends a request, whose answer is complete or that nobody waits for, between two steps."""
        if request.key in self.running or request.key in self._preempted:
            self._context.finish(request.key)
        self._forget(request)

    def end_chunk(self, request: BatchRequest, num_computed: int, *, decodes: bool) -> None:
        """Takes note that a chunk was computed, and whether a token was sampled after it."""
        request.computed = num_computed
        del self.scheduled[request.key]
        if decodes:
            del self._prefilling[request.key]
            self.decoding[request.key] = request

    def fork(self, request: BatchRequest, first_tokens: dict[Hashable, int]) -> list[BatchRequest]:
        """Forks a request that has its first token, for as many as there is room for.

        The others are computed by themselves, and find what of the prompt is cached. By name,
        ``first_tokens`` has the token of each of its children.

        Returns:
            Those that go on as forks.
        """
        config, rows = self._context.config, self._context.request_table
        room = min(rows.num_free_rows, config.max_requests - len(self.running))
        children = [child for child in request.children if child.key in self._waiting][:room]
        while children:
            keys = [child.key for child in children]
            try:
                self._context.fork(
                    request.key, keys, last_tokens=[first_tokens[key] for key in keys]
                )
            except BlockCapacityError as error:
                children = children[: min(error.available, len(children) - 1)]
                continue
            for child in children:
                del self._waiting[child.key]
                self._number(child)
                self.decoding[child.key] = self.running[child.key] = child
            break
        return children

    def _continue(self, request: BatchRequest, budget: int) -> int:
        positions = self._branches_off(request, request.computed)
        num_tokens = self._context.schedule_prefill(
            request.key,
            chunk_tokens=self._chunk_tokens(request.computed, request.num_tokens, budget),
            checkpoint_positions=positions,
        )
        request.branch_positions.update(positions)
        self.scheduled[request.key] = request
        return num_tokens

    def _resume(self, request: BatchRequest, budget: int) -> int:
        # Where it will start is not known yet, but that it is the end of a block.
        admission = self._context.resume_request(
            request.key, chunk_tokens=self._chunk_tokens(0, request.num_tokens, budget)
        )
        del self._preempted[request.key]
        self._begin(request, admission.skip_tokens)
        return admission.chunk_tokens

    def _admit(self, request: BatchRequest, budget: int) -> int:
        hit = self._find(request, with_logits=self._fewest_tokens == 1 and not request.answer)
        if hit.has_logits:
            if self._begin_with_token(request, hit):
                return 0
            hit = self._find(request, with_logits=False)
        skip_tokens = hit.match.skip_tokens
        if self._waits(request, skip_tokens):
            request.waited_steps += 1
            return 0
        positions = self._branches_off(request, skip_tokens)
        admission = self._context.add_request(
            request.prepared,
            chunk_tokens=self._chunk_tokens(skip_tokens, request.num_tokens, budget),
            checkpoint_positions=positions,
            resume_at=None if hit.part_block is None else skip_tokens,
        )
        del self._waiting[request.key]
        request.branch_positions.update(positions)
        self._number(request)
        request.cached_tokens = admission.skip_tokens
        self._begin(request, admission.skip_tokens)
        return admission.chunk_tokens

    def _find(self, request: BatchRequest, *, with_logits: bool) -> PrefixHit:
        watch, tiers = self._store.watch, self._store.tiers
        num_restored = 0 if tiers is None else tiers.num_restored
        prepared = request.prepared
        hit = self._store.find(
            SoughtPrompt(
                prepared.chain,
                prepared.tokens,
                self._fewest_tokens,
                with_logits,
                prepared.request.cache_salt,
                is_told=bool(prepared.request.tells_tokens),
            )
        )
        if watch is not None and tiers is not None and tiers.num_restored > num_restored:
            watch.brought.add(request.key)
        return hit

    def _begin_with_token(self, request: BatchRequest, hit: PrefixHit) -> bool:
        """Choose the first token of a prompt that is cached with its logits.

        What is left to compute is that token, as if it were the prompt's last.

        Returns:
            Whether it is the only one, so that the request is over.
        """
        key, prompt = request.key, request.prompt
        if self._choose_first(request, self._store.logits_of(hit)):
            self._store.counters.count_admission(hit.match)
            if (watch := self._store.watch) is not None:
                tier = "host" if key in watch.brought else "gpu"
                watch.brought.discard(key)
                prepared, skipped = request.prepared, hit.match.skip_tokens
                watch.found(
                    prepared.request, prepared.tokens, prepared.chain, hit.match, skipped, tier
                )
            request.cached_tokens = hit.match.skip_tokens
            self._number(request)
            del self._waiting[key]
            return True
        own = replace(request.prepared.request, prompt_tokens=[*prompt, *request.answer])
        request.prepared = self._context.prepare(own)
        return False

    def _begin(self, request: BatchRequest, skip_tokens: int) -> None:
        request.computed = skip_tokens
        for queue in (self.running, self._prefilling, self.scheduled):
            queue[request.key] = request

    def _number(self, request: BatchRequest) -> None:
        request.admitted = self._num_admitted
        request.begin()
        self._num_admitted += 1

    def _chunk_tokens(self, start: int, end: int, budget: int) -> int:
        """Returns how many tokens to compute, up to a block's end if not to ``end``."""
        left = end - start
        if left <= budget:
            return left
        whole_blocks = (start + budget) // self._block_size * self._block_size - start
        size = whole_blocks if whole_blocks > 0 else budget
        too_few = left - size < self._fewest_tokens and size > self._fewest_tokens
        return size - (self._fewest_tokens - 1) if too_few else size

    def _branches_off(self, request: BatchRequest, start: int) -> list[int]:
        others = (other for other in self._waiting.values() if other.parent is not request)
        return branch_positions(request, others, start=start, block_size_tokens=self._block_size)

    def _waits(self, request: BatchRequest, skip_tokens: int) -> bool:
        """Says whether a prompt of this step will save a state of a longer prefix of a request."""
        if request.waited_steps >= _MOST_WAITED_STEPS:
            return False
        for other in self.scheduled.values():
            position = common_blocks(request, other) * self._block_size
            if position > max(skip_tokens, other.computed) and position in other.branch_positions:
                return True
        return False

    def _forget(self, request: BatchRequest) -> None:
        for queue in self._all():
            queue.pop(request.key, None)

    def _all(self) -> Iterable[dict[Hashable, BatchRequest]]:
        return (
            self.decoding, self.running, self._waiting, self._prefilling, self._preempted,
            self.scheduled,
        )  # fmt: skip
