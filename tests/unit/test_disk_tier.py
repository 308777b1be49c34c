"""The disk tier: stored entries are found again and verified, also in the next process.

Tests common to the disk and store tiers are in test_lower_tier.py.
"""

import errno
import gc
import mmap
import os
import shutil
import threading
from contextlib import suppress
from multiprocessing import get_context

import pytest
from clocks import ManualClock
from disk_rig import (
    IDENTITY,
    KV_BYTES,
    STATE_BYTES,
    Answer,
    Gate,
    buffer_for,
    capacity_for,
    change_file,
    entry_files,
    facts_of,
    file_of,
    load,
    make_identity,
    open_tier,
    payload_of,
    put,
)

from mamba_cache import InvalidArgumentError
from mamba_cache.errors import BudgetError, InvariantError, TierInUseError
from mamba_cache.stores import StoreFault
from mamba_cache.tiers import Refusal, lower
from mamba_cache.tiers import directory as directories
from mamba_cache.tiers import disk as disks
from mamba_cache.tiers.directory import folder_of, folders, remove_folder
from mamba_cache.tiers.disk import PAGE_BYTES, DiskStore, file_bytes
from mamba_cache.tiers.entry import HEADER_BYTES, EntryKind
from mamba_cache.tiers.lower import LowerTier

STATE, KV = EntryKind.STATE, EntryKind.KV


@pytest.fixture
def tier(tmp_path):
    """Return a tier with room for four states and four blocks."""
    tier = open_tier(tmp_path)
    yield tier
    tier.check_invariants()
    tier.close()


def has(tier, *numbers, kind=STATE):
    return tier.has_many([facts_of(number, kind).key for number in numbers])


def fill_other(path, weights="other weights", states=8):
    """Return a tier of another identity with an entry in the same path."""
    identity = make_identity(weights)
    other = open_tier(path, identity=identity, states=states)
    assert put(other, 1, identity=identity) is None
    return other


def files_in(path):
    """Return the file names of the entries."""
    return {file.name for file in entry_files(folder_of(path, IDENTITY))}


@pytest.fixture
def clock(monkeypatch):
    """Stop the tier's clock until the test sets ``now``."""
    clock = ManualClock()
    for module in (disks, lower):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize("kind", EntryKind)
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_an_entry_is_loaded_as_it_was_put(tier, kind, offset) -> None:
    """The buffer begins at a page, or at any other address."""
    facts, answer = facts_of(1, kind), Answer()
    payload = buffer_for(facts, offset=offset)
    payload[:] = payload_of(1, kind)
    assert tier.put(facts, payload, answer)
    assert answer.get() is None
    assert load(tier, 1, kind, offset=offset) == payload_of(1, kind)
    stats = tier.stats()
    assert (stats.puts, stats.stored, stats.loads, stats.restored) == (1, 1, 1, 1)
    assert stats.written_bytes == stats.read_bytes == len(payload)
    assert stats.entries == {"state": int(kind is STATE), "kv": int(kind is KV)}
    assert stats.disk_bytes == file_bytes(len(payload)) == stats.row_bytes[kind.name.lower()]
    assert stats.refused == stats.dropped == {}


def test_only_the_very_entry_is_found(tier) -> None:
    other = make_identity("other weights")
    assert put(tier, 1) is None
    assert has(tier, 1, kind=KV) == tier.has_many([facts_of(1, identity=other).key]) == [False]
    for change in ({"kind": KV}, {"tenant": b"u" * 16}):
        assert load(tier, 1, **change) is Refusal.MISSING
    tier.remove(facts_of(1, identity=other).key)
    assert tier.flush()
    assert load(tier, 1) == payload_of(1)
    for foreign in ({"identity": other}, {"rank": 1}):
        assert load(tier, 1, **foreign) is Refusal.MISSING
    assert tier.stats().refused == {"missing": 4}
    assert put(tier, 1, identity=other) is Refusal.IO_ERROR


def test_a_write_into_a_folder_that_is_gone_is_an_error_of_the_disk(tier) -> None:
    shutil.rmtree(tier.store.folder)
    assert put(tier, 1) is Refusal.IO_ERROR
    assert tier.stats().io_errors == 1
    assert tier.stats().dropped == {"io_error": 1}


def test_a_breach_of_the_bookkeeping_is_noticed(tier) -> None:
    assert put(tier, 1) is None
    tier.store._num[STATE] += 1
    with pytest.raises(InvariantError, match="counted wrong"):
        tier.check_invariants()
    tier.store._num[STATE] -= 1


