"""Errors that come from outside, at any one moment of a call."""

import ast
import dis
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

import mamba_cache
from mamba_cache.errors import InvalidArgumentError

PACKAGE = str(Path(mamba_cache.__file__).parent) + os.sep


class Injector:
    """Raises its error at one moment of a call, and counts the moments."""

    error: type[BaseException] = KeyboardInterrupt

    def __init__(self, context, index):
        self.context, self.index = context, index
        self.count = 0
        self.where = ""

    def pass_moment(self, where):
        """Raises if this is the moment."""
        self.count += 1
        if self.count == self.index:
            self.where = where
            raise self.error("injected")


class Interrupt(Injector):
    """A moment is before each instruction that the package executes."""

    def __enter__(self):
        self._previous = sys.gettrace()
        # Python 3.12 makes instructions traceable in settrace, if a frame has asked for it before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._previous)

    def _trace(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            file = code.co_filename.removeprefix(PACKAGE)
            self.pass_moment(f"{file}:{frame.f_lineno}, {code.co_name}+{frame.f_lasti}")
        return self._trace


class LineInterrupt(Interrupt):
    """A moment is before each line of the package."""

    def _trace(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.pass_moment(f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}")
        return self._trace


class LineOfSignals(LineInterrupt):
    """A moment is before each line of the package at which a signal can strike.

    Only a tracing function can raise between the end of a ``with`` block and the release of its
    lock, for which other threads would wait for ever: the interpreter looks for signals after calls
    and jumps, and ``with`` releases a lock of C's in the very instruction that leaves the block.
    """

    def _trace(self, frame, event, argument):
        if event == "line" and _leaves_with(frame.f_code, frame.f_lasti, frame.f_lineno):
            return self._trace
        return super()._trace(frame, event, argument)


@cache
def _with_lines(file):
    """The lines in which the ``with`` statements of a file begin."""
    tree = ast.parse(Path(file).read_bytes())
    return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.With)}


@cache
def _leaves_with(code, offset, line):
    """Whether an instruction leaves a ``with`` block: one that enters it loads its object first."""
    if not code.co_filename.startswith(PACKAGE) or line not in _with_lines(code.co_filename):
        return False
    name = dis.opname[code.co_code[offset]]
    return not name.startswith("LOAD_") or "CONST" in name


class _Patching(Injector):
    """A moment is each call of certain functions."""

    def functions(self):
        """Yields (owner, name of one of its functions)."""
        raise NotImplementedError

    def __enter__(self):
        self._patches = []
        for owner, name in self.functions():
            found = vars(owner).get(name)
            self._patches.append((owner, name, found))
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
            self.pass_moment(name)
            return function(*args, **kwargs)

        return run


class OutOfMemory(_Patching):
    """A moment is each call of a function that makes an array or a tensor."""

    error = torch.OutOfMemoryError

    def functions(self):
        for name in (
            "arange", "array", "asarray", "ascontiguousarray", "concatenate", "cumsum", "empty",
            "flatnonzero", "frombuffer", "fromiter", "full", "repeat", "zeros",
        ):  # fmt: skip
            yield np, name
        for name in ("empty", "full", "tensor", "zeros"):
            yield torch, name


class Broken(_Patching):
    """A moment is each launch, and each call of what an embedder can bring along."""

    error = OSError

    def functions(self):
        slots = self.context.slot_allocator
        for name in ("slots_to_live", "live_to_slots"):
            yield slots.transfers, name
        yield self.context.step_buffers, "fill"
        yield self.context._forker, "_copy"
        for name in ("choose", "on_stored", "on_consumed"):
            yield slots.policy, name
        yield self.context._checkpoints._placement, "positions"


class Refused(_Patching):
    """A moment is each call of an allocator, which refuses it with an error of the package."""

    error = InvalidArgumentError

    def functions(self):
        for name in (
            "allocate_memory_blocks", "retain_memory_blocks", "release_memory_blocks",
            "register_kv_block_hashes",
        ):  # fmt: skip
            yield self.context.kv_block_allocator, name
        for name in (
            "reserve_slots", "commit_reserved", "cancel_reserved", "pin_slots", "unpin_slots",
            "note_consumed", "on_kv_blocks_deregistered",
        ):  # fmt: skip
            yield self.context.slot_allocator, name


INJECTORS = {
    "an interrupt before an instruction": Interrupt,
    "no memory for an array or tensor": OutOfMemory,
    "an exception in a launch or callback": Broken,
    "an error of the package in an inner call": Refused,
}
