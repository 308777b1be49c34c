"""The disk tier: what it stores it finds again, verified, also in the next process."""

import errno
import gc
import mmap
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace

import disk_rig
import pytest
from disk_rig import (
    IDENTITY,
    KV_BYTES,
    SECRET,
    STATE_BYTES,
    Answer,
    Gate,
    buffer_for,
    capacity_for,
    facts_of,
    load,
    make_identity,
    open_tier,
    payload_of,
    put,
)

from mamba_cache import InvalidArgumentError
from mamba_cache.errors import BudgetError, InvariantError, TierInUseError
from mamba_cache.tiers import EntryHeader, EntryKind, EntryMacs, PayloadMac, Refusal, jobs
from mamba_cache.tiers import directory as directories
from mamba_cache.tiers import disk as disks
from mamba_cache.tiers import entry as entries
from mamba_cache.tiers import slab as slabs
from mamba_cache.tiers.directory import folder_of, folders, remove_folder, slab_path
from mamba_cache.tiers.slab import PAGE_BYTES, SlabFile, row_bytes_of

STATE, KV = EntryKind.STATE, EntryKind.KV


@pytest.fixture
def tier(tmp_path):
    tier = open_tier(tmp_path)
    yield tier
    tier.check_invariants()
    tier.close()


def has(tier, *numbers, kind=STATE):
    return tier.has_many([facts_of(number, kind).key for number in numbers])


def state_file(tmp_path, identity=IDENTITY):
    return slab_path(folder_of(tmp_path, identity), STATE)


def fill_other(path, weights="other weights", states=8):
    """A tier with an entry, of another identity in the same path; and the identity."""
    identity = make_identity(weights)
    other = open_tier(path, identity=identity, states=states)
    assert put(other, 1, identity=identity) is None
    return other, identity


@pytest.fixture
def clock(monkeypatch):
    """The tier's clock stands still, until the test sets ``now``."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(disks, "time", clock)
    return clock


@pytest.mark.parametrize("kind", EntryKind)
@pytest.mark.parametrize("offset", [0, 8])
def test_an_entry_is_loaded_as_it_was_put(tier, kind, offset) -> None:
    """Into a buffer at a page's begin, and at any other address."""
    assert put(tier, 1, kind) is None
    assert load(tier, 1, kind, offset=offset) == payload_of(1, kind)
    stats = tier.stats()
    assert (stats.puts, stats.stored, stats.loads, stats.restored) == (1, 1, 1, 1)
    assert stats.written_bytes == stats.read_bytes == len(payload_of(1, kind))
    assert stats.entries == {"state": int(kind is STATE), "kv": int(kind is KV)}
    assert stats.refused == stats.dropped == stats.not_recovered == {}


def test_payloads_at_any_address_are_stored(tier) -> None:
    """Direct writes take whole pages only; the tier copies what is not."""
    for number, offset in enumerate((0, 1, 4095)):
        facts, answer = facts_of(number), Answer()
        payload = buffer_for(facts, offset=offset)
        payload[:] = payload_of(number)
        assert tier.put(facts, payload, answer)
        assert answer.get() is None
        assert load(tier, number) == payload_of(number)


def test_threads_of_a_tier_that_nobody_closed_keep_no_process(tier) -> None:
    mine = [each for each in threading.enumerate() if each.name.startswith("mamba-cache-disk")]
    assert mine
    assert all(each.daemon for each in mine)


def test_kinds_tenants_and_chunks_are_apart(tier) -> None:
    assert put(tier, 1) is None
    assert has(tier, 1, kind=KV) == [False]
    for change in ({"kind": KV}, {"tenant": b"u" * 16}, {"chunk": 0}):
        assert load(tier, 1, **change) is Refusal.MISSING
    assert [put(tier, 1, chunk=0), put(tier, 1, KV)] == [None, None]
    assert load(tier, 1, chunk=0) == load(tier, 1) == payload_of(1)
    assert load(tier, 1, KV) == payload_of(1, KV)


def test_another_identity_is_never_found(tier) -> None:
    other = make_identity("other weights")
    assert put(tier, 1) is None
    key = facts_of(1, identity=other).key
    assert tier.has_many([key]) == [False]
    assert load(tier, 1, identity=other) is Refusal.IDENTITY
    assert load(tier, 1, rank=1) is Refusal.IDENTITY
    with pytest.raises(InvalidArgumentError, match="another identity"):
        tier.put(facts_of(1, identity=other), payload_of(1), Answer())


def test_sizes_are_checked(tier) -> None:
    for facts, payload in (
        (facts_of(1, num_bytes=STATE_BYTES - 1), payload_of(1)),
        (facts_of(1), payload_of(1)[:-1]),
    ):
        with pytest.raises(InvalidArgumentError, match=f"must have {STATE_BYTES} bytes"):
            tier.put(facts, payload, Answer())
        with pytest.raises(InvalidArgumentError, match=f"must have {STATE_BYTES} bytes"):
            tier.load(facts, payload, Answer())


def test_what_the_request_derived_is_compared(tier) -> None:
    """A digest that collides is refused; what does not match is not found again."""
    assert put(tier, 1) is None
    assert load(tier, 1, prefix_tokens=1) is Refusal.PREFIX_TOKENS
    assert has(tier, 1) == [False]
    assert tier.stats().refused == {"prefix_tokens": 1}
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_an_entry_is_written_at_its_second_use(tmp_path) -> None:
    tier = open_tier(tmp_path, write_on_use=2)
    assert put(tier, 1) is False
    assert has(tier, 1) == [False]
    assert put(tier, 1) is None
    assert has(tier, 1) == [True]
    assert put(tier, 1) is None  # it is there
    assert tier.stats().dropped == {"first_use": 1}
    assert (tier.stats().puts, tier.stats().stored) == (3, 1)
    tier.close()


def test_first_uses_are_forgotten_when_there_are_many(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jobs, "_MAX_FIRST_USES", 2)
    tier = open_tier(tmp_path, write_on_use=2)
    for number in (1, 2, 3):
        assert put(tier, number) is False
    assert put(tier, 1) is False
    assert put(tier, 3) is None
    tier.close()


