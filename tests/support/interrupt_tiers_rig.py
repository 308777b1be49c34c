"""Contexts over host memory and disk that are interrupted, and what must hold then."""

import shutil
import tempfile
from contextlib import suppress
from functools import partial

from context_rig import MODEL, UncachedRuns, add, generate, run_step
from interrupt_rig import Leak, Wedged, WrongAnswer
from tier_rig import (
    STATE,
    LateTransfers,
    always,
    cached_rows,
    flip,
    flip_header,
    install,
    make_tiered,
)

from mamba_cache.context import Request, RequestStatus
from mamba_cache.errors import PoisonedError, StepOrderError, UnknownRequestError
from mamba_cache.tiers import ModelIdentity

PROMPT = [(3 * i * i + 2 * i) % 13 for i in range(30)]
OTHERS = [[(5 * i + k) % 13 for i in range(30)] for k in range(1, 4)]
UNCACHED = UncachedRuns()
PATIENCE = 60.0
"""Seconds after which a disk counts as wedged."""


class Made:
    """A context with small pools, and the folder of its disk if it has one."""

    def __init__(self, *, on_disk=False, num_host_states=30):
        self.folder = tempfile.mkdtemp(prefix="mamba-cache-tiers-") if on_disk else None
        self.num_host_states = num_host_states
        self.context = self.open()
        self.handle = None

    def open(self):
        disk = {}
        if self.folder is not None:
            disk = {
                "disk_cache_path": self.folder,
                "disk_cache_gb": 2**-9,
                "disk_write_on_use": 1,
            }
        context = make_tiered(
            num_kv_blocks=9,
            max_slots=2,
            num_host_states=self.num_host_states,
            hash_secret=b"of this test",
            options={"identity": ModelIdentity(name="model", weights="w")},
            **disk,
        )
        if self.folder is not None:
            context._tiering.lower._planner = always()
        return context

    def fill(self):
        """What the tiers have of all prompts lies below the GPU."""
        for prompt in (PROMPT, *OTHERS):
            generate(self.context, prompt, 1)
        self.context.wait_for_tiers()
        return self

    def load(self):
        """A request is admitted that loads from host memory."""
        if not add(self.context, "a", PROMPT).loads_state:
            raise Wedged("nothing is loaded: the test shows nothing")
        return self

    def begin(self):
        step = self.context.begin_step()
        MODEL.forward(step.metadata, self.context)
        return self

    def damage(self):
        for row in cached_rows(self.context, STATE):
            flip(self.context, STATE, row, 5)
        return self

    def damage_headers(self):
        for row in cached_rows(self.context, STATE):
            flip_header(self.context, STATE, row, 9)
        return self

    def leave(self):
        """The next context finds on the disk what this one has stored."""
        self.context.close()
        self.context = self.open()
        return self

    def late(self):
        """Spills are under way, of which some will not count."""
        late = install(self.context, LateTransfers)
        for prompt in (PROMPT, OTHERS[0]):
            generate(self.context, prompt, 1)
        late.run(9)
        return self

    def prefetch(self):
        self.handle = self.context.prefetch(_probe())

    def bring(self):
        """What was asked for is there, and nobody has taken it over yet."""
        self.prefetch()
        if not self.handle.num_entries or not self.context.disk_tier.flush(PATIENCE):
            raise Wedged("nothing is brought: the test shows nothing")
        return self

    def check(self):
        """All goes on rightly, here and in the next context; or it was poisoned, and is reset."""
        context, is_poisoned = self.context, False
        try:
            context.match(_probe())
        except PoisonedError:
            is_poisoned = True
            context.reset()
        context.check_invariants()
        with suppress(StepOrderError):
            context.abort_step()
        with suppress(UnknownRequestError):
            context.finish("only")
        self._bring_to_its_end()
        for prompt in (PROMPT, *OTHERS, PROMPT):
            self._check_answer(prompt)
        context.wait_for_tiers()
        context.check_invariants()
        if any(context.host_tier.leases.values()) or context.host_tier._lower:
            raise Leak("rows of host memory are held")
        stats = context.stats()
        if stats.used_blocks or stats.reserved_slots:
            raise Leak(f"{stats.used_blocks} blocks and {stats.reserved_slots} slots are held")
        if self.folder is not None:
            self._check_disk(context.disk_tier)
        return is_poisoned

    def _bring_to_its_end(self):
        context = self.context
        with suppress(UnknownRequestError):
            for _ in range(9):
                status = context.status("a")
                if status is RequestStatus.DECODING:
                    break
                if status is RequestStatus.PREEMPTED:
                    context.resume_request("a")
                elif status is RequestStatus.PREFILLING:
                    context.schedule_prefill("a")
                run_step(context)
            else:
                raise Wedged("a request does not come to its end")
            if context.finish("a") not in ([], [token_of(PROMPT)]):
                raise WrongAnswer("of the request that was interrupted")

    def _check_answer(self, prompt):
        if generate(self.context, prompt, 1)[0] != [token_of(prompt)]:
            raise WrongAnswer(f"of a prompt that begins with {prompt[:3]}")

    def _check_disk(self, disk):
        if self.handle is not None and not self.handle.is_done:
            raise Wedged("a prefetch is never done")
        if disk is not None:
            disk.check_invariants()
            if disk.num_queued or any(file.rows.leases for file in disk._files.values()):
                raise Leak("rows of the disk are held")
        self.leave()
        self.context.prefetch(_probe())
        self.context.wait_for_tiers()
        self._check_answer(PROMPT)

    def close(self):
        if self.folder is not None:
            self.context.close()
            shutil.rmtree(self.folder, ignore_errors=True)


