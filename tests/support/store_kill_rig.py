"""Processes that share a store and are killed repeatedly, with counts of the outcomes.

Writers and readers use ``LowerTier``; holders give memory to Mooncake. Each process is forked from
the parent, which has imported everything, and has no threads and no store client, so that a killed
process restarts within milliseconds. Processes write a line for each call to a pipe.
"""

import json
import mmap
import os
import random
import select
import signal
import sys
import threading
import time
from collections import Counter

import numpy as np
import torch
from disk_rig import SECRET, facts_of
from faulty_store import FaultyStore, Trouble
from store_rig import LOOPBACK, mooncake_master, valkey_server

from mamba_cache.stores import open_store
from mamba_cache.tiers import lower as lower_module
from mamba_cache.tiers.entry import EntryKind, EntryMacs
from mamba_cache.tiers.lower import LowerTier

CHUNK_BYTES = 2**17
PAYLOAD_BYTES = 4 * CHUNK_BYTES + 1000
NUM_RECENT = 64
PATIENCE = 0.05
"""Maximum wait of a request for a silent store: the context's default."""

HUNG_SECONDS = 30.0
PROBE_SECONDS = 0.5
"""Pause before a failed store is asked again; shorter than the default of 5 s."""

CALL_SECONDS = 2.0
SLOW_RECOVERY = 10.0
ROLES = {
    "valkey": ("writer", "server", "reader"),
    "mooncake": ("writer", "holder", "master", "reader"),
}
"""Roles to kill, by store."""


def content_of(number):
    return np.random.default_rng([number, 3]).bytes(PAYLOAD_BYTES)


def facts(number):
    return facts_of(number, EntryKind.STATE, num_bytes=PAYLOAD_BYTES)


class Shared:
    """The numbers of the newest entries, in memory shared by all processes."""

    def __init__(self):
        self._numbers = np.frombuffer(mmap.mmap(-1, 8 * (NUM_RECENT + 1)), dtype=np.int64)

    def next_number(self):
        """Return a new number. Two writers may get the same one, and then put the same entry."""
        self._numbers[NUM_RECENT] += 1
        number = int(self._numbers[NUM_RECENT])
        self._numbers[number % NUM_RECENT] = number
        return number

    def recent(self, rng):
        newest = int(self._numbers[NUM_RECENT])
        return max(1, newest - rng.randrange(NUM_RECENT))


