"""Two blocks of 256 tokens that collide under xxh3-128, for every parent and every secret."""

import json
from pathlib import Path

_PAIR = json.loads((Path(__file__).parents[1] / "data" / "collision.json").read_text("utf-8"))

FORGED: list[int] = _PAIR["first"]
"""The block that an attacker sends."""

PUBLIC: list[int] = _PAIR["second"]
"""The block that other clients send, such as a system prompt."""

BLOCK = len(PUBLIC)
VOCABULARY = 50_000
