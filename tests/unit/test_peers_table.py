"""What went wrong in other systems, the test that shows it cannot here, and when that test fails.

Each row was seen to fail: ``removed`` says what was taken out of the package for it.
"""

import ast
from dataclasses import dataclass

import pytest
from context_rig import BLOCK, add, generate, make_context, run_step
from sources import ROOT

from mamba_cache.slots import EveryNthBlock


@dataclass(frozen=True)
class Row:
    """A lesson.

    Attributes:
        happened: What went wrong, and where.
        removed: What was removed here to see the tests fail.
        tests: Tests that fail then, as ``file::function`` under ``tests/``.
    """

    happened: str
    removed: str
    tests: tuple[str, ...]


CONTRACTS = "unit/test_context_contracts.py::"
HITS = "unit/test_context_hits.py::"
SLOTS = "unit/test_regressions_slots.py::"
HOST, DISK = "unit/test_host_tier.py::", "unit/test_disk_tier.py::"
PEERS = "unit/test_tier_peers.py::"

WRONG_STATE = [
    Row(
        "one call evicted the slot of a block that it named: two blocks, one slot (Megatron)",
        "protected=ids in SlotPool.allocate_slots_batch",
        (SLOTS + "test_a_call_never_evicts_the_slot_of_a_block_that_it_names",),
    ),
    Row(
        "an invalidated slot's hash stayed findable; the later restore zeroed (Megatron)",
        "forget_block in SlotPool._unassign; Admitter.renew_restore",
        (
            SLOTS + "test_an_invalidated_block_is_not_findable",
            CONTRACTS + "test_lost_state_is_planned_anew",
            CONTRACTS + "test_lost_state_without_another_starts_from_zero",
        ),
    ),
    Row(
        "slots without a hash survived the deregistration of their block (Megatron)",
        "the block ids in SlotPool.on_kv_blocks_deregistered",
        (SLOTS + "test_a_slot_without_a_hash_does_not_survive_its_block",),
    ),
    Row(
        "a hash was published before the forward; an abort left it (vLLM #56525, #57580)",
        "the wait for commit: hashes registered at the end of StepRunner.begin",
        (
            CONTRACTS + "test_nothing_is_findable_before_commit",
            CONTRACTS + "test_aborted_step_leaves_nothing_to_hit",
        ),
    ),
    Row(
        "of two requests of a step one read the state that the other computed (vLLM #29387)",
        "the wait for commit: hashes registered by Admitter.admit, slots housed by reserve",
        (
            CONTRACTS + "test_requests_of_one_step_do_not_read_each_other",
            SLOTS + "test_a_second_request_of_the_step_cannot_read_an_unwritten_state",
        ),
    ),
    Row(
        "a checkpoint taken at a length that an overlapped step had advanced (SGLang #29792)",
        "the count of the earlier step: StepRunner._take takes the step's end as reached",
        ("integration/test_speculative_async.py::test_answers_are_those_of_a_plain_run",),
    ),
    Row(
        "a graph's replay filled the padded buffer's front, the consumer its end (SGLang #32555)",
        "the padding written by step_buffers._HostSide",
        ("property/test_step_buffers.py::test_tensors_equal_loops",),
    ),
    Row(
        "chunks counted by request against kernels that number the batch (SGLang #31833, #33450)",
        "first_chunk[which] in StepBuffers._fill_chunks",
        (CONTRACTS + "test_many_sequences_save_their_own_states",),
    ),
    Row(
        "cache chunks of 128 tokens indexed into states kept per 64 (SGLang #33515)",
        "the checks in CacheConfig._check_alignment and slots._context.checkpoint_alignment",
        (
            "unit/test_config.py::test_states_are_kept_on_the_chunk_grid",
            SLOTS + "test_checkpoints_off_the_kernels_chunks_are_refused_at_construction",
        ),
    ),
    Row(
        "the kernel kept float32 states, the pool bfloat16: a hit was no miss (SGLang #33515)",
        "the dtype in transfers._check_fits and extraction._check_ssm",
        (
            SLOTS + "test_a_state_is_never_rounded_on_its_way_into_a_slot",
            "kernels/test_extract.py::test_pool_of_another_dtype_than_the_kernels_is_refused",
        ),
    ),
    Row(
        "a preempted request resumed without its state (SGLang #22493, #35957)",
        "is_first of a request that has generated tokens, in Admitter.admit",
        (CONTRACTS + "test_preempted_request_continues_exactly",),
    ),
    Row(
        "a recycled slot was not cleared for a request that started fresh (vLLM #56524)",
        "the clearing of rows without a lease in plan_step",
        (CONTRACTS + "test_recycled_row_starts_from_zero",),
    ),
    Row(
        "a forced preemption was listed among the resumed alone: a stale index (vLLM #35157)",
        "the resumed requests in align.host.cleanup_mamba_state_idx",
        ("unit/test_align_host.py::test_a_forced_preemption_is_among_the_resumed_alone",),
    ),
    Row(
        "condensing the batch moved accepted counts before their copy came (vLLM #53919)",
        "the slots of the batch: counts gathered by batch row in prepare_attn",
        ("unit/test_align_resident.py::test_counts_follow_the_slot_when_the_batch_is_reordered",),
    ),
    Row(
        "a conv shift within one block ran as a parallel copy (vLLM #50729)",
        "the order of tokens in the kernel's shift",
        ("kernels/test_align_copies.py::test_wide_window_is_shifted_within_one_block",),
    ),
    Row(
        "state columns were seeded with the attention block's size (vLLM #53142, #55507)",
        "the Mamba group's block size in resident._column_tokens and host's preprocess",
        (
            "unit/test_align_resident.py::test_columns_are_seeded_in_tokens_of_the_mamba_block",
            "unit/test_align_host.py::test_columns_are_counted_in_tokens_of_the_mamba_block",
        ),
    ),
    Row(
        "a prompt's padded tail was computed: a state of too many tokens (vLLM #55178)",
        "the copy at commit: the boundary's state taken after the next step",
        (CONTRACTS + "test_checkpoint_at_end_of_prompt_is_the_state_there",),
    ),
    Row(
        "the kept tokens were cut but not the state: they named different prefixes (SGLang #24380)",
        "the look-up of the published block in Publisher.publish",
        (
            "unit/test_peers_table.py::"
            "test_a_state_is_published_only_beside_keys_and_values_of_the_same_prefix",
        ),
    ),
    Row(
        "an aborted load left a request on an uninitialised slot (SGLang #30986)",
        "the generation in SlotPool.is_current; the epoch in Admitter.renew_restore",
        (
            SLOTS + "test_a_reader_notices_that_its_slot_went_to_the_same_block_anew",
            "unit/test_isolation.py::test_slots_reset_under_a_scheduled_request_are_reserved_anew",
        ),
    ),
    Row(
        "int32 offsets overflowed in large pools (vLLM #40905, SGLang #33665)",
        "the widening of rows in the copy kernel",
        ("kernels/test_state_copy.py::test_offsets_past_int32",),
    ),
]

