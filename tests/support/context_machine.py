"""A state machine of calls to a context in any order, with a plain model of allowed matches."""

import contextlib
import random
import warnings

import pytest
import torch
from context_rig import BLOCK, CHUNK, MODEL, VOCAB, UncachedRuns, make_config, make_context
from fingerprints import fingerprint
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slot_rig import LastUsedPolicy

from mamba_cache.cache import (
    AdaptiveSlotPolicy,
    EveryNthBlock,
    LastBlock,
    LruSlotPolicy,
    RefZeroSlotPolicy,
)
from mamba_cache.context import Request, RequestStatus
from mamba_cache.errors import (
    CapacityError,
    InvalidArgumentError,
    MambaCacheError,
    MissingStateError,
    SequenceLengthError,
    StepOrderError,
    UnwrittenStateWarning,
)

UNCACHED = UncachedRuns()
POLICIES = [LruSlotPolicy, RefZeroSlotPolicy, LastUsedPolicy, AdaptiveSlotPolicy]
TENANTS = [
    {"cache_salt": "a"},
    {"cache_salt": b"a"},
    {"lora_id": "a"},
    {"multimodal_keys": [(3, "a")]},
    {"multimodal_keys": [(20, "a"), (3, "b")]},
    {"cache_salt": "a", "multimodal_keys": [(3, "a"), (45, "a")]},
]
CHANGES = st.lists(st.sampled_from([0, 0, 1, 5]), min_size=1, max_size=3)
MODES = st.sampled_from([False, False, True])
"""Whether PyTorch's inference mode is on; engines use it in steps, not between steps."""

STEM = [(7 * i * i + 3 * i) % VOCAB for i in range(64)]


class Seen:
    """The input and output of one request."""

    def __init__(self, prompt, tenant):
        self.prompt, self.tenant = tuple(prompt), tenant
        self.generated = []
        self.admission = None
        # All tokens after these are greedy.
        self.origin = self.prompt

    @property
    def tokens(self):
        return self.prompt + tuple(self.generated)

    def fork(self, last_token):
        """A fork of this request, with another last token."""
        fork = Seen(self.prompt, self.tenant)
        fork.generated = [*self.generated[:-1], last_token]
        is_same = fork.generated == self.generated
        fork.origin = self.origin if is_same else fork.tokens
        return fork

    def logits(self, runs, index=0):
        """Logits of uncached runs for the next token, or for the ``index``-th token after it."""
        return runs.logits(self.origin, len(self.tokens) - len(self.origin) + index)

    def prefix(self, end):
        """Everything that a state after ``end`` tokens may depend on."""
        keys = self.tenant.get("multimodal_keys", [])
        images = tuple(sorted((position, key) for position, key in keys if position < end))
        names = tuple(self.tenant.get(name) for name in ("cache_salt", "lora_id"))
        return names, images, self.tokens[:end]

    def request(self, request_id, tokens, **options):
        return Request(request_id=request_id, prompt_tokens=tokens, **self.tenant, **options)


class ForwardError(Exception):
    """Raised by a model between its layers."""


class Breaking:
    """Caches that make a model's forward fail after a number of attribute reads.

    Before the error they overwrite everything that a step may write: live states of its requests,
    its reserved slots, and keys and values of its tokens.
    """

    def __init__(self, context, step, countdown):
        self._context, self._step, self._countdown = context, step, countdown

    def __getattr__(self, name):
        self._countdown -= 1
        if self._countdown < 0:
            self._spoil(self._step.metadata)
            raise ForwardError
        return getattr(self._context, name)

    def _spoil(self, metadata):
        per_request = self._context.config.live_rows_per_request
        for tensor in self._context.live_states.tensors.values():
            rows = tensor.unflatten(1, (-1, per_request))
            rows[:, [request.row for request in self._step.requests]] = torch.nan
        slots = self._context.slot_allocator
        reserved = list(slots.reserved)
        for tensor in slots.states.tensors.values():
            tensor[:, reserved] = torch.nan
        places = metadata.kv_slot_mapping[: metadata.num_tokens].long()
        self._context.kv_cache.flatten(2, 3)[:, :, places[places >= 0]] = torch.nan


