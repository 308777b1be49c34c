"""The pictures that explain: a hit, the layers of the package, the life of an entry."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import LIGHT, save

WIDTH = 16.5
"""Of a block, in units of the picture."""

LEFT = 20
"""Where blocks begin; names stand before."""

ARCHITECTURE = Path(__file__).parents[1] / "explanation" / "architecture.md"
"""Whose table of layers is drawn."""


@dataclass(frozen=True)
class Paint:
    """Colours of a box, by name."""

    edge: str
    fill: str
    text: str = "ink"


PROMPT = Paint("orange", "warm")
BLOCK = Paint("blue", "pale")
STATE = Paint("purple", "card")
SKIPPED = Paint("faint", "card", "muted")
COMPUTED = Paint("green", "fresh")


def draw_hit() -> None:
    """Draw two prompts with a common beginning, and what the second one need not compute."""
    axes = _canvas(100, 58)
    _name(axes, 47, "first prompt")
    for index, label in enumerate(["system prompt"] * 3 + ["question"]):
        _box(axes, _edge(index), 47, label, PROMPT)
    _box(axes, _edge(4), 47, "...", PROMPT, width=8)
    _name(axes, 34, "KV blocks", "keys and values,\nfor each block")
    for index in range(4):
        middle = _edge(index) + WIDTH / 2
        _arrow(axes, (middle, 46.6), (middle, 41), "muted")
        _box(axes, _edge(index), 34, f"block {index}", BLOCK)
    _name(axes, 20.5, "slots", "conv and SSM states,\nat a checkpoint")
    for index, label in ((3, "state at 384"), (4, "state at 512")):
        _box(axes, _edge(index) - 7.4, 20.5, label, STATE, width=14)
        _arrow(axes, (_edge(index) - 0.4, 33.6), (_edge(index) - 0.4, 27.4), "purple")
    _note(axes, _edge(1), 23.5, "most boundaries\nhave no state")
    _name(axes, 5.5, "second prompt")
    for index in range(3):
        _box(axes, _edge(index), 5.5, "skipped", SKIPPED)
    _box(axes, _edge(3), 5.5, "computed", COMPUTED)
    _box(axes, _edge(4), 5.5, "...", COMPUTED, width=5)
    _arrow(axes, (_edge(3) - 0.4, 20), (_edge(3) - 0.4, 12.2), "purple")
    axes.text(_edge(3) + 1, 16, "restore", color=LIGHT["purple"], va="center")
    span = {"arrowstyle": "<->", "color": LIGHT["muted"]}
    axes.annotate("", (_edge(0), 3.6), (_edge(3) - 0.8, 3.6), arrowprops=span)
    _note(axes, _edge(1) + WIDTH / 2, 1.4, "KV match: 3 blocks of 128 tokens; skip tokens: 384")
    save(axes.get_figure(), "hit")


def draw_layers() -> None:
    """Draw the packages of each layer, as the table on the page about architecture lists them."""
    rows = re.findall(
        r"^\| (\d) \| (`[^|]*) \| ([^|:]*)", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE
    )
    layers: dict[str, tuple[list[str], list[str]]] = {}
    for number, names, holds in rows:
        packages = re.findall(r"`([a-z]+)", names)  # not the private modules
        if packages:
            drawn = layers.setdefault(number, ([], []))
            drawn[0].extend(packages)
            drawn[1].append(holds.strip())
    axes = _canvas(110, 8.4 + 7.4 * (len(layers) - 1))
    for number, (packages, holds) in layers.items():
        bottom = 1.8 + 7.4 * (int(number) - 1)
        axes.text(2, bottom + 3, number, va="center", color=LIGHT["muted"], fontsize=12)
        width = 52 / len(packages)
        for index, package in enumerate(packages):
            _box(axes, 6 + index * width, bottom, package, BLOCK, width=width - 1)
        text = textwrap.fill("; ".join(holds), 58)
        axes.text(60, bottom + 3, text, va="center", color=LIGHT["muted"], fontsize=9)
    save(axes.get_figure(), "layers")


def draw_entry() -> None:
    """Draw the life of an entry: down to the disk, and verified on its way up."""
    axes = _canvas(112, 52)
    rows = ((38, "GPU", "slots and KV blocks"), (22, "host", "pinned rows"), (6, "disk", "slabs"))
    steps = {
        38: (("step commits", BLOCK), ("found by hash", STATE), ("evicted", SKIPPED)),
        22: (("spilled", BLOCK), ("found by digest", STATE), ("evicted", SKIPPED)),
        6: (
            ("second use:\nwritten, synced", BLOCK),
            ("found by digest", STATE),
            ("evicted", SKIPPED),
        ),
    }
    for bottom, name, detail in rows:
        _name(axes, bottom, name, detail)
        for index, (label, paint) in enumerate(steps[bottom]):
            left = 24 + index * 22
            _box(axes, left, bottom, label, paint, width=18)
            if index:
                _arrow(axes, (left - 3.8, bottom + 3), (left - 0.2, bottom + 3), "muted")
    for bottom in (22, 6):
        _arrow(axes, (33, bottom + 15.8), (33, bottom + 6.3), "blue")
        _arrow(axes, (55, bottom + 6.3), (55, bottom + 15.8), "green")
        label = "header, then checksums" if bottom == 22 else "header, then digest"
        axes.text(57, bottom + 11, f"verified: {label}", color=LIGHT["green"], va="center")
    _note(axes, 97, 25, "dropped and counted:\na miss, by reason")
    _note(axes, 55, 1.6, "what does not match is never restored; the prompt is computed instead")
    save(axes.get_figure(), "entry")


def _canvas(width: float, height: float) -> Axes:
    figure = Figure(figsize=(width / 11, height / 11))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def _edge(index: int) -> float:
    return LEFT + index * WIDTH


def _name(axes: Axes, bottom: float, name: str, detail: str = "") -> None:
    axes.text(2, bottom + (4.6 if detail else 3), name, va="center", weight="bold")
    axes.text(2, bottom + 0.9, detail, va="center", fontsize=9, color=LIGHT["muted"])


def _note(axes: Axes, x: float, y: float, text: str) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=LIGHT["muted"])


def _box(
    axes: Axes, left: float, bottom: float, label: str, paint: Paint, *, width: float = WIDTH - 0.8
) -> None:
    box = FancyBboxPatch(
        (left, bottom),
        width,
        6,
        boxstyle="round,pad=0,rounding_size=0.7",
        edgecolor=LIGHT[paint.edge],
        facecolor=LIGHT[paint.fill],
        linewidth=1.3,
    )
    axes.add_patch(box)
    middle = left + width / 2, bottom + 3
    axes.text(*middle, label, ha="center", va="center", fontsize=9.5, color=LIGHT[paint.text])


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    arrow = {"arrowstyle": "-|>", "color": LIGHT[colour], "linewidth": 1.3}
    axes.annotate("", end, start, arrowprops=arrow)
