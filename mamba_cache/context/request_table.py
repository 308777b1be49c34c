"""The requests that are not finished, by id and by status."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from mamba_cache._checks import as_items
from mamba_cache.context.requests import ActiveRequest, Chunk, RequestStatus
from mamba_cache.errors import (
    InvalidArgumentError,
    SequenceLengthError,
    StepOrderError,
    TokenCapacityError,
    UnknownRequestError,
)

__all__ = ["RequestTable"]


class RequestTable:
    """Finds requests, and says which take part in the next step.

    Args:
        max_tokens: Tokens of one step.
        max_decode_tokens: Tokens of one decoding request in one step.
        max_sequence_length: Tokens of one request.
    """

    def __init__(
        self, *, max_tokens: int, max_decode_tokens: int, max_sequence_length: int
    ) -> None:
        self._max_tokens = max_tokens
        self._max_decode_tokens = max_decode_tokens
        self._max_sequence_length = max_sequence_length
        self._requests: dict[Hashable, ActiveRequest] = {}

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

    def remove(self, active: ActiveRequest) -> None:
        """Forget a finished request."""
        del self._requests[active.request_id]

    def clear(self) -> None:
        """Forget all requests."""
        self._requests.clear()

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
        return self._with_status(RequestStatus.SCHEDULED)

    def decoding(self, request_ids: Iterable[Hashable] | None) -> list[ActiveRequest]:
        """Return the requests that decode in the next step.

        Args:
            request_ids: Which of them, in this order; None means all, oldest first.

        Raises:
            InvalidArgumentError: ``request_ids`` is no collection.
            UnknownRequestError: There is no such request.
            StepOrderError: One of them does not decode.
            SequenceLengthError: One has reached the longest length.
        """
        if request_ids is None:
            chosen = self._with_status(RequestStatus.DECODING)
        else:
            chosen = self._find_decoding(request_ids)
        for active in chosen:
            # The last of its tokens is computed in the step.
            if active.most_computed >= self._max_sequence_length:
                may_have, hint = (
                    ("may have", "collect the last step")
                    if active.uncollected
                    else ("has", "finish it")
                )
                raise SequenceLengthError(
                    f"request {active.request_id!r} {may_have} {active.most_computed + 1} tokens; "
                    f"max_sequence_length is {self._max_sequence_length}: {hint}"
                )
        return chosen

    def _find_decoding(self, request_ids: Iterable[Hashable]) -> list[ActiveRequest]:
        ids = as_items("decode_ids", request_ids, "request ids")
        found = [self.find(request_id, RequestStatus.DECODING) for request_id in ids]
        return list(dict.fromkeys(found))

    def holding_memory(self) -> list[ActiveRequest]:
        """Return the requests that have a row and blocks."""
        return [a for a in self._requests.values() if a.status is not RequestStatus.PREEMPTED]

    def chunks(self) -> list[Chunk]:
        """Return the chunks of the next step, or of those whose outcome is not known."""
        return [chunk for active in self._requests.values() for chunk in active.open_chunks]

    def token_room(self) -> int:
        """Return the tokens that the next step can still take.

        Every decoding request is counted with all the tokens that it can have, whether or not it
        will take part.
        """
        scheduled = sum(active.current_chunk.num_tokens for active in self.scheduled())
        num_decoding = len(self._with_status(RequestStatus.DECODING))
        return self._max_tokens - scheduled - num_decoding * self._max_decode_tokens

    def check_fits(self, decodes: Sequence[Chunk]) -> None:
        """Check that the step's buffers hold the decoding requests.

        Where chunks are scheduled they do: ``token_room`` has kept room for all of them.

        Args:
            decodes: What the decoding requests compute.

        Raises:
            TokenCapacityError: They do not.
        """
        wanted = sum(chunk.num_tokens for chunk in decodes)
        if wanted > self._max_tokens:
            hint = "let fewer requests decode, or without drafts"
            raise TokenCapacityError(wanted, self._max_tokens, hint)

    def _with_status(self, status: RequestStatus) -> list[ActiveRequest]:
        return [active for active in self._requests.values() if active.status is status]
