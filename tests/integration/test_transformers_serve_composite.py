"""transformers' server with a checkpoint of text and images, and a prefix cache behind it."""

import base64
import io
import logging
from functools import partial
from unittest import mock

import pytest

for package in ("accelerate", "fastapi", "openai", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="needs the extra serve")
pillow = pytest.importorskip("PIL.Image", reason="needs the extra docs: pillow")

from chats import make_tokenizer  # noqa: E402
from serve_rig import BLOCK, NEW, SETTINGS, SPECIAL, Server, draw_words  # noqa: E402
from transformers import ProcessorMixin, Qwen2VLImageProcessorPil, Qwen3VLProcessor  # noqa: E402
from transformers.cli.serving import model_manager  # noqa: E402
from transformers_rig import make_multimodal_model  # noqa: E402

from mamba_cache.integrations.transformers import serve  # noqa: E402
from mamba_cache.integrations.transformers.serve import installing  # noqa: E402

IMAGE = "<|image_pad|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|image_pad|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Processor(ProcessorMixin):
    """Qwen3.5's processor without videos, which need torchvision."""

    return_mm_token_type_ids = True
    replace_image_token = Qwen3VLProcessor.replace_image_token

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token = IMAGE
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


@pytest.fixture(scope="module")
def processor():
    tokenizer = make_tokenizer(TEMPLATE)
    special = [*tokenizer.all_special_tokens, IMAGE]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    images = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096)
    return Processor(images, tokenizer, TEMPLATE)


@pytest.fixture(scope="module")
def model(processor):
    size, image = len(processor.tokenizer), processor.image_token_id
    made = make_multimodal_model(image_token_id=image, vocab_size=size, **SPECIAL)
    made.generation_config.suppress_tokens = processor.tokenizer.all_special_ids
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "continuous batching"])
def server(request, processor, model, tmp_path_factory):
    """A server of the composite model, and the folder that the model was loaded from."""
    folder = str(tmp_path_factory.mktemp("composite"))
    model.save_pretrained(folder)
    with (
        mock.patch.object(model_manager.ModelManager, "_load_processor", return_value=processor),
        serve.installed(**SETTINGS),
    ):
        running = Server(continuous_batching=request.param)
        yield running, folder
        # A batching server batches text, not images.
        stats = running.served(folder).cache.batch_stats()
        assert (stats is not None and stats.decode_steps > 0) == request.param
        running.close()


@pytest.fixture
def words(generator):
    """Makes text that no request has sent before."""
    return partial(draw_words, generator)


def picture(color):
    """An image of 32 x 32 pixels, as a part of a message and as pillow has it."""
    image, file = pillow.new("RGB", (32, 32), color), io.BytesIO()
    image.save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}, image


def own_answer(model, processor, messages, images=None):
    """Return the model's own answer as text."""
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[prompt], images=images, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_text_is_cached_and_images_go_past_it(server, model, processor, words, caplog):
    running, folder = server
    chat = [{"role": "system", "content": words(5 * BLOCK)}]
    hits = []
    for _ in range(3):
        asked = [*chat, {"role": "user", "content": words(20)}]
        answer = running.chat(folder, asked)
        assert answer.choices[0].message.content == own_answer(model, processor, asked)
        hits.append(answer.usage.prompt_tokens_details.cached_tokens)
    # The second user of a system prompt resumes at the system prompt's end.
    assert hits[0] == 0
    assert hits[1] == hits[2] >= 5 * BLOCK

    part, image = picture((200, 30, 90))
    seen = [{"role": "user", "content": [part, {"type": "text", "text": words(30)}]}]
    shown = [{"role": "user", "content": [{"type": "image"}, seen[0]["content"][1]]}]
    with caplog.at_level(logging.WARNING, "mamba_cache"):
        answer = running.chat(folder, seen)
    assert answer.choices[0].message.content == own_answer(model, processor, shown, [image])
    assert answer.usage.prompt_tokens_details is None
    assert "without its prefix cache" in caplog.text
    assert "pixel_values" in caplog.text

    asked = [*chat, {"role": "user", "content": words(25)}]
    answer = running.chat(folder, asked)
    assert answer.choices[0].message.content == own_answer(model, processor, asked)
    assert answer.usage.prompt_tokens_details.cached_tokens == hits[1]


@pytest.mark.parametrize(
    ("body", "is_text"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, False),
        ({"input": "a"}, True),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, True),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, False),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, True),
        ({"messages": [{"content": [{"type": "text"}, {"type": "text"}]}]}, False),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, False),
        ({"messages": [{"content": ["a"]}]}, False),
        ({"messages": ["a"]}, False),
        ({"messages": 5}, False),
        ({}, False),
    ],
)
def test_what_counts_as_text(body, is_text):
    assert installing._is_text(body) == is_text
