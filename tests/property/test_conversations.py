"""Random conversations with a prefix cache, for every family: answers equal those without one.

Some of each family in every run; ``python tests/conversation_search.py`` runs any number of them.
"""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from conversations import SUBJECTS, Conversation, WrongAnswerError, family_of
from transformers_rig import FAMILIES

from mamba_cache.integrations.transformers.layers import PrefixTensors


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_is_the_models_own(name, seed):
    subjects = [number for number, subject in enumerate(SUBJECTS) if family_of(subject) == name]
    for number in range(seed, seed + 3):
        Conversation(number * len(SUBJECTS) + subjects[number % len(subjects)]).run()


def hold_some():
    for seed in range(9):
        Conversation(seed).run()


def test_a_cache_that_restores_another_slot_is_found(monkeypatch):
    load = PrefixTensors.load

    def of_another_slot(self, slot, *others):
        return load(self, (slot + 1) % len(self.slots), *others)

    monkeypatch.setattr(PrefixTensors, "load", of_another_slot)
    with pytest.raises(WrongAnswerError, match="repeat with"):
        hold_some()
