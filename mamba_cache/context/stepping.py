"""The step in flight: begin, commit, collect and abort it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mamba_cache._guard import CallGuard, outside
from mamba_cache.context.admission import Admitter
from mamba_cache.context.extractions import StepExtractions
from mamba_cache.context.request_table import DecodingGroup, Int64Array, RequestTable
from mamba_cache.context.requests import (
    ActiveRequest,
    Admission,
    Checkpoint,
    RequestPreparer,
    RequestStatus,
)
from mamba_cache.context.speculation import (
    DeviceTokens,
    Sampled,
    SentTokens,
    Speculation,
    check_accepted,
    read_sampled,
)
from mamba_cache.context.stats import count_admission
from mamba_cache.context.step import NOBODY_DECODES, DecodeWork, Step
from mamba_cache.context.step_buffers import StepBuffers
from mamba_cache.context.tiering import Tiering
from mamba_cache.errors import (
    InvalidArgumentError,
    StepOrderError,
    UnwrittenStateWarning,
)
from mamba_cache.slots import MambaSlotAllocator

__all__ = ["StepRunner"]


class _Uncollected(NamedTuple):
    """A step whose tokens are not on the host yet."""

    group: DecodingGroup  # its requests that decode
    lengths: Int64Array  # [num decoding] tokens that each of them computed
    prefills: list[ActiveRequest]  # its other requests that sample
    places: Int64Array  # [n] where in the batch all of these are
    rows: Int64Array  # [n] their rows
    num_releases: Int64Array  # [n] how often each row had been given back by then
    planned: dict[int, Checkpoint]
    sent: SentTokens  # the tokens on their way


class StepRunner:
    """The step in flight, and the one before it whose tokens are not collected."""

    def __init__(
        self,
        *,
        guard: CallGuard,
        buffers: StepBuffers,
        rows: RequestTable,
        slots: MambaSlotAllocator,
        admitter: Admitter,
        counters: Counter[str],
        speculation: Speculation | None,
        extractions: StepExtractions,
        tiering: Tiering | None = None,
        on_admitted: Sequence[Callable[[ActiveRequest, Admission], object]] = (),
    ) -> None:
        self._tiering = tiering
        self._on_admitted = on_admitted
        self._guard = guard
        self._buffers = buffers
        self._rows = rows
        self._slots = slots
        self._admitter = admitter
        self._counters = counters
        self._speculation = speculation
        self._extractions = extractions
        self._has_warned = False
        self._work = NOBODY_DECODES
        self._prefills: tuple[ActiveRequest, ...] = ()
        self._step: Step | None = None
        self._planned: dict[int, Checkpoint] = {}
        self._uncollected: _Uncollected | None = None
        self._is_advanced = False

    @property
    def step(self) -> Step:
        """The step in flight."""
        if self._step is None:
            raise StepOrderError("no step is in flight: call begin_step first")
        return self._step

    @property
    def requests(self) -> tuple[ActiveRequest, ...]:
        """The requests of the step in flight; a step that is only half begun is none."""
        return () if self._step is None else (*self._work.group.requests, *self._prefills)

    @property
    def is_uncollected(self) -> bool:
        """Whether the tokens of the last step are not on the host."""
        return self._uncollected is not None

    def require_none(self) -> None:
        """Check that no step is in flight."""
        if self._step is not None:
            raise StepOrderError("a step is in flight: commit_step or abort_step ends it")

    def begin(
        self,
        work: DecodeWork,
        saving: Sequence[int],
        prefills: Sequence[ActiveRequest],
        drafts: torch.Tensor | None,
    ) -> Step:
        """Send the metadata and restore live states; on an exception the step is taken back."""
        self._work, self._prefills, self._planned = work, tuple(prefills), {}
        try:
            saved = self._plan_boundaries(work, saving) if saving else []
            for active in prefills:
                self._admitter.renew_restore(active)
            if self._tiering is not None and prefills:
                for active in self._tiering.begin(self._prefills):  # those that cannot load
                    self._admitter.plan_again(active)
            chunks = [active.current_chunk for active in prefills]
            with outside:
                metadata = self._buffers.fill(work, chunks, saved)
                self._extractions.begin(metadata)
                if self._speculation is not None:
                    is_exact = drafts is None and self._uncollected is None
                    self._speculation.describe(metadata, drafts, is_exact=is_exact)
                # Without the padding, which a kernel would look at entry by entry.
                if restores := self._buffers.entries("restores"):
                    self._slots.transfers.slots_to_live(*restores)
                ids = [active.request_id for active in prefills]
                step = Step(work, [*zip(ids, chunks, strict=True)], metadata)
            if self._tiering is not None:
                self._tiering.begin_forward(sum(chunk.num_tokens for chunk in chunks))
            self._step = step
        except BaseException:
            self._preempt_all()
            raise
        return step

    def _preempt_damaged(self, damaged: Sequence[ActiveRequest]) -> tuple[Hashable, ...]:
        """Take requests out of the step; what they computed is of no use. Return their ids."""
        self._prefills = tuple(active for active in self._prefills if active not in damaged)
        for active in damaged:
            active.was_refused = True
            self._admitter.release(active)
        return tuple(active.request_id for active in damaged)

    def _plan_boundaries(
        self, work: DecodeWork, saving: Sequence[int]
    ) -> list[tuple[int, Checkpoint]]:
        """Plan the checkpoints of decoding requests that may end a block; return where."""
        for index in saving:
            active = work.group.requests[index]
            self._admitter.plan_decode(active)
            if active.checkpoint is not None:
                self._planned[index] = active.checkpoint
        return [*self._planned.items()]

    def commit(self, sampled: Sampled | DeviceTokens) -> tuple[Hashable, ...]:
        """Save boundary states, publish what was written, and append the sampled tokens.

        Tokens that only the device knows are sent to the host, for ``collect``.
        """
        self._drop_unwritten()
        tiering = self._tiering
        damaged: Sequence[ActiveRequest] = ()
        if tiering is not None and self._prefills:
            damaged = tiering.verify(self._prefills)
        if self._speculation is not None:
            self._advance(self._speculation, *self._in_batch_order(sampled))
        # As planned: a request loses its checkpoint if the step before has reached it.
        if boundaries := self._buffers.entries("boundaries"):
            self._slots.transfers.live_to_slots(*boundaries)
        new = SentTokens(sampled) if isinstance(sampled, DeviceTokens) else sampled
        with self._guard.ending(self._slots.listeners):
            work, num_decodes = self._work, len(self._work.group.ids)
            in_batch = enumerate(self._prefills, num_decodes)
            sampling = [pair for pair in in_batch if pair[1].current_chunk.samples]
            firsts: Iterable[tuple[tuple[int, ActiveRequest], int]] = ()
            if isinstance(new, SentTokens):
                self._await(new, [pair for pair in sampling if pair[1] not in damaged])
            else:
                tokens, counts = new
                if num_decodes:
                    own = None if counts is None else counts[:num_decodes]
                    self._take(work.group, tokens[:num_decodes], own, self._planned, stays=False)
                    self._counters["computed_tokens"] += work.num_tokens
                firsts = zip(sampling, tokens[num_decodes:, 0].tolist(), strict=True)
            preempted = self._preempt_damaged(damaged) if damaged else ()
            for active in self._prefills:
                self._end_chunk(active)
            for (_, active), token in firsts:
                if active not in damaged:
                    self._rows.append_first_token(active.row, token)
            self._end_step()
        if tiering is not None:
            self._guard.is_changing = True
            tiering.end_step()
        return preempted

    def _await(self, sent: SentTokens, sampling: Sequence[tuple[int, ActiveRequest]]) -> None:
        """Keep what is needed of a step until its tokens are on the host."""
        group, lengths = self._work.group, self._work.ends - self._work.most
        own: Int64Array = np.array([active.row for _, active in sampling], dtype=np.int64)
        rows = np.concatenate((group.rows, own))
        places = [*range(len(group.ids)), *(place for place, _ in sampling)]
        self._rows.num_in_doubt[group.rows] = lengths
        self._uncollected = _Uncollected(
            group=group,
            lengths=lengths,
            prefills=[active for _, active in sampling],
            places=np.array(places, dtype=np.int64),
            rows=rows,
            num_releases=self._rows.num_releases[rows],
            planned=self._planned,
            sent=sent,
        )

    def _take(
        self,
        group: DecodingGroup,
        tokens: Int64Array,
        counts: Int64Array | None,
        checkpoints: Mapping[int, Checkpoint],
        *,
        stays: bool,
    ) -> None:
        """Make sampled tokens of decoding requests part of their sequences."""
        rows = group.rows
        if counts is None:
            after = self._rows.append_token(rows, tokens[:, 0])
        else:
            self._rows.append_tokens(rows, tokens, counts)
            after = self._rows.num_computed[rows] + counts
        self._rows.num_computed[rows] = after
        events = (after > self._rows.next_events[rows]).nonzero()[0]
        if not len(events) and not checkpoints:
            return
        places = events.tolist()
        if checkpoints:
            places = sorted({*places, *checkpoints})
        for index in places:
            active, end = group.requests[index], after.item(index)
            start = end - (1 if counts is None else counts.item(index))
            checkpoint = checkpoints.get(index)
            if checkpoint is not active.checkpoint:
                checkpoint = None  # the step before has reached it already
            if checkpoint is not None and not start < checkpoint.position <= end:
                if not (stays and checkpoint in self._planned.values()):
                    self._admitter.cancel_decode(active)
                checkpoint = None
            self._publish_decoded(active, checkpoint)

    def _publish_decoded(self, active: ActiveRequest, checkpoint: Checkpoint | None) -> None:
        """Publish the blocks that a decoding request has filled, and the state that it saved."""
        self._rows.take_over(active)
        if checkpoint is None:
            if self._admitter.reuses_answers:
                self._admitter.publish_blocks(active)
            return
        active.checkpoint = None
        self._admitter.publish(active, (checkpoint,))
        self._admitter.supersede_decode_state(active, checkpoint)

    def collect(self, check: Callable[[Int64Array], object]) -> dict[Hashable, list[int]]:
        """Wait for the uncollected step's tokens, and do what needs them."""
        if self._uncollected is None:
            raise StepOrderError("no step is uncollected: commit_step with DeviceTokens makes one")
        group, lengths, prefills, places, rows, num_releases, planned, sent = self._uncollected
        tokens, given = sent.wait()
        count = len(group.ids)
        counts = np.ones(len(rows), dtype=np.int64)
        counts[:count] = np.clip(given[:count], 0, lengths)
        tokens = tokens[places]
        current = (self._rows.num_releases[rows] == num_releases).nonzero()[0]
        if len(current) < len(rows):
            tokens, counts, rows = tokens[current], counts[current], rows[current]
            prefills = [prefills[place - count] for place in current.tolist() if place >= count]
            current = current[current < count]
            lengths, count = lengths[current], len(current)
            kept = current.tolist()
            planned = {new: planned[old] for new, old in enumerate(kept) if old in planned}
            group = DecodingGroup([group.requests[place] for place in kept])
        check(tokens[np.arange(tokens.shape[1]) < counts[:, None]])
        with self._guard.ending(self._slots.listeners):
            self._rows.num_in_doubt[group.rows] = 0
            self._take(group, tokens[:count], counts[:count], planned, stays=True)
            self._counters["computed_tokens"] += int(lengths.sum())
            self._rows.append_token(rows[count:], tokens[count:, 0])
            self._uncollected = None
        if self._tiering is not None:
            self._guard.is_changing = True
            self._tiering.pump()
        ids = (*group.ids, *(active.request_id for active in prefills))
        lists = zip(ids, tokens.tolist(), counts.tolist(), strict=True)
        return {request_id: new[:number] for request_id, new, number in lists}

    def abort(self) -> tuple[Hashable, ...]:
        """Take the step back, and return the ids of its requests, which are preempted."""
        ids = self.step.request_ids
        with self._guard.ending(self._slots.listeners):
            self._preempt_all()
            self._counters["aborted_steps"] += 1
        return ids

    def drop(self) -> None:
        """Take back the step in flight, if there is one, and forget the uncollected one."""
        if self._step is not None:
            self.abort()
        self._uncollected = None

    def forget(self) -> None:
        """Have no step in flight; what its requests hold is dealt with by the caller."""
        self._end_step()
        self._uncollected = None

    def read_sampled(
        self, new_tokens: object, counts: object, preparer: RequestPreparer
    ) -> Sampled | DeviceTokens:
        """Return the step's sampled tokens, checked: as arrays if they are on the host."""
        step = self.step
        if self._uncollected is not None:
            raise StepOrderError("the last step is uncollected: collect_step brings its tokens")
        if isinstance(new_tokens, DeviceTokens):
            if self._speculation is None:
                raise InvalidArgumentError(
                    "tokens on the device need num_speculative_tokens of at least 1, got 0"
                )
            self._speculation.check_sampled(new_tokens, step.metadata.num_requests)
            return new_tokens
        ids = step.sampling_ids
        id_set = self._work.group.id_set if ids is self._work.group.ids else frozenset(ids)
        sampled = read_sampled(new_tokens, counts, ids, id_set, preparer)
        check_accepted(self._work, sampled, ids)
        return sampled

    def _advance(
        self,
        speculation: Speculation,
        tokens: torch.Tensor | Int64Array,
        counts: torch.Tensor | Int64Array,
    ) -> None:
        if self._is_advanced:
            raise StepOrderError(
                "the device knows the step's tokens since a commit_step that broke off: "
                "abort_step takes the step back"
            )
        self._is_advanced = True
        speculation.advance(self.step.metadata, tokens, counts)

    def _end_step(self) -> None:
        self._is_advanced = False
        self._extractions.end()
        self._step = None
        self._work, self._prefills, self._planned = NOBODY_DECODES, (), {}

    def _drop_unwritten(self) -> None:
        """Give up the states inside chunks unless every layer has handed over its part.

        A warning comes before anything is changed: made an error by a filter, it leaves the step
        in flight.
        """
        layers = self._extractions.missing_layers
        if not layers:
            return
        lacking = [active for active in self._prefills if active.current_chunk.inside]
        if not self._has_warned:
            warnings.warn(_describe_unwritten(layers, lacking), stacklevel=5)
            self._has_warned = True
        for active in lacking:
            chunk = active.current_chunk
            active.chunk = self._admitter.drop_inside(chunk)
            self._counters["unwritten_states"] += len(chunk.inside)

    def _end_chunk(self, active: ActiveRequest) -> None:
        chunk = active.current_chunk
        self._rows.num_computed[active.row] = chunk.end
        if chunk.lease is not None:
            self._admitter.mark_used(chunk.lease)
        self._admitter.publish(active, chunk.checkpoints)
        self._counters["computed_tokens"] += chunk.num_tokens
        if active.admission is not None:
            count_admission(self._counters, active.admission)
            for listener in self._on_admitted:
                listener(active, active.admission)
            active.admission = None
        self._admitter.end_chunk(active)
        status = RequestStatus.DECODING if chunk.samples else RequestStatus.PREFILLING
        self._rows.set_status(active, status)
        if chunk.samples:
            self._rows.saves_states[active.row] = self._admitter.saves_while_decoding(active)

    def _in_batch_order(
        self, sampled: Sampled | DeviceTokens
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[Int64Array, Int64Array]:
        """Return the tokens of all requests of the step, and counts; some may not have sampled."""
        if isinstance(sampled, DeviceTokens):
            return sampled.tokens, sampled.counts
        tokens, counts = sampled
        if counts is None:
            counts = np.ones(len(tokens), dtype=np.int64)
        if self._prefills:
            samples = [active.current_chunk.samples for active in self._prefills]
            index = np.flatnonzero([*[True] * len(self._work.group.ids), *samples])
            count = len(self._work.group.ids) + len(samples)
            all_tokens = np.zeros((count, tokens.shape[1]), dtype=np.int64)
            all_counts = np.zeros(count, dtype=np.int64)
            all_tokens[index], all_counts[index] = tokens, counts
            tokens, counts = all_tokens, all_counts
        return tokens, counts

    def _preempt_all(self) -> None:
        for active in (*self._work.group.requests, *self._prefills):
            self._admitter.release(active)
        self._end_step()


def _describe_unwritten(
    layers: Sequence[int | str], requests: Sequence[ActiveRequest]
) -> UnwrittenStateWarning:
    where = ", ".join(
        f"{active.request_id!r} at {[c.position for c in active.current_chunk.inside]}"
        for active in requests[:8]
    )
    return UnwrittenStateWarning(
        f"The layers {list(layers)} have not handed over their states in this step, so those of "
        f"requests {where} tokens are not published, and what could be skipped is computed again. "
        "Every Mamba layer must call context.extract_checkpoint_states in every step with prefill "
        "chunks, those of other kinds context.extract_states, and where a CUDA graph is replayed, "
        "the engine context.count_extractions. Further ones are only counted, in "
        "stats().unwritten_states"
    )
