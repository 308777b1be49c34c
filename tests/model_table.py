"""``python tests/model_table.py`` writes the table of supported models into the README.

A tiny model with random weights is made for every family of the tests; a prefix cache around the
model gives the columns.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

from transformers import PreTrainedModel
from transformers_rig import (
    _CONFIGS,
    COMPOSITE,
    FAMILIES,
    make_cache,
    make_model,
    make_multimodal_model,
)

from mamba_cache.errors import InvalidArgumentError, UnresumableModelError

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- supported models, written by tests/model_table.py -->"
END = "<!-- end of supported models -->"


def describe(model: PreTrainedModel) -> tuple[str, str]:
    """Return the memory of a model's layers, and whether batches serve the model."""
    cache = make_cache(model)
    layers = cache._store.layout.layers
    kept = {
        "conv window": any(parts.convs for parts in layers),
        "recurrent state": any(parts.recurrents for parts in layers),
        "KV": any(parts.has_tokens for parts in layers),
        "KV of a sliding window": any(parts.window for parts in layers),
    }
    try:
        cache.prepare_batches()
        batches = "yes"
    except (InvalidArgumentError, UnresumableModelError):
        batches = "no"
    return ", ".join(name for name, is_kept in kept.items() if is_kept), batches


def table() -> str:
    """The table: families that are alike share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        names = rows.setdefault(describe(make_model(family)), [])
        if (name := f"`{_CONFIGS[family]['model_type']}`") not in names:
            names.append(name)
    for family, model_type in COMPOSITE.items():
        facts = describe(make_multimodal_model(family))
        rows.setdefault(facts, []).append(f"`{model_type}` (over text)")
    lines = ["| `model_type` | what its layers keep | `generate_batch` |"]
    lines.append("|---|---|---|")
    lines += [f"| {', '.join(names)} | {' | '.join(facts)} |" for facts, names in rows.items()]
    return "\n".join(lines)


def write() -> None:
    """Replace the table in the README."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write()
