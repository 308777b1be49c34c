"""The figures of the documentation show the data that lie beside them, in light and in dark."""

import hashlib
import re

from sources import ROOT

FIGURES = sorted((ROOT / "docs" / "figures").glob("*.svg"))
RESULTS = ROOT / "docs" / "benchmarks"
SOURCE = re.compile(r"([\w.-]+\.json) sha256:([0-9a-f]{64})")

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in FIGURES}


def drawn_from(svg: str) -> dict[str, str]:
    """Names of the files that a figure says it was drawn from, with their digests."""
    source = re.search(r"<dc:source>(.*?)</dc:source>", svg, flags=re.DOTALL)
    return dict(SOURCE.findall(source[1])) if source else {}


def test_plots_name_their_data() -> None:
    named = {path.stem for path in FIGURES if drawn_from(path.read_text(encoding="utf-8"))}
    assert {"hit", "layers"}.isdisjoint(named)
    assert named >= {"copy", "control", "ttft"}


def test_data_are_as_drawn() -> None:
    """If this fails, `python docs/figures` draws them anew."""
    changed = [
        (figure, name)
        for figure, svg in TEXTS.items()
        for name, digest in drawn_from(svg).items()
        if hashlib.sha256((RESULTS / name).read_bytes()).hexdigest() != digest
    ]
    assert changed == []


def test_the_page_says_with_what_the_first_tokens_of_the_plot_were_measured() -> None:
    """Runs of transformers' reference path have no "-kernels-" in their names."""
    page = " ".join((RESULTS / "index.md").read_text(encoding="utf-8").split())
    [name] = drawn_from(TEXTS["ttft.svg"])
    assert ("The plot shows a run with the kernels" in page) == ("-kernels-" in name)


def test_colours_follow_the_readers_setting() -> None:
    """Every colour is a variable that has a light value and a dark one."""
    breaches = {}
    for figure, svg in TEXTS.items():
        light, dark = (
            set(re.findall(r"--(\w+): #", values)) for values in re.findall(r":root \{(.*?)\}", svg)
        )
        used = set(re.findall(r"var\(--(\w+)\)", svg))
        fixed = set(re.findall(r"(?:fill|stroke): (#\w+|black|white)", svg))
        breaches[figure] = (light ^ dark) | (used - light) | fixed
    assert {figure: names for figure, names in breaches.items() if names} == {}


def test_every_figure_is_shown_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in TEXTS if f"figures/{name}" not in shown] == []
