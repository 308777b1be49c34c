"""The tensors of saved prefixes: states in slots, keys and values in blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from mamba_cache.integrations.transformers.layers import LayerParts, SequenceMemory
from mamba_cache.states import StatePool, StateSpec, StateTensorSpec

__all__ = ["PrefixLayout", "PrefixTensors"]


class PrefixLayout:
    """What a slot and a KV block of one model are made of.

    A slot holds the conv and recurrent states and, because they too have one size at any position,
    the windows of sliding-window layers. A block holds keys and values of all other layers.

    Args:
        layers: What each layer of the model's cache keeps.
        sample: What such a cache held of some sequence, one row.
        block_size_tokens: Tokens of one block.

    Attributes:
        layers: As given.
        block_size_tokens: As given.
        slot_spec: The tensors of one slot: the states, then the windows.
        block_spec: The tensors of one block, [block_size_tokens, heads, head_dim] each; None if
            the model has no layer that keeps all tokens.
        device: Where the sample was.
        initial: What a cache holds before the first token: one row.
    """

    def __init__(
        self, layers: tuple[LayerParts, ...], sample: SequenceMemory, block_size_tokens: int
    ) -> None:
        self.layers = layers
        self.block_size_tokens = block_size_tokens
        self._widths = [
            parts.window for parts in layers if parts.window for _ in ("keys", "values")
        ]
        windows = [
            window.new_empty(1, window.shape[1], width, window.shape[3])
            for window, width in zip(sample.windows, self._widths, strict=True)
        ]
        blocks = [
            tokens.new_empty(1, block_size_tokens, tokens.shape[1], tokens.shape[3])
            for tokens in sample.tokens
        ]
        self.slot_spec = _spec_of([*sample.states, *windows])
        self.block_spec = _spec_of(blocks) if blocks else None
        self.device = sample.states[0].device
        self.initial = SequenceMemory(
            0,
            [torch.zeros_like(state) for state in sample.states],
            [window[:, :, :0] for window in sample.windows],
            [tokens[:, :, :0].clone() for tokens in sample.tokens],
        )

    @property
    def has_attention(self) -> bool:
        """Whether any layer keeps keys and values."""
        return any(parts.has_tokens or parts.window for parts in self.layers)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot."""
        return self.slot_spec.bytes_per_slot

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block."""
        return self.block_spec.bytes_per_slot if self.block_spec else 0

    def pad_windows(self, memory: SequenceMemory) -> list[torch.Tensor]:
        """Returns a sequence's windows, widened to their full size with zeros at the end."""
        return [
            functional.pad(window, (0, 0, 0, width - window.shape[2]))
            for window, width in zip(memory.windows, self._widths, strict=True)
        ]

    def trim_windows(self, windows: Sequence[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
        """Undoes ``pad_windows``: returns what is filled once ``num_tokens`` tokens are in."""
        return [
            window[:, :, : min(num_tokens, width)]
            for window, width in zip(windows, self._widths, strict=True)
        ]


class PrefixTensors:
    """Room for saved states and for keys and values. Whose they are is for others to know.

    Args:
        layout: What a slot and a block are made of.
        num_slots: Slots.
        num_blocks: KV blocks.
    """

    def __init__(self, layout: PrefixLayout, *, num_slots: int, num_blocks: int) -> None:
        self._layout = layout
        self._slots = _rows(layout.slot_spec, num_slots, layout.device)
        self._blocks = _rows(layout.block_spec, num_blocks, layout.device)

    def clear(self) -> None:
        """Gives the memory back."""
        self._slots, self._blocks = [], []

    def save_state(self, slot: int, memory: SequenceMemory) -> None:
        """Copies the states and windows of a one-row ``memory`` into a slot."""
        live = [*memory.states, *self._layout.pad_windows(memory)]
        for saved, state in zip(self._slots, live, strict=True):
            saved[slot].copy_(state[0])

    def save_blocks(self, block_ids: Sequence[int], memory: SequenceMemory, start: int) -> None:
        """Copies keys and values into blocks.

        Args:
            block_ids: Where they go, consecutive blocks of the sequence.
            memory: A sequence, one row.
            start: Position of the first of the blocks.
        """
        size = self._layout.block_size_tokens
        ids = torch.tensor(block_ids, device=self._layout.device)
        for block, tokens in zip(self._blocks, memory.tokens, strict=True):
            part = tokens[0, :, start : start + len(block_ids) * size].transpose(0, 1)
            part = part.reshape(len(block_ids), *block.shape[1:]).to(block.dtype)
            block.index_copy_(0, ids, part)

    def load(self, slot: int, block_ids: Sequence[int]) -> SequenceMemory:
        """Returns the prefix that ends with the last of the blocks.

        Args:
            slot: Where its state is saved.
            block_ids: Its blocks, from the sequence's start.

        Returns:
            One row. States are views of the slot: copy them before it is written again.
        """
        num_tokens = len(block_ids) * self._layout.block_size_tokens
        num_states = len(self._layout.initial.states)
        saved = [tensor[slot : slot + 1] for tensor in self._slots]
        ids = torch.tensor(block_ids, device=self._layout.device)
        return SequenceMemory(
            num_tokens,
            saved[:num_states],
            self._layout.trim_windows(saved[num_states:], num_tokens),
            [
                block.index_select(0, ids).flatten(0, 1).transpose(0, 1)[None]
                for block in self._blocks
            ],
        )


def _spec_of(tensors: Sequence[torch.Tensor]) -> StateSpec:
    """Describes rows of tensors like these, whose first axis is not part of a row."""
    return StateSpec(
        tuple(
            StateTensorSpec(str(index), 1, tuple(tensor.shape[1:]), tensor.dtype)
            for index, tensor in enumerate(tensors)
        )
    )


def _rows(spec: StateSpec | None, num_rows: int, device: torch.device) -> list[torch.Tensor]:
    """Makes the tensors of a spec, [num_rows, *shape] each."""
    if spec is None:
        return []
    return [tensor[0] for tensor in StatePool(spec, num_rows, device=device).tensors.values()]
