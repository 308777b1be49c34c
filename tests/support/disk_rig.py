"""A disk tier for few small entries, and entries for it."""

import mmap
import threading

import numpy as np
import torch

from mamba_cache import CacheConfig, KVCacheSpec, StateSpec
from mamba_cache.tiers import CacheIdentity, ModelIdentity
from mamba_cache.tiers.directory import entry_name, folder_of
from mamba_cache.tiers.disk import DiskStore, file_bytes
from mamba_cache.tiers.entry import EntryFacts, EntryKey, EntryKind, EntryMacs
from mamba_cache.tiers.lower import LowerTier

STATE_BYTES = 9000
"""Two pages and some bytes."""

KV_BYTES = 4096
CHUNK_BYTES = 4 * 2**20
TENANT = b"t" * 16


def make_identity(weights="w", **config):
    model = ModelIdentity(name="model", weights=weights)
    settings = {"num_kv_blocks": 4, "max_slots": 2, "hash_secret": b"secret"} | config
    state = StateSpec.mamba(1, (4, 3), (2, 4, 8), torch.float32, torch.float32)
    kv = KVCacheSpec(1, 1, 8, torch.float32)
    return CacheIdentity.of(model, CacheConfig(**settings), state, kv)


IDENTITY = make_identity()
SECRET = b"the secret of the cache"


def facts_of(number, kind=EntryKind.STATE, *, identity=IDENTITY, num_bytes=None, **changes):
    """The facts of the entry with this number."""
    size = STATE_BYTES if kind is EntryKind.STATE else KV_BYTES
    key = {
        "identity": identity.digest,
        "tenant": TENANT,
        "kind": kind,
        "digest": number.to_bytes(16, "little"),
        "rank": identity.rank,
    }
    own = {
        "prefix_tokens": 256 * (number + 1),
        "payload_bytes": num_bytes or size,
    }
    key |= {name: value for name, value in changes.items() if name in key}
    own |= {name: value for name, value in changes.items() if name in own}
    return EntryFacts(EntryKey(**key), **own)


def name_of(number, chunk=None):
    """The key in a store of an entry's header, or of one of its chunks."""
    return f"{facts_of(number).key}{'' if chunk is None else f'/{chunk}'}"


def payload_of(number, kind=EntryKind.STATE):
    size = STATE_BYTES if kind is EntryKind.STATE else KV_BYTES
    return memoryview(np.random.default_rng([number, size]).bytes(size))


def buffer_for(facts, *, offset=0):
    """A buffer of 0xff bytes, ``offset`` bytes after a page's start."""
    whole = memoryview(mmap.mmap(-1, facts.payload_bytes + offset))
    whole[:] = b"\xff" * len(whole)
    return whole[offset:]


def capacity_for(states, blocks=0):
    """Bytes for these numbers of entries of each kind."""
    return states * file_bytes(STATE_BYTES) + blocks * file_bytes(KV_BYTES)


def open_tier(
    path, *, states=4, blocks=4, identity=IDENTITY, num_readers=2, secret=SECRET, **options
):
    options = {"write_on_use": 1, "macs": EntryMacs(secret), "owns_store": True} | options
    sizes = {"state_bytes": STATE_BYTES, "kv_bytes": KV_BYTES, "chunk_bytes": CHUNK_BYTES}
    sizes |= {name: options.pop(name) for name in sizes.keys() & options.keys()}
    store = DiskStore(path, identity, capacity_for(states, blocks), **sizes)
    return LowerTier(store, num_threads=num_readers and num_readers + 1, **options)


def file_of(path, number=1, kind=EntryKind.STATE, *, identity=IDENTITY, **changes):
    """The file of an entry in a disk cache's folder."""
    return folder_of(path, identity) / entry_name(
        facts_of(number, kind, identity=identity, **changes).key
    )


def entry_files(folder):
    """The files of all entries in a folder, sorted by name."""
    return sorted(file for file in folder.iterdir() if file.name not in {"lock", "identity.json"})


def turn_bits(file, at):
    """Flip a bit of one byte of a file."""
    change_file(file, at, bytes([file.read_bytes()[at] ^ 0x10]))


def change_file(file, at, data):
    """Overwrite bytes of a file."""
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)


class Answer:
    """A ``done`` callback that records its calls, and lets a test wait for one."""

    def __init__(self):
        self.calls = []
        self._came = threading.Event()

    def __call__(self, refusal):
        self.calls.append(refusal)
        self._came.set()

    def get(self):
        """Wait for the only call; return its argument."""
        assert self._came.wait(60), "done was never called"
        assert len(self.calls) == 1
        return self.calls[0]


def put(tier, number, kind=EntryKind.STATE, **changes):
    """Put an entry and wait for the answer; False if the call was refused."""
    answer = Answer()
    taken = tier.put(facts_of(number, kind, **changes), payload_of(number, kind), answer)
    return answer.get() if taken else False


def load(tier, number, kind=EntryKind.STATE, *, offset=0, **changes):
    """Load an entry; return its bytes, the refusal, or False if the call was refused."""
    expected, answer = facts_of(number, kind, **changes), Answer()
    into = buffer_for(expected, offset=offset)
    if not tier.load(expected, into, answer):
        return False
    refusal = answer.get()
    return bytes(into) if refusal is None else refusal


class Gate:
    """Blocks calls of a method after their work until the gate is opened."""

    def __init__(self, monkeypatch, owner, name, matches=lambda *_: True):
        call, self._opened = getattr(owner, name), threading.Event()
        self._done, self.num_done = threading.Condition(), 0

        def wait(*arguments):
            result = call(*arguments)
            if matches(*arguments):
                with self._done:
                    self.num_done += 1
                    self._done.notify_all()
                assert self._opened.wait(60)
            return result

        monkeypatch.setattr(owner, name, wait)

    def wait_for(self, count):
        """Wait until ``count`` calls have done their work."""
        with self._done:
            assert self._done.wait_for(lambda: self.num_done >= count, 60)

    def open(self):
        self._opened.set()
