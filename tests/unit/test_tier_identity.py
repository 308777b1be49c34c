"""The identity: all facts that must be equal for two processes to share an entry."""

import dataclasses
import json
import shutil
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from disk_rig import file_of, load, open_tier, put

from mamba_cache import CacheConfig, InvalidArgumentError, KVCacheSpec, StateSpec
from mamba_cache.states import StateTensorSpec
from mamba_cache.tiers import CacheIdentity, ModelIdentity, Numerics, ParallelRank, Refusal
from mamba_cache.tiers.identity import tenant_digest

CONFIG = {
    "num_kv_blocks": 8,
    "max_slots": 4,
    "block_size_tokens": 64,
    "ssm_chunk_size": 16,
    "hash_secret": b"secret",
    "slot_quantization": "int8",
    "quantized_tensors": ("ssm",),
}
MODEL = {"name": "org/model", "weights": "sha256:1", "adapter": "lora:1", "settings": "eager"}
RANK = {
    "tensor": 0, "tensor_size": 2, "pipeline": 0, "pipeline_size": 2,
    "context": 0, "context_size": 2,
}  # fmt: skip
NUMERICS = {
    "architecture": "H200 sm_90",
    "torch_version": "2.13",
    "triton_version": "3.7",
    "kernels": "mamba-cache 0.1.0",
    "matmul_precision": "highest",
}
STATE = {"conv": (2, (4, 3), torch.bfloat16), "ssm": (2, (2, 4, 8), torch.float32)}
KV = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.bfloat16}


def facts_of(identity):
    """Return the facts in an identity's file."""
    return json.loads(identity.canonical)


def identity(model=(), rank=(), numerics=(), config=(), state=(), kv=()):
    """Return the usual identity, with the given facts changed."""
    tensors = [StateTensorSpec(name, *rest) for name, rest in (STATE | dict(state)).items()]
    described = ModelIdentity(
        **(MODEL | dict(model)),
        rank=ParallelRank(**(RANK | dict(rank))),
        numerics=Numerics(**(NUMERICS | dict(numerics))),
    )
    kv_spec = None if kv is None else KVCacheSpec(**(KV | dict(kv)))
    settings = CacheConfig(**(CONFIG | dict(config)))
    return CacheIdentity.of(described, settings, StateSpec(tuple(tensors)), kv_spec)


def test_an_identity_holds_the_facts_of_its_model() -> None:
    facts = facts_of(identity())
    assert (facts["model"], facts["weights"]) == (MODEL["name"], MODEL["weights"])
    assert (facts["adapter"], facts["settings"]) == (MODEL["adapter"], MODEL["settings"])
    assert (facts["rank"], facts["numerics"]) == (RANK, NUMERICS)
    assert CacheIdentity(identity().canonical) == identity()


CHANGES = {
    "model": {"model": {"name": "other/model"}},
    "weights": {"model": {"weights": "sha256:2"}},
    "adapter": {"model": {"adapter": "lora:2"}},
    "settings": {"model": {"settings": "sdpa"}},
    "rank.tensor": {"rank": {"tensor": 1}},
    "rank.tensor_size": {"rank": {"tensor_size": 4}},
    "rank.pipeline": {"rank": {"pipeline": 1}},
    "rank.pipeline_size": {"rank": {"pipeline_size": 4}},
    "rank.context": {"rank": {"context": 1}},
    "rank.context_size": {"rank": {"context_size": 4}},
    "numerics.architecture": {"numerics": {"architecture": "H100 sm_90"}},
    "numerics.torch_version": {"numerics": {"torch_version": "2.12"}},
    "numerics.triton_version": {"numerics": {"triton_version": "3.6"}},
    "numerics.kernels": {"numerics": {"kernels": "mamba-cache 0.2.0"}},
    "numerics.matmul_precision": {"numerics": {"matmul_precision": "high"}},
    "state": {"state": {"ssm": (2, (2, 8, 4), torch.float32)}},
    "kv.num_layers": {"kv": {"num_layers": 3}},
    "kv.num_kv_heads": {"kv": {"num_kv_heads": 1}},
    "kv.head_dim": {"kv": {"head_dim": 16}},
    "kv.dtype": {"kv": {"dtype": torch.float16}},
    "block_size_tokens": {"config": {"block_size_tokens": 128}},
    "ssm_chunk_size": {"config": {"ssm_chunk_size": 32}},
    "quantization.tensors": {"config": {"quantized_tensors": ("ssm", "conv")}},
    "hash.secret": {"config": {"hash_secret": b"another"}},
}
FURTHER_CHANGES = {
    "a state's dtype": {"state": {"ssm": (2, (2, 4, 8), torch.bfloat16)}},
    "a state's layers": {"state": {"ssm": (3, (2, 4, 8), torch.float32)}},
    "a further tensor": {"state": {"more": (2, (1,), torch.float32)}},
    "no attention": {"kv": None},
    "no quantisation": {"config": {"slot_quantization": None}},
    "the hash's algorithm": {"config": {"hash_algorithm": "sha256"}},
}


