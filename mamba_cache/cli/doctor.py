"""``mamba-cache doctor``: is all that the cache needs here, and does it work?"""

from __future__ import annotations

import importlib.util
import platform
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from typing import Annotated, Literal, TypeVar

import numpy as np
import torch
import typer
from rich.table import Table
from rich.text import Text

from mamba_cache._extras import install_hint
from mamba_cache._version import __version__
from mamba_cache.cli.output import AsJson, console, make_table, print_json
from mamba_cache.config import CacheConfig
from mamba_cache.errors import MissingExtraError
from mamba_cache.reference import Engine, HybridModel, HybridModelConfig, SamplingParams
from mamba_cache.stores import BlobStore, StoreFault, open_store

__all__ = ["CHECKS", "Check", "Status", "check_store", "doctor", "run_checks"]

_Answer = TypeVar("_Answer")

Status = Literal["ok", "failed", "absent"]
"""Only "failed" is an error; what is "absent" is not needed for the rest."""

_EXTRAS = {"transformers": "prefix caching for transformers models", "prometheus_client": "metrics"}
_BLOCK = 128
_HIT_PROMPTS = 4
_STORE_CHUNKS = 16
_STORE_CHUNK_BYTES = 2**22
_STORE_ASKS = 200
_STORE_SECONDS = 30.0
_LEASE_SECONDS = 15.0  # Mooncake's is 10 s unless its master is told otherwise
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
    StoreFault.REJECTED: "is it a server of this kind, in a version that docs/how-to/scale_out.md "
    "names?",
}
_STYLES = {"ok": "green", "failed": "bold red", "absent": "dim"}


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found.

    Attributes:
        name: What was looked at.
        status: How it is.
        detail: What was found.
        advice: What to do about it; "" if nothing.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""


def run_checks() -> Iterator[Check]:
    """Make every check."""
    for check in CHECKS:
        yield from check()


def doctor(
    as_json: AsJson = False,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Check this store and nothing else: put, find, get, compare and remove 64 MB, "
            "e.g. valkey://127.0.0.1:6379 or mooncake://127.0.0.1:50051.",
        ),
    ] = None,
) -> None:
    """Check versions, extras, the GPU, and that a hit equals a miss.

    A GPU is not needed. What is absent is shown with what to do about it; only what is wrong makes
    the exit code 1.
    """
    with console(stderr=True).status("looking at this machine" if store is None else "asking it"):
        checks = list(run_checks() if store is None else check_store(store))
    counts = Counter(check.status for check in checks)
    if as_json:
        print_json({"passed": not counts["failed"], "checks": [asdict(one) for one in checks]})
    else:
        out = console()
        out.print(_table(checks))
        out.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if counts["failed"]:
        raise typer.Exit(1)


def check_store(url: str) -> Iterator[Check]:
    """Put chunks into a store, find, read, compare and remove them, and time it.

    Raises:
        InvalidArgumentError: It is no such URL.
    """
    try:
        store = open_store(url)
    except MissingExtraError as error:
        yield Check("store", "failed", str(error))
        return
    checked = _StoreCheck(store)
    try:
        yield from checked.run()
    except _NoAnswerError as error:
        detail = f"no answer within {_STORE_SECONDS:.0f} s"
        yield Check(str(error), "failed", detail, _STORE_ADVICE[StoreFault.TIMED_OUT])
        return
    store.close()


class _NoAnswerError(Exception):
    """A call of a store did not return."""