CRASHES_AND_LEAKS = [
    Row(
        "an assert when every state was locked (SGLang #36770, #40128)",
        "the cut to the slots that can be had, in SlotPool.reserve_slots",
        (
            CONTRACTS + "test_full_pool_is_not_an_error",
            SLOTS + "test_no_slot_to_be_had_is_no_error_for_optional_work",
        ),
    ),
    Row(
        "a slot taken at match time leaked when admission failed (SGLang #16067, #20182)",
        "the unpinning in Admitter.admit and in Admitter.release",
        (
            CONTRACTS + "test_admission_failure_gives_everything_back",
            CONTRACTS + "test_cancelled_before_its_step_gives_everything_back",
        ),
    ),
    Row(
        "a double free was accepted (SGLang)",
        "the checks in SlotPool._check_reserved and KVBlockAllocator.release_memory_blocks",
        (
            SLOTS + "test_a_double_free_raises",
            "unit/test_kv_block_allocator.py::test_double_free_is_refused",
        ),
    ),
    Row(
        "a parent was evicted before its child, which can never match again (Megatron)",
        "the count of children in KVBlockAllocator._offer_for_eviction",
        ("unit/test_kv_block_allocator.py::test_a_parent_is_never_evicted_before_its_child",),
    ),
    Row(
        "registering a block again raised its parent's count for ever (Megatron)",
        "the look for a holder in KVBlockAllocator._register",
        ("unit/test_kv_block_registration.py::test_registration_is_idempotent",),
    ),
    Row(
        "unlinked nodes of the LRU list kept memory (SGLang #25770)",
        "the rebuilding in EvictionQueue.push",
        ("property/test_eviction_queue.py::test_stale_entries_do_not_pile_up",),
    ),
    Row(
        "a prompt shorter than a block never hit, silently (vLLM #40696, #51198)",
        "the reason PROMPT_SHORTER_THAN_BLOCK in find_prefix",
        (HITS + "test_short_prompt_says_why_it_missed",),
    ),
    Row(
        "a chunk's length was floored to 0: a livelock (vLLM #40707)",
        "the chunk kept whole where it is shorter than a block, in the scheduler",
        ("integration/test_engine.py::test_chunks_smaller_than_a_block_still_make_progress",),
    ),
    Row(
        "an idle step wiped the cache (Megatron #5502)",
        "preserve_prefix_cache in ContextUpkeep.reset",
        ("unit/test_context_reset.py::test_reset_that_keeps_the_cache_ends_a_step_in_flight",),
    ),
]

