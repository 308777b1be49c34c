"""`python docs/figures` draws the figures of the documentation; needs the extra `docs`."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
from sources import ROOT

pytest.importorskip("matplotlib", reason="needs the extra docs")

FIGURES = ROOT / "docs" / "figures"


def content(path: Path) -> tuple[list[str], list[str]]:
    """The text and data of a figure; other versions of matplotlib lay it out otherwise."""
    svg = path.read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>(.*?)</text>", svg, flags=re.DOTALL)
    return texts, re.findall(r"[\w.-]+ sha256:\w+", svg)


def test_every_figure_is_drawn_as_it_is_shown(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FIGURES))
    style = importlib.import_module("style")
    monkeypatch.setattr(style, "FOLDER", tmp_path)
    runpy.run_path(str(FIGURES / "__main__.py"))
    drawn = {path.name: content(path) for path in tmp_path.glob("*.svg")}
    for name in ("style", "plots", "pictures"):
        monkeypatch.delitem(sys.modules, name)
    assert drawn == {path.name: content(path) for path in FIGURES.glob("*.svg")}
    assert all(texts for texts, _ in drawn.values())
    assert (tmp_path / "figures.css").read_text() == (FIGURES / "figures.css").read_text()
