"""A custom placement and a custom eviction policy, and a comparison of hit rates.

Both are plain objects that the context calls. The example runs no model: the bookkeeping is real,
the tokens are random. Most prompts begin with a part of one of a few long documents, some of them
more popular than others; the other prompts share nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache import (
    CacheConfig,
    CheckpointPlacement,
    DynamicInferenceContext,
    EveryNthBlock,
    LruSlotPolicy,
    MegatronPlacement,
    Request,
    SlotEvictionPolicy,
    StateSpec,
)
from mamba_cache.cache import PlacementFacts
from mamba_cache.protocols import KVBlockView

BLOCK_SIZE_TOKENS, MAX_TOKENS, NUM_REQUESTS = 64, 4096, 250
NUM_DOCUMENTS, DOCUMENT_BLOCKS = 12, 40
FEW_SLOTS, MANY_SLOTS = 32, 4096


class DoublingPlacement:
    """Saves states after 1, 2, 4, 8, ... blocks of a prompt, and after its last complete block.

    A prompt that shares a prefix with an earlier prompt finds a state at half of the shared length
    or later, at the cost of a few states for each prompt.
    """

    def positions(self, facts: PlacementFacts) -> Iterable[int]:
        """Return the positions in tokens, each at a block's end."""
        num_blocks = facts.prompt_tokens // facts.block_size_tokens
        doubling = [2**i for i in range(num_blocks.bit_length())]
        return [blocks * facts.block_size_tokens for blocks in {*doubling, num_blocks}]


class PopularSlotPolicy:
    """Evicts the state with the fewest hits first; of equal states, the least recently used."""

    def __init__(self) -> None:
        self.reset(0)

    def choose(
        self,
        num_slots: int,
        slots: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int32],
        kv_blocks: KVBlockView,
    ) -> list[int]:
        """Return slots to evict. A call may be without an eviction, so nothing is changed."""
        order = np.lexsort((self._last_use[slots], self._hits[slots]))
        chosen: list[int] = slots[order[:num_slots]].tolist()
        return chosen

    def on_stored(self, slots: Sequence[int]) -> None:
        """Start to count the hits of new states."""
        self._hits[list(slots)] = 0
        self._touch(slots)

    def on_consumed(self, slots: Sequence[int]) -> None:
        """Count a hit."""
        self._hits[list(slots)] += 1
        self._touch(slots)

    def reset(self, max_slots: int) -> None:
        """Clear all counts."""
        self._clock = 0
        self._hits = np.zeros(max_slots, np.int64)
        self._last_use = np.zeros(max_slots, np.int64)

    def _touch(self, slots: Sequence[int]) -> None:
        self._clock += 1
        self._last_use[list(slots)] = self._clock


PLACEMENTS: dict[str, Callable[[], CheckpointPlacement]] = {
    "MegatronPlacement": MegatronPlacement,
    "EveryNthBlock(4)": lambda: EveryNthBlock(4),
    "DoublingPlacement": DoublingPlacement,
}
POLICIES: dict[str, Callable[[], SlotEvictionPolicy]] = {
    "LruSlotPolicy": LruSlotPolicy,
    "PopularSlotPolicy": PopularSlotPolicy,
}


def make_prompts() -> list[npt.NDArray[np.int32]]:
    """Draw prompts: 8 of 10 share a document up to a random point in its second half."""
    rng = np.random.default_rng(7)
    length = DOCUMENT_BLOCKS * BLOCK_SIZE_TOKENS
    documents = rng.integers(0, 32_000, (NUM_DOCUMENTS, length), dtype=np.int32)
    popularity = 1 / np.arange(1, NUM_DOCUMENTS + 1)
    prompts = []
    for _ in range(NUM_REQUESTS):
        own = rng.integers(0, 32_000, rng.integers(50, 1_000), dtype=np.int32)
        document = documents[rng.choice(NUM_DOCUMENTS, p=popularity / popularity.sum())]
        shared = rng.integers(length // 2, length + 1) if rng.random() < 0.8 else 0
        prompts.append(np.concatenate((document[:shared], own)))
    return prompts


def hit_rate(
    prompts: Iterable[npt.NDArray[np.int32]],
    placement: CheckpointPlacement,
    policy: SlotEvictionPolicy,
    max_slots: int,
) -> float:
    """Run prompts one after another; return the share of skipped tokens."""
    config = CacheConfig(
        block_size_tokens=BLOCK_SIZE_TOKENS,
        ssm_chunk_size=BLOCK_SIZE_TOKENS,
        max_requests=1,
        max_tokens=MAX_TOKENS,
        max_sequence_length=MAX_TOKENS,
        max_checkpoints_per_step=64,
        num_kv_blocks=16_384,
        max_slots=max_slots,
    )
    tiny_states = StateSpec.mamba(1, (1, 1), (1, 1, 1), torch.float32, torch.float32)
    context = DynamicInferenceContext(config, tiny_states, placement=placement, slot_policy=policy)
    for number, prompt in enumerate(prompts):
        context.add_request(Request(request_id=number, prompt_tokens=prompt))
        metadata = context.begin_step().metadata
        # Stands in for a model's one layer: a number for each chunk and for each token.
        states = torch.zeros(metadata.num_chunks, 1, 1, 1)
        inputs = torch.zeros(metadata.num_prefill_tokens, 1)
        context.extract_checkpoint_states(0, states, inputs, metadata)
        context.commit_step({number: 0})
        context.finish(number)
    context.check_invariants()
    stats = context.stats()
    return stats.skipped_tokens / (stats.skipped_tokens + stats.computed_tokens)


def main() -> int:
    """Print the share of skipped tokens for every placement and policy."""
    prompts = make_prompts()
    print(f"{NUM_REQUESTS} prompts, {FEW_SLOTS} slots. Tokens that need not be computed:\n")
    print(" " * 20 + "".join(f"{name:>20}" for name in POLICIES) + f"{f'{MANY_SLOTS:,} slots':>20}")
    for name, make_placement in PLACEMENTS.items():
        rates = [
            hit_rate(prompts, make_placement(), make_policy(), FEW_SLOTS)
            for make_policy in POLICIES.values()
        ]
        rates.append(hit_rate(prompts, make_placement(), LruSlotPolicy(), MANY_SLOTS))
        print(f"{name:20}" + "".join(f"{rate:20.1%}" for rate in rates))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
