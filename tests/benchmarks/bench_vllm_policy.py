"""Replays traces through the host tier of vLLM's offloading, by policy: token hit rates, as JSON.

    tests/engines/vllm.sh .vllm    # once: the environment
    .vllm/venv/bin/python tests/benchmarks/bench_vllm_policy.py --trace requests.jsonl
    .vllm/venv/bin/python tests/benchmarks/bench_vllm_policy.py --drawn agents scan loop flip

The manager is vLLM's own ``CPUOffloadingManager``. A request of a trace offers the chunks of a
hybrid model's request: first the state at the end of its prompt, and a state where another prompt
on the GPU branches, then the attention chunks that it computed. Sizes are shares of the
chunks that the whole trace offers. Times are of the whole replay.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import drawn_traces
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from mamba_cache.cli.traces import TOKENS_PER_HASH_ID, TraceRequest, read_trace

POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"cache_policy": "lru"},
    "arc": {"cache_policy": "arc"},
    "lru, store_threshold=2": {"cache_policy": "lru", "store_threshold": 2},
    "value": {
        "cache_policy": "ValuePolicy",
        "cache_policy_module_path": "mamba_cache.integrations.vllm.policy",
    },
}
ATTENTION, STATES = 0, 1


class Replay:
    """One manager, and the requests that it serves.

    Args:
        num_chunks: Chunks in host memory.
        policy: A name of ``POLICIES``.
        num_in_flight: Requests that run at a time.
        num_gpu_chunks: Chunks of the prefix cache on the GPU, which evicts by LRU.
    """

    def __init__(
        self, num_chunks: int, policy: str, num_in_flight: int = 1, num_gpu_chunks: int = 0
    ) -> None:
        self.manager = CPUOffloadingManager(num_chunks, **POLICIES[policy])
        self._num_in_flight, self._num_gpu_chunks = num_in_flight, num_gpu_chunks
        self._on_gpu: OrderedDict[bytes, None] = OrderedDict()
        self._running: deque[tuple[ReqContext, list[bytes], list[bytes]]] = deque()
        self.prompt_tokens = self.hit_tokens = self.num_stored = self.num_requests = 0

    def serve(self, request: TraceRequest) -> None:
        """Look up, load and offer the chunks of a request."""
        context = ReqContext(req_id=str(self.num_requests))
        names = [
            each.to_bytes(32, "big")
            for each in request.hash_ids[: request.input_length // request.block_size]
        ]
        attention, states = ([make_offload_key(n, g) for n in names] for g in (ATTENTION, STATES))
        for keys in (attention, states):
            for place, key in enumerate(keys):
                context.set_offload_key_position(key, (place + 1) * TOKENS_PER_HASH_ID)
        self.manager.on_new_request(context)
        num_usable = (request.input_length - 1) // TOKENS_PER_HASH_ID
        matched = _num_leading(key in self._on_gpu for key in attention[:num_usable])
        local = max((n for n in range(1, matched + 1) if states[n - 1] in self._on_gpu), default=0)
        hit = self._look_up(attention[:num_usable], states, local, context)
        loaded = [*attention[local:hit], states[hit - 1]] if hit > local else []
        if loaded:
            self.manager.prepare_load(loaded, context)
        # vLLM saves a state at the end of a prompt, and where another prompt on the GPU branches.
        ends = [n for n in sorted({matched if matched > local else 0, num_usable}) if n > hit]
        stored: list[bytes] = []
        for keys in (*([states[n - 1]] for n in ends), attention[hit:]):
            output = self.manager.prepare_store(keys, context) if keys else None
            stored += output.keys_to_store if output is not None else []
        for key in reversed([*attention, *(states[n - 1] for n in (*ends, hit) if n)]):
            self._on_gpu[key] = None
            self._on_gpu.move_to_end(key)
        while len(self._on_gpu) > self._num_gpu_chunks:
            self._on_gpu.popitem(last=False)
        self._running.append((context, loaded, stored))
        if len(self._running) >= self._num_in_flight:
            self._finish_oldest()
        self.num_requests += 1
        self.num_stored += len(stored)
        self.prompt_tokens += request.input_length
        self.hit_tokens += hit * TOKENS_PER_HASH_ID

    def finish(self) -> None:
        """End all requests."""
        while self._running:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        context, loaded, stored = self._running.popleft()
        if loaded:
            self.manager.complete_load(loaded, context)
        self.manager.complete_store(stored, context)
        self.manager.on_request_finished(context)

    def _look_up(
        self, attention: Sequence[bytes], states: Sequence[bytes], local: int, context: ReqContext
    ) -> int:
        """Return the number of blocks up to the deepest state with all attention chunks."""
        found = (self._is_stored(key, context) for key in attention[local:])
        for hit in range(local + _num_leading(found), local, -1):
            if self._is_stored(states[hit - 1], context):
                return hit
        return local

    def _is_stored(self, key: bytes, context: ReqContext) -> bool:
        return self.manager.lookup(key, context) is LookupResult.HIT


def _num_leading(found: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, found))


def num_chunks_of(requests: Sequence[TraceRequest]) -> int:
    """Return how many chunks a trace offers if nothing is ever evicted."""
    everything = Replay(1 << 30, "lru")
    for request in requests:
        everything.serve(request)
    return everything.num_stored


def measure(
    requests: Sequence[TraceRequest],
    num_chunks: int,
    policy: str,
    num_in_flight: int = 1,
    num_gpu_chunks: int = 0,
) -> dict[str, float]:
    """Replay a trace and return its figures."""
    replay = Replay(num_chunks, policy, num_in_flight, num_gpu_chunks)
    gc.collect()
    gc.freeze()  # as vLLM does after its start
    began = time.process_time()
    for request in requests:
        replay.serve(request)
    replay.finish()
    seconds = time.process_time() - began
    gc.unfreeze()
    return {
        "token_hit_rate": round(100 * replay.hit_tokens / replay.prompt_tokens, 2),
        "stored_chunks": replay.num_stored,
        "us_per_request": round(1e6 * seconds / len(requests)),
    }


def _lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    traces = {path: read_trace(path, options.limit) for path in options.trace}
    limit = () if options.limit is None else (options.limit,)
    traces |= {name: drawn_traces.WORKLOADS[name](*limit) for name in options.drawn}
    for name, requests in traces.items():
        total = num_chunks_of(requests)
        for share in options.shares:
            num_chunks = max(1, round(total * share / 100))
            for policy in options.policy:
                num_gpu = round(total * options.gpu_share / 100)
                found = measure(requests, num_chunks, policy, options.in_flight, num_gpu)
                yield {
                    "trace": Path(name).name, "share": share, "chunks": num_chunks,
                    "gpu_share": options.gpu_share, "in_flight": options.in_flight,
                    "policy": policy, **found,
                }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", nargs="*", default=[])
    parser.add_argument("--drawn", nargs="*", default=[], choices=drawn_traces.WORKLOADS)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.1, 2.8, 11.0, 30.0])
    parser.add_argument("--policy", nargs="+", default=[*POLICIES], choices=POLICIES)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--gpu-share", type=float, default=0.0)
    for line in _lines(parser.parse_args()):
        print(json.dumps(line), flush=True)
