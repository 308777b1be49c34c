"""Forks: requests that go on from where another stands, and the copies that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mamba_cache._checks import as_items
from mamba_cache._guard import CallGuard, outside
from mamba_cache.context.request_table import Int64Array, RequestTable
from mamba_cache.context.requests import ActiveRequest, RequestPreparer, RequestStatus
from mamba_cache.context.speculation import Speculation
from mamba_cache.errors import InvalidArgumentError, StepOrderError
from mamba_cache.states import StateCopier, StatePool

__all__ = ["Forker", "Forks"]


@dataclass(frozen=True, slots=True)
class Forks:
    """What ``fork`` has made, for embedders with tensors of their own by request row or KV block.

    Attributes:
        request_ids: The new requests.
        source_row: The row of the request that was forked.
        rows: The rows of the new ones.
        source_block: The KV block that the forked request has filled in part; None if it stands at
            a block boundary.
        blocks: A KV block for each of the new requests, which holds what that one does; none if it
            stands at a block boundary.
    """

    request_ids: tuple[Hashable, ...]
    source_row: int
    rows: tuple[int, ...]
    source_block: int | None
    blocks: tuple[int, ...]


class Forker:
    """Makes requests that go on from where another stands.

    Full KV blocks are shared. The unfinished one is copied in one launch for all forks and all
    attention layers, the live state in another one for all recurrent layers.
    """

    def __init__(
        self,
        requests: RequestTable,
        *,
        guard: CallGuard,
        live_states: StatePool,
        kv_cache: torch.Tensor | None,
        preparer: RequestPreparer,
        speculation: Speculation | None,
        counters: Counter[str],
    ) -> None:
        self._guard = guard
        self._counters = counters
        self._states = list(live_states.tensors.values())
        self._kv_cache = kv_cache
        self._requests = requests
        self._preparer = preparer
        self._speculation = speculation
        self._copiers: tuple[StateCopier, StateCopier | None] | None = None

    def fork(
        self, active: ActiveRequest, new_ids: Iterable[Hashable], last_tokens: object
    ) -> Forks:
        """Make requests that stand where one that decodes does; all of them, or none."""
        ids = self._read_ids(new_ids)
        table, row = self._requests, active.row
        computed = table.num_computed.item(row)
        if table.num_in_doubt[row] or table.num_tokens.item(row) == computed:
            raise StepOrderError(
                f"the device alone knows the last tokens of request {active.request_id!r}: "
                "collect_step brings them, then it can be forked"
            )
        tokens = self._read_tokens(active, last_tokens, len(ids))
        table.check_forks_fit(len(ids))
        if not ids:
            return Forks((), row, (), None, ())
        copiers = self._make_copiers()
        self._guard.is_changing = True
        rows, blocks = table.fork(row, tokens, ids)
        forks: list[ActiveRequest] = []
        try:
            chain = table.computed_chain(active)
            for request_id, token, new_row in zip(ids, tokens.tolist(), rows, strict=True):
                fork = active.fork(request_id, token, chain)
                fork.row = new_row
                fork.num_shared_blocks = computed // table.block_size_tokens
                forks.append(fork)
            source_block = None
            if blocks:
                source_block = table.block_tables.item(row, computed // table.block_size_tokens)
            made = Forks(tuple(ids), row, tuple(rows), source_block, tuple(blocks))
            with outside:
                self._copy(copiers, made, tokens)
            for fork in forks:
                table.set_status(fork, RequestStatus.DECODING)
            table.add_all(forks)
        except BaseException:
            for fork in forks:
                table.set_status(fork, RequestStatus.PREEMPTED)
            for new_row in reversed(rows):
                table.give_back(new_row)
            raise
        self._counters["forks"] += len(forks)
        return made

    def _copy(
        self, copiers: tuple[StateCopier, StateCopier | None], made: Forks, tokens: Int64Array
    ) -> None:
        """Enqueue the copies of the live state and of the unfinished block."""
        copy_states, copy_kv = copiers
        row, rows = made.source_row, list(made.rows)
        if self._speculation is None:
            copy_states.copy([row] * len(rows), rows)
        else:
            copy_states.copy(*self._speculation.fork(row, rows, tokens))
        if copy_kv is not None and made.source_block is not None:
            copy_kv.copy([made.source_block] * len(rows), list(made.blocks))

    def _read_ids(self, new_ids: Any) -> list[Hashable]:
        """Return ids that new requests can have."""
        if isinstance(new_ids, (str, bytes)):  # whose items are characters
            raise InvalidArgumentError(f"new_ids must be several ids, got one: {new_ids!r}")
        ids: list[Hashable] = as_items("new_ids", new_ids, "request ids")
        for request_id in ids:
            self._requests.check_new(request_id)
        if len(set(ids)) < len(ids):
            raise InvalidArgumentError(f"new_ids must be different, got {ids}")
        return ids

    def _read_tokens(self, active: ActiveRequest, last_tokens: Any, count: int) -> Int64Array:
        """Return the token that each fork computes next."""
        if last_tokens is None:
            return np.full(count, self._requests.last_tokens.item(active.row), dtype=np.int64)
        tokens = self._preparer.read_tokens(last_tokens)
        if len(tokens) != count:
            raise InvalidArgumentError(
                f"last_tokens must be one token for each of the {count} new ids, got {len(tokens)}"
            )
        return tokens.astype(np.int64)

    def _make_copiers(self) -> tuple[StateCopier, StateCopier | None]:
        """Make what copies live states, and KV blocks, when they are first needed."""
        if self._copiers is None:
            kv_cache = self._kv_cache
            self._copiers = (
                _copier_within(self._states),
                None if kv_cache is None else _copier_within([kv_cache.flatten(0, 1)]),
            )
        return self._copiers


def _copier_within(tensors: list[torch.Tensor]) -> StateCopier:
    return StateCopier(tensors, tensors)