class Child:
    """A forked process, whose lines the parent reads."""

    def __init__(self, role, work):
        self.role, self._work = role, work
        self.start()

    def start(self):
        self.heard_at = time.monotonic()
        self.num_lines = 0
        self._rest = b""
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.reader)
            status = 1
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, 1)
                self._work(lambda *line: os.write(writer, json.dumps(line).encode() + b"\n"))
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        os.set_blocking(self.reader, False)

    def lines(self):
        """Lines written since the last call."""
        try:
            data = os.read(self.reader, 2**20)
        except BlockingIOError:
            return []
        *whole, self._rest = (self._rest + data).split(b"\n")
        if whole:
            self.heard_at = time.monotonic()
            self.num_lines += len(whole)
        return [json.loads(line) for line in whole]

    def ended(self):
        """The exit status of a process that ended by itself, or None."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return status if pid else None

    def kill(self, *, is_over=False):
        if not is_over:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.reader)


def open_tier(url, *, flips=0.0):
    store = open_store(url)
    if flips:
        store = FaultyStore(store)
        store.inject("get_many_into", Trouble.FLIP, probability=flips)
    return LowerTier(
        store,
        macs=EntryMacs(SECRET),
        write_on_use=1,
        chunk_bytes=CHUNK_BYTES,
        call_seconds=CALL_SECONDS,
    )


class Differences:
    """Increments of counters since the last call."""

    def __init__(self):
        self._last = Counter()

    def of(self, stats):
        now = Counter({f"fault: {name}": n for name, n in stats.faults.items()})
        now["calls given up"] = stats.given_up
        now["left alone"] = stats.opened
        gained, self._last = now - self._last, now
        return dict(gained)


def write(url, shared):
    """Return the work of a writer."""

    def work(tell):
        lower_module._PAUSE_SECONDS = PROBE_SECONDS
        torch.set_num_threads(1)
        tier, gained = open_tier(url), Differences()
        pause = threading.Event()
        while True:
            number = shared.next_number()
            payload = memoryview(content_of(number))
            before, over, refusals = tier.stats().dropped, threading.Event(), []

            def done(refusal, refusals=refusals, over=over):
                refusals.append(refusal)
                over.set()

            started = time.perf_counter()
            taken = tier.put(facts(number), payload, done)
            in_call = time.perf_counter() - started
            if taken and not over.wait(HUNG_SECONDS):
                tell("put", "hung", in_call, 0.0, {})
                return
            after = Counter(tier.stats().dropped) - Counter(before)
            outcome = next(iter(after), "stored")
            tell("put", outcome, in_call, 0.0, gained.of(tier.stats()))
            pause.wait(0.005 if taken else 0.05)

    return work


def read(url, shared, flips):
    """Return the work of a reader. Like ``context.prefetch``, it waits up to a deadline."""

    def work(tell):
        lower_module._PAUSE_SECONDS = PROBE_SECONDS
        torch.set_num_threads(1)
        tier, gained = open_tier(url, flips=flips), Differences()
        rng = random.Random(os.getpid())
        pause = threading.Event()
        waiting = {}
        while True:
            number = shared.recent(rng)
            expected = facts(number)
            into, over, refusals = bytearray(PAYLOAD_BYTES), threading.Event(), []

            def done(refusal, refusals=refusals, over=over):
                refusals.append(refusal)
                over.set()

            started = time.perf_counter()
            taken = tier.is_healthy and tier.load(expected, memoryview(into), done)
            in_call = time.perf_counter() - started
            if not taken:
                outcome = "not asked"
            else:
                over.wait(PATIENCE)
                outcome = "gave up waiting"
                if over.is_set():
                    refusal = refusals[0]
                    outcome = "right" if refusal is None else refusal.value
            waited = time.perf_counter() - started
            if outcome == "right" and bytes(into) != content_of(number):
                outcome = "WRONG"
            if outcome == "gave up waiting":
                waiting[number] = over, time.monotonic()
            tell("load", outcome, in_call, waited, gained.of(tier.stats()))
            waiting = {n: each for n, each in waiting.items() if not each[0].is_set()}
            if any(time.monotonic() - began > HUNG_SECONDS for _, began in waiting.values()):
                tell("load", "hung", in_call, waited, {})
                return
            if taken:
                pause.wait(0.002)
            else:
                started = time.perf_counter()
                pause.wait(PATIENCE)
                tell("alone", "", 0.0, time.perf_counter() - started, {})

    return work


def hold(url):
    """Return the work of a holder, which gives memory to the store."""

    def work(tell):
        store = open_store(url)
        pause = threading.Event()
        while True:
            fault = store.exists_many(["holder"])[0]
            tell("hold", str(fault.value if fault else fault), 0.0, 0.0, {})
            pause.wait(0.2)

    return work


class Counts:
    """Outcomes of several kills of one role."""

    def __init__(self):
        self.kills = self.wrong = self.hung = self.crashed = 0
        self.loads, self.puts, self.gained = Counter(), Counter(), Counter()
        self.added, self.alone, self.in_calls, self.recoveries = [], [], [], []

    def add(self, line):
        kind, outcome, in_call, waited, gained = line
        if kind == "alone":
            self.alone.append(waited)
        if kind not in ("load", "put"):
            return
        self.gained.update(gained)
        (self.loads if kind == "load" else self.puts)[outcome] += 1
        self.wrong += outcome == "WRONG"
        self.hung += outcome == "hung"
        self.in_calls.append(in_call)
        if kind == "load" and outcome not in ("right", "missing"):
            self.added.append(waited)


class Rig:
    """A server, holders, two writers and a reader."""

    def __init__(self, kind, *, seed=0, flips=0.0):
        self.kind, self._random = kind, random.Random(seed)
        self._shared = Shared()
        if kind == "valkey":
            memory = ("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
            self.server, holders = valkey_server(*memory), 0
        else:
            self.server, holders = mooncake_master("1s", "--client_ttl=2"), 2
        url = f"{kind}://{LOOPBACK}:{self.server.port}"
        self.children = [
            *(Child("holder", hold(f"{url}?segment=128MiB")) for _ in range(holders)),
            *(Child("writer", write(url, self._shared)) for _ in range(2)),
            Child("reader", read(url, self._shared, flips)),
        ]
        self.counts = Counts()

    def __enter__(self):
        self.run_until(lambda: self.counts.loads["right"] >= 3, 60.0)
        return self

    def __exit__(self, *error):
        for child in self.children:
            child.kill()
        self.server.kill()

    def kill(self, role, counts):
        """Kill a process, restart it, and go on until entries are stored and read again."""
        self.counts = counts
        self.run_until(lambda: False, self._random.uniform(0.02, 0.3))
        if role in ("master", "server"):
            self.server.kill()
            self.run_until(lambda: False, self._random.uniform(0.0, 0.3))
            self.server.start()
        else:
            child = self._random.choice([each for each in self.children if each.role == role])
            child.kill()
            self.children.remove(child)
            self.run_until(lambda: False, self._random.uniform(0.0, 0.05))
            child.start()
            self.children.append(child)
        counts.kills += 1
        began = time.monotonic()
        loads, puts, gained = counts.loads.copy(), counts.puts.copy(), counts.gained.copy()
        self.run_until(
            lambda: (
                counts.loads["right"] > loads["right"] and counts.puts["stored"] > puts["stored"]
            ),
            60.0,
        )
        counts.recoveries.append(time.monotonic() - began)
        if counts.recoveries[-1] > SLOW_RECOVERY:
            what = (
                dict(counts.loads - loads),
                dict(counts.puts - puts),
                dict(counts.gained - gained),
            )
            print(f"{role} {counts.kills}: {counts.recoveries[-1]:.0f} s, {what}", file=sys.stderr)

    def run_until(self, is_reached, seconds):
        """Collect lines; count processes that ended by themselves or are silent."""
        until = time.monotonic() + seconds
        while not is_reached() and (left := until - time.monotonic()) > 0:
            ready = [each.reader for each in self.children]
            ready, _, _ = select.select(ready, [], [], min(left, 0.05))
            for child in self.children:
                lines = child.lines() if child.reader in ready else []
                for line in lines:
                    self.counts.add(line)
                status = child.ended()
                silent = time.monotonic() - child.heard_at > 2 * HUNG_SECONDS
                if status is not None or silent:
                    self.counts.crashed += status is not None
                    self.counts.hung += silent
                    print(f"{child.role} ended with {status}", file=sys.stderr)
                    child.kill(is_over=status is not None)
                    child.start()
