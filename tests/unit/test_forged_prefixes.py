"""A client that knows another client's prompt cannot make it resume from a forged state."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from clocks import ManualClock
from context_rig import MODEL_CONFIG, generate, make_context
from forged import BLOCK, FORGED, PUBLIC, VOCABULARY
from memory_store import MemoryStore
from restart_rig import slow_prefill

from mamba_cache.cache import BlockHasher, compute_block_hashes
from mamba_cache.config import CacheConfig
from mamba_cache.context import Request, prefetch
from mamba_cache.errors import InvalidArgumentError
from mamba_cache.reference import HybridModel
from mamba_cache.tiers import ModelIdentity, lower

MODEL = HybridModel(
    replace(MODEL_CONFIG, vocab_size=VOCABULARY, ssm_chunk_size=BLOCK), dtype=torch.float64, seed=7
)
TAIL = [5, 6, 7]
IDENTITY = ModelIdentity(name="model", weights="w")


def open_config(**changes):
    settings = {
        "block_size_tokens": BLOCK,
        "ssm_chunk_size": BLOCK,
        "max_requests": 2,
        "max_sequence_length": 4 * BLOCK,
        "num_kv_blocks": 8,
        "max_slots": 6,
    }
    if "disk_cache_path" in changes or "store" in changes:
        settings |= {"num_host_blocks": 4, "num_host_states": 4, "hash_secret": b"of this test"}
    return CacheConfig(**(settings | changes))


def open_context(**changes):
    config, options = open_config(**changes), {}
    if config.has_host_tier:
        options = {"identity": IDENTITY, "load_planner": slow_prefill()}
    return make_context(config, model=MODEL, **options)


def answer(context, prompt):
    tokens, _, admission = generate(context, prompt, 4, model=MODEL)
    return tokens, admission.skip_tokens


@pytest.fixture(scope="module")
def expected():
    """Return the model's answer to the public prompt."""
    with_no_cache = open_context(enable_prefix_caching=False)
    return answer(with_no_cache, PUBLIC + TAIL)[0]


def digests(tokens, algorithm, secret):
    hasher = BlockHasher(algorithm, secret)
    return compute_block_hashes(tokens, BLOCK, hasher=hasher).digests


@pytest.mark.parametrize("secret", [b"one", b"another"])
def test_the_pair_collides_under_xxh3_alone(secret):
    """The pair collides behind every parent block."""
    start = list(range(BLOCK))
    assert FORGED != PUBLIC
    for before in ([], start):
        forged, public = before + FORGED, before + PUBLIC
        assert digests(forged, "xxh3_128", secret) == digests(public, "xxh3_128", secret)
        for algorithm in ("blake2b", "sha256"):
            one, other = (digests(each, algorithm, secret) for each in (forged, public))
            assert one[:-1] == other[:-1]
            assert one[-1] != other[-1]


def test_a_forged_block_is_a_miss_in_a_context(expected):
    context = open_context()
    answer(context, FORGED + TAIL)
    assert answer(context, FORGED + TAIL)[1] == BLOCK
    assert answer(context, PUBLIC + TAIL) == (expected, 0)
    assert answer(context, PUBLIC + TAIL) == (expected, BLOCK)


def test_a_forged_block_is_a_miss_on_a_disk(tmp_path, expected):
    settings = {
        "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.01, "write_on_use": 1
    }  # fmt: skip
    _check_a_tier(settings, expected)


def test_a_forged_block_is_a_miss_in_a_store(monkeypatch, expected):
    for module in (lower, prefetch):  # loads never time out
        monkeypatch.setattr(module, "time", ManualClock())
    settings = {"store": MemoryStore(), "write_on_use": 1}
    _check_a_tier(settings, expected)


def _check_a_tier(settings, expected):
    """Let one context write the forged block and another context read the tier."""
    context = open_context(**settings)
    answer(context, FORGED + TAIL)
    context.wait_for_tiers()
    context.close()
    context = open_context(**settings)
    for prompt, skipped in ((FORGED + TAIL, BLOCK), (PUBLIC + TAIL, 0)):
        context.prefetch(Request(request_id="early", prompt_tokens=prompt)).wait()
        tokens, num_skipped = answer(context, prompt)
        assert num_skipped == skipped
    assert tokens == expected
    context.close()


# Sources of a disk's or store's secret.


def on_disk(path, **changes):
    return open_context(disk_cache_path=str(path), disk_cache_gb=0.01, write_on_use=1, **changes)


def test_a_disk_cache_draws_a_secret_and_keeps_it(tmp_path):
    path = tmp_path / "cache"
    context = on_disk(path, hash_secret=None)
    secret = context.config.hash_secret
    assert (path / "secret").read_bytes() == secret
    assert (path / "secret").stat().st_mode & 0o777 == 0o600
    answer(context, PUBLIC + TAIL)
    context.wait_for_tiers()
    context.close()
    assert "secret" not in repr(context.config).replace("hash_secret", "")
    context = on_disk(path, hash_secret=None)
    context.prefetch(Request(request_id="early", prompt_tokens=PUBLIC + TAIL)).wait()
    assert answer(context, PUBLIC + TAIL)[1] == BLOCK
    context.close()
    context = on_disk(tmp_path / "other", hash_secret=None)
    assert context.config.hash_secret != secret
    context.close()


def test_a_given_secret_is_not_written(tmp_path):
    on_disk(tmp_path).close()
    assert not (tmp_path / "secret").exists()


def test_a_store_and_ranks_do_not_draw_a_secret(tmp_path):
    with pytest.raises(InvalidArgumentError, match="hash_secret must be given to share entries"):
        open_context(store=MemoryStore(), hash_secret=None)
    config = open_config(disk_cache_path=str(tmp_path / "x"), disk_cache_gb=0.01, hash_secret=None)
    ranks = SimpleNamespace(largest=lambda values: values)
    with pytest.raises(InvalidArgumentError, match="hash_secret must be given to ranks"):
        make_context(config, model=MODEL, identity=IDENTITY, agreement=ranks)
    assert not (tmp_path / "x").exists()
