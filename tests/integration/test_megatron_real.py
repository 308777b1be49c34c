"""This package's slots in real contexts of Megatron Core, step by step.

The wheels come from the folder that MEGATRON_WHEELS names (tests/engines/megatron.sh fetches them).
Stubs on the host replace CUDA calls, except in a last class of tests for a device.
"""

import re
import runpy

import pytest
import torch
from megatron_rig import (
    BLOCK,
    CONV,
    DTYPES,
    LAYERS,
    SSM,
    WHEELS,
    Server,
    find_wheels,
    host_for_cuda,
    make_context,
    megatron_core,
    megatron_steps,
    random_tokens,
)
from pages import python_blocks
from sources import ROOT

from mamba_cache import MambaSlotAllocator
from mamba_cache.errors import MambaCacheError, MissingStateError
from mamba_cache.integrations import megatron
from mamba_cache.slots import allocator
from mamba_cache.states import StateCopier

FOUND = find_wheels()
VERSIONS = {".".join(version.split(".")[:2]): wheel for version, wheel in FOUND.items()}

SKIPPED = [0, 0, 3 * BLOCK, 2 * BLOCK, BLOCK, 0]
"""Tokens that requests of ``megatron_steps`` skip: a branch, a prompt's end, one block less."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::UserWarning:megatron"),
]


@pytest.fixture(scope="module", params=list(VERSIONS) or ["no wheels"])
def imported(request, tmp_path_factory):
    """A version of Megatron Core."""
    assert FOUND, f"{WHEELS} must name a folder with wheels"
    folder = tmp_path_factory.mktemp("megatron")
    with megatron_core(VERSIONS[request.param], folder) as parts:
        yield parts


@pytest.fixture
def core(imported):
    """Megatron Core with its own slots and with stubs on the host in place of CUDA."""
    with host_for_cuda():
        yield imported
    megatron.uninstall()


def test_the_example_computes_only_what_is_new(core, capsys):
    example = runpy.run_path(str(ROOT / "examples" / "megatron_core.py"))
    assert example["main"]() == 0
    printed = capsys.readouterr().out
    assert re.findall(r"(\d+) computed with the cache", printed) == ["701", "64", "44"]
    assert "States with and without the cache agree" in printed


def test_the_guides_lines_run(core, generator, capsys):
    install, part, check = python_blocks("how-to/megatron.md")
    exec(compile(install, "how-to/megatron.md", "exec"), {})
    assert type(Server(core, generator).slots) is MambaSlotAllocator
    megatron.uninstall()
    names = {"megatron": megatron, "model_config": 24, "inference_config": 8}
    names["DynamicInferenceContext"] = lambda blocks, slots: make_context(core, blocks, slots)
    for code in (part, check):
        exec(compile(code, "how-to/megatron.md", "exec"), names)
    assert capsys.readouterr().out == "0 0 0\n"


@pytest.fixture
def serve(core, generator):
    """Makes a server over a real context with this package's slots."""

    def make(**options):
        megatron.install()
        server = Server(core, generator, **options)
        assert type(server.slots) is MambaSlotAllocator
        return server

    return make


def own_server(core, generator, **options):
    """Makes a server over Megatron's own slots."""
    server = Server(core, generator, **options)
    assert type(server.slots).__module__.startswith("megatron.")
    return server


def test_states_are_saved_restored_and_hit_as_with_megatrons_own(core, serve, generator):
    prompts = random_tokens(generator, 12 * BLOCK)
    own = megatron_steps(own_server(core, generator), prompts)
    ours = megatron_steps(serve(), prompts)
    assert ours == own
    assert ours.skipped == SKIPPED


