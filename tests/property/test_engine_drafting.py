"""The n-gram drafter compared with a search through all tokens, and its cost per call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import NgramDrafter


def search(tokens, max_drafts, max_ngram, min_ngram):
    """Return the tokens after the latest earlier occurrence of the longest repeated suffix."""
    for length in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                known = list(tokens)
                for offset in range(max_drafts):
                    known.append(known[end + offset])
                return known[len(tokens) :]
    return []


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    max_drafts=st.integers(0, 6),
)
def test_proposals_equal_a_search(pieces, lengths, max_drafts):
    min_ngram, max_ngram = lengths
    drafter, tokens = NgramDrafter(max_ngram, min_ngram), []
    for piece in pieces:
        tokens += piece
        found = drafter.propose(tokens, max_drafts)
        assert found == search(tokens, max_drafts, max_ngram, min_ngram)


class CountedReads(list):
    """Tokens that count reads of their items."""

    num_read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_call_reads_new_tokens_only(rng):
    drafter = NgramDrafter(max_ngram=4, min_ngram=2)
    tokens = CountedReads(rng.integers(50, size=5000).tolist())
    drafter.propose(tokens, 3)
    reads = []
    for token in rng.integers(50, size=20).tolist():
        tokens.append(token)
        tokens.num_read = 0
        drafter.propose(tokens, 3)
        reads.append(tokens.num_read)
    assert max(reads) <= 2 * (4 + 3 + 2) + 3


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 1), r"max_ngram.*>= 1.*0"),
        ((2, 0), r"min_ngram.*>= 1.*0"),
        ((2, 3), r"min_ngram.*max_ngram \(2\).*3"),
        ((2.0, 1), r"max_ngram.*2\.0"),
    ],
)
def test_bad_lengths_are_refused(lengths, message):
    with pytest.raises(InvalidArgumentError, match=message):
        NgramDrafter(*lengths)
