"""The value policy behind a manager with the rules of vLLM 0.33's ``CPUOffloadingManager``.

``tests/integration/test_vllm_policy_real.py`` runs it in vLLM's own.
"""

import inspect
import itertools
import sys
from collections import OrderedDict
from types import SimpleNamespace

import pytest
from drawn_traces import draw_scan
from hypothesis import given
from hypothesis import strategies as st

from mamba_cache.cli.traces import TOKENS_PER_HASH_ID
from mamba_cache.integrations.vllm.policy import ValuePolicy

ATTENTION, STATES = b"\0\0\0\0", b"\0\0\0\1"
INTERFACE = {
    "get": ["key"],
    "insert": ["key", "chunk", "req_context"],
    "remove": ["key"],
    "touch": ["keys", "req_context"],
    "on_store_miss": ["keys", "req_context"],
    "on_request_access": ["keys", "req_context"],
    "on_request_finished": ["key_groups", "insertion_only_keys", "reused_keys", "req_context"],
    "evict": ["n", "protected"],
    "clear": [],
    "mark_evictable": ["key"],
    "mark_non_evictable": ["key"],
}


class Context:
    """vLLM's ``ReqContext``."""

    numbers = itertools.count()

    def __init__(self, names, groups):
        self.req_id = str(next(self.numbers))
        places = {name + g: n + 1 for g in groups for n, name in enumerate(names)}
        self._offload_key_positions = places


class Manager:
    """The calls of vLLM's manager, with checks after each."""

    def __init__(self, capacity, policy=None, *, tells_accesses=True):
        self.policy, self.capacity = policy or ValuePolicy(capacity), capacity
        self.chunks = {}
        self.tells_accesses = tells_accesses  # vLLM 0.32 does not

    def load(self, keys, context):
        for key in keys:
            if not self.chunks[key].ref_cnt:
                self.policy.mark_non_evictable(key)
            self.chunks[key].ref_cnt += 1
        self.accessed(keys, context)

    def accessed(self, keys, context):
        if self.tells_accesses:
            self.policy.on_request_access(keys, context)

    def store(self, keys, context, *, is_retry=False):
        """Return the chunks to store; None if refused."""
        new = [key for key in keys if key not in self.chunks]
        if new and not is_retry:
            self.policy.on_store_miss(new, context)
        self.accessed(keys, context)
        num_short = len(new) - (self.capacity - len(self.chunks))
        if new and num_short > 0:
            if num_short > sum(not chunk.ref_cnt for chunk in self.chunks.values()):
                return None
            evicted = self.policy.evict(num_short, set(keys))
            if evicted is None:
                assert all(self.policy.get(key) is self.chunks[key] for key in self.chunks)
                return None
            assert len(evicted) == num_short == len(dict(evicted))
            for key, chunk in evicted:
                assert key not in keys
                assert self.chunks.pop(key) is chunk
                assert chunk.ref_cnt == 0
                assert self.policy.get(key) is None
        for key in new:
            self.chunks[key] = SimpleNamespace(ref_cnt=-1)
            self.policy.insert(key, self.chunks[key], context)
        return new

    def complete(self, keys, *, is_stored=True):
        """End transfers; a store that failed leaves nothing."""
        for key in keys:
            chunk = self.chunks[key]
            if chunk.ref_cnt < 0 and not is_stored:
                self.policy.remove(key)
                del self.chunks[key]
                continue
            chunk.ref_cnt = max(chunk.ref_cnt - 1, 0)
            if not chunk.ref_cnt:
                self.policy.mark_evictable(key)


class Lru:
    """A control policy without knowledge of prompts."""

    def __init__(self):
        self.chunks = OrderedDict()
        self.get = self.chunks.get

    def on_request_access(self, keys, context):
        for key in reversed(keys):
            if key in self.chunks:
                self.chunks.move_to_end(key)

    on_store_miss = mark_evictable = mark_non_evictable = lambda *_: None

    def insert(self, key, chunk, context):
        self.chunks[key] = chunk

    def evict(self, n, protected):
        free = [k for k, c in self.chunks.items() if not c.ref_cnt and k not in protected][:n]
        return [(key, self.chunks.pop(key)) for key in free] if len(free) == n else None

    def on_request_finished(self, key_groups, *_):
        for keys in key_groups:
            self.on_request_access(keys, None)


class Run:
    """A request that loads, then offers the state at its end, then its attention."""

    def __init__(self, manager, ids, *, groups=(ATTENTION, STATES)):
        names = [each.to_bytes(8, "big") for each in ids]
        self.manager = manager
        self.context = Context(names[:-1], groups)
        self.attention = [name + groups[0] for name in names]
        self.states = [[name + g for g in groups[1:]] for name in names]
        held = manager.chunks
        self.hit = 0
        for depth, states in enumerate(self.states[:-1], 1):
            if self.attention[depth - 1] not in held or held[self.attention[depth - 1]].ref_cnt < 0:
                break
            if all(key in held and held[key].ref_cnt >= 0 for key in states):
                self.hit = depth
        self.used = self.attention[: self.hit] + (self.states[self.hit - 1] if self.hit else [])
        if self.used:
            manager.load(self.used, self.context)
        self.offers = [self.states[-2], self.attention[self.hit : -1]]
        self.stored = [manager.store(keys, self.context) for keys in self.offers if keys]

    def finish(self, *, is_stored=True):
        manager = self.manager
        for keys in [self.used, *self.stored]:
            manager.complete(keys or [], is_stored=is_stored)
        end = self.states[-2]
        groups = [self.attention[:-1], *([key] for key in end)]
        manager.policy.on_request_finished(groups, set(), set(), self.context)
        return self


