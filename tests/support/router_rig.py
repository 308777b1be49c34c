"""Loads for replicas behind published routers, which tests/engines/routers.sh fetches."""

from sources import load_example

two = load_example("two_replicas")

KINDS = {"vllm-router": two.VllmRouter, "dynamo": two.DynamoRouter}

LOAD = two.Load(conversations=40, turns=3, question_tokens=80, pause_seconds=0.1)
"""Prompts evict states of others; in the pause the router receives these events."""

SIZES = {"num_blocks": 512, "num_slots": 128}
TWICE = {name: 2 * size for name, size in SIZES.items()}

FEW = two.Load(conversations=8, turns=3, system_prompts=2, begin_at_once=1, pause_seconds=0.1)
FEW_SLOTS = {"num_blocks": 512, "num_slots": 4}
"""So few slots that each prompt evicts states of others."""


def run(kind, load, number=2, **sizes):
    """Answers of ``number`` replicas behind a router of this kind."""
    with two.replicas(number, **sizes) as running:
        router = kind(running)
        try:
            return two.converse(router, load)
        finally:
            router.close()
