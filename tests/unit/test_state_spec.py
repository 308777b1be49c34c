"""Specs of states and KV blocks, and their number in a budget."""

import math
import re

import numpy as np
import pytest
import torch

from mamba_cache.errors import BudgetError, InvalidArgumentError
from mamba_cache.states import (
    KVCacheSpec,
    LayerKind,
    SlotQuantization,
    StateSpec,
    StateTensorSpec,
    slots_in_budget,
)

MAMBA = StateSpec.mamba(3, (10, 4), (2, 5, 7), torch.bfloat16, torch.float32)
MAMBA_BYTES = 3 * (10 * 4 * 2 + 2 * 5 * 7 * 4)
KV = KVCacheSpec(num_layers=2, num_kv_heads=3, head_dim=8, dtype=torch.bfloat16)
KV_TOKEN_BYTES = 2 * 2 * 3 * 8 * 2


def gib(num_bytes):
    return num_bytes / 2**30


def test_specs_of_mamba_layers():
    conv, ssm = MAMBA.tensors
    assert conv == StateTensorSpec("conv", 3, (10, 4), torch.bfloat16)
    assert ssm == StateTensorSpec("ssm", 3, (2, 5, 7), torch.float32)
    again = StateSpec.mamba(3, [10, 4], [2, 5, 7], torch.bfloat16, torch.float32)
    assert {MAMBA: 1}[again] == 1
    odd = StateTensorSpec("odd", 5, (), torch.int8)  # other layers, another dtype
    assert StateSpec((conv, ssm, odd)).bytes_per_slot == MAMBA_BYTES + 5


def test_kv_block_holds_keys_and_values():
    cache = KV.allocate(11, 16, "cpu")
    assert cache.shape == (2, 2, 11, 16, 3, 8)
    assert cache.dtype == torch.bfloat16
    assert cache.count_nonzero() == 0
    assert KV.bytes_per_block(16) == cache.nbytes // 11 == 16 * KV_TOKEN_BYTES


def test_a_budget_holds_whole_slots_only():
    """The error of a too small budget names the minimum."""
    assert slots_in_budget(gib(7 * MAMBA_BYTES), MAMBA) == 7
    assert slots_in_budget(gib(8 * MAMBA_BYTES - 1), MAMBA) == 7
    budget = gib(MAMBA_BYTES - 1)
    with pytest.raises(BudgetError, match="1 slot") as raised:
        slots_in_budget(budget, MAMBA)
    assert f"{budget} GiB is too small" in str(raised.value)
    assert f"{MAMBA_BYTES} bytes" in str(raised.value)
    least = float(re.search(r"at least (\S+) GiB", str(raised.value))[1])
    assert slots_in_budget(least, MAMBA) == 1


def test_without_layers_there_is_nothing_to_budget_for():
    no_mamba = StateSpec.mamba(0, (10, 4), (2, 5, 7), torch.bfloat16, torch.float32)
    assert slots_in_budget(1.0, no_mamba) == 0


def test_numpy_ints_are_kept_as_plain_ints():
    """numpy ints overflow, so sizes in bytes would be wrong."""
    tensor = StateTensorSpec("ssm", np.int32(3), (np.int32(2**20), np.int32(2**12)), torch.float32)
    assert tensor.layer_bytes == 2**34
    kv = KVCacheSpec(np.int32(64), np.int32(64), np.int32(256), torch.float32)
    assert kv.bytes_per_block(np.int32(2**14)) == 2**37
    values = (tensor.num_layers, *tensor.shape, kv.num_layers, kv.num_kv_heads, kv.head_dim)
    assert {type(value) for value in values} == {int}


GDN = LayerKind(
    "gdn", 3, [("conv", [10, 3], torch.bfloat16), ("recurrent", (2, 5, 7), torch.float32)]
)
SHORT = LayerKind("short_conv", 0, (("conv", (6, 2), torch.bfloat16),))


def test_kinds_of_layers_are_named_tensors():
    """In a pool, a tensor's name begins with its kind's."""
    spec = StateSpec.of(GDN, SHORT)
    assert spec.tensors == (
        StateTensorSpec("gdn.conv", 3, (10, 3), torch.bfloat16),
        StateTensorSpec("gdn.recurrent", 3, (2, 5, 7), torch.float32),
        StateTensorSpec("short_conv.conv", 0, (6, 2), torch.bfloat16),
    )
    assert spec.kinds == (GDN, SHORT)
    assert spec.bytes_per_slot == 3 * (10 * 3 * 2 + 2 * 5 * 7 * 4)
    assert GDN.names == ("conv", "recurrent")
    assert GDN.name_in_pool("conv") == "gdn.conv"
    assert {spec: 1}[StateSpec.of(GDN, SHORT)] == 1


