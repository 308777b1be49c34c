"""This package's slots in real contexts of Megatron Core on a CUDA device, nothing stood in for.

The wheels come from the folder that MEGATRON_WHEELS names (tests/engines/megatron.sh fetches them).
"""

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
    megatron_core,
    megatron_steps,
    random_tokens,
)

from mamba_cache import MambaSlotAllocator
from mamba_cache.integrations import megatron

FOUND = find_wheels()
VERSIONS = {".".join(version.split(".")[:2]): wheel for version, wheel in FOUND.items()}

pytestmark = [
    pytest.mark.engine,  # and not gpu: tests/engines/megatron.sh is given this file
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # Megatron's, of what it would need for training
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
    """The same; Megatron has its own slots."""
    yield imported
    megatron.uninstall()


@pytest.fixture
def serve(core, generator):
    """Makes a server over a real context with this package's slots."""

    def make(**options):
        megatron.install()
        server = Server(core, generator, **options)
        assert type(server.slots) is MambaSlotAllocator
        assert server.slots.ssm_states.is_cuda
        return server

    return make


def test_states_are_saved_restored_and_hit_as_with_megatrons_own(core, serve, generator):
    prompts = random_tokens(generator, 12 * BLOCK)
    own = megatron_steps(Server(core, generator), prompts)
    ours = megatron_steps(serve(), prompts)
    assert ours == own
    assert ours.skipped == [0, 0, 3 * BLOCK, 2 * BLOCK, BLOCK, 0]


def test_restores_of_a_step_are_one_launch_and_the_bits_of_megatrons_loop(
    core, serve, generator, monkeypatch
):
    def restored():
        """Four hits and four misses; returns the kernels launched and all live bits."""
        generator.manual_seed(4)
        server = serve(num_blocks=32, max_requests=8)
        prompts = [random_tokens(generator, 2 * BLOCK + 5) for _ in range(8)]
        for prompt in prompts[:4]:
            server.add(prompt)
            server.step()
            server.finish(0)
        assert [server.add(prompt) for prompt in prompts] == [2 * BLOCK] * 4 + [0] * 4
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
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


def test_megatrons_kernels_write_into_the_scratch(core, serve, generator):
    extraction = core.extraction
    server = serve()
    slots = server.slots
    chunks = torch.rand((9, *SSM), generator=generator).to("cuda", DTYPES[1])
    inputs = torch.rand((1, 9 * BLOCK, CONV[0]), generator=generator).to("cuda", DTYPES[0])
    count = torch.tensor([3], dtype=torch.int32, device="cuda")
    where = torch.tensor([4, 1, 7, 0, 0], device="cuda")
    ends = torch.tensor([700, 128, 256, 4, 4], dtype=torch.int32, device="cuda")
    for layer in range(LAYERS.count("M")):
        ssm_out, conv_out = slots.intermediate_ssm_out[layer], slots.intermediate_conv_out[layer]
        extraction.scatter_intermediate_ssm(chunks + layer, where, count, ssm_out)
        extraction.scatter_intermediate_conv(inputs + layer, ends, count, conv_out, d_conv=CONV[1])
    for layer in range(LAYERS.count("M")):
        assert torch.equal(slots.intermediate_ssm_out[layer, :3], (chunks + layer)[where[:3]])
        windows = [(inputs + layer)[0, end - CONV[1] : end].T for end in ends[:3].tolist()]
        assert torch.equal(slots.intermediate_conv_out[layer, :3], torch.stack(windows))
        assert not slots.intermediate_ssm_out[layer, 3:].any()
