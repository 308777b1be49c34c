"""A sample of ``python tests/tier_faults.py``: no fault of the tiers restores a wrong byte."""

import pytest
from example_counts import NIGHTLY
from tier_fault_rig import FAULTS, inject

COUNT = 400 if NIGHTLY else 20
EXPECTED = {
    "flipped payload bit": {"mac"},
    "flipped header bit": {"mac"},
    "truncated file": {"short"},
    "zero filled file": {"magic"},
    "swapped entries": {"digest"},
    "swapped payloads": {"mac"},
    "torn write": {"mac"},
    "flipped host bit": {"payload_digest"},
    "flipped host header": {"checksum"},
    "failing copy": {"right"},
    "partial batch": {"right", "missing"},
    "slow copy": {"right", "missing"},
}
"""Outcomes that each kind of fault must produce."""


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_restores_a_wrong_byte(tmp_path, name, rng) -> None:
    count = COUNT if name != "killed writer" else 4
    counts = inject(tmp_path, name, count, int(rng.integers(2**32)))
    assert (counts.wrong, counts.hung, counts.leaked) == (0, 0, 0), counts.first_breach
    assert counts.injected == count
    assert EXPECTED.get(name, set()) <= set(counts.outcomes)
