"""The pictures that explain: a hit, the tiers, the layers of the package, the life of an entry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from style import LIGHT, save

WIDTH = 13
"""Of a block, in units of the picture."""

LEFT = 1
"""Where blocks begin; names stand above."""

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
    axes = _canvas(60, 66)
    _row_name(axes, 61.5, "first prompt")
    for index, label in enumerate(["system"] * 3 + ["question"]):
        _box(axes, _edge(index), 53, label, PROMPT)
    _box(axes, _edge(4), 53, "...", PROMPT, width=5.5)
    _row_name(axes, 46.5, "KV blocks")
    for index in range(4):
        _arrow(axes, (_edge(index) + 10.5, 52.7), (_edge(index) + 10.5, 44.4), "muted")
        _box(axes, _edge(index), 38, f"block {index}", BLOCK)
    _row_name(axes, 31.5, "slots: one state each")
    _note(axes, _edge(1) - 0.5, 26.2, "most boundaries\nhave no state")
    for index, label in ((3, "state 384"), (4, "state 512")):
        _box(axes, _edge(index) - 8.2, 23, label, STATE, width=11)
        _arrow(axes, (_edge(index) - 0.6, 37.7), (_edge(index) - 0.6, 29.3), "purple")
    _row_name(axes, 16.5, "second prompt")
    for index in range(3):
        _box(axes, _edge(index), 8, "skipped", SKIPPED)
    _box(axes, _edge(3), 8, "computed", COMPUTED)
    _box(axes, _edge(4), 8, "...", COMPUTED, width=5.5)
    _arrow(axes, (_edge(3) - 0.6, 22.7), (_edge(3) - 0.6, 14.5), "purple")
    axes.text(_edge(3) + 0.8, 18.6, "restore", color=LIGHT["purple"], va="center", fontsize=9.5)
    span = {"arrowstyle": "<->", "color": LIGHT["muted"]}
    axes.annotate("", (_edge(0), 5.6), (_edge(3) - 0.8, 5.6), arrowprops=span)
    axes.text(1, 2.4, "KV match: 3 blocks of 128 tokens; skip tokens: 384",
              color=LIGHT["muted"], fontsize=9.5)  # fmt: skip
    save(axes.get_figure(), "hit")


def draw_tiers() -> None:
    """Draw where an entry can live, from the GPU down to a store that machines share."""
    axes = _canvas(60, 62)
    tiers = (
        ("GPU", "slots and KV blocks", "restored in one launch", STATE),
        ("host", "pinned memory", "used where it beats computing", BLOCK),
        ("disk", "files of one process", "outlives the process", BLOCK),
        ("store", "shared by machines", "what one computed, all can use", COMPUTED),
    )
    for index, (name, holds, use, paint) in enumerate(tiers):
        bottom = 50 - 15 * index
        axes.text(1, bottom + 3, name, va="center", weight="bold")
        _box(axes, 9, bottom, holds, paint, width=22)
        axes.text(33, bottom + 3, use, va="center", fontsize=9.5, color=LIGHT["muted"])
        if index:
            _arrow(axes, (15, bottom + 14.8), (15, bottom + 6.3), "blue")
            _arrow(axes, (25, bottom + 6.3), (25, bottom + 14.8), "green")
            axes.text(26.5, bottom + 10.5, "verified byte by byte",
                      va="center", fontsize=9, color=LIGHT["green"])  # fmt: skip
            axes.text(13.5, bottom + 10.5, "spill", va="center", ha="right", fontsize=9,
                      color=LIGHT["blue"])  # fmt: skip
    axes.text(1, 1.6, "An entry is one KV block or one state; it can be in several places.",
              fontsize=9, color=LIGHT["muted"])  # fmt: skip
    save(axes.get_figure(), "tiers")


def draw_layers() -> None:
    """Draw the packages of each layer, as the table on the page about architecture lists them."""
    rows = re.findall(
        r"^\| (\d) \| (`[^|]*) \|", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE
    )
    layers: dict[str, list[str]] = {}
    for number, names in rows:
        packages = re.findall(r"`([a-z]+)", names)  # not the private modules
        if packages:
            layers.setdefault(number, []).extend(packages)
    axes = _canvas(60, 8.4 + 7.4 * (len(layers) - 1))
    for number, packages in layers.items():
        bottom = 1.8 + 7.4 * (int(number) - 1)
        axes.text(2, bottom + 3, number, va="center", color=LIGHT["muted"], fontsize=12)
        width = 52 / len(packages)
        for index, package in enumerate(packages):
            _box(axes, 6 + index * width, bottom, package, BLOCK, width=width - 1)
    save(axes.get_figure(), "layers")


def draw_entry() -> None:
    """Draw the life of an entry: down to the disk, and verified on its way up."""
    axes = _canvas(66, 58)
    rows = ((45, "GPU", "slots, blocks"), (29, "host", "pinned rows"), (13, "disk", "files"))
    steps = {
        45: (("step commits", BLOCK), ("found by hash", STATE), ("evicted", SKIPPED)),
        29: (("spilled", BLOCK), ("found by digest", STATE), ("evicted", SKIPPED)),
        13: (
            ("second use:\nwritten, synced", BLOCK),
            ("found by digest", STATE),
            ("evicted", SKIPPED),
        ),
    }
    for bottom, name, detail in rows:
        _name(axes, bottom, name, detail)
        for index, (label, paint) in enumerate(steps[bottom]):
            left = 13 + index * 18
            _box(axes, left, bottom, label, paint, width=15)
            if index:
                _arrow(axes, (left - 3.8, bottom + 3), (left - 0.2, bottom + 3), "muted")
    for bottom in (29, 13):
        _arrow(axes, (20, bottom + 15.8), (20, bottom + 6.3), "blue")
        _arrow(axes, (38, bottom + 6.3), (38, bottom + 15.8), "green")
        label = "header, then checksums" if bottom == 29 else "header, then digest"
        axes.text(
            40, bottom + 11, f"verified: {label}", color=LIGHT["green"], va="center", fontsize=9
        )
    _note(
        axes,
        33,
        5,
        "what does not match is never restored: it is dropped and\n"
        "counted, a miss by reason, and the prompt is computed",
    )
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


def _row_name(axes: Axes, y: float, name: str) -> None:
    axes.text(1, y, name, va="center", weight="bold")


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