def test_the_least_recently_used_goes_and_the_end_of_a_prefix_before_its_beginning(tier) -> None:
    for number in range(4):
        assert put(tier, number) is None
    assert has(tier, 0, 1, 2, 3) == [True] * 4  # one prefix, from its start
    assert put(tier, 4) is None
    assert has(tier, 3) == [False]
    assert has(tier, 0, 1, 2) == [True] * 3
    assert put(tier, 5) is None
    assert has(tier, 4) == [False]  # 4 was used before 0, 1 and 2 were
    stats = tier.stats()
    assert stats.evicted == 2
    assert stats.entries["state"] == stats.ready_rows["state"] == stats.rows["state"] == 4


def test_the_capacity_is_held(tmp_path) -> None:
    tier = open_tier(tmp_path, states=3, blocks=3)
    for number in range(20):
        assert put(tier, number) is None
        assert put(tier, number, KV) is None
    size = sum(file.stat().st_size for file in folder_of(tmp_path, IDENTITY).glob("*.slab"))
    assert size <= capacity_for(3, 3)
    assert tier.stats().disk_bytes == size
    tier.close()


def test_the_next_process_finds_what_was_stored(tmp_path) -> None:
    first = open_tier(tmp_path)
    for number in range(3):
        assert put(first, number) is None
        assert put(first, number, KV) is None
    first.close()
    second = open_tier(tmp_path)
    assert second.stats().recovered == 6
    assert has(second, 0, 1, 2, 3) == [True, True, True, False]
    for number in range(3):
        assert load(second, number) == payload_of(number)
        assert load(second, number, KV) == payload_of(number, KV)
    assert put(second, 3) is None
    assert put(second, 4) is None  # the file is full: one goes
    assert second.stats().entries["state"] == 4
    assert load(second, 4) == payload_of(4)
    second.check_invariants()
    second.close()


def test_after_a_restart_the_end_of_a_prefix_goes_first(tmp_path) -> None:
    first = open_tier(tmp_path)
    for number in (2, 0, 3, 1):
        assert put(first, number) is None
    first.close()
    second = open_tier(tmp_path)
    assert put(second, 9) is None
    assert has(second, 0, 1, 2, 3) == [True, True, True, False]
    second.close()


def test_a_slab_of_the_other_kind_is_refused(tmp_path) -> None:
    both = {"secret": SECRET, "state_bytes": KV_BYTES, "kv_bytes": KV_BYTES, "write_on_use": 1}
    path = tmp_path / "cache"
    first = disks.DiskTier(path, IDENTITY, 10**6, **both)
    answer = Answer()
    assert first.put(facts_of(1, KV), payload_of(1, KV), answer)
    assert answer.get() is None
    first.close()
    slab_path(first.folder, STATE).write_bytes(slab_path(first.folder, KV).read_bytes())
    second = disks.DiskTier(path, IDENTITY, 10**6, **both)
    assert second.stats().not_recovered == {"kind": 1}
    assert second.stats().entries == {"state": 0, "kv": 1}
    second.close()


def test_headers_of_payloads_of_another_size_are_refused(tmp_path) -> None:
    first = open_tier(tmp_path)
    assert put(first, 1) is None
    first.close()
    second = disks.DiskTier(
        tmp_path, IDENTITY, 10**6, secret=SECRET, state_bytes=STATE_BYTES + 1, kv_bytes=KV_BYTES
    )
    assert second.stats().not_recovered == {"payload_bytes": 1}
    second.close()


def test_an_entry_that_is_there_twice_is_found_once(tmp_path) -> None:
    first = open_tier(tmp_path)
    assert put(first, 1) is None
    assert put(first, 2) is None
    first.close()
    file = state_file(tmp_path)
    row = row_bytes_of(STATE_BYTES)
    data = bytearray(file.read_bytes())
    data[row : 2 * row] = data[:row]
    file.write_bytes(data)
    second = open_tier(tmp_path)
    assert second.stats().recovered == 1
    assert load(second, 1) == payload_of(1)
    second.check_invariants()
    second.close()


def test_a_smaller_capacity_cuts_the_file(tmp_path) -> None:
    first = open_tier(tmp_path)
    for number in range(4):
        assert put(first, number) is None
    first.close()
    second = open_tier(tmp_path, states=2, blocks=1)
    assert second.stats().recovered == 2
    assert second.stats().ready_rows["state"] == 2
    assert [load(second, number) for number in (0, 1)] == [payload_of(0), payload_of(1)]
    second.close()


# Damage. The first state is in row 0: a page with the header, and three pages with the payload.

