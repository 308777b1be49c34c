"""Drafters: they guess the next tokens of a request, for the model to verify in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mamba_cache._checks import check_int
from mamba_cache.errors import InvalidArgumentError

__all__ = ["Drafter", "NgramDrafter"]


class Drafter(Protocol):
    """Drafts for one request: each has a drafter of its own, which may keep what it has seen.

    A wrong draft costs time, never an answer.
    """

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Guess what follows.

        Args:
            tokens: Prompt and answer so far; from call to call they only grow.
            max_drafts: How many drafts can be verified, 0 or more.

        Returns:
            At most ``max_drafts`` token ids of the vocabulary; none if there is no good guess.
        """


class NgramDrafter:
    """Prompt look-up: what is said again goes on as it did before.

    The last tokens are looked for earlier in prompt and answer, first ``max_ngram`` of them, then
    fewer. What followed their latest earlier occurrence is proposed; where that runs into the
    present, it is taken to repeat itself. Answers that quote their prompts, edit code or fill in
    tables draft well this way, and no second model is needed.

    A call costs O(``max_ngram``) for each token that is new since the last one; the index holds as
    many entries for each token at most.

    Args:
        max_ngram: Tokens that are looked for at most.
        min_ngram: Tokens that must be found at least.

    Raises:
        InvalidArgumentError: A length is not an int >= 1, or ``min_ngram`` is the larger.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        max_ngram = check_int("max_ngram", max_ngram, minimum=1)
        min_ngram = check_int("min_ngram", min_ngram, minimum=1)
        if min_ngram > max_ngram:
            raise InvalidArgumentError(
                f"min_ngram must be at most max_ngram ({max_ngram}), got {min_ngram}"
            )
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        # Where the latest occurrence of each n-gram ends, those at the very end left out.
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Guess what follows, as ``Drafter`` says."""
        self._index(tokens)
        present = len(tokens)
        for length in self._lengths:
            # A suffix longer than the tokens is all of them, and is not in the index.
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                return [tokens[end + i % (present - end)] for i in range(max_drafts)]
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(self._num_indexed + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)
