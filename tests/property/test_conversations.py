"""Random conversations with a prefix cache of every family: what the model says without one.

One of each family in every run; ``python tests/conversation_search.py`` holds as many as are asked
for.
"""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from broken_caches import FAULTS, broken
from conversations import SUBJECTS, Conversation, WrongAnswerError, family_of
from transformers_rig import FAMILIES

FOUND_SOON = FAULTS[:1]
"""Of the faults that the search must find, those that few conversations pass by."""


def hold_some():
    for seed in range(9):
        Conversation(seed).run()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_is_the_models_own(name, seed):
    subjects = [number for number, subject in enumerate(SUBJECTS) if family_of(subject) == name]
    Conversation(seed * len(SUBJECTS) + subjects[seed % len(subjects)]).run()


@pytest.mark.parametrize("fault", FOUND_SOON)
def test_a_broken_cache_is_found(fault):
    with broken(fault), pytest.raises(WrongAnswerError, match="repeat with"):
        hold_some()


def test_the_faults_of_the_search_are_still_put_in():
    """Each names what it takes the place of, and undoes it."""
    for fault in FAULTS:
        with broken(fault):
            pass