def tables(server):
    """Returns the state of the context and its slots as comparable values.

    Ids of slots and blocks are left out: allocators may choose different ones.
    """
    context, slots = server.context, server.slots
    rows = range(context.paused_request_count, context.total_request_count)
    blocks = context.request_to_kv_block_ids
    of_rows = [[block for block in blocks[row].tolist() if block >= 0] for row in rows]
    intermediate = {
        name: getattr(slots, f"_intermediate_{name}_cpu").tolist() for name in ("counts", "offsets")
    }
    return {
        "blocks": [len(of_row) for of_row in of_rows],
        "blocks with states": [[slots.has_state(block) for block in row] for row in of_rows],
        "hashes": sorted(slots.hash_to_block_id),
        "hashes of blocks": sorted(context.kv_block_allocator.kv_hash_to_block_id),
        "free slots": slots.free_count,
        "free blocks": context.kv_block_allocator.total_avail,
        "references": sorted(context.kv_block_allocator.block_ref_counts.tolist()),
        "active": context.total_request_count - context.paused_request_count,
        **intermediate,
    }


def calls_of_a_life(server, prompts):
    """Yields a name after each call: construct, add, commit, hit, evict, release."""
    first, second = prompts[: 3 * BLOCK + 5], prompts[3 * BLOCK : 5 * BLOCK + 9]
    yield "constructed"
    for name, prompt in (("first", first), ("second", second), ("hit", first)):
        server.add(prompt)
        yield f"{name} added"
        server.step()
        yield f"{name} committed"
        server.finish(0)
        yield f"{name} released"
    for number in range(3):  # more states than slots
        server.add(prompts[(5 + 2 * number) * BLOCK :][: 2 * BLOCK + 3])
        yield f"{number} added"
        server.step()
        yield f"{number} committed, others evicted"
        server.finish(0)
        yield f"{number} released"
    server.context.reset()
    server.running.clear()
    yield "reset"


def test_tables_are_those_of_megatrons_own_after_every_call(core, serve, generator):
    prompts = random_tokens(generator, 12 * BLOCK)
    room = {"num_slots": 3, "num_blocks": 20}
    own = own_server(core, generator, **room)
    expected = [(name, tables(own)) for name in calls_of_a_life(own, prompts)]
    server = serve(**room)
    evicted = 0
    for (name, theirs), ours in zip(expected, calls_of_a_life(server, prompts), strict=True):
        assert ours == name
        server.slots.check_invariants()
        assert tables(server) == theirs, name
        evicted = max(evicted, server.slots.evicted_slots_total)
    assert evicted > 0


BROKEN = {
    "a scratch without rows": (allocator, "num_scratch_rows", lambda *_: 0),
    "rows of live states mixed up": (
        allocator, "as_host_array", lambda table: table.flip(0).numpy()),
    "restores that do nothing": (
        MambaSlotAllocator, "restore_slots", lambda *_: None),
    "saves of another request's state": (
        MambaSlotAllocator, "store_from_live_batch",
        lambda self, slots, rows: self.live_to_slots([0] * len(slots), slots)),
    "checkpoints of another block": (
        MambaSlotAllocator, "_collect_commit_data",
        lambda self: ([self._intermediate_block_ids_cpu[0, 0].item()], [0], [], [], [-1])),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN)
def test_the_steps_notice_slots_that_are_broken(core, serve, generator, monkeypatch, fault):
    monkeypatch.setattr(*fault)
    server = serve()
    prompts = random_tokens(generator, 12 * BLOCK)
    with pytest.raises((AssertionError, RuntimeError, IndexError, MambaCacheError)):
        assert megatron_steps(server, prompts).skipped == SKIPPED


def test_the_scratch_has_the_rows_that_the_forward_writes(core, serve):
    server = serve(max_requests=8)  # 24 by requests, 16 by tokens: the lower counts
    metadata = server.context.mamba_metadata
    assert server.slots.max_intermediate_count == metadata.max_intermediate_count
    assert server.slots.max_intermediate_count == 16


@pytest.mark.parametrize("rest", [0, 9])
def test_a_prompt_in_pieces(serve, generator, rest):
    server = serve(chunked=True)
    prompt = random_tokens(generator, 4 * BLOCK + rest)
    assert server.add(prompt, chunk=2 * BLOCK + 100) == 0
    server.step()
    server.finish()
    assert server.go_on() == 0
    server.step()
    server.finish(0)
    assert server.add(prompt + random_tokens(generator, 30)) >= BLOCK
    server.step()