class TierCall:
    """A call of a context over tiers, for ``interrupt_rig.Search``."""

    def __init__(self, make, run):
        self.make, self.run = make, run

    def judge(self, made):
        try:
            return made.check()
        finally:
            made.close()


def token_of(prompt):
    return int(UNCACHED.logits(tuple(prompt), 0).argmax())


def _probe():
    return Request(request_id="probe", prompt_tokens=PROMPT)


def _commit(made):
    made.context.commit_step({"a": token_of(PROMPT)})


def _full():
    return Made().fill()


_on_disk = partial(Made, on_disk=True)
TIER_CALLS = {
    "Tiers, add_request that loads": TierCall(_full, Made.load),
    "Tiers, add_request that finds damage": TierCall(
        lambda: Made().fill().damage_headers(), lambda made: add(made.context, "a", PROMPT)
    ),
    "Tiers, begin_step that loads": TierCall(
        lambda: _full().load(), lambda made: made.context.begin_step()
    ),
    "Tiers, commit_step that has loaded": TierCall(lambda: _full().load().begin(), _commit),
    "Tiers, commit_step that has loaded damage": TierCall(
        lambda: _full().load().damage().begin(), _commit
    ),
    "Tiers, abort_step that has loaded": TierCall(
        lambda: _full().load().begin(), lambda made: made.context.abort_step()
    ),
    "Tiers, preempt before a load": TierCall(
        lambda: _full().load(), lambda made: made.context.preempt("a")
    ),
    "Tiers, finish before a load": TierCall(
        lambda: _full().load(), lambda made: made.context.finish("a")
    ),
    "Tiers, commit_step that spills": TierCall(
        lambda: Made(num_host_states=3).fill(), lambda made: generate(made.context, PROMPT[::-1], 1)
    ),
    "Tiers, wait_for_tiers": TierCall(
        lambda: Made().late(), lambda made: made.context.wait_for_tiers()
    ),
    "Tiers, scrub": TierCall(lambda: Made().late(), lambda made: made.context.scrub()),
    "Tiers, reset": TierCall(lambda: _full().load().begin(), lambda made: made.context.reset()),
    "Tiers, prefetch from the disk": TierCall(
        lambda: _on_disk().fill().leave(), lambda made: made.prefetch()
    ),
    "Tiers, add_request of what was prefetched": TierCall(
        lambda: _on_disk().fill().leave().bring(), lambda made: add(made.context, "a", PROMPT)
    ),
    "Tiers, commit_step that spills to the disk": TierCall(
        lambda: _on_disk(num_host_states=3).fill(),
        lambda made: generate(made.context, PROMPT[::-1], 1),
    ),
    "Tiers, reset of what is on its way": TierCall(
        lambda: _on_disk().fill().leave().bring(), lambda made: made.context.reset()
    ),
    "Tiers, close": TierCall(lambda: _on_disk().fill(), lambda made: made.context.close()),
}