def test_the_least_recently_used_is_evicted_and_a_prefix_from_its_end(
    tmp_path,
) -> None:
    tier = open_tier(tmp_path, blocks=0, kv_bytes=0)
    assert tier.stats().entries == {"state": 0}
    for number in range(4):
        assert put(tier, number) is None
    assert has(tier, 0, 1, 2, 3) == [True] * 4  # one prefix, from its start
    assert put(tier, 4) is None
    assert has(tier, 3) == [False]
    assert has(tier, 0, 1, 2) == [True] * 3
    assert put(tier, 5) is None
    assert has(tier, 4) == [False]  # 4 was used before 0, 1 and 2 were
    assert (tier.stats().evicted, tier.stats().entries["state"]) == (2, 4)
    [folder] = folders(tmp_path)
    assert tier.stats().disk_bytes == capacity_for(4)
    assert folder.num_bytes <= capacity_for(4) + 2 * PAGE_BYTES  # marker and lock
    tier.close()


def test_the_next_process_finds_stored_entries(tmp_path, monkeypatch) -> None:
    """The order of use is kept; entries of one moment are evicted from the end of the prefix."""
    monkeypatch.setattr(disks, "time", ManualClock())
    first = open_tier(tmp_path)
    for number in (2, 0, 3, 1):
        assert [put(first, number), put(first, number, KV)] == [None, None]
    first.close()
    monkeypatch.undo()
    second = open_tier(tmp_path)
    assert second.stats().recovered == 8
    assert load(second, 3) == payload_of(3)
    assert load(second, 3, KV) == payload_of(3, KV)
    second.check_invariants()
    second.close()
    third = open_tier(tmp_path)
    assert put(third, 9) is None
    assert has(third, 0, 1, 2, 3) == [True, True, False, True]
    third.close()
    smaller = open_tier(tmp_path, states=2, blocks=0)
    assert put(smaller, 4) is None
    assert smaller.stats().disk_bytes <= capacity_for(2)
    assert load(smaller, 4) == payload_of(4)
    smaller.close()


def test_incomplete_files_are_not_recovered(tmp_path) -> None:
    tier = open_tier(tmp_path)
    for number in range(1, 6):
        assert put(tier, number) is None
    tier.close()
    os.truncate(file_of(tmp_path, 1), 5000)
    file_of(tmp_path, 2).rename(file_of(tmp_path, 2, KV))
    for number, make in ((3, os.mkdir), (4, os.mkfifo)):
        file_of(tmp_path, number).unlink()
        make(file_of(tmp_path, number))
    file_of(tmp_path, 5).rename(file_of(tmp_path, 5, rank=7))
    for name in ("notes.txt", file_of(tmp_path, 6).name + ".new"):
        (tier.store.folder / name).write_bytes(b"x")
    again = open_tier(tmp_path)
    assert again.stats().recovered == 0
    kept = [file_of(tmp_path, number).name for number in (3, 4)]
    assert files_in(tmp_path) == {"notes.txt", *kept, file_of(tmp_path, 5, rank=7).name}
    assert put(again, 2) is None
    again.close()


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (PAGE_BYTES + STATE_BYTES - 1, Refusal.MAC),
        (8, Refusal.VERSION),
        ("cut", Refusal.SHORT),
        (None, Refusal.MISSING),
    ],
)
def test_damage_from_outside_is_refused_by_name(tier, tmp_path, at, reason) -> None:
    """All kinds of damage: tests/property/test_tier_faults.py."""
    assert [put(tier, number) for number in (0, 1)] == [None, None]
    file = file_of(tmp_path, 0)
    if at is None:
        file.unlink()
    elif at == "cut":
        os.truncate(file, 100)
    else:
        change_file(file, at, bytes([file.read_bytes()[at] ^ 7]))
    assert load(tier, 0) is reason
    assert tier.flush()
    assert tier.stats().refused == {reason.value: 1}
    assert has(tier, 0) == [False]
    assert load(tier, 1) == payload_of(1)
    assert files_in(tmp_path) == {file_of(tmp_path, 1).name}
    assert put(tier, 0) is None
    assert load(tier, 0) == payload_of(0)


def test_replacements_of_a_file_are_not_read(tier, tmp_path) -> None:
    """A link, a folder, or a file that other users may write."""
    for number, make in enumerate((lambda file: file.symlink_to(tmp_path), os.mkdir, os.mkfifo)):
        assert put(tier, number) is None
        file = file_of(tmp_path, number)
        file.unlink()
        make(file)
        assert load(tier, number) is Refusal.IO_ERROR
        tier.flush()
        assert has(tier, number) == [False]
        tier._failures, tier._paused_until = 0, 0.0


