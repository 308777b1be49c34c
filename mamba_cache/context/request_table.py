"""The requests that are not finished, by id and by row."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

from mamba_cache._checks import as_items
from mamba_cache.context.request_rows import Int64Array, RequestRows
from mamba_cache.context.requests import ActiveRequest, RequestStatus
from mamba_cache.errors import (
    InvalidArgumentError,
    InvariantError,
    SequenceLengthError,
    StepOrderError,
    TokenCapacityError,
    UnknownRequestError,
)

__all__ = ["DecodingGroup", "RequestTable"]


class DecodingGroup:
    """Requests that decode together: the same from step to step, while none joins or leaves.

    Attributes:
        requests: In the order of the batch.
        ids: Their ids.
        rows: [n] int64. Their rows.
    """

    __slots__ = ("_id_set", "ids", "requests", "rows")

    def __init__(self, requests: Sequence[ActiveRequest]) -> None:
        self.requests = tuple(requests)
        self.ids = tuple(active.request_id for active in requests)
        self.rows: Int64Array = np.array([active.row for active in requests], dtype=np.int64)
        self._id_set: frozenset[Hashable] | None = None

    @property
    def id_set(self) -> frozenset[Hashable]:
        """Their ids, to compare with those of a mapping."""
        if self._id_set is None:
            self._id_set = frozenset(self.ids)
        return self._id_set


class RequestTable:
    """Requests by id, and which of them take part in the next step.

    Args:
        rows: What is kept of them as arrays.
        max_tokens: Tokens of one step.
        max_decode_tokens: Tokens of one decoding request in one step.
        max_sequence_length: Tokens of one request.
    """

    def __init__(
        self,
        rows: RequestRows,
        *,
        max_tokens: int,
        max_decode_tokens: int,
        max_sequence_length: int,
    ) -> None:
        self._rows = rows
        self._max_tokens = max_tokens
        self._max_decode_tokens = max_decode_tokens
        self._max_sequence_length = max_sequence_length
        self._requests: dict[Hashable, ActiveRequest] = {}
        self._group = self._named = DecodingGroup(())
        self._group_made_at = self._named_at = -1

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(list(self._requests.values()))

    def check_new(self, request_id: Hashable) -> None:
        """Check that an id can be given to a new request.

        Raises:
            InvalidArgumentError: It is not hashable, or it is in use.
        """
        try:
            in_use = request_id in self._requests
        except TypeError:
            raise InvalidArgumentError(
                f"request ids must be hashable, got {type(request_id).__name__}"
            ) from None
        if in_use:
            raise InvalidArgumentError(f"request id {request_id!r} is in use")

    def add(self, active: ActiveRequest) -> None:
        """Add a request whose id ``check_new`` accepted."""
        self._requests[active.request_id] = active

    def add_all(self, requests: Iterable[ActiveRequest]) -> None:
        """Add requests whose ids ``check_new`` accepted, all of them at once."""
        self._requests.update({active.request_id: active for active in requests})

    def discard(self, requests: Iterable[ActiveRequest]) -> None:
        """Forget those of some requests that are known."""
        for active in requests:
            self._requests.pop(active.request_id, None)

    def remove(self, active: ActiveRequest) -> None:
        """Forget a finished request."""
        del self._requests[active.request_id]

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()
        self._group = self._named = DecodingGroup(())
        self._group_made_at = self._named_at = -1

    def find(self, request_id: Hashable, *allowed: RequestStatus) -> ActiveRequest:
        """Return the request of an id.

        Args:
            request_id: The id.
            allowed: The states that the caller can deal with; none given means any.

        Raises:
            UnknownRequestError: There is no such request.
            StepOrderError: The request is in another state.
        """
        try:
            active = self._requests[request_id]
        except (KeyError, TypeError):
            raise UnknownRequestError(
                f"there is no request {request_id!r}: it was never added, or it is finished"
            ) from None
        if allowed and active.status not in allowed:
            raise StepOrderError(
                f"request {request_id!r} is {active.status.value}; this call takes one that is "
                f"{' or '.join(status.value for status in allowed)}"
            )
        return active

    def scheduled(self) -> list[ActiveRequest]:
        """Return the requests that have a chunk for the next step, oldest first."""
        return self._with_status(RequestStatus.SCHEDULED) if self._rows.scheduled else []

    def decoding(self, request_ids: Iterable[Hashable] | None) -> DecodingGroup:
        """Return the requests that decode in the next step.

        Args:
            request_ids: Which of them, in this order; None means all, oldest first.

        Raises:
            InvalidArgumentError: ``request_ids`` is no collection.
            UnknownRequestError: There is no such request.
            StepOrderError: One of them does not decode.
        """
        if request_ids is not None:
            return self._find_decoding(request_ids)
        if self._group_made_at != self._rows.num_changes:
            self._group = DecodingGroup(self._with_status(RequestStatus.DECODING))
            self._group_made_at = self._rows.num_changes
        return self._group

    def _find_decoding(self, request_ids: Iterable[Hashable]) -> DecodingGroup:
        ids = as_items("decode_ids", request_ids, "request ids")
        found = [self.find(request_id, RequestStatus.DECODING) for request_id in ids]
        chosen = list(dict.fromkeys(found))
        is_kept = self._named_at == self._rows.num_changes
        if not is_kept or tuple(chosen) != self._named.requests:
            # Kept, for an engine that names the same ones in each step.
            self._named, self._named_at = DecodingGroup(chosen), self._rows.num_changes
        return self._named

    def holding_memory(self) -> list[ActiveRequest]:
        """Return the requests that have a row and blocks."""
        return [a for a in self._requests.values() if a.status is not RequestStatus.PREEMPTED]

    def token_room(self) -> int:
        """Return the tokens that the next step can still take.

        Every decoding request is counted with all the tokens that it can have, whether or not it
        will take part.
        """
        decoding = len(self._rows.decoding) * self._max_decode_tokens
        return self._max_tokens - self._rows.num_scheduled_tokens - decoding

    def check_forks_fit(self, count: int) -> None:
        """Check that chunks which are scheduled leave room for the tokens of new decoding requests.

        Args:
            count: How many of these there will be.

        Raises:
            TokenCapacityError: They do not.
        """
        required, room = count * self._max_decode_tokens, self.token_room()
        if self._rows.scheduled and required > room:
            hint = "chunks are scheduled for it: fork before them, or when it is committed"
            raise TokenCapacityError(required, max(0, room), hint)

    def check_lengths(self, group: DecodingGroup, most_computed: Int64Array) -> int:
        """Check that decoding requests have room for the token that they compute.

        Args:
            group: The requests.
            most_computed: [n] tokens that each has computed at most.

        Returns:
            The largest of ``most_computed``.

        Raises:
            SequenceLengthError: One has reached the longest length.
        """
        longest = self._max_sequence_length
        most = int(np.maximum.reduce(most_computed)) if group.ids else 0
        if most >= longest:
            index = int((most_computed >= longest).argmax())
            active, computed = group.requests[index], most_computed.item(index)
            may_have, hint = (
                ("may have", "collect the last step")
                if active.num_in_doubt
                else ("has", "finish it")
            )
            raise SequenceLengthError(
                f"request {active.request_id!r} {may_have} {computed + 1} tokens; "
                f"max_sequence_length is {longest}: {hint}"
            )
        return most

    def check_fits(self, num_tokens: int) -> None:
        """Check that the step's buffers hold the tokens of the decoding requests.

        Where chunks are scheduled they do: ``token_room`` has kept room for all of them.

        Raises:
            TokenCapacityError: They do not.
        """
        if num_tokens > self._max_tokens:
            hint = "let fewer requests decode, or without drafts"
            raise TokenCapacityError(num_tokens, self._max_tokens, hint)

    def check_invariants(self) -> None:
        """Prove that the rows know of each request what it does in the next step.

        Raises:
            InvariantError: They do not.
        """
        rows = self._rows
        decoding = {active.row for active in self._with_status(RequestStatus.DECODING)}
        scheduled = self._with_status(RequestStatus.SCHEDULED)
        due = {a.row: a.chunk.num_tokens for a in scheduled if a.chunk is not None}
        if (decoding, due) != (rows.decoding, rows.scheduled):
            raise InvariantError(
                f"rows {sorted(decoding)} decode and {due} are scheduled, but {rows.decoding} and "
                f"{rows.scheduled} are marked so"
            )
        if sum(due.values()) != rows.num_scheduled_tokens:
            raise InvariantError(
                f"{sum(due.values())} tokens are scheduled, but {rows.num_scheduled_tokens} counted"
            )

    def _with_status(self, status: RequestStatus) -> list[ActiveRequest]:
        return [active for active in self._requests.values() if active.status is status]
