"""Put this package's slots in the place of Megatron Core's, and watch them at work.

With Megatron Core installed, its class is replaced for real. The steps run over a small stand-in
for Megatron's inference context all the same, so that no GPU is needed: it has the fields that
slots read of the real one, and a forward that writes checkpoint states into the scratch, as
Megatron's kernels do. Every request runs a second time without saved states, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace

import torch

from mamba_cache import MambaSlotAllocator, compute_block_hashes
from mamba_cache.errors import MissingExtraError, UnsupportedVersionError
from mamba_cache.integrations import megatron

BLOCK, NUM_BLOCKS, MAX_REQUESTS, LAYERS = 64, 64, 8, 2
SYSTEM = "You are a librarian. Answer in one sentence, and name the shelf. " * 4
QUESTIONS = (
    "Where are the books on birds?",
    "Which shelf has the oldest maps?",
    "Which shelf has the oldest maps?",
    "Which shelf has the oldest maps? On the third. And who drew them?" + " Please look it up." * 4,
)


@dataclass
class Prompt:
    """What slots read of a request."""

    prompt_tokens: Sequence[int]
    finished_chunk_token_count: int = 0


@dataclass
class KVBlocks:
    """What slots read of a KV block allocator; block ids are handed out once and for all."""

    pool_size: int = NUM_BLOCKS
    block_ref_counts: torch.Tensor = field(default_factory=lambda: _filled(0, torch.int32))
    block_timestamps: torch.Tensor = field(default_factory=lambda: _filled(0, torch.int64))
    block_hashes: torch.Tensor = field(default_factory=lambda: _filled(-1, torch.int64))


def _filled(value: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((NUM_BLOCKS,), value, dtype=dtype)


class StandInContext:
    """An inference context with Megatron's fields, which prefills one request at a time.

    Args:
        slots_class: Makes the slots, as Megatron's context does.
        max_slots: Slots for saved states; 0 for none.
    """

    def __init__(self, slots_class: Callable[..., MambaSlotAllocator], max_slots: int) -> None:
        self.device = "cpu"
        self.max_requests = MAX_REQUESTS
        self.block_size_tokens = BLOCK
        self.mamba_chunk_size = self.ssm_chunk_alignment = BLOCK
        self.prefix_caching_eviction_policy = "lru"
        self.max_mamba_intermediate_states_per_step = 3
        self.kv_block_allocator = KVBlocks()
        self.request_to_kv_block_ids = torch.zeros(MAX_REQUESTS, NUM_BLOCKS, dtype=torch.int32)
        self.mamba_conv_states = torch.zeros(LAYERS, MAX_REQUESTS, 8, 4)
        self.mamba_ssm_states = torch.zeros(LAYERS, MAX_REQUESTS, 2, 4, 4)
        self.mamba_metadata = SimpleNamespace(
            request_to_mamba_state_idx=torch.arange(MAX_REQUESTS, dtype=torch.int32)
        )
        self.batch_dimensions = SimpleNamespace(prefill_req_count=1, decode_req_count=0)
        self.paused_request_count = 0
        self.mamba_slot_allocator = slots_class(
            context=self,
            max_slots=max_slots,
            num_mamba_layers=LAYERS,
            conv_states_shape=(8, 4),
            ssm_states_shape=(2, 4, 4),
            conv_states_dtype=torch.float32,
            ssm_states_dtype=torch.float32,
        )
        self._block_of_hash: dict[int, int] = {}

    def prefill(self, row: int, tokens: Sequence[int]) -> int:
        """Compute a prompt into a row's live state, from the farthest saved state on.

        Returns:
            How many tokens were skipped.
        """
        slots = self.mamba_slot_allocator
        blocks, num_matched = self._find_blocks(tokens)
        self.request_to_kv_block_ids[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        usable = blocks[: min(num_matched, (len(tokens) - 1) // BLOCK)]
        num_restored = max((i + 1 for i, b in enumerate(usable) if slots.has_state(b)), default=0)
        if num_restored:
            assert slots.restore_to_live(row, blocks[num_restored - 1])
        skip = num_restored * BLOCK
        self.paused_request_count = row  # the rows before this one take no part in the step
        slots.compute_and_store_offsets(
            Prompt(tokens), row, skip, len(tokens), num_matched, blocks[:num_matched], len(blocks)
        )
        self._forward(row, tokens[skip:])
        slots.commit_intermediate_states()
        return skip

    def _find_blocks(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Returns a block for each part of the prompt, and how many were known before."""
        hashes = list(compute_block_hashes(tokens, BLOCK))
        known = [self._block_of_hash.get(hash_id) for hash_id in hashes]
        num_matched = known.index(None) if None in known else len(known)
        first_new = len(self._block_of_hash)
        for block, hash_id in enumerate(hashes[num_matched:], start=first_new):
            self._block_of_hash[hash_id] = block
            self.kv_block_allocator.block_hashes[block] = hash_id
        blocks = [self._block_of_hash[hash_id] for hash_id in hashes]
        # The last part, which fills no block, goes to the pool's last one: nobody reads it.
        return blocks + [NUM_BLOCKS - 1] * (len(tokens) % BLOCK > 0), num_matched

    def _forward(self, row: int, tokens: Sequence[int]) -> None:
        """Advance the live state token by token, and write checkpoint states into the scratch."""
        slots = self.mamba_slot_allocator
        offsets, counts = slots.get_intermediate_gpu_data()
        wanted: list[int] = []
        if offsets is not None and counts is not None:
            wanted = offsets[0, : int(counts[0])].tolist()
        conv, ssm = self.mamba_conv_states[:, row], self.mamba_ssm_states[:, row]
        for number, token in enumerate(tokens, start=1):
            conv.copy_(torch.cat([conv[..., 1:], torch.full_like(conv[..., :1], token)], dim=-1))
            ssm.mul_(0.99).add_(token / 256)
            if number in wanted:
                slots.intermediate_conv_out[:, wanted.index(number)] = conv
                slots.intermediate_ssm_out[:, wanted.index(number)] = ssm
        self.mamba_metadata.intermediate_count = len(wanted)
        self.mamba_metadata.per_request_intermediate_counts = [len(wanted)]


