"""Prefix caches that are wrong on purpose, one fault each: what a search must be able to find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from mamba_cache.integrations.transformers import capture, fingerprint, generation
from mamba_cache.integrations.transformers.generation import Generation
from mamba_cache.integrations.transformers.layers import CacheFiller, SequenceMemory
from mamba_cache.integrations.transformers.store import PrefixStore
from mamba_cache.integrations.transformers.tensors import PrefixTensors
from mamba_cache.slots.pool import SlotPool


def _another_slot(load: Any) -> Any:
    def broken(self: PrefixTensors, slot: int, *others: Any) -> SequenceMemory:
        return load(self, (slot + 1) % len(self.slots), *others)

    return broken


def _shifted_blocks(save_tokens: Any) -> Any:
    def broken(self: PrefixTensors, blocks: Any, memory: Any, start: int, end: int) -> None:
        shift = int(start > 0)
        save_tokens(self, blocks, memory, start - shift, end - shift)

    return broken


def _aliased_state(load: Any) -> Any:
    def broken(self: PrefixTensors, slot: int, blocks: Any, num_tokens: int) -> SequenceMemory:
        loaded = load(self, slot, blocks, num_tokens)
        loaded.states = self.room(slot, num_tokens).states
        return loaded

    return broken


def _boundary_a_token_late(keep: Any) -> Any:
    def broken(self: Generation) -> None:
        keep(self)
        for index, row in enumerate(self._rows):
            if row.boundary and row.boundary == self._ids.shape[1] - 2 - row.prompt.padding:
                row.states = [x.clone() for x in self._memory().row(index).states]

    return broken


def _rows_that_went_on(_: Any) -> Any:
    return lambda memory, **_: memory


def _no_salts(open_record: Any) -> Any:
    return lambda self, tokens, **named: open_record(self, tokens, **{**named, "cache_salt": None})


def _one_key(_: Any) -> Any:
    return lambda self: "always the same"


def _weights_unseen(_: Any) -> Any:
    return lambda self, tensors, **_: None


def _shifted_windows(conv_tap: Any) -> Any:
    """Not where one position is captured, as the probe tries it."""

    def broken(run: Any, rooms: Any) -> Any:
        tap = conv_tap(run, rooms)

        def shifted(layer: Any, args: Any, kwargs: Any) -> None:
            tap(layer, args, kwargs)
            for of_cuts in rooms.values():
                for room in of_cuts[1:]:
                    room.copy_(room.roll(1, -1))

        return shifted

    return broken


def _swapped_pieces(recurrent_tap: Any) -> Any:
    """Not where one position is captured, as the probe tries it."""

    def broken(run: Any, rooms: Any) -> Any:
        tap = recurrent_tap(run, rooms)

        def swapped(layer: Any, args: Any, kwargs: Any) -> None:
            if run.pieces is not None:
                run.pieces = run.pieces[::-1]
            tap(layer, args, kwargs)

        return swapped

    return broken


def _padding_kept(row: Any) -> Any:
    def broken(self: SequenceMemory, number: int, padding: int = 0) -> SequenceMemory:
        kept = row(self, number, padding)
        kept.tokens = [x[number : number + 1] for x in self.tokens]
        return kept

    return broken


def _first_row_for_all(row: Any) -> Any:
    def broken(self: SequenceMemory, number: int, padding: int = 0) -> SequenceMemory:
        kept = row(self, number, padding)
        kept.states = row(self, 0, padding).states
        return kept

    return broken


def _states_of_evicted_blocks(_: Any) -> Any:
    return lambda self, block_ids, hashes_to_delete: None


def _nothing_given_back(_: Any) -> Any:
    return lambda self: None


def _window_too_short(fill: Any) -> Any:
    def broken(self: CacheFiller, cache: Any, memory: SequenceMemory) -> None:
        fill(self, cache, memory)
        for layer, parts in zip(cache.layers, self._layers, strict=True):
            if parts.window:
                layer.cumulative_length -= 1

    return broken


def _random_numbers_used(first_forward: Any) -> Any:
    def broken(self: Generation, *others: Any) -> Any:
        torch.rand(1)
        return first_forward(self, *others)

    return broken


_FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "the state of another slot is restored": (PrefixTensors, "load", _another_slot),
    "the live state is the slot itself, not a copy": (PrefixTensors, "load", _aliased_state),
    "the tokens of a block are one too early": (PrefixTensors, "save_tokens", _shifted_blocks),
    "an answer's state is that of a token later": (
        Generation, "_keep_boundaries", _boundary_a_token_late,
    ),
    "a boundary's state is that of the answer's end": (generation, "replace", _rows_that_went_on),
    "the padding of a row is kept with it": (SequenceMemory, "row", _padding_kept),
    "all rows of a batch keep the first one's state": (SequenceMemory, "row", _first_row_for_all),
    "of several captured windows the later are shifted": (
        capture, "_conv_tap", _shifted_windows,
    ),
    "several captured states are in the wrong order": (
        capture, "_recurrent_tap", _swapped_pieces,
    ),
    "a restored sliding window counts a token too few": (CacheFiller, "fill", _window_too_short),
    "states of evicted blocks are kept": (
        SlotPool, "on_kv_blocks_deregistered", _states_of_evicted_blocks,
    ),
    "a call that broke off gives nothing back": (PrefixStore, "let_go", _nothing_given_back),
    "salts are not looked at": (PrefixStore, "open", _no_salts),
    "adapters are not looked at": (fingerprint.ModelFingerprint, "_current_key", _one_key),
    "weights are not looked at": (fingerprint._Weights, "begin", _weights_unseen),
    "a random number is used up": (Generation, "first_forward", _random_numbers_used),
}  # fmt: skip

FAULTS = tuple(_FAULTS)


def broken(fault: str) -> AbstractContextManager[Any]:
    """Makes all prefix caches wrong for as long as it is entered."""
    owner, name, make = _FAULTS[fault]
    return mock.patch.object(owner, name, make(getattr(owner, name)))
