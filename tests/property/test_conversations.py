"""Random conversations with a prefix cache of every family: what the model says without one.

One of each family in every run; ``python tests/conversation_search.py`` holds as many as are asked
for.
"""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from conversations import SUBJECTS, Conversation, family_of
from transformers_rig import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_is_the_models_own(name, seed):
    subjects = [number for number, subject in enumerate(SUBJECTS) if family_of(subject) == name]
    Conversation(seed * len(SUBJECTS) + subjects[seed % len(subjects)]).run()
