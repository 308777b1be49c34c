"""CacheConfig refuses invalid settings by name when it is constructed."""

import dataclasses
import re
from enum import Enum
from typing import Any

import numpy as np
import pytest

from mamba_cache.config import CacheConfig, EvictionPolicy
from mamba_cache.errors import InvalidArgumentError


def make(**settings: Any) -> CacheConfig:
    """Return a small valid configuration with some settings changed."""
    small = {"block_size_tokens": 8, "ssm_chunk_size": 4, "num_kv_blocks": 5, "max_slots": 2}
    return CacheConfig(**{**small, **settings})


def test_defaults_that_follow_other_settings() -> None:
    made = make(ssm_chunk_size=2, max_requests=7)
    assert made.max_checkpoints_per_step == made.checkpoints_per_step == 21


@pytest.mark.parametrize(("drafts", "tokens", "rows"), [(0, 1, 1), (1, 2, 3), (3, 4, 5)])
def test_drafts_need_a_live_state_for_each_outcome(drafts: int, tokens: int, rows: int) -> None:
    made = make(num_speculative_tokens=drafts)
    assert (made.max_decode_tokens, made.live_rows_per_request) == (tokens, rows)


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (8, 1), (9, 2), (800, 100), (801, 101)])
def test_blocks_of_the_longest_sequence_are_rounded_up(length: int, blocks: int) -> None:
    assert make(max_sequence_length=length).max_blocks_per_request == blocks


LIMITS = {
    setting.name: getattr(setting.metadata.get("check"), "keywords", {})
    for setting in dataclasses.fields(CacheConfig)
}
COUNTS = {name: limits["minimum"] for name, limits in LIMITS.items() if "minimum" in limits}
NUMBERS = {
    name: limits["maximum"]
    for name, limits in LIMITS.items()
    if "maximum" in limits and name not in COUNTS
}
assert len(COUNTS) == 14
assert len(NUMBERS) == 9