def _hit_rate(manager, requests, **options):
    hits = total = 0
    for request in requests:
        ids = [*request.hash_ids, 10**9]  # the end of a prompt is computed
        hits += Run(manager, ids, **options).finish().hit
        total += request.input_length // TOKENS_PER_HASH_ID
    return hits / total


def test_the_interface_is_that_of_vllm_0_33():
    for name, expected in INTERFACE.items():
        assert [*inspect.signature(getattr(ValuePolicy, name)).parameters][1:] == expected


@pytest.mark.parametrize("groups", [(ATTENTION, STATES), (ATTENTION, STATES, b"\0\0\0\2")])
def test_prompts_that_come_again_outlive_those_that_do_not(groups):
    requests = draw_scan(800, num_hot=12)
    control = _hit_rate(Manager(200, Lru()), requests, groups=groups)
    assert _hit_rate(Manager(200), requests, groups=groups) > 1.5 * control


def test_attention_alone_is_kept_by_the_ends_of_prompts():
    requests = draw_scan(800, num_hot=12)
    control = _hit_rate(Manager(200, Lru()), requests, groups=(ATTENTION,))
    assert _hit_rate(Manager(200), requests, groups=(ATTENTION,)) > 1.5 * control


def test_a_hit_that_stores_nothing_counts_when_it_ends():
    requests = draw_scan(800, num_hot=12)
    told = _hit_rate(Manager(200), requests)
    assert _hit_rate(Manager(200, tells_accesses=False), requests) == pytest.approx(told, abs=0.01)


def _crowded():
    """Return a cache full of repeated prompts, after many that were not repeated."""
    manager = Manager(33)
    for n in range(300):
        Run(manager, [*range(n * 100 + 1_000, n * 100 + 1_020), 999]).finish()
        Run(manager, [*range(n % 3 * 100, n % 3 * 100 + 10), 999]).finish()
    assert len(manager.chunks) == 33
    return manager


def test_refused_chunks_are_refused_again():
    manager = _crowded()
    held = dict(manager.chunks)
    run = Run(manager, [*range(500, 520), 999])
    assert run.stored == [None, None]
    for keys in run.offers:
        assert manager.store(keys, run.context, is_retry=True) is None
    assert manager.chunks == held
    run.finish()
    assert Run(manager, [*range(10), 999]).hit == 10


def test_states_without_their_attention_go_first():
    manager = _crowded()
    manager.capacity = 35
    run = Run(manager, [*range(500, 520), 999])
    assert run.stored == [run.states[-2], None]  # there was room for one chunk, not for 20
    run.finish()
    assert manager.policy.evict(1, set())[0][0] == run.states[-2][0]


def test_nothing_is_left_after_clear():
    manager = _crowded()
    run = Run(manager, [*range(10), 999])
    manager.policy.clear()
    manager.chunks.clear()
    manager.policy.on_request_finished([run.attention], set(), set(), run.context)
    assert manager.policy.evict(1, set()) is None
    assert Run(manager, [*range(10), 999]).finish().hit == 0
    assert Run(manager, [*range(10), 999]).hit == 10


OPERATION = st.tuples(
    st.integers(0, 5), st.integers(2, 9), st.booleans(), st.sampled_from([False, False, True])
)


@given(st.integers(4, 40), st.lists(OPERATION, max_size=40))
def test_any_calls_keep_policy_and_manager_equal(capacity, operations):
    """Overlapping requests in any order, with failing stores."""
    manager, running = Manager(capacity), []
    for branch, length, is_stored, is_cleared in operations:
        ids = [*range(branch % 3), *range(branch * 50 + 50, branch * 50 + 50 + length)]
        running.append(Run(manager, ids))
        if len(running) > 3:
            running.pop(branch % 3).finish(is_stored=is_stored)
        policy = manager.policy
        assert {key: policy.get(key) for key in manager.chunks} == manager.chunks
        assert len(manager.chunks) <= capacity
        if is_cleared and not running:
            policy.clear()
            manager.chunks.clear()
    while running:
        running.pop().finish()
    num_held = len(manager.chunks)
    for key, _ in manager.policy.evict(num_held, set()) or []:
        del manager.chunks[key]
    assert not manager.chunks  # nothing is held for ever


def _calls_of_evict(num_prompts, n):
    manager = Manager(num_prompts * 11)
    for number in range(num_prompts):
        Run(manager, [*range(number * 10, number * 10 + 10), 10**9]).finish()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        assert len(manager.policy.evict(n, set())) == n
    finally:
        sys.setprofile(None)
    return calls


def test_eviction_does_not_depend_on_how_much_is_held():
    few, many = _calls_of_evict(50, 200), _calls_of_evict(1_000, 200)
    assert many < 1.5 * few
