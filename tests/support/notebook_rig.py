"""A prefix cache over a disk, as in a notebook: ``python notebook_rig.py PATH FAMILY``.

The program runs the same prompts each time, and prints one JSON object: answers, and skipped
tokens of the prompts.
"""

import json
import sys

import torch
from transformers_rig import BLOCK, GREEDY, VOCABULARY, make_cache, make_model

LENGTHS = (83, 120, 64, 41)
REUSABLE = tuple((length - 1) // BLOCK * BLOCK for length in LENGTHS)
"""Skipped tokens of each prompt."""


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in LENGTHS]


def open_cache(path, model, **settings):
    return make_cache(
        model, host_cache_gb=0.01, disk_cache_path=path, disk_cache_gb=0.05, **settings
    )


def ask(cache, some):
    """Answers to prompts, and the skipped tokens."""
    before = cache.stats().skipped_tokens
    answers = [
        cache.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY).sequences[0].tolist()
        for ids in some
    ]
    cache.check_invariants()
    return answers, cache.stats().skipped_tokens - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_cache(sys.argv[1], make_model(sys.argv[2])) as cache:
        print(json.dumps(ask(cache, prompts())))
