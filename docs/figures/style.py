"""How figures look, on light pages and on dark ones, and how they are written."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from matplotlib.figure import Figure

FOLDER = Path(__file__).parent

COLOURS = {
    "card": ("#fdfdfd", "#1c1f24"),
    "ink": ("#1f2329", "#e6e8eb"),
    "muted": ("#5f6670", "#a2a9b4"),
    "faint": ("#d9dce1", "#3b4049"),
    "blue": ("#2f6fb7", "#6cabf2"),
    "orange": ("#b75d15", "#f0a05a"),
    "green": ("#2b8049", "#6cc98a"),
    "purple": ("#7a4fb5", "#b995ec"),
    "pale": ("#dfeaf7", "#243a54"),
    "warm": ("#f9e6d5", "#513520"),
    "fresh": ("#dcf1e2", "#1f4530"),
}
"""Each colour on a light page and on a dark one."""

LIGHT = {name: light for name, (light, _) in COLOURS.items()}

mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text: sharp, small, and found by a search
        "svg.hashsalt": "mamba_cache",  # the same ids in every run
        "font.family": "sans-serif",
        "font.size": 10.5,
        "figure.facecolor": LIGHT["card"],
        "axes.facecolor": LIGHT["card"],
        "axes.edgecolor": LIGHT["faint"],
        "axes.labelcolor": LIGHT["muted"],
        "axes.titlecolor": LIGHT["ink"],
        "axes.titlelocation": "left",
        "axes.titlesize": 11.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": LIGHT["faint"],
        "grid.linewidth": 0.6,
        "text.color": LIGHT["ink"],
        "xtick.color": LIGHT["muted"],
        "ytick.color": LIGHT["muted"],
        "xtick.minor.visible": False,
        "legend.frameon": False,
    }
)


def save(figure: Figure, name: str, sources: Iterable[Path] = ()) -> None:
    """Write a figure as SVG that follows the reader's light or dark setting.

    The figure brings its background along, so that it can be read on any page. It names the files
    that it was drawn from with their digests, by which a test sees that it is up to date.

    Args:
        figure: The figure, drawn in the light colours.
        name: Of the file, without suffix.
        sources: Files of data that the figure shows.
    """
    drawn_from = ", ".join(f"{path.name} sha256:{_digest(path)}" for path in sources)
    text = io.StringIO()
    figure.savefig(
        text, format="svg", metadata={"Date": None, "Creator": None, "Source": drawn_from or None}
    )
    svg = text.getvalue()
    for colour, light in LIGHT.items():
        svg = re.sub(light, f"var(--{colour})", svg, flags=re.IGNORECASE)
    svg = svg.replace("<defs>", f"<defs>\n  <style>{_style()}</style>", 1)
    svg = re.sub(r"font: ([^;]*)'sans-serif'[^;\"]*", r"font: \1system-ui, sans-serif", svg)
    svg = re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
    (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


def save_style() -> None:
    """Write how figures look within a page, where they follow the page's switch."""
    light, dark = _values(0), _values(1)
    css = (
        f"body {{ {light} }}\n"
        f"body[data-theme=dark] {{ {dark} }}\n"
        f"@media (prefers-color-scheme: dark) {{ body:not([data-theme=light]) {{ {dark} }} }}\n"
        ".figure * { stroke-linejoin: round; stroke-linecap: butt }\n"
    )
    (FOLDER / "figures.css").write_text(css, encoding="utf-8")


def _style() -> str:
    light, dark = _values(0), _values(1)
    return f":root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def _values(index: int) -> str:
    return "; ".join(f"--{name}: {pair[index]}" for name, pair in COLOURS.items())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
