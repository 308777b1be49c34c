"""State machines of a context over its tiers: any calls in any order, with faults of the tiers.

``TieredMachine`` has a host tier, ``DiskMachine`` a disk below it. Answers must equal those of
uncached runs for all damage, delays, losses and full tiers, and no row may stay held at the end.
"""

import errno
import os
import shutil
import sys
import tempfile
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from unittest import mock

from clocks import ManualClock
from context_machine import POLICIES, STEM, TENANTS, ContextMachine, Seen, same_bits
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from tier_rig import (
    KV,
    STATE,
    CopyError,
    LateTransfers,
    always,
    cached_rows,
    flip,
    flip_header,
)

from mamba_cache.cache import EveryNthBlock, LastBlock
from mamba_cache.context import PrefetchState
from mamba_cache.context import prefetch as prefetching
from mamba_cache.tiers import ModelIdentity, Refusal, lower
from mamba_cache.tiers import disk as disks
from mamba_cache.tiers.disk import PAGE_BYTES
from mamba_cache.tiers.entry import payload_digest


class Copies(LateTransfers):
    """Late copies; the next one of a direction in ``fails`` raises after half of its jobs."""

    def __init__(self, transfers):
        super().__init__(transfers)
        self.fails = set()

    def spill(self, jobs):
        self._fail("spill", jobs)
        return super().spill(jobs)

    def load(self, jobs):
        self._fail("load", jobs)
        return super().load(jobs)

    def _fail(self, way, jobs):
        if way in self.fails:
            self.fails.remove(way)
            getattr(self._transfers, way)(jobs[: len(jobs) // 2])
            raise CopyError


PROMPTS = st.tuples(st.sampled_from([24, 32, 40]), st.integers(0, 1))
"""Few prompts, so that they repeat: number of common tokens, and the token that follows."""


class TieredMachine(ContextMachine):
    """Small pools on the GPU, and a small or large host tier; answers must equal uncached runs.

    A flipped bit of a row is detected before results that depend on it are returned or findable.
    """

    pace = 9

    @initialize(
        policy=st.sampled_from(["lru", "lru", "lru", "ref_zero"]),
        save_decode_states=st.booleans(),
        max_checkpoints=st.sampled_from([None, None, 1]),
        longest=st.sampled_from([128, 128, 40]),
        placement=st.sampled_from([None, None, LastBlock(), EveryNthBlock(1)]),
        slot_policy=st.none() | st.sampled_from(POLICIES),
        prompts=st.lists(PROMPTS, min_size=2, max_size=5),
    )
    def start(self, prompts, **drawn):
        """Start with small pools, so that lower tiers are used."""
        super().start(ample=False, chunk=4, enable_prefix_caching=True, **drawn)
        self.traffic(prompts, 9, None)

    @contextmanager
    def unchanged_by_an_error(self):
        self.context.poll_tiers()  # refused calls also process ended copies
        with super().unchanged_by_an_error():
            yield

    def more_settings(self):
        return {"num_host_blocks": 24, "num_host_states": 5}

    def forget(self):
        super().forget()
        # Digests of entries damaged in host memory; the damage can reach lower tiers.
        self.turned = set()
        # Rows, with generations, whose header was damaged while no read lease was held.
        self.bad_headers = set()

    def open_context(self, **options):
        context = super().open_context(load_planner=always(), **options)
        if context.host_tier is not None:
            context._tiering.transfers = Copies(context._tiering.transfers)
        return context

    @property
    def copies(self):
        tiering = self.context._tiering
        return None if tiering.host is None else tiering.transfers

    @precondition(lambda self: self.copies)
    @rule(
        prompts=st.lists(PROMPTS, min_size=2, max_size=8),
        pace=st.sampled_from([9, 9, 9, 1, 0]),
        turned=st.none() | st.integers(0, 10**6),
    )
    def traffic(self, prompts, pace, turned):
        """Run requests one after another, so that entries of the first ones are evicted."""
        self.copies.run(9)
        self.context._tiering.poll()
        if turned is not None:
            bits = 8 * self.copies._transfers._layouts[STATE].payload_bytes
            self.turn(STATE, turned, turned % bits)
        self.ask_all(prompts, pace)

    def ask_all(self, prompts, pace):
        usual, self.pace = self.pace, pace
        for stem, tail in prompts:
            self.ask(stem, [tail] * 9, {})
            self.copies.run(pace)
            self.context._tiering.poll()
        self.pace = usual

    def ask(self, stem, tail, tenant):
        """Run a request for one token, as far as there is room."""
        before = set(self.requests)
        self.add(stem, tail, tenant, None, [])
        if self.can_step():
            self.step(None)
        for request_id in set(self.requests) - before:
            self.end(request_id)

    @precondition(lambda self: self.copies)
    @rule(pace=st.sampled_from([9, 9, 9, 9, 1, 0]))
    def device_gets_on(self, pace):
        """Finish ``pace`` copies in each direction now, and after each step."""
        self.pace = pace
        self.copies.run(pace)

    @precondition(lambda self: self.copies)
    @rule(way=st.sampled_from(["spill", "load"]))
    def next_copy_fails(self, way):
        self.copies.fails.add(way)

    @precondition(lambda self: self.copies)
    @rule()
    def wait(self):
        self.context.wait_for_tiers()

    @precondition(lambda self: self.copies)
    @rule(
        kind=st.sampled_from([KV, STATE]),
        row=st.integers(0, 100),
        bit=st.integers(0, 10**6),
        is_header=st.booleans(),
    )
    def turn_a_bit(self, kind, row, bit, is_header):
        if is_header:
            self.turn(kind, row, bit % (8 * 256), flip_header)
        else:
            self.turn(kind, row, bit % (8 * self.copies._transfers._layouts[kind].checksums.stop))

    def turn(self, kind, index, bit, turn=flip):
        """Flip a bit of a row with an entry, if there is one."""
        rows = cached_rows(self.context, kind)
        if rows:
            row, pool = rows[index % len(rows)], self.context.host_tier[kind]
            self.turned.add(pool._digests[row])
            if turn is flip_header and not pool.rows.refs[row]:
                self.bad_headers ^= {(kind, row, pool.generations.item(row), bit)}
            turn(self.context, kind, row, bit)

    @rule(what=st.sampled_from(["requests", "slots", "slots", "requests", "everything"]))
    def reset(self, what):
        super().reset(what)

    @precondition(lambda self: self.copies)
    @rule()
    def clear_tier(self):
        self.context.host_tier.clear()

    def begin(self, decode_ids=None, **drafts):
        """Begin a step; states from damaged rows are not compared."""
        self.damaged = set()
        admitted = {i: seen.admission for i, seen in self.requests.items()}
        begin_step = self.context.begin_step

        def begin_and_look(*args, **kwargs):
            step = begin_step(*args, **kwargs)
            for context, bad_headers in self.looked_at():
                for active in context._step._actives:
                    self.look_at_load(active, bad_headers)
            return step

        self.context.begin_step = begin_and_look
        try:
            return super().begin(decode_ids, **drafts)
        finally:
            del self.context.begin_step
            for request_id in self.damaged:
                self.requests[request_id].admission = admitted[request_id]

    def looked_at(self):
        """Contexts whose loads are checked, with the damaged headers of each."""
        return [(self.context, self.bad_headers)]

    def look_at_load(self, active, bad_headers):
        load = active.chunk.load
        if load is None:
            return
        read = {(each.facts.key.kind, each.row, each.generation) for each in load.leases}
        assert not read & {each[:3] for each in bad_headers}
        own = range(load.first_job, load.first_job + len(load.leases))
        # The real ticket below the late one has the result at once.
        bad = set(load.ticket._run().damaged()) & set(own)
        assert {load.leases[i - load.first_job].facts.key.digest for i in bad} <= self.turned
        if bad:
            self.damaged.add(active.request_id)
            self.requests[active.request_id].admission = None

    def step(self, decode_ids):
        super().step(decode_ids)
        if self.copies:
            self.copies.run(self.pace)

    def remember(self, key, state):
        """Record all states of a prefix: a tier may hold one from a batch with other rounding."""
        known = self.snapshots.setdefault(key, [])
        if not any(same_bits(state, each) for each in known):
            known.append(state)

    @invariant()
    def what_the_host_tier_finds_is_whole(self):
        """Findable rows have matching checksums, except rows damaged by this machine."""
        if not hasattr(self, "context") or not self.copies:
            return
        layouts = self.copies._transfers._layouts
        for kind, entries in self.context.host_tier._rows.items():
            for digest, row in entries._row_of.items():
                data = entries.memory.row(row).numpy()
                found = payload_digest(data[: layouts[kind].payload_bytes])
                is_whole = found == data[layouts[kind].checksums].tobytes()
                assert is_whole or digest in self.turned, (kind, row)

    def teardown(self):
        """Check that nothing is leaked."""
        if hasattr(self, "context") and self.copies and sys.exc_info()[0] is None:
            self.end_everything()

    def end_everything(self):
        """End all requests and wait for the tiers; then no row may be held."""
        for request_id in list(self.requests):
            self.end(request_id)
        self.context.wait_for_tiers()
        assert not any(self.context.host_tier.leases.values())
        self.context.check_invariants()


class LowerTierMachine(TieredMachine):
    """A host tier of few rows over a lower tier that outlives contexts.

    The class of each lower tier defines its settings by ``lower_settings``, and its faults.
    """

    host_rows = {"num_host_blocks": 9, "num_host_states": 4}
    write_on_use = 1

    def __init__(self):
        super().__init__()
        self.prefetches = []
        self.asked = []

    def more_settings(self):
        own = {"write_on_use": self.write_on_use, "hash_secret": b"of this test"}
        return super().more_settings() | self.host_rows | own | self.lower_settings()

    def open_context(self, **options):
        return super().open_context(identity=ModelIdentity(name="model", weights="w"), **options)

    def forget(self):
        """Clear the model, except entries of the lower tier, which outlive a reset."""
        names = "published", "perhaps_saved", "snapshots", "turned"
        kept = {name: getattr(self, name, None) for name in names}
        super().forget()
        if kept["published"] is not None:
            vars(self).update(kept)
            self.exact = False

    @precondition(lambda self: self.copies)
    @rule(
        stem=st.sampled_from([16, 24, 32, 40]) | st.integers(0, 40),
        tail=st.lists(st.integers(0, 3), max_size=9),
        tenant=st.just({}) | st.sampled_from(TENANTS),
        seconds=st.sampled_from([None, None, 0.0, 3.0]),
    )
    def prefetch(self, stem, tail, tenant, seconds):
        self.begin_prefetch(Seen((STEM[:stem] + tail or [1])[: self.longest], tenant), seconds)

    def begin_prefetch(self, seen, seconds=None):
        request = seen.request("prefetched", list(seen.prompt))
        self.prefetches.append(self.context.prefetch(request, timeout_seconds=seconds))
        return self.prefetches[-1]

    def settle(self):
        """Wait until the lower tier is idle."""
        raise NotImplementedError

    def ask(self, stem, tail, tenant):
        super().ask(stem, tail, tenant)
        self.asked.append((stem, tail, tenant))

    @precondition(lambda self: self.copies and self.asked)
    @rule(number=st.integers(0, 100))
    def come_back(self, number):
        """Repeat an earlier request after a prefetch from the lower tier."""
        self.return_to(*self.asked[number % len(self.asked)])

    def return_to(self, stem, tail, tenant):
        self.copies.run(99)
        self.settle()
        seen = Seen((STEM[:stem] + tail or [1])[: self.longest], tenant)
        handle = self.begin_prefetch(seen)
        self.settle()
        assert handle.is_over
        match = self.context.match(seen.request("probe", list(seen.prompt)))
        # Entries already in the host tier may be damaged.
        if handle.state is PrefetchState.READY and not self.turned:
            assert match.skip_tokens >= handle.skip_tokens
        self.ask(stem, tail, tenant)

    def leave(self):
        """End the process."""
        self.end_everything()
        self.context.close()
        self.forget_context()

    def end_everything(self):
        super().end_everything()
        self.settle()
        assert not self.context.host_tier.lower_leases

    def forget_context(self):
        """Drop everything that ends with the process."""
        del self.context
        self.prefetches.clear()
        self.shared_kv = {}
        self.forget()


class LateTier:
    """A lower tier that proceeds on ``run``, so that the test decides the order."""

    def __init__(self, tier, fault=nullcontext):
        self.tier, self.fault = tier, fault
        self.queue = deque()
        self.is_late = False

    def put(self, facts, payload, done):
        return self._give(self.tier.put, facts, payload, done)

    def load(self, expected, into, done):
        return self._give(self.tier.load, expected, into, done)

    def _give(self, call, facts, buffer, done):
        if self.is_late:
            self.queue.append((call, facts, buffer, done))
            return True
        with self.fault():
            taken = call(facts, buffer, done)
            self.tier.flush()
        return taken

    def run(self, count):
        """Process some queued entries."""
        for _ in range(min(count, len(self.queue))):
            call, facts, buffer, done = self.queue.popleft()
            with self.fault():
                if not call(facts, buffer, done):
                    done(Refusal.ABORTED)
                self.tier.flush()

    def remove(self, key):
        """Remove an entry and abort its queued jobs, like the tier itself."""
        self.tier.remove(key)
        wrong = [each for each in self.queue if each[1].key == key]
        self.queue = deque(each for each in self.queue if each not in wrong)
        for *_, done in wrong:
            done(Refusal.ABORTED)
        self.tier.flush()

    def flush(self, timeout_seconds=None):
        self.run(len(self.queue))
        return self.tier.flush(timeout_seconds)

    def __getattr__(self, name):
        return getattr(self.tier, name)


def _failing(call, error):
    def fail(*_):
        raise OSError(error, os.strerror(error))

    return fail


def _short(call, _):
    """A call that transfers one page at a time, then nothing."""
    left = [2]

    def less(fd, buffers, offset):
        left[0] -= 1
        return call(fd, [buffers[0][:PAGE_BYTES]], offset) if left[0] >= 0 else 0

    return less


def _torn(call, _):
    """A call that writes the first page and reports that it wrote everything."""

    def tear(fd, buffers, offset):
        call(fd, [buffers[0][:PAGE_BYTES]], offset)
        return sum(map(len, buffers))

    return tear


DISK_FAULTS = {
    "a read fails": ("preadv", _failing, errno.EIO),
    "a write fails": ("pwritev", _failing, errno.EIO),
    "the disk is full": ("pwritev", _failing, errno.ENOSPC),
    "a read is short": ("preadv", _short, None),
    "a write is short": ("pwritev", _short, None),
    "a write is torn": ("pwritev", _torn, None),
}
CALLS = {name: getattr(os, name) for name, _, _ in DISK_FAULTS.values()}
DAMAGES = ["a bit", "a bit", "a bit of a header", "zeroes", "another file", "an older file", "cut"]


class DiskMachine(LowerTierMachine):
    """A host tier of few rows over a disk of few rows, with successive contexts.

    For all faults of the disk and its files, in any order: answers equal those of uncached runs,
    every prefetch ends, no row stays held at the end, and without damage all stored entries are
    found.
    """

    disk_rows = 8, 16

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="mamba-cache-machine-")
        self.clock = ManualClock()
        modules = disks, lower, prefetching
        self.patches = [mock.patch.object(each, "time", self.clock) for each in modules]
        self.faults_now = []
        self.patches += [
            mock.patch.object(os, name, self.meeting_faults(name, getattr(os, name)))
            for name in {name for name, _, _ in DISK_FAULTS.values()}
        ]
        for patch in self.patches:
            patch.start()
        self.is_clean = True
        self.faults = []
        self.old_files = {}

    def lower_settings(self):
        """Settings of the tiers below host memory."""
        states, blocks = self.disk_rows
        row_bytes = 8192
        return {
            "disk_cache_path": self.folder,
            "disk_cache_gb": 2 * max(states, blocks) * row_bytes / 2**30,
            "host_state_share": 0.5,
        }

    def open_context(self, **options):
        with self.disk_fault():
            context = super().open_context(**options)
        if context.host_tier is not None:
            context._tiering.disk = LateTier(context.disk_tier, self.disk_fault)
        return context

    @property
    def late(self):
        """The lower tier, or None without prefix caching."""
        tiering = self.context._tiering
        return None if tiering is None else tiering.disk

    @property
    def disk(self):
        return self.late.tier

    @contextmanager
    def disk_fault(self):
        """Apply the next fault of the disk during one operation."""
        fault = None
        with suppress(IndexError):  # no fault, or another rank has it
            name, make, argument = DISK_FAULTS[self.faults.pop()]
            fault = name, make(CALLS[name], argument)
            self.faults_now.append(fault)
        try:
            yield
        finally:
            if fault is not None:
                self.faults_now.remove(fault)

    def meeting_faults(self, name, call):
        """A replacement for a system call; threads of ranks meet faults in any order."""

        def meet(*arguments):
            faults = [fault for of_name, fault in self.faults_now if of_name == name]
            return faults[-1](*arguments) if faults else call(*arguments)

        return meet

    @precondition(lambda self: self.copies)
    @rule(is_late=st.booleans(), count=st.sampled_from([0, 1, 3, 30]))
    def disk_gets_on(self, is_late, count):
        self.late.is_late = is_late
        self.late.run(count if is_late else len(self.late.queue))

    @precondition(lambda self: self.copies)
    @rule(fault=st.sampled_from([*DISK_FAULTS]), times=st.integers(1, 4))
    def disk_fails(self, fault, times):
        """Make the disk's next operations fail."""
        self.faults = [fault] * times
        self.is_clean = False

    @precondition(lambda self: self.copies)
    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds):
        """Advance the clock: deadlines pass, and a disk suspended after errors is used again."""
        self.clock.now += seconds

    @precondition(lambda self: self.copies)
    @rule(
        kind=st.sampled_from([KV, STATE, STATE]),
        number=st.integers(0, 30),
        how=st.sampled_from(DAMAGES),
        bit=st.integers(0, 10**6),
    )
    def damage_a_file(self, kind, number, how, bit):
        self.damage(kind, number, how, bit)

    def damage(self, kind, number, how, bit):
        store = self.disk.store
        entries = [entry for entry in store._entries if f"/{kind.value}/" in entry]
        files = [store._path_of(entry) for entry in entries]
        if not files or not (path := files[number % len(files)]).exists():
            return
        if not (content := bytearray(path.read_bytes())):  # emptied by earlier damage
            return
        first, last = (0, 256) if "header" in how else (PAGE_BYTES, len(content))
        if how == "a bit" and first >= last:  # cut by earlier damage
            return
        self.is_clean = False
        if how.startswith("a bit"):
            at = first + bit // 8 % (last - first)
            content[at : at + 1] = bytes([content[at] ^ 1 << bit % 8]) if at < len(content) else b""
        elif how == "zeroes":
            page = bit % -(-len(content) // PAGE_BYTES) * PAGE_BYTES
            content[page : page + PAGE_BYTES] = bytes(len(content[page : page + PAGE_BYTES]))
        elif how == "another file":
            other = files[bit % len(files)]
            content = other.read_bytes() if other.exists() else b""
        elif how == "an older file":
            content = self.old_files.setdefault(path.name, bytes(content))
        else:
            content = content[: bit % len(content)]
        path.write_bytes(content)

    @precondition(lambda self: self.copies)
    @rule(number=st.integers(0, 20))
    def cancel_prefetch(self, number):
        if self.prefetches:
            handle = self.prefetches[number % len(self.prefetches)]
            was_over = handle.is_over
            handle.cancel()
            assert was_over or handle.state is PrefetchState.CANCELLED

    @precondition(lambda self: self.copies)
    @rule(
        is_killed=st.booleans(),
        disk_rows=st.sampled_from([(8, 16), (8, 16), (3, 6)]),
        host_rows=st.sampled_from([(9, 4), (9, 4), (24, 5), (3, 1)]),
        write_on_use=st.sampled_from([1, 1, 2]),
    )
    def restart(self, is_killed, disk_rows, host_rows, write_on_use):
        """Restart: another process uses the disk, after a clean end or a kill."""
        self.leave(is_killed=is_killed)
        self.disk_rows, self.write_on_use = disk_rows, write_on_use
        self.host_rows = dict(zip(("num_host_blocks", "num_host_states"), host_rows, strict=True))
        self.context = self.open_context()

    def settle(self):
        self.late.flush()

    def leave(self, *, is_killed=False):
        if not is_killed:
            super().leave()
            return
        self.late.queue.clear()
        self.disk.close()
        self.requests.clear()
        self.forget_all_uncollected()
        self.forget_context()

    @precondition(lambda self: self.copies)
    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=5),
        damages=st.lists(
            st.tuples(
                st.sampled_from([STATE, KV]),
                st.integers(0, 30),
                st.sampled_from(DAMAGES),
                st.integers(0, 10**6),
            ),
            max_size=3,
        ),
        fault=st.none() | st.sampled_from([*DISK_FAULTS]),
        way=st.sampled_from(["restart", "kill", "clear", "stay"]),
        pace=st.sampled_from([9, 9, 0]),
    )
    def round_trip(self, prompts, damages, fault, way, pace):
        """Write entries to the disk, apply faults, and load them."""
        self.ask_all(prompts, pace)
        self.copies.run(99)
        self.context._tiering.poll()
        self.late.flush()
        for damage in damages:
            self.damage(*damage)
        if way in {"restart", "kill"}:
            self.leave(is_killed=way == "kill")
            self.context = self.open_context()
        elif way == "clear":
            self.context.host_tier.clear()
        if fault is not None:
            self.disk_fails(fault, 1 + len(damages))
        for stem, tail in prompts:
            self.return_to(stem, [tail] * 9, {})

    @invariant()
    def each_copy_below_has_its_row(self):
        """Exactly one row is held for each entry in transit to or from the lower tier."""
        if not hasattr(self, "context") or not self.copies:
            return
        host, queue = self.context.host_tier, self.late.queue
        assert len(host.lower_leases) == len(queue) + len(host._inbox)
        self.disk.check_invariants()
        assert not self.disk.num_queued
        if not queue:
            assert all(handle.is_over for handle in self.prefetches)

    @invariant()
    def what_is_below_is_found(self):
        """Without damage, prefetches are refused only for aborted and missing entries."""
        if self.is_clean:
            for handle in getattr(self, "prefetches", ()):
                assert set(handle.refusals) <= {Refusal.ABORTED, Refusal.MISSING}

    def teardown(self):
        try:
            self.faults = []
            super().teardown()
            if hasattr(self, "context"):
                self.late.queue.clear()
                self.context.close()
        finally:
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.folder, ignore_errors=True)
