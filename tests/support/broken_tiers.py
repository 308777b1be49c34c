"""Tiers that are wrong on purpose, one fault each: what the machine of all tiers must notice."""

import os
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

from remote_rig import believe
from store_machine import StoreMachine
from tiers_machine import DiskMachine

from mamba_cache.context.tiering import Tiering
from mamba_cache.errors import MambaCacheError
from mamba_cache.tiers import disk
from mamba_cache.tiers.entry import EntryKind
from mamba_cache.tiers.host import HostTier
from mamba_cache.tiers.remote import RemoteTier
from mamba_cache.tiers.transfers import CopyJob, PlainTransfers


def _bytes_unseen(load):
    def broken(self, jobs):
        ticket = load(self, jobs)
        ticket._damaged = []
        return ticket

    return broken


def _headers_unseen(_):
    return lambda self, entries, facts, lease: None


def _disk_believed(read_payload):
    """Neither header nor MAC count."""

    def broken(self, load):
        fd = disk._open_entry(self._path_of(load.expected.key), os.O_RDONLY, load.into)
        disk._read_payload(fd, load.into, self._submit, lambda number, part: b"seen")
        os.close(fd)

    return broken


def _another_row(load):
    """Of the jobs of one load those of one kind are turned by one row."""

    def broken(self, jobs):
        rows = {kind: [job.row for job in jobs if job.kind is kind] for kind in EntryKind}
        turned = {kind: iter([*of_it[1:], *of_it[:1]]) for kind, of_it in rows.items()}
        return load(self, [CopyJob(job.kind, job.place, next(turned[job.kind])) for job in jobs])

    return broken


def _another_file_of_the_disk(path_of):
    def broken(self, key):
        keys = [each for each in self._entries if each.kind is key.kind] or [key]
        return path_of(self, keys[-1])

    return broken


def _lease_kept(_):
    return lambda self, load: load.leases.clear()


def _lower_lease_kept(end_lower):
    def broken(self, lease, refusal):
        if lease.writes:
            end_lower(self, lease, refusal)

    return broken


def _a_block_early(read):
    """The state is that at the end of the block before."""

    def broken(self, match, entries):
        def early(kind, index):
            is_state = kind is EntryKind.STATE and index > 0
            return entries.facts(kind, index - is_state)

        return read(self, match, SimpleNamespace(facts=early))

    return broken


def _alone(kind):
    """Entries of one kind come, and what goes with them does not."""
    return lambda load: lambda self, jobs: load(self, [job for job in jobs if job.kind is kind])


def _gone_counts(_):
    """What was given up while it was copied is kept all the same."""
    return lambda self, offer: True


def _published_at_once(reserve):
    """A row is findable before a lower tier has filled it."""

    def broken(self, facts, *, for_lower=False, **options):
        lease = reserve(self, facts, for_lower=for_lower, **options)
        if lease is not None and for_lower:
            pool, digest = self._entries[facts.key.kind].pool, facts.key.digest
            pool._row_of[digest] = lease.row
            pool._digests[lease.row] = digest
        return lease

    return broken


def _failure_is_success(end_lower):
    """What a lower tier could not bring is published."""
    return lambda self, lease, refusal: end_lower(self, lease, None)


PROMPTS = [(24, 0), (32, 1), (40, 0)]
OTHERS = [(24, 1), (40, 1), (32, 1)]
ROWS = [(kind, number) for kind in (EntryKind.STATE, EntryKind.KV) for number in range(6)]


def _rows_damaged(machine):
    """In host memory, where requests come back to them."""
    for kind, number in ROWS:
        machine.turn_a_bit(kind, number, 77 + number, False)
    machine.ask_all(PROMPTS, 9)


def _headers_damaged(machine):
    machine.traffic(PROMPTS, 9, None)
    for number in range(4):  # each row once
        machine.turn_a_bit(EntryKind.STATE, number, 900, True)
    machine.ask_all(PROMPTS, 9)


def _disk_damaged(machine):
    machine.round_trip(PROMPTS, [(*row, "a bit", 999 * row[1]) for row in ROWS], None, "restart", 9)


def _restarted(machine):
    machine.round_trip(PROMPTS, [], None, "restart", 9)