class _StoreCheck:
    """Checks of one store; after one that failed, those that need it are left out."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        prefix = f"mamba-cache-doctor/{uuid.uuid4().hex}"
        self._keys = [f"{prefix}/{number}" for number in range(_STORE_CHUNKS)]
        rng = np.random.default_rng()
        self._written = rng.integers(0, 256, (_STORE_CHUNKS, _STORE_CHUNK_BYTES), np.uint8)
        self._read = np.zeros_like(self._written)

    def run(self) -> Iterator[Check]:
        health = self._ask("store", self._store.health)
        if health.fault is not None:
            yield Check("store", "failed", health.detail, _STORE_ADVICE.get(health.fault, ""))
            return
        yield Check("store", "ok", health.detail)
        for memory in (self._written, self._read):
            self._store.register(memory.data)
        before = self._ask("exists", lambda: self._store.exists_many(self._keys))
        if any(fault is not StoreFault.MISSING for fault in before):
            yield self._failed("exists", "keys that nobody put are said", before)
            return
        for step in (self._put, self._find, self._get, self._latency):
            check = step()
            yield check
            if check.status == "failed":
                break
        yield self._remove()

    def _put(self) -> Check:
        views = [chunk.data for chunk in self._written]
        faults, seconds = self._timed("put", lambda: self._store.put_many(self._keys, views))
        if any(faults):
            return self._failed("put", "chunks are answered", faults)
        return Check("put", "ok", self._speed(seconds))

    def _find(self) -> Check:
        faults = self._ask("exists", lambda: self._store.exists_many(self._keys))
        if any(faults):
            return self._failed("exists", "chunks that it said are stored are", faults)
        return Check("exists", "ok", f"all {_STORE_CHUNKS} chunks can be found")

    def _get(self) -> Check:
        views = [chunk.data for chunk in self._read]
        sizes, seconds = self._timed("get", lambda: self._store.get_many_into(self._keys, views))
        faults = [size for size in sizes if isinstance(size, StoreFault)]
        if faults:
            return self._failed("get", "chunks are answered", faults)
        wrong = (self._read != self._written).any(axis=1)
        wrong |= np.array(sizes) != _STORE_CHUNK_BYTES
        if wrong.any():
            advice = "do not use it: entries are verified, so that they would only miss"
            detail = f"{wrong.sum()} of {_STORE_CHUNKS} chunks are not what was put"
            return Check("get", "failed", detail, advice)
        return Check("get", "ok", f"{self._speed(seconds)}, all bytes as they were put")

    def _latency(self) -> Check:
        ask = partial(self._store.exists_many, self._keys[:1])
        taken = []
        for _ in range(_STORE_ASKS):
            faults, seconds = self._timed("latency", ask)
            if any(faults):
                return self._failed("latency", "one key asked again and again is", faults)
            taken.append(1e3 * seconds)
        p50, p99 = np.percentile(taken, [50, 99])
        detail = f"exists of one key: {p50:.2f} ms p50, {p99:.2f} ms p99 of {_STORE_ASKS}"
        return Check("latency", "ok", detail)

    def _remove(self) -> Check:
        until = time.monotonic() + _LEASE_SECONDS
        while True:
            faults = self._ask("remove", lambda: self._store.remove(self._keys))
            if StoreFault.LEASED not in faults or time.monotonic() > until:
                break
            time.sleep(0.25)
        if any(faults):
            return self._failed("remove", "chunks are answered", faults)
        left = self._ask("remove", lambda: self._store.exists_many(self._keys))
        if any(fault is not StoreFault.MISSING for fault in left):
            return self._failed("remove", "chunks that it said are removed are said", left)
        return Check("remove", "ok", "what was removed is not found")

    def _failed(self, name: str, what: str, faults: Sequence[StoreFault | None]) -> Check:
        """Say how many chunks fared how, and what helps against the most frequent fault."""
        counts = Counter("there" if fault is None else fault.value for fault in faults)
        said = ", ".join(f"{count} {value}" for value, count in counts.most_common())
        found = [fault for fault in faults if fault is not None]
        advice = _STORE_ADVICE.get(found[0], "") if found else ""
        detail = f"{what} {said}"
        health = self._ask(name, self._store.health)
        return Check(name, "failed", f"{detail}; {health.detail}", advice)

    def _speed(self, seconds: float) -> str:
        num_bytes = self._written.nbytes
        return (
            f"{num_bytes / seconds / 1e6:,.0f} MB/s: {_STORE_CHUNKS} chunks of "
            f"{_STORE_CHUNK_BYTES / 2**20:.0f} MiB in one call"
        )

    def _timed(self, name: str, call: Callable[[], _Answer]) -> tuple[_Answer, float]:
        start = time.perf_counter()
        return self._ask(name, call), time.perf_counter() - start

    def _ask(self, name: str, call: Callable[[], _Answer]) -> _Answer:
        """Return the answer of a call, which a store may never give."""
        future: Future[_Answer] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            return future.result(_STORE_SECONDS)
        except FutureTimeoutError:
            raise _NoAnswerError(name) from None


def _table(checks: Sequence[Check]) -> Table:
    table = make_table(["check", "", "found"])
    for check in checks:
        found = f"{check.detail}\n-> {check.advice}" if check.advice else check.detail
        style = _STYLES[check.status]
        table.add_row(Text(check.name), Text(check.status, style=style), Text(found))
    return table


def _versions() -> Iterator[Check]:
    yield Check("mamba_cache", "ok", f"{__version__}, Python {platform.python_version()}")
    for package in ("torch", "numpy", "xxhash"):
        yield Check(package, "ok", metadata.version(package))
    if importlib.util.find_spec("triton"):
        yield Check("triton", "ok", metadata.version("triton"))
    else:
        advice = "on Linux: pip install triton, in the version that your torch asks for"
        yield Check("triton", "absent", "not installed; PyTorch copies states", advice)


def _extras() -> Iterator[Check]:
    for package, purpose in _EXTRAS.items():
        if importlib.util.find_spec(package):
            yield Check(package, "ok", f"{metadata.version(package)}, for {purpose}")
        else:
            extra = "metrics" if package == "prometheus_client" else package
            advice = f"if you want it: {install_hint(extra)}"
            yield Check(package, "absent", f"not installed; for {purpose}", advice)


def _gpu() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        advice = (
            ""
            if built
            else "if there is one: this torch is built without CUDA, install one with it"
        )
        yield Check("GPU", "absent", "none; all runs on the CPU", advice)
        return
    free, total = torch.cuda.mem_get_info()
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    yield Check("GPU", "ok", f"{torch.cuda.get_device_name()}, {memory}, CUDA {torch.version.cuda}")


def _hits() -> Iterator[Check]:
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
    cached = Engine(model, config)
    plain = Engine(model, replace(config, enable_prefix_caching=False))
    shared = [number % 251 for number in range(8 * _BLOCK)]
    skipped, is_equal = 0, True
    for number in range(_HIT_PROMPTS):
        prompt = [*shared, *range(number, number + 60)]
        [own], [other] = (
            engine.generate([prompt], SamplingParams(max_new_tokens=16))
            for engine in (cached, plain)
        )
        skipped += own.skipped_tokens
        is_equal &= own.tokens == other.tokens
    detail = f"{skipped:,} tokens skipped over {_HIT_PROMPTS} prompts, "
    if is_equal and skipped:
        yield Check("a hit equals a miss", "ok", f"{detail}the same answers")
        return
    detail += "other answers" if skipped else "no hit"
    advice = "do not trust hits on this machine; report it with this table"
    yield Check("a hit equals a miss", "failed", detail, advice)


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (_versions, _extras, _gpu, _hits)
"""In this order."""