@pytest.mark.parametrize("fact", CHANGES)
def test_one_changed_fact_is_another_identity(fact: str) -> None:
    usual, other = identity(), identity(**CHANGES[fact])
    assert usual != other
    assert usual.differences(other) == (fact,)


def test_facts_that_one_of_two_lacks_differ() -> None:
    usual, bare = identity(), identity(kv=None)
    names = usual.differences(bare)
    assert names == bare.differences(usual)
    assert {"kv", "kv.num_layers", "kv.dtype"} <= {*names}


def test_how_much_is_kept_does_not_matter() -> None:
    budgets = {
        "num_kv_blocks": 80,
        "max_slots": 40,
        "max_requests": 3,
        "eviction_policy": "ref_zero",
    }
    assert identity(config=budgets) == identity()
    assert len({identity(config=budgets), identity()}) == 1


def test_the_digest_does_not_depend_on_the_process() -> None:
    """While this holds, the next version of the package finds the entries of this one."""
    assert identity().digest.hex() == (
        "fdb7dc89c5e0f27f04d401858796bae6bdffdc8fe03a3c67a3cc2705be80fd0f"
    )


def test_every_setting_that_changes_results_is_a_fact() -> None:
    """A new field of an identity's parts must be a fact, or be listed as no fact."""
    for kind, names in (
        (ModelIdentity, {"model", "weights", "adapter", "settings", "rank", "numerics"}),
        (KVCacheSpec, set(KV)),
        (StateTensorSpec, {"name", "num_layers", "shape", "dtype"}),
    ):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert {"model" if n == "name" and kind is ModelIdentity else n for n in fields} == names
    assert set(facts_of(identity())["rank"]) == {f.name for f in dataclasses.fields(ParallelRank)}
    assert set(facts_of(identity())["numerics"]) == {f.name for f in dataclasses.fields(Numerics)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"weights": ""}}, "weights must be a digest"),
        ({"model": {"weights": 3}}, "weights must be a digest"),
        ({"config": {"hash_secret": None}}, "hash_secret must be given"),
        ({"model": {"name": ""}}, "name must be a string that is not empty"),
        ({"model": {"adapter": None}}, "adapter must be a string, got None"),
        ({"numerics": {"kernels": ""}}, "kernels must be a string that is not empty"),
        ({"rank": {"tensor": 2}}, "tensor must be an int in"),
        ({"rank": {"tensor_size": 0}}, "tensor_size must be an int in"),
    ],
)
def test_a_fact_of_another_kind_is_refused(change, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        identity(**change)


def test_parts_of_another_kind_are_refused() -> None:
    model = ModelIdentity(name="m", weights="w")
    state = StateSpec.mamba(1, (2, 2), (1, 2, 2), torch.float32, torch.float32)
    config = CacheConfig(num_kv_blocks=1, max_slots=1, hash_secret=b"s")
    parts = {"model": model, "config": config, "state_spec": state, "kv_spec": None}
    for name in parts:
        with pytest.raises(InvalidArgumentError, match=f"{name} must be a"):
            CacheIdentity.of(*(parts | {name: "x"}).values())
    for name in ("rank", "numerics"):
        with pytest.raises(InvalidArgumentError, match=f"{name} must be a"):
            ModelIdentity(name="m", weights="w", **{name: "x"})


@pytest.mark.parametrize(
    "canonical",
    [b"", b"{}", b"[]", b"\xff", b'{"rank": {"tensor": 0}}', b'{"rank":{"tensor":9}}', "{}"],
)
def test_other_bytes_are_no_identity(canonical) -> None:
    with pytest.raises(InvalidArgumentError, match="canonical must"):
        CacheIdentity(canonical)


def test_the_ranks_of_a_model_have_different_numbers() -> None:
    ranks = [
        ParallelRank(
            tensor=t, tensor_size=2, pipeline=p, pipeline_size=3, context=c, context_size=5
        )
        for t in range(2) for p in range(3) for c in range(5)
    ]  # fmt: skip
    assert {rank.number for rank in ranks} == set(range(30))
    assert identity(rank={"pipeline": 1}).rank == 4


def test_numerics_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Numerics.of("cpu")
    assert torch.__version__ in own.torch_version
    assert own == Numerics.of("cpu")
    assert Numerics.of("cpu", kernels="mamba-ssm 2.2").kernels.endswith(", mamba-ssm 2.2")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert Numerics.of("cpu") != own
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setattr("mamba_cache._extras.metadata.version", _not_found)
    assert Numerics.of("cpu").triton_version == "none"


def test_numerics_know_the_precision_of_each_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one backend's setting was used, ``torch.get_float32_matmul_precision`` raises."""
    monkeypatch.setattr("mamba_cache.tiers.identity._architecture", str)
    devices = "cpu", "cuda"
    own = [Numerics.of(device).matmul_precision for device in devices]
    assert own == ["highest", "highest"]
    for number, backend in enumerate((torch.backends.mkldnn, torch.backends.cuda)):
        before = backend.matmul.fp32_precision
        backend.matmul.fp32_precision = "tf32"
        try:
            now = [Numerics.of(device).matmul_precision for device in devices]
        finally:
            backend.matmul.fp32_precision = before
        assert now == ["high" if index == number else "highest" for index in range(2)]


@pytest.mark.parametrize(("text", "processor"), [
    ("processor : 0\nvendor_id : AuthenticAMD\ncpu family : 25\nmodel\t: 17\nmodel name : EPYC\n\n"
     "processor : 1\nvendor_id : AuthenticAMD\nmodel : 18\n", "AuthenticAMD 25 17"),
    ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "0x41 0xd4f"),
    ("nothing known\n", "its name"),
    (None, "its name"),
])  # fmt: skip
def test_processors_are_distinguished(text, processor, monkeypatch, tmp_path) -> None:
    """Even with the same instructions, another CPU model may sum in another order."""
    monkeypatch.setattr("mamba_cache.tiers.identity._CPU_FACTS", tmp_path / "cpuinfo")
    monkeypatch.setattr("mamba_cache.tiers.identity.platform.processor", lambda: "its name")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert f" {processor} " in Numerics.of("cpu").architecture


