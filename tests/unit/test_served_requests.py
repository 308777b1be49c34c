"""What a request of transformers' server tells beside its prompt."""

import pytest

pytest.importorskip("transformers", reason="needs the extra transformers")

from mamba_cache.integrations.transformers.serve.requests import ServedRequest


@pytest.mark.parametrize(
    ("messages", "body", "hint"),
    [
        (None, {}, None),
        ([{"role": "system"}, {"role": "user"}], {}, False),
        ([{"role": "user"}], {"tools": []}, False),
        ([{"role": "user"}], {"tools": [{"type": "function"}]}, True),
        ([{"role": "user"}, {"role": "assistant"}, {"role": "tool"}], {}, True),
    ],
)
def test_what_a_request_tells_of_the_next_one(messages, body, hint):
    assert ServedRequest(None, body, messages=messages).will_continue is hint
