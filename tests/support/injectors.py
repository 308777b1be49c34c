"""Injection of errors from other code at any moment of a call."""

import numpy as np
import torch

from mamba_cache.errors import InvalidArgumentError


def strike(monkeypatch, owner, name, error, call=1):
    """Make the ``call``-th call of ``owner.name`` raise after its work."""
    work, calls = getattr(owner, name), []

    def struck(*args, **kwargs):
        result = work(*args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            raise error("struck")
        return result

    monkeypatch.setattr(owner, name, struck)


class Injector:
    """Raises its error at one moment of a call. A moment is a call of one of ``functions``."""

    error: type[BaseException] = OSError
    is_late = False  # whether to raise after the function's work

    def __init__(self, context, index):
        self.context, self.index = context, index
        self.count = 0
        self.where = ""

    def functions(self):
        """Yield (owner, name of one of its functions)."""
        raise NotImplementedError

    def __enter__(self):
        self._patches = []
        for owner, name in self.functions():
            self._patches.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, self._watched(name, getattr(owner, name)))
        return self

    def __exit__(self, *_):
        for owner, name, found in self._patches:
            if found is None:
                delattr(owner, name)
            else:
                setattr(owner, name, found)

    def _watched(self, name, function):
        def run(*args, **kwargs):
            self.count += 1
            is_due = self.count == self.index
            result = None if is_due and not self.is_late else function(*args, **kwargs)
            if is_due:
                self.where = name
                raise self.error("injected")
            return result

        return run


class OutOfMemory(Injector):
    """Moments are the calls of functions that allocate an array or a tensor."""

    error = torch.OutOfMemoryError

    def functions(self):
        for name in (
            "arange", "array", "asarray", "ascontiguousarray", "concatenate", "cumsum", "empty",
            "flatnonzero", "frombuffer", "fromiter", "full", "repeat", "zeros",
        ):  # fmt: skip
            yield np, name
        for name in ("empty", "full", "tensor", "zeros"):
            yield torch, name


class Broken(Injector):
    """Moments are the launches, and the calls of an embedder's callbacks."""

    error = OSError

    def functions(self):
        slots = self.context.slot_allocator
        yield self.context._slots_to_live, "copy_own"
        yield self.context._live_to_slots, "copy_own"
        yield self.context.step_buffers, "fill"
        yield self.context, "_copy_to_forks"
        for name in ("choose", "on_stored", "on_consumed"):
            yield slots.policy, name
        yield self.context._index._placement, "positions"


class Refused(Injector):
    """Moments are the calls of an allocator, which raises an error of the package."""

    error = InvalidArgumentError

    def functions(self):
        for name in (
            "take", "hold", "release", "register",
        ):  # fmt: skip
            yield self.context.kv_block_allocator, name
        for name in (
            "reserve", "commit", "cancel", "pin", "unpin",
            "on_kv_blocks_deregistered",
        ):  # fmt: skip
            yield self.context.slot_allocator, name


class Interrupted(Refused):
    """Moments are the ends of calls that change an allocator or the table."""

    error = KeyboardInterrupt
    is_late = True

    def functions(self):
        yield from super().functions()
        for name in ("take", "append_token", "release"):
            yield self.context.request_table, name


INJECTORS = {
    "no memory for an array or tensor": OutOfMemory,
    "an exception in a launch or callback": Broken,
    "an error of the package in an inner call": Refused,
    "an interrupt after an inner call": Interrupted,
}