def swapped_class() -> type[MambaSlotAllocator]:
    """Swap Megatron's class if it is there; return the class that its contexts make."""
    try:
        megatron.install()
    except (MissingExtraError, UnsupportedVersionError) as error:
        print(f"No swap: {error}.\nThe steps below use the package's class directly.\n")
        return MambaSlotAllocator
    print(
        "Swapped: Megatron Core's contexts now make this package's slots, as the steps below do.\n"
    )
    home = import_module("megatron.core.inference.contexts.mamba_slot_allocator")
    replaced: type[MambaSlotAllocator] = home.MambaSlotAllocator
    return replaced


def play(slots_class: type[MambaSlotAllocator]) -> bool:
    """Answer questions after one system prompt; return whether all states are exact."""
    cached, uncached = StandInContext(slots_class, 16), StandInContext(slots_class, 0)
    print("request  prompt  skipped  computed  state")
    all_exact = True
    for row, question in enumerate(QUESTIONS):
        tokens = list((SYSTEM + question).encode())
        skipped = cached.prefill(row, tokens)
        uncached.prefill(row, tokens)
        exact = all(
            torch.equal(getattr(cached, name)[:, row], getattr(uncached, name)[:, row])
            for name in ("mamba_conv_states", "mamba_ssm_states")
        )
        all_exact &= exact
        verdict = "as without a cache, bit by bit" if exact else "WRONG"
        computed = len(tokens) - skipped
        print(f"{row + 1:7}  {len(tokens):6}  {skipped:7}  {computed:8}  {verdict}")
    cached.mamba_slot_allocator.check_invariants()
    return all_exact


def faults(slots_class: type[MambaSlotAllocator]) -> dict[str, bool]:
    """Provoke what goes wrong in Megatron Core's own class; return which rules hold."""
    slots = StandInContext(slots_class, 2).mamba_slot_allocator
    first, second = slots.allocate_slots_batch([0, 1])
    new, kept = slots.allocate_slots_batch([2, 0])
    found = {"a call evicts no block that it names itself": (new, kept) == (second, first)}
    slots.register_block_hashes_batch([0, 2], [100, 102])
    slots.invalidate_block(0)
    found["an invalidated block's hash finds nothing"] = 100 not in slots.hash_to_block_id
    slots.allocate_slots_batch([5])
    slots.on_kv_blocks_deregistered([5], set())
    found["a slot without a hash does not outlive its block"] = not slots.has_state(5)
    return found


def main() -> int:
    """Run the script; return its exit status."""
    torch.set_num_threads(1)
    slots_class = swapped_class()
    all_exact = play(slots_class)
    found = faults(slots_class)
    print()
    for rule, holds in found.items():
        print(f"{'holds ' if holds else 'BROKEN'}  {rule}")
    megatron.uninstall()
    return 0 if all_exact and all(found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
