"""Several machines: replicas resume from each other's states through a store.

Three replicas get one question each after the same system prompt, without a cache-aware router.
With the store the second and third replica compute only new tokens, without it the whole prompt.
The model is small: its answers mean nothing, but must be the same with the store and without.

Without an argument, replicas and store are in this process; the store is a custom class, whose
interface ``mamba_cache.stores.BlobStore`` describes. With the URL of a store server, machines share
it: ``several_machines.py valkey://127.0.0.1:6379``, or ``mooncake://...``. See
docs/how-to/stores.md, also for cache-aware routers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from mamba_cache import CacheConfig
from mamba_cache.reference import Completion, Engine, HybridModel, SamplingParams
from mamba_cache.stores import BlobStore, StoreFault, StoreHealth, open_store
from mamba_cache.tiers import LoadPlanner, ModelIdentity, Rates

SYSTEM = list(b"You answer letters for the town library, kindly and in one sentence. " * 10)
QUESTIONS = (b"Is it open on Sundays?", b"May I bring my dog?", b"Who reads to the children?")
SAMPLING = SamplingParams(max_new_tokens=16)


class OwnStore(BlobStore):
    """A dict of blobs. A call does not raise for store errors: it returns a fault for each key."""

    name = "own"

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def exists_many(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Return for each key None if its blob can be read, or else a fault."""
        return [None if key in self._blobs else StoreFault.MISSING for key in keys]

    def put_many(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[StoreFault | None]:
        """Store copies; existing blobs stay unchanged."""
        for key, buffer in zip(keys, buffers, strict=True):
            self._blobs.setdefault(key, bytes(buffer))
        return [None] * len(keys)

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview]
    ) -> list[int | StoreFault]:
        """Copy blobs to the buffers; return sizes or faults."""
        return [self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def _get(self, key: str, buffer: memoryview) -> int | StoreFault:
        blob = self._blobs.get(key)
        if blob is None:
            return StoreFault.MISSING
        if len(blob) > len(buffer):
            return StoreFault.SHORT
        buffer[: len(blob)] = blob
        return len(blob)

    def remove(self, keys: Sequence[str]) -> list[StoreFault | None]:
        """Remove blobs."""
        for key in keys:
            self._blobs.pop(key, None)
        return [None] * len(keys)

    def health(self) -> StoreHealth:
        """Report a healthy store."""
        return StoreHealth(None, f"{len(self._blobs)} blobs")

    def close(self) -> None:
        """Do nothing: blobs stay."""


def make_replica(model: HybridModel, store: Any) -> Engine:
    """Return an engine with a store, or without one if ``store`` is None."""
    config = CacheConfig(
        block_size_tokens=64,
        ssm_chunk_size=model.config.ssm_chunk_size,
        max_sequence_length=2048,
        num_kv_blocks=64,
        max_slots=8,
        num_host_blocks=64,
        num_host_states=8,
        store=store,
        write_on_use=1,  # every entry; default: entries used twice
        hash_secret=b"the same on all machines",
    )
    # Names model and weights, so entries of other models are never found.
    identity = ModelIdentity(name="the example's", weights="random, seed 0")
    # A model this small computes faster than entries load, so a learning planner would not load.
    planner = LoadPlanner(Rates(tokens_per_second=1.0), learns=False)
    return Engine(model, config, identity=identity, load_planner=planner)


def ask(replica: Engine, question: bytes) -> Completion:
    """Return the result of a question."""
    checkpoints = [len(SYSTEM)]  # where other prompts branch off
    name = replica.submit(SYSTEM + list(question), SAMPLING, checkpoint_positions=checkpoints)
    return next(e.completion for e in replica.stream() if e.request_id == name and e.completion)


def main(url: str = "") -> int:
    """Ask each replica with the store and without; compare; return the exit status."""
    torch.set_num_threads(1)
    model, store, agree = (
        HybridModel(dtype=torch.float64),
        open_store(url) if url else OwnStore(),
        [],
    )
    computed = {"with": 0, "without": 0}
    print("replica  question                    prompt  computed with the store  without")
    for name, question in zip("ABC", QUESTIONS, strict=True):
        sharing, alone = make_replica(model, store), make_replica(model, None)
        shared, own = ask(sharing, question), ask(alone, question)
        sharing.context.wait_for_tiers()  # for the next replica; steps do not wait
        agree.append(shared.tokens == own.tokens)
        computed["with"] += shared.computed_tokens
        computed["without"] += own.computed_tokens
        figures = f"{own.computed_tokens:6}  {shared.computed_tokens:23}  {own.computed_tokens:7}"
        print(f"{name:7}  {question.decode():26}  {figures}")
    print(f"\nPrompt tokens computed: {computed['with']:,} with, {computed['without']:,} without.")
    print(f"Answers with and without the store {'agree' if all(agree) else 'DO NOT AGREE'}.")
    return 0 if all(agree) and computed["with"] < computed["without"] else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:2]))