class Forgetful:
    """A context whose layers may hand over nothing, or first a chunk too few."""

    def __init__(self, context, rng):
        self._context = context
        self._forgets, self._cuts = ({i for i in (0, 1) if rng.random() < 0.3} for _ in range(2))

    def __getattr__(self, name):
        return getattr(self._context, name)

    def extract_checkpoint_states(self, layer, chunk_states, conv_input, metadata):
        hand_over = self._context.extract_checkpoint_states
        if layer in self._cuts and metadata.num_checkpoints:
            with pytest.raises(InvalidArgumentError, match="handed over"):
                hand_over(layer, chunk_states[:-1], conv_input, metadata)
        if layer not in self._forgets:
            hand_over(layer, chunk_states, conv_input, metadata)


class ContextMachine(RuleBasedStateMachine):
    """Calls in any order. Large pools: exact matches, except decode states; small: upper bounds.

    ``self.keeps_all``: no state is evicted before its request ends. ``self.exact``: matches are
    known exactly.
    """

    longest_answer = 12
    model, uncached = MODEL, UNCACHED
    damaged = frozenset()
    """Requests of the step with a damaged state, which are preempted at the step's end."""

    @initialize(
        ample=st.booleans(),
        policy=st.sampled_from(["lru", "lru", "ref_zero"]),
        save_decode_states=st.booleans(),
        max_checkpoints=st.sampled_from([0, 1, None]),
        chunk=st.sampled_from([2, 4, BLOCK]),
        longest=st.sampled_from([128, 128, 40, 37]),
        placement=st.sampled_from([None, None, LastBlock(), EveryNthBlock(1), EveryNthBlock(2)]),
        slot_policy=st.none() | st.sampled_from(POLICIES),
        enable_prefix_caching=st.sampled_from([True] * 7 + [False]),
        forgets=st.sampled_from([None] * 6 + [1, 2]),
        mode=MODES,
    )
    def start(
        self,
        ample,
        policy,
        longest,
        placement,
        slot_policy,
        max_checkpoints,
        forgets=None,
        mode=False,
        **settings,
    ):
        """Open a context. ``forgets`` is the seed for layers without handover; None: none."""
        self.forgets = forgets and random.Random(forgets)
        warnings.simplefilter("ignore" if forgets else "error", UnwrittenStateWarning)
        ample = ample and not forgets  # states may be missing
        self.now = 0.0
        self.keeps_all = ample and policy == "lru" and settings["enable_prefix_caching"]
        last_block_is_saved = placement is None or isinstance(placement, LastBlock)
        self.exact = self.keeps_all and max_checkpoints is None and last_block_is_saved
        self.longest = longest
        sizes = {} if ample else {"num_kv_blocks": 14, "max_slots": 3}
        chunk = settings.pop("chunk")
        self.settings = {
            "eviction_policy": policy,
            "max_checkpoints_per_step": max_checkpoints,
            "max_tokens": 60,
            "ssm_chunk_size": min(chunk, CHUNK),
            "max_sequence_length": longest,
            **settings,
            **sizes,
        }
        self.placement, self.slot_policy = placement, slot_policy
        with torch.inference_mode(mode):
            self.context = self.open_context()
        self.requests = {}
        self.shared_kv = {}
        self.next_id = self.num_commits = 0
        self.forget()

    def open_context(self, **options):
        """A new context with the drawn settings."""
        return make_context(
            make_config(**self.settings, **self.more_settings()),
            model=self.model,
            placement=self.placement,
            slot_policy=self.slot_policy and self.slot_policy(),
            clock=lambda: self.now,
            **options,
        )

    def more_settings(self):
        """Further settings of a derived machine."""
        return {}

    def caches(self):
        """The caches for the model's layers."""
        return Forgetful(self.context, self.forgets) if self.forgets else self.context

    def forget(self):
        self.published = set()
        self.surely_saved = set()
        self.perhaps_saved = set()
        self.snapshots = {}
        self.pinned = {}  # prompt and end by pin

    @rule(
        stem=st.sampled_from([8, 16, 24, 32, 40]) | st.integers(0, 40),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        tenant=st.just({}) | st.sampled_from(TENANTS),
        chunk=st.none() | st.integers(1, 40),
        positions=st.lists(st.integers(0, 60), max_size=2),
    )
    def add(self, stem, tail, tenant, chunk, positions):
        seen = Seen((STEM[:stem] + tail or [1])[: self.longest], tenant)
        positions = [min(position, self.longest) for position in positions]
        request = seen.request(self.next_id, list(seen.prompt), checkpoint_positions=positions)
        try:
            with self.unchanged_by_an_error():
                seen.admission = self.context.add_request(request, chunk_tokens=chunk)
        except CapacityError:
            return
        self.requests[self.next_id] = seen
        self.next_id += 1
        self.check_match(seen)

    @precondition(lambda self: self.with_status(RequestStatus.PREEMPTED))
    @rule(data=st.data(), chunk=st.none() | st.integers(1, 40))
    def resume(self, data, chunk):
        chosen = data.draw(st.sampled_from(self.with_status(RequestStatus.PREEMPTED)))
        try:
            with self.unchanged_by_an_error():
                admission = self.context.resume_request(chosen, chunk_tokens=chunk)
        except CapacityError:
            return
        except SequenceLengthError:
            assert len(self.requests[chosen].tokens) > self.longest
            return
        self.requests[chosen].admission = admission
        self.check_match(self.requests[chosen])

    @precondition(lambda self: self.requests)
    @rule(
        times=st.integers(1, 16),
        chunk=st.none() | st.integers(1, 40),
        some=st.booleans(),
        changes=st.none() | CHANGES,
        mode=MODES,
    )
    def steps(self, times, chunk, some, changes, mode):
        """Run several steps, and often fork the oldest decoding request."""
        with torch.inference_mode(mode):
            self.go_on(times, chunk, some)
        decoding = self.with_status(RequestStatus.DECODING)
        if changes is not None and decoding:
            self.fork_one(decoding[0], changes)

    def go_on(self, times, chunk, some):
        for _ in range(times):
            for chosen in self.with_status(RequestStatus.PREFILLING):
                try:
                    self.context.schedule_prefill(chosen, chunk_tokens=chunk)
                except CapacityError:
                    continue
            decoding = self.with_status(RequestStatus.DECODING)
            if self.can_step():
                self.step(decoding[::2] if some and decoding else None)

    def step(self, decode_ids):
        step = self.begin(decode_ids)
        if step is None:
            return
        logits = self.model.forward(step.metadata, self.caches())
        new_tokens = {}
        for request, row in zip(step.requests, logits, strict=True):
            if request.samples:
                expected = self.requests[request.request_id].logits(self.uncached)
                if request.request_id not in self.damaged:
                    torch.testing.assert_close(row, expected, rtol=0, atol=1e-9)
                new_tokens[request.request_id] = int(expected.argmax())
        assert tuple(new_tokens) == step.sampling_ids
        preempted = self.context.commit_step(
            [*new_tokens.values()] if self.uses_arrays() else new_tokens
        )
        assert set(preempted) == self.damaged
        for request_id in preempted:
            assert self.context.status(request_id) is RequestStatus.PREEMPTED
        for request in step.requests:
            if request.request_id not in self.damaged:
                self.publish(self.requests[request.request_id], request)
        for request_id, token in new_tokens.items():
            if request_id not in self.damaged:
                self.requests[request_id].generated.append(token)
        for request in step.requests:
            if request.request_id not in self.damaged:
                seen = self.requests[request.request_id]
                self.check_found(seen, request.start + request.num_tokens)
        self.remember_states()
        self.finish_those_with(self.longest_answer)

    def uses_arrays(self):
        """Whether to pass tokens in batch order this time, not by request id."""
        self.num_commits += 1
        return self.num_commits % 2 == 0

    def finish_those_with(self, num_generated):
        for request_id, seen in list(self.requests.items()):
            if len(seen.generated) >= num_generated:
                self.end(request_id)

    def end(self, request_id):
        self.forget_uncollected(request_id)
        assert self.context.finish(request_id) == self.requests.pop(request_id).generated

    def forget_uncollected(self, request_id):
        """Hook of machines that pass tokens late: drop a request's uncollected tokens."""

    def forget_all_uncollected(self):
        """Hook of machines that pass tokens late: drop all uncollected tokens."""

    @precondition(lambda self: self.with_status(RequestStatus.DECODING))
    @rule(data=st.data(), changes=CHANGES)
    def fork(self, data, changes):
        self.fork_one(data.draw(st.sampled_from(self.with_status(RequestStatus.DECODING))), changes)

    def fork_one(self, chosen, changes):
        """Fork a request; the copies must be equal, bit for bit.

        ``changes`` are the differences of the forks' last tokens from the request's last token.
        """
        if not self.can_be_forked(chosen):
            return
        seen = self.requests[chosen]
        tokens = [(seen.generated[-1] + change) % VOCAB for change in changes]
        new_ids = [self.next_id + index for index in range(len(tokens))]
        last_tokens = tokens if any(changes) else None
        try:
            with self.unchanged_by_an_error():
                made = self.context.fork(chosen, new_ids, last_tokens=last_tokens)
        except CapacityError:
            return
        self.next_id += len(tokens)
        for request_id, token in zip(new_ids, tokens, strict=True):
            self.requests[request_id] = seen.fork(token)
            assert self.context.output(request_id) == self.requests[request_id].generated
        self.compare_copies(made)

    def can_be_forked(self, request_id):
        """Hook of machines that pass tokens late: whether all tokens of a request are known."""
        return True

    def compare_copies(self, made):
        """Compare a fork's copies, and record the shared blocks, which must not be written."""
        context = self.context
        num_full, rest = divmod(int(context.request_table.num_computed[made.source_row]), BLOCK)
        assert len(made.blocks) == (len(made.rows) if rest else 0)
        for block in made.blocks:
            kept, copied = (context.kv_cache[:, :, b, :rest] for b in (made.source_block, block))
            assert torch.equal(kept, copied)
        for row in made.rows:
            for read, written in zip(
                self.live_state(made.source_row), self.live_state(row), strict=True
            ):
                assert torch.equal(read, written)
                assert not read.isnan().any()
        for block in context.request_table.blocks_of(made.source_row)[:num_full].tolist():
            self.shared_kv[block] = context.kv_cache[:, :, block].clone()

    def live_state(self, row):
        """The tensors of the live state that a request's next step reads."""
        speculation = self.context._speculation
        place = row * self.context.config.live_rows_per_request
        place += 0 if speculation is None else int(speculation._rows.cursors[row])
        return [tensor[:, place] for tensor in self.context.live_states.tensors.values()]

    @precondition(lambda self: self.can_step())
    @rule(breaks_at=st.integers(0, 12))
    def abort(self, breaks_at):
        """Abort a step whose forward fails in any of its layers, or after all layers."""
        step = self.begin()
        if step is None:
            return
        with contextlib.suppress(ForwardError):
            self.model.forward(step.metadata, Breaking(self.context, step, breaks_at))
        assert set(self.context.abort_step()) == {r.request_id for r in step.requests}
        for request in step.requests:
            self.forget_uncollected(request.request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data):
        holding = [
            i for i in self.requests if self.context.status(i) is not RequestStatus.PREEMPTED
        ]
        if holding:
            chosen = data.draw(st.sampled_from(holding))
            before = self.context.stats().preemptions
            self.context.preempt(chosen)
            assert self.context.stats().preemptions == before + 1
            self.forget_uncollected(chosen)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        self.end(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(
        stem=st.sampled_from([8, 16, 24, 32]),
        tenant=st.just({}) | st.sampled_from(TENANTS),
        ttl=st.none() | st.sampled_from([0, 1, 5]),
    )
    def pin(self, stem, tenant, ttl):
        """Pin a prefix that may be cached; pins may already hold too much."""
        seen = Seen(STEM[:stem], tenant)
        try:
            with self.unchanged_by_an_error():
                pin = self.context.pin(seen.request("pin", list(seen.prompt)), ttl_seconds=ttl)
        except (CapacityError, MissingStateError):
            return
        assert seen.prefix(pin.num_tokens) in self.perhaps_saved
        self.pinned[pin] = seen, None if ttl is None else self.now + ttl

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        pin = data.draw(st.sampled_from(list(self.pinned)))
        self.context.unpin(pin)
        del self.pinned[pin]
        self.drop_ended_pins()

    @rule(seconds=st.sampled_from([0.5, 1, 3]))
    def time_goes_by(self, seconds):
        self.now += seconds
        self.drop_ended_pins()

    def drop_ended_pins(self, *, all_of_them=False):
        """Drop ended pins from the model; the context releases them at its next call."""
        for pin, (_, end) in list(self.pinned.items()):
            if all_of_them or (end is not None and end <= self.now):
                self.context.unpin(pin)
                del self.pinned[pin]

    @invariant()
    def pinned_prompts_are_found(self):
        for pin, (seen, _) in getattr(self, "pinned", {}).items():
            request = seen.request("look", [*seen.prompt, 0])
            assert self.context.match(request).skip_tokens >= pin.num_tokens

    @rule(data=st.data())
    def invalidate(self, data):
        slots = self.context.slot_allocator
        housed = slots.slot_to_block[slots.slot_to_block >= 0].tolist()
        if housed:
            slots.invalidate_block(data.draw(st.sampled_from(sorted(housed))))
            self.surely_saved.clear()
            self.pinned = {
                pin: ends for pin, ends in self.pinned.items() if pin in self.context.pins
            }

    @rule(data=st.data())
    def deregister(self, data):
        hashes = self.context.kv_block_allocator.block_hashes
        registered = (hashes >= 0).nonzero().flatten().tolist()
        if registered:
            self.context.kv_block_allocator.deregister_blocks(
                [data.draw(st.sampled_from(registered))]
            )
            self.exact = self.keeps_all = False
            self.drop_ended_pins(all_of_them=True)

    @rule(what=st.sampled_from(["requests", "slots", "everything"]))
    def reset(self, what):
        if what == "slots":
            if self.context.stats().reserved_slots:
                with pytest.raises(StepOrderError, match="have reserved slots"):
                    self.context.slot_allocator.reset()
                return
            self.context.slot_allocator.reset()
            self.surely_saved.clear()
            self.pinned.clear()
            self.keeps_all = False  # false for scheduled and uncollected requests
            return
        self.context.reset(preserve_prefix_cache=what == "requests")
        self.forget_all_uncollected()
        self.requests.clear()
        if what == "everything":
            self.forget()
            assert self.context.stats().cached_slots == 0
            assert self.context.stats().cached_blocks == 0

    @invariant()
    def invariants_hold(self):
        if hasattr(self, "context"):
            self.context.check_invariants()
            assert self.context.request_table.num_free_rows == 4 - len(
                [i for i in self.requests if self.context.status(i) is not RequestStatus.PREEMPTED]
            )

    @invariant()
    def shared_blocks_are_never_written(self):
        known = getattr(self, "shared_kv", {})
        counts = self.context.kv_block_allocator.block_ref_counts if known else ()
        self.shared_kv = {block: bits for block, bits in known.items() if counts[block] > 1}
        for block, bits in self.shared_kv.items():
            assert torch.equal(self.context.kv_cache[:, :, block], bits), block

    @contextlib.contextmanager
    def unchanged_by_an_error(self):
        before = fingerprint(self.context)
        try:
            yield
        except MambaCacheError:
            assert fingerprint(self.context) == before
            raise

    def with_status(self, status):
        return [i for i in self.requests if self.context.status(i) is status]

    def can_step(self):
        return self.with_status(RequestStatus.SCHEDULED) or self.with_status(RequestStatus.DECODING)

    def begin(self, decode_ids=None, **drafts):
        """Begin a step; restored states must equal the saved ones, bit for bit."""
        try:
            with self.unchanged_by_an_error():
                step = self.context.begin_step(decode_ids, **drafts)
        except CapacityError:
            return None
        except SequenceLengthError:
            for request_id in self.with_status(RequestStatus.DECODING):
                if len(self.requests[request_id].tokens) > self.longest:
                    self.end(request_id)
            return None
        for request in step.requests:
            seen = self.requests[request.request_id]
            if seen.admission is None:
                continue
            row = request.row * self.context.config.live_rows_per_request
            restored = {n: t[:, row] for n, t in self.context.live_states.tensors.items()}
            assert request.start == request.skip_tokens
            zero = {name: torch.zeros_like(tensor) for name, tensor in restored.items()}
            saved = self.snapshots[seen.prefix(request.start)] if request.start else [zero]
            assert any(same_bits(restored, each) for each in saved), request
            seen.admission = None
        return step

    def check_match(self, seen):
        admission, tokens = seen.admission, seen.tokens
        matched, skipped = admission.kv_matched_blocks, admission.state_matched_blocks
        assert admission.skip_tokens == skipped * BLOCK < len(tokens)
        assert (admission.miss_reason is None) == bool(skipped)
        for end in range(BLOCK, matched * BLOCK + 1, BLOCK):
            assert seen.prefix(end) in self.published
        assert not skipped or seen.prefix(skipped * BLOCK) in self.perhaps_saved
        if self.exact:
            following = seen.prefix((matched + 1) * BLOCK)
            assert following not in self.published or len(tokens) < (matched + 1) * BLOCK
            sure = [
                end // BLOCK
                for end in range(BLOCK, len(tokens), BLOCK)
                if seen.prefix(end) in self.surely_saved
            ]
            assert skipped >= max(sure, default=0)

    def check_found(self, seen, end):
        """The computed tokens of a request, also of its answer, must match afterwards."""
        tokens = seen.tokens[:end][: self.longest]
        if self.keeps_all:
            match = self.context.match(seen.request("next", list(tokens)))
            assert match.kv_matched_blocks == len(tokens) // BLOCK

    def publish(self, seen, request):
        tokens, end = seen.tokens, request.start + request.num_tokens
        for boundary in range(BLOCK, end + 1, BLOCK):
            self.published.add(seen.prefix(boundary))
        last_complete = len(tokens) // BLOCK * BLOCK
        for boundary in range(BLOCK, end + 1, BLOCK):
            key = seen.prefix(boundary)
            is_last = request.is_prefill and boundary == last_complete > request.start
            if is_last and key not in self.perhaps_saved:
                self.surely_saved.add(key)
            self.perhaps_saved.add(key)

    def remember_states(self):
        """Copy every findable state, keyed by its prefix."""
        slots, kv_blocks = self.context.slot_allocator, self.context.kv_block_allocator
        known = {}
        for seen in self.requests.values():
            probe = seen.request("probe", list(seen.tokens[: self.longest]))
            hashes = self.context.prepare(probe).hashes
            for index in range(len(hashes)):
                block = kv_blocks.find_block(hashes.digests[index])
                if block is not None and slots.has_state(block):
                    known[slots.get_slot(block)] = seen.prefix((index + 1) * BLOCK)
        for slot, key in known.items():
            state = {name: tensor[:, slot] for name, tensor in slots.states.tensors.items()}
            assert not any(tensor.isnan().any() for tensor in state.values()), key
            self.remember(key, {name: tensor.clone() for name, tensor in state.items()})

    def remember(self, key, state):
        """Record the findable state of a prefix; a prefix has one state at a time."""
        self.snapshots[key] = [state]


def same_bits(one, other):
    """Whether all tensors of two states are equal; NaN equals nothing."""
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())