def test_its_store_keeps_the_first_bytes_and_reports_a_missing_folder(tier) -> None:
    assert put(tier, 1) is None
    key = str(facts_of(1).key)
    assert tier.store.put_many([f"{key}/0", key], [payload_of(2), payload_of(2)]) == [None, None]
    assert load(tier, 1) == payload_of(1)
    assert tier.store.health().fault is None
    tier.store.folder.rename(tier.store.folder.with_name("elsewhere"))
    assert tier.store.health().fault is StoreFault.MISSING
    tier.store.close()
    tier.store.close()  # a second call does nothing


# Errors of the system.


def failing(monkeypatch, name, error):
    """Make a system call fail."""

    def call(*arguments, **named):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(disks.os, name, call)


@pytest.mark.parametrize("call", ["pwritev", "replace", "utime", "a write of nothing"])
def test_a_failed_write_is_counted_and_not_findable(tier, tmp_path, monkeypatch, call) -> None:
    with monkeypatch.context() as patch:
        if call == "a write of nothing":
            patch.setattr(disks.os, "pwritev", lambda *_: 0)
        else:
            failing(patch, call, errno.EIO)
        assert put(tier, 1) is Refusal.IO_ERROR
    assert has(tier, 1) == [False]
    assert tier.stats().dropped == {"io_error": 1}
    assert files_in(tmp_path) == set()
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


def test_a_file_that_cannot_be_deleted_is_counted(tier, tmp_path, monkeypatch) -> None:
    assert put(tier, 1) is None
    failing(monkeypatch, "unlink", errno.EIO)
    assert load(tier, 1, prefix_tokens=1) is Refusal.PREFIX_TOKENS
    assert tier.flush()
    assert tier.stats().io_errors == 1
    assert has(tier, 1) == [False]


