"""The figures of the documentation show the data that lie beside them, in light and in dark."""

import hashlib
import re

import pytest
from sources import ROOT

FIGURES = sorted((ROOT / "docs" / "figures").glob("*.svg"))
RESULTS = ROOT / "docs" / "benchmarks"
SOURCE = re.compile(r"([\w.-]+\.json) sha256:([0-9a-f]{64})")

every_figure = pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.stem)


def drawn_from(svg: str) -> dict[str, str]:
    """Names of the files that a figure says it was drawn from, with their digests."""
    source = re.search(r"<dc:source>(.*?)</dc:source>", svg, flags=re.DOTALL)
    return dict(SOURCE.findall(source[1])) if source else {}


def test_plots_name_their_data() -> None:
    named = {path.stem for path in FIGURES if drawn_from(path.read_text(encoding="utf-8"))}
    assert {"hit", "layers"}.isdisjoint(named)
    assert named >= {"copy", "control", "ttft"}


@every_figure
def test_data_are_as_drawn(figure) -> None:
    """If this fails, `python docs/figures` draws them anew."""
    for name, digest in drawn_from(figure.read_text(encoding="utf-8")).items():
        assert hashlib.sha256((RESULTS / name).read_bytes()).hexdigest() == digest, name


@every_figure
def test_colours_follow_the_readers_setting(figure) -> None:
    """Every colour is a variable that has a light value and a dark one."""
    svg = figure.read_text(encoding="utf-8")
    light, dark = (
        set(re.findall(r"--(\w+): #", values)) for values in re.findall(r":root \{(.*?)\}", svg)
    )
    assert light == dark
    assert set(re.findall(r"var\(--(\w+)\)", svg)) <= light
    fixed = set(re.findall(r"(?:fill|stroke): (#\w+|black|white)", svg))
    assert fixed == set()


@every_figure
def test_is_shown_somewhere(figure) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"figures/{figure.name}" in page.read_text(encoding="utf-8") for page in pages)