def test_a_later_piece_skips_nothing_that_is_cached_of_it(serve, generator):
    """Megatron skips by its KV match there, and computes the rest on the state before the match."""
    server = serve(chunked=True)
    prompt = random_tokens(generator, 3 * BLOCK + 5)
    server.serve(prompt)
    assert server.add(prompt[: 2 * BLOCK] + random_tokens(generator, 40), chunk=BLOCK) == 0
    server.step()
    server.finish()
    assert server.go_on() == 0
    server.step()


def test_restores_of_a_step_are_one_move_with_the_same_bits_as_megatrons_loop(
    core, serve, generator, monkeypatch
):
    def restored(server):
        """Two hits and two misses; returns the number of moves and all live bits."""
        generator.manual_seed(5)
        prompts = [random_tokens(generator, 2 * BLOCK + 5) for _ in range(4)]
        for prompt in prompts[:2]:
            server.serve(prompt)
        skipped = [server.add(prompt) for prompt in prompts]
        assert skipped == [2 * BLOCK, 2 * BLOCK, 0, 0]
        with monkeypatch.context() as patch:
            moves, copy = [], StateCopier.copy
            patch.setattr(
                StateCopier, "copy", lambda *given: moves.append(len(given[1])) or copy(*given)
            )
            server.forward_begins()
        states = [server.live_state(place) for place in range(4)]
        server.forward_goes_on()
        server.check_live_states()
        return len(moves), states

    generator.manual_seed(4)
    server = serve()
    context = core.contexts.DynamicInferenceContext
    moves, states = restored(server)
    assert moves == 1
    theirs = context._execute_pending_mamba_ops.__wrapped__
    monkeypatch.setattr(context, "_execute_pending_mamba_ops", theirs)
    generator.manual_seed(4)
    moves_of_loop, states_of_loop = restored(serve())
    assert (moves_of_loop, states_of_loop) == (2, states)  # and two assignments of zeros


def test_a_prompt_that_would_leave_one_token_resumes_from_a_saved_state(core, serve, generator):
    def again(server):
        prompt = random_tokens(generator, 3 * BLOCK + 1)
        server.serve(prompt)
        skipped = server.add(prompt)
        server.step()
        return skipped

    # Megatron's own slots go back to a block without a state, and start from zeros there.
    with pytest.raises(AssertionError, match="request 0"):
        again(own_server(core, generator))
    assert again(serve()) == 0


def test_matched_blocks_are_not_evicted_to_make_room(core, serve, generator):
    def blocks(server):
        """A hit that needs room, when the matched blocks are the least recently used."""
        first = random_tokens(generator, 3 * BLOCK + 5)
        for prompt in (first, random_tokens(generator, 2 * BLOCK + 5)):
            server.serve(prompt)
        longer = first[: 3 * BLOCK] + random_tokens(generator, 3 * BLOCK)
        assert server.add(longer) == 3 * BLOCK
        return server.context.request_to_kv_block_ids[0][:6].tolist()

    own = blocks(own_server(core, generator, num_blocks=8))
    assert len(set(own)) == 6
    server = serve(num_blocks=8)
    assert len(set(blocks(server))) == 6
    server.step()
    assert (server.context.kv_block_allocator.block_ref_counts <= 1).all()


def test_a_reset_forgets_the_restores_that_waited(core, serve, generator):
    server = serve()
    prompt = random_tokens(generator, 3 * BLOCK + 5)
    server.serve(prompt)
    assert server.add(prompt) == 3 * BLOCK
    server.context.reset()
    server.running.clear()
    server.add(random_tokens(generator, 2 * BLOCK))
    server.step()


def test_a_reset_that_keeps_the_cache_leaves_nothing_recorded(core, serve, generator):
    server = serve()
    server.add(random_tokens(generator, 3 * BLOCK))
    slots = server.slots
    assert slots._intermediate_counts_cpu.any()
    server.context.reset(preserve_prefix_cache=True)
    assert not slots._intermediate_counts_cpu.any()
    assert slots._eos_cache_block_id_cpu.tolist() == [-1] * 4
    assert slots.get_intermediate_cpu_data() == (None, None)