DAMAGE = {
    "a bit of the payload": (PAGE_BYTES + 77, b"\x00\x01", Refusal.MAC),
    "the payload's last byte": (PAGE_BYTES + STATE_BYTES - 2, b"\x00\x01", Refusal.MAC),
    "a bit of the header": (60, b"\x00\x01", Refusal.MAC),
    "zeroes": (0, bytes(row_bytes_of(STATE_BYTES)), Refusal.MAGIC),
    "the version": (8, b"\x07", Refusal.VERSION),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_behind_its_back_is_refused_by_name(tier, tmp_path, damage) -> None:
    offset, data, reason = DAMAGE[damage]
    assert put(tier, 0) is None
    assert put(tier, 1) is None
    with state_file(tmp_path).open("r+b") as file:
        file.seek(offset)
        before = file.read(len(data))
        file.seek(offset)
        file.write(
            bytes(a ^ b for a, b in zip(before, data, strict=True)) if len(data) == 2 else data
        )
    assert load(tier, 0) is reason
    assert tier.stats().refused == {reason.value: 1}
    assert has(tier, 0) == [False]
    assert load(tier, 1) == payload_of(1)
    tier.close()
    again = open_tier(tmp_path)
    assert has(again, 0, 1) == [False, True]
    assert put(again, 0) is None
    assert load(again, 0) == payload_of(0)
    again.close()


def test_an_older_entry_of_the_row_is_refused(tier, tmp_path) -> None:
    """A write that the disk said it had done, and had not."""
    assert put(tier, 0) is None
    row = row_bytes_of(STATE_BYTES)
    old = state_file(tmp_path).read_bytes()[:row]
    assert load(tier, 0, prefix_tokens=5) is Refusal.PREFIX_TOKENS
    for number in (1, 2, 3, 0):
        assert put(tier, number) is None
    with state_file(tmp_path).open("r+b") as file:
        file.seek(0)
        header = EntryHeader.read(file.read(row), EntryMacs(SECRET).header_key(IDENTITY.digest))
        assert header.facts == facts_of(0)
        file.seek(0)
        file.write(old)
    assert load(tier, 0) is Refusal.GENERATION


# What the system refuses.


def failing(error, *, times=None):
    """A stand-in for a system call that fails, so many times or for ever."""
    left = [times]

    def call(*_):
        if left[0] == 0:
            return original(*_)
        left[0] = None if left[0] is None else left[0] - 1
        raise OSError(error, os.strerror(error))

    original = None

    def patch(monkeypatch, name):
        nonlocal original
        original = getattr(os, name)
        monkeypatch.setattr(slabs.os, name, call)

    call.patch = patch
    return call


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_failed_write_is_counted_and_not_findable(tier, monkeypatch, call) -> None:
    failing(errno.EIO, times=1).patch(monkeypatch, call)
    assert put(tier, 1) is Refusal.IO_ERROR
    assert has(tier, 1) == [False]
    assert tier.stats().dropped == {"io_error": 1}
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_a_short_write_is_no_entry(tier, monkeypatch) -> None:
    write, calls = os.pwritev, []

    def one_page(fd, buffers, offset):
        calls.append(offset)
        return write(fd, [buffers[0][:PAGE_BYTES]], offset) if len(calls) == 1 else 0

    monkeypatch.setattr(slabs.os, "pwritev", one_page)
    assert put(tier, 1) is Refusal.IO_ERROR
    assert has(tier, 1) == [False]


def test_a_header_that_cannot_be_erased_is_counted(tier, monkeypatch) -> None:
    assert put(tier, 1) is None
    monkeypatch.setattr(slabs.os, "pwritev", lambda *_: 0)
    assert load(tier, 1, prefix_tokens=1) is Refusal.PREFIX_TOKENS
    assert tier.stats().io_errors == 1
    assert has(tier, 1) == [False]


def test_transfers_in_parts_are_put_together(tier, monkeypatch) -> None:
    """The kernel may move less than was asked for."""
    write, read = os.pwritev, os.preadv

    def first_page(call):
        def moved(fd, buffers, offset):
            return call(fd, [buffers[0][:PAGE_BYTES]], offset)

        return moved

    monkeypatch.setattr(slabs.os, "pwritev", first_page(write))
    monkeypatch.setattr(slabs.os, "preadv", first_page(read))
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_after_two_failures_the_disk_is_left_alone_for_a_while(tier, monkeypatch, clock) -> None:
    assert put(tier, 0) is None
    reads = failing(errno.EIO)
    reads.patch(monkeypatch, "preadv")
    assert put(tier, 1) is None
    assert load(tier, 0) is Refusal.IO_ERROR
    assert tier.is_healthy
    assert load(tier, 1) is Refusal.IO_ERROR
    assert not tier.is_healthy
    assert has(tier, 0, 1) == [False, False]
    assert load(tier, 0) is False
    assert put(tier, 2) is False
    assert tier.stats().dropped == {"unhealthy": 1}
    monkeypatch.undo()
    monkeypatch.setattr(disks, "time", clock)
    clock.now += 4.75
    assert not tier.is_healthy
    clock.now += 0.25
    assert tier.is_healthy
    assert put(tier, 2) is None
    assert load(tier, 2) == payload_of(2)


def test_times_add_up(tier, monkeypatch, clock) -> None:
    def taking(seconds, call):
        def take(*arguments):
            clock.now += seconds
            return call(*arguments)

        return take

    monkeypatch.setattr(SlabFile, "write", taking(3, SlabFile.write))
    monkeypatch.setattr(SlabFile, "read", taking(5, SlabFile.read))
    for number in range(2):
        assert put(tier, number) is None
        assert load(tier, number) == payload_of(number)
    assert (tier.stats().write_seconds, tier.stats().read_seconds) == (6, 10)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_counted_and_survived(tier, monkeypatch, clock, error) -> None:
    failing(error).patch(monkeypatch, "posix_fallocate")
    assert put(tier, 1) is Refusal.IO_ERROR
    assert put(tier, 2) is Refusal.IO_ERROR
    stats = tier.stats()
    assert stats.dropped == {"disk_full": 2}
    assert stats.io_errors == 0
    assert tier.is_healthy
    monkeypatch.undo()
    monkeypatch.setattr(disks, "time", clock)
    clock.now += 4.75
    assert put(tier, 3) is Refusal.IO_ERROR  # not asked again at once
    clock.now += 0.25
    assert put(tier, 3) is None
    assert load(tier, 3) == payload_of(3)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_disk_that_is_full_only_when_it_is_written_can_still_be_read(
    tier, monkeypatch, clock, call, error
) -> None:
    """File systems that take no room ahead, as those of networks, say so then."""
    assert put(tier, 1) is None
    failing(error).patch(monkeypatch, call)
    for number in (2, 3, 4):
        assert put(tier, number) is Refusal.IO_ERROR
    assert tier.stats().dropped == {"disk_full": 3}
    assert (tier.stats().io_errors, tier.is_healthy) == (0, True)
    assert load(tier, 1) == payload_of(1)
    monkeypatch.undo()
    monkeypatch.setattr(disks, "time", clock)
    assert put(tier, 2) is None
    failing(errno.EIO, times=1).patch(monkeypatch, call)
    clock.now += 6
    assert put(tier, 3) is Refusal.IO_ERROR
    assert tier.stats().dropped == {"disk_full": 3, "io_error": 1}


def test_a_disk_that_is_nearly_full_gives_what_it_has(tier, monkeypatch) -> None:
    allocate = os.posix_fallocate

    def only_two_rows(fd, start, size):
        if size > 2 * row_bytes_of(STATE_BYTES):
            raise OSError(errno.ENOSPC, "full")
        allocate(fd, start, size)

    monkeypatch.setattr(slabs.os, "posix_fallocate", only_two_rows)
    for number in range(5):
        assert put(tier, number) is None
    assert tier.stats().ready_rows["state"] == 2
    assert tier.stats().evicted == 3


def test_a_file_that_cannot_grow_is_an_error_of_the_disk(tier, monkeypatch) -> None:
    failing(errno.EIO).patch(monkeypatch, "posix_fallocate")
    assert put(tier, 1) is Refusal.IO_ERROR
    assert tier.stats().io_errors == 2


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_takes_no_room_ahead_will_do(tier, monkeypatch, error) -> None:
    failing(error).patch(monkeypatch, "posix_fallocate")
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_a_file_system_without_direct_reads_is_used_and_told(tmp_path, monkeypatch) -> None:
    system_open = os.open

    def refuse_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct input and output")
        return system_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(slabs.os, "open", refuse_direct)
    tier = open_tier(tmp_path)
    assert not tier.stats().is_direct
    assert put(tier, 1) is None
    assert load(tier, 1, offset=3) == payload_of(1)
    tier.close()


def test_direct_reads_are_used_where_there_are_any(tmp_path) -> None:
    """As on ext4, xfs, and on tmpfs of newer kernels."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        expected = False
    else:
        expected = True
    tier = open_tier(tmp_path)
    assert tier.stats().is_direct is expected
    tier.close()


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path, monkeypatch) -> None:
    system_open = os.open

    def no_slab(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise PermissionError(errno.EACCES, "no slab")
        return system_open(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(slabs.os, "open", no_slab)
        with pytest.raises(PermissionError, match="no slab"):
            open_tier(tmp_path)
    with monkeypatch.context() as patch:
        failing(errno.EIO).patch(patch, "ftruncate")
        with pytest.raises(OSError, match="Input/output"):
            open_tier(tmp_path)
    open_tier(tmp_path).close()  # nothing was left open
    slab = state_file(tmp_path)
    slab.write_bytes(bytes(100 * row_bytes_of(STATE_BYTES)))
    monkeypatch.setattr(slabs.os, "ftruncate", cut_fails(os.ftruncate))
    with pytest.raises(OSError, match="cannot be cut"):
        open_tier(tmp_path)
    monkeypatch.undo()
    open_tier(tmp_path).close()


def cut_fails(truncate):
    def call(fd, size):
        if size:
            raise OSError(errno.EIO, "cannot be cut")
        truncate(fd, size)

    return call


def test_headers_that_cannot_be_read_at_the_start_are_counted(tmp_path, monkeypatch) -> None:
    tier = open_tier(tmp_path)
    for number in range(2):
        assert put(tier, number) is None
    tier.close()
    failing(errno.EIO, times=1).patch(monkeypatch, "preadv")
    again = open_tier(tmp_path, num_readers=1)
    assert again.stats().not_recovered == {"io_error": 1}
    assert again.stats().recovered == 1
    again.close()


# One user at a time.


def test_a_second_user_of_a_folder_is_refused(tier, tmp_path) -> None:
    with pytest.raises(TierInUseError, match=f"in use by process {os.getpid()}"):
        open_tier(tmp_path)
    other = open_tier(tmp_path, identity=make_identity("other weights"))  # kept apart
    other.close()


def test_a_second_process_is_refused_and_the_first_ones_end_frees_the_folder(tmp_path) -> None:
    fork = get_context("fork")
    here, there = fork.Pipe()

    def hold() -> None:
        there.send(put(open_tier(tmp_path), 1))
        there.recv()  # nothing comes

    process = fork.Process(target=hold, daemon=True)
    process.start()
    assert here.recv() is None
    with pytest.raises(TierInUseError, match=f"in use by process {process.pid}"):
        open_tier(tmp_path)
    process.kill()
    process.join()
    tier = open_tier(tmp_path)
    assert load(tier, 1) == payload_of(1)
    tier.close()


def test_a_folder_that_is_removed_while_it_is_opened_is_not_used(tmp_path, monkeypatch) -> None:
    open_tier(tmp_path).close()
    folder = folder_of(tmp_path, IDENTITY)
    monkeypatch.setattr(directories, "_is_same_file", lambda *_: False)
    with pytest.raises(TierInUseError, match="was removed"):
        directories.FolderLock(folder)
    monkeypatch.undo()
    lock = directories.FolderLock(folder)
    (folder / "lock").rename(folder / "elsewhere")
    assert not directories._is_same_file(lock._fd, folder / "lock")
    lock.release()


def test_who_only_looks_whether_a_folder_is_held_is_in_nobodys_way(tmp_path, monkeypatch) -> None:
    """It holds the lock for a moment, so a second try comes a little later."""
    open_tier(tmp_path).close()
    folder, slept = folder_of(tmp_path, IDENTITY), []
    looking = os.open(folder / "lock", os.O_RDWR)
    assert directories._is_held(looking)

    def sleep(seconds):
        slept.append(seconds)
        if seconds:
            os.close(looking)

    monkeypatch.setattr(directories, "time", SimpleNamespace(sleep=sleep))
    directories.FolderLock(folder).release()
    assert slept == [0, directories._PATIENCE]


def test_folders_of_others_make_room_the_least_recently_opened_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(slabs, "_GROWTH_BYTES", 1)  # one row at once
    others = [make_identity(f"weights {number}") for number in range(3)]
    for age, identity in enumerate(others):
        fill_other(tmp_path, f"weights {age}")[0].close()
        os.utime(folder_of(tmp_path, identity), (1000 + age, 1000 + age))
    held = open_tier(tmp_path, identity=others[0], states=8)
    os.utime(held.folder, (1, 1))
    tier = open_tier(tmp_path, states=4)
    for number in range(4):
        assert put(tier, number) is None
    there = {each.path for each in folders(tmp_path)}
    assert there == {tier.folder, held.folder, folder_of(tmp_path, others[2])}
    assert sum(each.num_bytes for each in folders(tmp_path)) <= capacity_for(4) + 2 * PAGE_BYTES
    assert load(held, 1, identity=others[0]) == payload_of(1)
    held.close()
    tier.close()


def test_room_that_others_use_is_not_taken(tmp_path, monkeypatch, clock) -> None:
    other, _ = fill_other(tmp_path)
    tier = open_tier(tmp_path, states=2, blocks=2)
    assert put(tier, 1) is Refusal.IO_ERROR
    assert tier.stats().dropped == {"disk_full": 1}
    other.close()
    clock.now += 6
    assert put(tier, 1) is None
    tier.close()


def test_nobody_makes_room_where_there_is_just_enough(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(slabs, "_GROWTH_BYTES", 1)  # one row at once
    identity = make_identity("other weights")
    open_tier(tmp_path, identity=identity, states=8).close()
    tier = open_tier(tmp_path, states=2, blocks=2)
    left = capacity_for(2, 2) - row_bytes_of(STATE_BYTES)
    of_others = [replace(each, num_bytes=left) for each in folders(tmp_path)]
    monkeypatch.setattr(disks, "folders", lambda path: of_others)
    assert put(tier, 1) is None
    assert folder_of(tmp_path, identity).exists()
    tier.close()


def test_a_folder_that_somebody_opens_meanwhile_is_left(tmp_path, monkeypatch, clock) -> None:
    other, identity = fill_other(tmp_path)
    tier = open_tier(tmp_path, states=2, blocks=2)
    monkeypatch.setattr(directories, "_is_in_use", lambda folder: False)
    assert put(tier, 1) is Refusal.IO_ERROR
    assert load(other, 1, identity=identity) == payload_of(1)
    other.close()
    tier.close()


def test_behind_a_folder_that_cannot_be_removed_another_makes_room(tmp_path, monkeypatch) -> None:
    others = [fill_other(tmp_path, f"weights {number}", states=2)[0] for number in range(2)]
    for age, other in enumerate(others):
        os.utime(other.folder, (1000 + age, 1000 + age))
    others[1].close()
    tier = open_tier(tmp_path, states=2, blocks=2)
    monkeypatch.setattr(directories, "_is_in_use", lambda folder: False)
    assert put(tier, 1) is None
    assert {each.path for each in folders(tmp_path)} == {tier.folder, others[0].folder}
    others[0].close()
    tier.close()


def test_folders_are_listed_and_removed(tmp_path) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no directory"):
        folders(tmp_path / "nowhere")
    assert folders(tmp_path) == []
    tier = open_tier(tmp_path)
    [folder] = folders(tmp_path)
    assert (folder.identity, folder.is_in_use) == (IDENTITY, True)
    with pytest.raises(TierInUseError):
        remove_folder(folder)
    tier.close()
    [folder] = folders(tmp_path)
    assert not folder.is_in_use
    (folder.path / "lock").unlink()
    assert not folders(tmp_path)[0].is_in_use
    remove_folder(folder)
    assert folders(tmp_path) == []


def test_a_folder_in_which_nothing_can_be_written_is_not_held(tmp_path, monkeypatch) -> None:
    def refuse(*_):
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(directories.os, "utime", refuse)
        with pytest.raises(OSError, match="read-only"):
            open_tier(tmp_path)
    open_tier(tmp_path).close()


def test_a_path_that_is_deleted_while_it_is_used_hangs_nobody(tmp_path) -> None:
    tier = open_tier(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    answer = Answer()
    assert tier.put(facts_of(1), payload_of(1), answer)
    assert tier.flush(60)
    assert answer.calls == [Refusal.IO_ERROR]
    assert tier.stats().dropped == {"disk_full": 1}
    assert tier.stats().io_errors > 0
    tier.check_invariants()
    tier.close()


def refuse_to_look(error):
    def look(folder):
        raise error(errno.ENOENT if error is FileNotFoundError else errno.EACCES, "no look")

    return look


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_folders_that_go_or_may_not_be_read_are_left_and_in_nobodys_way(
    tmp_path, monkeypatch, error
) -> None:
    """Of two processes that make room at once, one finds a folder that is gone."""
    open_tier(tmp_path, identity=make_identity("other weights")).close()
    tier = open_tier(tmp_path)
    monkeypatch.setattr(directories, "_is_in_use", refuse_to_look(error))
    assert folders(tmp_path) == []
    assert put(tier, 1) is None
    assert tier.stats().io_errors == 0
    tier.close()


def test_a_folder_that_cannot_be_deleted_is_a_full_disk(tmp_path, monkeypatch) -> None:
    """And not an error of this one, of which nothing would be asked after two."""
    other, _ = fill_other(tmp_path)
    other.close()
    tier = open_tier(tmp_path, states=2, blocks=2)
    monkeypatch.setattr(disks, "remove_folder", refuse_to_look(PermissionError))
    assert put(tier, 1) is Refusal.IO_ERROR
    assert tier.stats().dropped == {"disk_full": 1}
    assert (tier.stats().io_errors, tier.is_healthy) == (0, True)
    tier.close()


def test_a_disk_is_full_however_late_that_is_asked(tmp_path, monkeypatch) -> None:
    """The reason is that of the attempt, and not of a clock that is read behind it."""
    other, _ = fill_other(tmp_path)
    tier = open_tier(tmp_path, states=2, blocks=2)
    monkeypatch.setattr(disks, "_REST_SECONDS", 0.0)
    assert put(tier, 1) is Refusal.IO_ERROR
    assert tier.stats().dropped == {"disk_full": 1}
    tier.close()
    other.close()


def test_a_forked_process_that_lives_on_does_not_keep_the_folder(tmp_path) -> None:
    """It has the lock's file open as well; nor does it let the folder go when it ends."""
    tier = open_tier(tmp_path)
    child = os.fork()
    if not child:
        tier._folder_lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(TierInUseError):
        open_tier(tmp_path)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    tier.close()
    try:
        open_tier(tmp_path).close()
    finally:
        os.close(writes)
        os.close(reads)
        os.waitpid(child, 0)


# Threads.


def test_one_flight_for_each_key_and_queues_with_an_end(tmp_path, monkeypatch) -> None:
    tier = open_tier(tmp_path, max_queued=1, num_readers=1)
    assert put(tier, 8, KV) is None
    syncs, reads = (Gate(monkeypatch, SlabFile, name) for name in ("sync", "read"))
    puts = [Answer() for _ in range(2)]
    assert tier.put(facts_of(0), payload_of(0), puts[0])
    syncs.wait_for(1)
    assert not tier.put(facts_of(0), payload_of(0), Answer())
    assert tier.put(facts_of(1), payload_of(1), puts[1])
    assert not tier.put(facts_of(2), payload_of(2), Answer())
    assert has(tier, 0) == [False]  # not before it is on the disk
    loads, facts = [Answer() for _ in range(2)], facts_of(8, KV)
    assert tier.load(facts, buffer_for(facts), loads[0])
    reads.wait_for(1)
    assert tier.load(facts, buffer_for(facts), loads[1])
    assert not tier.load(facts, buffer_for(facts), Answer())
    assert tier.num_queued == 4
    assert not tier.flush(0)
    syncs.open()
    reads.open()
    assert tier.flush()
    assert tier.num_queued == 0
    assert [each.get() for each in puts + loads] == [None] * 4
    assert tier.stats().dropped == {"in_flight": 1, "queue_full": 1}
    tier.close()


def test_rows_that_are_read_are_not_given_away(tmp_path, monkeypatch) -> None:
    tier = open_tier(tmp_path, states=1, blocks=1)
    assert put(tier, 0) is None
    gate = Gate(monkeypatch, SlabFile, "read")
    answer, into = Answer(), buffer_for(facts_of(0))
    assert tier.load(facts_of(0), into, answer)
    gate.wait_for(1)
    assert put(tier, 1) is Refusal.IO_ERROR
    assert tier.stats().dropped == {"no_row": 1}
    gate.open()
    assert answer.get() is None
    assert into == payload_of(0)
    assert tier.flush()
    assert put(tier, 1) is None
    tier.close()


def test_closing_gives_up_what_is_queued_and_says_so(tmp_path, monkeypatch) -> None:
    tier = open_tier(tmp_path, num_readers=1)
    assert put(tier, 8, KV) is None
    syncs, reads = (Gate(monkeypatch, SlabFile, name) for name in ("sync", "read"))
    facts = facts_of(8, KV)
    puts, loads = [Answer(), Answer()], [Answer(), Answer()]
    assert tier.put(facts_of(0), payload_of(0), puts[0])
    assert tier.load(facts, buffer_for(facts), loads[0])
    syncs.wait_for(1)
    reads.wait_for(1)
    assert tier.put(facts_of(1), payload_of(1), puts[1])
    assert tier.load(facts, buffer_for(facts), loads[1])
    closing = threading.Thread(target=tier.close)
    closing.start()
    while tier.is_healthy:
        pass
    assert not tier.put(facts_of(2), payload_of(2), Answer())
    assert not tier.load(facts, buffer_for(facts), Answer())
    assert has(tier, 8, kind=KV) == [False]
    syncs.open()
    reads.open()
    closing.join()
    assert [each.get() for each in puts] == [None, Refusal.ABORTED]
    assert [each.get() for each in loads] == [None, Refusal.ABORTED]
    assert tier.stats().dropped == {"aborted": 1, "unhealthy": 1}
    tier.check_invariants()
    tier.close()  # again: nothing
    open_tier(tmp_path).close()


def test_an_error_of_the_callers_is_shown_and_ends_nothing(tier, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    def broken(refusal):
        raise ZeroDivisionError(refusal)

    assert tier.put(facts_of(1), payload_of(1), broken)
    assert tier.flush()
    assert tier.load(facts_of(1), buffer_for(facts_of(1)), broken)
    assert tier.flush()
    assert [each.exc_type for each in shown] == [ZeroDivisionError] * 2
    assert load(tier, 1) == payload_of(1)


@pytest.mark.parametrize("job", ["load", "put", "put that fails"])
def test_flush_waits_until_who_asked_has_been_told(tier, monkeypatch, job) -> None:
    """A caller who flushes and then looks at its answers finds all of them."""
    is_told, goes_on = threading.Event(), threading.Event()

    def done(_answer):
        is_told.set()
        assert goes_on.wait(60)

    if job == "load":
        assert put(tier, 1) is None
        assert tier.load(facts_of(1), buffer_for(facts_of(1)), done)
    else:
        if job != "put":
            failing(errno.EIO, times=1).patch(monkeypatch, "pwritev")
        assert tier.put(facts_of(1), payload_of(1), done)
    assert is_told.wait(60)
    tier.check_invariants()
    assert not tier.flush(0.01)
    goes_on.set()
    assert tier.flush(60)


def test_the_bookkeeping_agrees_at_any_moment(tier) -> None:
    """Contexts and prefix caches prove it while threads are at work."""
    answers = []
    for number in range(300):
        facts = facts_of(number % 7)
        tier.put(facts, payload_of(number % 7), answers.append)
        tier.check_invariants()
        tier.load(facts, buffer_for(facts), answers.append)
        tier.check_invariants()
        stats = tier.stats()
        assert stats.loads >= stats.restored + sum(stats.refused.values())
    assert tier.flush(60)
    tier.check_invariants()
    stats = tier.stats()
    assert stats.loads == stats.restored + sum(stats.refused.values())
    assert stats.puts == 300


def test_rows_that_nobody_asked_for_are_noticed(tier) -> None:
    assert put(tier, 1) is None
    assert tier.flush()
    rows = tier._files[STATE].rows
    lease = rows.read(next(iter(rows.digests())))
    with pytest.raises(InvariantError, match="held for nobody"):
        tier.check_invariants()
    rows.release(lease)


def test_what_is_known_to_be_wrong_is_not_found_again_nor_recovered(tmp_path) -> None:
    tier = open_tier(tmp_path)
    assert [put(tier, number) for number in (1, 2)] == [None, None]
    for key in (facts_of(1).key, facts_of(3).key, facts_of(2, rank=1).key):
        tier.remove(key)
    assert has(tier, 1, 2) == [False, True]
    assert load(tier, 1) is Refusal.MISSING
    tier.close()
    tier.remove(facts_of(2).key)  # it has ended
    again = open_tier(tmp_path)
    assert has(again, 1, 2) == [False, True]
    again.close()


def test_what_is_removed_as_it_closes_is_removed(tmp_path, monkeypatch) -> None:
    """But not what comes just too late to be taken."""
    tier = open_tier(tmp_path, num_readers=1)
    assert [put(tier, number) for number in (1, 2)] == [None, None]
    gate = Gate(monkeypatch, SlabFile, "read")
    answer = Answer()
    assert tier.load(facts_of(2), buffer_for(facts_of(2)), answer)
    gate.wait_for(1)
    tier.remove(facts_of(1).key)
    assert tier.num_queued == 2
    closing = threading.Thread(target=tier.close)
    closing.start()
    while tier.is_healthy:
        pass
    monkeypatch.setattr(disks.DiskTier, "is_healthy", True)
    tier.remove(facts_of(2).key)
    gate.open()
    closing.join(60)
    assert answer.get() is None
    monkeypatch.undo()
    again = open_tier(tmp_path)
    assert has(again, 1, 2) == [False, True]
    again.close()


def test_an_entry_that_is_given_up_while_its_load_waits_is_a_miss(tmp_path, monkeypatch) -> None:
    tier = open_tier(tmp_path, states=1, blocks=1, num_readers=1)
    assert [put(tier, 1), put(tier, 2, KV)] == [None, None]
    gate = Gate(monkeypatch, SlabFile, "read")
    answers = [Answer(), Answer()]
    assert tier.load(facts_of(2, KV), buffer_for(facts_of(2, KV)), answers[0])
    gate.wait_for(1)
    into = buffer_for(facts_of(1))
    assert tier.load(facts_of(1), into, answers[1])
    assert put(tier, 3) is None
    gate.open()
    assert [answer.get() for answer in answers] == [None, Refusal.MISSING]
    assert bytes(into) == b"\xff" * len(into)
    assert tier.flush()
    assert tier.stats().refused == {"missing": 1}
    tier.close()


def test_a_bug_while_reading_is_shown_and_is_a_miss(tier, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    assert put(tier, 1) is None
    with monkeypatch.context() as patch:
        patch.setattr(PayloadMac, "part", None)
        assert load(tier, 1) is Refusal.IO_ERROR
    assert [each.exc_type for each in shown] == [TypeError]
    assert put(tier, 1) is None


# Settings.


def test_settings_are_checked(tmp_path) -> None:
    usual = {"secret": SECRET, "state_bytes": STATE_BYTES, "kv_bytes": KV_BYTES}
    for change, error, message in (
        ({"state_bytes": 0, "kv_bytes": 0}, InvalidArgumentError, "both are 0"),
        ({"state_bytes": -1}, InvalidArgumentError, "state_bytes must be"),
        ({"kv_bytes": 10**7}, BudgetError, "50% of it is for kv entries"),
        ({"state_share": 1.0}, BudgetError, "0% of it is for kv entries"),
        ({"state_share": 2}, InvalidArgumentError, "state_share must be"),
        ({"write_on_use": 3}, InvalidArgumentError, "write_on_use must be"),
        ({"num_readers": 0}, InvalidArgumentError, "num_readers must be"),
        ({"max_queued": 0}, InvalidArgumentError, "max_queued must be"),
        ({"secret": b""}, InvalidArgumentError, "secret must be"),
        ({"secret": "text"}, InvalidArgumentError, "secret must be"),
    ):
        with pytest.raises(error, match=message):
            disks.DiskTier(tmp_path, IDENTITY, 10**6, **(usual | change))
    for identity, capacity, name in (("i", 10**6, "identity"), (IDENTITY, -1, "capacity_bytes")):
        with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
            disks.DiskTier(tmp_path, identity, capacity, **usual)
    assert list(tmp_path.iterdir()) == []


def test_one_kind_alone_has_the_whole_capacity(tmp_path) -> None:
    row = row_bytes_of(STATE_BYTES)
    tier = disks.DiskTier(
        tmp_path,
        IDENTITY,
        3 * row,
        secret=SECRET,
        state_bytes=STATE_BYTES,
        kv_bytes=0,
        write_on_use=1,
    )
    assert tier.stats().rows == {"state": 3}
    assert load(tier, 1) is Refusal.MISSING
    assert tier.has_many([facts_of(1, KV).key]) == [False]
    with pytest.raises(InvalidArgumentError, match="a kv must have None bytes"):
        tier.load(facts_of(1, KV), payload_of(1, KV), Answer())
    tier.close()


@pytest.mark.parametrize(("num_cpus", "readers"), [(None, 8), (2, 8), (12, 12), (64, 16)])
def test_there_are_as_many_readers_as_processors(tmp_path, monkeypatch, num_cpus, readers) -> None:
    """Whoever reads digests what was read; a disk wants several reads at once in any case."""
    monkeypatch.setattr(disks.os, "cpu_count", lambda: num_cpus)
    tier = open_tier(tmp_path, num_readers=None)
    assert len(tier._readers) == readers
    tier.close()


# Parts of rows.


def in_parts_of(monkeypatch, num_bytes):
    """Have parts of so many bytes, in what is read and in digests."""
    monkeypatch.setattr(entries, "PART_BYTES", num_bytes)


def have_three_parts(monkeypatch):
    """Have states of three parts: a page each, and the rest."""
    in_parts_of(monkeypatch, PAGE_BYTES)
    monkeypatch.setattr(disk_rig, "STATE_BYTES", 3 * PAGE_BYTES + 77)


@pytest.mark.parametrize("has_readers", [False, True])
def test_a_payload_of_several_parts_is_seen_part_by_part_and_verified(
    tmp_path, monkeypatch, has_readers
):
    """Whoever reads a part hashes it: all of them, each once, by their numbers."""
    in_parts_of(monkeypatch, 2 * PAGE_BYTES)
    for size in (100, 4 * PAGE_BYTES, 4 * PAGE_BYTES + 100, 5 * PAGE_BYTES + 100):
        payload = memoryview(bytearray(random.Random(3).randbytes(size)))
        slab = SlabFile(tmp_path / f"slab {size}", size, max_rows=2)
        slab.grow(2)
        slab.write(1, b"header", payload)
        with ThreadPoolExecutor(4) as readers:
            submit = readers.submit if has_readers else None
            for shift in (0, 1):  # at an address of a page's, and at none
                into = memoryview(mmap.mmap(-1, size + PAGE_BYTES))[shift : shift + size]
                parts: list[tuple[int, bytes]] = []
                page = slab.read(1, into, submit, lambda *part: parts.append(part))  # noqa: B023
                assert page.rstrip(b"\0") == b"header"
                assert into == payload
                parts.sort(key=lambda part: part[0])
                assert [number for number, _ in parts] == [*range(max(1, size // (2 * PAGE_BYTES)))]
                assert b"".join(part for _, part in parts) == payload
            os.truncate(tmp_path / f"slab {size}", 2 * slab.row_bytes - PAGE_BYTES)
            assert slab.read(1, into, submit) == b""
        slab.close()


@pytest.fixture
def three_parts(tmp_path, monkeypatch):
    """A tier with four readers, of states of three parts."""
    have_three_parts(monkeypatch)
    tier = open_tier(tmp_path, num_readers=4)
    yield tier
    tier.check_invariants()
    assert not any(file.rows.leases for file in tier._files.values())
    assert tier.num_queued == 0
    tier.close()


def test_the_parts_of_a_row_are_read_at_once(three_parts, monkeypatch) -> None:
    """No read goes on before all three are asked for; and they end in the other order."""
    read, all_there = os.preadv, threading.Barrier(3)
    ended = [threading.Event() for _ in range(4)]
    ended[3].set()
    offsets = []

    def together(fd, buffers, offset):
        part = max(0, offset // PAGE_BYTES - 1)
        offsets.append(part)
        all_there.wait(60)
        assert ended[part + 1].wait(60)
        moved = read(fd, buffers, offset)
        ended[part].set()
        return moved

    assert put(three_parts, 0) is None
    monkeypatch.setattr(slabs.os, "preadv", together)
    assert load(three_parts, 0) == payload_of(0)
    assert sorted(offsets) == [0, 1, 2]
    assert three_parts.stats().restored == 1


def test_the_rows_of_a_prefix_share_the_readers(three_parts, monkeypatch) -> None:
    """Never are there more reads at once than readers; all are used."""
    read, lock, now, most = os.preadv, threading.Lock(), [], []
    all_there = threading.Barrier(4)

    def counted(fd, buffers, offset):
        with lock:
            now.append(offset)
            most.append(len(now))
        all_there.wait(60)  # 12 reads, by fours
        moved = read(fd, buffers, offset)
        with lock:
            now.remove(offset)
        return moved

    for number in range(4):
        assert put(three_parts, number) is None
    monkeypatch.setattr(slabs.os, "preadv", counted)
    answers = [Answer() for _ in range(4)]
    buffers = [buffer_for(facts_of(number)) for number in range(4)]
    for number, (answer, into) in enumerate(zip(answers, buffers, strict=True)):
        assert three_parts.load(facts_of(number), into, answer)
    assert [answer.get() for answer in answers] == [None] * 4
    assert buffers == [payload_of(number) for number in range(4)]
    assert (len(most), max(most)) == (12, 4)
    assert three_parts.flush()


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("is_short", [False, True])
def test_a_fault_in_one_part_fails_the_row_once(three_parts, monkeypatch, part, is_short) -> None:
    """The caller is told when the other parts are over, and nothing of the row is held."""
    read, failed, told = os.preadv, threading.Event(), threading.Event()
    under_way, lock = [], threading.Lock()

    def one_fails(fd, buffers, offset):
        mine = max(0, offset // PAGE_BYTES - 1)
        with lock:
            under_way.append(mine)
        try:
            if mine == part:
                failed.set()
                if is_short:
                    return 0
                raise OSError(errno.EIO, "a part")
            assert failed.wait(60)
            told.wait(0.1)  # in vain: it must not be told before this one is over
            return read(fd, buffers, offset)
        finally:
            with lock:
                under_way.remove(mine)

    assert put(three_parts, 0) is None
    assert put(three_parts, 1) is None
    calls = []

    def done(refusal):
        calls.append((refusal, list(under_way)))
        told.set()

    into = buffer_for(facts_of(0))
    with monkeypatch.context() as patch:
        patch.setattr(slabs.os, "preadv", one_fails)
        assert three_parts.load(facts_of(0), into, done)
        assert three_parts.flush()
    reason = Refusal.SHORT if is_short else Refusal.IO_ERROR
    assert calls == [(reason, [])]
    stats = three_parts.stats()
    assert (stats.refused, stats.io_errors) == ({reason.value: 1}, 0 if is_short else 1)
    assert has(three_parts, 0) == [False]
    assert load(three_parts, 1) == payload_of(1)
    assert put(three_parts, 0) is None
    assert load(three_parts, 0) == payload_of(0)


def test_parts_of_a_row_that_failed_are_called_off(tmp_path, monkeypatch) -> None:
    """One reader: the first part fails, the second is under way, the third is not begun."""
    have_three_parts(monkeypatch)
    tier = open_tier(tmp_path, num_readers=1)
    assert put(tier, 0) is None
    assert put(tier, 1) is None
    read, wait, begun, called_off = os.preadv, slabs.wait, [], threading.Event()

    def one_fails(fd, buffers, offset):
        begun.append(max(0, offset // PAGE_BYTES - 1))
        if len(begun) == 1:
            raise OSError(errno.EIO, "the first part")
        assert called_off.wait(60)
        return read(fd, buffers, offset)

    def wait_for_those_under_way(reads):
        called_off.set()
        return wait(reads)

    with monkeypatch.context() as patch:
        patch.setattr(slabs.os, "preadv", one_fails)
        patch.setattr(slabs, "wait", wait_for_those_under_way)
        assert load(tier, 0) is Refusal.IO_ERROR
        assert begun in ([0], [0, 1])  # the second too, if its reader was late
    assert load(tier, 1) == payload_of(1)
    tier.check_invariants()
    tier.close()


@pytest.mark.parametrize("kind", EntryKind)
def test_a_failed_read_keeps_nothing_of_the_callers_buffer(three_parts, monkeypatch, kind) -> None:
    """Nor does it wait for the collector of cycles: buffers may be gigabytes."""
    facts = facts_of(0, kind)
    assert put(three_parts, 0, kind) is None
    failing(errno.EIO).patch(monkeypatch, "preadv")
    memory = mmap.mmap(-1, facts.payload_bytes)
    into, answer = memoryview(memory), Answer()
    gc.disable()
    try:
        assert three_parts.load(facts, into, answer)
        assert answer.get() is Refusal.IO_ERROR
        assert three_parts.flush()
        into.release()
        pause = threading.Event()
        for _ in range(6000):  # a reader may not be back at its queue yet
            with suppress(BufferError):
                memory.close()  # refused while a view of it is left
                break
            pause.wait(0.01)
        assert memory.closed
    finally:
        gc.enable()
