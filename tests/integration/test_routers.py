"""Routers as they are published, fed by KV events; tests/engines/routers.sh fetches them."""

import random
from contextlib import ExitStack

import pytest

for package in ("zmq", "msgspec"):
    pytest.importorskip(package, reason="needs the extra events")

from events_rig import BLOCK, PAUSE, RecordedCache  # noqa: E402
from router_rig import FEW, FEW_SLOTS, KINDS, LOAD, SIZES, TWICE, run, two  # noqa: E402

from mamba_cache.integrations.events import EventPublisher  # noqa: E402

ROUTERS = [pytest.param(kind, id=name, marks=pytest.mark.engine) for name, kind in KINDS.items()]

POINTS = 0.03


@pytest.fixture(scope="module")
def one_replica():
    """Rates of one replica with the memory of both."""
    return run(two.RoundRobin, LOAD, 1, **TWICE)


@pytest.fixture(scope="module")
def round_robin():
    """Rates when both replicas are used in turn."""
    return run(two.RoundRobin, LOAD, **SIZES)


@pytest.mark.parametrize("kind", ROUTERS)
def test_predictions_are_true_and_two_replicas_hit_as_one_with_twice_the_memory(
    kind, one_replica, round_robin
):
    answers = run(kind, LOAD, **SIZES)
    rates = {
        "router": two.hit_rate(answers),
        "one replica": two.hit_rate(one_replica),
        "round robin": two.hit_rate(round_robin),
    }
    print(kind.name, rates, "right:", two.right_predictions(answers))
    assert two.right_predictions(answers) >= 0.99
    assert rates["router"] >= rates["one replica"] - POINTS
    assert rates["round robin"] < rates["one replica"] - POINTS  # else the comparison shows nothing
    assert len({answer.replica for answer in answers}) == 2
    texts = [[answer.tokens for answer in each] for each in (answers, one_replica, round_robin)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", ROUTERS)
def test_resident_blocks_without_their_states_mislead_a_router_and_reachable_ones_do_not(kind):
    right = {
        mode: two.right_predictions(run(kind, FEW, mode=mode, **FEW_SLOTS))
        for mode in ("resident", "reachable")
    }
    print(kind.name, right)
    assert right["resident"] < 0.5
    assert right["reachable"] >= 0.99


class Service:
    """Dynamo's service, and the blocks that it credits one cache with."""

    def __init__(self, publisher):
        running = [{"url": "http://w", "events": publisher.endpoint}]
        running[0]["replay"] = publisher.replay_endpoint
        block_size, two.BLOCK_SIZE_TOKENS = two.BLOCK_SIZE_TOKENS, BLOCK
        try:
            self.router = two.DynamoRouter(running)
        finally:
            two.BLOCK_SIZE_TOKENS = block_size

    def credit(self, tokens):
        asked = {"model_name": two.MODEL, "token_ids": tokens}
        scores = self.router._call(self.router._service.overlap_scores, asked)
        return sum(worker["device_blocks"] for worker in scores["workers"])


class Prompts:
    """Prompts that had cached blocks at some time, and the blocks they have now."""

    def __init__(self, cache, mode):
        self._cache, self._mode = cache, mode
        self._seen = set()

    def worths(self):
        """Each prompt with its number of cached blocks, computed from the definition."""
        published = self._cache.expected(self._mode)[0]
        for block_hash in published:
            tokens, at = [], block_hash
            while at is not None:
                at, block = published[at]
                tokens = block + tokens
            self._seen.add((*tokens, *[9] * BLOCK))
        by_content = {(parent, tuple(block)): h for h, (parent, block) in published.items()}
        for tokens in self._seen:
            parent, worth = None, 0
            while (block := tokens[worth * BLOCK : (worth + 1) * BLOCK]) and (
                parent := by_content.get((parent, block))
            ) is not None:
                worth += 1
            yield list(tokens), worth

    def wait_until_credited(self, service):
        """Wait until a router credits each prompt with exactly its cached blocks."""
        for _ in range(200):
            worths = list(self.worths())
            if all(service.credit(tokens) == worth for tokens, worth in worths):
                return
            PAUSE.wait(0.05)
        raise AssertionError([(worth, service.credit(tokens)) for tokens, worth in worths])


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["resident", "reachable"])
def test_a_router_that_comes_late_and_loses_batches_credits_what_is_held(mode, rng):
    draw, cache = random.Random(int(rng.integers(2**32))), RecordedCache(64, 16)
    prompts = Prompts(cache, mode)
    with ExitStack() as stack:
        any_port = {"endpoint": two.ANY_PORT, "replay_endpoint": two.ANY_PORT}
        publisher = stack.enter_context(
            EventPublisher(**any_port, mode=mode, heartbeat_seconds=0.1)
        )
        publisher.watch(cache)
        cache.load(draw, 30)
        service = Service(publisher)
        stack.callback(service.router.close)
        prompts.wait_until_credited(service)
        assert publisher.stats().snapshots
        socket, lost = publisher._pub, []

        class Lossy:
            """A publisher that loses every third batch."""

            def send_multipart(self, frames):
                lost.append(frames)
                if len(lost) % 3:
                    socket.send_multipart(frames)

        for _ in range(10):
            publisher._pub = Lossy()
            cache.load(draw, 10)
            PAUSE.wait(0.03)
            publisher._pub = socket
            prompts.wait_until_credited(service)
        assert len(lost) > 10
        assert publisher.stats().replays > 1


@pytest.mark.engine
def test_a_router_forgets_the_blocks_of_the_process_before_at_the_same_address():
    first, second = RecordedCache(), RecordedCache()
    with ExitStack() as stack:
        old = EventPublisher(two.ANY_PORT, replay_endpoint=two.ANY_PORT)
        old.watch(first)
        first.run([1] * 32, [8])
        service = Service(old)
        stack.callback(service.router.close)
        Prompts(first, "reachable").wait_until_credited(service)
        assert service.credit([1] * 32) == 8
        old._send = lambda events: None  # it dies without a last event
        old.close()
        new = stack.enter_context(EventPublisher(old.endpoint, replay_endpoint=old.replay_endpoint))
        new.watch(second)
        second.run([2] * 32, [8])
        Prompts(second, "reachable").wait_until_credited(service)
        for _ in range(100):
            if not service.credit([1] * 32):
                break
            PAUSE.wait(0.05)
        assert service.credit([1] * 32) == 0
