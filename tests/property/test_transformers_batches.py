"""Random batches of every family that is served: each answer is what the model says alone."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

import torch
from batch_rig import SERVED, batch, subject, tokens
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers_rig import BLOCK, budgets

STEMS = st.lists(st.integers(1, 4 * BLOCK), min_size=1, max_size=3)
PROMPT = st.tuples(
    st.integers(0, 2),  # which stem
    st.integers(0, 4 * BLOCK),  # how much of it
    st.integers(1, 2 * BLOCK),  # and of its own
    st.integers(1, 3),  # answers
    st.integers(1, 2 * BLOCK),  # their length
)
CALLS = st.lists(st.lists(PROMPT, min_size=1, max_size=6), min_size=1, max_size=2)
ROOM = st.fixed_dictionaries(
    {
        "blocks": st.integers(24, 80),
        "slots": st.integers(2, 30),
        "rows": st.integers(1, 6),
        "chunk": st.integers(BLOCK, 8 * BLOCK),
    }
)


@pytest.mark.parametrize("name", SERVED)
@examples(4)
@given(stems=STEMS, calls=CALLS, room=ROOM, seed=st.integers(0, 2**16))
def test_every_answer_is_the_models_own(name, stems, calls, room, seed):
    """Hits, chunks, rectangles, forks, preemption and mixed lengths, as they come."""
    one, generator = subject(name), torch.Generator().manual_seed(seed)
    sizes = budgets(one.cache(), slots=room["slots"], blocks=room["blocks"])
    if name == "mamba2":
        sizes["kv_cache_gb"] = 0.01
    cache = one.cache(**sizes, max_requests=room["rows"])
    shared = [tokens(generator, length) for length in stems]
    config = ContinuousBatchingConfig(max_batch_tokens=room["chunk"])
    for prompts in calls:
        inputs, configs, wanted = [], [], []
        for stem, start, own, count, length in prompts:
            prompt = shared[stem % len(shared)][:start] + tokens(generator, own)
            inputs.append(prompt)
            drawn = {"do_sample": True, "top_k": 1} if count > 1 else {"do_sample": False}
            configs.append(one.config(num_return_sequences=count, max_new_tokens=length, **drawn))
            wanted += [one.answer(prompt, length)] * count
        outputs = batch(cache, inputs, generation_config=configs, continuous_batching_config=config)
        for output, expected in zip(outputs, wanted, strict=True):
            if output.error is None:
                assert output.generated_tokens == expected
            else:
                assert output.generated_tokens == expected[: len(output.generated_tokens)]
