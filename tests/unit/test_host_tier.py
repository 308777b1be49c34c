"""The host tier under a context: spills, loads and refusals."""

from unittest import mock

import pytest
import torch
from context_rig import (
    MODEL,
    add,
    assert_same_run,
    generate,
    make_config,
    make_context,
    run_step,
)
from tier_rig import (
    KV,
    STATE,
    FailingTransfers,
    LateTransfers,
    always,
    cached_rows,
    flip,
    flip_all,
    flip_header,
    host_stats,
    install,
    make_tiered,
)

from mamba_cache.context import DeviceTokens, DynamicInferenceContext, Request, RequestStatus
from mamba_cache.context.tiering import NoTiers, make_tiering
from mamba_cache.errors import (
    BudgetError,
    InvalidArgumentError,
    InvariantError,
    PoisonedError,
)
from mamba_cache.reference import Engine, SamplingParams, verify_greedy_on_device
from mamba_cache.states import KVCacheSpec, StateSpec
from mamba_cache.tiers import LoadPlanner, Rates, Refusal
from mamba_cache.tiers.identity import tenant_digest

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(30)]
OTHERS = [[(5 * i + k) % 13 for i in range(30)] for k in range(1, 6)]


def first(context):
    """Run a prompt of three blocks, with states after two and three blocks."""
    return generate(context, PROMPT, 1, checkpoint_positions=[16])


def evict(context):
    """Fill the GPU with other prompts, so that no entry of the first prompt is left there."""
    for prompt in OTHERS:
        assert_same_run(generate(context, prompt, 2), prompt)


def resume(context, *, request_id="again"):
    run = generate(context, PROMPT, 3, request_id=request_id)
    assert_same_run(run, PROMPT)
    context.check_invariants()
    return run[2]


def fill(context):
    first(context)
    evict(context)
    return context


def test_a_request_resumes_from_entries_that_the_gpu_evicted():
    context = make_tiered()
    assert first(context)[2].skip_tokens == 0
    evict(context)
    saved = context.stats().saved_states
    admission = resume(context)
    assert context.stats().saved_states == saved + 1, "only the answer's state is saved"
    assert (admission.skip_tokens, admission.loaded_blocks) == (24, 3)
    assert admission.loads_state
    assert admission.block_ids == ()
    assert admission.miss_reason is None
    stats = host_stats(context)
    assert (stats.restored, stats.refused, stats.dropped) == (4, {}, {})
    # The prefix is on the GPU again, and not loaded twice.
    assert (resume(context).loaded_blocks, host_stats(context).restored) == (0, 4)


def test_kv_blocks_on_the_gpu_are_not_loaded():
    """The joint boundary takes the state from the host and the blocks from GPU or host."""
    context = make_tiered(num_kv_blocks=100, max_slots=3)
    first(context)
    context.slot_allocator.reset()
    admission = resume(context)
    assert (admission.loaded_blocks, admission.loads_state, admission.skip_tokens) == (0, True, 24)
    assert admission.kv_matched_blocks == 3
    assert host_stats(context).restored == 1


@pytest.mark.parametrize(
    ("kept", "none_of", "dropped"), [("state", "blocks", {}), ("kv", "states", {"no_row": 8})]
)
def test_a_boundary_needs_both_the_state_and_its_blocks(kept, none_of, dropped):
    context = fill(make_tiered(**{f"num_host_{none_of}": 0}))
    assert resume(context).skip_tokens == 0
    assert host_stats(context).entries[kept] > 0
    assert host_stats(context).dropped == dropped


def _request():
    return Request(request_id="probe", prompt_tokens=PROMPT)