HIT_RATE = [
    Row(
        "a hit refreshed all ancestors of the state that it used (SGLang #31643)",
        "on_consumed where a state is restored, and where a step that restored one is committed",
        (
            SLOTS + "test_a_hit_refreshes_only_the_state_that_it_consumed",
            HITS + "test_a_hit_keeps_its_state_under_the_consumed_policy",
        ),
    ),
    Row(
        "a shared prefix was missed until the third request (SGLang #22935, vLLM #45238)",
        "the wanted boundaries in CheckpointPlanner._positions",
        (HITS + "test_wanted_checkpoint_makes_the_second_request_hit",),
    ),
    Row(
        "the states of one huge prompt flooded the slots (SGLang #36935)",
        "the limit to three positions in MegatronPlacement",
        (HITS + "test_long_prompt_does_not_flood_the_slots",),
    ),
    Row(
        "an identical prompt never hit (SGLang #21158)",
        "the penultimate block in MegatronPlacement",
        (HITS + "test_identical_prompt_hits",),
    ),
    Row(
        "a state at every block: seventeen times the states for one more hit in a hundred",
        "MegatronPlacement as the default",
        ("unit/test_mamba_slot_allocator.py::test_lru_and_megatrons_three_are_the_defaults",),
    ),
]

TIERS = [
    Row(
        "a state saved from a freed or speculative block, kept by deduplication (vLLM #53084)",
        "Tiering._is_there, which says True; the check of the digest in PlainTransfers.load",
        (
            HOST + "test_what_is_written_over_while_it_was_copied_is_never_restored",
            PEERS + "test_nothing_of_a_draft_that_was_rejected_is_kept_below",
            PEERS + "test_bad_bytes_are_not_kept_because_they_are_there_already",
        ),
    ),
    Row(
        "a boundary off by one (vLLM #51094, #51100)",
        "one block of the state's index in Tiering.read; min_computed_tokens in Tiering.extend",
        (PEERS + "test_prompts_around_a_boundary_resume_at_one_that_they_have_passed",),
    ),
    Row(
        "attention hit and state hit disagreed (vLLM #46453, LMCache #2863, SGLang #39147)",
        "the look for blocks in Tiering.extend; the look for states there",
        (
            HOST + "test_a_state_without_its_blocks_is_no_boundary",
            HOST + "test_blocks_without_a_state_are_no_boundary",
        ),
    ),
    Row(
        "a load was aborted and its slot published before its bytes had come (SGLang #30986)",
        "the cancelling of the chunk in Admitter.release; the wait for is_done in Tiering.poll",
        (
            HOST + "test_loads_that_nobody_wants_any_more_leave_nothing_behind",
            HOST + "test_copies_that_come_late_are_not_found_before_they_are_over",
        ),
    ),
    Row(
        "a prefetch brought blocks without the state, or a part of it (SGLang #30057, #39862)",
        "the state in LowerTierLink._plan; the second tensor in RowLayout.views",
        (
            "unit/test_prefetch.py::test_the_next_best_boundary_is_brought_where_a_block_is_missing",
            "unit/test_prefetch.py::test_what_is_refused_below_is_computed",
            "unit/test_tier_rows.py::test_entries_lie_in_rows_to_the_bit",
        ),
    ),
    Row(
        "stored before computed, loaded over what is read, a source reused early (vLLM #45704)",
        "the retiring of leases in Tiering.cancel, which are released at once",
        (
            PEERS + "test_no_row_is_given_away_while_a_copy_from_it_is_under_way",
            HOST + "test_rows_that_are_all_in_use_are_not_given_away",
        ),
    ),
    Row(
        "one of several pages, or another layout, was taken for the whole (LMCache #4701)",
        "DiskTier._check_size; the payload's size in DiskTier._recovery_refusal",
        (
            DISK + "test_sizes_are_checked",
            DISK + "test_headers_of_payloads_of_another_size_are_refused",
        ),
    ),
    Row(
        "the key lacked the weights, the rank or the path (SGLang #38362, #35484, lmdeploy #4930)",
        "a fact of CacheIdentity.of; the identity in DiskTier._name_of",
        (
            "unit/test_tier_identity.py::test_one_changed_fact_is_another_identity",
            "unit/test_tier_identity.py::test_after_any_single_change_nothing_is_found_on_the_disk",
            DISK + "test_a_second_user_of_a_folder_is_refused",
        ),
    ),
    Row(
        "no hits, ever: a hash seed drawn in each process (SGLang #26448, LMCache #1139)",
        "the refusal of an unset secret in CacheIdentity.of; hash_secret in Tiering",
        (
            "unit/test_tier_identity.py::test_a_secret_drawn_in_each_process_is_refused",
            "integration/test_disk_restart.py::"
            "test_a_second_process_skips_what_the_first_computed_with_equal_tokens",
        ),
    ),
    Row(
        "a rename without fsync: short reads and files of zeroes after power loss (file tiers)",
        "the wait for the disk in DiskTier._write; the look at short reads in SlabFile.read",
        (
            DISK + "test_a_failed_write_is_counted_and_not_findable",
            DISK + "test_a_file_cut_short_is_refused",
            DISK + "test_damage_behind_its_back_is_refused_by_name",
        ),
    ),
    Row(
        "pickle from a socket (CVE-2025-32444, CVE-2026-3059, CVE-2024-50050)",
        "nothing: a module of the package that imports pickle makes it fail",
        (PEERS + "test_nothing_is_unpickled",),
    ),
]

