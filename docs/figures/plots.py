"""The plots of the benchmarks page, drawn from the JSON files of docs/benchmarks."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from style import LIGHT, save
from tables import runs

RESULTS = Path(__file__).parent.parent / "benchmarks"

WIDTH = 4.8
"""Inches: a phone shows that at about its own size, so that what is written can be read there."""

Points = dict[float, float]
"""A curve: y by x."""


def draw_copy() -> None:
    """Draw how fast states are copied, by how many there are, beside other ways to copy them."""
    path = _newest("copy-h200")
    axes = _axes("Copying states of 97.9 MiB, GB/s", "states in one call")
    curves: dict[str, Points] = defaultdict(dict)
    for name, result in _measurements(path).items():
        match = re.fullmatch(r"Nemotron-H-8B, fp32 SSM, (\d+) slots: (.*)", name)
        if match is None:
            continue
        slots, what = int(match[1]), match[2]
        if what == "time over a flat copy's":
            own = float(re.search(r"([\d,]+) GB/s", result["detail"])[1].replace(",", ""))
            curves["mamba_cache"][slots] = own
            curves["one flat copy"][slots] = own * result["value"]
        elif what.startswith("faster than "):
            # The ratio's own copy was measured in the same run, just before.
            curves[what.removeprefix("faster than ")][slots] = own / result["value"]
    colours = {"mamba_cache": "blue", "one flat copy": "muted"}
    others = iter(("orange", "purple", "green"))
    for label, points in sorted(curves.items(), key=lambda curve: -max(curve[1].values())):
        _curve(axes, points, label, colours.get(label) or next(others))
    axes.set_ylim(bottom=0)
    _ticks(axes, sorted(curves["mamba_cache"]))
    _finish(axes, "copy", [path])


def draw_control() -> None:
    """Draw what it costs to evict and allocate, by the size of the KV pool."""
    path = _newest("control-epyc")
    axes = _axes("Evicting and allocating in a full cache, us", "KV blocks in the pool")
    curves: dict[str, Points] = defaultdict(dict)
    for name, result in _measurements(path).items():
        match = re.fullmatch(
            r"evict and allocate (\d of) ([\d,]+)( cached KV blocks| slots, ([\d,]+) KV blocks)",
            name,
        )
        if match:
            label = "3 slots of 2,000" if match[4] else "4 KV blocks"
            curves[label][int((match[4] or match[2]).replace(",", ""))] = result["value"]
    for (label, points), colour in zip(curves.items(), ("blue", "orange"), strict=True):
        _curve(axes, points, label, colour)
    axes.set_ylim(0, 60)
    _ticks(axes, sorted(curves["4 KV blocks"]))
    _finish(axes, "control", [path])


def draw_ttft() -> None:
    """Draw the time to first token of one model, by the tokens that were cached."""
    made = runs(with_kernels=True)
    paths = [run["path"] for run in made if run["family"] == "nemotron-h-8b"][-1:]
    axes = _axes("Time to first token, Nemotron-H-8B, ms", "cached tokens, beside 256 new")
    curves: dict[str, Points] = defaultdict(dict)
    for path in paths:
        for name, result in _measurements(path).items():
            match = re.fullmatch(r"(hit|miss|plain transformers), ([\d,]+) \+ .*", name)
            if match:
                curves[match[1]][int(match[2].replace(",", ""))] = result["value"]
    colours = {"miss": "orange", "plain transformers": "muted", "hit": "blue"}
    for label, colour in colours.items():
        _curve(axes, curves[label], label, colour)
    axes.set_ylim(bottom=0)
    _ticks(axes, sorted(curves["hit"]))
    _finish(axes, "ttft", paths)


def draw_hits() -> None:
    """Draw the share of tokens skipped by the number of slots, for each drawn workload."""
    paths = sorted(RESULTS.glob("drawn-*.json"))
    figure = Figure(figsize=(WIDTH, 3.1 * len(paths)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    for path, axes in zip(paths, figure.subplots(len(paths), squeeze=False)[:, 0], strict=True):
        result = json.loads(path.read_text(encoding="utf-8"))
        records = [one for one in result["records"] if one["placement"] == "megatron"]
        curves: dict[str, Points] = defaultdict(dict)
        for record in records:
            curves[record["policy"]][record["slots"]] = 100 * record["token_hit_rate"]
        for policy, colour in (("adaptive", "blue"), ("lru", "orange")):
            _curve(axes, curves[policy], policy, colour)
        found = 100 * max(record["kv_hit_rate"] for record in records)
        axes.axhline(found, color=LIGHT["muted"], linestyle=":", label="keys and values")
        axes.set_title(f"{result['workload']['source']}: skipped, %", pad=10)
        axes.set_xlabel("slots")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        _ticks(axes, sorted({x for points in curves.values() for x in points})[::2])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, "hits", paths)


def _newest(prefix: str) -> Path:
    return max(RESULTS.glob(f"{prefix}-*.json"))


def _measurements(path: Path) -> dict[str, dict[str, Any]]:
    result = json.loads(path.read_text(encoding="utf-8"))
    return {measurement["name"]: measurement for measurement in result["measurements"]}


def _axes(title: str, x_label: str) -> Axes:
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    axes = figure.add_subplot()
    axes.set_title(title, pad=10)
    axes.set_xlabel(x_label)
    axes.set_xscale("log")
    return axes


def _curve(axes: Axes, points: Points, label: str, colour: str) -> None:
    x = sorted(points)
    y = [points[value] for value in x]
    axes.plot(x, y, marker="o", markersize=4.5, color=LIGHT[colour], label=label)


def _ticks(axes: Axes, values: list[float]) -> None:
    axes.minorticks_off()
    axes.set_xticks(values, [f"{value:,.0f}" for value in values])


def _finish(axes: Axes, name: str, paths: list[Path]) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    labels = axes.get_legend_handles_labels()
    axes.get_figure().legend(*labels, loc="outside lower center", ncols=2)
    save(axes.get_figure(), name, paths)
