"""A digest of all that decides what a context or a pool of slots does next."""

import numpy as np
from xxhash import xxh3_64, xxh3_128

from mamba_cache.context import DynamicInferenceContext


def fingerprint(thing):
    """Digests the bookkeeping of a context or of slots; equal calls give equal digests.

    No address, time or order of a dict decides it.
    """
    if "parts" in vars(thing):  # ranks, which stand alike
        found = {fingerprint(part) for part in thing.parts}
        assert len(found) == 1, f"{len(found)} states of bookkeeping among {len(thing.parts)} ranks"
        return found.pop()
    digest = xxh3_64()
    parts = parts_of_context(thing) if isinstance(thing, DynamicInferenceContext) else ()
    for part in parts or parts_of_slots(thing):
        array = np.ascontiguousarray(part, np.int64)
        digest.update(array.size.to_bytes(8, "little"))
        digest.update(array)
    return digest.hexdigest()


def parts_of_slots(slots):
    cached = slots._slot_to_block >= 0
    return (
        slots._slot_to_block,
        slots._block_to_slot.take(slots._slot_to_block[cached]),
        slots.pin_counts[cached],
        slots._rows.free[: slots.free_count],
        sorted(slots.reserved.items()),
        sorted(slots.hash_to_block_id.items()),
        list(digest_of(slots.policy)),
    )


def parts_of_context(context):
    kv_blocks, size = context.kv_block_allocator, context.block_size_tokens
    parts = [
        *parts_of_slots(context.slot_allocator),
        context.request_table.block_tables,
        (kv_blocks.num_free_blocks, kv_blocks.num_cached_blocks),
    ]
    table = context.request_table
    for active in table:
        table.take_over(active)
        hashes, end = active.hashes, active.num_known
        # The last hash names all blocks before; without prefix caching the last tokens must do.
        start = max(len(hashes) * size, end - size)
        due = active.chunk.num_tokens if active.chunk else 0
        row = active.row
        counts = () if row < 0 else (table.num_computed[row], table.num_in_doubt[row])
        progress = row, *counts, due
        parts += [(*progress, *hashes[-1:]), active.tokens(start, end)]
    work = context._work
    pins = [(pin.num_tokens, *pin._block_ids) for pin in context.pins]
    return [*parts, work.group.rows, work.ends, *pins]


def digest_of(policy):
    """Digests what an object of the package or of a test remembers, attribute by attribute."""
    digest, seen = xxh3_128(), set()

    def add(value):
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value))
        elif isinstance(value, dict):
            for pair in value.items():
                add(pair)
        elif isinstance(value, (set, frozenset)):
            add(sorted(value))
        elif isinstance(value, (tuple, list)) or hasattr(value, "popleft"):
            digest.update(f"{len(value)} of".encode())
            for each in value:
                add(each)
        elif value is None or isinstance(value, (bool, int, float, str, bytes)):
            digest.update(f"{value!r};".encode())
        elif not callable(value) and id(value) not in seen:
            seen.add(id(value))
            for name in names_of(value):
                digest.update(name.encode())
                add(getattr(value, name, None))

    add(policy)
    return digest.digest()


def names_of(thing):
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted({*slots, *getattr(thing, "__dict__", ())} - {"__weakref__", "__dict__"})
