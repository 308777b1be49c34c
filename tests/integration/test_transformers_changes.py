"""A model that changes between two calls: what the cache answers is the changed model's answer."""

import re

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from changes_rig import check_change
from model_changes import DUTIES, HARMLESS, KEYED, KINDS, NOTICED, REFUSED
from sources import ROOT
from transformers_rig import make_model


@pytest.mark.parametrize("name", KINDS)
def test_a_prefix_of_the_model_before_is_never_served(name, generator):
    kind = KINDS[name]
    model = make_model(kind.family)
    kind.prepare(model)
    check_change(kind, model, generator)


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].outcome == NOTICED])
def test_a_sample_notices_changes_of_small_weights_too(name, generator):
    kind = KINDS[name]
    model = make_model(kind.family)
    kind.prepare(model)
    check_change(kind, model, generator, weights_check="sample")


def test_the_page_lists_these_kinds():
    """docs/explanation/model_changes.md has a row for each kind, with what is done about it."""
    page = (ROOT / "docs" / "explanation" / "model_changes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| (noticed|keyed|refused|harmless) \|", page, re.M))
    assert rows == {kind.name: kind.outcome for kind in KINDS.values()}
    duties = page.split("caller's duty")[1]
    listed = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", duties, re.M))
    assert {name: listed[name] for name in list(listed)[1:] if "---" not in name} == DUTIES


def test_there_are_many_kinds():
    assert len(KINDS) >= 60
    assert {kind.outcome for kind in KINDS.values()} == {NOTICED, KEYED, REFUSED, HARMLESS}
