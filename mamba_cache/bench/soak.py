"""The soak: hours of requests at small sizes, in search of what leaks, slows down or goes wrong.

Clients ask, wait, go on and change their minds; requests are cancelled and preempted, forwards
fail, and there is never enough room. Every few seconds everything is counted from the ground.
"""

from __future__ import annotations

import gc
import math
import mmap
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mamba_cache._checks import check_int
from mamba_cache.bench.measure import (
    Measurement,
    as_dicts,
    check_device,
    describe_run,
    print_table,
    progress_bar,
)
from mamba_cache.bench.no_model import NoModel
from mamba_cache.bench.options import one_of
from mamba_cache.config import CacheConfig
from mamba_cache.context import RequestStatus
from mamba_cache.errors import InvalidArgumentError, InvariantError, UnknownRequestError
from mamba_cache.reference import (
    Completion,
    Engine,
    HybridModel,
    HybridModelConfig,
    LanguageModel,
    SamplingParams,
)
from mamba_cache.slots import ScoreSlotPolicy

__all__ = [
    "MODELS",
    "Clients",
    "Soak",
    "Turn",
    "Window",
    "add_soak_options",
    "print_soak",
    "run_soak",
]

_BLOCK_SIZE = 32
_VOCAB_SIZE = 256
_CONFIG = CacheConfig(
    block_size_tokens=_BLOCK_SIZE,
    ssm_chunk_size=_BLOCK_SIZE,
    max_requests=24,
    max_tokens=768,
    max_sequence_length=1024,
    num_kv_blocks=560,
    max_slots=64,
    vocab_size=_VOCAB_SIZE,
)
_UNCACHED = replace(
    _CONFIG,
    max_requests=1,
    max_tokens=_CONFIG.max_sequence_length,
    num_kv_blocks=_CONFIG.max_blocks_per_request,
    max_slots=0,
    enable_prefix_caching=False,
)
_UNFINISHED = 32  # more than rows, so that some are queued
_CANCEL_SHARE, _PREEMPT_SHARE = 0.03, 0.03  # of the requests
_FAILS_EVERY = 400  # forwards
_WINDOWS = 120
_ENOUGH = 4  # answers from one check to the next
_SALTS = (None, "tenant a", "tenant b")
_NUM_AGENTS, _NUM_CHATS = 12, 36
_AGENT_SHARE, _CHAT_SHARE = 0.3, 0.5  # of the requests; the rest are asked once
_STATS = (
    "hits",
    "skipped_tokens",
    "computed_tokens",
    "preemptions",
    "aborted_steps",
    "evicted_blocks",
    "evicted_slots",
    "skipped_checkpoints",
)


class _TinyModel:
    """A real model that fails now and then."""

    def __init__(self, device: str, *, fails_every: int = 0) -> None:
        shape = HybridModelConfig(layer_pattern="M*M", hidden_size=32, ssm_chunk_size=_BLOCK_SIZE)
        self._model = HybridModel(shape, dtype=torch.float64, device=device)
        self._failure = NoModel(fails_every=fails_every)
        self.config, self.dtype, self.device = shape, self._model.dtype, self._model.device

    def forward(self, metadata: Any, caches: Any) -> torch.Tensor:
        """Return logits, after it overwrote live states even where it fails."""
        logits = self._model.forward(metadata, caches)
        self._failure.forward(metadata, caches)
        return logits


MODELS: dict[str, Callable[..., LanguageModel]] = {
    "none": lambda device, *, fails_every=0: NoModel(fails_every=fails_every),
    "tiny": _TinyModel,
}
"""What computes the steps: nothing, or the reference model at a tiny size."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two checks."""

    seconds: float  # from the soak's beginning to the check
    busy_seconds: float  # of the window, the check itself left out
    cpu_seconds: float  # that the process computed in them, whatever else ran on the machine
    requests: int  # that came to their end, cancelled ones not counted
    rss_mib: float  # memory of the process that is resident
    gpu_mib: float | None  # memory on the device that PyTorch has allocated; None on the CPU


