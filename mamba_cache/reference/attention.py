"""Causal attention over a paged KV cache, with grouped queries and no positional encoding.

Source: Vaswani et al., 2017 (arXiv:1706.03762), equation 1; grouped queries: Ainslie et al., 2023
(arXiv:2305.13245). In a hybrid model the Mamba layers carry the order of the tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from mamba_cache.context import DynamicInferenceContext
from mamba_cache.reference.batch import PackedBatch
from mamba_cache.reference.model_config import HybridModelConfig, WeightMaker

__all__ = ["AttentionLayer", "attend"]


class AttentionLayer:
    """Writes this step's keys and values into the KV cache, then attends to each whole prefix.

    ``layer`` is the index among the attention layers: the first axis of the KV cache.
    """

    def __init__(self, config: HybridModelConfig, layer: int, weights: WeightMaker) -> None:
        self.config = config
        self.layer = layer
        heads, kv_heads, width = (
            config.num_attention_heads, config.num_kv_heads, config.attention_head_dim,
        )  # fmt: skip
        self.qkv_proj = weights.linear((heads + 2 * kv_heads) * width, config.hidden_size)
        self.out_proj = weights.linear(config.hidden_size, heads * width)

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, caches: DynamicInferenceContext
    ) -> Tensor:
        """Attend from every packed token, [num_tokens, hidden_size], to its prefix."""
        config, metadata = self.config, batch.metadata
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        projected = F.linear(hidden, self.qkv_proj)
        projected = torch.unflatten(projected, 1, (heads + 2 * kv_heads, -1))
        queries, keys, values = torch.split(projected, [heads, kv_heads, kv_heads], dim=1)
        assert caches.kv_cache is not None  # the model has checked its caches
        kv_cache = caches.kv_cache[self.layer]
        # As an index, PAD_SLOT_ID (-1) is the last place of the dummy block, which is never read.
        places = metadata.kv_slot_mapping[: metadata.num_tokens]
        kv_cache.flatten(1, 2)[:, places] = torch.stack([keys, values])

        tables = metadata.block_tables[: metadata.num_requests]
        tables = tables[:, : -(-metadata.max_seq_len // kv_cache.shape[2])].long()
        positions, outputs = metadata.positions[: metadata.num_tokens], []
        for chunks, tokens, requests in batch.parts:
            tiles, at = chunks.split(queries[tokens]), chunks.split(positions[tokens])
            blocks = tables[requests][chunks.sequences]
            # Decoded tokens together; prompts chunk by chunk, to save memory.
            count = len(tiles) if chunks is batch.decodes else 1
            pieces = zip(*(torch.split(each, count) for each in (tiles, blocks, at)), strict=True)
            attended = [attend(tile, kv_cache, table, place) for tile, table, place in pieces]
            outputs.append(chunks.join(torch.cat(attended)))
        return F.linear(torch.cat(outputs).flatten(1), self.out_proj)


def attend(queries: Tensor, kv_cache: Tensor, block_tables: Tensor, positions: Tensor) -> Tensor:
    """Attend from tiles of queries, each tile of one request, to keys up to each query's position.

    ``queries`` is [tiles, tile_size, heads, head_dim], ``block_tables`` [tiles, num_blocks] int64,
    and ``positions`` [tiles, tile_size] int64. The softmax is summed in at least float32.
    """
    tile_size, kv_heads = queries.shape[1], kv_cache.shape[3]
    keys, values = kv_cache[:, block_tables].flatten(2, 3)
    key_positions = torch.arange(keys.shape[1], device=keys.device)
    # Entries past a tile's last query are stale data of other requests: a NaN times a weight of
    # zero would still be NaN.
    unseen = key_positions > positions.amax(dim=1, keepdim=True)
    keys = keys.masked_fill(unseen[:, :, None, None], 0).transpose(1, 2)
    values = values.masked_fill(unseen[:, :, None, None], 0).transpose(1, 2)
    # Heads that share keys become further rows of the tile.
    rows = torch.unflatten(queries, 2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    visible = (key_positions <= positions[:, :, None])[:, None, None]
    visible = visible.expand(-1, -1, rows.shape[2], -1, -1).flatten(2, 3)
    attended = F.scaled_dot_product_attention(rows.flatten(2, 3), keys, values, attn_mask=visible)
    return torch.unflatten(attended, 2, (-1, tile_size)).permute(0, 3, 1, 2, 4).flatten(2, 3)
