"""Several ranks in one process: the same calls to each context, and their agreement."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from context_machine import Breaking, ForwardError
from context_rig import MODEL

from mamba_cache.errors import MambaCacheError


class Exchange:
    """The agreement of ranks in threads of one process, with a count of its rounds."""

    def __init__(self, num_ranks):
        self.num_ranks, self.num_rounds = num_ranks, 0
        self._changed = threading.Condition()
        self._given, self._largest, self._num_ended = [], [], 0

    def begin_call(self):
        self._given, self._num_ended = [], 0

    def end_call(self):
        """Record that a rank's call ended, so it exchanges nothing more."""
        with self._changed:
            self._num_ended += 1
            self._changed.notify_all()

    def largest(self, values):
        with self._changed:
            number = self.num_rounds
            self._given.append(list(values))
            if len(self._given) == self.num_ranks:
                lengths = {len(each) for each in self._given}
                assert len(lengths) == 1, f"ranks exchange other things: {self._given}"
                self._largest = [max(each) for each in zip(*self._given, strict=True)]
                self._given, self.num_rounds = [], number + 1
                self._changed.notify_all()
            while self.num_rounds == number:
                assert not self._num_ended, "a rank exchanges what another one does not"
                self._changed.wait()
            return self._largest


class Ranks:
    """The contexts of all ranks, or one part of each; a call goes to all of them.

    Calls with an agreement run in a thread for each rank. Results must be equal, and errors too.
    Other attributes are rank 0's; attributes of tiers are those of rank ``focus``.
    """

    _OWN = ("_tiering", "host_tier", "disk_tier")
    _TOGETHER = (
        "add_request", "resume_request", "match", "prefetch", "begin_step", "commit_step",
        "poll_tiers",
    )  # fmt: skip

    def __init__(self, parts, exchange, threads=()):
        self.parts, self.exchange, self.focus = parts, exchange, 0
        self.threads = threads or [ThreadPoolExecutor(1) for _ in parts]
        self.of_first = {}  # id of rank 0's result -> results of all ranks
        self.steps = ()

    def __getattr__(self, name):
        parts = [getattr(part, name) for part in self.parts]
        if name in self._OWN:
            return parts[self.focus]
        if name in {"slot_allocator", "kv_block_allocator"}:
            return Ranks(parts, self.exchange, self.threads)
        return partial(self.call, name) if callable(parts[0]) else parts[0]

    def call(self, name, *args, **options):
        calls = [
            partial(getattr(part, name), *[self._of(rank, arg) for arg in args], **options)
            for rank, part in enumerate(self.parts)
        ]
        results = self.run(calls, in_threads=name in self._TOGETHER)
        if name in {"prefetch", "pin"}:
            self.of_first[id(results[0])] = results
        elif name == "begin_step":
            self.steps = results
        elif name not in {"stats", "reset", "prepare"}:
            assert all(result == results[0] for result in results), (name, results)
        return results[0]

    def run(self, calls, *, in_threads=True):
        """Run a call for each rank; return the results, or raise the error that all ranks raise."""
        self.exchange.begin_call()
        if in_threads:
            pairs = zip(self.threads, calls, strict=True)
            futures = [thread.submit(self._run_one, call) for thread, call in pairs]
            outcomes = [future.result() for future in futures]
        else:
            outcomes = [self._run_one(call) for call in calls]
        results, errors = zip(*outcomes, strict=True)
        wrong = [error for error in errors if not isinstance(error, MambaCacheError | None)]
        if wrong:
            raise wrong[0]
        assert len({type(error) for error in errors}) == 1, errors
        if errors[0] is not None:
            raise errors[0]
        return results

    def _run_one(self, call):
        try:
            return call(), None
        except Exception as error:
            return None, error
        finally:
            self.exchange.end_call()

    def _of(self, rank, argument):
        """The argument for a rank; arguments with a state have a copy for each rank."""
        if id(argument) in self.of_first:
            return self.of_first[id(argument)][rank]
        return type(argument)() if hasattr(argument, "choose") else argument


class RankedModel:
    """The whole reference model on each rank; returns rank 0's logits, unchecked."""

    config = MODEL.config

    def forward(self, metadata, caches):
        if isinstance(caches, Breaking):
            ranks = caches._context
            for part, step in zip(ranks.parts, ranks.steps, strict=True):
                with suppress(ForwardError):
                    MODEL.forward(step.metadata, Breaking(part, step, caches._countdown))
            raise ForwardError
        steps = zip(caches.parts, caches.steps, strict=True)
        caches.logits = [MODEL.forward(step.metadata, part) for part, step in steps]
        return caches.logits[0]
