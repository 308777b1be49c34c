"""The inference context: requests, their memory, and the step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch

from mamba_cache._checks import check_int
from mamba_cache._guard import exclusive, guarded, query
from mamba_cache.context.device_tokens import DeviceTokens
from mamba_cache.context.forks import Forks
from mamba_cache.context.matching import PrefixMatch
from mamba_cache.context.request_rows import Int64Array
from mamba_cache.context.requests import (
    ActiveRequest,
    Admission,
    PreparedRequest,
    Request,
    RequestProgress,
    RequestStatus,
    check_positions,
)
from mamba_cache.context.speculation import Drafts, NewTokens, plan_decodes
from mamba_cache.context.step import DecodeWork, Step
from mamba_cache.context.upkeep import ContextUpkeep
from mamba_cache.errors import StepOrderError, UnknownRequestError

__all__ = ["DynamicInferenceContext"]

_REFUSALS = (StepOrderError, UnknownRequestError)
"""What calls that only give back refuse with, before they change anything."""


class DynamicInferenceContext(ContextUpkeep):
    """Runs requests over a KV cache and live states, and reuses the prefixes that they share.

    One step of an embedding engine::

        context.add_request(request)             # match, reserve, plan
        step = context.begin_step()              # restore or clear live states, send the metadata
        logits = model(step.metadata, context)   # the layers write checkpoints into their slots
        context.commit_step(next_tokens)         # what was written becomes findable

    A call that raises an error of this package leaves the context as it was, but for the recency
    of blocks that it looked at. One thread uses a context at a time; a call that comes while
    another runs raises ``ConcurrentUseError``. Any thread may read ``stats``. When something else
    breaks a call off and not all of it can be taken back, every later call raises
    ``PoisonedError`` until ``reset``. ``CacheMemory`` describes what it holds for the model, such
    as ``kv_cache`` and ``live_states``.

    Args:
        config: Settings.
        state_spec: What one state holds.
        kv_spec: What one token's keys and values hold. None: the embedder keeps them itself, and
            ``config.num_kv_blocks`` says how many blocks it has.
        device: Where states, keys and values are.
        slot_policy: Which states are given up first. Default: the one that belongs to
            ``config.eviction_policy``.
        placement: Where states are saved. Default: Megatron's three positions.

    Raises:
        BudgetError: A budget is too small for one block, or for one slot.
        InvalidArgumentError: The settings do not fit each other, or one is of a wrong kind.
    """

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request's tokens and hash its blocks, so that it can be matched many times.

        Args:
            request: The request; the context keeps nothing of it.

        Raises:
            InvalidArgumentError: The prompt is empty, not 1-D, or holds what is no token id.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
        """
        return self._preparer.prepare(request)

    @exclusive
    def match(self, request: Request | PreparedRequest) -> PrefixMatch:
        """Find how much of a request is cached now. Nothing changes, and nothing is promised.

        Raises:
            InvalidArgumentError: As in ``prepare``, or another context prepared the request.
            SequenceLengthError: As in ``prepare``.
        """
        prepared = self._prepared(request)
        chain = prepared.chain_for(self._preparer)
        return self._admitter.match(chain.hashes, len(prepared.tokens))

    @exclusive
    def add_request(
        self,
        request: Request | PreparedRequest,
        *,
        chunk_tokens: int | None = None,
        checkpoint_positions: Sequence[int] = (),
    ) -> Admission:
        """Admit a request to the next step: match it, reserve its memory, plan its first chunk.

        Args:
            request: The request, prepared or not.
            chunk_tokens: Tokens to compute in the next step. Default: all that are left.
            checkpoint_positions: As in ``Request``, for engines that learn of branch points late.

        Raises:
            InvalidArgumentError: The request is malformed or was prepared by another context, its
                id is in use, or ``chunk_tokens`` is not an int >= 1.
            SequenceLengthError: The prompt is longer than ``max_sequence_length``.
            RequestCapacityError: No row is free.
            TokenCapacityError: The step's token buffers cannot hold the chunk beside the other
                chunks and the tokens of each decoding request.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            StepOrderError: A step is in flight.
        """
        self._runner.require_none()
        prepared = self._prepared(request)
        self._requests.check_new(prepared.request.request_id)
        active = ActiveRequest(
            prepared.request,
            prepared.tokens,
            prepared.chain_for(self._preparer).copy(),
            self.request_rows,
            is_cached=self.config.enable_prefix_caching,
        )
        active.want_checkpoints(prepared.request.checkpoint_positions)
        active.want_checkpoints(checkpoint_positions)
        self._admitter.admit(active, chunk_tokens, self._requests.token_room())
        self._requests.add(active)
        return active.current_admission

    @exclusive
    def resume_request(self, request_id: Hashable, *, chunk_tokens: int | None = None) -> Admission:
        """Bring a preempted request on again; what it generated counts as its prompt now.

        Args:
            request_id: A preempted request.
            chunk_tokens: As in ``add_request``.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``chunk_tokens`` is not an int >= 1.
            RequestCapacityError: No row is free.
            TokenCapacityError: The step's token buffers cannot hold the chunk.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            SequenceLengthError: It has more than ``max_sequence_length`` tokens; finish it.
            StepOrderError: The request is not preempted, or a step is in flight.
        """
        self._runner.require_none()
        active = self._requests.find(request_id, RequestStatus.PREEMPTED)
        self._admitter.admit(active, chunk_tokens, self._requests.token_room())
        return active.current_admission

    @exclusive
    def schedule_prefill(
        self,
        request_id: Hashable,
        *,
        chunk_tokens: int | None = None,
        checkpoint_positions: Sequence[int] = (),
    ) -> int:
        """Schedule the next chunk of a request whose prompt is not computed to its end.

        Args:
            request_id: A request between two chunks.
            chunk_tokens: Tokens to compute in the next step. Default: all that are left.
            checkpoint_positions: Further positions at which to save a state.

        Returns:
            How many tokens will be computed: ``chunk_tokens``, or what is left.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``chunk_tokens`` is not an int >= 1.
            TokenCapacityError: The step's token buffers cannot hold the chunk.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            StepOrderError: The request has no chunk to schedule, or a step is in flight.
        """
        self._runner.require_none()
        active = self._requests.find(request_id, RequestStatus.PREFILLING)
        check_positions(checkpoint_positions)
        self._admitter.schedule(
            active, chunk_tokens, self._requests.token_room(), checkpoint_positions
        )
        return active.current_chunk.num_tokens

    @exclusive
    def begin_step(
        self, decode_ids: Iterable[Hashable] | None = None, *, drafts: Drafts | None = None
    ) -> Step:
        """Begin a step with all scheduled chunks and with the requests that decode.

        Live states of new requests are restored or cleared on the current stream, in one launch,
        and the metadata is copied to the device. Nothing waits for the device.

        Args:
            decode_ids: Which of the decoding requests take part. Default: all.
            drafts: Guesses of the next tokens, up to ``num_speculative_tokens`` for each decoding
                request, which the forward computes as well: a mapping of request ids to tokens; a
                numpy array or list [num decoding, k] in the order of the requests that decode,
                negative where there is none; or a tensor [max_requests, num_speculative_tokens]
                int32 or int64 on the device, by request row, where only the device knows them,
                negative likewise.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: A step is in flight, one of ``decode_ids`` does not decode, or there
                is nothing to compute.
            SequenceLengthError: A decoding request has reached ``max_sequence_length``; finish it.
            InvalidArgumentError: ``decode_ids`` is no collection, or the drafts are too many, not
                of requests that decode in the step, or no token ids.
            TokenCapacityError: The step's token buffers do not hold the decoding requests' tokens.
            BlockCapacityError: Not enough KV blocks for the decoding requests; preempt one.
        """
        self._runner.require_none()
        group, prefills = self._requests.decoding(decode_ids), self._requests.scheduled()
        if not group and not prefills:
            raise StepOrderError("there is nothing to compute: add, schedule or resume a request")
        rows = self.request_rows
        starts = most = rows.num_computed[group.rows]
        if self._runner.is_uncollected:
            most = starts + rows.num_in_doubt[group.rows]
        longest = self._requests.check_lengths(group, most)
        work = plan_decodes(
            group,
            starts,
            most,
            drafts,
            longest=longest,
            config=self.config,
            preparer=self._preparer,
            device=self.device,
        )
        self._requests.check_fits(work.num_tokens)
        due = (work.ends > rows.next_events[group.rows]).nonzero()[0]
        saving, crossing = self._give_blocks(work, due) if len(due) else ((), due)
        self.batch_dimensions.prefill_req_count = len(prefills)
        self.batch_dimensions.decode_req_count = len(group)
        on_device = drafts if isinstance(drafts, torch.Tensor) else None
        return self._runner.begin(work, saving, crossing, prefills, on_device)

    def _give_blocks(self, work: DecodeWork, due: Int64Array) -> tuple[list[int], Int64Array]:
        """Give decoding requests the blocks that they lack: at most one each.

        Args:
            work: What is computed of them.
            due: Which of them may lack one, or end one.

        Returns:
            Which of them may end one and save its state, and which have tokens in two blocks.

        Raises:
            BlockCapacityError: Not enough KV blocks.
        """
        rows, its_rows, ends = self.request_rows, work.group.rows[due], work.ends[due]
        lacks = ends > rows.num_blocks[its_rows] * self.block_size_tokens
        if np.count_nonzero(lacks):
            names = (work.group.ids[index] for index in due[lacks].tolist())
            rows.grow_by_one(its_rows[lacks], int(ends[lacks].max()), names)
        is_over = rows.num_computed[its_rows] > rows.next_events[its_rows]
        if np.count_nonzero(is_over):
            rows.expect_events(its_rows[is_over])
        beyond = ends - rows.next_events[its_rows]
        saving: list[int] = due[(beyond > 0) & rows.saves_states[its_rows]].tolist()
        return saving, due[beyond > 1]

    @guarded(trusts=())
    def commit_step(
        self,
        new_tokens: NewTokens | DeviceTokens,
        counts: Int64Array | torch.Tensor | Sequence[int] | None = None,
    ) -> None:
        """End a step whose forward is enqueued: what it wrote becomes findable.

        Args:
            new_tokens: The sampled token of each request in ``Step.sampling_ids``: a mapping from
                their ids; or [n] ints in their order, as a numpy array, a tensor on the CPU or a
                list, which costs least. Of a request that had drafts the accepted drafts and the
                token sampled after them, as a list or tuple in the mapping, or a row of an [n, k]
                array; they may be cut anywhere, and none means that the request stays where it
                was. Or ``DeviceTokens``, which nobody waits for: the step is then uncollected, and
                the next may begin before ``collect_step`` brings its tokens.
            counts: With an [n, k] array: how many tokens of its row each request takes.

        Raises:
            StepOrderError: No step is in flight, the one before is uncollected, or a call for this
                one broke off when the device knew its tokens already.
            InvalidArgumentError: A token is missing, not expected, or no token id, or a draft is
                said to be accepted that was none. The step is still in flight then.
        """
        if isinstance(new_tokens, DeviceTokens):
            self._runner.commit_on_device(new_tokens)
            return
        self._runner.commit(self._runner.read_sampled(new_tokens, counts, self._preparer))

    @guarded(trusts=())
    def collect_step(self) -> dict[Hashable, list[int]]:
        """Wait for the tokens of a step committed with ``DeviceTokens``, and take note of them.

        What it wrote while its requests decoded becomes findable.

        Returns:
            The new tokens of each request that sampled. Requests that were preempted, aborted or
            finished since are left out: a preempted one computes them again.

        Raises:
            StepOrderError: No step is uncollected.
            InvalidArgumentError: One is no token id. Finish its request and collect again.
        """
        return self._runner.collect(self._preparer.read_tokens)

    @guarded(trusts=_REFUSALS)
    def abort_step(self) -> tuple[Hashable, ...]:
        """Take a step back: nothing that it wrote is findable, and its requests are preempted.

        A forward that stopped half-way has overwritten some of the live states, so no request of
        the step can go on from there; each resumes from what was cached before.

        Returns:
            The ids of the step's requests, to resume or to finish.

        Raises:
            StepOrderError: No step is in flight.
        """
        return self._runner.abort()

    @exclusive
    def fork(
        self,
        request_id: Hashable,
        new_ids: Iterable[Hashable],
        *,
        last_tokens: Sequence[int] | Int64Array | torch.Tensor | None = None,
    ) -> Forks:
        """Make requests that go on from where one that decodes stands; all of them, or none.

        Each is a request like any other from then on, with the same prompt and the same answer so
        far, and equal to one that was added and computed as that was. KV blocks that are full are
        shared; the unfinished one and the live state are copied on the current stream, each in one
        launch for all new requests. Nothing waits for the device.

        The last token of a decoding request is sampled, but not computed. So each of the new ones
        may have another one in its place, as several answers and beams do.

        Args:
            request_id: A decoding request of which all tokens are collected. Its prompt is computed
                and its first token sampled.
            new_ids: The ids of the new requests, none of them in use.
            last_tokens: A token for each of them in place of the last one of ``request_id``.
                Default: that one.

        Returns:
            Which rows and KV blocks were copied. An embedder that keeps keys and values itself,
            or anything else by row, copies the same.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: It does not decode, the device alone knows its last tokens, or a step is
                in flight.
            InvalidArgumentError: An id is in use, comes twice or is not hashable, or the tokens are
                no token ids, or not one for each new id.
            RequestCapacityError: Not enough rows are free.
            BlockCapacityError: Not enough KV blocks are free or evictable.
            TokenCapacityError: Chunks are scheduled that leave no room for them in the next step.
        """
        self._runner.require_none()
        active = self._requests.find(request_id, RequestStatus.DECODING)
        forks = self._forker.fork(active, new_ids, last_tokens)
        self._counters.forks += len(forks.request_ids)
        return forks

    @guarded(trusts=_REFUSALS)
    def preempt(self, request_id: Hashable) -> None:
        """Take a request's row and blocks back; ``resume_request`` brings it on again.

        Args:
            request_id: A request that holds memory.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: It is preempted already, or a step is in flight.
        """
        self._runner.require_none()
        holding = set(RequestStatus) - {RequestStatus.PREEMPTED}
        active = self._requests.find(request_id, *sorted(holding, key=lambda status: status.value))
        self._admitter.release(active)
        self._counters.preemptions += 1

    @guarded(trusts=_REFUSALS)
    def finish(self, request_id: Hashable) -> list[int]:
        """End a request in any state; what it cached stays findable.

        Args:
            request_id: The request.

        Returns:
            The tokens that it generated, as far as they are collected.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: A step is in flight.
        """
        self._runner.require_none()
        active = self._requests.find(request_id)
        self._end(active)
        return active.generated

    @query
    def status(self, request_id: Hashable) -> RequestStatus:
        """Return where a request stands.

        Raises:
            UnknownRequestError: There is no such request.
        """
        return self._requests.find(request_id).status

    @query
    def statuses(self) -> dict[Hashable, RequestStatus]:
        """Return where each request stands that is not finished, oldest first."""
        return {active.request_id: active.status for active in self._requests}

    @query
    def progress(self, request_id: Hashable) -> RequestProgress:
        """Return how far a request is.

        Raises:
            UnknownRequestError: There is no such request.
        """
        active = self._requests.find(request_id)
        return RequestProgress(active.status, active.num_computed, len(active.generated))

    @query
    def output(self, request_id: Hashable, start: int = 0) -> list[int]:
        """Return the tokens that a request generated, as far as they are collected.

        Args:
            request_id: The request.
            start: How many of them to leave out, from the first.

        Raises:
            UnknownRequestError: There is no such request.
            InvalidArgumentError: ``start`` is not an int >= 0.
        """
        active = self._requests.find(request_id)
        return active.generated[check_int("start", start, minimum=0) :]

    def _prepared(self, request: Request | PreparedRequest) -> PreparedRequest:
        return request if isinstance(request, PreparedRequest) else self.prepare(request)