def test_a_state_that_goes_before_its_restore_is_an_error(core, serve, generator):
    server = serve()
    prompt = random_tokens(generator, 3 * BLOCK + 5)
    server.serve(prompt)
    assert server.add(prompt) == 3 * BLOCK
    block = server.context.request_to_kv_block_ids[0, 2].item()
    server.slots.invalidate_block(block)
    with pytest.raises(MissingStateError, match=f"request row 0 .* block {block}"):
        server.step()


def test_contexts_without_these_slots_keep_megatrons_way(core, generator):
    server = own_server(core, generator)
    prompt = random_tokens(generator, 3 * BLOCK + 5)
    server.serve(prompt)
    megatron.install()
    assert server.add(prompt) == 3 * BLOCK
    server.step()
    server.context.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # Megatron warns of packages for training
class TestOnADevice:
    """Nothing is stubbed."""

    @pytest.fixture
    def core(self, imported):
        yield imported
        megatron.uninstall()

    def test_states_are_saved_restored_and_hit_as_with_megatrons_own(self, core, serve, generator):
        assert serve().slots.ssm_states.is_cuda
        megatron.uninstall()
        test_states_are_saved_restored_and_hit_as_with_megatrons_own(core, serve, generator)

    def test_restores_of_a_step_are_one_launch_and_the_bits_of_megatrons_loop(
        self, core, serve, generator, monkeypatch
    ):
        def restored():
            """Four hits and four misses; returns the kernels launched and all live bits."""
            generator.manual_seed(4)
            server = serve(num_blocks=32, max_requests=8)
            prompts = [random_tokens(generator, 2 * BLOCK + 5) for _ in range(8)]
            for prompt in prompts[:4]:
                server.serve(prompt)
            assert [server.add(prompt) for prompt in prompts] == [2 * BLOCK] * 4 + [0] * 4
            torch.cuda.synchronize()
            kinds = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=kinds) as profile:
                server.context._execute_pending_mamba_ops()
                torch.cuda.synchronize()
            kernels = [
                event.name
                for event in profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
                and not event.name.startswith(("Memcpy", "Memset"))
            ]
            server.forward_begins()
            states = [server.live_state(place) for place in range(8)]
            server.forward_goes_on()
            server.check_live_states()
            return kernels, states

        restored()  # compiles the kernel
        kernels, states = restored()
        context = core.contexts.DynamicInferenceContext
        theirs = context._execute_pending_mamba_ops.__wrapped__
        monkeypatch.setattr(context, "_execute_pending_mamba_ops", theirs)
        kernels_of_loop, states_of_loop = restored()
        print(len(kernels), kernels, len(kernels_of_loop), kernels_of_loop)
        assert states == states_of_loop
        assert len(kernels) == 1, kernels
        assert len(kernels_of_loop) >= 4 + 2

    def test_megatrons_kernels_write_into_the_scratch(self, core, serve, generator):
        extraction = core.extraction
        server = serve()
        slots = server.slots
        chunks = torch.rand((9, *SSM), generator=generator).to("cuda", DTYPES[1])
        inputs = torch.rand((1, 9 * BLOCK, CONV[0]), generator=generator).to("cuda", DTYPES[0])
        count = torch.tensor([3], dtype=torch.int32, device="cuda")
        where = torch.tensor([4, 1, 7, 0, 0], device="cuda")
        ends = torch.tensor([700, 128, 256, 4, 4], dtype=torch.int32, device="cuda")
        for layer in range(LAYERS.count("M")):
            ssm_out, conv_out = (
                slots.intermediate_ssm_out[layer],
                slots.intermediate_conv_out[layer],
            )
            extraction.scatter_intermediate_ssm(chunks + layer, where, count, ssm_out)
            extraction.scatter_intermediate_conv(
                inputs + layer, ends, count, conv_out, d_conv=CONV[1]
            )
        for layer in range(LAYERS.count("M")):
            assert torch.equal(slots.intermediate_ssm_out[layer, :3], (chunks + layer)[where[:3]])
            windows = [(inputs + layer)[0, end - CONV[1] : end].T for end in ends[:3].tolist()]
            assert torch.equal(slots.intermediate_conv_out[layer, :3], torch.stack(windows))
            assert not slots.intermediate_ssm_out[layer, 3:].any()