def test_transfers_in_parts_are_put_together(tier, monkeypatch) -> None:
    """The kernel may move fewer bytes than requested."""

    def first_page(call):
        def moved(fd, buffers, offset):
            return call(fd, [buffers[0][:PAGE_BYTES]], offset)

        return moved

    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(disks.os, name, first_page(getattr(os, name)))
    assert put(tier, 1) is None
    assert load(tier, 1) == payload_of(1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_counted_and_can_still_be_read(tier, monkeypatch, clock, error) -> None:
    assert put(tier, 0) is None
    failing(monkeypatch, "pwritev", error)
    for number in (1, 2, 3):
        assert put(tier, number) is Refusal.IO_ERROR
    stats = tier.stats()
    assert (stats.dropped, stats.io_errors, tier.is_healthy) == ({"disk_full": 3}, 0, True)
    assert load(tier, 0) == payload_of(0)
    monkeypatch.undo()
    monkeypatch.setattr(disks, "time", clock)
    clock.now += 4.75
    assert put(tier, 3) is Refusal.IO_ERROR  # not asked again at once
    clock.now += 0.25
    assert put(tier, 3) is None
    assert load(tier, 3) == payload_of(3)


@pytest.mark.parametrize("error", [None, errno.EINVAL, errno.EACCES, errno.EIO])
def test_whole_pages_are_read_and_written_past_the_page_cache_where_that_can_be(
    tmp_path, monkeypatch, error
) -> None:
    """EINVAL means that the file system cannot do it; every other error counts."""
    system_open, flags_seen = os.open, []

    def look(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT and error is not None:
            raise OSError(error, os.strerror(error))
        flags_seen.append(bool(flags & os.O_DIRECT))
        return system_open(path, flags & ~os.O_DIRECT, *args, **kwargs)

    tier = open_tier(tmp_path)
    monkeypatch.setattr(disks.os, "open", look)
    payload = buffer_for(facts_of(1, KV))
    payload[:] = payload_of(1, KV)
    answer = Answer()
    assert tier.put(facts_of(1, KV), payload, answer)
    works = error in (None, errno.EINVAL)
    assert answer.get() is (None if works else Refusal.IO_ERROR)
    assert not works or load(tier, 1, KV) == payload_of(1, KV)
    assert any(flags_seen) is (error is None)
    tier.close()


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path, monkeypatch) -> None:
    for name in ("utime", "scandir"):
        with monkeypatch.context() as patch:
            failing(patch, name, errno.EROFS)
            with pytest.raises(OSError, match="Read-only"):
                open_tier(tmp_path)
    open_tier(tmp_path).close()  # the folder was left unlocked


# One user at a time.


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
    with monkeypatch.context() as patch:
        patch.setattr(directories, "_is_same_file", lambda *_: False)
        with pytest.raises(TierInUseError, match="was removed"):
            open_tier(tmp_path)
    tier = open_tier(tmp_path)
    lock = tier.store._folder_lock
    (folder / "lock").rename(folder / "elsewhere")
    assert not directories._is_same_file(lock._fd, folder / "lock")
    tier.close()


def test_a_forked_process_that_lives_on_does_not_keep_the_folder(tmp_path) -> None:
    """The child has the lock file open, too; its end does not release the folder either."""
    tier = open_tier(tmp_path)
    child = os.fork()
    if not child:
        tier.store._folder_lock.release()
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


# Folders of other identities.


def test_folders_of_others_make_room_the_least_recently_opened_first(tmp_path) -> None:
    others = [make_identity(f"weights {number}") for number in range(3)]
    for age, identity in enumerate(others):
        fill_other(tmp_path, f"weights {age}").close()
        os.utime(folder_of(tmp_path, identity), (1000 + age, 1000 + age))
    held = open_tier(tmp_path, identity=others[0], states=8)
    os.utime(held.store.folder, (1, 1))
    tier = open_tier(tmp_path, states=6, blocks=0)
    for number in range(4):
        assert put(tier, number) is None
    there = {each.path for each in folders(tmp_path)}
    assert there == {tier.store.folder, held.store.folder}
    assert sum(each.num_bytes for each in folders(tmp_path)) <= capacity_for(6)
    assert load(held, 1, identity=others[0]) == payload_of(1)
    held.close()
    tier.close()


def test_room_that_others_use_is_not_taken(tmp_path, clock) -> None:
    other = fill_other(tmp_path)
    tier = open_tier(tmp_path, states=1, blocks=1)
    for number in (1, 2):
        assert put(tier, number) is Refusal.IO_ERROR
    stats = tier.stats()
    assert (stats.dropped, stats.io_errors, tier.is_healthy) == ({"disk_full": 2}, 0, True)
    other.close()
    clock.now += 6
    assert put(tier, 1) is None
    assert not other.store.folder.exists()
    tier.close()


@pytest.mark.parametrize("why", ["in use", "not ours to delete", "not ours to read", "gone"])
def test_behind_a_folder_that_cannot_be_removed_another_makes_room(
    tmp_path, monkeypatch, why
) -> None:
    """If two processes make room at once, one of them finds a folder gone.

    A folder that cannot be read is not counted, so there is room.
    """
    others = [fill_other(tmp_path, f"weights {number}", states=2) for number in range(2)]
    for age, other in enumerate(others):
        os.utime(other.store.folder, (1000 + age, 1000 + age))
    others[1].close()
    if why != "in use":
        others[0].close()
        owner, name = (directories, "_look_at") if "delete" not in why else (disks, "remove_folder")
        error, call = FileNotFoundError if why == "gone" else PermissionError, getattr(owner, name)

        def refuse(folder):
            if getattr(folder, "path", folder) == others[0].store.folder:
                raise error(errno.EACCES, why)
            return call(folder)

        monkeypatch.setattr(owner, name, refuse)
    tier = open_tier(tmp_path, states=3, blocks=0)
    assert put(tier, 1) is None
    assert tier.stats().io_errors == 0
    is_counted = why in ("in use", "not ours to delete")
    assert [other.store.folder.exists() for other in others] == [True, not is_counted]
    others[0].close()
    tier.close()


def test_folders_are_listed_and_removed(tmp_path) -> None:
    assert folders(tmp_path) == []
    tier = open_tier(tmp_path)
    assert put(tier, 1) is None
    [folder] = folders(tmp_path)
    assert folder.path == folder_of(tmp_path, IDENTITY)
    with pytest.raises(TierInUseError):
        remove_folder(folder)
    tier.close()
    (folder.path / "lock").unlink()
    remove_folder(folder)
    assert folders(tmp_path) == []
    assert not folder.path.exists()


# Threads.


def test_closing_cancels_queued_jobs_and_reports_it(tmp_path, monkeypatch) -> None:
    tier = open_tier(tmp_path, num_readers=1)
    assert [put(tier, 8, KV), put(tier, 7), put(tier, 6)] == [None] * 3
    writes = Gate(monkeypatch, DiskStore, "_write")
    reads = Gate(monkeypatch, DiskStore, "_read", lambda *args: args[2] is not None)
    facts = facts_of(8, KV)
    puts, loads = [Answer(), Answer()], [Answer(), Answer()]
    assert tier.put(facts_of(0), payload_of(0), puts[0])
    assert tier.load(facts, buffer_for(facts), loads[0])
    writes.wait_for(1)
    reads.wait_for(1)
    assert tier.put(facts_of(1), payload_of(1), puts[1])
    assert tier.load(facts, buffer_for(facts), loads[1])
    tier.remove(facts_of(7).key)  # a wrong entry is removed even so
    closing = threading.Thread(target=tier.close)
    closing.start()
    while tier.is_healthy:
        pass
    assert not tier.put(facts_of(2), payload_of(2), Answer())
    assert not tier.load(facts, buffer_for(facts), Answer())
    assert has(tier, 8, kind=KV) == [False]
    writes.open()
    reads.open()
    closing.join()
    assert [each.get() for each in puts] == [None, Refusal.ABORTED]
    assert [each.get() for each in loads] == [None, Refusal.ABORTED]
    assert tier.stats().dropped == {"aborted": 1, "unhealthy": 1}
    tier.check_invariants()
    tier.close()  # a second call does nothing
    tier.remove(facts_of(6).key)  # the tier has ended
    again = open_tier(tmp_path)
    assert has(again, 0, 1, 6, 7) == [True, False, True, False]
    again.close()


def test_wrong_entries_are_removed_before_the_disk_is_closed(tmp_path) -> None:
    tier = open_tier(tmp_path)
    assert put(tier, 1) is None
    tier.remove(facts_of(1).key)
    tier.close()
    assert files_in(tmp_path) == set()


def test_a_put_after_a_removal_is_written_after_it(tier, monkeypatch) -> None:
    assert put(tier, 1) is None
    gate, answer = Gate(monkeypatch, DiskStore, "remove"), Answer()
    tier.remove(facts_of(1).key)
    gate.wait_for(1)
    assert tier.put(facts_of(1), payload_of(1), answer)
    with tier._lock:
        assert tier._assign_calls(tier._workers[0]) == []
    gate.open()
    assert answer.get() is None
    assert load(tier, 1) == payload_of(1)


@pytest.mark.parametrize("num_bytes", [HEADER_BYTES, STATE_BYTES])
def test_an_entry_that_is_evicted_before_its_header_or_chunk_is_read_is_a_miss(
    tmp_path, monkeypatch, num_bytes
) -> None:
    tier = open_tier(tmp_path, states=1, blocks=1, num_readers=1)
    assert put(tier, 1) is None
    gate = Gate(monkeypatch, LowerTier, "_buffers", lambda *args: len(args[2][0]) == num_bytes)
    into, answer = buffer_for(facts_of(1)), Answer()
    assert tier.load(facts_of(1), into, answer)
    gate.wait_for(1)
    monkeypatch.undo()
    assert put(tier, 3) is None
    assert has(tier, 1) == [False]
    gate.open()
    assert answer.get() is Refusal.MISSING
    assert bytes(into) == b"\xff" * len(into)
    assert load(tier, 3) == payload_of(3)
    tier.close()


# Settings.


def test_settings_are_checked(tmp_path) -> None:
    usual = {"state_bytes": STATE_BYTES, "kv_bytes": KV_BYTES}
    for change, error, message in (
        ({"state_bytes": 0, "kv_bytes": 0}, InvalidArgumentError, "both are 0"),
        ({"kv_bytes": 10**7}, BudgetError, "one entry of each kind takes"),
    ):
        with pytest.raises(error, match=message):
            DiskStore(tmp_path, IDENTITY, 10**6, **(usual | change))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", EntryKind)
def test_a_failed_read_keeps_nothing_of_the_callers_buffer(tmp_path, monkeypatch, kind) -> None:
    """Buffers may be gigabytes, so they must not wait for the garbage collector."""
    tier, facts = open_tier(tmp_path, chunk_bytes=PAGE_BYTES), facts_of(0, kind)
    assert put(tier, 0, kind) is None
    failing(monkeypatch, "preadv", errno.EIO)
    memory = mmap.mmap(-1, facts.payload_bytes)
    into, answer = memoryview(memory), Answer()
    gc.disable()
    try:
        assert tier.load(facts, into, answer)
        assert answer.get() is Refusal.IO_ERROR
        assert tier.flush()
        into.release()
        pause = threading.Event()
        for _ in range(6000):  # a reader may not be back at its queue yet
            with suppress(BufferError):
                memory.close()  # raises while there is a view of the memory
                break
            pause.wait(0.01)
        assert memory.closed
    finally:
        gc.enable()
        tier.close()