ROWS = WRONG_STATE + CRASHES_AND_LEAKS + HIT_RATE + TIERS
TESTS = sorted({test for row in ROWS for test in row.tests})


def test_no_row_is_without_a_test():
    assert [row.happened for row in ROWS if not row.tests or not row.removed] == []
    assert len({row.happened for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("test", TESTS)
def test_the_test_exists_and_runs(test):
    file, name = test.split("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    [found] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert not any("skip" in ast.unparse(decorator) for decorator in found.decorator_list)


def test_a_state_is_published_only_beside_keys_and_values_of_the_same_prefix():
    """The blocks of the second request stay private, and so does what it would save under them."""
    context = make_context(placement=EveryNthBlock(1))
    prompt = [(3 * i * i + 2 * i) % 13 for i in range(3 * BLOCK + 2)]
    for name in ("first", "second"):
        add(context, name, prompt)
    run_step(context)
    slots, hashes = context.slot_allocator, context.kv_block_allocator.block_hashes
    housed = slots.slot_to_block[slots.slot_to_block >= 0]
    assert len(housed) == 3
    assert (hashes[housed.long()] >= 0).all()
    for name in ("first", "second"):
        context.finish(name)
    assert generate(context, prompt, 2)[2].skip_tokens == 3 * BLOCK