@pytest.mark.parametrize(("name", "least"), COUNTS.items())
def test_counts_have_bounds(name: str, least: int) -> None:
    """The message has the setting, the given value and the allowed values."""
    most = {"write_on_use": 2, "max_requests": (2**31 - 1) // 3, "num_kv_blocks": 2**31 - 2}
    most = most.get(name, 2**31 - 1)
    for value in (least - 1, -5, 2.5, "3", True, 2**31, 10**30):
        expected = re.escape(f"{name} must be an int in [{least}, {most}], got {value!r}")
        with pytest.raises(InvalidArgumentError, match=expected):
            make(**{name: value})


@pytest.mark.parametrize("name", LIMITS)
def test_values_of_other_types_are_refused_by_the_settings_name(name: str) -> None:
    """Regression: values derived from a setting were computed before the setting was checked."""
    others = {"host_cache_gb": 1.0, "disk_cache_path": "folder", "disk_cache_gb": 1.0}
    if name in {"cache_gb", "kv_cache_gb", "mamba_cache_gb"}:
        others |= {"num_kv_blocks": None, "max_slots": None}
    for value in (object(), {}, [None], np.arange(2), 2j, b""):
        with pytest.raises(InvalidArgumentError, match=name):
            make(**(others | {name: value}))


@pytest.mark.parametrize(("name", "most"), NUMBERS.items())
def test_numbers_have_bounds(name: str, most: float) -> None:
    allowed = re.escape(f"{name} must be a number in [0, {most:g}]")
    for value in (-0.1, float("inf"), float("nan"), 2 * most, 10**400, "1", True, [1]):
        with pytest.raises(InvalidArgumentError, match=allowed):
            make(**{name: value})


@pytest.mark.parametrize(
    ("size", "count"), [("kv_cache_gb", "num_kv_blocks"), ("mamba_cache_gb", "max_slots")]
)
def test_a_budget_is_a_size_or_a_count(size: str, count: str) -> None:
    assert getattr(make(**{count: None, size: 0.25}), size) == 0.25
    either = rf"give {size} \(GiB\) or {count}"
    with pytest.raises(InvalidArgumentError, match=f"{either}, or cache_gb for both budgets"):
        make(**{count: None})
    with pytest.raises(InvalidArgumentError, match=f"{either}, not both"):
        make(**{size: 1, count: 1})
    with pytest.raises(InvalidArgumentError, match=f"give cache_gb or {size}, not both"):
        make(num_kv_blocks=None, max_slots=None, cache_gb=8, **{size: 1})


@pytest.mark.parametrize(
    ("settings", "kv", "slots"),
    [({"cache_gb": 8}, 6, 2), ({"cache_gb": 8, "state_share": 0.5}, 4, 4),
     ({"cache_gb": 8, "state_share": 0}, 8, 0), ({"cache_gb": 8, "state_share": 1}, 0, 8),
     ({"cache_gb": 8, "enable_prefix_caching": False}, 8, 2),
     ({"kv_cache_gb": 3, "mamba_cache_gb": 1}, 3, 1)],
)  # fmt: skip
def test_one_budget_is_divided(settings: dict[str, Any], kv: float, slots: float) -> None:
    made = make(num_kv_blocks=None, max_slots=None, **settings)
    assert (made.kv_budget_gb, made.slot_budget_gb) == (kv, slots)


def test_numpy_numbers_become_plain_ones() -> None:
    made = make(num_kv_blocks=np.int64(7), host_cache_gb=np.float32(0.5))
    assert (type(made.num_kv_blocks), type(made.host_cache_gb)) == (int, float)
    assert (made.num_kv_blocks, made.host_cache_gb) == (7, 0.5)


def test_no_slots_need_be_given_without_prefix_caching() -> None:
    assert CacheConfig(enable_prefix_caching=False, num_kv_blocks=4).max_slots == 0
    made = make(enable_prefix_caching=False, max_slots=None, mamba_cache_gb=1)
    assert (made.max_slots, made.mamba_cache_gb) == (None, 1)


def test_states_are_kept_on_the_chunk_grid() -> None:
    """Another system indexed states kept per 64 tokens with a cache chunk of 128."""
    expected = r"block_size_tokens must be a multiple of ssm_chunk_size \(4\), got 10"
    with pytest.raises(InvalidArgumentError, match=expected):
        make(block_size_tokens=10)
    with pytest.raises(InvalidArgumentError, match=r"ssm_chunk_size \(16\), got 8"):
        make(ssm_chunk_size=16)


class ForeignPolicy(str, Enum):
    LRU = "lru"
    REF_ZERO = "ref_zero"


@pytest.mark.parametrize("given", ["ref_zero", ForeignPolicy.REF_ZERO, EvictionPolicy.REF_ZERO])
def test_policies_are_compared_by_value(given: Any) -> None:
    assert make(eviction_policy=given).eviction_policy is EvictionPolicy.REF_ZERO


DISK = {"disk_cache_path": "x", "disk_cache_gb": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_checkpoints_per_step": 0, "max_slots": 0},
        {"vocab_size": 1},
        {"hash_secret": b"shared", "hash_algorithm": "sha256"},
        {"host_cache_gb": 1, "host_state_share": 1},
        {"host_cache_gb": 1, **DISK},
        {"num_host_blocks": 1, "num_host_states": 1, **DISK},
        {"verify_hits": 1},
        {"num_kv_blocks": None, "kv_cache_gb": 2**33},
        {"verify_hits": 0, "slot_quantization": "int8"},
    ],
    ids=str,
)
def test_settings_at_their_bounds_are_kept(settings: dict[str, Any]) -> None:
    made = make(**settings)
    assert {name: getattr(made, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eviction_policy": ["lru"]}, r"one of \['lru', 'ref_zero'\], got \['lru'\]"),
        ({"eviction_policy": np.array(["lru", "lru"])}, r"one of \['lru', 'ref_zero'\]"),
        ({"eviction_policy": "fifo"}, r"one of \['lru', 'ref_zero'\], got 'fifo'"),
        ({"hash_algorithm": "md5"}, r"one of \['blake2b', 'sha256', 'xxh3_128'\], got 'md5'"),
        ({"hash_secret": "key"}, r"hash_secret must be bytes, at least one of them, .* got str"),
        ({"hash_secret": b""}, r"hash_secret must be bytes, at least one of them, .* got none"),
        # Otherwise two block boundaries could lie within one uncollected step.
        ({"num_speculative_tokens": 4}, r"at most block_size_tokens / 2 - 1 \(3\), got 4"),
        ({"slot_quantization": "int4"}, "slot_quantization"),
        # Regression: the string "false" of a file or an environment variable turned it on.
        ({"save_decode_states": "false"}, "save_decode_states must be a bool, got 'false'"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching must be a bool, got 0"),
        ({"reuse_answers": None}, "reuse_answers must be a bool, got None"),
        ({"state_share": None}, r"state_share must be a number in \[0, 1\], got None"),
        ({"host_cache_gb": 1, **DISK, "disk_cache_path": 7}, "disk_cache_path must be a path"),
        ({"host_cache_gb": 1, **DISK, "disk_cache_path": ""}, "disk_cache_path must be a path"),
        ({"num_host_blocks": 1}, "or both num_host_blocks and num_host_states, got 1 and None"),
        ({"host_cache_gb": 1, "disk_cache_gb": 1}, "give both disk_cache_path and disk_cache_gb"),
        ({"host_cache_gb": 1, "store": 7}, "store must be a stores.BlobStore or the URL of one"),
        ({"store": "valkey://x"}, "store needs a host tier"),
        (DISK, "disk_cache_path needs a host tier"),
        (
            {"verify_hits": 0.5, "slot_quantization": "int8"},
            "verify_hits needs slots that keep states",
        ),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        make(**settings)


def test_printed_settings_have_no_secret_and_no_password() -> None:
    settings = make(
        host_cache_gb=1, hash_secret=b"shared", store="valkey://me:hunter2@127.0.0.1:6379"
    )
    printed = f"{settings!r} {settings}"
    assert "host_cache_gb=1" in printed
    assert "shared" not in printed
    assert "hunter2" not in printed


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().max_slots = 3  # type: ignore[misc]