def _load_fails(machine):
    machine.traffic(PROMPTS, 9, None)
    machine.next_copy_fails("load")
    machine.ask_all(PROMPTS, 9)


def _deregistered(machine):
    """While what it held is on its way to host memory; others get its place."""
    context, kv_blocks = machine.context, machine.context.kv_block_allocator
    machine.reset("everything")
    context.host_tier.clear()
    machine.device_gets_on(0)
    machine.ask_all(PROMPTS[2:], 0)
    is_unused = (kv_blocks.block_hashes >= 0) & (kv_blocks.block_ref_counts == 0)
    kv_blocks.deregister_blocks(is_unused.nonzero().flatten().tolist())
    machine.exact = machine.keeps_all = False
    machine.ask_all(OTHERS, 0)
    machine.copies.run(99)
    context._tiering.poll()
    machine.ask_all(PROMPTS[2:] + OTHERS, 9)


def _store_exchanged(machine):
    """Entries have changed places in the store when another process looks for them."""
    machine.ask_all(PROMPTS, 9)
    machine.copies.run(99)
    machine.context._tiering.poll()
    for number in range(15):
        machine.exchange(number, number + 1)
    machine.round_trip(PROMPTS, "clear", 1)
    machine.leave()
    machine.context = machine.open_context()
    machine.round_trip(PROMPTS, "clear", 1)


def _store_believed(init):
    def broken(self, store, **options):
        init(self, store, **options)
        believe(self)

    return broken


FAULTS = {
    "bytes from host memory are not verified": (
        PlainTransfers, "load", _bytes_unseen, _rows_damaged,
    ),
    "headers in host memory are not verified": (
        HostTier, "_refusal", _headers_unseen, _headers_damaged,
    ),
    "files of the disk are not verified": (
        disk.DiskTier, "_read_file", _disk_believed, _disk_damaged,
    ),
    "rows of host memory are exchanged on their way": (
        PlainTransfers, "load", _another_row, _restarted,
    ),
    "another file of the disk is read": (
        disk.DiskTier, "_path_of", _another_file_of_the_disk, _restarted,
    ),
    "a load that is given up keeps its rows": (Tiering, "cancel", _lease_kept, _load_fails),
    "what was written to the disk keeps its row": (
        HostTier, "_end_lower", _lower_lease_kept, _restarted,
    ),
    "the boundary is off by one: the state is the block's before": (
        Tiering, "read_rows", _a_block_early, _restarted,
    ),
    "keys and values are loaded without their state": (
        PlainTransfers, "load", _alone(EntryKind.KV), _restarted,
    ),
    "a state is loaded without keys and values": (
        PlainTransfers, "load", _alone(EntryKind.STATE), _restarted,
    ),
    "what was given up while it was copied counts": (
        Tiering, "_is_there", _gone_counts, _deregistered,
    ),
    "a row is findable before it is filled": (
        HostTier, "reserve", _published_at_once, _disk_damaged,
    ),
    "what the disk could not bring is findable": (
        HostTier, "_end_lower", _failure_is_success, _disk_damaged,
    ),
    "entries of the store are not verified": (
        RemoteTier, "__init__", _store_believed, _store_exchanged,
    ),
}  # fmt: skip
"""Each fault: whose method is replaced by what, and calls that show it."""


def broken(fault):
    """Makes all tiers wrong for as long as it is entered."""
    owner, name, make, _ = FAULTS[fault]
    return mock.patch.object(owner, name, make(getattr(owner, name)))


FOUND = AssertionError, MambaCacheError
"""What the machine raises: an assertion of its own, or a contradiction in the books."""


def show(fault):
    """Makes the calls that show a fault, with all that the machine checks after each."""
    calls = FAULTS[fault][-1]
    machine = StoreMachine() if calls is _store_exchanged else DiskMachine()
    try:
        machine.start(
            policy="lru",
            save_decode_states=False,
            max_checkpoints=None,
            longest=128,
            placement=None,
            slot_policy=None,
            prompts=PROMPTS,
        )
        calls(machine)
        for invariant in machine.invariants:
            invariant.function(machine)
    except FOUND:
        with suppress(*FOUND):
            machine.teardown()
        raise
    machine.teardown()
