"""Times stores: moving entries, resuming in another process, and decode steps meanwhile.

    python tests/benchmarks/bench_store.py --store valkey://127.0.0.1:6379 --json store.json

Before a time is reported, every loaded entry is verified, and the tokens of a resumed prompt equal
those of a computed one. Ratios stand beside absolute figures: both sides are timed in turn.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from measuring import Measurement, parser_for, progress, report, usable_device

from mamba_cache.config import CacheConfig
from mamba_cache.context import DynamicInferenceContext, PrefetchState, Request
from mamba_cache.errors import MambaCacheError
from mamba_cache.metadata import StepMetadata
from mamba_cache.reference import Engine, HybridModel, HybridModelConfig, SamplingParams
from mamba_cache.reference.no_model import NoModel, count_as_computed
from mamba_cache.states import KVCacheSpec, StateSpec
from mamba_cache.stores import open_store
from mamba_cache.tiers import LoadPlanner, ModelIdentity, Numerics, Rates
from mamba_cache.tiers.entry import EntryFacts, EntryKey, EntryKind, EntryMacs
from mamba_cache.tiers.lower import LowerTier

_PROCESSES: Final = 4
_BLOCK: Final = 256
_ENTRIES: Final = 8
_STEPS_A_ROUND: Final = 60
_WAIT_SECONDS: Final = 60.0


class _Setting(NamedTuple):
    """Settings that all processes of a measurement share."""

    url: str
    device: str
    small: bool
    secret: bytes
    forward_seconds: float | None = None
    is_real_time: bool = False


class _FarModel(NoModel):
    """A stand-in for a model on an accelerator: the processor only waits for its forwards."""

    def __init__(self, shape: HybridModelConfig, seconds: float) -> None:
        self._shape, self._seconds = shape, seconds

    def state_spec(self, dtype: torch.dtype) -> StateSpec:
        return self._shape.state_spec(dtype)

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        return self._shape.kv_spec(dtype)

    def forward(self, metadata: StepMetadata, caches: DynamicInferenceContext) -> torch.Tensor:
        """Wait, and return random logits [num_requests, 64]; states count as handed over."""
        time.sleep(self._seconds)
        count_as_computed(caches, metadata, self._shape.layer_pattern.count("M"))
        return torch.rand(metadata.num_requests, 64)


def _model_config(*, small: bool) -> HybridModelConfig:
    hidden, layers = (64, "M*") if small else (1024, "M-M*M-M*")
    return HybridModelConfig(
        layer_pattern=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 32,
        num_kv_heads=2,
        attention_head_dim=32,
        mamba_num_heads=hidden // 32,
        mamba_head_dim=64,
        ssm_state_size=16 if small else 128,
        num_groups=1,
        ssm_chunk_size=_BLOCK,
        mlp_size=2 * hidden,
        vocab_size=256,
    )


def _measure_moves(url: str, *, small: bool) -> Iterator[Measurement]:
    """Time verified puts and gets of entries by one process, and a lookup."""
    name = url.partition(":")[0]
    size = 2**20 if small else 96 * 2**20
    progress(f"{name}: {_ENTRIES} entries of {size / 2**20:g} MiB")
    tier = LowerTier(
        open_store(url),
        macs=EntryMacs(secrets.token_bytes(32)),
        write_on_use=1,
        call_seconds=_WAIT_SECONDS,
        owns_store=True,
    )
    tier.flush()
    payload = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    tenant, identity = bytes(16), secrets.token_bytes(32)
    facts = [
        EntryFacts(
            EntryKey(identity, tenant, EntryKind.STATE, number.to_bytes(16, "little")),
            _BLOCK,
            size,
        )
        for number in range(_ENTRIES)
    ]
    num_bytes = size * _ENTRIES
    begun = time.perf_counter()
    for each in facts:
        tier.put(each, payload.data, lambda refusal: None)
    tier.flush()
    seconds = time.perf_counter() - begun
    _check(tier.stats().stored == _ENTRIES, f"{name} stored {tier.stats().dropped}")
    yield _rate(f"{name}: put and confirmed", num_bytes, seconds)
    into = [np.full(size, 255, np.uint8) for _ in facts]  # written once, so its pages are mapped
    begun = time.perf_counter()
    for each, buffer in zip(facts, into, strict=True):
        tier.load(each, buffer.data, lambda refusal: None)
    tier.flush()
    seconds = time.perf_counter() - begun
    _check(all(np.array_equal(buffer, payload) for buffer in into), f"{name} brought other bytes")
    yield _rate(f"{name}: got and verified", num_bytes, seconds)
    keys = [
        EntryKey(identity, tenant, EntryKind.KV, number.to_bytes(16, "big"))
        for number in range(1000)
    ]
    times = []
    for _ in range(15):
        answered = threading.Event()
        begun = time.perf_counter()
        tier.ask(keys, lambda found, answered=answered: answered.set())
        answered.wait(_WAIT_SECONDS)
        times.append(time.perf_counter() - begun)
    yield Measurement(
        f"{name}: a question for 1,000 keys", statistics.median(times) * 1e3, "ms", runs=15
    )
    tier.close()


def _rate(name: str, num_bytes: int, seconds: float) -> Measurement:
    detail = f"{num_bytes / 1e6:,.0f} MB in {seconds:,.2f} s"
    return Measurement(name, num_bytes / seconds / 1e6, "MB/s", detail=detail)


def _measure_resuming(setting: _Setting) -> Iterator[Measurement]:
    """Time the first token of a prompt stored by another process, and of one computed here."""
    name, num_blocks = setting.url.partition(":")[0], 4 if setting.small else 16
    progress(f"{name}: a prompt of {num_blocks * _BLOCK} tokens, resumed in another process")
    runs = 3 if setting.small else 5
    with _Child(_leave_prompts, setting, num_blocks, runs) as child:
        left = child.receive()
        engine = _engine(setting)
        engine.context.wait_for_tiers()
        resumed: list[float] = []
        computed: list[float] = []
        shares: list[float] = []
        for number in range(runs):
            prompt = _prompt(number, num_blocks)
            for times, start in ((computed, 0), (resumed, 1)):
                # Another first token matches no prefix: a prompt of equal length is computed.
                own = prompt if start else [(prompt[0] + 7) % 256, *prompt[1:]]
                begun = time.perf_counter()
                token, skipped = _first_token(engine, own)
                times.append(time.perf_counter() - begun)
                if start:
                    _check(token == left[number], f"{name}: a resumed prompt went on differently")
                    shares.append(skipped / len(prompt))
        engine.context.close()
    resume, compute = statistics.median(resumed), statistics.median(computed)
    yield Measurement(
        f"{name}: first token after a prefix of another process: over computing it",
        resume / compute,
        "x",
        runs=runs,
        detail=(
            f"{resume * 1e3:,.1f} ms, computed {compute * 1e3:,.1f} ms; "
            f"{statistics.mean(shares):.1%} of {num_blocks * _BLOCK} tokens skipped"
        ),
    )


def _leave_prompts(pipe: Any, setting: _Setting, num_blocks: int, runs: int) -> None:
    """Compute prompts and put them into the store; runs in a process of its own."""
    engine = _engine(setting)
    engine.context.wait_for_tiers()
    tokens = [_first_token(engine, _prompt(number, num_blocks))[0] for number in range(runs)]
    engine.context.wait_for_tiers()
    pipe.send(tokens)
    pipe.recv()  # memory that it lent to the store ends with it
    engine.context.close()


def _measure_steps(setting: _Setting, rounds: int) -> Iterator[Measurement]:
    """Time decode steps of processes with a store that they write to, and without, in turn."""
    name = setting.url.partition(":")[0]
    progress(f"{name}: steps of {_PROCESSES} processes")
    children = [_Child(_time_steps, setting, rounds, number) for number in range(_PROCESSES)]
    try:
        for child in children:
            child.receive()
        for child in children:
            child.send("go")
        times = [child.receive() for child in children]
    finally:
        for child in children:
            child.close()
    of_thread = "median of the CPU time of the thread"
    for title, column, percent in (("p99", 0, 99), ("median", 0, 50), (of_thread, 1, 50)):
        own, plain = (
            float(
                np.percentile(np.concatenate([each[index] for each in times])[:, column], percent)
            )
            for index in (0, 1)
        )
        yield Measurement(
            f"{name}: {title} of a step of {_PROCESSES} processes over a store: over one without",
            own / plain,
            "x",
            runs=sum(len(each[0]) for each in times),
            detail=f"{own * 1e3:,.3f} ms, without {plain * 1e3:,.3f} ms; {os.cpu_count()} CPUs",
        )
    moved = sum(each[2] for each in times)
    yield Measurement(f"{name}: entries stored meanwhile", moved, "entries")


def _time_steps(pipe: Any, setting: _Setting, rounds: int, number: int) -> None:
    """Time decode steps with the store and without, in turn; runs in a process of its own."""
    engines = [_engine(setting), _engine(setting, with_store=False)]
    for engine in engines:
        engine.context.wait_for_tiers()
        _decode(engine, _prompt(10**6 + number, 2))
    if setting.is_real_time:  # this thread only: tier threads have started
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(50))
    pipe.send("ready")
    pipe.recv()
    times: list[list[tuple[float, float]]] = [[], []]
    for turn in range(rounds):
        for index, engine in enumerate(engines):
            times[index] += _decode(engine, _prompt(1000 * number + turn, 4))
    tier = engines[0].context.store_tier
    assert tier is not None, "it was made with one"
    tier.flush(_WAIT_SECONDS)
    pipe.send((times[0], times[1], tier.stats().stored))
    pipe.recv()
    engines[0].context.close()


def _decode(engine: Engine, prompt: list[int]) -> list[tuple[float, float]]:
    """Answer a prompt; return the wall time and thread time of each pure decode step."""
    engine.submit(prompt, SamplingParams(max_new_tokens=_STEPS_A_ROUND))
    times: list[tuple[float, float]] = []
    has_begun = False
    while engine.num_requests:
        begun, worked = time.perf_counter(), time.thread_time()
        answered = engine.step()
        if engine.context.device.type == "cuda":
            torch.cuda.synchronize()
        if has_begun:
            times.append((time.perf_counter() - begun, time.thread_time() - worked))
        has_begun = has_begun or bool(answered)
    return times


def _engine(setting: _Setting, *, with_store: bool = True) -> Engine:
    """Make an engine over a host tier, and over the store."""
    device = setting.device
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    torch.manual_seed(1)
    if device == "cpu":
        torch.set_num_threads(1)
    shape = _model_config(small=setting.small)
    if setting.forward_seconds is None:
        model: HybridModel | _FarModel = HybridModel(shape, dtype=dtype, device=device)
    else:
        model = _FarModel(shape, setting.forward_seconds)
    config = CacheConfig(
        block_size_tokens=_BLOCK,
        ssm_chunk_size=_BLOCK,
        max_requests=4,
        max_tokens=32 * _BLOCK,
        max_sequence_length=32 * _BLOCK,
        num_kv_blocks=80,
        max_slots=12,
        num_host_blocks=160,
        num_host_states=40,
        store=setting.url if with_store else None,
        write_on_use=1,
        hash_secret=setting.secret,
    )
    identity = ModelIdentity(name="bench", weights="of seed 1", numerics=Numerics.of(device))
    planner = LoadPlanner(Rates(tokens_per_second=1e-3), learns=False)  # any load is worth it
    return Engine(model, config, identity=identity, load_planner=planner)


def _prompt(number: int, num_blocks: int) -> list[int]:
    """Return a prompt of ``num_blocks`` blocks and one token."""
    rng = np.random.default_rng(number)
    tokens: list[int] = rng.integers(0, 256, num_blocks * _BLOCK + 1).tolist()
    return tokens


def _first_token(engine: Engine, prompt: list[int]) -> tuple[int, int]:
    """Answer a prompt with one token; return the token, and the number of skipped tokens."""
    prefetch = engine.context.prefetch(Request(request_id="one", prompt_tokens=prompt))
    _check(prefetch.wait() in (PrefetchState.READY, PrefetchState.NOTHING), str(prefetch.state))
    [completion] = engine.generate([prompt], SamplingParams(max_new_tokens=1))
    return completion.tokens[0], completion.skipped_tokens


class _Child:
    """A process of this benchmark, and a pipe of messages to and from it."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=target, args=(its, *arguments))
        self._process.start()
        its.close()

    def receive(self) -> Any:
        """Return the next message of the process."""
        try:
            return self._pipe.recv()
        except EOFError:
            raise MambaCacheError("a process of the benchmark has ended early") from None

    def send(self, message: str) -> None:
        """Send a message on which the process continues."""
        self._pipe.send(message)

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):  # the process has ended
            self.send("end")
        self._process.join(_WAIT_SECONDS)
        self._process.kill()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check(holds: bool, otherwise: str) -> None:
    """Raise if a result is wrong, so that it is not timed."""
    if not holds:
        raise MambaCacheError(f"the benchmark of stores went wrong: {otherwise}")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run every measurement, one after the other."""
    parser = parser_for(__doc__)
    add = parser.add_argument
    about = "a store; may come several times"
    add("--store", action="append", required=True, metavar="URL", help=about)
    add("--device", metavar="NAME", help="where models are; default: a GPU, else the CPU")
    add("--small", action="store_true", help="tiny entries: to see that it runs")
    add("--rounds", type=int, metavar="N", default=10, help="rounds of steps")
    about = "steps wait this long in place of a model; default: a model computes"
    add("--forward-ms", type=float, metavar="MS", help=about)
    about = "real-time priority for threads of steps (root): where CPUs are few"
    add("--real-time", action="store_true", help=about)
    options = parser.parse_args(arguments)
    device = str(usable_device(options.device))
    results: list[Measurement] = []
    for url in options.store:
        results += _measure_moves(url, small=options.small)
        if not url.startswith("memory:"):  # other processes cannot see it
            setting = _Setting(url, device, options.small, secrets.token_bytes(16))
            results += _measure_resuming(setting)
            if options.forward_ms is not None:
                seconds = options.forward_ms / 1e3
                setting = setting._replace(device="cpu", forward_seconds=seconds)
            setting = setting._replace(is_real_time=options.real_time)
            results += _measure_steps(setting, options.rounds)
    return report("store", results, options.json)


if __name__ == "__main__":
    main()
