"""Replays a trace through the store of a ``PrefixCache``, without a model.

    python tests/benchmarks/prefix_replay.py --trace requests.jsonl --slots 50 200
    python tests/benchmarks/prefix_replay.py --drawn agents --limit 1200 --slots 100 --blocks 2000

A token here stands for 32 of the trace's, and a block of 8 for one of 256. An id of the trace is a
run of 13, so that prompts end inside blocks. If a later prompt continues a prompt, the
answer is taken from the later one, so that the next turn may resume at the answer's last boundary.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import drawn_traces
import numpy as np
from transformers_rig import BLOCK, make_cache, make_model

from mamba_cache.cache import SLOT_POLICIES, BranchPoint
from mamba_cache.cli.traces import TraceRequest, read_trace
from mamba_cache.config import CacheConfig
from mamba_cache.events import Listeners
from mamba_cache.integrations.transformers import store as store_module
from mamba_cache.integrations.transformers.store import PrefixStore

RUN = 13
_TOKENS = 32
_LONGEST_ANSWER = 60


class _NoTensors:
    """A stand-in for the tensors of blocks and slots."""

    blocks: tuple[Any, ...] = ()

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


class _Computed:
    """The result of a forward."""

    num_tokens = 0

    def __init__(self, layout: Any) -> None:
        self._dtypes = layout.dtypes

    def dtypes(self) -> Any:
        return self._dtypes


def make_store(layout: Any, policy: str, *, slots: int, blocks: int) -> PrefixStore:
    """Make a store that has the index and policy but no tensors."""
    tensors, store_module.PrefixTensors = store_module.PrefixTensors, _NoTensors
    try:
        slot_policy = SLOT_POLICIES[policy]()
        return PrefixStore(
            layout,
            CacheConfig(
                max_slots=slots, num_kv_blocks=blocks, block_size_tokens=BLOCK, ssm_chunk_size=1
            ),
            slot_policy=slot_policy, listeners=Listeners(), placement=BranchPoint(),
        )  # fmt: skip
    finally:
        store_module.PrefixTensors = tensors


def _run_of(hash_id: int) -> np.ndarray:
    return np.random.default_rng(hash_id).integers(3, 2**17, RUN).astype(np.int32)


def turns_of(requests: Sequence[TraceRequest]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The prompt of each request, and its answer."""
    runs: dict[int, np.ndarray] = {}
    later: dict[int, np.ndarray] = {}  # the next prompt with an id, by id
    turns = []
    for number, request in reversed([*enumerate(requests)]):
        ids = request.hash_ids[: request.input_length // request.block_size] or (2**40 + number,)
        for each in ids:
            if each not in runs:
                runs[each] = _run_of(each)
        prompt = np.concatenate([runs[each] for each in ids])
        length = min(max(request.output_length // _TOKENS, 2), _LONGEST_ANSWER)
        answer = np.random.default_rng(number).integers(3, 2**17, length).astype(np.int32)
        following = later.get(ids[-1], prompt)
        if len(following) > len(prompt):
            answer = following[len(prompt) : len(following) - 1][:length]
        turns.append((prompt, answer))
        later.update(dict.fromkeys(ids, prompt))
    return turns[::-1]


def replay(
    layout: Any,
    turns: Sequence[tuple[np.ndarray, np.ndarray]],
    policy: str,
    *,
    slots: int,
    blocks: int = 400_000,
) -> dict[str, float]:
    """Return the share of prompt tokens that was skipped, and the time of the store."""
    store = make_store(layout, policy, slots=slots, blocks=blocks)
    computed = _Computed(layout)
    total, seconds = 0, 0.0
    for prompt, answer in turns:
        began, num_tokens = time.process_time(), len(prompt)
        total += num_tokens
        record = store.open(prompt, None, min_computed=1)
        store.index.count(record.sequence, record.match)
        start = record.match.skip_tokens
        if start:
            store.slots.policy.on_consumed([store.slots.slot_of(record.restored_blocks[-1])])
        store.index.announce(record.sequence, num_tokens - 1)
        record.positions = {p for p in store.index.positions(record.sequence) if p > start}
        inside = {p for p in record.positions if p < num_tokens}
        if inside:
            record.reserve_states(inside)
        computed.num_tokens = num_tokens
        record.publish(computed, inside)
        end = computed.num_tokens = (num_tokens + len(answer)) // BLOCK * BLOCK
        answered = record.fork(answer.tolist(), end)
        if end > num_tokens:
            answered.publish(computed)
        answered.close()
        record.close()
        seconds += time.process_time() - began
    store.check_invariants()
    return {
        "token_hit_rate": store.counters["skipped_tokens"] / total,
        "us_per_request": 1e6 * seconds / len(turns),
        "saved_states": store.counters["saved_states"],
        "refused_states": store.slots.refused_states_total,
    }


def _lines(options: argparse.Namespace) -> Iterator[str]:
    layout = make_cache(make_model("nemotron_h"))._store.layout
    if options.trace:
        requests = read_trace(options.trace, options.limit)
    else:
        requests = getattr(drawn_traces, f"draw_{options.drawn}")(options.limit)
    turns = turns_of(requests)
    for slots in options.slots:
        for policy in options.policy:
            found = replay(layout, turns, policy, slots=slots, blocks=options.blocks)
            yield f"{slots} slots, {policy}: " + ", ".join(
                f"{name} {value:.4f}" if value < 1 else f"{name} {value:.0f}"
                for name, value in found.items()
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace")
    parser.add_argument("--drawn", default="conversations")
    parser.add_argument("--limit", type=int, default=1200)
    parser.add_argument("--slots", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--blocks", type=int, default=400_000)
    parser.add_argument("--policy", nargs="+", default=["lru", "adaptive"])
    for line in _lines(parser.parse_args()):
        print(line, flush=True)