def add_soak_options(command: Any) -> None:
    """Add what ``run_soak`` takes to an ``ArgumentParser``."""
    add = command.add_argument
    add("--minutes", type=float, metavar="N", help="how long, checks included; default: 10")
    about = f"what computes: {', '.join(MODELS)}; default: none"
    add("--model", type=one_of(MODELS), metavar="NAME", help=about)
    add("--device", metavar="NAME", help="where the tiny model runs; default: cpu")
    add("--seed", type=int, metavar="N", help="of all that is drawn; default: 0")


def run_soak(
    *, minutes: float = 10.0, model: str = "none", device: str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Run clients against an engine for a while, and judge what was seen.

    It takes what ``add_soak_options`` adds, and serves one window at least. In a minute or less it
    finds what breaks, but holds speed and memory to no limit: caches are still filling.

    Returns:
        "passed"; "measurements": each figure beside its limit; "counts": what happened how often;
        "broken": the invariant that did not hold, or None; "windows": a ``Window`` as a dict for
        each 120th of the time; and what every benchmark says of its run.

    Raises:
        InvalidArgumentError: ``minutes`` is not positive and finite, ``seed`` is below 0, or there
            is no such model or device.
    """
    if not 0 < minutes < math.inf or model not in MODELS:
        raise InvalidArgumentError(
            f"minutes must be > 0 and finite, and model one of {list(MODELS)}, got {minutes!r} and "
            f"{model!r}"
        )
    check_device(device)
    check_int("seed", seed, minimum=0)
    soak = Soak(partial(MODELS[model], device), seed)
    broken = None
    with progress_bar("soak", 60 * minutes) as show:
        try:
            soak.run(60 * minutes, show)
        except InvariantError as error:
            broken = str(error)
    measurements = list(_judge(soak, minutes, is_rate_limited=model == "none"))
    passed = broken is None and all(one.passed for one in measurements)
    return describe_run("soak") | {
        "passed": passed,
        "settings": {"minutes": minutes, "model": model, "device": device, "seed": seed},
        "measurements": as_dicts(measurements),
        "counts": dict(sorted(soak.counts.items())) | _stats_of(soak.engine),
        "broken": broken,
        "windows": [asdict(window) for window in soak.windows],
    }


class Soak:
    """Clients and the engine that they talk to.

    Args:
        make_model: Makes the model; ``fails_every`` says how often its forward raises.
        seed: Of everything that is drawn.

    Attributes:
        engine: What serves the requests.
        counts: What happened, by name.
        windows: What was seen at each check.
    """

    def __init__(self, make_model: Callable[..., LanguageModel], seed: int) -> None:
        self.engine = Engine(
            make_model(fails_every=_FAILS_EVERY), _CONFIG, slot_policy=ScoreSlotPolicy()
        )
        self.counts: Counter[str] = Counter()
        self.windows: list[Window] = []
        self._rng = np.random.default_rng(seed)
        self._clients = Clients(self._rng, max_tokens=_CONFIG.max_sequence_length)
        self._turns: dict[Hashable, Turn] = {}
        self._ids = count()
        self._reference = make_model()
        self._answers: list[tuple[Turn, tuple[int, ...]]] = []

    def run(self, seconds: float, show: Callable[[float, str], None]) -> None:
        """Serve requests for some seconds, and check in between; ``show`` is told how far it is.

        Raises:
            InvariantError: The books contradict each other, or an answer is not what the same
                model says without a cache.
        """
        begin = start = time.perf_counter()
        while not self.windows or start - begin < seconds:
            before, cpu = self.counts["finished"], time.process_time()
            now = start
            while now == start or now - start < seconds / _WINDOWS:
                self.step()
                now = time.perf_counter()
                show(now - begin, f"{self.counts['finished']:,} requests")
            cpu_seconds = time.process_time() - cpu
            self._check()
            window = Window(
                seconds=now - begin,
                busy_seconds=now - start,
                cpu_seconds=cpu_seconds,
                requests=self.counts["finished"] - before,
                rss_mib=_rss_mib(),
                gpu_mib=_gpu_mib(self.engine.context.device),
            )
            self.windows.append(window)
            start = time.perf_counter()

    def step(self) -> None:
        """Let clients ask, some change their mind, and the engine compute one step."""
        while len(self._turns) < _UNFINISHED:
            self._submit()
        try:
            events = self.engine.step()
        except InterruptedError:
            self.counts["failed_forwards"] += 1
            return
        for event in events:
            if event.completion is not None:
                self._finish(event.completion)

    def _check(self) -> None:
        self.engine.context.check_invariants()
        self.counts["checks"] += 1
        self.counts["checked_outputs"] += len(self._answers)
        answers, self._answers = self._answers, []
        for turn, answer in answers:
            sampling = SamplingParams(max_new_tokens=turn.max_new_tokens)
            [alone] = Engine(self._reference, _UNCACHED).generate([turn.prompt], sampling)
            if alone.tokens != answer:
                raise InvariantError(f"the answer is {answer}, without a cache {alone.tokens}")
        gc.collect()

    def _submit(self) -> None:
        turn, request_id = self._clients.draw(), next(self._ids)
        sampling = SamplingParams(max_new_tokens=turn.max_new_tokens)
        positions = [turn.system_tokens] if turn.system_tokens else []
        self.engine.submit(
            turn.prompt,
            sampling,
            request_id=request_id,
            cache_salt=turn.salt,
            checkpoint_positions=positions,
        )
        self._turns[request_id] = turn
        chance = self._rng.random()
        if chance < _CANCEL_SHARE:
            self._cancel(self._draw_unfinished())
        elif chance < _CANCEL_SHARE + _PREEMPT_SHARE:
            self._preempt(self._draw_unfinished())

    def _draw_unfinished(self) -> Hashable:
        return list(self._turns)[int(self._rng.integers(len(self._turns)))]

    def _cancel(self, request_id: Hashable) -> None:
        self.counts["cancelled_queued" if self._status(request_id) is None else "cancelled"] += 1
        self.engine.cancel(request_id)
        self._clients.end(self._turns.pop(request_id), None)

    def _preempt(self, request_id: Hashable) -> None:
        if self._status(request_id) not in (None, RequestStatus.PREEMPTED):
            self.engine.context.preempt(request_id)

    def _status(self, request_id: Hashable) -> RequestStatus | None:
        """Return where a request stands; None: it is queued."""
        try:
            return self.engine.context.status(request_id)
        except UnknownRequestError:
            return None

    def _finish(self, completion: Completion) -> None:
        turn = self._turns.pop(completion.request_id)
        if completion.error is not None:
            raise InvariantError(f"a request of few tokens did not fit: {completion.error}")
        self.counts["finished"] += 1
        self._clients.end(turn, completion.tokens)
        # Of ``NoModel``, which makes its answers up, nothing is asked again.
        if len(self._answers) < _ENOUGH and not isinstance(self._reference, NoModel):
            self._answers.append((turn, completion.tokens))


def print_soak(result: dict[str, Any]) -> None:
    """Print a result of ``run_soak`` as a table for people."""
    print_table(result)
    print(", ".join(f"{name} {value:,}" for name, value in result["counts"].items()))
    print(result["broken"] or "no invariant broken")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request that a client makes."""

    prompt: npt.NDArray[np.int32]  # [prompt length] int32 token ids below 256
    max_new_tokens: int  # tokens of the answer
    salt: str | None = None  # what keeps tenants apart
    system_tokens: int = 0  # tokens of the prompt that others begin with as well
    client: _Client | None = None  # who asks; None: somebody who does not come back


class Clients:
    """A fixed crowd, whose memory does not grow: who has talked for long begins anew.

    Agents share long system prompts, and their tools answer at length; chats share short ones. A
    third of the clients belongs to each tenant, and tenants use the same system prompts.
    """

    def __init__(self, rng: np.random.Generator, *, max_tokens: int) -> None:
        self._rng = rng
        self._max_tokens = max_tokens
        salts = cycle(_SALTS)
        prompts = cycle([self._text(max_tokens // 4), self._text(max_tokens // 3)])
        agents = [_Client(next(prompts), next(salts), 120) for _ in range(_NUM_AGENTS)]
        prompts = cycle([self._text(70), self._text(20)])
        chats = [_Client(next(prompts), next(salts), 40) for _ in range(_NUM_CHATS)]
        self._idle = {"agent": agents, "chat": chats}

    def draw(self) -> Turn:
        """Return the next request of a client who waits for no answer, or of a new one."""
        kind = self._rng.choice(
            ("agent", "chat", "once"), p=(_AGENT_SHARE, _CHAT_SHARE, 1 - _AGENT_SHARE - _CHAT_SHARE)
        )
        answer = int(self._rng.integers(1, 25))
        idle = self._idle.get(kind)
        if not idle:
            return Turn(self._text(int(self._rng.integers(5, self._max_tokens // 2))), answer)
        client = idle.pop(int(self._rng.integers(len(idle))))
        said = self._text(1 + int(self._rng.exponential(client.mean_tokens)))
        prompt = np.concatenate((client.context, said))
        if len(prompt) + answer > self._max_tokens:
            prompt = np.concatenate((client.system, said[: self._max_tokens // 4]))
        return Turn(prompt, answer, client.salt, len(client.system), client)

    def end(self, turn: Turn, answer: tuple[int, ...] | None) -> None:
        """Let the client of a turn go on.

        Args:
            turn: As ``draw`` gave it.
            answer: What was said; None: the request was cancelled, and the client asks again.
        """
        client = turn.client
        if client is None:
            return
        if answer is not None:
            client.context = np.concatenate((turn.prompt, np.array(answer, np.int32)))
        self._idle["agent" if client.mean_tokens > 100 else "chat"].append(client)

    def _text(self, num_tokens: int) -> npt.NDArray[np.int32]:
        return self._rng.integers(_VOCAB_SIZE, size=num_tokens, dtype=np.int32)


class _Client:
    """Somebody who goes on where the last answer ended."""

    def __init__(self, system: npt.NDArray[np.int32], salt: str | None, mean_tokens: int) -> None:
        self.system = self.context = system
        self.salt = salt
        self.mean_tokens = mean_tokens


def _judge(soak: Soak, minutes: float, *, is_rate_limited: bool) -> Iterator[Measurement]:
    """Measure what the windows show."""
    windows = soak.windows
    if not windows:
        return
    is_long = minutes > 1  # what the first minute shows is how caches fill
    third = max(1, len(windows) // 3)
    rate = sum(w.requests for w in windows) / sum(w.busy_seconds for w in windows)
    limit = 200 if is_rate_limited and is_long else None
    yield Measurement("requests a second", rate, "/s", limit=limit, at_least=True)
    first, last = _rate_of_cpu(windows[:third]), _rate_of_cpu(windows[-third:])
    if first:  # else it was over before a first request was
        yield Measurement(
            "requests a CPU second, last third over first",
            last / first,
            "x",
            limit=0.8 if is_long else None,
            at_least=True,
            detail=f"{first:,.0f}/s, then {last:,.0f}/s",
        )
    # The first minute fills caches and pools; of a shorter soak, the first tenth.
    settled = [w for w in windows if w.seconds >= min(60.0, windows[-1].seconds / 10)]
    yield _growth("RSS", [w.rss_mib for w in settled], is_long=is_long)
    gpu = [w.gpu_mib for w in settled if w.gpu_mib is not None]
    if gpu:
        yield _growth("GPU memory", gpu, is_long=is_long)


def _growth(name: str, mib: list[float], *, is_long: bool) -> Measurement:
    """Compare the last sixth of the windows with the first: memory goes up and down a little."""
    few = max(1, len(mib) // 6)
    first, last = statistics.median(mib[:few]), statistics.median(mib[-few:])
    return Measurement(
        f"growth of {name} after the first minute",
        100 * (last / first - 1),
        "%",
        limit=1 if is_long else None,
        detail=f"{first:,.1f} MiB, then {last:,.1f} MiB",
    )


def _rate_of_cpu(windows: list[Window]) -> float:
    """Return the requests that came to their end in a second of the CPU; 0.0: none did."""
    requests = sum(w.requests for w in windows)
    return requests / sum(w.cpu_seconds for w in windows) if requests else 0.0


def _stats_of(engine: Engine) -> dict[str, int]:
    stats = engine.context.stats()
    return {name: getattr(stats, name) for name in _STATS}


def _rss_mib() -> float:
    """Return the resident memory of this process, as Linux counts it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * mmap.PAGESIZE / 2**20


def _gpu_mib(device: torch.device) -> float | None:
    """Return the memory that PyTorch has allocated on a GPU; None for the CPU."""
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else None
