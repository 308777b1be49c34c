"""The reference has a page for each exported class."""

import importlib
import inspect
import runpy

import pytest
from sources import ROOT

pytest.importorskip("sphinx.addnodes", reason="needs the extra docs")

import mamba_cache

CONF = runpy.run_path(str(ROOT / "docs" / "conf.py"))


def is_shown_apart(exported: type) -> bool:
    """Whether a class has a page of its own, or its module's page is its own."""
    module = importlib.import_module(exported.__module__)
    defined = [name for name in module.__all__ if CONF["is_defined_in"](module, name)]
    _, apart = CONF["module_page"](module, CONF["exported_classes"]())
    return defined == [exported.__name__] or exported.__name__ in apart


def test_each_class_of_the_front_door_has_a_page():
    exported = [getattr(mamba_cache, name) for name in mamba_cache.__all__]
    classes = [one for one in exported if inspect.isclass(one)]
    values = [one for one in classes if not issubclass(one, BaseException)]
    assert len(values) > 30
    assert [one for one in values if not is_shown_apart(one)] == []
