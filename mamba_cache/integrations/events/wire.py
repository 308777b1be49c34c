"""The bytes of KV events, as vLLM's own classes encode and decode them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from mamba_cache._extras import install_hint
from mamba_cache.errors import MissingExtraError

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError(f"KV events need msgspec: {install_hint('events')}") from error

__all__ = ["Medium", "encode_batch", "encode_cleared", "encode_removed", "encode_stored"]

Medium = Literal["GPU", "CPU", "STORAGE"]
"""Where blocks lie. Other names count as GPU in one router, and not at all in another."""

_GROUP_KINDS = ("full_attention", "mamba")
"""What the two groups hold, by ``group_idx``: KV blocks, and states."""

# Shared by all threads: it keeps nothing between two calls.
_encode = msgspec.msgpack.Encoder().encode


def encode_stored(
    block_hashes: Sequence[int],
    parent_block_hash: int | None,
    token_ids: Sequence[int],
    *,
    block_size: int,
    medium: Medium = "GPU",
    group: int = 0,
) -> bytes:
    """Encode that consecutive blocks of one sequence are held, each the parent of the next."""
    event = {
        "type": "BlockStored",
        "block_hashes": block_hashes,
        "parent_block_hash": parent_block_hash,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": group,
        "kv_cache_spec_kind": _GROUP_KINDS[group],
    }
    return _bytes(event)


def encode_removed(block_hashes: Sequence[int], *, medium: Medium = "GPU", group: int = 0) -> bytes:
    """Encode that blocks are not held any more."""
    event = {
        "type": "BlockRemoved",
        "block_hashes": block_hashes,
        "medium": medium,
        "group_idx": group,
    }
    return _bytes(event)


def encode_cleared() -> bytes:
    """Encode that nothing is held any more, in no group."""
    return _bytes({"type": "AllBlocksCleared"})


def encode_batch(timestamp: float, events: Sequence[bytes], rank: int) -> bytes:
    """Encode a batch: what one message carries, beside its topic and number."""
    return _bytes([timestamp, [msgspec.Raw(event) for event in events], rank])


def _bytes(value: Any) -> bytes:
    encoded: bytes = _encode(value)
    return encoded
