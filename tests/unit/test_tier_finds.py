"""What the machine of all tiers has found, one test each."""

from collections import deque

import pytest
from context_rig import BLOCK, add, generate, run_step, uncached
from disk_rig import Answer, buffer_for, facts_of, open_tier, put
from interrupt_tiers_rig import OTHERS as ON_DISK
from interrupt_tiers_rig import Made
from tier_rig import make_tiered
from tiers_machine import LateTier

from mamba_cache.context import Prefetch, Request
from mamba_cache.errors import TokenCapacityError
from mamba_cache.slots import AdaptiveSlotPolicy
from mamba_cache.tiers import DiskTier
from mamba_cache.tiers.jobs import TierJobs
from mamba_cache.tiers.rows import RowPool

LONG = [(3 * i * i + 2 * i) % 13 for i in range(30)]
PROMPT = [(7 * i * i + 3 * i) % 13 for i in range(2 * BLOCK + 1)]
OTHERS = [[(5 * i + k) % 13 for i in range(4 * BLOCK - 2)] for k in range(1, 4)]


def test_a_request_that_has_grown_resumes_by_a_load_under_a_policy_that_knows_prompts():
    """The policy knew the prompt as it was first; the state that is loaded lies beyond it."""
    context = make_tiered(save_decode_states=True)
    context.slot_allocator.change_policy(AdaptiveSlotPolicy())
    add(context, "grown", PROMPT)
    tokens = []
    while len(tokens) < 2 * BLOCK:
        tokens.append(run_step(context)["grown"][1])
    context.preempt("grown")
    context.wait_for_tiers()
    for other in OTHERS:
        generate(context, other, 1)
    admission = context.resume_request("grown")
    assert admission.loads_state
    assert admission.skip_tokens > len(PROMPT)
    run_step(context)
    assert context.finish("grown")[:-1] == tokens


def test_an_admission_that_is_refused_where_a_load_finds_no_slot_evicts_nothing():
    """With the load it would have fitted the step; without, it does not."""
    context = make_tiered(max_tokens=40)
    generate(context, LONG, 1)
    for other in OTHERS:
        generate(context, other, 1)
    add(context, "another", [1] * 20)
    slots = context.slot_allocator
    slots.pin_slots([slot for slot in range(slots.max_slots) if slots.slot_to_block[slot] >= 0])
    before = context.fingerprint()
    with pytest.raises(TokenCapacityError):
        add(context, "again", LONG)
    assert context.fingerprint() == before
    assert not any(context.host_tier.leases.values())


def test_two_requests_of_a_step_that_could_load_one_state_are_both_right():
    """The first loads it, for a block that is on the GPU and has a slot reserved for it then."""
    context = make_tiered(num_kv_blocks=60)
    generate(context, LONG, 1)
    for other in OTHERS:
        generate(context, other, 1)
    one, two = add(context, "one", LONG), add(context, "two", LONG)
    assert (one.loads_state, one.loaded_blocks) == (True, 0)
    assert (two.loads_state, two.skip_tokens) == (False, 0)
    tokens = {request_id: token for request_id, (_, token) in run_step(context).items()}
    assert set(tokens.values()) == {uncached(LONG, 1)[0][0]}
    context.check_invariants()


def interrupt_once(monkeypatch, owner, name):
    """The next call of it is interrupted before it does anything."""
    call = getattr(owner, name)

    def interrupted(*_, **__):
        monkeypatch.setattr(owner, name, call)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.fixture
def made():
    """A context over a disk that has the prompt, and nothing above it."""
    made = Made(on_disk=True).fill().leave()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(TierJobs, "add"), (RowPool, "_lease"), (DiskTier, "load"), (DiskTier, "_check_size")],
)
def test_a_prefetch_that_is_interrupted_keeps_no_row(made, monkeypatch, owner, name):
    """A row was lent to the disk, which had never heard of it: it was held for ever."""
    interrupt_once(monkeypatch, owner, name)
    with pytest.raises(KeyboardInterrupt):
        made.prefetch()
    assert not made.context.host_tier._lower
    made.check()  # of the host tier's bookkeeping, an interrupt in it asks for a reset


def test_a_spill_to_the_disk_that_is_interrupted_keeps_no_row(monkeypatch):
    made = Made(on_disk=True)
    interrupt_once(monkeypatch, DiskTier, "put")
    with pytest.raises(KeyboardInterrupt):
        made.fill()
    assert not made.context.host_tier._lower
    made.check()
    made.close()


def test_who_waits_for_a_flight_that_an_interrupt_took_back_is_told(made, monkeypatch):
    """The second prefetch wants what the first brings, and more; it is interrupted."""
    late = LateTier(made.context.disk_tier)
    late.is_late = True
    made.context._tiering.lower.tier = late
    made.prefetch()
    assert made.handle.num_entries
    assert not made.handle.is_done
    interrupt_once(monkeypatch, DiskTier, "has_many")
    with pytest.raises(KeyboardInterrupt):
        made.context.prefetch(Request(request_id="b", prompt_tokens=ON_DISK[0]))
    assert made.handle.is_done


def test_a_close_that_is_interrupted_can_be_called_again(made, monkeypatch):
    """The folder had stayed locked until the process ended."""
    interrupt_once(monkeypatch, DiskTier, "_close_files")
    with pytest.raises(KeyboardInterrupt):
        made.context.close()
    made.leave()
    assert not made.check()


def test_rows_of_a_disk_that_is_not_done_in_time_are_given_back_by_a_reset(made, monkeypatch):
    """Until then they may be written; nothing else gets them."""
    late = LateTier(made.context.disk_tier)
    late.is_late = True
    made.context._tiering.lower.tier = late
    with monkeypatch.context() as patch:
        patch.setattr(late, "flush", lambda _: False, raising=False)
        made.prefetch()
        interrupt_once(patch, Prefetch, "begin")
        with pytest.raises(KeyboardInterrupt):
            made.context.prefetch(Request(request_id="b", prompt_tokens=ON_DISK[0]))
    assert made.context.host_tier._lower
    made.context.reset()
    assert not made.context.host_tier._lower
    made.context._tiering.lower.tier = late.tier
    assert not made.check()


def test_what_an_interrupted_call_has_queued_on_the_disk_is_done(tmp_path):
    """It had told no thread of it, and whoever waited for the disk waited for ever."""
    tier, answer = open_tier(tmp_path), Answer()
    assert put(tier, 1) is None
    struck = [True]

    class Interrupted(deque):
        def append(self, item):
            super().append(item)
            if struck.pop():
                raise KeyboardInterrupt

    tier._jobs.loads = Interrupted()
    facts = facts_of(1)
    with pytest.raises(KeyboardInterrupt):
        tier.load(facts, buffer_for(facts), answer)
    assert tier.flush(60)
    assert answer.get() is None
    tier.check_invariants()
    tier.close()
