"""A client of transformers' server that knows another client's prompt cannot change its answer."""

from contextlib import contextmanager

import pytest

pytest.importorskip("openai", reason="needs the extra serve")
for package in ("accelerate", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason="needs the extra serve")
pytest.importorskip("transformers", reason="needs the extra transformers")

from forged import BLOCK, FORGED, PUBLIC, VOCABULARY  # noqa: E402
from serve_rig import SETTINGS, SPECIAL, Server  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from transformers_rig import make_model  # noqa: E402

from mamba_cache.integrations.transformers import serve  # noqa: E402

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokenizer has a word for each token, and nothing before the prompt."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = str(tmp_path_factory.mktemp("model"))
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE).save_pretrained(path)
    make_model("granite 4", vocab_size=VOCABULARY, **SPECIAL).save_pretrained(path)
    return path


def ask(server, folder, tokens):
    """The answer to a prompt, and how many of its tokens were cached."""
    words = " ".join(f"t{token}" for token in tokens)
    answer = server.chat(folder, words, max_tokens=6)
    assert answer.usage.prompt_tokens == len(tokens)
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content, details.cached_tokens if details else 0


@contextmanager
def running(**options):
    server = Server(**options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def expected(folder):
    """What a server without caches answers."""
    with running() as plain:
        return ask(plain, folder, [*PUBLIC, 5, 6])[0]


@pytest.mark.parametrize("batches", [False, True])
def test_a_forged_block_is_a_miss_in_the_server(folder, expected, batches):
    options = {"continuous_batching": True} if batches else {}
    budgets = {"mamba_cache_gb": 0.05, "kv_cache_gb": 0.05, "block_size_tokens": BLOCK}
    with serve.installed(**{**SETTINGS, **budgets}), running(**options) as server:
        for tail in ([], [7, 8, 9], [10, 11]):  # the second one parts from the first
            ask(server, folder, FORGED + tail)
        assert ask(server, folder, [*FORGED, 5, 6])[1] == BLOCK
        assert ask(server, folder, [*PUBLIC, 5, 6]) == (expected, 0)