def test_mamba_layers_are_a_kind_without_a_name():
    [kind] = MAMBA.kinds
    assert (kind.name, kind.num_layers, kind.names) == ("", 3, ("conv", "ssm"))
    assert StateSpec.of(kind) == MAMBA
    assert MAMBA.is_mamba
    assert not StateSpec.of(GDN).is_mamba
    assert not StateSpec(MAMBA.tensors[::-1]).is_mamba
    odd = StateTensorSpec("ssm", 4, (2,), torch.float32)
    assert not StateSpec((MAMBA.tensors[0], odd)).is_mamba


def test_tensors_of_a_kind_have_equally_many_layers():
    odd = StateTensorSpec("odd", 5, (), torch.int8)
    named = StateTensorSpec("more.odd", 5, (), torch.int8)
    assert [kind.num_layers for kind in StateSpec((*MAMBA.tensors, named)).kinds] == [3, 5]
    with pytest.raises(InvalidArgumentError, match=r"those of '' have .*\('odd', 5\)"):
        StateSpec((*MAMBA.tensors, odd)).kinds  # noqa: B018 - the property raises


def test_bytes_of_a_quantised_slot():
    """Half of bf16's and a quarter of fp32's SSM bytes, plus a scale per column."""
    conv, codes, scales = 3 * 10 * 4 * 2, 3 * 2 * 5 * 7, 3 * 2 * 7 * 4
    assert SlotQuantization().slot_spec(MAMBA).bytes_per_slot == conv + codes + scales


F32 = torch.float32
X = [("x", (2,), F32)]
CONV = StateTensorSpec("conv", 1, (2,), F32)
REFUSED = [
    (StateTensorSpec, ("", 1, (2,), F32), "must be"),
    (StateTensorSpec, (None, 1, (2,), F32), "must be"),
    *[(StateTensorSpec, ("conv", n, (2,), F32), "must be") for n in (-1, True, 1.0)],
    *[(StateTensorSpec, ("conv", 1, (2, n), F32), "must be") for n in (0, -2, 2.5)],
    *[(StateTensorSpec, ("conv", 1, (2,), d), "must be") for d in (torch.bool, "float32")],
    (StateSpec, ((CONV, CONV),), "different names"),
    (StateSpec, ((),), "different names"),
    (LayerKind, ("a.b", 1, X), "without a dot"),
    (LayerKind, (None, 1, X), "must be a string"),
    (LayerKind, ("a", 1, []), "different names"),
    (LayerKind, ("a", 1, X * 2), "different names"),
    (LayerKind, ("a", 1, [("", (2,), F32)]), "not empty"),
    (LayerKind, ("a", 1, ["xyz"]), "a name, a shape and a dtype"),
    (LayerKind, ("a", 1, [("x", (2,))]), "a name, a shape and a dtype"),
    (LayerKind, ("a", 1, 3), "must be a collection"),
    (LayerKind, ("a", -1, X), "num_layers"),
    (LayerKind, ("a", 1, [("x", (0,), F32)]), "must be"),
    (StateSpec.of, (), "kinds of different names"),
    (StateSpec.of, (GDN, GDN), "kinds of different names"),
    (StateSpec.of, (GDN, MAMBA), "must be LayerKinds"),
    *[(SlotQuantization, (names,), "tensors must be") for names in ("ssm", (), ("ssm", "ssm"))],
    *[(SlotQuantization, (names,), "tensors must be") for names in (("ssm", 3), np.arange(2))],
    *[
        (SlotQuantization().slot_spec, (StateSpec.mamba(2, (6, 4), *ssm),), "quantised slots need")
        for ssm in (((3, 5), F32, F32), ((3, 5, 7), F32, torch.int32))
    ],
    (KVCacheSpec, (-1, 1, 1, F32), "must be"),
    (KVCacheSpec, (1, 0, 1, F32), "must be"),
    (KVCacheSpec, (1, 1, 0, F32), "must be"),
    (KV.bytes_per_block, (0,), "block_size_tokens"),
    (KV.allocate, (0, 16, "cpu"), "num_blocks"),
    (KV.allocate, (1, -16, "cpu"), "block_size_tokens"),
    *[(slots_in_budget, (bad, MAMBA), "finite") for bad in (-1.0, math.inf, math.nan)],
]


@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_specs_and_sizes_are_refused(call, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call(*arguments)
