"""Checkpoints of text and images, Qwen3.5 with its vision tower: text prompts are cached."""

import pytest
import torch
from batch_rig import answers, batch
from transformers_rig import (
    ANSWER,
    BLOCK,
    COMPOSITE,
    GREEDY,
    assert_same,
    cached,
    generate_about_an_image,
    join,
    make_cache,
    make_multimodal_model,
    plain,
    skipped,
    text,
)

from mamba_cache.errors import InvalidArgumentError


@pytest.fixture(scope="module", params=COMPOSITE)
def model(request):
    return make_multimodal_model(request.param)


@pytest.fixture
def cache(model):
    with make_cache(model, max_requests=4) as made:
        yield made


@pytest.fixture
def prompts(generator):
    """Prompts of several lengths with a common beginning of five blocks."""
    beginning = text(generator, 5 * BLOCK)
    return [join(beginning, text(generator, length)) for length in (3, 3 * BLOCK, 9, BLOCK, 1)]


def test_generate(model, cache, prompts):
    for number, prompt in enumerate(prompts):
        expected = plain(model, prompt)
        if number % 2:  # an image leaves its positions on the model
            generate_about_an_image(model)
        found = []
        count = skipped(cache, lambda ids=prompt, to=found: to.append(cached(cache, ids)))
        assert_same(expected, found[0])
        assert count == (5 * BLOCK if number else 0)


def test_generate_batch(model, cache, prompts):
    expected = [plain(model, one).sequences[0, one.shape[1] :].tolist() for one in prompts]
    given = [one[0].tolist() for one in prompts]
    for is_after_an_image in (False, True):
        if is_after_an_image:
            generate_about_an_image(model)
        assert answers(batch(cache, given, max_new_tokens=ANSWER)) == expected
    assert cache.stats().skipped_tokens > len(prompts) * 5 * BLOCK


def test_a_processors_token_types(model, cache, prompts):
    # Processors pass them with text as well, where they are all 0.
    types = torch.zeros_like(prompts[0])
    assert_same(plain(model, prompts[0]), cached(cache, prompts[0], mm_token_type_ids=types))
    again = skipped(cache, lambda: cached(cache, prompts[0], mm_token_type_ids=types))
    assert again == 5 * BLOCK
    types[0, -2] = 1
    with pytest.raises(InvalidArgumentError, match=r"\['mm_token_type_ids'\] too"):
        cached(cache, prompts[0], mm_token_type_ids=types)


def test_images_are_refused(model, cache):
    ids = torch.tensor([[5, *[1] * 16, 7]])
    image = {
        "pixel_values": torch.rand(64, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "mm_token_type_ids": (ids == 1).int(),
    }
    with pytest.raises(InvalidArgumentError, match="token ids, which do not tell what else"):
        cache.generate(ids, **image, **GREEDY)
    with pytest.raises(InvalidArgumentError, match="pixel_values"):
        cache.generate_batch([ids[0].tolist()], pixel_values=image["pixel_values"])
    assert cache.stats().requests == 0
