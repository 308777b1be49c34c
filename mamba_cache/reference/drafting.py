"""Drafters: propose the next tokens of a request, for the model to verify in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mamba_cache._checks import check_int
from mamba_cache.errors import InvalidArgumentError

__all__ = ["Drafter", "NgramDrafter"]


class Drafter(Protocol):
    """Proposes drafts for one request. Each request has its own drafter, which may keep state.

    A wrong draft costs time, but does not change the answer.
    """

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Propose the next tokens.

        Args:
            tokens: Prompt and answer so far; each call appends to the last call's tokens.
            max_drafts: Maximum number of drafts, >= 0.

        Returns:
            At most ``max_drafts`` token ids of the vocabulary; none without a good guess.
        """


class NgramDrafter:
    """Prompt look-up: proposes the continuation of an earlier occurrence of the last tokens.

    The last ``max_ngram`` tokens are searched in prompt and answer, then fewer tokens. The tokens
    after the latest earlier occurrence are proposed; if these reach the end of the answer, they are
    repeated. This works well for answers that quote their prompts, edit code or fill in tables, and
    needs no second model.

    A call costs O(``max_ngram``) for each new token since the last call. The index has at most
    ``max_ngram`` entries for each token.

    Args:
        max_ngram: Maximum number of tokens to search for.
        min_ngram: Minimum number of tokens that must match.

    Raises:
        InvalidArgumentError: A length is not an int >= 1, or ``min_ngram`` is above ``max_ngram``.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        max_ngram = check_int("max_ngram", max_ngram, minimum=1)
        min_ngram = check_int("min_ngram", min_ngram, minimum=1)
        if min_ngram > max_ngram:
            raise InvalidArgumentError(
                f"min_ngram must be at most max_ngram ({max_ngram}), got {min_ngram}"
            )
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        # End of the latest occurrence of each n-gram, except those at the end of the tokens.
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Propose the next tokens; see ``Drafter``."""
        self._index(tokens)
        num_tokens = len(tokens)
        for length in self._lengths:
            # If ``length`` exceeds the number of tokens, the slice has all tokens: not indexed.
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                return [tokens[end + i % (num_tokens - end)] for i in range(max_drafts)]
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(self._num_indexed + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
