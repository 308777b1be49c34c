"""Checksums of weights on a GPU: equal to the twin's, no waiting, checked before any output."""

import pytest
import torch
from gpu_rig import BUSY_CYCLES, random_bits_, waiting_raises

from mamba_cache.errors import ModelChangedError
from mamba_cache.states.checksums import TensorChecksums

pytestmark = pytest.mark.gpu

SHAPES = [(513, 1021), (7,), (1, 1, 3), (64, 64), (70001,), (4096, 4096)]
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]


@pytest.fixture
def tensors():
    made = [torch.empty(s, dtype=d, device="cuda") for s in SHAPES for d in DTYPES]
    for tensor in made:
        random_bits_(tensor)
    memory = random_bits_(torch.empty(300_003, dtype=torch.uint8, device="cuda"))
    return [*made, memory[1:], memory[3:200_000], made[0][:, 5:77], made[5].reshape(-1)[:1]]


@pytest.mark.parametrize("stride", [1, 16])
def test_kernel_equals_its_twin_on_the_device_and_on_the_host(tensors, stride):
    own = TensorChecksums(tensors)
    sums = own.measure()
    assert sums == TensorChecksums(tensors, backend="torch").measure()
    assert sums == TensorChecksums([tensor.cpu() for tensor in tensors]).measure()
    for phase in range(stride):
        own.start(stride=stride, phase=phase)
        assert own.is_unchanged()


def test_more_than_2_gib_in_one_tensor():
    tensor = torch.zeros(2**31 + 2**20 + 3, dtype=torch.uint8, device="cuda")
    checksums = TensorChecksums([tensor])
    checksums.measure()
    for index in (0, 2**31 - 1, 2**31 + 5, tensor.numel() - 1):
        tensor[index] = 1
        checksums.start()
        assert not checksums.is_unchanged(), index
        tensor[index] = 0
    checksums.start()
    assert checksums.is_unchanged()


def test_a_check_does_not_wait_and_its_verdict_waits_for_no_later_work(tensors):
    checksums = TensorChecksums(tensors)
    checksums.measure()
    checksums.start()
    tensors[3].view(torch.uint8).flatten()[2] ^= 1
    done = torch.cuda.Event()
    with waiting_raises():
        torch.cuda._sleep(BUSY_CYCLES)
        checksums.start()
        torch.cuda._sleep(10 * BUSY_CYCLES)
        done.record()
    assert not checksums.is_unchanged()
    assert not done.query()  # the forward that was enqueued behind it is still running


@pytest.fixture
def cached_model():
    pytest.importorskip("transformers", reason="needs the extra transformers")
    from transformers_rig import make_cache, make_model  # noqa: PLC0415

    # Rows of 280 projected channels: causal_conv1d, where installed, needs strides of 8.
    model = make_model("nemotron_h", mamba_num_heads=8).cuda()
    return model, make_cache(model)


PROMPT = [[5, 6, 7, 8, 9, 10, 11, 12] * 4 + [3]]
OPTIONS = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}


@pytest.mark.parametrize("weights_check", ["full", "sample"])
def test_weights_that_change_are_noticed_before_anything_leaves(cached_model, weights_check):
    from transformers_rig import make_cache  # noqa: PLC0415

    model, _ = cached_model
    cache = make_cache(model, weights_check=weights_check)
    cache.generate(PROMPT, **OPTIONS)
    blocks, received = cache.stats().cached_blocks, []

    class RecordingStreamer:
        def put(self, value):
            received.append(value)

        def end(self):
            received.append("end")

    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    weight.data.mul_(-1)
    other = [[9, *PROMPT[0]]]
    with pytest.raises(ModelChangedError, match=r"lm_head.weight"):
        cache.generate(other, streamer=RecordingStreamer(), **OPTIONS)
    with pytest.raises(ModelChangedError):
        cache.prefill(other[0])
    cache.check_invariants()
    assert cache.stats().cached_blocks == blocks
    assert len(received) <= 1  # the prompt, passed on before any forward
    weight.data.copy_(before)
    hits = cache.stats().hits
    cache.generate(PROMPT, **OPTIONS)
    assert cache.stats().hits == hits + 1


def test_small_kernels_do_not_wait_for_a_check():
    """A sum needs shared memory, of which a check leaves nearly all free."""
    tensor = torch.zeros(2**31, dtype=torch.uint8, device="cuda")
    checksums = TensorChecksums([tensor] * 64)  # about 30 ms
    checksums.measure()
    begin, summed, checked = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    for _ in range(2):  # the first sum loads its kernel
        torch.cuda.synchronize()
        begin.record()
        checksums.start()
        tensor[:4096].sum()
        summed.record()
        checked.record(checksums._stream)
        assert checksums.is_unchanged()
        torch.cuda.synchronize()
    assert summed.elapsed_time(checked) > 0.1 * begin.elapsed_time(checked)