def test_a_match_that_breaks_off_at_a_tier_poisons_the_context(monkeypatch):
    context = make_tiered()
    monkeypatch.setattr(context._tiering, "find", lambda *_: 1 // 0)
    request = Request(request_id="x", prompt_tokens=PROMPT)
    with pytest.raises(ZeroDivisionError):
        context.match(request)
    with pytest.raises(PoisonedError, match="match broke off"):
        context.match(request)


def test_a_commit_that_breaks_off_at_a_tier_poisons_the_context(monkeypatch):
    context = make_tiered()
    monkeypatch.setattr(context._tiering, "end_step", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        first(context)
    with pytest.raises(PoisonedError, match="commit_step broke off"):
        context.begin_step()


def test_collecting_that_breaks_off_at_a_tier_poisons_the_context(monkeypatch):
    context = make_tiered()
    add(context, "a", PROMPT)
    MODEL.forward(context.begin_step().metadata, context)
    context.commit_step(DeviceTokens(torch.tensor([[1]])))
    monkeypatch.setattr(context._tiering, "pump", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        context.collect_step()
    with pytest.raises(PoisonedError, match="collect_step broke off"):
        context.begin_step()


def test_without_a_tier_there_is_none():
    context = make_context()
    assert isinstance(context._tiering, NoTiers)
    assert context.host_tier is None
    assert context.tier_stats() == ()
    context.wait_for_tiers()
    first(context)
    assert make_context(make_config(num_host_blocks=4, num_host_states=4,
                                    enable_prefix_caching=False)).host_tier is None  # fmt: skip


def test_a_budget_in_bytes_is_shared_by_a_ratio():
    config = make_config(host_cache_gb=2**-14, host_state_share=0.25)  # 16 rows of 4 KiB
    stats = host_stats(make_context(config))
    assert stats.rows == {"kv": 12, "state": 4}
    assert stats.ready_rows == stats.rows
    assert stats.row_bytes == {"kv": 4096, "state": 4096}
    with pytest.raises(BudgetError, match=r"host_cache_gb=.* is too small: it holds no KV block"):
        make_context(make_config(host_cache_gb=2**-18))
    assert host_stats(make_context(make_config(host_cache_gb=2**-18, host_state_share=1))).rows == {
        "kv": 0,
        "state": 1,
    }
    # A model without attention needs no rows for blocks.
    spec = StateSpec.mamba(
        num_layers=2, conv_shape=(4, 3), ssm_shape=(2, 2, 2), conv_dtype=torch.float32,
        ssm_dtype=torch.float32,
    )  # fmt: skip
    context = DynamicInferenceContext(config, spec, KVCacheSpec(0, 1, 4, torch.float32))
    assert host_stats(context).rows["kv"] == 0
    assert context._tiering._has_kv is False


def test_requirements_of_a_host_tier():
    config = make_config(num_host_blocks=1, num_host_states=1)
    spec = MODEL.config.state_spec(torch.float64)
    with pytest.raises(InvalidArgumentError, match="a host tier needs kv_spec"):
        DynamicInferenceContext(config, spec)
    wrongs = ("load_planner", 3), ("identity", "me")
    for name, wrong in wrongs:
        with pytest.raises(InvalidArgumentError):
            make_context(config, **{name: wrong})
    context = make_context(config)
    with pytest.raises(InvalidArgumentError, match="needs a CPU or a CUDA device, got meta"):
        make_tiering(
            config,
            kv_blocks=context.kv_block_allocator,
            slots=context.slot_allocator,
            kv_cache=torch.empty(1, 2, 3, 4, device="meta"),
            planner=None,
            identity=None,
        )


@pytest.mark.parametrize("kind", [KV, STATE])
def test_a_bit_turned_in_the_bytes_is_found_before_anything_depends_on_it(kind):
    """The request is preempted and computed again; nothing was published, no token returned."""
    context = fill(make_tiered())
    layout = context._tiering.transfers._layouts[kind]
    flip_all(context, kind, 8 * layout.payload_bytes - 9)
    before = context.stats()
    add(context, "hurt", PROMPT)
    step = context.begin_step()
    MODEL.forward(step.metadata, context)
    assert context.commit_step({"hurt": 5}) == ("hurt",)
    assert context.status("hurt") is RequestStatus.PREEMPTED
    assert context.output("hurt") == []
    assert context.stats().requests == before.requests
    context.check_invariants()
    damaged = 3 if kind is KV else 1
    assert host_stats(context).refused == {"payload_digest": damaged}
    context.host_tier.clear()  # removes the entries of the other rows
    assert context.match(_request()).kv_matched_blocks == 0
    assert context.resume_request("hurt").skip_tokens == 0
    wanted = generate(make_context(), PROMPT, 1)[1][0]
    torch.testing.assert_close(run_step(context)["hurt"][0], wanted, rtol=0, atol=1e-9)
    context.finish("hurt")
    resume(context)


def test_a_request_with_right_bytes_in_the_same_step_continues():
    context = fill(make_tiered(num_kv_blocks=24))
    for name, prompt in {"fine": PROMPT, "hurt": OTHERS[0]}.items():
        assert add(context, name, prompt).loads_state
    flip(context, STATE, context.request_table.find("hurt").current_load.leases[-1].row, 3)
    step = context.begin_step()
    MODEL.forward(step.metadata, context)
    assert context.commit_step({"fine": 7, "hurt": 8}) == ("hurt",)
    assert context.output("fine") == [7]
    context.check_invariants()


def test_tokens_that_only_the_device_has_are_dropped_too():
    context = fill(make_tiered(num_speculative_tokens=2, num_kv_blocks=24))
    flip_all(context, STATE, 3)
    add(context, "first", [1, 2, 3])
    add(context, "hurt", PROMPT)
    step = context.begin_step()
    logits = MODEL.forward(step.metadata, context)
    drafts = torch.full((4, 2), -1)
    sampled = verify_greedy_on_device(logits, step.metadata, drafts)
    assert context.commit_step(sampled) == ("hurt",)
    assert context.collect_step().keys() == {"first"}
    context.check_invariants()
    context.resume_request("hurt")


def test_a_repeated_commit_still_finds_the_damaged_entries():
    context = fill(make_tiered(num_kv_blocks=24))
    flip_all(context, STATE, 3)
    add(context, "hurt", PROMPT)
    add(context, "hurt too", OTHERS[0])
    prefills, verify = context.begin_step()._actives, context._tiering.verify
    assert len(prefills) == 2
    assert verify(prefills) == verify(prefills) == prefills
    assert context.commit_step({"hurt": 1, "hurt too": 2}) == ("hurt", "hurt too")
    fine = fill(make_tiered())
    add(fine, "fine", PROMPT)
    prefills, verify = fine.begin_step()._actives, fine._tiering.verify
    assert verify(prefills) == verify(prefills) == []
    fine.abort_step()
    fine.check_invariants()


def _row(context, kind, blocks):
    digest = context.prepare(_request()).hashes.digests[blocks - 1]
    return context.host_tier[kind]._row_of.get(digest)


def _facts(context, blocks):
    add(context, "probe", PROMPT)
    [active] = [a for a in context.request_table if a.request_id == "probe"]
    facts = context._tiering._entries(active).facts(STATE, blocks - 1)
    context.finish("probe")
    return facts


def test_before_an_entry_with_a_damaged_header_a_request_resumes():
    context = fill(make_tiered())
    flip_header(context, STATE, _row(context, STATE, 3), 700)
    assert resume(context).skip_tokens == 16
    assert host_stats(context).refused == {"checksum": 1}


def test_an_entry_offered_twice_is_copied_once():
    context = make_tiered(num_kv_blocks=100)
    tiering, facts = context._tiering, _facts(context, 1)
    for _ in range(2):
        tiering.offer_entry(1, facts)
    tiering.pump()
    stats = tiering.host.stats()
    assert (tiering.num_offers, stats.stored, stats.dropped) == (0, 1, {})
    tiering.offer_entry(1, facts)
    tiering.reset()
    assert tiering.num_offers == 0


def test_a_call_that_broke_off_leaves_entries_unless_it_was_changing_them(monkeypatch):
    context = make_tiered(num_kv_blocks=100)
    first(context)
    tiering, host, facts = context._tiering, context.host_tier, _facts(context, 1)
    tiering.let_go()
    assert host_stats(context).entries["kv"] > 0
    assert host[facts.key.kind].reserve(facts) is not None
    tiering.let_go()
    assert host_stats(context).entries == {"kv": 0, "state": 0}
    context.check_invariants()
    monkeypatch.setattr(host, "poll", mock.Mock(side_effect=InvariantError("it broke off")))
    tiering.let_go()
    monkeypatch.undo()
    context.check_invariants()


def test_a_header_of_another_entry_is_refused():
    """Swapped entries, and a row with another entry by now: each field is compared."""
    context = make_tiered(num_kv_blocks=100)
    first(context)
    host = context.host_tier
    entries, facts = host[STATE], _facts(context, 3)
    lease = host[STATE].read(facts)
    row = lease.row
    other = _row(context, STATE, 2)
    kept = entries.headers.copy()
    entries.headers[row] = kept[other]
    assert entries._refusal(row, facts) is Refusal.DIGEST
    entries.headers[row] = kept[row]
    entries.generations[row] += 1
    assert entries._refusal(row, facts) is Refusal.GENERATION
    entries.generations[row] -= 1
    flip(context, STATE, row, 8 * entries.memory.checksums.start)
    assert entries._refusal(row, facts) is Refusal.PAYLOAD_DIGEST
    lease.rows.release(lease)


@pytest.mark.parametrize("way", ["slots", "blocks"])
def test_entries_removed_during_their_copy_do_not_count(way):
    context = make_tiered(num_kv_blocks=100)
    install(context, LateTransfers)
    first(context)
    if way == "slots":
        context.slot_allocator.reset()
        expected = {"kv": 3, "state": 0}
    else:
        context.kv_block_allocator.deregister_blocks(range(100))
        expected = {"kv": 0, "state": 0}  # states are removed with their blocks
    context.wait_for_tiers()
    stats = host_stats(context)
    assert stats.entries == expected
    assert stats.dropped == {"gone": 5 - sum(expected.values())}
    if way == "blocks":
        first(context)  # in the same blocks again
        context.kv_block_allocator.deregister_blocks(range(100))
        context.wait_for_tiers()
        assert host_stats(context).dropped == {"gone": 10}
    context.check_invariants()


def test_failed_spills_are_dropped_and_counted():
    """Copies fail, too many are under way, all rows are in use."""
    context = make_tiered(num_kv_blocks=100)
    install(context, FailingTransfers).fails = {"spill"}
    first(context)
    assert host_stats(context).stored == 0
    assert host_stats(context).dropped == {"copy_failed": 5}
    context.check_invariants()
    context = make_tiered(num_kv_blocks=100)
    context._tiering._max_copies = 2
    install(context, LateTransfers)
    first(context)
    assert host_stats(context).dropped == {"queue_full": 3}
    context.check_invariants()
    context = make_tiered(num_kv_blocks=100, num_host_blocks=2, num_host_states=1)
    install(context, LateTransfers)
    first(context)
    assert host_stats(context).dropped == {"no_row": 2}
    context.wait_for_tiers()
    context.poll_tiers()
    assert host_stats(context).entries == {"kv": 2, "state": 1}
    context.check_invariants()


def test_a_state_worth_a_row_but_no_slot_gets_both():
    """The end of a repeated prompt needs the one slot; other states pass through it to the host."""
    few, alone = (
        make_context(make_config(max_slots=1, num_kv_blocks=60, **tier), load_planner=always())
        for tier in ({"num_host_blocks": 60, "num_host_states": 30}, {})
    )
    for context in (few, alone):
        for again in range(4):
            generate(context, PROMPT, 1, request_id=again)
        for prompt in OTHERS:
            generate(context, prompt[:9], 1)
    assert alone.stats().refused_states > few.stats().refused_states == 0
    assert host_stats(few).entries["state"] == few.stats().saved_states
    assert few.stats().saved_states > alone.stats().saved_states
    assert resume(few).skip_tokens == 24
    others = [generate(few, prompt, 1)[2] for prompt in OTHERS]
    assert {each.skip_tokens for each in others} == {8}
    assert sum(each.loads_state for each in others) >= 4


def test_a_slot_is_kept_until_its_copy_has_ended():
    """If half of all slots are being copied, a copy is cancelled, not the next state."""
    context = make_tiered(max_slots=4, num_kv_blocks=100)
    late = install(context, LateTransfers)
    for number, prompt in enumerate(OTHERS):
        generate(context, prompt, 1, request_id=number)
    assert len(context._tiering.pins) == 2
    context.check_invariants()
    late.run(100)
    context._tiering.poll()
    assert context._tiering.pins == []
    assert host_stats(context).dropped.get("gone", 0) < host_stats(context).entries["state"]
    context.check_invariants()
    for number, prompt in enumerate(OTHERS):
        generate(context, prompt, 1, request_id=number)
    context.reset()
    assert context._tiering.pins == []
    context.check_invariants()


def test_a_state_saved_while_decoding_is_filed_under_its_whole_prefix():
    """The tier's policy can then match the state with the next turn's path."""
    context = make_tiered(max_slots=20, num_kv_blocks=100)
    run = generate(context, PROMPT, 12)
    tokens = [*PROMPT, *run[0]]
    policy = context.host_tier[STATE].policy
    context.wait_for_tiers()
    hashes = context.prepare(Request(request_id="next", prompt_tokens=tokens)).hashes
    rows = cached_rows(context, STATE)
    depths = {policy._tree._depth_at[policy._candidates[row]] for row in rows}
    assert max(depths) > len(PROMPT) // 8
    assert all(hashes[depth - 1] in policy._tree._by_hash for depth in depths)


def test_a_load_that_raises_is_computed_instead():
    context = make_tiered()
    failing = install(context, FailingTransfers)
    fill(context)
    failing.fails = {"load"}
    add(context, "a", PROMPT)
    run_step(context)
    context.check_invariants()
    assert host_stats(context).refused == {"copy_failed": 4}
    context.finish("a")
    failing.fails = set()
    resume(context)


def test_loading_is_weighed_against_computing():
    slow = LoadPlanner(Rates(1e3, 0.0, 1e6), learns=False)
    context = make_context(
        make_config(num_kv_blocks=14, max_slots=3, num_host_blocks=60, num_host_states=30),
        load_planner=slow,
    )
    assert resume(fill(context)).skip_tokens == 0
    context._tiering.planners.host = always()
    context.reset(preserve_prefix_cache=True)
    evict(context)
    assert resume(context).skip_tokens == 24


def test_rates_are_measured_while_it_runs():
    context = make_context(
        make_config(num_kv_blocks=14, max_slots=3, num_host_blocks=60, num_host_states=30)
    )
    planner = context._tiering.planners.host
    assumed = planner.rates
    first(context)
    assert planner.rates.tokens_per_second != assumed.tokens_per_second
    # An unfinished transfer is measured later.
    transfers, known = context._tiering.transfers, planner.rates
    transfers.seconds_between = lambda begun, ended: None
    generate(context, PROMPT, 1)
    assert planner.rates == known
    del transfers.seconds_between
    context._tiering.poll()
    assert planner.rates != known
    context._tiering.planners.host = always()
    evict(context)
    context._tiering.planners.host = planner
    planner.rates = Rates(1e18, 0.0, 1e-9)
    before = planner.rates.bytes_per_second
    resume(context)
    assert planner.rates.bytes_per_second != before


def test_an_engine_brings_damaged_requests_on_again():
    sizes = {"num_kv_blocks": 14, "max_slots": 3, "num_host_blocks": 60, "num_host_states": 30}
    engine = Engine(MODEL, make_config(slot_policy="lru", **sizes))
    engine.context._tiering.planners.host = always()
    sampling = SamplingParams(max_new_tokens=4)
    first = engine.generate([PROMPT], sampling)[0].tokens
    for prompt in OTHERS:
        engine.generate([prompt], sampling)
    flip_all(engine.context, STATE, 77)
    assert engine.generate([PROMPT], sampling)[0].tokens == first
    assert host_stats(engine.context).refused["payload_digest"] >= 1
    engine.context.check_invariants()


def test_an_identity_enters_the_keys():
    context = make_tiered(num_kv_blocks=100, hash_secret=b"s")
    context._tiering._identity, context._tiering._rank = b"\7" * 32, 3
    first(context)
    key = _facts(context, 3).key
    assert (key.identity, key.rank) == (b"\7" * 32, 3)
    assert key.tenant == tenant_digest(b"s", None)


def test_rows_held_without_a_load_or_copy_are_noticed():
    context = make_tiered(num_kv_blocks=100)
    first(context)
    lease = context.host_tier[STATE].read(_facts(context, 3))
    with pytest.raises(InvariantError, match="held for no load and no copy"):
        context.check_invariants()
    lease.rows.release(lease)
