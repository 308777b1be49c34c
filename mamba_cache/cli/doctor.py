"""``mamba-cache doctor``: is all that the cache needs here, and does it work?"""

from __future__ import annotations

import importlib.util
import platform
import threading
import time
import uuid
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from queue import Empty, SimpleQueue
from typing import Literal

import numpy as np
import torch

from mamba_cache._extras import install_hint
from mamba_cache._version import __version__
from mamba_cache.cli.output import print_json, print_table
from mamba_cache.config import CacheConfig
from mamba_cache.errors import MissingExtraError
from mamba_cache.reference import Engine, HybridModel, HybridModelConfig, SamplingParams
from mamba_cache.stores import BlobStore, StoreFault, open_store

__all__ = ["Check", "add_options", "check_hits", "check_machine", "check_store", "doctor"]

_EXTRAS = {
    "transformers": ("transformers", "prefix caching for transformers models"),
    "prometheus_client": ("metrics", "metrics"),
}
"""Packages, the extra that brings each, and its purpose."""

_BLOCK = 128
_HIT_PROMPTS = 4
_STORE_CHUNKS = 16
_STORE_CHUNK_BYTES = 2**22
_STORE_SECONDS = 30.0
_LEASE_WAITS, _LEASE_WAIT_SECONDS = 60, 0.25  # Mooncake's is 10 s by default
_STORE_ADVICE = {
    StoreFault.UNREACHABLE: "is the server running, and its port open from here?",
    StoreFault.TIMED_OUT: "the server takes connections and does not answer: does it hang?",
    StoreFault.DENIED: "look at user, password and certificates, and at the user's rights",
    StoreFault.FULL: "no memory: give it more, or, for Valkey, maxmemory-policy allkeys-lru; "
    "Mooncake has what processes give it by ?segment=",
    StoreFault.TRANSFER_FAILED: "a process that holds memory of the store is gone, or its ports "
    "cannot be reached from here",
    StoreFault.TOO_LARGE: "the server's limit for one value is below 4 MB",
    StoreFault.LEASED: "others read the chunks, or the master's --default_kv_lease_ttl is long",
    StoreFault.MISSING: "the server evicts at once, or says stored and stores nothing: what does "
    "its log say?",
    StoreFault.REJECTED: "is it a server of this kind, in a version that docs/how-to/stores.md "
    "names?",
}


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found, and what to do about it; what is absent the rest does not need."""

    name: str
    status: Literal["ok", "failed", "absent"]
    detail: str
    advice: str = ""


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--store",
        metavar="URL",
        help="check this store and nothing else: put, find, get, compare and remove 64 MB, "
        "e.g. valkey://127.0.0.1:6379 or mooncake://127.0.0.1:50051",
    )


def doctor(options: Namespace) -> int:
    """Check versions, extras, the GPU, and that a hit equals a miss.

    A GPU is not needed. What is absent is shown with what to do about it; only what is wrong makes
    the exit code 1.
    """
    checks = list(check_machine() if options.store is None else check_store(options.store))
    counts = Counter(check.status for check in checks)
    if options.json:
        print_json({"passed": not counts["failed"], "checks": [asdict(one) for one in checks]})
    else:
        rows: list[tuple[str, str, str]] = []
        for check in checks:
            rows.append((check.name, check.status, check.detail))
            if check.advice:
                rows.append(("", "", f"-> {check.advice}"))
        print_table(["check", "", "found"], rows)
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["failed"] else 0


def check_machine() -> Iterator[Check]:
    """Look at versions and the GPU, and try a hit."""
    yield Check("mamba_cache", "ok", f"{__version__}, Python {platform.python_version()}")
    for package in ("torch", "numpy", "xxhash"):
        yield Check(package, "ok", metadata.version(package))
    if importlib.util.find_spec("triton"):
        yield Check("triton", "ok", metadata.version("triton"))
    else:
        advice = "on Linux: pip install triton, in the version that your torch asks for"
        yield Check("triton", "absent", "not installed; PyTorch copies states", advice)
    for package, (extra, purpose) in _EXTRAS.items():
        if importlib.util.find_spec(package):
            yield Check(package, "ok", f"{metadata.version(package)}, for {purpose}")
        else:
            advice = f"if you want it: {install_hint(extra)}"
            yield Check(package, "absent", f"not installed; for {purpose}", advice)
    yield _check_gpu()
    yield check_hits()


def _check_gpu() -> Check:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        found = f"{torch.cuda.get_device_name()}, {memory}, CUDA {torch.version.cuda}"
        return Check("GPU", "ok", found)
    advice = "if there is one: this torch is built without CUDA, install one with it"
    if torch.version.cuda or torch.version.hip:
        advice = ""
    return Check("GPU", "absent", "none; all runs on the CPU", advice)


def check_hits() -> Check:
    """Answer prompts that share a prefix with a cache and without, by a tiny model."""
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    model = HybridModel(HybridModelConfig(layer_pattern="M*MM-"), dtype=torch.float64, seed=0)
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        ssm_chunk_size=model.config.ssm_chunk_size,
        max_requests=1,
        max_tokens=2048,
        max_sequence_length=2048,
        num_kv_blocks=64,
        max_slots=16,
    )
    shared = [number % 251 for number in range(8 * _BLOCK)]
    prompts = [[*shared, *range(number, number + 60)] for number in range(_HIT_PROMPTS)]
    cached, plain = (
        Engine(model, each).generate(prompts, SamplingParams(max_new_tokens=16))
        for each in (config, replace(config, enable_prefix_caching=False))
    )
    skipped = sum(answer.skipped_tokens for answer in cached)
    is_equal = [answer.tokens for answer in cached] == [answer.tokens for answer in plain]
    detail = f"{skipped:,} tokens skipped over {_HIT_PROMPTS} prompts, "
    if is_equal and skipped:
        return Check("a hit equals a miss", "ok", f"{detail}the same answers")
    detail += "other answers" if skipped else "no hit"
    advice = "do not trust hits on this machine; report it with this table"
    return Check("a hit equals a miss", "failed", detail, advice)


def check_store(url: str) -> Iterator[Check]:
    """Put chunks into a store, find, read, compare and remove them, and time it."""
    try:
        store = open_store(url)
    except MissingExtraError as error:
        yield Check("store", "failed", str(error))
        return
    found: SimpleQueue[Check | None] = SimpleQueue()

    def work() -> None:
        try:
            for check in _store_checks(store):
                found.put(check)
        except Exception as error:  # a store answers with faults
            found.put(Check("answer", "failed", f"the store raised {error!r}"))
        found.put(None)

    # A store may hang for ever, so that its thread is abandoned.
    threading.Thread(target=work, daemon=True).start()
    last = "connecting"
    try:
        while (check := found.get(timeout=_STORE_SECONDS)) is not None:
            yield check
            last = check.name
    except Empty:
        detail = f"no answer within {_STORE_SECONDS:.0f} s after: {last}"
        yield Check("answer", "failed", detail, _STORE_ADVICE[StoreFault.TIMED_OUT])
    else:
        store.close()


def _store_checks(store: BlobStore) -> Iterator[Check]:
    """Check a store; after a check that failed, those that need it are left out."""
    health = store.health()
    if health.fault is not None:
        yield Check("store", "failed", health.detail, _STORE_ADVICE.get(health.fault, ""))
        return
    yield Check("store", "ok", health.detail)
    prefix = f"mamba-cache-doctor/{uuid.uuid4().hex}"
    keys = [f"{prefix}/{number}" for number in range(_STORE_CHUNKS)]
    shape = _STORE_CHUNKS, _STORE_CHUNK_BYTES
    written = np.random.default_rng().integers(0, 256, shape, np.uint8)
    read = np.zeros_like(written)
    for memory in (written, read):
        store.register(memory.data)
    calls: dict[str, Callable[[], Sequence[int | StoreFault | None]]] = {
        "put": lambda: store.put_many(keys, [chunk.data for chunk in written]),
        "exists": lambda: store.exists_many(keys),
        "get": lambda: store.get_many_into(keys, [chunk.data for chunk in read]),
    }
    for name, call in calls.items():
        start = time.perf_counter()
        answers = call()
        milliseconds = 1e3 * (time.perf_counter() - start)
        if any(isinstance(answer, StoreFault) for answer in answers):
            yield _failed(store, name, answers)
            break
        if name == "get" and not np.array_equal(read, written):
            detail = "the chunks are not what was put"
            advice = "do not use it: entries are verified, so that they would only miss"
            yield Check(name, "failed", detail, advice)
            break
        chunks = f"{_STORE_CHUNKS} chunks of {_STORE_CHUNK_BYTES / 2**20:.0f} MiB"
        yield Check(name, "ok", f"{chunks} in {milliseconds:,.1f} ms")
    yield _remove(store, keys)


def _remove(store: BlobStore, keys: list[str]) -> Check:
    answers = store.remove(keys)
    for _ in range(_LEASE_WAITS):
        if StoreFault.LEASED not in answers:
            break
        time.sleep(_LEASE_WAIT_SECONDS)
        answers = store.remove(keys)
    if any(answers):
        return _failed(store, "remove", answers)
    left = store.exists_many(keys)
    if any(answer is not StoreFault.MISSING for answer in left):
        return _failed(store, "remove", left)
    return Check("remove", "ok", "what was removed is not found")


def _failed(store: BlobStore, name: str, answers: Sequence[int | StoreFault | None]) -> Check:
    """Say how many chunks fared how, and what helps against the first fault."""
    faults = [answer for answer in answers if isinstance(answer, StoreFault)]
    counts = Counter(fault.value for fault in faults)
    if len(faults) < len(answers):
        counts["there"] = len(answers) - len(faults)
    said = ", ".join(f"{count} {value}" for value, count in counts.items())
    advice = _STORE_ADVICE.get(faults[0], "") if faults else ""
    return Check(name, "failed", f"of the chunks {said}; {store.health().detail}", advice)
