"""Times the control plane beside other engines' bookkeeping, in turns in one process.

    python tests/benchmarks/bench_peers.py --json peers.json
    tests/engines/vllm.sh .vllm && .vllm/venv/bin/python tests/benchmarks/bench_peers.py

The peers are a loop of our own with nano-vllm's algorithm, and vLLM's ``KVCacheManager`` where vLLM
can be imported. Process time is measured, so that other work on the machine does not count.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from bench_control import _fresh_hashes, _full_cache
from measuring import Measurement, parser_for, progress, report

from mamba_cache.cache import SLOT_POLICIES
from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, Request
from mamba_cache.reference.no_model import NoModel, count_as_computed

try:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request as VllmRequest
except ImportError:
    KVCacheManager = None

_NUM_NEW = 64  # tokens of an answer


class NanoVllm:
    """Blocks as nano-vllm manages them: hash chain, free deque, reference counts, equal tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._refs = [0] * num_blocks
        self._hashes: list[int] = [-1] * num_blocks
        self._tokens: list[list[int]] = [[] for _ in range(num_blocks)]
        self._free, self._used = deque(range(num_blocks)), set[int]()
        self._block_of: dict[int, int] = {}

    @staticmethod
    def _digest(tokens: list[int], before: int) -> int:
        digest = xxhash.xxh64()
        if before != -1:
            digest.update(before.to_bytes(8, "little"))
        digest.update(np.array(tokens).tobytes())
        return digest.intdigest()

    def _take(self) -> int:
        block = self._free.popleft()
        if self._block_of.get(self._hashes[block]) == block:
            del self._block_of[self._hashes[block]]
        self._refs[block], self._hashes[block], self._tokens[block] = 1, -1, []
        self._used.add(block)
        return block

    def add(self, tokens: list[int]) -> list[int]:
        """Give a prompt its blocks, cached ones where possible."""
        size, before, is_missed, table = self._block_size, -1, False, []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            before = self._digest(part, before) if len(part) == size else -1
            block = self._block_of.get(before, -1)
            if block == -1 or self._tokens[block] != part:
                is_missed = True
            if is_missed:
                block = self._take()
            elif block in self._used:
                self._refs[block] += 1
            else:
                self._free.remove(block)
                self._used.add(block)
                self._refs[block] = 1
            if before != -1:
                self._hashes[block], self._tokens[block] = before, part
                self._block_of[before] = block
            table.append(block)
        return table

    def append(self, tokens: list[int], table: list[int]) -> None:
        """Reserve room for the next token, and hash the block that the last token filled."""
        size = self._block_size
        if len(tokens) % size == 1:
            table.append(self._take())
        elif len(tokens) % size == 0:
            before = self._hashes[table[-2]] if len(table) > 1 else -1
            part, block = tokens[-size:], table[-1]
            digest = self._digest(part, before)
            self._hashes[block], self._tokens[block] = digest, part
            self._block_of[digest] = block

    def finish(self, table: list[int]) -> None:
        """Give the blocks of a sequence back."""
        for block in reversed(table):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._used.remove(block)
                self._free.append(block)

    def live(self, tokens: list[int]) -> None:
        """Run a prompt and its answer; each step makes the tensors that its model reads."""
        tokens = list(tokens)
        table = self.add(tokens)
        self._read(tokens, table, len(tokens))
        for number in range(_NUM_NEW):
            tokens.append(number)
            self.append(tokens, table)
            self._read(tokens, table, 1)
        self.finish(table)

    def _read(self, tokens: list[int], table: list[int], num_new: int) -> list[torch.Tensor]:
        size, length = self._block_size, len(tokens)
        places = range(length - num_new, length)
        slots = [table[place // size] * size + place % size for place in places]
        return [
            torch.tensor(tokens[-num_new:], dtype=torch.int64),
            torch.tensor(list(places), dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            torch.tensor([table], dtype=torch.int32),
            torch.tensor([1.0], dtype=torch.float32),
        ]


class Vllm:
    """vLLM's manager over one group of attention layers, with its default hash function."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(block_size, sha256)
        kind = FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], kind)])
        self.manager = KVCacheManager(config, 1 << 20, block_size, block_size)
        self._params = SamplingParams(max_tokens=_NUM_NEW + 1)
        self._number = 0

    def add(self, tokens: list[int]) -> Any:
        """Admit a prompt: hash it, match it, give it blocks."""
        self._number += 1
        name = str(self._number)
        request = VllmRequest(name, tokens, self._params, None, block_hasher=self._hasher)
        blocks, num_cached, *_ = self.manager.get_computed_blocks(request)
        found = self.manager.allocate_slots(request, len(tokens) - num_cached, num_cached, blocks)
        assert found is not None
        request.num_computed_tokens = len(tokens)
        return request

    def finish(self, request: Any) -> None:
        """Give its blocks back."""
        self.manager.free(request)


class Ours:
    """A context without a model."""

    def __init__(
        self, num_blocks: int, block_size: int, policy: str | None = None, longest: int = 40_000
    ) -> None:
        self.context = DynamicInferenceContext(
            CacheConfig(
                block_size_tokens=block_size,
                ssm_chunk_size=block_size,
                max_requests=1,
                max_tokens=longest,
                max_sequence_length=longest,
                num_kv_blocks=num_blocks,
                max_slots=200,
            ),
            NoModel().state_spec(torch.float32),
            slot_policy=None if policy is None else SLOT_POLICIES[policy](),
        )
        self._number = 0

    def add(self, tokens: list[int]) -> int:
        """Admit a prompt."""
        self._number += 1
        self.context.add_request(Request(request_id=self._number, prompt_tokens=tokens))
        return self._number

    def finish(self, number: int) -> None:
        """Compute the prompt, and end it."""
        count_as_computed(self.context, self.context.begin_step().metadata)
        self.context.commit_step({number: 1})
        self.context.finish(number)

    def live(self, tokens: list[int]) -> None:
        """Run a prompt and its answer."""
        number = self.add(tokens)
        count_as_computed(self.context, self.context.begin_step().metadata)
        self.context.commit_step({number: 1})
        for token in range(_NUM_NEW - 1):
            self.context.begin_step()
            self.context.commit_step({number: token})
        self.context.finish(number)


def measure_lives(runs: int = 60) -> Iterator[Measurement]:
    """Time a prompt of 512 tokens and 64 of its answer."""
    for block_size in (16, 256):
        progress(f"lives of 512 + 64 tokens, block {block_size}")
        size = 100_000 * 16 // block_size
        ours, nano = Ours(size, block_size, longest=4_096), NanoVllm(size, block_size)
        calls = {"ours": ours.live, "nano-vllm": nano.live}
        yield from _ratios(f"life of 512 + 64 tokens, block {block_size}", calls, 512, runs)


def measure_admissions(runs: int = 60) -> Iterator[Measurement]:
    """Time the admission of fresh prompts, given as lists."""
    for block_size, num_tokens in ((16, 4_096), (256, 4_096), (256, 32_768)):
        progress(f"admission of {num_tokens:,} tokens, block {block_size}")
        size = (2 * runs + 9) * (num_tokens // block_size + 1)
        ours = Ours(size, block_size)
        peers = _peers(NanoVllm(size, block_size), size, block_size)
        name = f"admission of {num_tokens:,} tokens, block {block_size}"
        yield from _admissions(name, {"ours": ours} | peers, num_tokens, runs)


def measure_full_admissions(runs: int = 60, num_blocks: int = 20_000) -> Iterator[Measurement]:
    """Time the admission of 4,096 tokens at block 16 into a cache full of such prompts."""
    for policy in ("adaptive", "lru"):
        progress(f"admission into a full cache, {policy}")
        kinds = {"ours": Ours(num_blocks, 16, policy)} | _peers(None, num_blocks, 16)
        for prompt in _prompts(4_096, num_blocks // 256 + 2):
            for kind in kinds.values():
                kind.finish(kind.add(prompt))
        name = f"admission of 4,096 tokens, block 16, full cache, {policy}"
        yield from _admissions(name, kinds, 4_096, runs)


def measure_memory(num_blocks: Sequence[int] = (1_000, 100_000)) -> Iterator[Measurement]:
    """Count the bytes of a cached block, and time a full garbage collection."""
    for size in num_blocks:
        progress(f"memory of {size:,} cached blocks")
        gc.collect()
        tracemalloc.start()
        pool = _full_cache(size)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        yield Measurement(f"a cached block of {size:,}", used / size, "bytes")
        seconds = []
        for _ in range(5):
            start = time.process_time()
            gc.collect()
            seconds.append(time.process_time() - start)
        name = f"a full garbage collection, {size:,} cached blocks"
        yield Measurement(name, statistics.median(seconds) * 1e3, "ms", runs=5)
        assert pool.num_cached_blocks == size


def measure_evictions(runs: int = 2_000, size: int = 100_000) -> Iterator[Measurement]:
    """Time evicting and allocating four blocks of a full cache."""
    if KVCacheManager is None:
        return
    ours, vllm = _full_cache(size), Vllm(size + 1, 16).manager.block_pool

    def own() -> float:
        hashes = _fresh_hashes(4)
        start = time.process_time()
        blocks = ours.allocate_memory_blocks(4)
        middle = time.process_time()
        ours.register_kv_block_hashes(blocks, hashes)
        registered = time.process_time()
        ours.release_memory_blocks(blocks)
        return time.process_time() - registered + middle - start

    def theirs() -> float:
        start = time.process_time()
        blocks = vllm.get_new_blocks(4)
        vllm.free_blocks(reversed(blocks))
        return time.process_time() - start

    pairs = [(own(), theirs()) for _ in range(runs)]
    times = [statistics.median(seconds) * 1e6 for seconds in zip(*pairs, strict=True)]
    detail = f"{times[0]:.1f} us, vLLM without cached contents {times[1]:.1f} us"
    yield Measurement("evict and allocate 4 blocks", times[0], "us", runs=runs, detail=detail)


def _peers(nano: NanoVllm | None, num_blocks: int, block_size: int) -> dict[str, Any]:
    peers: dict[str, Any] = {} if nano is None else {"nano-vllm": nano}
    if KVCacheManager is not None:
        peers["vLLM"] = Vllm(num_blocks + 1, block_size)
    return peers


def _prompts(num_tokens: int, count: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    for _ in range(count):
        yield rng.integers(0, 2**17, num_tokens).tolist()


def _admissions(
    name: str, kinds: dict[str, Any], num_tokens: int, runs: int
) -> Iterator[Measurement]:
    def admit(kind: Any) -> Callable[[list[int]], float]:
        def timed(prompt: list[int]) -> float:
            start = time.process_time()
            admitted = kind.add(prompt)
            seconds = time.process_time() - start
            kind.finish(admitted)
            return seconds

        return timed

    calls = {kind: admit(each) for kind, each in kinds.items()}
    yield from _ratios(name, calls, num_tokens, runs)


def _ratios(
    name: str, calls: dict[str, Callable[[list[int]], float | None]], num_tokens: int, runs: int
) -> Iterator[Measurement]:
    """Time calls that take turns, each with a new prompt; those that return seconds timed them."""
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    prompts = _prompts(num_tokens, (runs + 2) * len(calls))
    for _ in range(runs + 2):
        for kind, call in calls.items():
            prompt = next(prompts)
            start = time.process_time()
            seconds = call(prompt)
            times[kind].append(time.process_time() - start if seconds is None else seconds)
    medians = {kind: statistics.median(seconds[2:]) * 1e6 for kind, seconds in times.items()}
    yield Measurement(name, medians["ours"], "us", runs=runs)
    for kind, median in medians.items():
        if kind != "ours":
            detail = f"{medians['ours']:,.0f} us, {kind} {median:,.0f} us"
            yield Measurement(f"{name}, over {kind}", medians["ours"] / median, "x", runs, detail)


MEASUREMENTS = (
    measure_lives,
    measure_admissions,
    measure_full_admissions,
    measure_evictions,
    measure_memory,
)


if __name__ == "__main__":
    options = parser_for(__doc__).parse_args()
    torch.set_num_threads(1)
    if KVCacheManager is None:
        print("vLLM cannot be imported: it is left out", file=sys.stderr)
    measured = [one for measure in MEASUREMENTS for one in measure()]
    report("peers", measured, options.json)
