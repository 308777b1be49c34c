"""Facts of a transformers server's request beside its prompt."""

import asyncio
import threading

import pytest

from mamba_cache.errors import InvalidArgumentError

pytest.importorskip("transformers", reason="needs the extra transformers")

from mamba_cache.integrations.transformers.serve.models import (
    BatchManager,
    ServedRequest,
    current_request,
)


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
def test_a_request_hints_at_its_continuation(messages, body, hint):
    assert ServedRequest(None, body, messages=messages).will_continue is hint


def test_a_manager_rests_after_calls_that_broke_off_before_its_batch_began():
    """Regression: the manager's thread retried without pause until a request could run."""
    calls, rests = [], []

    class Refusing:
        """A cache that refuses to run its model."""

        def run_batches(self, manager):
            calls.append(manager)
            if len(calls) > 3:
                pytest.fail("it does not rest")
            raise InvalidArgumentError("the model must not be in training mode")

    class Wake(threading.Event):
        """An event that records each wait while it is not set."""

        def wait(self, timeout=None):
            if not self.is_set():
                rests.append(len(calls))
                manager.stop(block=False)

    async def ask():
        manager.register_result_handler("one", print)
        manager.add_request([5, 6], "one")

    manager, request = BatchManager(Refusing()), ServedRequest()
    manager._wake = Wake()
    current_request.set(request)
    asyncio.run(ask())
    manager._run_until_stopped()
    assert "training mode" in str(request.error)
    assert rests == [2]  # the request was tried once more