def _not_found(name: str) -> str:
    raise PackageNotFoundError(name)


def test_salts_are_distinguished_and_not_disclosed() -> None:
    salts = [None, "1", b"1", 1, 2, "2", b"2", "", b"", "alice", b"alice"]
    digests = {tenant_digest(b"secret", salt) for salt in salts}
    assert len(digests) == len(salts)
    assert {len(digest) for digest in digests} == {16}
    assert tenant_digest(b"secret", "alice") == tenant_digest(b"secret", "alice")
    assert tenant_digest(b"another", "alice") not in digests
    for salt in (1.5, True):
        with pytest.raises(InvalidArgumentError, match="cache_salt must be"):
            tenant_digest(b"secret", salt)


def test_neither_secret_nor_salt_is_written() -> None:
    told = identity(config={"hash_secret": b"top secret"}).canonical
    assert b"top secret" not in told
    assert json.loads(told)["hash"]["algorithm"] == "blake2b"


def test_after_any_single_change_nothing_is_found_on_the_disk(tmp_path) -> None:
    """Nothing is found in the folder, even if the files are moved to the new identity's folder."""
    usual = identity()
    first = open_tier(tmp_path, identity=usual)
    assert put(first, 1, identity=usual) is None
    first.close()
    found = open_tier(tmp_path, identity=usual)
    assert isinstance(load(found, 1, identity=usual), bytes)
    found.close()
    for change in [*CHANGES.values(), *FURTHER_CHANGES.values()]:
        other = identity(**change)
        for refusal in (Refusal.MISSING, Refusal.MAC):
            tier = open_tier(tmp_path / "others", identity=other)
            assert load(tier, 1, identity=other) is refusal
            assert load(tier, 1, identity=usual) is Refusal.MISSING
            tier.close()
            moved = file_of(tmp_path / "others", identity=other)
            shutil.copy(file_of(tmp_path, identity=usual), moved)
