"""The whole memory of an object, and a digest of the bookkeeping of a context or of slots."""

from array import array
from collections import Counter, OrderedDict, deque
from enum import Enum

import numpy as np
import torch
from xxhash import xxh3_64, xxh3_128

from mamba_cache.context import DynamicInferenceContext


def fingerprint(thing):
    """Digest the bookkeeping of a context or of slots; equal calls give equal digests.

    The digest does not depend on addresses, times or the order of dicts.
    """
    if "parts" in vars(thing):  # ranks, which must be equal
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
        list(xxh3_128(repr(frozen(slots.policy)).encode()).digest()),
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
        # The last hash names all blocks before; without prefix caching use the last tokens.
        start = max(len(hashes) * size, end - size)
        due = len(active.chunk.token_ids) if active.chunk else 0
        row = active.row
        counts = () if row < 0 else (table.num_computed[row], table.num_uncollected[row])
        progress = row, *counts, due
        parts += [(*progress, *hashes[-1:]), active.tokens(start, end)]
    step = context._step
    decoding = [] if step is None else [step._work.group.rows, step._work.ends]
    pins = [(pin.num_tokens, *pin._block_ids) for pin in context.pins]
    return [*parts, *decoding, *pins]


_SKIPPED = (
    *("_guard", "transfers", "_transfers", "_hasher", "_maker", "_host_buffers"),
    # Memoised answers of the last call, such as a tensor's array.
    *("_group", "_named", "_made", "_last_read"),
    # Plans of copies, rebuilt for other live states.
    *("_live_storage", "_live_to_slots", "_slots_to_live", "_live_to_live", "_kv_to_kv"),
)

_PLAIN = {int, float, str, bytes}


def frozen(thing, seen=None):
    """The whole memory of a package's object, as one value that compares with ``==``."""
    seen = {} if seen is None else seen
    if thing is None or isinstance(thing, (int, float, str, bytes, Enum, type)):
        return thing
    if id(thing) in seen:
        return ("seen", seen[id(thing)])
    seen[id(thing)] = len(seen)
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()
    if isinstance(thing, np.ndarray):
        if thing.dtype.hasobject:
            return frozen(thing.tolist(), seen)
        return xxh3_128(np.ascontiguousarray(thing)).digest()
    if isinstance(thing, (memoryview, array)):
        return xxh3_128(thing.tobytes()).digest()
    if isinstance(thing, (dict, OrderedDict, Counter)):
        return tuple((frozen(k, seen), frozen(v, seen)) for k, v in thing.items())
    if isinstance(thing, (list, tuple, deque)):
        is_plain = _PLAIN.issuperset(map(type, thing))
        return tuple(thing) if is_plain else tuple(frozen(item, seen) for item in thing)
    if isinstance(thing, (set, frozenset)):
        return tuple(sorted(map(repr, thing)))
    kinds = type(thing).__mro__
    if not any(kind.__module__.startswith("mamba_cache") for kind in kinds):
        return type(thing).__name__
    names = [*getattr(thing, "__dict__", ())]
    for kind in kinds:
        names += getattr(kind, "__slots__", ())
    return tuple(
        (name, frozen(getattr(thing, name, None), seen)) for name in names if name not in _SKIPPED
    )
