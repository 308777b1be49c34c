"""The most that any cache could have skipped of a trace, had it known the whole of it.

A linear program. What is kept between two requests that pass the same boundary takes room at each
request in between, and a request skips at most the tokens before one boundary whose state, and the
KV blocks before it, were kept. A part of a state may be kept here, so no policy, no placement and
no look ahead comes above what it finds. States and blocks in tiers count like those of the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mamba_cache._checks import check_int
from mamba_cache._extras import install_hint
from mamba_cache.cli.traces import TraceRequest
from mamba_cache.errors import MissingExtraError

__all__ = ["bound_of"]

_Int64Array = npt.NDArray[np.int64]
_Entries = tuple[_Int64Array, _Int64Array, npt.NDArray[np.float64]]
"""Rows, columns and factors of a sparse matrix."""

_SECONDS = 600.0


class _Passings(NamedTuple):
    """Requests that pass a boundary which matters: at which others part, or a prompt ends."""

    requests: _Int64Array  # which request passes, ascending; of one request from its start on
    spans: _Int64Array  # blocks from the boundary before it on the same path to this one
    before: _Int64Array  # which passing was the last one of the same boundary; -1: none
    deeper: _Int64Array  # which passing is the next one of the same request; -1: none
    is_usable: npt.NDArray[np.bool_]  # whether the request could resume there


def bound_of(
    requests: Sequence[TraceRequest],
    num_states: int | None,
    *,
    num_blocks: int | None = None,
    seconds: float = _SECONDS,
) -> tuple[float, bool]:
    """Return the share of prompt tokens that need not be computed, and whether it was solved.

    Args:
        requests: The trace, in order; all of one block size.
        num_states: States that there is room for, on the GPU and in tiers together; None: any.
        num_blocks: KV blocks that there is room for, likewise.
        seconds: How long the solver may take. If it takes longer, the share is that of unlimited
            memory.

    Raises:
        InvalidArgumentError: A number is out of range.
        MissingExtraError: scipy is not installed.
    """
    for name, number in (("num_states", num_states), ("num_blocks", num_blocks)):
        if number is not None:
            check_int(name, number, minimum=0)
    try:
        import scipy.optimize  # noqa: PLC0415 - an optional extra
        import scipy.sparse  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            f"a bound needs scipy, which solves linear programs: {install_hint('bound')}"
        ) from error
    passings = _find_passings(requests)
    blocks = _solve(scipy, passings, len(requests), (num_states, num_blocks), seconds)
    is_solved = blocks is not None
    if blocks is None:
        blocks = _solve(scipy, passings, len(requests), (None, None), _SECONDS) or 0.0
    total = sum(request.input_length for request in requests)
    return blocks * requests[0].block_size / total, is_solved


def _find_passings(requests: Sequence[TraceRequest]) -> _Passings:
    # The boundaries of all prompts are a tree: of each its depth, and its children by name. A
    # tenant is the name of a block of no tokens, as it were, before all others.
    depths, num_children, num_passings, is_end = [0], [0], [0], [False]
    children: dict[tuple[int, object], int] = {}
    paths = []
    for request in requests:
        path, node = [], 0
        for depth, name in enumerate(((request.tenant,), *request.whole_ids)):
            child = children.setdefault((node, name), len(depths))
            if child == len(depths):
                num_children[node] += 1
                depths.append(depth)
                num_children.append(0)
                num_passings.append(0)
                is_end.append(False)
            node = child
            path.append(node)
        path = path[1:]
        for node in path:
            num_passings[node] += 1
        for end in {len(path), _usable_blocks(request)} - {0}:
            is_end[path[end - 1]] = True
        paths.append(path)

    columns: list[tuple[int, int, int, bool]] = []
    last: dict[int, int] = {}
    for number, (request, path) in enumerate(zip(requests, paths, strict=True)):
        usable, above = _usable_blocks(request), 0
        for node in path:
            if num_passings[node] > 1 and (is_end[node] or num_children[node] > 1):
                depth = depths[node]
                columns.append((number, depth - above, last.get(node, -1), depth <= usable))
                last[node], above = len(columns) - 1, depth
    of, spans, before, is_usable = np.array(columns, np.int64).reshape(-1, 4).T
    deeper = np.arange(1, len(of) + 1)
    deeper[of != np.append(of[1:], -1)] = -1
    return _Passings(of, spans, before, deeper, is_usable.astype(np.bool_))


def _usable_blocks(request: TraceRequest) -> int:
    """Return the blocks that can be skipped: a token at least is computed."""
    return (request.input_length - 1) // request.block_size


def _solve(
    scipy: Any,
    passings: _Passings,
    num_requests: int,
    rooms: tuple[int | None, int | None],
    seconds: float,
) -> float | None:
    """Return the blocks that are skipped; None if that takes too long.

    The unknowns, each from 0 to 1 but for the last two: of each passing, what is kept of the state
    from the passing before to this one (x), what is kept of the KV blocks up to the boundary above
    (z), and how much of the request skips these blocks (w); then, after each request, how many
    states and blocks are kept.
    """
    count = len(passings.spans)
    if not count:
        return 0.0
    width = 3 * count + 2 * num_requests
    gains = np.zeros(width)
    gains[2 * count : 3 * count] = passings.spans
    most = np.ones(width)
    most[: 3 * count][np.tile(passings.before < 0, 3)] = 0  # nothing is kept for those first
    for part, room in enumerate(rooms):
        first = 3 * count + part * num_requests
        most[first : first + num_requests] = np.inf if room is None else room

    def matrix(entries: Iterator[_Entries], height: int) -> Any:
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        rows, columns, factors = map(np.concatenate, zip(nothing, *entries, strict=True))
        return scipy.sparse.coo_matrix((factors, (rows, columns)), (height, width)).tocsr()

    found = scipy.optimize.linprog(
        -gains,
        A_ub=matrix(_uses(passings, rooms[1] is not None), 3 * count),
        b_ub=np.zeros(3 * count),
        A_eq=matrix(_rooms_taken(passings, num_requests, rooms), 2 * num_requests),
        b_eq=np.zeros(2 * num_requests),
        bounds=np.stack((np.zeros(width), most), 1),
        method="highs-ds",
        options={"time_limit": seconds},
    )
    return None if found.x is None or found.status else float(-found.fun)


def _uses(passings: _Passings, has_block_limit: bool) -> Iterator[_Entries]:
    """Yield entries of the matrix whose rows are sums of at most 0."""
    count = len(passings.spans)
    each, ones = np.arange(count), np.ones(count)
    x, z, w = each, count + each, 2 * count + each
    has_deeper = passings.deeper >= 0
    own, deeper = each[has_deeper], 2 * count + passings.deeper[has_deeper]
    # Whoever skips a block skips those before it: w[deeper] <= w, and w <= z.
    yield own, deeper, ones[has_deeper]
    yield own, w[has_deeper], -ones[has_deeper]
    if has_block_limit:
        yield count + each, w, ones
        yield count + each, z, -ones
    # Whoever skips no more than this resumes here: w - w[deeper] <= x, or 0.
    yield 2 * count + each, w, ones
    yield 2 * count + own, deeper, -ones[has_deeper]
    usable = each[passings.is_usable]
    yield 2 * count + usable, x[usable], -ones[usable]


def _rooms_taken(
    passings: _Passings, num_requests: int, rooms: tuple[int | None, int | None]
) -> Iterator[_Entries]:
    """Yield the same of sums that are 0: what is kept after each request, less before it."""
    count = len(passings.spans)
    kept = (passings.before >= 0).nonzero()[0]
    begins, ends = passings.requests[passings.before[kept]], passings.requests[kept]
    each = np.arange(num_requests)
    for part, sizes in enumerate((np.ones(count), passings.spans.astype(np.float64))):
        if rooms[part] is None:
            continue
        row, room = part * num_requests, 3 * count + part * num_requests
        yield row + each, room + each, np.ones(num_requests)
        yield row + each[1:], room + each[:-1], -np.ones(num_requests - 1)
        yield row + begins, part * count + kept, -sizes[kept]
        yield row + ends, part * count + kept, sizes[kept]
